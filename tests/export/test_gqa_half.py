"""The lowering gqa-half: quantised weights under float16 activations, as ONNX Runtime's attention on CUDA wants them."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from gguf import GGMLQuantizationType
from onnx import TensorProto, helper

import runtime.contract
from export.added_forms import add_lowerings
from export.blockwise_products import quantize_graph
from export.bundle import export_bundle
from export.errors import ExportError
from export.graph_edit import add_initializer
from export.half_precision import to_half_precision
from export.quantization import rounding
from export.role import Role
from export.source import Source
from runtime import Generator, SamplingParams
from runtime.contract import Bundle, DecoderSpec
from runtime.decoder import Decoder
from runtime.device_forms import cuda_form
from runtime.manifest import load_bundle
from runtime.ort.backend import OrtBackend
from runtime.ort.cuda_backend import OrtCudaModel
from runtime.ort.device_context import Memory
from runtime.tokenizer import Tokenizer

from .quantized_checkpoints import write_gguf

SCHEMA = json.loads((Path(runtime.contract.__file__).parent / "bundle.schema.json").read_text(encoding="utf-8"))
CONTEXT = 96
STEPS = ("prefill", "one_token", "block", "rewind")


@pytest.fixture(scope="module")
def pair(tiny_target: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The pair in int8 and int4, for the CPU and for CUDA."""
    out = tmp_path_factory.mktemp("half") / "pair"
    return export_bundle(
        str(tiny_target), str(tiny_draft), out, precision="int8", lowering="gqa,gqa-half", max_length=CONTEXT
    )  # fmt: skip


def graph_of(form: DecoderSpec, folder: Path) -> onnx.ModelProto:
    return onnx.load(folder / form.graph[0].path, load_external_data=False)


def both(pair: Bundle) -> list[DecoderSpec]:
    assert pair.draft is not None
    return [pair.target, pair.draft]


# --- what is written -------------------------------------------------------------------------------------------------


def test_a_bundle_serves_the_cpu_and_cuda(pair: Bundle) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads((pair.folder / "bundle.json").read_text(encoding="utf-8")))
    assert load_bundle(pair.folder) == pair
    for decoder in both(pair):
        plain, half = decoder.forms
        assert (plain.lowering, plain.cache_dtype, half.lowering, half.cache_dtype) == ("gqa", "float32", "gqa-half", "float16")
        assert plain.precision == half.precision
        assert OrtBackend(threads=1).load(decoder, pair.folder).spec == plain
        assert cuda_form(decoder) == half


def test_the_check_against_the_checkpoint_tells_float16_from_a_mistake(pair: Bundle) -> None:
    for decoder in both(pair):
        figures = [decoder.forms[1].parity[step] for step in STEPS]
        assert all(step["divergence"] < 1e-4 and step["same_top_token"] == 1 for step in figures)
        # float32 would be closer than this, so that float16 is what was computed.
        assert max(step["max_difference"] for step in figures) > 1e-3


def test_codes_are_stored_once(pair: Bundle) -> None:
    for role, decoder in zip(("target", "draft"), both(pair), strict=True):
        plain, half = decoder.forms
        shared, own = (
            next(file for file in half.graph if file.path.endswith(name)) for name in ("model.onnx.data", "half.onnx.data")
        )
        assert shared.path == f"{role}/model.onnx.data"
        assert own.size < 0.25 * shared.size
        assert shared in plain.graph


def test_nothing_but_logits_is_float32(pair: Bundle) -> None:
    for decoder in both(pair):
        graph = graph_of(decoder.forms[1], pair.folder).graph
        types = {tensor.name: tensor.data_type for tensor in graph.initializer}
        assert TensorProto.FLOAT not in types.values()
        products = [node for node in graph.node if node.op_type == "MatMulNBits"]
        assert products
        assert {types[node.input[2]] for node in products} == {TensorProto.FLOAT16}
        widened = [node.output[0] for node in graph.node if node.op_type == "Cast" and node.attribute[0].i == TensorProto.FLOAT]
        assert widened == ["logits"]


@pytest.mark.parametrize("form", [0, 1], ids=["gqa", "gqa-half"])
def test_zero_points_of_a_lookup_are_written_out(pair: Bundle, form: int) -> None:
    """ONNX Runtime's kernels do not agree on what is meant where there are none."""
    for decoder, middle in zip(both(pair), (0x80, 0x88), strict=True):
        model = graph_of(decoder.forms[form], pair.folder)
        (lookup,) = (node for node in model.graph.node if node.op_type == "GatherBlockQuantized")
        (expand,) = (node for node in model.graph.node if node.output[0] == lookup.input[3])
        constants = [tensor for tensor in model.graph.initializer if tensor.name in expand.input]
        output = helper.make_tensor_value_info(expand.output[0], TensorProto.UINT8, None)
        alone = helper.make_model(
            helper.make_graph([expand], "alone", [], [output], constants), opset_imports=model.opset_import[:1], ir_version=10
        )
        (found,) = ort.InferenceSession(alone.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {})
        packed = next(tensor for tensor in model.graph.initializer if tensor.name == lookup.input[0])
        assert (found == middle).all()
        assert list(found.shape) == [*packed.dims[:2], 1]


# --- what it computes ------------------------------------------------------------------------------------------------


def test_speculation_leaves_its_text_as_it_is(pair: Bundle) -> None:
    tokenizer = Tokenizer.from_spec(pair.tokenizer, pair.folder)
    models = [OrtBackend(threads=1).load(decoder.forms[1], pair.folder) for decoder in both(pair)]
    assert models[0].spec.lowering == "gqa-half"
    generator = Generator(*models, tokenizer, pair.tokenizer.eos_token_ids, num_draft_tokens=3)
    params = SamplingParams(max_new_tokens=32, ignore_eos=True)
    plain, speculative = (generator.generate("The sea", params, drafter=drafter) for drafter in ("off", "model"))
    assert plain.token_ids == speculative.token_ids
    assert 0 < speculative.stats.acceptance_rate < 1


def test_bound_as_on_a_gpu_it_gives_the_same_bits(pair: Bundle) -> None:
    form = pair.target.forms[1]
    tokens = np.random.default_rng(5).integers(3, 512, 40).tolist()
    by_address = OrtBackend(threads=1).load(form, pair.folder)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = ort.InferenceSession(pair.folder / form.graph[0].path, options, providers=["CPUExecutionProvider"])
    on_device = OrtCudaModel(form, session, Memory("cpu", 0), "host")
    decoders = [Decoder(model, 40, num_rows=40) for model in (by_address, on_device)]
    assert np.array_equal(*(decoder.forward(tokens, 40) for decoder in decoders))


def test_a_checkpoints_own_weights_keep_their_codes(tiny_target: Path, tmp_path: Path) -> None:
    source = write_gguf(tiny_target, tmp_path / "Q4_1.gguf", GGMLQuantizationType.Q4_1)  # with an offset for each block
    bundle = export_bundle(
        str(source), None, tmp_path / "b", precision="checkpoint", lowering="gqa,gqa-half", max_length=CONTEXT
    )  # fmt: skip
    plain, half = bundle.target.forms
    assert half.cache_dtype == "float16"
    assert all(1e-4 < half.parity[step]["max_difference"] < 0.1 for step in STEPS)
    assert half.parity["rounded_activations"]["divergence"] < 0.01
    assert plain.graph[1] in half.graph


def test_a_norm_of_a_quantised_lookup_stays_float32() -> None:
    """What keeps float32 is cast by the types of its inputs, so those of the new nodes must be known."""
    tokens = ir.Value(name="input_ids", shape=ir.Shape([1, 3]), type=ir.TensorType(ir.DataType.INT64))
    graph = ir.Graph([tokens], [], nodes=[], opset_imports={"": 21})
    matrix, scale = (add_initializer(graph, name, np.ones(shape, np.float32)) for name, shape in (("e", (9, 32)), ("s", (32,))))
    lookup = ir.node("Gather", [matrix, tokens])
    norm = ir.node("LayerNormalization", [lookup.outputs[0], scale])
    for node in (lookup, norm):
        node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([1, 3, 32])
    norm.outputs[0].name = "logits"
    graph.extend([lookup, norm])
    graph.outputs.append(norm.outputs[0])
    quantize_graph(ir.Model(graph, ir_version=10), rounding(8), lambda *_: None)
    to_half_precision(graph, {"LayerNormalization"})
    producer = norm.inputs[0].producer()
    assert producer is not None
    assert (producer.op_type, producer.attributes["to"].value) == ("Cast", ir.DataType.FLOAT)


# --- how it is asked for ---------------------------------------------------------------------------------------------


def test_it_is_added_to_a_bundle_for_the_cpu(tiny_draft: Path, tmp_path: Path) -> None:
    first = export_bundle(str(tiny_draft), None, tmp_path / "b", precision="int4", block_size=64, max_length=CONTEXT)
    added = add_lowerings(first.folder, "gqa-half")
    assert added.target.forms[0] == first.target.forms[0]
    assert cuda_form(added.target).lowering == "gqa-half"
    assert added.target.forms[1].block_size == 64


def test_in_16_bits_it_is_gqa_and_stored_once(tiny_target: Path, tiny_draft: Path, tmp_path: Path) -> None:
    said: list[str] = []
    bundle = export_bundle(
        str(tiny_target), str(tiny_draft), tmp_path / "b", precision="fp16", lowering="gqa-half,gqa", max_length=CONTEXT,
        report=lambda title, *_: said.append(title),
    )  # fmt: skip
    assert [[form.lowering for form in decoder.forms] for decoder in both(bundle)] == [["gqa"], ["gqa", "gqa-half"]]
    assert "target (fp16): gqa and gqa-half are the same graph, which is stored once" in said
    assert not any(title.startswith("draft (int4): gqa and") for title in said)
    assert cuda_form(bundle.target).lowering == "gqa"


def test_of_a_pair_that_is_added_to_only_one_may_lack_it(tiny_target: Path, tiny_draft: Path, tmp_path: Path) -> None:
    first = export_bundle(str(tiny_target), str(tiny_draft), tmp_path / "b", precision="fp16", max_length=CONTEXT)
    added = add_lowerings(first.folder, "gqa-half")
    assert (added.target, added) == (first.target, load_bundle(first.folder))
    assert [form.lowering for form in both(added)[1].forms] == ["gqa", "gqa-half"]


@pytest.mark.parametrize(("there", "more"), [("gqa", "gqa-half"), ("gqa-half", "gqa")])
def test_what_is_there_under_the_other_name_is_not_added(tiny_draft: Path, tmp_path: Path, there: str, more: str) -> None:
    bundle = export_bundle(str(tiny_draft), None, tmp_path / "b", precision="fp16", lowering=there, max_length=CONTEXT)
    with pytest.raises(ExportError, match=rf"is in fp16, where gqa and gqa-half are the same graph, .* leave {more} out"):
        add_lowerings(bundle.folder, more)
    assert load_bundle(bundle.folder) == bundle


@pytest.mark.parametrize(("name", "option"), [("target", "--precision"), ("draft", "--draft-precision")])
def test_float32_weights_are_refused_with_the_option(draft_source: Source, name: str, option: str) -> None:
    with pytest.raises(ExportError, match=f"the {name} would have fp32: export it with {option} fp16, int8 or int4") as caught:
        Role(name, draft_source, "fp32", CONTEXT, lowering="gqa,gqa-half")
    assert "\n" not in str(caught.value)
