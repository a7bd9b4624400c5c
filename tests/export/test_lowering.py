"""The `gqa` lowering on the tiny pair's base graphs: what comes out, what is refused, and the very end of the context."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from export.base_graph import build_base_graph
from export.decoders import write_decoder
from export.errors import ExportError
from export.lowerings.gqa import SPARE_ROWS, lower_to_group_query_attention
from export.lowerings.positions import PADDING_ROWS
from export.reference import load_reference
from export.role import Role
from export.source import Source
from runtime.contract import DecoderSpec
from runtime.decoder import Decoder
from runtime.ort.backend import OrtBackend

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
    others = {"input_ids", "attention_mask", "num_logits_to_keep"}
    assert {value.name for value in model.graph.input} == others | {past for past, _ in pairs}
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
    assert (target.num_layers, target.num_key_value_heads, target.head_size, target.spare_slots) == (4, 2, 16, 1)
    draft = lower_to_group_query_attention(build_base_graph(draft_source), 512)
    assert (draft.num_layers, draft.num_key_value_heads, draft.head_size, draft.cache_capacity) == (1, 1, 16, None)


def test_rotary_tables_are_cut_to_the_context_padding_and_the_spare_row(draft_source: Source):
    model = build_base_graph(draft_source)
    whole = model.graph.initializers["model.rotary_emb.cos_cache"].const_value.numpy()
    lower_to_group_query_attention(model, 100)
    names = ("model.rotary_emb.cos_cache.kernel", "model.rotary_emb.sin_cache.kernel")
    tables = [model.graph.initializers[name].const_value.numpy() for name in names]
    assert [len(table) for table in tables] == [100 + PADDING_ROWS + SPARE_ROWS] * 2
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


def not_causal(graph: ir.Graph) -> None:
    nodes_of(graph, "Attention")[0].attributes.add(ir.AttrInt64("is_causal", 0))


def with_newer_operator(graph: ir.Graph) -> None:
    product = nodes_of(graph, "Sigmoid")[0]
    product.op_type = "Swish"  # of opset 24


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (without_attention, "found no Attention node .*recurrent or state-space"),
        (not_causal, "Layer 0's attention '.*' is not causal"),
        (with_newer_operator, r"operator Swish \('.*'\) is newer than opset 21"),
    ],
)
def test_unsupported_form_is_refused_by_name(draft_source: Source, change: Change, sentence: str):
    model = build_base_graph(draft_source)
    change(model.graph)
    with pytest.raises(ExportError, match=sentence):
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


@pytest.mark.parametrize(("rows", "multiple"), [(2, 2), (16, 1)])
def test_cache_full_to_the_last_slot_with_padding_behind_it(
    target_source: Source, probe: list[int], tmp_path: Path, rows: int, multiple: int
):
    tokens = probe[:48]
    spec = write_decoder(Role("target", target_source, "fp32", 48), tmp_path, lambda *_: None)
    padded = dataclasses.replace(spec, min_rows=rows, row_multiple=multiple)
    decoder = Decoder(OrtBackend().load(padded, tmp_path), 48, num_rows=48)
    found = [decoder.forward([token], 1).copy() for token in tokens]
    expected = Decoder(OrtBackend().load(spec, tmp_path), 48, num_rows=48).forward(tokens, 48)
    assert np.array_equal(np.concatenate(found), expected)


@pytest.mark.parametrize("cut", [[48], [47, 1], [40, 8], [1] * 48], ids=["one pass", "lone last row", "block", "row by row"])
def test_cache_full_to_the_last_slot(target_source: Source, probe: list[int], tmp_path: Path, cut: list[int]):
    # The rotary table ends here, and the spare row's slot is the cache's last.
    tokens = probe[:48]
    spec = write_decoder(Role("target", target_source, "fp32", 48), tmp_path, lambda *_: None)
    decoder = Decoder(OrtBackend().load(spec, tmp_path), 48, num_rows=48)
    found = [decoder.forward(tokens[decoder.past_length :][:rows], rows).copy() for rows in cut]
    assert decoder.room() == 0
    expected = load_reference(target_source).logits([tokens])[0]
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-3)
    one_piece = Decoder(OrtBackend().load(spec, tmp_path), 48, num_rows=48).forward(tokens, 48)
    assert np.array_equal(np.concatenate(found), one_piece)
