"""TensorRT as a backend of the runtime: engines that were built before, and contexts whose caches are written in place.

Every step of a pass goes one way on one stream: tokens to the GPU, the engine, the rows of logits that were asked for back. A
context has one execution context of TensorRT for each profile, all of them bound once to the same buffers; a cache is bound
under its past and its present name alike. The fixed step is recorded at its second run and launched as one from then on.
"""

import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.backend import device_number
from runtime.contract import DecoderSpec
from runtime.cuda_driver import checked_gpu, probe_cuda_driver
from runtime.errors import BundleError, DeviceError

from .cuda import CudaDevice, CudaStream, DeviceMemory
from .profiles import Profile, check_lowering, choose_profile, cut_pass, in_steps, input_shapes
from .sidecar import ENGINES, EngineRecord, engine_path, engines_folder, rebuild_command
from .trt_module import TensorRTModule, format_capability, last_error


class TensorRTBackend:
    """Loads decoders from a bundle's engines."""

    def __init__(self, device: str) -> None:
        """Finds the GPU, and only then TensorRT.

        Args:
            device: "tensorrt" or "tensorrt-rtx", with ":" and a GPU's number where it is not the first.

        Raises:
            DeviceError: No driver, no such GPU, or a package that is missing.
        """
        number = device_number(device)
        self.gpu = checked_gpu(device, number, probe_cuda_driver())
        self.tensorrt = TensorRTModule.load(device.partition(":")[0].replace("-", "_"))
        self.cuda = CudaDevice(number)

    def load(self, spec: DecoderSpec, folder: Path) -> "TensorRTModel":
        """Loads a decoder's engine; see Backend.load."""
        check_lowering(spec, self.tensorrt.lowerings, self.tensorrt.title)
        command = rebuild_command(folder, self.tensorrt)
        capability = self.gpu.compute_capability
        engine_folder = engines_folder(folder, self.tensorrt, capability)
        if not engine_folder.is_dir():
            there = ", ".join(sorted(path.name for path in (folder / ENGINES).glob("*-sm*"))) or "none at all"
            raise BundleError(
                f"{folder} has no engines of {self.tensorrt.title} for compute capability {format_capability(capability)} "
                f"(there are: {there}): build them on this machine, {command}"
            )
        path = engine_path(engine_folder, spec)
        record = EngineRecord.load(path, command)
        record.check(path, spec, self.tensorrt, capability, command)
        return TensorRTModel(self, spec, path, record, command)


class TensorRTModel:
    """A decoder in a TensorRT engine; see Model."""

    def __init__(self, backend: TensorRTBackend, spec: DecoderSpec, path: Path, record: EngineRecord, command: str) -> None:
        """Puts a checked engine onto the GPU; used by TensorRTBackend."""
        self.spec = in_steps(spec, record.fixed_rows)
        self.engine = f"{backend.tensorrt.title}, {backend.gpu.name}"
        self.description = f"{self.engine}, steps of {record.fixed_rows} rows, passes of up to {record.max_rows}"
        self.record = record
        self.cuda = backend.cuda
        self.tensorrt = backend.tensorrt
        self._path, self._command = path, command
        self._lock = threading.Lock()
        self.cuda.use()
        self._logger = self.tensorrt.create_logger()
        self._runtime = self.tensorrt.trt.Runtime(self._logger)
        engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            raise BundleError(f"{self.tensorrt.title} cannot load {path} ({last_error(self._logger.errors)}): {command}")
        self._engine = engine
        self._check_logits()

    def open_context(self, capacity: int, max_rows: int) -> "TensorRTContext":
        """Allocates caches and binds them; see Model.open_context."""
        if capacity > self.record.capacity:
            raise BundleError(
                f"The engine {self._path} has caches of {self.record.capacity} slots, and {capacity} are needed: export the "
                "bundle for longer texts (--max-length), and build its engines again."
            )
        max_rows = min(max_rows, self.spec.rows_of_pass(self.spec.context_length))  # no pass is longer
        self.record.check_rows(max_rows, self._path, self._command)
        try:
            with self._lock:
                return TensorRTContext(self, max_rows)
        except DeviceError as error:
            size = self.spec.context_bytes(self.record.capacity, max_rows)
            raise DeviceError(
                f"A cache of {self.record.capacity} tokens, {max_rows} rows of logits ({size / 1e9:.2f} GB) and TensorRT's own "
                f"memory could not be taken on {self.engine} ({error}): close other generations, or export the bundle for "
                "shorter texts (--max-length)."
            ) from error

    def create_execution_context(self, profile: int, stream: CudaStream) -> Any:
        """Returns an execution context on a profile."""
        execution = self.tensorrt.create_execution_context(self._engine)
        if execution is None or not execution.set_optimization_profile_async(profile, stream.handle):
            raise DeviceError(last_error(self._logger.errors))
        return execution

    def failure(self) -> DeviceError:
        """Returns what TensorRT logged last, as an error."""
        return DeviceError(last_error(self._logger.errors))

    def _check_logits(self) -> None:
        found = self._engine.get_tensor_dtype(self.spec.names.logits)
        if found != self.tensorrt.trt.float32:
            raise BundleError(
                f"The engine {self._path} gives logits of {found}, and float32 is expected: export the bundle again."
            )


class TensorRTContext:
    """One generation's caches and buffers; see Context."""

    def __init__(self, model: TensorRTModel, max_rows: int) -> None:
        """Allocates and binds everything; used by TensorRTModel."""
        spec, cuda = model.spec, model.cuda
        cuda.use()
        self._model = model
        self._spec = spec
        self._stream = cuda.create_stream()
        self._token_ids = cuda.allocate_pinned((max_rows,), np.int64)
        self._slots = cuda.allocate_pinned((max_rows,), np.int64)
        self._logits = cuda.allocate_pinned((max_rows, spec.vocab_size), np.float32)
        itemsize = np.dtype(spec.cache_dtype).itemsize
        self._slot_bytes = spec.head_size * itemsize
        self._head_bytes = model.record.capacity * self._slot_bytes
        pairs = list(spec.names.cache_pairs(spec.num_layers))
        self.caches = [cuda.allocate(spec.num_key_value_heads * self._head_bytes) for _ in pairs]
        for cache in self.caches:
            # Slots beyond the length weigh nothing, and nothing times the NaN of stray memory would still be NaN.
            self._stream.clear(cache)
        self._device_token_ids = cuda.allocate(self._token_ids.nbytes)
        self._device_past_length = cuda.allocate(self._slots.itemsize)
        self._device_logits = cuda.allocate(self._logits.nbytes)
        addresses = {
            spec.names.input_ids: self._device_token_ids,
            spec.names.past_length: self._device_past_length,
            spec.names.logits: self._device_logits,
        }
        for (past, present), cache in zip(pairs, self.caches, strict=True):
            addresses[past] = addresses[present] = cache
        self._executions = [
            _Execution(model, index, profile, self._stream, addresses) for index, profile in enumerate(model.record.profiles)
        ]
        self._stream.synchronize()

    def run(self, token_ids: NDArray[np.int64], past_length: int, num_rows: int) -> NDArray[np.float32]:
        """Runs one pass; see Context.run."""
        rows = len(token_ids)
        self._model.cuda.use()
        self._token_ids[:rows] = token_ids
        self._slots[:rows] = range(past_length, past_length + rows)
        first = rows - num_rows
        try:
            for begin, end in cut_pass(rows, num_rows, self._model.record.fixed_rows):
                self._enqueue(begin, end, max(begin, first))
            self._stream.synchronize()
        except DeviceError as error:
            raise DeviceError(
                f"{self._model.engine} failed in a pass of {rows} rows behind {past_length} cached tokens: {error}"
            ) from error
        return self._logits[first:rows]

    def _enqueue(self, begin: int, end: int, first: int) -> None:
        """Gives a piece of a pass to the stream; `first` is the first of its rows whose logits are wanted, or beyond its end.

        All pieces use the same memory on the GPU, one behind the other.
        """
        rows = end - begin
        self._stream.copy_to_device(self._device_token_ids, self._token_ids[begin:end])
        self._stream.copy_to_device(self._device_past_length, self._slots[begin : begin + 1])
        self._executions[choose_profile(self._model.record.profiles, rows)].enqueue(rows)
        if first < end:
            row_bytes = self._logits.strides[0]
            self._stream.copy_to_host(self._logits[first:end], self._device_logits, (first - begin) * row_bytes)

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
        self, model: TensorRTModel, index: int, profile: Profile, stream: CudaStream, addresses: dict[str, DeviceMemory]
    ) -> None:
        self._model = model
        self._stream = stream
        self._execution = model.create_execution_context(index, stream)
        self._rows = 0
        self._graph: Any = None
        # TensorRT-RTX records for itself.
        self._record = profile.is_fixed and not model.tensorrt.is_rtx
        for name, memory in addresses.items():
            if not self._execution.set_tensor_address(name, memory.address):
                raise model.failure()

    def enqueue(self, rows: int) -> None:
        """Gives a pass of so many rows to the stream."""
        if self._graph is not None:
            self._graph.launch()
            return
        if rows != self._rows:
            self._set_shapes(rows)
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

    def _set_shapes(self, rows: int) -> None:
        for name, shape in input_shapes(self._model.spec, rows).items():
            if not self._execution.set_input_shape(name, shape):
                raise self._model.failure()
        self._rows = rows

    def _enqueue(self) -> None:
        if not self._execution.execute_async_v3(self._stream.handle):
            raise self._model.failure()
