"""Rotations read from a graph that makes them in its own way: every layout, and what is no rotation."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from export.errors import ExportError
from export.lowerings.writer import Writer
from export.rotation_probe import Rotation, RotationProbe

HEADS, SIZE, CONTEXT = 2, 8, 600
FREQUENCIES = np.array([1.0, 0.3, 0.01, 0.001], np.float32)


class Rotated:
    """x [batch, heads, rows, head_size] and x turned by position_ids, by whole products with the channels put elsewhere."""

    def __init__(self, *, pairs: int = 4, interleaved: bool = False, factor: float = 1.0) -> None:
        self.source = ir.Value(name="x", shape=ir.Shape(["batch", HEADS, "rows", SIZE]), type=ir.TensorType(ir.DataType.FLOAT))
        self.positions = ir.Value(name="position_ids", shape=ir.Shape(["batch", "rows"]), type=ir.TensorType(ir.DataType.INT64))
        self.graph = ir.Graph([self.source, self.positions], [], nodes=[], name="rotated", opset_imports={"": 18})
        self.write = write = Writer(self.graph)
        first = 2 * np.arange(pairs) if interleaved else np.arange(pairs)
        second = first + (1 if interleaved else pairs)
        swap, sign, speed, still = np.arange(SIZE), np.zeros(SIZE), np.zeros(SIZE), np.ones(SIZE)
        swap[first], swap[second] = second, first
        sign[first], sign[second], still[: 2 * pairs] = -1, 1, 0
        speed[first] = speed[second] = FREQUENCIES[:pairs]
        self.number = lambda values: self._constant(np.asarray(values, np.float32))
        by_row = write.op("Unsqueeze", write.op("Cast", self.positions, to=ir.DataType.FLOAT), write.integers(1, 3))
        self.angles = write.op("Mul", by_row, self.number(speed))
        scale = self.number(np.where(still, 1, factor))
        cosine = write.op("Mul", write.op("Cos", self.angles), scale)
        sine = write.op("Mul", write.op("Mul", write.op("Sin", self.angles), self.number(sign)), scale)
        swapped = write.op("Gather", self.source, write.integers(*map(int, swap)), axis=3)
        self.result = write.op("Add", write.op("Mul", self.source, cosine), write.op("Mul", swapped, sine))

    def _constant(self, values: np.ndarray) -> ir.Value:
        node = ir.node("Constant", [], attributes={"value": ir.tensor(values)})
        self.graph.append(node)
        return node.outputs[0]

    def read(self) -> Rotation:
        self.graph.extend(self.write.nodes)
        self.graph.sort()
        self.graph.outputs.append(self.result)
        return RotationProbe(self.graph, self.source, self.result, self.positions, "Layer 0's query").read(CONTEXT)


@pytest.mark.parametrize(
    ("pairs", "interleaved", "factor"), [(4, False, 1), (4, True, 1), (2, False, 1), (3, True, 1.2), (4, False, 0.7)]
)
def test_tables_are_read(pairs: int, interleaved: bool, factor: float):
    rotation = Rotated(pairs=pairs, interleaved=interleaved, factor=factor).read()
    angles = np.arange(CONTEXT, dtype=np.float32)[:, None] * FREQUENCIES[:pairs]
    assert rotation.interleaved == interleaved
    np.testing.assert_allclose(rotation.cosine, factor * np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(rotation.sine, factor * np.sin(angles), atol=1e-5)


def scaled(rotated: Rotated) -> None:
    rotated.result = rotated.write.op("Mul", rotated.result, rotated.number(np.arange(SIZE)))


def squared(rotated: Rotated) -> None:
    rotated.result = rotated.write.op("Mul", rotated.result, rotated.result)


def turned_by_the_length_of_the_pass(rotated: Rotated) -> None:
    # As dynamic scaling does: whoever stands in a longer pass turns otherwise.
    rows = rotated.write.op("Cast", rotated.write.op("Shape", rotated.positions, start=1, end=2), to=ir.DataType.FLOAT)
    slower = rotated.write.op("Mul", rotated.angles, rotated.write.op("Div", rotated.number([600.0]), rows))
    for node in rotated.write.nodes:
        if node.op_type in ("Cos", "Sin"):
            node.replace_input_with(0, slower)


def not_at_all(rotated: Rotated) -> None:
    rotated.result = rotated.write.op("Neg", rotated.write.op("Neg", rotated.source))


@pytest.mark.parametrize("change", [scaled, squared, turned_by_the_length_of_the_pass, not_at_all])
def test_what_is_no_rotation_is_refused(change):
    rotated = Rotated()
    change(rotated)
    with pytest.raises(ExportError, match="Layer 0's query is no rotary embedding by position"):
        rotated.read()


def test_what_reads_more_is_refused():
    rotated = Rotated()
    other = ir.Value(name="other", shape=ir.Shape([SIZE]), type=ir.TensorType(ir.DataType.FLOAT))
    rotated.graph.inputs.append(other)
    rotated.result = rotated.write.op("Add", rotated.result, other)
    with pytest.raises(ExportError, match="depends on more than its projection and its positions"):
        rotated.read()
