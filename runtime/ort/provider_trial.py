"""A tiny graph that shows whether an execution provider of ONNX Runtime computes, and not only whether it is listed.

A provider whose libraries are missing is listed all the same, and its session runs on the CPU with a line in the log; one
without kernels for the GPU makes a session and fails at the first pass. Only a run tells.
"""

from collections.abc import Mapping

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from runtime.errors import DeviceError, first_line

_FLOAT, _OPSET, _IR_VERSION = 1, 17, 8
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
    """Returns an ONNX model, x to y, both float32 [2, 2]; field numbers are those of onnx.proto."""
    nodes = _node("Add", b"x", b"x", b"sum") + _node("MatMul", b"sum", b"x", b"y")
    graph = nodes + _field(2, b"tiny") + _field(11, _value(b"x")) + _field(12, _value(b"y"))
    return _number(1, _IR_VERSION) + _field(7, graph) + _field(8, _number(2, _OPSET))


def _node(operator: str, first: bytes, second: bytes, output: bytes) -> bytes:
    return _field(1, _field(1, first) + _field(1, second) + _field(2, output) + _field(4, operator.encode()))


def _value(name: bytes) -> bytes:
    shape = _field(1, _number(1, 2)) * 2
    return _field(1, name) + _field(2, _field(1, _number(1, _FLOAT) + _field(2, shape)))


def _field(number: int, contents: bytes) -> bytes:
    assert len(contents) < 1 << 7  # one byte of length is all this writes
    return bytes([number << 3 | 2, len(contents)]) + contents


def _number(number: int, value: int) -> bytes:
    return bytes([number << 3, value])
