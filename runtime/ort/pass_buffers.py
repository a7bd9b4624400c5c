"""What a pass reads and gives beside the caches, in host memory: token ids, mask, positions, logits; bound by address.

Graphs differ in which of these inputs they have, and in float32 or float16 logits. Who owns the caches need not know.
"""

from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from runtime.contract import DecoderSpec
from runtime.errors import DeviceError, first_line

_LOGITS_TYPES: dict[str, type[np.floating]] = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
_MASKS_AT_ONCE = 32  # behind a pass the processor's caches are cold, and making one takes as long as making ten


def logits_type(session: ort.InferenceSession, name: str) -> type[np.floating]:
    """Returns the element type of a graph's logits."""
    return _LOGITS_TYPES[next(value.type for value in session.get_outputs() if value.name == name)]


class PassBuffers:
    """The small inputs of a pass, and its rows of logits."""

    def __init__(self, spec: DecoderSpec, session: ort.InferenceSession, capacity: int, max_rows: int) -> None:
        """Allocates inputs for `capacity` tokens, and `max_rows` rows of logits in the graph's own element type."""
        self._names = spec.names
        self._session = session
        self.binding = session.io_binding()
        self._token_ids = np.zeros(max_rows, np.int64)
        self._ones = np.ones((1, capacity), np.int64)
        self._masks: dict[int, ort.OrtValue] = {}  # by length, of those around the last one; all of them the memory of `_ones`
        self._past_length = np.zeros(1, np.int64)
        self._positions = np.arange(max(capacity, max_rows), dtype=np.int64)
        self._is_cached = np.zeros(1, np.bool_)
        self._kept_rows = np.zeros(1, np.int64)
        self._logits = np.empty((max_rows, spec.vocab_size), logits_type(session, spec.names.logits))
        self._bound: dict[str, tuple[NDArray[Any], int, tuple[int, ...]]] = {}

    def run(self, token_ids: NDArray[np.int64], past_length: int, num_rows: int) -> NDArray[np.float32]:
        """Runs the session once, with the caches as they were bound; see Context.run."""
        rows = len(token_ids)
        kept = self._bind(token_ids, past_length, num_rows)
        try:
            self._session.run_with_iobinding(self.binding)
        except Exception as error:  # ONNX Runtime raises many classes, none of them public
            raise DeviceError(
                f"ONNX Runtime failed in a pass of {rows} rows behind {past_length} cached tokens: {first_line(error)}"
            ) from error
        return self._logits[kept - num_rows : kept].astype(np.float32, copy=False)

    def bind_input(self, name: str, array: NDArray[Any], shape: tuple[int, ...], first: int = 0) -> None:
        """Binds an array's memory, from the element at `first` on, as an input of some shape."""
        if self._changes(name, array, shape, first):
            address = array.ctypes.data + first * array.itemsize
            self.binding.bind_input(name, "cpu", 0, array.dtype.type, shape, address)

    def bind_output(self, name: str, array: NDArray[Any], shape: tuple[int, ...]) -> None:
        """Binds an array's memory, from its first element on, as an output of some shape."""
        if self._changes(name, array, shape):
            self.binding.bind_output(name, "cpu", 0, array.dtype.type, shape, array.ctypes.data)

    def _changes(self, name: str, array: NDArray[Any], shape: tuple[int, ...], first: int = 0) -> bool:
        """Whether a binding is another than the one there: each costs as much as the rest of a pass in Python."""
        bound = self._bound.get(name)
        if bound is not None and bound[0] is array and bound[1:] == (first, shape):
            return False
        self._bound[name] = (array, first, shape)
        return True

    def _bind_mask(self, name: str, length: int) -> None:
        """Binds so many ones, which is another input at every pass: made ahead, it costs half of what binding memory does."""
        if length not in self._masks:
            lengths = range(max(1, length - _MASKS_AT_ONCE), min(length + _MASKS_AT_ONCE, self._ones.shape[1] + 1))
            self._masks = {each: ort.OrtValue.ortvalue_from_numpy(self._ones[:, :each]) for each in lengths}
        self.binding.bind_ortvalue_input(name, self._masks[length])

    def _bind(self, token_ids: NDArray[np.int64], past_length: int, num_rows: int) -> int:
        """Binds all but the caches; returns how many rows of logits the pass gives, its last ones."""
        names, rows = self._names, len(token_ids)
        self._token_ids[:rows] = token_ids
        self.bind_input(names.input_ids, self._token_ids, (1, rows))
        if names.attention_mask is not None:
            self._bind_mask(names.attention_mask, past_length + rows)
        if names.past_length is not None:
            self._past_length[0] = past_length
            self.bind_input(names.past_length, self._past_length, (1,))
        if names.position_ids is not None:
            self.bind_input(names.position_ids, self._positions, (1, rows), past_length)
        if names.use_cache_branch is not None:
            self._is_cached[0] = past_length > 0
            self.bind_input(names.use_cache_branch, self._is_cached, (1,))
        kept = rows
        if names.num_logits_to_keep is not None:
            kept = max(1, num_rows)  # 0 would mean all of them
            self._kept_rows[0] = kept
            self.bind_input(names.num_logits_to_keep, self._kept_rows, ())
        elif names.logits_rows is not None:
            kept = max(1, num_rows)
            self.bind_input(names.logits_rows, self._positions, (kept,), rows - kept)
        self.bind_output(names.logits, self._logits, (1, kept, self._logits.shape[1]))
        return kept
