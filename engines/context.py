"""One generation on a TensorRT engine: caches written in place, one stream, and the step recorded as a CUDA graph.

Every step of a pass goes one way: tokens to the GPU, the engine, then back the rows of logits that were asked for, or the
largest of each. A context has one execution context of TensorRT for each profile, all of them bound once to the same buffers; a
cache is bound under its past and its present name alike. The fixed step is recorded at its second run and launched as one from
then on.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runtime.draft_policy import MAX_NUM_DRAFT_TOKENS
from runtime.errors import DeviceError
from runtime.steps import cut_pass
from runtime.top_logits import TopLogits

from .cuda import CudaStream, DeviceMemory
from .profiles import Profile, choose_profile, input_shapes

if TYPE_CHECKING:
    from .backend import TensorRTModel


class TensorRTContext:
    """One generation's caches and buffers; see Context."""

    def __init__(self, model: "TensorRTModel", max_rows: int) -> None:
        """Allocates and binds everything; used by TensorRTModel."""
        spec, cuda = model.spec, model.cuda
        cuda.use()
        self._model = model
        self._spec = spec
        self._stream = cuda.create_stream()
        self._token_ids = cuda.allocate_pinned((max_rows,), np.int64)
        self._slots = cuda.allocate_pinned((max_rows,), np.int64)
        self._max_rows = max_rows
        self._slot_bytes = spec.head_size * spec.cache_itemsize
        self._head_bytes = model.record.capacity * self._slot_bytes
        pairs = list(spec.names.cache_pairs(spec.num_layers))
        self.caches = [cuda.allocate(spec.num_key_value_heads * self._head_bytes) for _ in pairs]
        for cache in self.caches:
            # Slots beyond the length weigh nothing, and nothing times the NaN of stray memory would still be NaN.
            self._stream.clear(cache)
        self._device_token_ids = cuda.allocate(self._token_ids.nbytes)
        self._device_past_length = cuda.allocate(self._slots.itemsize)
        self._device_logits = cuda.allocate(max_rows * spec.vocab_size * np.dtype(np.float32).itemsize)
        self._row_numbers = cuda.allocate_pinned((max_rows,), np.int64)
        self._row_numbers[:] = range(max_rows)
        self._device_logits_rows = cuda.allocate(self._row_numbers.nbytes)
        addresses = {
            spec.names.input_ids: self._device_token_ids,
            spec.names.past_length: self._device_past_length,
            spec.names.logits: self._device_logits,
        }
        if spec.names.logits_rows is not None:
            addresses[spec.names.logits_rows] = self._device_logits_rows
        for (past, present), cache in zip(pairs, self.caches, strict=True):
            addresses[past] = addresses[present] = cache
        self._executions = [
            _Execution(model, index, profile, self._stream, addresses) for index, profile in enumerate(model.record.profiles)
        ]
        self._chain_slots = cuda.allocate_pinned((MAX_NUM_DRAFT_TOKENS,), np.int64)
        host_rows = max(max_rows, MAX_NUM_DRAFT_TOKENS)
        self._tops = model.open_tops(self._device_logits, host_rows, self._stream)
        self._stream.synchronize()

    @property
    def max_top(self) -> int:
        """See TopLogitsContext."""
        return self._tops[-1].count if self._tops else 0

    def run(self, token_ids: NDArray[np.int64], past_length: int, num_rows: int) -> NDArray[np.float32]:
        """Runs one pass; see Context.run."""
        with self._queue(len(token_ids), past_length):
            self._enqueue_pass(token_ids, past_length, num_rows, self._copy_logits)
        if num_rows == 0:
            return np.empty((0, self._spec.vocab_size), np.float32)
        return self._logits[len(token_ids) - num_rows : len(token_ids)]

    def run_top(
        self, token_ids: NDArray[np.int64], past_length: int, num_rows: int, count: int, temperature: float
    ) -> TopLogits:
        """Runs one pass, and looks at its logits; see TopLogitsContext."""
        top = next(each for each in self._tops if each.count >= count)
        with self._queue(len(token_ids), past_length):
            top.set_temperature(temperature)
            self._enqueue_pass(token_ids, past_length, num_rows, top.enqueue)
        return top.found(len(token_ids) - num_rows, len(token_ids))

    def run_chain(self, token_ids: NDArray[np.int64], past_length: int, row: int, num_passes: int) -> TopLogits:
        """Queues all passes at once; see ChainContext. Equal logits stand in TensorRT's order."""
        top, step = self._tops[0], self._model.record.fixed_rows
        assert len(token_ids) - row <= step, "the row's padding is its step's"
        # A step's other slots hold what was fed there before: padding.
        self._chain_slots[:] = np.arange(past_length + row, past_length + row + len(self._chain_slots))
        with self._queue(len(token_ids), past_length):
            top.set_temperature(1.0)
            self._enqueue_pass(token_ids, past_length, len(token_ids) - row, lambda place, *_: top.enqueue(place, 0, 1))
            place = row - (len(token_ids) - step)
            for number in range(1, num_passes):
                top.feed(self._device_token_ids, place)
                self._stream.copy_to_device(self._device_past_length, self._chain_slots[number : number + 1])
                self._executions[0].enqueue(step, step)
                place = 0
                top.enqueue(place, number, number + 1)
        return top.found(0, num_passes)

    @contextmanager
    def _queue(self, rows: int, past_length: int) -> Iterator[None]:
        """Waits for all that is given to the stream inside, and turns what fails into one sentence."""
        self._model.cuda.use()
        try:
            yield
            self._stream.synchronize()
        except DeviceError as error:
            raise DeviceError(
                f"{self._model.engine} failed in a pass of {rows} rows behind {past_length} cached tokens: {error}"
            ) from error

    def _enqueue_pass(
        self, token_ids: NDArray[np.int64], past_length: int, num_rows: int, read: Callable[[int, int, int], None]
    ) -> None:
        """Gives a pass to the stream; `read` gives it what brings rows of a piece to the host.

        It is told where the first of them lies among the logits, and which of the pass they are: the first, and one behind the
        last.
        """
        rows = len(token_ids)
        self._token_ids[:rows] = token_ids
        self._slots[:rows] = range(past_length, past_length + rows)
        for begin, end in cut_pass(rows, num_rows, self._model.record.fixed_rows):
            first = max(begin, rows - num_rows)
            logits_begin = self._enqueue(begin, end, first)
            if first < end:
                read(first - logits_begin, first, end)

    @cached_property
    def _logits(self) -> NDArray[np.float32]:
        """Whole rows in host memory, which a text of the largest logits never asks for."""
        return self._model.cuda.allocate_pinned((self._max_rows, self._spec.vocab_size), np.float32)

    def _copy_logits(self, row: int, first: int, end: int) -> None:
        self._stream.copy_to_host(self._logits[first:end], self._device_logits, row * self._logits.strides[0])

    def _enqueue(self, begin: int, end: int, first: int) -> int:
        """Gives a piece of a pass to the stream; `first` is the first of its rows whose logits are wanted, or beyond its end.

        All pieces use the same memory on the GPU, one behind the other.

        Returns:
            The first row that gets logits.
        """
        rows = end - begin
        index = choose_profile(self._model.record.profiles, rows)
        logits_begin = begin
        if self._spec.names.logits_rows is not None and not self._model.record.profiles[index].is_fixed:
            logits_begin = min(first, end - 1)
        self._stream.copy_to_device(self._device_token_ids, self._token_ids[begin:end])
        self._stream.copy_to_device(self._device_past_length, self._slots[begin : begin + 1])
        self._stream.copy_to_device(self._device_logits_rows, self._row_numbers[logits_begin - begin : rows])
        self._executions[index].enqueue(rows, end - logits_begin)
        return logits_begin

    def copy_from(self, source: "TensorRTContext", length: int) -> None:
        """Copies cached tokens on the GPU; see Context.copy_from."""
        if length == 0:
            return
        self._model.cuda.use()
        for mine, theirs in zip(self.caches, source.caches, strict=True):
            self._stream.copy_rows(
                mine, theirs, rows=self._spec.num_key_value_heads, pitch=self._head_bytes, width=length * self._slot_bytes
            )
        self._stream.synchronize()


class _Execution:
    """TensorRT's execution context on one profile, bound to a context's buffers."""

    def __init__(
        self, model: "TensorRTModel", index: int, profile: Profile, stream: CudaStream, addresses: dict[str, DeviceMemory]
    ) -> None:
        self._model = model
        self._stream = stream
        self._execution = model.create_execution_context(index, stream)
        self._rows = self._logits_rows = 0
        self._graph: Any = None
        # TensorRT-RTX records for itself.
        self._record = profile.is_fixed and not model.tensorrt.is_rtx
        for name, memory in addresses.items():
            if not self._execution.set_tensor_address(name, memory.address):
                raise model.failure()

    def enqueue(self, rows: int, logits_rows: int) -> None:
        """Gives a pass of so many rows to the stream, of which so many get logits."""
        if self._graph is not None:
            self._graph.launch()
            return
        if (rows, logits_rows) != (self._rows, self._logits_rows):
            self._set_shapes(rows, logits_rows)
        elif self._record:
            # The first pass after new shapes does work that cannot be recorded; this is the second.
            self._record = False
            try:
                self._graph = self._stream.capture(self._enqueue)
            except DeviceError as error:
                warnings.warn(
                    f"{self._model.engine} cannot record its steps as a CUDA graph ({error}): they are enqueued one by one, "
                    "which is slower.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            else:
                self._graph.launch()
                return
        self._enqueue()

    def _set_shapes(self, rows: int, logits_rows: int) -> None:
        for name, shape in input_shapes(self._model.spec, rows, logits_rows).items():
            if not self._execution.set_input_shape(name, shape):
                raise self._model.failure()
        self._rows, self._logits_rows = rows, logits_rows

    def _enqueue(self) -> None:
        if not self._execution.execute_async_v3(self._stream.handle):
            raise self._model.failure()
