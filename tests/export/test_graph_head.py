"""The graph's end: rows of logits on demand, and heads with fewer tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from export.errors import ExportError
from export.graph_head import (
    LOGITS_ROWS,
    NUM_LOGITS_TO_KEEP,
    cut_head,
    keep_last_rows,
    most_frequent_tokens,
    select_rows,
)

VOCABULARY, HIDDEN = 40, 8
TOKENS = np.array([[0, 39, 3, 3, 21]])


def graph_of(nodes: list[onnx.NodeProto], **matrices: np.ndarray) -> ir.Model:
    """token_ids -> embedding -> nodes -> "logits"."""
    graph = helper.make_graph(
        [helper.make_node("Gather", ["embedding", "token_ids"], ["hidden"]), *nodes],
        "graph",
        [helper.make_tensor_value_info("token_ids", TensorProto.INT64, ["batch", "rows"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "rows", VOCABULARY])],
        [numpy_helper.from_array(values, name) for name, values in matrices.items()],
    )
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))


def matrix(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


def own_head() -> ir.Model:
    nodes = [helper.make_node("MatMul", ["hidden", "head"], ["logits"])]
    return graph_of(nodes, embedding=matrix(VOCABULARY, HIDDEN), head=matrix(HIDDEN, VOCABULARY, seed=1))


def tied_head() -> ir.Model:
    nodes = [
        helper.make_node("Transpose", ["embedding"], ["head"], perm=[1, 0]),
        helper.make_node("MatMul", ["hidden", "head"], ["logits"]),
    ]
    return graph_of(nodes, embedding=matrix(VOCABULARY, HIDDEN))


def softcapped_head() -> ir.Model:
    nodes = [
        helper.make_node("MatMul", ["hidden", "head"], ["raw"]),
        helper.make_node("Tanh", ["raw"], ["logits"]),
    ]
    return graph_of(nodes, embedding=matrix(VOCABULARY, HIDDEN), head=matrix(HIDDEN, VOCABULARY, seed=1))


def biased_head() -> ir.Model:
    """As Phi and GPT-J have it, and a scale behind."""
    nodes = [
        helper.make_node("MatMul", ["hidden", "head"], ["raw"]),
        helper.make_node("Add", ["raw", "bias"], ["biased"]),
        helper.make_node("Mul", ["biased", "scale"], ["logits"]),
    ]
    head, bias, scale = matrix(HIDDEN, VOCABULARY, seed=1), matrix(1, VOCABULARY, seed=2)[0], np.float32(0.25)
    return graph_of(nodes, embedding=matrix(VOCABULARY, HIDDEN), head=head, bias=bias, scale=np.asarray(scale))


def tied_head_behind_its_bias() -> ir.Model:
    nodes = [
        helper.make_node("Transpose", ["embedding"], ["head"], perm=[1, 0]),
        helper.make_node("MatMul", ["hidden", "head"], ["raw"]),
        helper.make_node("Add", ["bias", "raw"], ["logits"]),
    ]
    return graph_of(nodes, embedding=matrix(VOCABULARY, HIDDEN), bias=matrix(1, VOCABULARY, seed=2)[0])


def head_behind_a_second_product() -> ir.Model:
    """Logits with something added that is computed for each row: no bias."""
    nodes = [
        helper.make_node("MatMul", ["hidden", "head"], ["raw"]),
        helper.make_node("MatMul", ["hidden", "other"], ["added"]),
        helper.make_node("Add", ["raw", "added"], ["logits"]),
    ]
    head, other = matrix(HIDDEN, VOCABULARY, seed=1), matrix(HIDDEN, VOCABULARY, seed=2)
    return graph_of(nodes, embedding=matrix(VOCABULARY, HIDDEN), head=head, other=other)


def run(model: ir.Model, **inputs: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    serialized = ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])
    return session.run(None, {"token_ids": TOKENS, **inputs})[0]


def product_of(model: ir.Model) -> ir.Node:
    return next(node for node in model.graph if node.op_type == "MatMul")


RECOGNISED = pytest.mark.parametrize("build", [own_head, tied_head, softcapped_head, biased_head, tied_head_behind_its_bias])


@RECOGNISED
def test_the_last_rows_are_computed_and_all_by_default(build: Callable[[], ir.Model]) -> None:
    whole, model = run(build()), build()
    assert keep_last_rows(model)
    assert product_of(model).inputs[0].name == "head.rows"
    assert np.array_equal(run(model), whole), "a program that does not know the input gets all rows"
    for count in range(1, 6):
        assert np.array_equal(run(model, **{NUM_LOGITS_TO_KEEP: np.array(count)}), whole[:, -count:])
    assert np.array_equal(run(model, **{NUM_LOGITS_TO_KEEP: np.array(0)}), whole)


@RECOGNISED
def test_the_rows_that_are_named_are_computed(build: Callable[[], ir.Model]) -> None:
    whole, model = run(build()), build()
    assert select_rows(model)
    assert product_of(model).inputs[0].name == "head.rows"
    for rows in ([4], [0, 1, 2, 3, 4], [2, 3]):
        assert np.array_equal(run(model, **{LOGITS_ROWS: np.array(rows)}), whole[:, rows])
    assert model.graph.outputs[0].shape[1] == LOGITS_ROWS


@RECOGNISED
def test_a_cut_head_gives_the_columns_that_were_kept(build: Callable[[], ir.Model]) -> None:
    kept = np.array([0, 3, 21, 39], np.int32)
    whole, model = run(build()), build()
    cut_head(model, kept)
    assert np.allclose(run(model), whole[:, :, kept], atol=1e-6)
    assert model.graph.outputs[0].shape[2] == 4
    sizes = {name: value.const_value.shape for name, value in model.graph.initializers.items()}
    assert set(sizes) - {"scale", "bias.kept"} == {"embedding", "head.kept"}, "the whole head is gone"
    assert not any(node.op_type == "Transpose" for node in model.graph)


def test_a_cut_head_leaves_the_embedding_whole() -> None:
    model = tied_head()
    cut_head(model, np.array([1, 2], np.int32))
    assert model.graph.initializers["embedding"].const_value.shape == (VOCABULARY, HIDDEN)


def test_other_ends_are_left_or_refused() -> None:
    model = head_behind_a_second_product()
    before = [node.op_type for node in model.graph]
    assert not keep_last_rows(model)
    assert not select_rows(model)
    assert ([node.op_type for node in model.graph], len(model.graph.inputs)) == (before, 1)
    with pytest.raises(ExportError, match=r"do not come from a product with a constant matrix.*leave --draft-vocab out"):
        cut_head(model, np.array([1], np.int32))


def test_tokens_are_kept_by_frequency_then_by_id() -> None:
    text = [9, 9, 9, 7, 7, 30, 99]
    assert most_frequent_tokens(text, 2, vocab_size=40).tolist() == [7, 9]
    assert most_frequent_tokens(text, 3, vocab_size=40, always=(35,)).tolist() == [7, 9, 35]
    assert most_frequent_tokens(text, 6, vocab_size=40, always=(35,)).tolist() == [0, 1, 7, 9, 30, 35]
    assert most_frequent_tokens(text, 50, vocab_size=10).tolist() == list(range(10))
    assert most_frequent_tokens([], 3, vocab_size=10).dtype == np.int32
