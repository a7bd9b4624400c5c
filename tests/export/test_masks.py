"""Which attention masks a lowering may make anew: the plain causal one in whatever operators, and no other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from export.base_graph import build_base_graph
from export.errors import ExportError
from export.lowerings import LOWERINGS, lower
from export.lowerings.masks import drop_causal_masks
from export.source import Source

CONTEXT = 64
# Makes a mask of [batch, rows, tokens] from the places of the rows and of all tokens.
Rule = Callable[["Maker"], ir.Value]


class Maker:
    """Builds a mask from the inputs of a base graph, as models with masks of their own do."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.tape = ir.tape.Tape()
        self.inputs = {value.name: value for value in graph.inputs}
        self.rows = self.op("Unsqueeze", self.inputs["position_ids"], self.number([2]))
        counted = self.op("CumSum", self.inputs["attention_mask"], self.number(1))
        self.tokens = self.op("Unsqueeze", self.op("Sub", counted, self.number(1)), self.number([1]))

    def op(self, op: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        return self.tape.op(op, inputs, attributes=attributes)

    def number(self, values: object, dtype: type = np.int64) -> ir.Value:
        name = f"mask.{len(self.graph.initializers)}"
        value = ir.Value(name=name, const_value=ir.tensor(np.array(values, dtype), name=name))
        self.graph.register_initializer(value)
        return value

    def causal(self) -> ir.Value:
        return self.op("LessOrEqual", self.tokens, self.rows)

    def added(self, visible: ir.Value, shown: ir.Value | None = None) -> ir.Value:
        """A float mask of a boolean one."""
        zero, lowest = self.number(0, np.float32), self.number(np.finfo(np.float32).min, np.float32)
        return self.op("Where", visible, zero if shown is None else shown, lowest)


def causal(maker: Maker) -> ir.Value:
    return maker.added(maker.causal())


def causal_boolean(maker: Maker) -> ir.Value:
    return maker.causal()


def window(maker: Maker) -> ir.Value:
    near = maker.op("Less", maker.op("Sub", maker.rows, maker.tokens), maker.number(CONTEXT - 1))
    return maker.added(maker.op("And", maker.causal(), near))


def window_of_the_context(maker: Maker) -> ir.Value:
    near = maker.op("Less", maker.op("Sub", maker.rows, maker.tokens), maker.number(CONTEXT))
    return maker.added(maker.op("And", maker.causal(), near))


def chunks(maker: Maker) -> ir.Value:
    chunk = maker.number(32)
    same = maker.op("Equal", maker.op("Div", maker.rows, chunk), maker.op("Div", maker.tokens, chunk))
    return maker.op("And", maker.causal(), same)


def prefix(maker: Maker) -> ir.Value:
    return maker.added(maker.op("Or", maker.causal(), maker.op("Less", maker.tokens, maker.number(2))))


def everything(maker: Maker) -> ir.Value:
    return maker.op("GreaterOrEqual", maker.tokens, maker.op("Mul", maker.rows, maker.number(0)))


def one_head_sees_everything(maker: Maker) -> ir.Value:
    """A mask with an axis of heads: [batch, heads, rows, tokens]."""
    heads = maker.number(np.array([True, False, False, False]).reshape(1, 4, 1, 1), np.bool_)
    return maker.op("Or", maker.op("Unsqueeze", maker.causal(), maker.number([1])), heads)


def slope(maker: Maker) -> ir.Value:
    distance = maker.op("Cast", maker.op("Sub", maker.tokens, maker.rows), to=ir.DataType.FLOAT)
    return maker.added(maker.causal(), maker.op("Mul", distance, maker.number(0.1, np.float32)))


def by_content(maker: Maker) -> ir.Value:
    """Hides rows of one special token from all but themselves."""
    special = maker.op("Equal", maker.op("Unsqueeze", maker.inputs["input_ids"], maker.number([2])), maker.number(99))
    itself = maker.op("Equal", maker.tokens, maker.rows)
    return maker.op("And", maker.causal(), maker.op("Or", maker.op("Not", special), itself))


def by_caches(maker: Maker) -> ir.Value:
    sums = maker.op("ReduceSum", maker.inputs["past_key_values.0.key"], keepdims=0)
    return maker.op("And", maker.causal(), maker.op("Less", sums, maker.number(1e9, np.float32)))


def with_mask(source: Source, rule: Rule, *, layer: int = 0, is_causal: bool = False) -> ir.Model:
    model = build_base_graph(source)
    attention = [node for node in model.graph if node.op_type == "Attention"][layer]
    maker = Maker(model.graph)
    mask = rule(maker)
    if rule is not one_head_sees_everything:
        mask = maker.op("Unsqueeze", mask, maker.number([1]))
    mask.type = ir.TensorType(
        ir.DataType.FLOAT if any(node.op_type == "Where" for node in maker.tape.nodes) else ir.DataType.BOOL
    )
    model.graph.insert_before(model.graph[0], maker.tape.nodes)
    attention.replace_input_with(3, mask)
    attention.attributes.add(ir.AttrInt64("is_causal", int(is_causal)))
    return model


@pytest.mark.parametrize("rule", [causal, causal_boolean, window_of_the_context])
def test_causal_masks_of_any_make_are_taken(target_source: Source, rule: Rule):
    for is_causal in (False, True):
        model = with_mask(target_source, rule, is_causal=is_causal)
        drop_causal_masks(model.graph, CONTEXT, "gqa")
        assert [node.inputs[3] for node in model.graph if node.op_type == "Attention"] == [None] * 4
        assert not [node for node in model.graph if node.op_type in {"CumSum", "Where", "LessOrEqual", "Expand"}]


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        (window, "hides the token at 0 from the one at 63, as a sliding window or chunks would.*pass a shorter --max-length"),
        (chunks, "hides the token at 31 from the one at 63, as a sliding window or chunks would"),
        (prefix, "is not causal, or lets a prefix see itself"),
        (one_head_sees_everything, "is not causal, or lets a prefix see itself"),
        (everything, "is not causal, or lets a prefix see itself"),
        (slope, r"adds a positional bias to its scores \(as ALiBi does\)"),
        (by_content, "mask that depends on which tokens there are"),
        (by_caches, "mask that depends on what is cached"),
    ],
)
def test_other_masks_are_refused_by_name(target_source: Source, rule: Rule, sentence: str):
    with pytest.raises(ExportError, match=rf"^Layer 2's attention '.*' {sentence}|^Layer 2's attention '.*' has a {sentence}"):
        drop_causal_masks(with_mask(target_source, rule, layer=2).graph, CONTEXT, "gqa")


def test_prefix_is_no_matter_where_the_node_is_causal_itself(target_source: Source):
    drop_causal_masks(with_mask(target_source, prefix, is_causal=True).graph, CONTEXT, "gqa")


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_every_lowering_looks_at_the_masks(target_source: Source, lowering: str):
    lower(with_mask(target_source, causal), lowering, "fp16", CONTEXT, lambda *_: None)
    with pytest.raises(ExportError, match=f"as a sliding window or chunks would; the {lowering} lowering keeps"):
        lower(with_mask(target_source, window), lowering, "fp32", CONTEXT, lambda *_: None)
