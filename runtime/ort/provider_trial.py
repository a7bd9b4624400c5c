"""A tiny graph that shows whether an execution provider of ONNX Runtime computes, and not only whether it is listed.

A provider whose libraries are missing is listed all the same, and its session runs on the CPU with a line in the log; one
without kernels for the GPU makes a session and fails at the first pass. Only a run tells.
"""

from collections.abc import Mapping

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from runtime import onnx_bytes as onnx
from runtime.errors import DeviceError, first_line

_NO_KERNELS = ("no kernel image", "cudaErrorNoKernelImageForDevice")


def try_provider(provider: str, options: Mapping[str, str] | None = None) -> None:
    """Computes (x + x) @ x with one provider alone, nothing of it on another.

    Args:
        provider: "CUDAExecutionProvider", for instance.
        options: The provider's own options.

    Raises:
        DeviceError: It is not in this build of ONNX Runtime, could not be made, or did not compute; in ONNX Runtime's words.
    """
    available = ort.get_available_providers()
    if provider not in available:
        raise DeviceError(f"the installed ONNX Runtime {ort.__version__} has no {provider}, only {', '.join(available)}")
    try:
        found = _run(provider, options or {})
    except Exception as error:  # ONNX Runtime raises many classes, none of them public
        raise DeviceError(first_line(error)) from error
    if not np.array_equal(found, 2 * np.eye(2)):
        raise DeviceError(f"{provider} computes wrong numbers: {found.tolist()} where [[2, 0], [0, 2]] is right")


def _run(provider: str, options: Mapping[str, str]) -> NDArray[np.float32]:
    session_options = ort.SessionOptions()
    session_options.log_severity_level = 4
    if provider != "CPUExecutionProvider":
        session_options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    graph = _tiny_graph()
    session = ort.InferenceSession(graph, session_options, providers=[(provider, dict(options))], enable_fallback=0)
    assert session.get_providers()[0] == provider, f"the session runs on {', '.join(session.get_providers())}"
    found: NDArray[np.float32] = session.run(None, {"x": np.eye(2, dtype=np.float32)})[0]
    return found


def has_no_kernels(words: str) -> bool:
    """Whether ONNX Runtime's words say that it was built without kernels for this GPU."""
    return any(sign in words for sign in _NO_KERNELS)


def _tiny_graph() -> bytes:
    """Returns an ONNX model, x to y, both float32 [2, 2]."""
    return onnx.model(
        "tiny",
        onnx.graph_input("x", onnx.FLOAT, (2, 2)),
        onnx.node("Add", ("x", "x"), ("sum",)),
        onnx.node("MatMul", ("sum", "x"), ("y",)),
        onnx.graph_output("y", onnx.FLOAT, (2, 2)),
    )
