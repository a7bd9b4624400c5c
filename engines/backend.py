"""TensorRT as a backend of the runtime: engines that were built before, checked and put onto the GPU."""

import threading
from pathlib import Path
from typing import Any

from runtime.backend import device_number
from runtime.contract import DecoderSpec
from runtime.cuda_driver import checked_gpu, probe_cuda_driver
from runtime.errors import BundleError, DeviceError
from runtime.steps import in_steps
from runtime.top_logits import TOP_NOTE

from .context import TensorRTContext
from .cuda import CudaDevice, CudaStream, DeviceMemory
from .profiles import choose_form
from .sidecar import ENGINES, EngineRecord, engine_path, engines_folder, rebuild_command, top_engine_path
from .top_execution import TopExecution
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
        spec = choose_form(spec, self.tensorrt.lowerings, self.tensorrt.title, folder)
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
        logits = TOP_NOTE if record.top else "whole rows of logits come to the host: these engines are of an older build"
        self.description = f"{self.engine}, steps of {record.fixed_rows} rows, passes of up to {record.max_rows}; {logits}"
        self.record = record
        self.cuda = backend.cuda
        self.tensorrt = backend.tensorrt
        self._path, self._command = path, command
        self._lock = threading.Lock()
        self.cuda.use()
        self._logger = self.tensorrt.create_logger()
        self._runtime = self.tensorrt.trt.Runtime(self._logger)
        self._engine = self._load(path)
        self._check_logits()
        self._tops = {int(count): self._load(top_engine_path(path, count)) for count in record.top}

    def open_context(self, capacity: int, max_rows: int) -> TensorRTContext:
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
        return self._create_execution_context(self._engine, profile, stream)

    def open_tops(self, logits: DeviceMemory, max_rows: int, stream: CudaStream) -> list[TopExecution]:
        """Returns what finds the largest logits of a step, that which finds fewest first."""
        rows, width = self.record.fixed_rows, self.spec.vocab_size
        executions = {count: self._create_execution_context(top, 0, stream) for count, top in sorted(self._tops.items())}
        return [
            TopExecution(execution, count, rows, logits, width, max_rows, self.cuda, stream, self.failure)
            for count, execution in executions.items()
        ]

    def failure(self) -> DeviceError:
        """Returns what TensorRT logged last, as an error."""
        return DeviceError(last_error(self._logger.errors))

    def _load(self, path: Path) -> Any:
        engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            raise BundleError(f"{self.tensorrt.title} cannot load {path} ({last_error(self._logger.errors)}): {self._command}")
        return engine

    def _create_execution_context(self, engine: Any, profile: int, stream: CudaStream) -> Any:
        execution = self.tensorrt.create_execution_context(engine)
        if execution is None or not execution.set_optimization_profile_async(profile, stream.handle):
            raise self.failure()
        return execution

    def _check_logits(self) -> None:
        found = self._engine.get_tensor_dtype(self.spec.names.logits)
        if found != self.tensorrt.trt.float32:
            raise BundleError(
                f"The engine {self._path} gives logits of {found}, and float32 is expected: export the bundle again."
            )
