"""Which of a decoder's forms each device takes; known before anything is loaded."""

from .contract import DecoderSpec

# Of standard operators only, on caches of a fixed size: what engines built before take.
STANDARD_LOWERINGS = ("static", "primitive")
# Best first. ONNX Runtime on the CPU takes a bundle's first form (runtime.ort.backend.LOWERINGS).
CUDA_LOWERINGS = ("gqa-half", "gqa", *STANDARD_LOWERINGS)
# ONNX Runtime's TensorRT provider takes this one alone (runtime.ort.tensorrt_backend says why).
PROVIDER_LOWERING = "primitive"


def form_on(decoder: DecoderSpec, device: str) -> DecoderSpec:
    """Returns the form that a device takes: "cpu", "cuda:1", "tensorrt" and so on."""
    if device.startswith("ort-tensorrt"):
        return decoder.best_form((PROVIDER_LOWERING,))
    if "tensorrt" in device:
        return decoder.best_form(STANDARD_LOWERINGS)
    return cuda_form(decoder) if device.startswith("cuda") else decoder.forms[0]


def cuda_form(decoder: DecoderSpec) -> DecoderSpec:
    """Returns the best form that ONNX Runtime runs on CUDA; where there is none the first, to be refused."""
    there = [form for form in decoder.forms if runs_on_cuda(form)]
    return min(there, key=lambda form: CUDA_LOWERINGS.index(form.lowering), default=decoder.forms[0])


def runs_on_cpu(form: DecoderSpec) -> bool:
    """Returns whether ONNX Runtime has kernels on the CPU for the type that a form computes in."""
    return form.cache_dtype != "bfloat16"


def runs_on_cuda(form: DecoderSpec) -> bool:
    """Returns whether ONNX Runtime runs a form on CUDA: its GroupQueryAttention has kernels for 16 bits only there."""
    return form.lowering in CUDA_LOWERINGS and not (form.lowering == "gqa" and form.cache_dtype == "float32")
