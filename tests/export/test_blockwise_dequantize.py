"""Weights behind DequantizeLinear: the values they stand for, scales above zero, and what does not divide into blocks."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper

from export.blockwise_dequantize import insert_dequantized_weights
from export.errors import ExportError
from export.quantization import dequantize_blockwise, quantize_blockwise, rounding

from .matrix_graphs import matrix_graph


def random_matrix(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


def tied_model() -> tuple[ir.Model, np.ndarray, np.ndarray]:
    """An embedding that is the head too, and one projection between them."""
    embedding, projection = random_matrix(20, 64), random_matrix(64, 64, seed=1)
    nodes = [
        helper.make_node("Gather", ["embedding", "token_ids"], ["looked_up"]),
        helper.make_node("MatMul", ["looked_up", "projection"], ["hidden"]),
        helper.make_node("Transpose", ["embedding"], ["head"], perm=[1, 0]),
        helper.make_node("MatMul", ["hidden", "head"], ["result"]),
    ]
    return matrix_graph(nodes, {"embedding": embedding, "projection": projection}, tokens="token_ids"), embedding, projection


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block_size", [32, 64])
def test_products_are_with_the_rounded_weights_and_lookups_with_the_plain(bits: int, block_size: int):
    model, embedding, projection = tied_model()
    done: list[tuple[int, int]] = []
    quantizer = rounding(bits, block_size, positive_scales=True)
    insert_dequantized_weights(model.graph, quantizer, lambda *progress: done.append(progress))
    assert done == [(1, 2), (2, 2)]
    assert "projection" not in model.graph.initializers
    assert [node.attributes.get_int("block_size") for node in model.graph if node.op_type == "DequantizeLinear"] == [
        block_size
    ] * 2
    options = ort.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    token_ids = np.array([[3, 19, 0]])

    def rounded(weights: np.ndarray) -> np.ndarray:
        return dequantize_blockwise(quantize_blockwise(weights, bits, block_size, positive_scales=True))

    expected = embedding[token_ids] @ rounded(projection.T).T @ rounded(embedding).T
    np.testing.assert_allclose(session.run(None, {"token_ids": token_ids})[0], expected, atol=1e-3)


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_are_above_zero_whatever_the_weights(bits: int):
    weights = random_matrix(4, 128)
    weights[0, :32] = 0
    weights[1] = np.abs(weights[1])
    weights[2] = -np.abs(weights[2])
    model = matrix_graph(
        [helper.make_node("MatMul", ["token_ids", "w"], ["result"])], {"w": np.ascontiguousarray(weights.T)}, tokens="token_ids"
    )
    insert_dequantized_weights(model.graph, rounding(bits, positive_scales=True), lambda *_: None)
    scales = model.graph.initializers["w.scales"].const_value.numpy()
    codes = model.graph.initializers["w.codes"].const_value.numpy().astype(np.float32)
    assert scales.shape == (4, 4)
    assert (scales.astype(np.float16) > 0).all()
    largest = 2 ** (bits - 1)
    assert codes.min() >= -largest
    assert codes.max() <= largest - 1
    found = (codes * np.repeat(scales, 32, axis=0)).T
    assert not found[0, :32].any()
    # Weights of one sign only reach the end of the range that lies on their side, clipped by the search at most.
    step = np.repeat(scales, 32, axis=0).T
    assert (np.abs(found - weights) <= np.maximum(step, 0.4 * np.abs(weights))).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_with_positive_scales_is_hardly_worse(bits: int):
    weights = random_matrix(64, 256)
    errors = [
        np.square(dequantize_blockwise(quantize_blockwise(weights, bits, positive_scales=positive)) - weights).mean()
        for positive in (False, True)
    ]
    assert errors[1] <= 1.2 * errors[0]  # 1.11 and 1.00


def test_matrix_that_blocks_do_not_divide_is_refused_by_name():
    model = matrix_graph(
        [helper.make_node("MatMul", ["token_ids", "odd"], ["result"])], {"odd": random_matrix(70, 8)}, tokens="token_ids"
    )
    with pytest.raises(ExportError, match="The matrix 'odd' reads 70 channels, which blocks of 32 do not divide"):
        insert_dequantized_weights(model.graph, rounding(4, positive_scales=True), lambda *_: None)


def test_graph_without_matrices_is_refused():
    model = matrix_graph([helper.make_node("Identity", ["token_ids"], ["result"])], {}, tokens="token_ids")
    with pytest.raises(ExportError, match="no constant weight matrices to quantise"):
        insert_dequantized_weights(model.graph, rounding(8, positive_scales=True), lambda *_: None)
