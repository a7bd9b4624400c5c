"""ONNX models of a few nodes as bytes, written without the onnx package, which the runtime does not have.

Field numbers are those of onnx.proto. What is written is what this project's own small graphs need, and no more.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FLOAT, INT64, FLOAT16 = 1, 7, 10
_IR_VERSION, _OPSET = 8, 17
_INT_ATTRIBUTE = 2


def node(operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: int) -> bytes:
    """Returns a node; attributes are whole numbers."""
    written = b"".join(_field(1, name.encode()) for name in inputs) + b"".join(_field(2, name.encode()) for name in outputs)
    written += _field(4, operator.encode())
    for name, value in attributes.items():
        written += _field(5, _field(1, name.encode()) + _number(3, value) + _number(20, _INT_ATTRIBUTE))
    return _field(1, written)


def constant(name: str, values: NDArray[np.int64]) -> bytes:
    """Returns an int64 array as a graph holds it."""
    dims = b"".join(_number(1, size) for size in values.shape)
    return _field(5, dims + _number(2, INT64) + _field(8, name.encode()) + _field(9, values.astype("<i8").tobytes()))


def graph_input(name: str, element: int, shape: Sequence[int | str]) -> bytes:
    """Returns an input; a size that is open is a name."""
    return _field(11, _value(name, element, shape))


def graph_output(name: str, element: int, shape: Sequence[int | str]) -> bytes:
    """Returns an output; see `graph_input`."""
    return _field(12, _value(name, element, shape))


def model(name: str, *parts: bytes) -> bytes:
    """Returns an ONNX model of opset 17, made of what the functions above return, nodes in the order they compute."""
    graph = b"".join(parts) + _field(2, name.encode())
    return _number(1, _IR_VERSION) + _field(7, graph) + _field(8, _number(2, _OPSET))


def _value(name: str, element: int, shape: Sequence[int | str]) -> bytes:
    sizes = [_number(1, size) if isinstance(size, int) else _field(2, size.encode()) for size in shape]
    tensor = _number(1, element) + _field(2, b"".join(_field(1, size) for size in sizes))
    return _field(1, name.encode()) + _field(2, _field(1, tensor))


def _field(number: int, contents: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(contents)) + contents


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value % (1 << 64))


def _varint(value: int) -> bytes:
    """Returns a number in groups of seven bits, the lowest first, each but the last marked by its highest bit."""
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*written, value])
