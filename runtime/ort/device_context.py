"""One generation's caches on an accelerator, for graphs that write them in place: ONNX Runtime's values in its memory.

Nothing but token ids goes to the device at a pass, and nothing but the rows of logits that are asked for comes back, or the
largest of each. Where the buffers lie is the only thing this knows of the device, so the same code runs, and is tested, with
buffers in host memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from runtime.contract import DecoderSpec
from runtime.errors import DeviceError, first_line
from runtime.top_logits import TopLogits

from .pass_buffers import logits_type
from .top_finder import TopFinder

GRAPH_ROWS = 32  # passes of more rows are bound by arithmetic, and launching their kernels one by one costs nothing
# A numpy type, or where numpy has none the number that ONNX gives it (TensorProto.DataType).
_Element = type[np.generic] | int
# How a bfloat16 cache is bound, and what its memory is made of.
_BFLOAT16: tuple[_Element, type[np.generic]] = (16, np.uint16)
_MAX_TOP = 256  # of so many logits, the copy is still a matter of microseconds
_NO_GRAPH = -1  # ONNX Runtime's own number for a run that is neither captured nor replayed


@dataclass(frozen=True)
class Memory:
    """Where buffers lie.

    Attributes:
        kind: "cuda", or "cpu" for host memory.
        number: Which of several devices.
    """

    kind: str
    number: int

    def place(self, array: NDArray[np.generic]) -> ort.OrtValue:
        """Returns a copy of an array there; in host memory the array itself."""
        return ort.OrtValue.ortvalue_from_numpy(array, self.kind, self.number)


class DeviceContext:
    """Caches, inputs and logits in a device's memory; see Context.

    Attributes:
        caches: Each [1, key_value_heads, capacity, head_size], past and present in one.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        session: ort.InferenceSession,
        capacity: int,
        max_rows: int,
        memory: Memory,
        graph_id: int | None = None,
        top_finder: TopFinder | None = None,
    ) -> None:
        """Allocates buffers of `capacity` tokens for each layer, and `max_rows` rows of logits.

        Args:
            spec: The decoder.
            session: Of its graph.
            capacity: Tokens the caches hold, spare slots included.
            max_rows: Rows of the largest pass.
            memory: Where the buffers lie.
            graph_id: Where CUDA graphs are used, the first of GRAPH_ROWS + 1 numbers that no other context has. A captured
                graph holds addresses and shapes, so each context and each number of rows up to GRAPH_ROWS has one of its
                own, all rows' logits are computed, and the attention mask is as long as the cache, its end zeros.
            top_finder: Looks at the logits there; None to bring whole rows always.
        """
        self.max_top = 0 if top_finder is None else _MAX_TOP
        self._top_finder = top_finder
        self._names = spec.names
        self._session = session
        self._memory = memory
        self._graph_id = graph_id
        slots = spec.cache_capacity or capacity
        self._mask_length = capacity - spec.spare_slots
        self._binding = session.io_binding()
        self._token_ids = np.zeros(max_rows, np.int64)  # the whole of it goes over: a few KB
        self._attention_mask = np.full(capacity, graph_id is None, np.int64)
        self._kept_rows = np.zeros(1, np.int64)  # stays in host memory, where shapes are computed
        self._vocab_size = spec.vocab_size
        self._device_token_ids = memory.place(self._token_ids.copy())
        self._device_attention_mask = memory.place(self._attention_mask.copy())
        self._device_past_length = memory.place(np.zeros(1, np.int64))
        self._device_row_numbers = memory.place(np.arange(max_rows))
        self._logits_element = logits_type(session, spec.names.logits)
        self._logits = memory.place(np.zeros((max_rows, spec.vocab_size), self._logits_element))
        shape = (1, spec.num_key_value_heads, slots, spec.head_size)
        element, stored = _BFLOAT16 if spec.cache_dtype == "bfloat16" else (np.dtype(spec.cache_dtype).type,) * 2
        self.caches = []
        for past_name, present_name in spec.names.cache_pairs(spec.num_layers):
            # Zeros, since what attention masks out is multiplied by zero, and what was in memory before may be NaN.
            cache = memory.place(np.zeros(shape, stored))
            self.caches.append(cache)
            self._bind_input(past_name, cache, element, shape)
            self._bind_output(present_name, cache, element, shape)

    def run(self, token_ids: NDArray[np.int64], past_length: int, num_rows: int) -> NDArray[np.float32]:
        """Runs the session once; see Context.run."""
        with _one_sentence(len(token_ids), past_length):
            kept = self._compute(token_ids, past_length, num_rows)
            if num_rows == 0:
                return np.empty((0, self._vocab_size), np.float32)
            # The value bound last, in this pass's shape: reading it brings over its rows, and not the whole buffer.
            logits: NDArray[np.floating] = self._binding.get_outputs()[len(self.caches)].numpy()
        return logits[0, kept - num_rows :].astype(np.float32, copy=False)

    def run_top(
        self, token_ids: NDArray[np.int64], past_length: int, num_rows: int, count: int, temperature: float
    ) -> TopLogits:
        """Runs the session once, and the other one on its logits; see TopLogitsContext."""
        assert self._top_finder is not None, "max_top tells"
        with _one_sentence(len(token_ids), past_length):
            kept = self._compute(token_ids, past_length, num_rows)
            address, first = self._logits.data_ptr(), kept - num_rows
            return self._top_finder.find(address, kept, self._vocab_size, first, count, temperature)

    def copy_from(self, source: "DeviceContext", length: int) -> None:
        """Copies cached tokens, by way of host memory; see Context.copy_from."""
        for mine, theirs in zip(self.caches, source.caches, strict=True):
            copy = mine.numpy()
            copy[:, :, :length] = theirs.numpy()[:, :, :length]
            mine.update_inplace(copy)

    def _compute(self, token_ids: NDArray[np.int64], past_length: int, num_rows: int) -> int:
        """Runs the session once; returns how many rows of logits it gave, the last ones."""
        self._send_inputs(token_ids, past_length)
        kept = self._keep_rows(len(token_ids), num_rows)
        self._bind_output(self._names.logits, self._logits, self._logits_element, (1, kept, self._vocab_size))
        self._session.run_with_iobinding(self._binding, self._run_options(len(token_ids)))
        return kept

    def _send_inputs(self, token_ids: NDArray[np.int64], past_length: int) -> None:
        names, rows = self._names, len(token_ids)
        self._token_ids[:rows] = token_ids
        self._device_token_ids.update_inplace(self._token_ids)
        self._bind_input(names.input_ids, self._device_token_ids, np.int64, (1, rows))
        if names.past_length is not None:
            self._device_past_length.update_inplace(np.array([past_length]))
            self._bind_input(names.past_length, self._device_past_length, np.int64, (1,))
        if names.attention_mask is not None:
            length = past_length + rows
            if self._graph_id is not None:
                self._attention_mask[:length], self._attention_mask[length:] = 1, 0
                self._device_attention_mask.update_inplace(self._attention_mask)
                length = self._mask_length
            self._bind_input(names.attention_mask, self._device_attention_mask, np.int64, (1, length))

    def _keep_rows(self, rows: int, num_rows: int) -> int:
        """Asks for the last rows of logits, as few as the graph lets one ask for; returns how many it will give."""
        counted, chosen = self._names.num_logits_to_keep, self._names.logits_rows
        if counted is None and chosen is None:
            return rows
        kept = rows if self._graph_id is not None and rows <= GRAPH_ROWS else max(1, num_rows)  # 0 would mean all
        if counted is not None:
            self._kept_rows[0] = kept
            self._binding.bind_input(counted, "cpu", 0, np.int64, (), self._kept_rows.ctypes.data)
        if chosen is not None:
            self._bind_input(chosen, self._device_row_numbers, np.int64, (kept,), first=rows - kept)
        return kept

    def _run_options(self, rows: int) -> ort.RunOptions | None:
        if self._graph_id is None:
            return None
        options = ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(self._graph_id + rows if rows <= GRAPH_ROWS else _NO_GRAPH))
        return options

    def _bind_input(self, name: str, value: ort.OrtValue, element: _Element, shape: tuple[int, ...], *, first: int = 0) -> None:
        """Binds a value's memory; of int64 numbers from the one at `first` on."""
        address = value.data_ptr() + 8 * first
        self._binding.bind_input(name, self._memory.kind, self._memory.number, element, shape, address)

    def _bind_output(self, name: str, value: ort.OrtValue, element: _Element, shape: tuple[int, ...]) -> None:
        self._binding.bind_output(name, self._memory.kind, self._memory.number, element, shape, value.data_ptr())


@contextmanager
def _one_sentence(rows: int, past_length: int) -> Iterator[None]:
    """Turns what ONNX Runtime raises in a pass into a DeviceError."""
    try:
        yield
    except Exception as error:  # ONNX Runtime raises many classes, none of them public
        raise DeviceError(
            f"ONNX Runtime failed in a pass of {rows} rows behind {past_length} cached tokens: {first_line(error)}"
        ) from error
