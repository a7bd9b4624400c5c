"""Products and lookups of quantised matrices with zero points and offsets, against numpy on the values they stand for."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from export.blockwise_dequantize import insert_dequantized_weights
from export.blockwise_products import quantize_graph
from export.errors import ExportError
from export.quantization import BlockwiseWeights, dequantize_blockwise

from .matrix_graphs import matrix_graph

ROWS, TOKENS = 70, np.array([[0, 69, 3, 3, 41]])


def blocks(
    columns: int,
    bits: int,
    block_size: int,
    *,
    zero_points: bool = False,
    offsets: bool = False,
    rows: int = ROWS,
    seed: int = 0,
) -> BlockwiseWeights:
    """Random codes and scales of both signs."""
    rng = np.random.default_rng(seed)
    shape = (rows, columns // block_size)
    return BlockwiseWeights.of_codes(
        rng.integers(0, 2**bits, (*shape, block_size), np.uint8),
        rng.normal(size=shape).astype(np.float32) / 2**bits,
        bits,
        columns,
        zero_points=rng.integers(0, 2**bits, shape, np.uint8) if zero_points else None,
        offsets=rng.normal(size=shape).astype(np.float32) if offsets else None,
    )


def plain_values(weights: BlockwiseWeights) -> np.ndarray:
    """The formula, weight by weight."""
    values = np.empty((len(weights.packed), weights.columns), np.float32)
    for row, column in np.ndindex(*values.shape):
        block, place = divmod(column, weights.block_size)
        byte = int(weights.packed[row, block, place // 2 if weights.bits == 4 else place])
        code = byte if weights.bits == 8 else byte >> 4 if place % 2 else byte & 15
        zero_point = 2 ** (weights.bits - 1) if weights.zero_points is None else int(weights.zero_points[row, block])
        values[row, column] = np.float32(code - zero_point) * weights.scales[row, block]
        if weights.offsets is not None:
            values[row, column] += weights.offsets[row, block]
    return values


def tied_model(table: np.ndarray, projection: np.ndarray) -> ir.Model:
    """input_ids -> lookup in the table -> projection -> the table as head -> result; and a second product of the lookup."""
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["looked_up"]),
        helper.make_node("MatMul", ["looked_up", "projection"], ["first"]),
        helper.make_node("MatMul", ["looked_up", "other"], ["second"]),
        helper.make_node("Add", ["first", "second"], ["hidden"]),
        helper.make_node("Transpose", ["table"], ["head"], perm=[1, 0]),
        helper.make_node("MatMul", ["hidden", "head"], ["result"]),
    ]
    matrices = {"table": table, "projection": projection, "other": projection[::-1].copy()}
    return matrix_graph(nodes, matrices)


def run(model: ir.Model, *, exact: bool = True) -> np.ndarray:
    proto: onnx.ModelProto = ir.to_proto(model)
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    for node in proto.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level" and exact:
                attribute.i = 0
    options = ort.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"input_ids": TOKENS})[0]


def ignore(_done: int, _total: int) -> None:
    pass


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("zero_points", "offsets"), [(False, False), (True, False), (False, True), (True, True)])
def test_values_follow_the_formula(bits: int, zero_points: bool, offsets: bool):
    weights = blocks(96, bits, 32, zero_points=zero_points, offsets=offsets, rows=5)
    assert np.array_equal(dequantize_blockwise(weights), plain_values(weights))


# 96 columns: three blocks, so that a byte of packed zero points is half empty.
@pytest.mark.parametrize(("bits", "block_size"), [(4, 16), (4, 32), (8, 16), (8, 32)])
@pytest.mark.parametrize(("zero_points", "offsets"), [(True, False), (False, True), (True, True)])
def test_graph_equals_numpy_on_the_values(bits: int, block_size: int, zero_points: bool, offsets: bool):
    table = blocks(96, bits, block_size, zero_points=zero_points, offsets=offsets)
    square = [blocks(96, bits, block_size, zero_points=zero_points, offsets=offsets, rows=96, seed=seed) for seed in (1, 2)]
    values = [dequantize_blockwise(weights) for weights in (table, *square)]
    model = tied_model(values[0], values[1].T)
    known = {"table": table, "projection": square[0]}
    order = iter([known["table"], known["projection"], square[1]])
    quantize_graph(model, lambda _: next(order), ignore)
    looked_up = values[0][TOKENS]
    expected = (looked_up @ values[1].T + looked_up @ values[2].T) @ values[0].T
    found = run(model)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
    assert {"Gather", "MatMul"}.isdisjoint(node.op_type for node in model.graph) or offsets or zero_points
    assert [name for name in model.graph.initializers if name in ("table", "projection", "other")] == []


def test_products_of_the_same_activations_share_the_sums_of_their_blocks():
    table, *square = (blocks(64, 4, 32, offsets=True, rows=rows, seed=rows) for rows in (ROWS, 64, 64))
    model = tied_model(*(dequantize_blockwise(weights) for weights in (table, square[0])))
    order = iter([table, *square])
    quantize_graph(model, lambda _: next(order), ignore)
    # One for the looked up rows, one for the head's input.
    assert [node.op_type for node in model.graph].count("ReduceSum") == 2


def test_integer_zero_points_cost_no_operator():
    table, *square = (blocks(64, 4, 32, zero_points=True, rows=rows, seed=rows) for rows in (ROWS, 64, 64))
    model = tied_model(*(dequantize_blockwise(weights) for weights in (table, square[0])))
    order = iter([table, *square])
    quantize_graph(model, lambda _: next(order), ignore)
    products = [node for node in model.graph if node.op_type == "MatMulNBits"]
    assert [len(node.inputs) for node in products] == [4, 4, 4]
    assert products[0].inputs[3].const_value.numpy().shape == (64, 1)
    assert "MatMul" not in {node.op_type for node in model.graph}


def test_matrix_that_the_quantizer_leaves_stays_as_it_is():
    table, square = (dequantize_blockwise(blocks(64, 8, 32, rows=rows)) for rows in (ROWS, 64))
    model = tied_model(table, square)
    quantize_graph(model, lambda values: None if len(values) == ROWS else blocks(64, 8, 32, rows=64), ignore)
    operators = [node.op_type for node in model.graph]
    assert operators.count("Gather") == operators.count("MatMul") == 1
    assert operators.count("MatMulNBits") == 2


@pytest.mark.parametrize(("bits", "code_type"), [(4, ir.DataType.INT4), (8, ir.DataType.INT8)])
@pytest.mark.parametrize("kind", ["symmetric", "negative scales", "zero points"])
def test_standard_operators_hold_the_same_values(bits: int, code_type: ir.DataType, kind: str):
    weights = blocks(64, bits, 32, zero_points=kind == "zero points", rows=64)
    if kind == "symmetric":
        np.abs(weights.scales, out=weights.scales)
    if kind == "negative scales" and bits == 8:
        np.maximum(weights.packed, 1, out=weights.packed)  # -128 has no counterpart
    if kind == "zero points" and bits == 8:
        weights.packed[:], weights.zero_points[:] = weights.packed // 2, weights.zero_points // 2
    weights.scales[3, 1] = 0
    values = dequantize_blockwise(weights)
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["looked_up"]),
        helper.make_node("MatMul", ["looked_up", "matrix"], ["result"]),
    ]
    table = np.random.default_rng(1).normal(size=(ROWS, 64)).astype(np.float32)
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, None])],
        [helper.make_tensor_value_info("result", TensorProto.FLOAT, [1, None, None])],
        [numpy_helper.from_array(table, "table"), numpy_helper.from_array(np.ascontiguousarray(values.T), "matrix")],
    )
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    insert_dequantized_weights(model.graph, lambda _: weights, ignore)
    np.testing.assert_allclose(run(model), table[TOKENS] @ values.T, rtol=1e-4, atol=1e-4)
    codes = model.graph.initializers["matrix.codes"].const_value
    # -8 with a negative scale is +8, and a code less its zero point has five bits: both fit 8.
    assert codes.dtype == (code_type if kind == "symmetric" else ir.DataType.INT8)
    assert (model.graph.initializers["matrix.scales"].const_value.numpy() > 0).all()


@pytest.mark.parametrize("weights", [blocks(64, 4, 32, offsets=True), blocks(64, 8, 32, zero_points=True)])
def test_what_standard_operators_cannot_say_is_refused_by_name(weights: BlockwiseWeights):
    model = tied_model(dequantize_blockwise(weights), np.eye(64, dtype=np.float32))
    with pytest.raises(ExportError, match="blocks of 'projection' have minimums, or zero points too far"):
        insert_dequantized_weights(model.graph, lambda _: weights, ignore)
