"""The `gqa` lowering on the tiny pair's base graphs: what comes out, what is refused, and the very end of the context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from export.base_graph import build_base_graph
from export.bundle import _Role, _write_decoder
from export.errors import ExportError
from export.lowering import SPARE_ROWS, lower_to_group_query_attention
from export.parity import load_reference, reference_logits
from export.source import Source
from runtime.contract import DecoderSpec
from runtime.decoder import Decoder
from runtime.ort_backend import OrtBackend

Change = Callable[[ir.Graph], None]


def nodes_of(graph: ir.Graph, op: str) -> list[ir.Node]:
    return [node for node in graph if node.op_type == op]


# --- what comes out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layers"), [("fp32", 4), ("int8", 4), ("int4", 4), ("draft", 1)])
def test_graph_is_pinned_and_reads_tokens_mask_and_caches_only(
    decoders: dict[str, DecoderSpec], decoders_folder: Path, name: str, layers: int
):
    spec = decoders[name]
    model = onnx.load(decoders_folder / spec.graph[0].path, load_external_data=False)
    assert {opset.domain: opset.version for opset in model.opset_import} == {"": 21, "com.microsoft": 1}
    assert model.ir_version == 10
    pairs = list(spec.names.cache_pairs(layers))
    assert {value.name for value in model.graph.input} == {"input_ids", "attention_mask", *(past for past, _ in pairs)}
    assert {value.name for value in model.graph.output} == {"logits", *(present for _, present in pairs)}
    assert not model.functions


def test_every_layer_has_one_attention_node(draft_source: Source, target_source: Source):
    for source, layers in ((draft_source, 1), (target_source, 4)):
        model = build_base_graph(source)
        lower_to_group_query_attention(model, 64)
        operators = Counter(node.op_type for node in model.graph)
        assert operators["GroupQueryAttention"] == layers
        assert {"Attention", "RotaryEmbedding", "RMSNormalization"}.isdisjoint(operators)


def test_geometry_is_the_configs(draft_source: Source, target_source: Source):
    target = lower_to_group_query_attention(build_base_graph(target_source), 100)
    assert (target.num_layers, target.num_key_value_heads, target.head_size, target.position_rows) == (4, 2, 16, 100)
    draft = lower_to_group_query_attention(build_base_graph(draft_source), 512)
    assert (draft.num_layers, draft.num_key_value_heads, draft.head_size, draft.position_rows) == (1, 1, 16, 512)


def test_rotary_tables_are_cut_to_the_context_and_the_spare_row(draft_source: Source):
    model = build_base_graph(draft_source)
    whole = model.graph.initializers["model.rotary_emb.cos_cache"].const_value.numpy()
    lower_to_group_query_attention(model, 100)
    tables = [model.graph.initializers[name].const_value.numpy() for name in ("rotary.cosine_table", "rotary.sine_table")]
    assert [len(table) for table in tables] == [100 + SPARE_ROWS] * 2
    assert np.array_equal(tables[0][:100], whole[:100])
    assert "model.rotary_emb.cos_cache" not in model.graph.initializers


def test_softcap_and_scale_carry_over(draft_source: Source):
    model = build_base_graph(draft_source)
    (attention,) = nodes_of(model.graph, "Attention")
    attention.attributes.add(ir.AttrFloat32("softcap", 30.0))
    attention.attributes.add(ir.AttrFloat32("scale", 0.125))
    lower_to_group_query_attention(model, 64)
    (attention,) = nodes_of(model.graph, "GroupQueryAttention")
    assert attention.attributes.get_float("softcap") == 30.0
    assert attention.attributes.get_float("scale") == 0.125


def test_graph_without_softcap_gets_none(draft_source: Source):
    model = build_base_graph(draft_source)
    lower_to_group_query_attention(model, 64)
    (attention,) = nodes_of(model.graph, "GroupQueryAttention")
    assert "softcap" not in attention.attributes


# --- what is refused -------------------------------------------------------------------------------------------------


def without_attention(graph: ir.Graph) -> None:
    for node in nodes_of(graph, "Attention"):
        node.op_type = "LinearAttention"


def with_windowed_mask(op: str) -> Change:
    """The mask of every layer goes through one more operator, as windows and prefixes are made."""

    def change(graph: ir.Graph) -> None:
        attention = nodes_of(graph, "Attention")[0]
        mask = attention.inputs[3]
        made = ir.node(op, [mask, mask, mask] if op == "Where" else [mask, mask], name="window")
        graph.insert_before(attention, made)
        attention.replace_input_with(3, made.outputs[0])

    return change


def not_causal(graph: ir.Graph) -> None:
    nodes_of(graph, "Attention")[0].attributes.add(ir.AttrInt64("is_causal", 0))


def without_rotary_keys(graph: ir.Graph) -> None:
    attention = nodes_of(graph, "Attention")[0]
    attention.replace_input_with(1, attention.inputs[1].producer().inputs[0])


def without_rotary_queries(graph: ir.Graph) -> None:
    attention = nodes_of(graph, "Attention")[0]
    attention.replace_input_with(0, attention.inputs[0].producer().inputs[0])


def with_computed_rotary_table(graph: ir.Graph) -> None:
    rotary = nodes_of(graph, "RotaryEmbedding")[0]
    gather = rotary.inputs[1].producer()
    cosine = ir.node("Cos", [gather.outputs[0]])
    cosine.outputs[0].name = "computed_rows"
    graph.insert_after(gather, cosine)
    for node in nodes_of(graph, "RotaryEmbedding"):
        node.replace_input_with(1, cosine.outputs[0])


def with_newer_operator(graph: ir.Graph) -> None:
    product = nodes_of(graph, "Sigmoid")[0]
    product.op_type = "Swish"  # of opset 24


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (without_attention, "found no Attention node .*recurrent or state-space"),
        (
            with_windowed_mask("Where"),
            r"Layer 0's attention mask is made with Where \('window'\), so it may hold",
        ),
        (with_windowed_mask("Less"), r"Layer 0's attention mask is made with Less \('window'\)"),
        (with_windowed_mask("Add"), r"Layer 0's attention mask is made with Add \('window'\)"),
        (not_causal, "Layer 0's attention '.*' is not causal"),
        (without_rotary_keys, "layer 0's attention '.*' reads Add node '.*' instead"),
        (without_rotary_queries, "layer 0's attention '.*' reads Add node '.*' instead"),
        (with_computed_rotary_table, "constant rotary table .*'computed_rows' is computed in the graph"),
        (with_newer_operator, r"operator Swish \('.*'\) is newer than opset 21"),
    ],
)
def test_unsupported_form_is_refused_by_name(draft_source: Source, change: Change, sentence: str):
    model = build_base_graph(draft_source)
    change(model.graph)
    with pytest.raises(ExportError, match=sentence):
        lower_to_group_query_attention(model, 64)


def test_window_in_a_later_layer_only_is_refused(target_source: Source):
    model = build_base_graph(target_source)
    attention = nodes_of(model.graph, "Attention")[2]
    made = ir.node("Less", [attention.inputs[3], attention.inputs[3]], name="window")
    model.graph.insert_before(attention, made)
    attention.replace_input_with(3, made.outputs[0])
    with pytest.raises(ExportError, match=r"Layer 2's attention mask is made with Less"):
        lower_to_group_query_attention(model, 64)


def test_layer_with_a_rotary_table_of_its_own_is_refused(target_source: Source):
    model = build_base_graph(target_source)
    for node in nodes_of(model.graph, "RotaryEmbedding")[2:4]:
        node.replace_input_with(1, node.inputs[2])
    with pytest.raises(ExportError, match="Layer 1's attention uses a rotary table of its own"):
        lower_to_group_query_attention(model, 64)


def test_layers_with_unlike_caches_are_refused(target_source: Source):
    model = build_base_graph(target_source)
    past = next(value for value in model.graph.inputs if value.name == "past_key_values.3.key")
    past.shape = ir.Shape([1, 4, None, 16])
    with pytest.raises(ExportError, match=r"caches differ in heads or head size .*4, 16"):
        lower_to_group_query_attention(model, 64)


def test_context_beyond_the_rotary_table_is_refused_with_the_longest_possible(draft_source: Source):
    with pytest.raises(ExportError, match="has 512 positions, and 513 were asked for: pass --max-length 512 or less"):
        lower_to_group_query_attention(build_base_graph(draft_source), 513)


# --- the end of the context ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [[48], [47, 1], [40, 8], [1] * 48], ids=["one pass", "lone last row", "block", "row by row"])
def test_cache_full_to_the_last_slot(target_source: Source, probe: list[int], tmp_path: Path, cut: list[int]):
    # The rotary table ends here, and the spare row's slot is the cache's last.
    tokens = probe[:48]
    spec = _write_decoder(_Role("target", target_source, "fp32", 48), tmp_path, lambda *_: None)
    decoder = Decoder(OrtBackend().load(spec, tmp_path), 48, num_rows=48)
    found = [decoder.forward(tokens[decoder.past_length :][:rows], rows).copy() for rows in cut]
    assert decoder.room() == 0
    expected = reference_logits(load_reference(target_source), tokens)
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-3)
    one_piece = Decoder(OrtBackend().load(spec, tmp_path), 48, num_rows=48).forward(tokens, 48)
    assert np.array_equal(np.concatenate(found), one_piece)
