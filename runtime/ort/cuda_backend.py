"""ONNX Runtime on an NVIDIA GPU: everything that could make it run elsewhere, or not at all, is found before a model is loaded.

What the exporter measured of rows (`min_rows` in bundle.json) holds for the CPU it measured on. A GPU's kernels choose other
paths by the number of rows; scripts/device_check.py measures from how many rows on they agree.
"""

import itertools
from pathlib import Path

import onnxruntime as ort

from runtime.checks import check_whole
from runtime.contract import DecoderSpec
from runtime.cuda_driver import Gpu, checked_gpu, probe_cuda_driver
from runtime.errors import BundleError, DeviceError, first_line

from .backend import available_cores, check_interface, create_process_pool
from .device_context import GRAPH_ROWS, DeviceContext, Memory
from .provider_trial import has_no_kernels, try_provider

CUDA = "CUDAExecutionProvider"
_DOCTOR = "python scripts/doctor.py --device cuda says what to install"
# What a pass consists of. Sizes and shapes may be computed on the CPU, and ONNX Runtime puts them there; these may not.
_HEAVY = frozenset(
    (
        "Attention",
        "Gemm",
        "GroupQueryAttention",
        "MatMul",
        "MatMulInteger",
        "MatMulNBits",
        "ScatterND",
        "Softmax",
        "TensorScatter",
    )
)


class OrtCudaBackend:
    """Loads decoders into ONNX Runtime sessions on one GPU."""

    def __init__(
        self,
        number: int = 0,
        *,
        threads: int | None = None,
        shared_thread_pool: bool = False,
        memory_limit: int | None = None,
        tf32: bool = False,
        cuda_graphs: bool = False,
    ) -> None:
        """Loads the CUDA libraries and computes a few numbers on the GPU, so that a device that does not serve is known now.

        Args:
            number: Which GPU.
            threads: See OrtBackend; of the shared pool.
            shared_thread_pool: See OrtBackend; where the process has that pool, every session must use it.
            memory_limit: The most bytes a session's own memory may take on the GPU: weights and intermediate results, not
                caches. None for no limit.
            tf32: Whether float32 products may be rounded to 10 bits of mantissa: faster, and another model.
            cuda_graphs: Whether passes of up to 32 rows are captured and replayed whole, one graph for each number of rows
                and each cache, kept until the model is dropped: for programs that keep their sessions.

        Raises:
            DeviceError: The installed ONNX Runtime has no CUDA, or not for this GPU; there is no driver, or no such GPU.
            ValueError: A number out of range.
        """
        self._number = number
        self._shared = shared_thread_pool
        self._cuda_graphs = cuda_graphs
        check_whole("memory_limit", 1 if memory_limit is None else memory_limit, 1)
        self.options = _provider_options(number, memory_limit, tf32=tf32, cuda_graphs=cuda_graphs)
        self.gpu = open_gpu(number)
        if shared_thread_pool:
            create_process_pool(threads or available_cores())

    def load(self, spec: DecoderSpec, folder: Path) -> "OrtCudaModel":
        """Makes the session of a decoder; see Backend.load."""
        path = folder / spec.graph[0].path
        if spec.lowering == "growing":
            raise BundleError(
                f"{path} has a growing cache, which would be copied whole at each pass: export the model again for the GPU."
            )
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.use_per_session_threads = not self._shared
        if not self._shared:
            options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        try:
            session = ort.InferenceSession(str(path), options, providers=[(CUDA, self.options)], enable_fallback=0)
        except Exception as error:  # ONNX Runtime raises many classes, none of them public
            raise BundleError(
                f"ONNX Runtime {ort.__version__} cannot load {path} on {self.gpu.name}: {first_line(error)}"
            ) from error
        check_on_device(session, CUDA, path)
        check_interface(session, spec, path)
        return OrtCudaModel(spec, session, Memory("cuda", self._number), self._engine(), cuda_graphs=self._cuda_graphs)

    def _engine(self) -> str:
        kinds = [name for name, used in (("TF32", self.options["use_tf32"] == "1"), ("CUDA graphs", self._cuda_graphs)) if used]
        return ", ".join([f"ONNX Runtime {ort.__version__}", f"CUDA {self._number}: {self.gpu.name}", *kinds])


class OrtCudaModel:
    """A decoder in an ONNX Runtime session on a device; see Model."""

    def __init__(
        self, spec: DecoderSpec, session: ort.InferenceSession, memory: Memory, engine: str, *, cuda_graphs: bool = False
    ) -> None:
        """Keeps the session; used by OrtCudaBackend."""
        self.spec = spec
        self.engine = engine
        self._session = session
        self._memory = memory
        self._graph_ids = itertools.count(0, GRAPH_ROWS + 1) if cuda_graphs else None

    @property
    def description(self) -> str:
        """The engine; there is nothing else to say."""
        return self.engine

    def open_context(self, capacity: int, max_rows: int) -> DeviceContext:
        """Allocates and binds caches; see Model.open_context."""
        graph_id = None if self._graph_ids is None else next(self._graph_ids)
        try:
            return DeviceContext(self.spec, self._session, capacity, max_rows, self._memory, graph_id)
        except Exception as error:  # ONNX Runtime raises many classes, none of them public
            slots = self.spec.cache_capacity or capacity
            size = self.spec.context_bytes(slots, max_rows)
            raise DeviceError(
                f"A cache of {slots} tokens and {max_rows} rows of logits take {size / 1e9:.2f} GB, which {self.engine} does "
                f"not give ({first_line(error)}): shorten the prompt or lower max_new_tokens."
            ) from error


def open_gpu(number: int) -> Gpu:
    """Returns a GPU that ONNX Runtime has just computed on.

    Raises:
        DeviceError: See OrtCudaBackend.
    """
    device = f"cuda:{number}" if number else "cuda"
    if CUDA not in ort.get_available_providers():
        package = getattr(ort, "package_name", "") or "onnxruntime"
        raise DeviceError(
            f"The device '{device}' is not available: the installed ONNX Runtime ({package} {ort.__version__}) is a build "
            f"without CUDA; {_DOCTOR}."
        )
    gpu = checked_gpu(device, number, probe_cuda_driver())
    if hasattr(ort, "preload_dlls"):
        ort.preload_dlls()  # from NVIDIA's Python wheels, where these are installed
    try:
        try_provider(CUDA, {"device_id": str(number)})
    except DeviceError as error:
        reason = f"ONNX Runtime {ort.__version__} does not compute on {gpu.name} ({error})"
        if has_no_kernels(str(error)):
            reason = f"ONNX Runtime {ort.__version__} was built without kernels for {gpu.name} ({gpu.architecture})"
        raise DeviceError(f"The device '{device}' is not available: {reason}; {_DOCTOR}.") from error
    return gpu


def check_on_device(session: ort.InferenceSession, provider: str, path: Path) -> None:
    """Refuses a session that would compute on the CPU what belongs on the device.

    Args:
        session: With the config entry session.record_ep_graph_assignment_info.
        provider: The device's.
        path: The graph, for the sentence.

    Raises:
        DeviceError: The provider is not the session's, or heavy nodes were given to another.
    """
    providers = session.get_providers()
    if providers[0] != provider:
        raise DeviceError(f"{path} was loaded for {', '.join(providers)} and not for {provider}; {_DOCTOR}.")
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return  # before ONNX Runtime 1.24 nobody could tell
    strays = sorted(
        {
            node.op_type
            for part in session.get_provider_graph_assignment_info()
            if part.ep_name != provider
            for node in part.get_nodes()
            if node.op_type in _HEAVY
        }
    )
    if strays:
        raise DeviceError(
            f"ONNX Runtime {ort.__version__} has no {provider} kernels for {', '.join(strays)} as {path} has them, and "
            "would compute them on the CPU: export the model with another lowering or precision."
        )


def _provider_options(number: int, memory_limit: int | None, *, tf32: bool, cuda_graphs: bool) -> dict[str, str]:
    options = {
        "device_id": str(number),
        # Memory is taken as it is needed; the default takes twice what it has at every step.
        "arena_extend_strategy": "kSameAsRequested",
        "use_tf32": "1" if tf32 else "0",
        "enable_cuda_graph": "1" if cuda_graphs else "0",
    }
    if memory_limit is not None:
        options["gpu_mem_limit"] = str(memory_limit)
    return options
