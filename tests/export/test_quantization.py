"""Blockwise rounding: its error bounds, its layout against a plain loop, and the graph pass against numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from export.blockwise_products import ACCURACY_LEVEL, quantize_graph
from export.errors import ExportError
from export.quantization import (
    BITS,
    BLOCK_SIZE,
    BLOCK_SIZES,
    block_size_of,
    dequantize_blockwise,
    quantize_blockwise,
    rounding,
)

from .matrix_graphs import matrix_graph

VOCABULARY, TOKENS = 70, np.array([[0, 69, 3, 3, 41]])


def random_matrix(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


# --- arithmetic ------------------------------------------------------------------------------------------------------


def widest_scale_error(weights: np.ndarray, bits: int, block_size: int) -> np.ndarray:
    """The squared error of each block, float64 [rows, blocks], where its largest weight is kept exactly, by a plain loop."""
    half = 2 ** (bits - 1)
    blocks = -(-weights.shape[1] // block_size)
    errors = np.zeros((len(weights), blocks))
    for row, block in np.ndindex(*errors.shape):
        values = weights[row, block * block_size : (block + 1) * block_size].astype(np.float64)
        if (largest := values[np.abs(values).argmax()]) != 0:
            scale = largest / -half
            errors[row, block] = ((np.clip(np.rint(values / scale), -half, half - 1) * scale - values) ** 2).sum()
    return errors


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 300),
    bits=st.sampled_from([4, 8]),
    block_size=st.sampled_from(BLOCK_SIZES),
    exponent=st.integers(-15, 15),
    zero_blocks=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_block_is_worse_than_with_its_largest_weight_kept(rows, columns, bits, block_size, exponent, zero_blocks, seed):
    weights = random_matrix(rows, columns, seed) * np.float32(10.0**exponent)
    if zero_blocks:
        weights[:, :block_size] = 0
    quantized = quantize_blockwise(weights, bits, block_size)
    found = dequantize_blockwise(quantized)

    blocks = -(-columns // block_size)
    assert quantized.packed.shape == (rows, blocks, block_size * bits // 8)
    assert quantized.packed.dtype == np.uint8
    assert quantized.scales.shape == (rows, blocks)
    assert found.shape == weights.shape
    assert found.dtype == np.float32
    padded = np.zeros((rows, blocks * block_size))
    padded[:, :columns] = found.astype(np.float64) - weights
    errors = (padded.reshape(rows, blocks, block_size) ** 2).sum(axis=2)
    allowed = widest_scale_error(weights, bits, block_size)
    assert (errors <= allowed * (1 + 1e-4) + 1e-12 * (weights.astype(np.float64) ** 2).sum()).all()


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_smaller_scales_serve_four_bits_better(block_size):
    weights = random_matrix(64, 4 * block_size)
    found = dequantize_blockwise(quantize_blockwise(weights, 4, block_size))
    assert ((found - weights) ** 2).sum() < 0.95 * widest_scale_error(weights, 4, block_size).sum()


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_whose_squares_overflow_are_rounded_all_the_same(bits):
    weights = random_matrix(2, BLOCK_SIZE) * np.float32(1e37)
    found = dequantize_blockwise(quantize_blockwise(weights, bits))
    # The range has no code for +half: a weight near it may lose a whole step.
    assert (np.abs(found - weights) <= np.abs(weights).max() / 2 ** (bits - 1) * 1.001).all()


def test_largest_weight_of_a_block_is_kept_exactly_in_eight_bits():
    weights = random_matrix(6, 3 * BLOCK_SIZE)
    found = dequantize_blockwise(quantize_blockwise(weights, 8))
    for expected, value in zip(weights.reshape(-1, BLOCK_SIZE), found.reshape(-1, BLOCK_SIZE), strict=True):
        place = np.abs(expected).argmax()
        assert value[place] == expected[place]


@pytest.mark.parametrize(("columns", "largest", "expected"), [(576, 128, 64), (1536, 128, 128), (1536, 32, 32), (100, 128, 32)])
def test_blocks_are_the_largest_that_waste_nothing(columns, largest, expected):
    assert block_size_of(columns, largest) == expected


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_twice_is_rounding_once(bits):
    once = dequantize_blockwise(quantize_blockwise(random_matrix(7, 75), bits))
    assert np.array_equal(dequantize_blockwise(quantize_blockwise(once, bits)), once)


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_block_stays_zero_beside_others(bits):
    weights = random_matrix(2, 3 * BLOCK_SIZE)
    weights[0, BLOCK_SIZE : 2 * BLOCK_SIZE] = 0
    quantized = quantize_blockwise(weights, bits)
    assert quantized.scales[0, 1] == 0
    assert not dequantize_blockwise(quantized)[0, BLOCK_SIZE : 2 * BLOCK_SIZE].any()
    assert dequantize_blockwise(quantized)[1].any()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_zeros_beside_subnormal_weights_stay_zero(bits):
    # Here one over the scale is beyond float32.
    weights = np.zeros((1, BLOCK_SIZE), np.float32)
    weights[0, 3] = 1e-39
    found = dequantize_blockwise(quantize_blockwise(weights, bits))
    assert np.abs(found - weights).max() <= 1e-39
    assert not np.delete(found[0], 3).any()


def test_layout_equals_a_plain_loop():
    weights = random_matrix(3, 75)
    four, eight = quantize_blockwise(weights, 4), quantize_blockwise(weights, 8)
    for row in range(3):
        for column in range(75):
            block, place = divmod(column, BLOCK_SIZE)
            byte = int(four.packed[row, block, place // 2])
            code = byte >> 4 if place % 2 else byte & 15
            scale = four.scales[row, block]
            assert abs((code - 8) * scale - weights[row, column]) <= abs(scale)
            assert dequantize_blockwise(four)[row, column] == np.float32(code - 8) * scale
            code = int(eight.packed[row, block, place])
            assert dequantize_blockwise(eight)[row, column] == np.float32(code - 128) * eight.scales[row, block]


def test_padding_stands_for_zero():
    # The kernel sees whole blocks: padded columns must carry the code of zero, or garbage activations would count.
    quantized = quantize_blockwise(random_matrix(2, 33), 8)
    assert (quantized.packed[:, 1, 1:] == 128).all()


# --- the graph pass --------------------------------------------------------------------------------------------------


def tied_model(hidden: int) -> tuple[ir.Model, np.ndarray, np.ndarray]:
    """An embedding whose matrix is the head too, and one projection between them."""
    embedding, projection = random_matrix(VOCABULARY, hidden), random_matrix(hidden, hidden, seed=1)
    nodes = [
        helper.make_node("Gather", ["embedding", "input_ids"], ["looked_up"]),
        helper.make_node("MatMul", ["looked_up", "projection"], ["projected"]),
        helper.make_node("Transpose", ["embedding"], ["head"], perm=[1, 0]),
        helper.make_node("MatMul", ["projected", "head"], ["result"]),
    ]
    return matrix_graph(nodes, {"embedding": embedding, "projection": projection}), embedding, projection


def run(model: ir.Model) -> np.ndarray:
    """The model's result with float activations."""
    proto = ir.to_proto(model)
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    for node in proto.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 0
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"input_ids": TOKENS})[0]


def rounded(matrix: np.ndarray, bits: int) -> np.ndarray:
    return dequantize_blockwise(quantize_blockwise(matrix, bits))


def ignore(_done: int, _total: int) -> None:
    pass


@pytest.mark.parametrize("hidden", [64, 40])  # 40 is no multiple of the block
@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_quantized_graph_equals_numpy_on_rounded_weights(precision, hidden):
    model, embedding, projection = tied_model(hidden)
    quantize_graph(model, rounding(BITS[precision]), ignore)
    bits = BITS[precision]
    table, middle = rounded(embedding, bits), rounded(projection.T, bits).T
    expected = table[TOKENS] @ middle @ table.T
    found = run(model)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)
    plain = embedding[TOKENS] @ projection @ embedding.T
    assert np.abs(found - plain).max() > 0.1, "the rounding itself is larger than the tolerance"


def test_tied_embedding_and_head_share_one_packed_tensor():
    model, _, _ = tied_model(64)
    quantize_graph(model, rounding(4), ignore)
    nodes = {node.op_type: node for node in model.graph}
    products = [node for node in model.graph if node.op_type == "MatMulNBits"]
    assert len(products) == 2
    assert nodes["GatherBlockQuantized"].inputs[0] is products[1].inputs[1]
    assert {"Gather", "MatMul", "Transpose"}.isdisjoint(nodes)
    floats = {
        name: value.const_value.shape for name, value in model.graph.initializers.items() if value.dtype == ir.DataType.FLOAT
    }
    assert set(floats) == {"embedding.scales", "projection.scales"}, "the float matrices are gone"


def test_products_round_activations_as_the_fast_kernel_does():
    model, _, _ = tied_model(64)
    quantize_graph(model, rounding(8), ignore)
    levels = [node.attributes.get_int("accuracy_level") for node in model.graph if node.op_type == "MatMulNBits"]
    assert levels == [ACCURACY_LEVEL, ACCURACY_LEVEL] == [4, 4]


def test_progress_counts_matrices():
    model, _, _ = tied_model(64)
    reports: list[tuple[int, int]] = []
    quantize_graph(model, rounding(4), lambda done, total: reports.append((done, total)))
    assert reports == [(1, 2), (2, 2)]


def test_graph_without_matrices_is_refused():
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["numbers", "axis"], ["result"]),
    ]
    model = matrix_graph(nodes, {"axis": np.array([2])})
    with pytest.raises(ExportError, match="no constant weight matrices to quantise"):
        quantize_graph(model, rounding(4), ignore)


def looked_up_and_multiplied() -> ir.Model:
    nodes = [
        helper.make_node("Gather", ["matrix", "input_ids"], ["looked_up"]),
        helper.make_node("MatMul", ["looked_up", "matrix"], ["result"]),
    ]
    return matrix_graph(nodes, {"matrix": random_matrix(VOCABULARY, VOCABULARY)})


def multiplied_both_ways() -> ir.Model:
    nodes = [
        helper.make_node("Gather", ["embedding", "input_ids"], ["looked_up"]),
        helper.make_node("MatMul", ["looked_up", "matrix"], ["half_way"]),
        helper.make_node("Transpose", ["matrix"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["half_way", "turned"], ["result"]),
    ]
    return matrix_graph(nodes, {"embedding": random_matrix(VOCABULARY, 64), "matrix": random_matrix(64, 64, seed=1)})


@pytest.mark.parametrize("build", [looked_up_and_multiplied, multiplied_both_ways])
def test_matrix_read_in_two_layouts_is_refused(build: Callable[[], ir.Model]):
    with pytest.raises(ExportError, match=r"'matrix' .*layout"):
        quantize_graph(build(), rounding(4), ignore)


def test_table_that_is_looked_up_by_position_stays_as_it_is():
    nodes = [
        helper.make_node("Sub", ["input_ids", "input_ids"], ["positions"]),
        helper.make_node("Gather", ["table", "positions"], ["rows"]),
        helper.make_node("MatMul", ["rows", "matrix"], ["result"]),
    ]
    model = matrix_graph(nodes, {"table": random_matrix(VOCABULARY, 64), "matrix": random_matrix(64, 64, seed=1)})
    quantize_graph(model, rounding(4), ignore)
    assert [node.op_type for node in model.graph] == ["Sub", "Gather", "MatMulNBits"]
    assert "table" in model.graph.initializers
