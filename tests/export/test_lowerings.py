"""Every lowering in every precision on the tiny pair: what it computes, what it is made of, how its caches behave."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto
from onnx.defs import get_schema

from export.base_graph import build_base_graph
from export.bundle import export_bundle
from export.decoders import write_decoder
from export.errors import ExportError
from export.graph_edit import add_initializer
from export.lowerings import LOWERINGS, STANDARD_FORMS, lower
from export.parity import exact_activations, rounding_of
from export.quantization import BITS
from export.reference import load_reference
from export.role import PRECISIONS as ALL_PRECISIONS
from export.role import Role
from export.source import Source
from runtime import Generator, SamplingParams
from runtime.contract import DecoderSpec
from runtime.decoder import Decoder, context_size
from runtime.errors import BundleError
from runtime.ort.backend import OrtBackend, OrtModel
from runtime.row_equality import measure_row_equality

CONTEXT = 48
PRECISIONS = [precision for precision in ALL_PRECISIONS if precision != "bf16"]  # the CPU computes; see test_bfloat16.py
ALL = [(lowering, precision) for lowering in LOWERINGS for precision in PRECISIONS]
STANDARD = [(lowering, precision) for lowering, precision in ALL if lowering in STANDARD_FORMS]
# Sums in another order; and values rounded to 11 bits, in logits that span some 40 (0.07 at most was seen).
TOLERANCES = {"float32": 1e-3, "float16": 0.15}
# What a lowering and precision make of the logits of some tokens.
Logits = Callable[[tuple[str, str], list[int]], NDArray[np.float32]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lowerings")


@pytest.fixture(scope="module")
def specs(target_source: Source, folder: Path) -> dict[tuple[str, str], DecoderSpec]:
    """The tiny target in every lowering and precision."""
    made = {}
    for lowering, precision in ALL:
        role = Role(f"{lowering}-{precision}", target_source, precision, CONTEXT, lowering=lowering)
        made[lowering, precision] = write_decoder(role, folder, lambda *_: None)
    return made


@pytest.fixture(scope="module")
def reference_logits(target_source: Source, specs: dict[tuple[str, str], DecoderSpec]) -> Logits:
    """A function for the checkpoint's logits in torch, its weights rounded as a lowering and precision does."""
    reference = load_reference(target_source)
    return lambda key, tokens: reference.logits([tokens], rounding_of(specs[key], reference))[0]


@pytest.fixture
def exact_model(request: pytest.FixtureRequest, specs: dict[tuple[str, str], DecoderSpec], folder: Path) -> Iterator[OrtModel]:
    """A decoder whose quantised products keep float activations, so that it can be held against torch."""
    with exact_activations(specs[request.param], folder) as spec:
        yield OrtBackend(threads=1, exact_products=True).load(spec, folder)


def load(spec: DecoderSpec, folder: Path) -> OrtModel:
    return OrtBackend(threads=1).load(spec, folder)


def in_cuts(model: OrtModel, tokens: list[int], cut: list[int]) -> NDArray[np.float32]:
    decoder = Decoder(model, len(tokens), num_rows=max(cut))
    return np.concatenate([decoder.forward(tokens[decoder.past_length :][:rows], rows).copy() for rows in cut])


def graph_of(spec: DecoderSpec, folder: Path) -> onnx.ModelProto:
    return onnx.load(folder / spec.graph[0].path)


# --- what is computed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("exact_model", "key"), [(key, key) for key in ALL], ids=str, indirect=["exact_model"])
def test_prefill_one_token_verification_and_rewind(
    exact_model: OrtModel, key: tuple[str, str], reference_logits: Logits, probe: list[int]
):
    straight, turned = probe[:32], [*probe[:22], *reversed(probe[30:40])]
    decoder = Decoder(exact_model, 40, num_rows=20)
    found = [decoder.forward(straight[:20], 20).copy(), decoder.forward(straight[20:21], 1).copy()]
    found.append(decoder.forward(straight[21:26], 5).copy())
    found.append(decoder.forward(straight[26:], 6).copy())
    decoder.rewind_to(22)
    after_rewind = decoder.forward(turned[22:], 10)
    tolerance = TOLERANCES[exact_model.spec.cache_dtype]
    np.testing.assert_allclose(np.concatenate(found), reference_logits(key, straight), atol=tolerance, rtol=0)
    np.testing.assert_allclose(after_rewind, reference_logits(key, turned)[22:], atol=tolerance, rtol=0)


@pytest.mark.parametrize(("exact_model", "key"), [(key, key) for key in ALL], ids=str, indirect=["exact_model"])
def test_greedy_text_is_the_checkpoints(
    exact_model: OrtModel, key: tuple[str, str], reference_logits: Logits, probe: list[int]
):
    prompt, tolerance = probe[:20], TOLERANCES[exact_model.spec.cache_dtype]
    decoder = Decoder(exact_model, 36, num_rows=1)
    tokens = list(prompt)
    for _ in range(16):
        tokens.append(int(decoder.forward(tokens[decoder.past_length :], 1)[0].argmax()))
    expected = reference_logits(key, tokens[:-1])[len(prompt) - 1 :]
    # Where the two best tokens are nearer than the tolerance allows to tell, either will do.
    best = expected.max(axis=1)
    assert (expected[np.arange(16), tokens[len(prompt) :]] >= best - 2 * tolerance).all()
    agreeing = (expected.argmax(axis=1) == tokens[len(prompt) :]).mean()
    assert agreeing == 1 or (key[1] != "fp32" and agreeing > 0.9)


@pytest.mark.parametrize(("lowering", "precision"), STANDARD)
def test_rows_have_the_same_bits_in_every_cut(
    specs: dict[tuple[str, str], DecoderSpec], folder: Path, probe: list[int], lowering: str, precision: str
):
    spec, tokens = specs[lowering, precision], probe[:CONTEXT]
    shape = measure_row_equality(load(spec, folder), tokens)
    assert shape is not None
    model = load(dataclasses.replace(spec, min_rows=shape.min_rows, row_multiple=shape.row_multiple), folder)
    whole = in_cuts(model, tokens, [48])
    for cut in ([1] * 48, [40, 1, 1, 5, 1], [20, *[1, 2, 3, 1] * 4]):
        # To the last slot of the context: where padding is asked for, it lies behind it.
        assert np.array_equal(in_cuts(model, tokens, cut), whole)


@pytest.mark.parametrize(("lowering", "precision"), STANDARD)
def test_what_stands_beyond_the_length_changes_nothing(
    specs: dict[tuple[str, str], DecoderSpec], folder: Path, probe: list[int], lowering: str, precision: str
):
    model = load(specs[lowering, precision], folder)
    whole = in_cuts(model, probe[:40], [40])
    decoder = Decoder(model, 40, num_rows=20)
    for begin, end in ((0, 20), (20, 24), (24, 40)):
        for cache in decoder._context.caches:
            cache[:, :, begin:] = 1000
        assert np.array_equal(decoder.forward(probe[begin:end], end - begin), whole[begin:end])


@pytest.mark.parametrize("lowering", STANDARD_FORMS)
def test_what_is_cached_matters(specs: dict[tuple[str, str], DecoderSpec], folder: Path, probe: list[int], lowering: str):
    model = load(specs[lowering, "fp16"], folder)
    decoder = Decoder(model, 40, num_rows=20)
    decoder.forward(probe[:20], 1)
    for cache in decoder._context.caches:
        cache[:, :, 19] = 0
    assert not np.array_equal(decoder.forward(probe[20:24], 4), in_cuts(model, probe[:40], [40])[20:24])


@pytest.mark.parametrize("lowering", STANDARD_FORMS)
def test_a_copied_cache_goes_on_alone(specs: dict[tuple[str, str], DecoderSpec], folder: Path, probe: list[int], lowering: str):
    model = load(specs[lowering, "fp16"], folder)
    decoder = Decoder(model, 40, num_rows=20)
    decoder.forward(probe[:20], 1)
    copy_ = decoder.fork()
    decoder.forward(probe[40:60], 1)
    assert np.array_equal(copy_.forward(probe[20:40], 20), in_cuts(model, probe[:40], [20, 20])[20:])


# --- what it is made of ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lowering", "precision"), STANDARD)
def test_graph_is_standard_and_pinned(specs: dict[tuple[str, str], DecoderSpec], folder: Path, lowering: str, precision: str):
    spec = specs[lowering, precision]
    onnx.checker.check_model(str(folder / spec.graph[0].path), full_check=True)
    model = graph_of(spec, folder)
    opset, ir_version = {"static": (24, 11), "primitive": (21, 10)}[lowering]
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", opset)]
    assert model.ir_version == ir_version
    assert not model.functions
    assert {node.domain for node in model.graph.node} == {""}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_static_attention_has_one_additive_mask_and_nothing_else_that_hides(
    specs: dict[tuple[str, str], DecoderSpec], folder: Path, precision: str
):
    model = onnx.shape_inference.infer_shapes(graph_of(specs["static", precision], folder))
    types = {value.name: value.type.tensor_type for value in (*model.graph.value_info, *model.graph.output)}
    attentions = [node for node in model.graph.node if node.op_type == "Attention"]
    assert len(attentions) == 4
    for node in attentions:
        assert len(node.input) == 4  # query, key, value, mask: no past, no nonpad_kv_seqlen
        assert {attribute.name for attribute in node.attribute} == {"scale"}
        assert len(node.output) == 1
        assert types[node.input[3]].elem_type == types[node.input[0]].elem_type
        assert [len(types[name].shape.dim) for name in node.input] == [4, 4, 4, 4]
    assert len({node.input[3] for node in attentions}) == 1
    assert sum(node.op_type == "TensorScatter" for node in model.graph.node) == 8


@pytest.mark.parametrize("precision", PRECISIONS)
def test_primitive_operators_are_as_old_as_opset_18(specs: dict[tuple[str, str], DecoderSpec], folder: Path, precision: str):
    model = graph_of(specs["primitive", precision], folder)
    operators = {node.op_type for node in model.graph.node}
    # Later versions of these only add element types.
    since = {name: get_schema(name, 18, "").since_version for name in operators - {"DequantizeLinear"}}
    assert max(since.values()) <= 18
    assert {"Attention", "RotaryEmbedding", "RMSNormalization", "TensorScatter", "LayerNormalization"}.isdisjoint(operators)
    assert ("DequantizeLinear" in operators) == (precision in BITS)
    assert "ScatterND" in operators


@pytest.mark.parametrize(("lowering", "precision"), STANDARD)
def test_interface_is_tokens_length_and_caches_of_one_size(
    specs: dict[tuple[str, str], DecoderSpec], folder: Path, lowering: str, precision: str
):
    spec = specs[lowering, precision]
    graph = graph_of(spec, folder).graph

    def interface(values: list[onnx.ValueInfoProto]) -> dict[str, tuple[int, list[int | str]]]:
        tensors = {value.name: value.type.tensor_type for value in values}
        return {
            name: (tensor.elem_type, [dim.dim_value or dim.dim_param for dim in tensor.shape.dim])
            for name, tensor in tensors.items()
        }

    half = precision != "fp32"
    assert spec.cache_dtype == ("float16" if half else "float32")
    assert spec.cache_capacity == 64  # 48 and 15 for padding rows, in whole sixteens
    cache = (TensorProto.FLOAT16 if half else TensorProto.FLOAT, [1, 2, 64, 16])
    pairs = list(spec.names.cache_pairs(4))
    assert interface(graph.input) == {
        "input_ids": (TensorProto.INT64, [1, "rows"]),
        "past_length": (TensorProto.INT64, [1]),
        "logits_rows": (TensorProto.INT64, ["logits_rows"]),
    } | {past: cache for past, _ in pairs}
    assert interface(graph.output) == {"logits": (TensorProto.FLOAT, [1, "logits_rows", 512])} | {
        name: cache for _, name in pairs
    }


@pytest.mark.parametrize(("lowering", "precision"), [key for key in STANDARD if key[1] != "fp32"])
def test_half_precision_spares_norms_softmax_rotations_and_their_tables(
    specs: dict[tuple[str, str], DecoderSpec], folder: Path, lowering: str, precision: str
):
    model = onnx.shape_inference.infer_shapes(graph_of(specs[lowering, precision], folder))
    types = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.value_info, *model.graph.output)}
    types |= {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    spared = {"RMSNormalization", "RotaryEmbedding", "Softmax", "ReduceMean", "Sqrt", "Div"}
    nodes = [node for node in model.graph.node if node.op_type in spared]
    assert len(nodes) >= 9 + 4
    for node in nodes:
        assert {types[name] for name in (*node.input, *node.output)} - {TensorProto.INT64} == {TensorProto.FLOAT}, node.name
    tables = [name for name in types if "rotary_emb" in name and name.endswith(".cut")]
    assert [types[name] for name in tables] == [TensorProto.FLOAT] * 2
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    assert {types[name] for node in products for name in (*node.input, *node.output)} == {TensorProto.FLOAT16}


@pytest.mark.parametrize("lowering", STANDARD_FORMS)
@pytest.mark.parametrize(("precision", "code_type"), [("int8", TensorProto.INT8), ("int4", TensorProto.INT4)])
def test_every_product_with_weights_reads_symmetric_blocks(
    specs: dict[tuple[str, str], DecoderSpec], folder: Path, lowering: str, precision: str, code_type: int
):
    graph = graph_of(specs[lowering, precision], folder).graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    dequantized = {node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear"}
    assert len(dequantized) == 4 * 7 + 1
    readers = [node for node in graph.node if node.op_type == "MatMul" and node.input[1] in dequantized]
    assert len(readers) == len(dequantized)
    for node in dequantized.values():
        codes, scales = (tensors[name] for name in node.input)
        assert codes.data_type == code_type
        assert list(codes.dims) == [scales.dims[0] * 32, scales.dims[1]]
        assert (onnx.numpy_helper.to_array(scales) > 0).all()
    assert not [node for node in graph.node if node.op_type == "MatMul" and node.input[1] in tensors]


# --- a context of another size, manifests and refusals ---------------------------------------------------------------


@pytest.mark.parametrize("lowering", STANDARD_FORMS)
def test_caches_have_the_graphs_size_whatever_is_asked_for(
    specs: dict[tuple[str, str], DecoderSpec], folder: Path, lowering: str
):
    spec = specs[lowering, "fp16"]
    assert [cache.shape[2] for cache in load(spec, folder).open_context(10, 4).caches] == [64] * 8
    assert context_size(spec, 10, 4)[0] == 64


def test_manifest_of_another_capacity_is_refused(specs: dict[tuple[str, str], DecoderSpec], folder: Path):
    spec = dataclasses.replace(specs["static", "fp32"], cache_capacity=128)
    with pytest.raises(BundleError, match=r"64, .*, and the manifest's cache_capacity is 128: export it again"):
        load(spec, folder)


def test_pair_in_static_form_speculates_exactly(tiny_target: Path, tiny_draft: Path, tmp_path: Path):
    export_bundle(str(tiny_target), str(tiny_draft), tmp_path / "bundle", precision="fp32", lowering="static", max_length=256)
    generator = Generator.from_bundle(tmp_path / "bundle", threads=1)
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    texts = [
        generator.generate(messages, SamplingParams(max_new_tokens=40), drafter=drafter)
        for drafter in ("off", "model", "lookup")
    ]
    assert texts[1].stats.draft_passes > 0
    assert texts[0].token_ids == texts[1].token_ids == texts[2].token_ids


def with_capped_scores(graph: ir.Graph) -> None:
    for node in nodes_of(graph, "Attention"):
        node.attributes.add(ir.AttrFloat32("softcap", 0.5))


def with_another_scale(graph: ir.Graph) -> None:
    for node in nodes_of(graph, "Attention"):
        node.attributes.add(ir.AttrFloat32("scale", 0.7))


def with_interleaved_rotation(graph: ir.Graph) -> None:
    for node in nodes_of(graph, "RotaryEmbedding"):
        node.attributes.add(ir.AttrInt64("interleaved", 1))


def with_half_of_a_head_rotated(graph: ir.Graph) -> None:
    for name in ("model.rotary_emb.cos_cache", "model.rotary_emb.sin_cache"):
        value = graph.initializers[name]
        value.const_value = ir.tensor(value.const_value.numpy()[:, :4].copy(), name=name)
        value.shape = value.const_value.shape
        (reader,) = (node for node, _ in value.uses())
        reader.outputs[0].shape = ir.Shape([*reader.outputs[0].shape[:2], 4])
    for node in nodes_of(graph, "RotaryEmbedding"):
        node.attributes.add(ir.AttrInt64("rotary_embedding_dim", 8))


def without_rotation_in_a_layer(graph: ir.Graph) -> None:
    for index in (0, 1):
        attention = nodes_of(graph, "Attention")[2]
        attention.replace_input_with(index, attention.inputs[index].producer().inputs[0])


def without_rotation_of_keys(graph: ir.Graph) -> None:
    attention = nodes_of(graph, "Attention")[1]
    attention.replace_input_with(1, attention.inputs[1].producer().inputs[0])


def with_tables_of_its_own_in_a_layer(graph: ir.Graph) -> None:
    rotations = nodes_of(graph, "RotaryEmbedding")[2:4]
    for place, name in ((1, "cos"), (2, "sin")):
        lookup = rotations[0].inputs[place].producer()
        table = lookup.inputs[0]
        backwards = add_initializer(graph, f"{name}.backwards", table.const_value.numpy()[:, ::-1].copy())
        other = ir.node("Gather", [backwards, lookup.inputs[1]])
        other.outputs[0].type, other.outputs[0].shape = lookup.outputs[0].type, lookup.outputs[0].shape
        graph.insert_after(lookup, other)
        for node in rotations:
            node.replace_input_with(place, other.outputs[0])


def with_computed_rotary_rows(graph: ir.Graph) -> None:
    rotations = nodes_of(graph, "RotaryEmbedding")
    lookup = rotations[0].inputs[1].producer()
    absolute = ir.node("Abs", [lookup.outputs[0]])
    absolute.outputs[0].type, absolute.outputs[0].shape = lookup.outputs[0].type, lookup.outputs[0].shape
    graph.insert_after(lookup, absolute)
    for node in rotations:
        node.replace_input_with(1, absolute.outputs[0])


def reading_positions(graph: ir.Graph) -> None:
    """Adds the position to what the embedding gives, as learned positions would."""
    lookup = nodes_of(graph, "Gather")[0]
    position_ids = next(value for value in graph.inputs if value.name == "position_ids")
    number = ir.node("Cast", [position_ids], attributes={"to": ir.DataType.FLOAT})
    column = ir.node("Unsqueeze", [number.outputs[0], add_initializer(graph, "axis", np.array([2]))])
    total = ir.node("Add", [lookup.outputs[0], column.outputs[0]])
    total.outputs[0].type, total.outputs[0].shape = lookup.outputs[0].type, lookup.outputs[0].shape
    ir.convenience.replace_all_uses_with(lookup.outputs[0], total.outputs[0])
    total.replace_input_with(0, lookup.outputs[0])
    graph.insert_after(lookup, [number, column, total])


@pytest.mark.parametrize(
    ("change", "forms"),
    [
        (with_capped_scores, ("gqa", "primitive")),
        (with_another_scale, ("gqa", "static", "primitive")),
        (with_interleaved_rotation, ("gqa", "static", "primitive")),
        (with_half_of_a_head_rotated, ("gqa", "static", "primitive")),
        (without_rotation_in_a_layer, ("gqa", "static", "primitive")),
        (without_rotation_of_keys, ("gqa", "static", "primitive")),
        (with_tables_of_its_own_in_a_layer, ("gqa", "static", "primitive")),
        (with_computed_rotary_rows, ("gqa", "static", "primitive")),
        (reading_positions, ("gqa", "static", "primitive")),
    ],
)
def test_other_attention_is_the_same_in_every_form(
    target_source: Source,
    tmp_path: Path,
    probe: list[int],
    change: Callable[[ir.Graph], None],
    forms: tuple[str, ...],
):
    logits = {}
    for form in forms:
        model = build_base_graph(target_source)
        change(model.graph)
        geometry = lower(model, form, "fp32", CONTEXT, lambda *_: None)
        ir.save(model, tmp_path / f"{form}.onnx")
        logits[form] = run_once(tmp_path / f"{form}.onnx", probe[:20], geometry.cache_capacity or 21)
    for form in forms[1:]:
        np.testing.assert_allclose(logits[form], logits[forms[0]], atol=1e-3)
    model = build_base_graph(target_source)
    lower(model, forms[-1], "fp32", CONTEXT, lambda *_: None)
    ir.save(model, tmp_path / "plain.onnx")
    assert np.abs(run_once(tmp_path / "plain.onnx", probe[:20], 64) - logits[forms[0]]).max() > 0.1, "the change shows"


def test_capped_scores_are_refused_where_tensorrt_has_none(target_source: Source):
    model = build_base_graph(target_source)
    with_capped_scores(model.graph)
    with pytest.raises(ExportError, match=r"caps its attention scores.* --lowering primitive"):
        lower(model, "static", "fp16", CONTEXT, lambda *_: None)


def nodes_of(graph: ir.Graph, op: str) -> list[ir.Node]:
    return [node for node in graph if node.op_type == op]


def run_once(path: Path, tokens: list[int], capacity: int) -> NDArray[np.float32]:
    """The logits of a first pass."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feeds = {
        "input_ids": np.array([tokens]),
        "attention_mask": np.ones((1, len(tokens)), np.int64),
        "past_length": np.array([0]),
        "num_logits_to_keep": np.array(0),
        "logits_rows": np.arange(len(tokens)),
    }
    names = {value.name for value in session.get_inputs()}
    feeds = {name: value for name, value in feeds.items() if name in names}
    feeds |= {name: np.zeros((1, 2, capacity, 16), np.float32) for name in names - set(feeds)}
    logits: NDArray[np.float32] = session.run(["logits"], feeds)[0][0]
    return logits


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_context_beyond_the_tables_is_refused(draft_source: Source, lowering: str):
    with pytest.raises(ExportError, match="has 512 positions, and 513 were asked for: pass --max-length 512 or less"):
        lower(build_base_graph(draft_source), lowering, "fp32", 513, lambda *_: None)


def test_unknown_lowering_is_refused(tiny_draft: Path, tmp_path: Path):
    with pytest.raises(ExportError, match="The lowering 'dense' is unknown; there are gqa, gqa-half, static, primitive"):
        export_bundle(str(tiny_draft), None, tmp_path / "bundle", lowering="dense")
    assert not (tmp_path / "bundle").exists()
