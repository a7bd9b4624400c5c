"""A base graph in 16 bits: what is rounded, what stays, and what cannot be rounded."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_ir.passes.common import ShapeInferencePass

from export.errors import ExportError
from export.half_precision import to_half_precision

KEPT = frozenset({"Softmax"})


def model_of(nodes: list, matrices: dict[str, np.ndarray], *, opset: int = 21) -> ir.Model:
    """x float32 [2, 3] and places int64 [2] -> nodes -> logits."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3]),
            helper.make_tensor_value_info("places", TensorProto.INT64, [2]),
        ],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [2, 3])],
        [numpy_helper.from_array(values, name) for name, values in matrices.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return ShapeInferencePass()(ir.from_proto(proto)).model


def types_of(model: ir.Model) -> dict[str, ir.DataType]:
    return {value.name: value.dtype for node in model.graph for value in (*node.inputs, *node.outputs)}


def run(model: ir.Model, x: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x, "places": np.array([0, 2])})[0]


MATRIX = np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]], np.float32)


def test_values_are_rounded_and_kept_operators_stand_between_casts():
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node("Gather", ["table", "places"], ["rows"]),
        helper.make_node("Softmax", ["product"], ["first"]),
        helper.make_node("Softmax", ["rows"], ["second"]),
        helper.make_node("Add", ["first", "second"], ["sum"]),
        helper.make_node("Gather", ["shared", "places"], ["more"]),
        helper.make_node("Add", ["sum", "more"], ["logits"]),
    ]
    model = model_of(nodes, {"w": MATRIX, "table": MATRIX, "shared": MATRIX})
    x = np.full((2, 3), 0.25, np.float32)
    expected = run(model, x)
    to_half_precision(model.graph, KEPT)
    types = types_of(model)
    assert [value.dtype for value in model.graph.inputs] == [ir.DataType.FLOAT16, ir.DataType.INT64]
    assert (model.graph.outputs[0].name, model.graph.outputs[0].dtype) == ("logits", ir.DataType.FLOAT)
    assert {types[name] for name in ("first", "second", "table", "rows")} == {ir.DataType.FLOAT}
    assert {types[name] for name in ("product", "sum", "w.half", "shared.half", "more")} == {ir.DataType.FLOAT16}
    assert {"w", "shared"}.isdisjoint(model.graph.initializers)
    assert run(model, x.astype(np.float16)) == pytest.approx(expected, abs=2e-3)
    # Rounded for certain: float16 has not these sums.
    assert not np.array_equal(run(model, x.astype(np.float16)), expected)


def test_constants_in_attributes_and_casts_are_rounded():
    nodes = [
        helper.make_node("Constant", [], ["a"], value_float=0.1),
        helper.make_node("Constant", [], ["b"], value=numpy_helper.from_array(np.float32([0.2]))),
        helper.make_node("Cast", ["places"], ["number"], to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["number"], ["total"], keepdims=0),
        helper.make_node("Mul", ["a", "b"], ["c"]),
        helper.make_node("Mul", ["c", "total"], ["d"]),
        helper.make_node("Add", ["x", "d"], ["logits"]),
    ]
    model = model_of(nodes, {})
    expected = run(model, MATRIX[:2])
    to_half_precision(model.graph, KEPT)
    types = types_of(model)
    assert {types[name] for name in "abcd"} == {types["number"]} == {ir.DataType.FLOAT16}
    assert run(model, MATRIX[:2].astype(np.float16)) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize(("weights", "kept"), [([0.5, 1.25, 2.0], False), ([0.5, 1.01, 2.0], True)])
def test_norm_whose_weights_bfloat16_does_not_hold_stays_in_float32(weights: list[float], kept: bool):
    nodes = [
        helper.make_node("RMSNormalization", ["x", "scale"], ["normed"], axis=-1),
        helper.make_node("MatMul", ["normed", "w"], ["logits"]),
    ]
    model = model_of(nodes, {"scale": np.array(weights, np.float32), "w": MATRIX}, opset=23)
    to_half_precision(model.graph, KEPT, ir.DataType.BFLOAT16)
    types = types_of(model)
    norm = next(node for node in model.graph if node.op_type == "RMSNormalization")
    assert {value.dtype for value in norm.inputs} == {ir.DataType.FLOAT if kept else ir.DataType.BFLOAT16}
    assert (types["w.half"], types["logits"]) == (ir.DataType.BFLOAT16, ir.DataType.FLOAT)
    assert np.array_equal(
        model.graph.initializers["w.half"].const_value.numpy(), MATRIX.astype(ir.DataType.BFLOAT16.numpy())
    ), "to the nearest"


def test_weight_beyond_the_range_is_refused_by_name():
    nodes = [helper.make_node("MatMul", ["x", "large"], ["logits"])]
    model = model_of(nodes, {"large": MATRIX * 1e5})
    with pytest.raises(ExportError, match=r"The weight 'large' reaches 9e\+04, beyond the range of float16"):
        to_half_precision(model.graph, KEPT)
