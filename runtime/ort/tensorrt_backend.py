"""ONNX Runtime's TensorRT provider: engines that ONNX Runtime builds when a model is first loaded here, and keeps.

It takes the lowering `primitive` alone. What attention is to be in `gqa`, TensorRT does not know: every layer would be cut in
two, and the provider demands the shapes of whatever passes the cuts. The attention of `static` must be allowed to fall apart
into several kernels, which the parser is told by an attribute that ONNX Runtime refuses. What TensorRT leaves, CUDA computes.

Types are the graph's: the provider makes strongly typed networks as long as it is not told to use float16 by itself.
"""

import hashlib
import os
from pathlib import Path

import onnxruntime as ort

from runtime.contract import DecoderSpec
from runtime.cuda_options import CudaOptions
from runtime.decoder import context_size
from runtime.device_forms import PROVIDER_LOWERING
from runtime.draft_policy import MAX_NUM_DRAFT_TOKENS
from runtime.errors import BundleError, DeviceError, first_line

from .backend import available_cores, create_process_pool
from .cuda_backend import CUDA, OrtCudaModel, check_on_device, cuda_provider_options, open_gpu, session_options
from .device_context import Memory
from .interface import check_interface
from .provider_trial import try_provider
from .tensorrt_library import load_tensorrt

TENSORRT = "TensorrtExecutionProvider"
CACHE = "ort-tensorrt"
_TYPICAL_ROWS = 8  # a verification of seven tokens: what kernels are chosen for
_ROW_MULTIPLE = 16  # no pass is padded to a multiple of more
_NO_TF32 = ("NVIDIA_TF32_OVERRIDE", "0")


class OrtTensorRTBackend:
    """Loads decoders into ONNX Runtime sessions whose nodes TensorRT computes."""

    def __init__(
        self,
        number: int = 0,
        *,
        threads: int | None = None,
        shared_thread_pool: bool = False,
        options: CudaOptions | None = None,
    ) -> None:
        """Computes a few numbers with TensorRT on the GPU, so that whatever does not serve is known now.

        Args:
            number: Which GPU.
            threads: See OrtBackend; of the shared pool.
            shared_thread_pool: See OrtCudaBackend.
            options: Its `tf32` counts here; None for none.

        Raises:
            DeviceError: As OrtCudaBackend raises; or the TensorRT that the provider was linked with is not there.
        """
        self._number = number
        self._shared = shared_thread_pool
        self._tf32 = (options or CudaOptions()).tf32
        device = CACHE + (f":{number}" if number else "")
        self.gpu = open_gpu(number, device)
        try:
            self._version = load_tensorrt()
            try_provider(TENSORRT, {"device_id": str(number)})
        except DeviceError as error:
            raise DeviceError(f"The device '{device}' is not available: {error}.") from error
        if shared_thread_pool:
            create_process_pool(threads or available_cores())

    def load(self, spec: DecoderSpec, folder: Path) -> OrtCudaModel:
        """Makes the session of a decoder, which builds its engine where none is kept (minutes); see Backend.load."""
        spec = spec.best_form((PROVIDER_LOWERING,))
        path = folder / spec.graph[0].path
        check_graph(spec, path, tf32=self._tf32)
        kept = engine_folder(folder, self._identity(spec))
        providers = [
            (TENSORRT, self.provider_options(spec, kept)),
            (CUDA, cuda_provider_options(self._number, CudaOptions(tf32=self._tf32))),
        ]
        try:
            session = ort.InferenceSession(
                str(path), session_options(shared=self._shared), providers=providers, enable_fallback=0
            )
        except Exception as error:  # ONNX Runtime raises many classes, none of them public
            raise BundleError(
                f"ONNX Runtime {ort.__version__} with TensorRT {self._version} cannot load {path} on {self.gpu.name} "
                f"({first_line(error)}): where an engine is kept and cannot be read, remove {kept}."
            ) from error
        check_on_device(session, (TENSORRT, CUDA), path)
        check_interface(session, spec, path)
        engine = f"ONNX Runtime {ort.__version__}, TensorRT {self._version}, {self._number}: {self.gpu.name}"
        return OrtCudaModel(
            spec,
            session,
            Memory("cuda", self._number),
            f"{engine}, TF32" if self._tf32 else engine,
            note=f"engines kept in {kept}",
        )

    def provider_options(self, spec: DecoderSpec, kept: Path) -> dict[str, str]:
        """Returns the provider's options: caches, and one profile for every pass that will be asked for.

        Args:
            spec: The decoder.
            kept: The folder of its engines.
        """
        least, typical, most = rows_of_passes(spec)
        return {
            "device_id": str(self._number),
            "trt_engine_cache_enable": "1",
            "trt_engine_cache_path": str(kept),
            "trt_timing_cache_enable": "1",
            "trt_timing_cache_path": str(kept.parent),
            "trt_profile_min_shapes": profile_shapes(spec, least, 0),
            "trt_profile_opt_shapes": profile_shapes(spec, typical, spec.context_length // 2),
            "trt_profile_max_shapes": profile_shapes(spec, most, spec.context_length),
        }

    def _identity(self, spec: DecoderSpec) -> str:
        """Returns what an engine belongs to. ONNX Runtime's own names for them leave out the weights and the GPU's model."""
        parts = (ort.__version__, self._version, self.gpu.name, str(self._tf32), *(file.sha256 for file in spec.graph))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def check_graph(spec: DecoderSpec, path: Path, *, tf32: bool) -> None:
    """Refuses a graph that the provider would not take whole, or would compute in less than its own precision.

    Args:
        spec: The decoder.
        path: Its graph, for the sentence.
        tf32: Whether the user lets float32 products be rounded.

    Raises:
        BundleError: Another lowering than `primitive`.
        DeviceError: A graph in float32, whose products the provider rounds, and gives no option to leave them.
    """
    if spec.lowering != PROVIDER_LOWERING:
        raise BundleError(
            f"{path} has the lowering '{spec.lowering}', and ONNX Runtime's TensorRT provider takes '{PROVIDER_LOWERING}': add "
            f"that form with scripts/export.py --add-lowering {PROVIDER_LOWERING}, or take device='cuda'."
        )
    name, off = _NO_TF32
    if spec.cache_dtype == "float32" and not tf32 and os.environ.get(name) != off:
        raise DeviceError(
            f"{path} computes in float32, and ONNX Runtime's TensorRT provider rounds its products to TF32: start the program "
            f"with {name}={off} in its environment, ask for TF32 (tf32=True, --tf32), or export in fp16."
        )


def rows_of_passes(spec: DecoderSpec) -> tuple[int, int, int]:
    """Returns the fewest, the typical and the most rows of a pass."""
    asked = context_size(spec, spec.context_length, MAX_NUM_DRAFT_TOKENS + 1)[1]
    most = -(-asked // _ROW_MULTIPLE) * _ROW_MULTIPLE
    return 1, min(_TYPICAL_ROWS, most), most


def profile_shapes(spec: DecoderSpec, rows: int, past_length: int) -> str:
    """Returns the shapes of every input as the provider reads them: "name:1x8,...".

    Where TensorRT computes shapes from an input's numbers, the provider takes what stands here for those numbers. Of
    `past_length`, whose shape is fixed, it takes nothing else.

    Args:
        spec: The decoder, in the lowering `primitive`.
        rows: Of a pass.
        past_length: Cached tokens.
    """
    names = spec.names
    assert names.past_length is not None
    assert spec.cache_capacity is not None
    cache = (1, spec.num_key_value_heads, spec.cache_capacity, spec.head_size)
    shapes: dict[str, tuple[int, ...]] = {names.input_ids: (1, rows), names.past_length: (past_length,)}
    if names.logits_rows is not None:
        shapes[names.logits_rows] = (rows,)
    shapes |= {past: cache for past, _ in names.cache_pairs(spec.num_layers)}
    return ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items())


def engine_folder(bundle: Path, identity: str) -> Path:
    """Returns the folder of a graph's engines, made now: in the bundle, or in the user's cache where that cannot be written.

    Raises:
        DeviceError: Neither can be written.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specrt"
    for parent in (bundle, cache):
        folder = parent / CACHE / identity
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise DeviceError(f"TensorRT's engines can be kept neither in {bundle} nor in {cache}: make one of them writable.")
