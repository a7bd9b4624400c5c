"""ONNX Runtime on an NVIDIA GPU: everything that could make it run elsewhere, or not at all, is found before a model is loaded.

What the exporter measured of rows (`min_rows` in bundle.json) holds for the CPU it measured on; runtime.row_record measures it
anew on a GPU, whose kernels choose other paths by the number of rows.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import onnxruntime as ort

from runtime.contract import DecoderSpec
from runtime.cuda_driver import Gpu, checked_gpu, probe_cuda_driver
from runtime.cuda_options import CudaOptions
from runtime.device_forms import cuda_form, runs_on_cuda
from runtime.errors import BundleError, DeviceError, first_line
from runtime.top_logits import TOP_NOTE

from .backend import available_cores, create_process_pool
from .device_context import GRAPH_ROWS, DeviceContext, Memory
from .forks import keep_in_forks
from .interface import check_interface
from .pass_buffers import logits_type
from .provider_trial import has_no_kernels, try_provider
from .top_finder import TopFinder

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
        options: CudaOptions | None = None,
    ) -> None:
        """Loads the CUDA libraries and computes a few numbers on the GPU, so that a device that does not serve is known now.

        Args:
            number: Which GPU.
            threads: See OrtBackend; of the shared pool.
            shared_thread_pool: See OrtBackend; where the process has that pool, every session must use it.
            options: What the user asks for; None for the defaults.

        Raises:
            DeviceError: The installed ONNX Runtime has no CUDA, or not for this GPU; there is no driver, or no such GPU.
        """
        self._number = number
        self._shared = shared_thread_pool
        self._options = options or CudaOptions()
        self.options = cuda_provider_options(number, self._options)
        self.gpu = open_gpu(number, f"cuda:{number}" if number else "cuda")
        if shared_thread_pool:
            create_process_pool(threads or available_cores())

    def load(self, spec: DecoderSpec, folder: Path) -> "OrtCudaModel":
        """Makes the session of a decoder; see Backend.load."""
        spec = cuda_form(spec)
        path = folder / spec.graph[0].path
        check_form(spec, folder)
        try:
            session = ort.InferenceSession(
                str(path), session_options(shared=self._shared), providers=[(CUDA, self.options)], enable_fallback=0
            )
        except Exception as error:  # ONNX Runtime raises many classes, none of them public
            raise BundleError(
                f"ONNX Runtime {ort.__version__} cannot load {path} on {self.gpu.name}: {first_line(error)}"
            ) from error
        check_on_device(session, (CUDA,), path)
        check_interface(session, spec, path)
        return OrtCudaModel(spec, session, Memory("cuda", self._number), self._engine(), cuda_graphs=self._options.cuda_graphs)

    def _engine(self) -> str:
        kinds = [name for name, used in (("TF32", self._options.tf32), ("CUDA graphs", self._options.cuda_graphs)) if used]
        return ", ".join([f"ONNX Runtime {ort.__version__}", f"CUDA {self._number}: {self.gpu.name}", *kinds])


class OrtCudaModel:
    """A decoder in an ONNX Runtime session on a device; see Model."""

    def __init__(
        self,
        spec: DecoderSpec,
        session: ort.InferenceSession,
        memory: Memory,
        engine: str,
        *,
        cuda_graphs: bool = False,
        note: str = "",
    ) -> None:
        """Keeps the session; used by OrtCudaBackend and OrtTensorRTBackend."""
        self.spec = spec
        self.engine = engine
        self._session = session
        keep_in_forks(session)
        self._memory = memory
        self._graph_ids = itertools.count(0, GRAPH_ROWS + 1) if cuda_graphs else None
        shared = not session.get_session_options().use_per_session_threads
        element = logits_type(session, spec.names.logits)
        self._top_finder, logits = None, TOP_NOTE
        try:
            self._top_finder = TopFinder(memory.kind, memory.number, element, session_options(shared=shared))
        except DeviceError as error:
            logits = f"whole rows of logits come to the host ({error})"
        self.description = "; ".join([f"{engine}, {note}" if note else engine, logits])

    def open_context(self, capacity: int, max_rows: int) -> DeviceContext:
        """Allocates and binds caches; see Model.open_context."""
        graph_id = None if self._graph_ids is None else next(self._graph_ids)
        try:
            return DeviceContext(self.spec, self._session, capacity, max_rows, self._memory, graph_id, self._top_finder)
        except Exception as error:  # ONNX Runtime raises many classes, none of them public
            slots = self.spec.cache_capacity or capacity
            size = self.spec.context_bytes(slots, max_rows)
            raise DeviceError(
                f"A cache of {slots} tokens and {max_rows} rows of logits take {size / 1e9:.2f} GB, which {self.engine} does "
                f"not give ({first_line(error)}): shorten the prompt or lower max_new_tokens."
            ) from error


def check_form(spec: DecoderSpec, folder: Path) -> None:
    """Refuses a form that ONNX Runtime would not run on CUDA, or not well.

    Args:
        spec: The decoder, its form chosen.
        folder: The bundle's, for the sentence.

    Raises:
        BundleError: A growing cache, or attention in float32.
    """
    path = folder / spec.graph[0].path
    if spec.lowering == "growing":
        raise BundleError(
            f"{path} has a growing cache, which would be copied whole at each pass: export the model again for the GPU."
        )
    if not runs_on_cuda(spec):
        way = f"add a form in float16 with scripts/export.py --add-lowering gqa-half --out {folder}"
        if spec.precision == "fp32":
            way = "export the model with scripts/export.py --precision fp16 (or bf16)"
        raise BundleError(
            f"{path} computes in float32, for which ONNX Runtime's attention has no CUDA kernel: {way}, or pass device='cpu'."
        )


def open_gpu(number: int, device: str) -> Gpu:
    """Returns a GPU that ONNX Runtime has just computed on.

    Args:
        number: Which one.
        device: What the user asked for, for the sentence.

    Raises:
        DeviceError: See OrtCudaBackend.
    """
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


def session_options(*, shared: bool) -> ort.SessionOptions:
    """Returns the options of a session whose passes run on a GPU.

    Args:
        shared: Whether the process has the shared thread pool.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.use_per_session_threads = not shared
    if not shared:
        options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return options


def check_on_device(session: ort.InferenceSession, expected: Sequence[str], path: Path) -> None:
    """Refuses a session that would compute on the CPU what belongs on the device.

    Args:
        session: With the config entry session.record_ep_graph_assignment_info.
        expected: The device's providers: the first one must have nodes, the others may have what it does not take.
        path: The graph, for the sentence.

    Raises:
        DeviceError: The providers are not the session's, the first one has no nodes, or heavy nodes were given to another.
    """
    providers = session.get_providers()
    if tuple(providers[: len(expected)]) != tuple(expected):
        raise DeviceError(f"{path} was loaded for {', '.join(providers)} and not for {', '.join(expected)}; {_DOCTOR}.")
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return  # before ONNX Runtime 1.24 nobody could tell
    parts = session.get_provider_graph_assignment_info()
    nodes = [node for part in parts if part.ep_name not in expected for node in part.get_nodes()]
    if strays := sorted({node.op_type for node in nodes if node.op_type in _HEAVY}):
        raise DeviceError(
            f"ONNX Runtime {ort.__version__} has no {expected[-1]} kernels for {', '.join(strays)} as {path} has them, and "
            "would compute them on the CPU: export the model with another lowering or precision."
        )
    if expected[0] not in {part.ep_name for part in parts}:
        raise DeviceError(f"{expected[0]} of ONNX Runtime {ort.__version__} took no node of {path}; {_DOCTOR}.")


def cuda_provider_options(number: int, options: CudaOptions) -> dict[str, str]:
    """Returns the options of ONNX Runtime's CUDA provider.

    Args:
        number: Which GPU.
        options: What the user asks for.
    """
    chosen = {
        "device_id": str(number),
        # Memory is taken as it is needed; the default takes twice what it has at every step.
        "arena_extend_strategy": "kSameAsRequested",
        "use_tf32": "1" if options.tf32 else "0",
        "enable_cuda_graph": "1" if options.cuda_graphs else "0",
    }
    if options.memory_limit is not None:
        chosen["gpu_mem_limit"] = str(options.memory_limit)
    return chosen
