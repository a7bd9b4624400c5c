"""Graphs that people have already become bundles: what is recognised, checked, linked, refused."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import runtime.contract
from export.bundle import export_bundle
from export.errors import ExportError
from export.genai_config import write_genai_folder
from export.optimum_graph import choose_exporter
from export.source import resolve_source
from runtime import Generator, SamplingParams
from runtime.contract import Bundle
from runtime.manifest import load_bundle
from tests import growing_graphs

ROOT = Path(__file__).parents[2]
PROMPTS = ("1 2 3 4", "What is 3 + 4?", "a b c a b c a b")
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
needs_optimum = pytest.mark.skipif(
    importlib.util.find_spec("optimum") is None, reason="needs optimum: pip install '.[export,optimum]'"
)

Change = Callable[[onnx.ModelProto], None]


@pytest.fixture(scope="module")
def folders(tiny_target: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Target and draft as optimum would leave them; copy before changing."""
    folder = tmp_path_factory.mktemp("growing")
    checkpoints = {"target": tiny_target, "draft": tiny_draft}
    return {role: growing_graphs.growing_folder(path, folder / role) for role, path in checkpoints.items()}


@pytest.fixture
def folder(folders: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the draft's folder, which is the smaller one, to be damaged."""
    return shutil.copytree(folders["draft"], tmp_path / "model")


@pytest.fixture(scope="module")
def taken(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle of both graphs."""
    return export_bundle(str(folders["target"]), str(folders["draft"]), tmp_path_factory.mktemp("taken") / "bundle")


def texts(folder: Path, **options: Any) -> list[tuple[int, ...]]:
    generator = Generator.from_bundle(folder)
    return [generator.generate(prompt, GREEDY, **options).token_ids for prompt in PROMPTS]


# --- what is taken ----------------------------------------------------------------------------------------------------


def test_growing_pair_says_what_the_gqa_bundle_says_with_and_without_speculation(taken: Bundle, tiny_bundle: Path):
    expected = texts(tiny_bundle, drafter="off")
    assert texts(taken.folder, drafter="off") == expected
    assert texts(taken.folder, drafter="model", num_draft_tokens=4) == expected
    assert texts(taken.folder, drafter="lookup") == expected


def test_manifest_says_what_the_graph_says_and_that_nothing_was_compared(taken: Bundle):
    assert load_bundle(taken.folder) == taken
    schema = json.loads((Path(runtime.contract.__file__).parent / "bundle.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(json.loads((taken.folder / "bundle.json").read_text(encoding="utf-8")))
    assert taken.draft is not None
    for spec, sizes in ((taken.target, (4, 2, 16)), (taken.draft, (1, 1, 16))):
        assert (spec.lowering, spec.precision, spec.cache_dtype, spec.vocab_size) == ("growing", "fp32", "float32", 512)
        assert (spec.num_layers, spec.num_key_value_heads, spec.head_size) == sizes
        assert (spec.names.position_ids, spec.names.use_cache_branch) == ("position_ids", None)
        assert list(spec.parity) == ["pieces"]
        # A lone row takes another path in this form; its padding may stand behind the last token of a full context.
        assert (spec.min_rows, spec.context_length) == (2, 511)
    assert taken.tokenizer.eos_token_ids == (0, 2)


def test_files_are_hard_links(taken: Bundle, folders: dict[str, Path]):
    for role, folder in folders.items():
        assert [record.path for record in getattr(taken, role).graph] == [f"{role}/model.onnx", f"{role}/model.onnx_data"]
        for name in ("model.onnx", "model.onnx_data"):
            link = taken.folder / role / name
            assert link.samefile(folder / name)
            assert not link.is_symlink()


def test_weights_behind_symbolic_links_are_found(folders: dict[str, Path], tmp_path: Path):
    # As in the hub's cache, where every file is a link to a blob.
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for file in folders["draft"].iterdir():
        (folder / file.name).symlink_to(file)
    bundle = export_bundle(str(folder), None, tmp_path / "bundle")
    assert not any(file.is_symlink() for file in bundle.folder.rglob("*"))
    assert (bundle.folder / "target" / "model.onnx_data").samefile(folders["draft"] / "model.onnx_data")


def test_files_are_copied_where_links_fail(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    bundle = export_bundle(str(folders["draft"]), None, tmp_path / "bundle")
    copy, original = bundle.folder / "target" / "model.onnx_data", folders["draft"] / "model.onnx_data"
    assert not copy.samefile(original)
    assert copy.read_bytes() == original.read_bytes()


@pytest.mark.parametrize(("chosen", "cache_dtype"), [("", "float32"), ("onnx/model_fp16.onnx", "float16")])
def test_onnx_community_folder_has_several_precisions(folders: dict[str, Path], tmp_path: Path, chosen: str, cache_dtype: str):
    folder = shutil.copytree(folders["draft"], tmp_path / "model")
    (folder / "onnx").mkdir()
    for file in folder.glob("model.onnx*"):
        file.rename(folder / "onnx" / file.name)
    growing_graphs.rewrite(
        folder / "onnx" / "model.onnx", growing_graphs.in_half_precision, to=folder / "onnx" / "model_fp16.onnx"
    )
    bundle = export_bundle(str(folder / chosen), None, tmp_path / "bundle")
    assert bundle.target.cache_dtype == cache_dtype
    assert bundle.target.graph[0].path == f"target/{Path(chosen or 'model.onnx').name}"
    assert bundle.tokenizer.vocab_size == 512


@pytest.mark.parametrize(
    ("change", "name"),
    [(growing_graphs.merged, "use_cache_branch"), (growing_graphs.with_kept_rows, "num_logits_to_keep")],
)
def test_further_inputs_are_recognised(folder: Path, folders: dict[str, Path], tmp_path: Path, change: Change, name: str):
    growing_graphs.rewrite(folder / "model.onnx", change)
    (folder / "model.onnx").rename(folder / "decoder_model_merged.onnx")
    bundle = export_bundle(str(folder), None, tmp_path / "bundle")
    assert getattr(bundle.target.names, name) == name
    plain = export_bundle(str(folders["draft"]), None, tmp_path / "plain")
    assert texts(bundle.folder) == texts(plain.folder)


def test_genai_folder_keeps_its_form(tiny_bundle: Path, tmp_path: Path):
    folder = write_genai_folder(load_bundle(tiny_bundle), tmp_path / "genai")
    bundle = export_bundle(str(folder), None, tmp_path / "bundle")
    assert (bundle.target.lowering, bundle.target.min_rows, bundle.target.context_length) == ("gqa", 1, 512)
    assert bundle.target.architecture == "decoder"
    # Of the config, since no generation_config.json is there.
    assert bundle.tokenizer.eos_token_ids == (0, 2)
    assert texts(bundle.folder, drafter="lookup") == texts(tiny_bundle, drafter="off")
    generator = Generator.from_bundle(bundle.folder)
    full = SamplingParams(max_new_tokens=512, ignore_eos=True)
    assert len(generator.generate([5] * 500, full, drafter="lookup").token_ids) == 12


def test_genai_graph_of_another_exporter_has_no_spare_row(tiny_bundle: Path, tmp_path: Path):
    """Its lone rows differ; and it leaves the head size to the configuration."""
    folder = write_genai_folder(load_bundle(tiny_bundle), tmp_path / "genai")
    growing_graphs.rewrite(folder / "target" / "model.onnx", without_spare_row, with_open_head_size)
    bundle = export_bundle(str(folder), None, tmp_path / "bundle")
    assert (bundle.target.lowering, bundle.target.min_rows, bundle.target.context_length) == ("gqa", 2, 511)
    assert bundle.target.head_size == 16
    expected = texts(tiny_bundle, drafter="off")
    assert texts(bundle.folder, drafter="off") == texts(bundle.folder, drafter="lookup") == expected
    with pytest.raises(
        ExportError, match="is exact where passes are padded to 2 rows, and ONNX Runtime GenAI feeds what there is"
    ):
        export_bundle(str(folder), None, tmp_path / "again", emit_genai_config=True)
    assert not (tmp_path / "again").exists()


def without_spare_row(model: onnx.ModelProto) -> None:
    """Feeds attention its rows alone: the repeated last row, and one token more in the lengths, fall away."""
    for node in model.graph.node:
        if node.output[0] == "spare.total_length":
            node.op_type = "Identity"
            del node.input[1]
        elif node.output[0] == "rows_and_spare":
            node.op_type = "Identity"
            del node.input[1], node.attribute[:]
        elif node.output[0] == "cached_tokens":
            summed = node.input[0]
            node.input[0] = "cached_tokens.less_one"
    one = numpy_helper.from_array(np.array([1], np.int64), "less_one")
    model.graph.initializer.append(one)
    place = next(index for index, node in enumerate(model.graph.node) if node.output[0] == "cached_tokens")
    model.graph.node.insert(place, helper.make_node("Sub", [summed, "less_one"], ["cached_tokens.less_one"]))


def with_open_head_size(model: onnx.ModelProto) -> None:
    for value in (*model.graph.input, *model.graph.output):
        if "key" in value.name or "value" in value.name:
            value.type.tensor_type.shape.dim[3].dim_param = "kv_cache_dim"


def test_torch_is_not_needed(folders: dict[str, Path], tmp_path: Path):
    code = """
import sys
for name in ("torch", "transformers", "mobius", "optimum", "safetensors"):
    sys.modules[name] = None  # any import of it fails
from pathlib import Path
from export.bundle import export_bundle
print(export_bundle(sys.argv[1], None, Path(sys.argv[2])).target.lowering)
"""
    command = [sys.executable, "-c", code, folders["draft"], tmp_path / "bundle"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stdout) == (0, "growing\n"), result.stderr


def test_script_says_that_nothing_was_compared(folders: dict[str, Path], tmp_path: Path):
    command = [sys.executable, ROOT / "scripts" / "export.py", "--target", folders["draft"], "--out", tmp_path / "bundle"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "the graph was taken as it is: there is no checkpoint to hold it against" in result.stdout
    assert "rows are bit-equal, passes are padded to 2 rows" in result.stdout


# --- optimum ----------------------------------------------------------------------------------------------------------


def test_mobius_is_taken_where_it_knows_the_model(tiny_target: Path, folder: Path, monkeypatch: pytest.MonkeyPatch):
    import mobius

    source = resolve_source(str(tiny_target))
    assert choose_exporter(source, "auto") == choose_exporter(source, "mobius") == "mobius"
    monkeypatch.setattr(mobius.registry, "_map", {})
    monkeypatch.setattr("export.optimum_graph._installed", lambda: "0.1.0")
    assert choose_exporter(source, "auto") == "optimum"
    monkeypatch.setattr("export.optimum_graph._installed", lambda: None)
    with pytest.raises(ExportError, match="does not know"):
        choose_exporter(source, "auto")
    with pytest.raises(ExportError, match=r"needs the package optimum-onnx: pip install '.\[export,optimum\]'"):
        choose_exporter(source, "optimum")
    with pytest.raises(ExportError, match="The source of graphs 'torch' is unknown; there are auto, mobius, optimum"):
        choose_exporter(source, "torch")
    with pytest.raises(ExportError, match="optimum reads Hugging Face folders"):
        choose_exporter(resolve_source(str(folder)), "optimum")


@needs_optimum
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_optimum_exports_a_checkpoint_that_is_held_against_torch(
    tiny_target: Path, tiny_bundle: Path, tmp_path: Path, precision: str
):
    bundle = export_bundle(str(tiny_target), None, tmp_path / "bundle", exporter="optimum", precision=precision)
    assert (bundle.target.lowering, bundle.target.precision, bundle.target.min_rows) == ("gqa", precision, 1)
    assert list(bundle.target.parity)[:4] == ["prefill", "one_token", "block", "rewind"]
    assert {file.name for file in bundle.folder.iterdir()} == {"bundle.json", "chat_template.jinja", "target", "tokenizer.json"}
    plain = texts(bundle.folder, drafter="off")
    assert texts(bundle.folder, drafter="lookup") == plain
    assert precision != "fp32" or plain == texts(tiny_bundle, drafter="off")


@needs_optimum
def test_a_folder_of_optimum_is_recognised(tiny_draft: Path, tmp_path: Path):
    from optimum.exporters.onnx import main_export

    main_export(str(tiny_draft), tmp_path / "optimum", task="text-generation-with-past", do_validation=False)
    bundle = export_bundle(str(tmp_path / "optimum"), None, tmp_path / "bundle")
    assert (bundle.target.lowering, bundle.target.architecture) == ("growing", "qwen2")
    checkpoint = export_bundle(str(tiny_draft), None, tmp_path / "checkpoint")
    assert texts(bundle.folder, drafter="lookup") == texts(checkpoint.folder, drafter="off")


# --- what is refused --------------------------------------------------------------------------------------------------


def without(kind: str, part: str) -> Change:
    def change(model: onnx.ModelProto) -> None:
        values = getattr(model.graph, kind)
        for value in [value for value in values if part in value.name]:
            values.remove(value)

    return change


def with_input(name: str, dtype: int, shape: list[int | str]) -> Change:
    return lambda model: model.graph.input.append(helper.make_tensor_value_info(name, dtype, shape))


def with_cache_dtype(dtype: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        for value in (*model.graph.input, *model.graph.output):
            if "key" in value.name or "value" in value.name:
                value.type.tensor_type.elem_type = dtype

    return change


def with_one_logits_row(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 1


def with_embeddings(model: onnx.ModelProto) -> None:
    without("input", "input_ids")(model)
    with_input("inputs_embeds", TensorProto.FLOAT, ["batch", "rows", 64])(model)


def with_nan(model: onnx.ModelProto) -> None:
    growing_graphs._rename_writes(model.graph, "logits", "logits.sound")
    model.graph.initializer.append(numpy_helper.from_array(np.array(np.nan, np.float32), "nan"))
    model.graph.node.append(helper.make_node("Add", ["logits.sound", "nan"], ["logits"]))


def that_forgets_its_cache(model: onnx.ModelProto) -> None:
    """Takes the past for zeros, as a branch without past does when it is asked with one."""
    for value in model.graph.input:
        if value.name.startswith("past_key_values"):
            growing_graphs._rename_reads(model.graph, value.name, f"{value.name}.gone")
            model.graph.node.insert(0, helper.make_node("Mul", [value.name, "zero"], [f"{value.name}.gone"]))
    model.graph.initializer.append(numpy_helper.from_array(np.array(0, np.float32), "zero"))


BAD_GRAPHS: dict[str, tuple[Change, str]] = {
    "no past": (without("input", "past_key_values"), r"no key/value caches among its inputs .*text-generation-with-past"),
    "no present": (without("output", "present"), r"no key/value caches among its outputs \(logits\)"),
    "a value is missing": (without("output", "present.0.value"), r"among its outputs \(keys or values only\)"),
    "no logits": (without("output", "logits"), r"no output 'logits' \(present.0.key, present.0.value\): .* without its head"),
    "last row, by its shape": (with_one_logits_row, "gives logits for the last token of a pass only"),
    "last row, by its output": (growing_graphs.last_row_only, "gives logits for the last token of a pass only"),
    "encoder-decoder": (
        with_input("encoder_hidden_states", TensorProto.FLOAT, ["batch", "rows", 64]),
        "decoder of an encoder-decoder model .*'encoder_hidden_states'.*only decoder-only",
    ),
    "embeddings": (with_embeddings, "reads .*inputs_embeds.* and no input_ids: it is one graph of a model made of several"),
    "int8 caches": (with_cache_dtype(TensorProto.INT8), "has caches of INT8; FLOAT or FLOAT16 for all of them is expected"),
    "bfloat16 caches": (with_cache_dtype(TensorProto.BFLOAT16), "has caches of BFLOAT16; FLOAT or FLOAT16"),
    "unknown input": (with_input("token_type_ids", TensorProto.INT64, ["batch", "rows"]), "token_type_ids, which the runtime"),
    "no mask": (without("input", "attention_mask"), "has no input attention_mask"),
    "nan": (with_nan, "cannot be used: .*returned NaN or infinite logits"),
    "cache without effect": (that_forgets_its_cache, "gives other logits for a text in pieces than for the whole text"),
}


@pytest.mark.parametrize("name", BAD_GRAPHS)
def test_a_graph_that_cannot_be_used_is_refused(folder: Path, tmp_path: Path, name: str):
    change, sentence = BAD_GRAPHS[name]
    growing_graphs.rewrite(folder / "model.onnx", change)
    refused(folder, tmp_path, sentence)


def refused(folder: Path, tmp_path: Path, sentence: str, **options: Any) -> None:
    with pytest.raises(ExportError, match=sentence) as caught:
        export_bundle(str(folder), None, tmp_path / "bundle", **options)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    assert not list(tmp_path.glob("*bundle*"))


def test_what_a_graph_says_of_itself_is_refused_before_it_is_loaded(folder: Path):
    for name in ("last row, by its shape", "no present", "int8 caches", "encoder-decoder"):
        change, sentence = BAD_GRAPHS[name]
        graph = growing_graphs.rewrite(folder / "model.onnx", change, to=folder / "changed.onnx")
        with pytest.raises(ExportError, match=sentence):
            resolve_source(str(graph))


def test_three_dimensional_positions_are_refused(folder: Path, tmp_path: Path):
    def change(model: onnx.ModelProto) -> None:
        positions = next(value for value in model.graph.input if value.name == "position_ids")
        positions.type.tensor_type.shape.dim.add().dim_value = 3

    growing_graphs.rewrite(folder / "model.onnx", change)
    refused(folder, tmp_path, "wants position_ids as INT64 of 3 dimensions; INT64 of 2 is expected")


def test_files_that_are_not_whole_are_refused(folder: Path, tmp_path: Path):
    graph, weights = folder / "model.onnx", folder / "model.onnx_data"
    contents, size = graph.read_bytes(), weights.stat().st_size
    for length in (0, len(contents) // 3, len(contents) - 1):
        graph.write_bytes(contents[:length])
        refused(folder, tmp_path, r"model.onnx (is no ONNX graph, or is truncated|holds no graph with outputs)")
    graph.write_bytes(contents)
    os.truncate(weights, size - 100)
    refused(folder, tmp_path, rf"model.onnx_data has {size - 100:,} bytes, and model.onnx reads .*: it is truncated")
    weights.unlink()
    refused(folder, tmp_path, r"keeps its weights in 'model.onnx_data', which is not there: download that file too")


def test_weights_outside_the_folder_are_refused(folder: Path, tmp_path: Path):
    def change(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = "../model.onnx_data"

    growing_graphs.rewrite(folder / "model.onnx", change)
    refused(folder, tmp_path, r"keeps weights in '../model.onnx_data', outside its folder")


def test_a_tokenizer_of_another_model_is_refused(folder: Path, tmp_path: Path):
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 600, "content": "<beyond>"})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(ExportError, match="the target knows 512 tokens: the tokenizer does not belong to the model"):
        export_bundle(str(folder), None, tmp_path / "bundle")
    (folder / "tokenizer.json").unlink()
    refused(folder, tmp_path, "holds no tokenizer")


def test_sliding_windows_are_refused(folder: Path, tiny_bundle: Path, tmp_path: Path):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(
        json.dumps(config | {"sliding_window": 128, "use_sliding_window": True, "layer_types": None})
    )
    refused(folder, tmp_path, "attends through a sliding window of 128 tokens")
    assert export_bundle(str(folder), None, tmp_path / "short", max_length=128).target.context_length == 128

    def change(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            if node.op_type == "GroupQueryAttention":
                node.attribute.append(helper.make_attribute("local_window_size", 64))

    genai = write_genai_folder(load_bundle(tiny_bundle), tmp_path / "genai")
    growing_graphs.rewrite(genai / "target" / "model.onnx", change)
    refused(genai, tmp_path, "attends through a sliding window of 64 tokens")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda model: model.update(vision={"filename": "vision.onnx"}), "a model with the parts vision: only plain text"),
        (lambda model: model["decoder"].pop("filename"), "names no single graph as model.decoder.filename"),
        (lambda model: model["decoder"].update(filename="other.onnx"), "names the graph other.onnx, which is not there"),
        (lambda model: model.pop("context_length"), "names no context length"),
        (lambda model: model["decoder"].update(sliding_window={"window_size": 70}), "sliding window of 70 tokens"),
        (lambda model: model.update({"eos_token_id": "</s>"}), "has eos_token_id '</s>'"),
    ],
)
def test_genai_configurations_that_cannot_be_used_are_refused(
    tiny_bundle: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], sentence: str
):
    folder = write_genai_folder(load_bundle(tiny_bundle), tmp_path / "genai")
    config = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
    change(config["model"])
    (folder / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
    refused(folder, tmp_path, sentence)


def test_a_folder_without_a_graph_by_a_known_name_asks_for_the_file(folder: Path, tmp_path: Path):
    (folder / "model.onnx").rename(folder / "decoder.onnx")
    refused(folder, tmp_path, "holds decoder.onnx, none of them named model.onnx: pass the file you mean")
    assert export_bundle(str(folder / "decoder.onnx"), None, tmp_path / "bundle").target.lowering == "growing"


def test_what_a_finished_graph_cannot_give_is_refused(folder: Path, tmp_path: Path):
    refused(folder, tmp_path, "is in fp32 and is taken as it is: ask for no other precision", precision="int8")
    with pytest.raises(ExportError, match="--draft self needs a checkpoint"):
        export_bundle(str(folder), "self", tmp_path / "bundle")
    with pytest.raises(ExportError, match=r"no file or folder .*absent\.onnx"):
        export_bundle(str(tmp_path / "absent.onnx"), None, tmp_path / "bundle")


def test_a_checkpoint_beside_a_graph_is_the_source(tiny_draft: Path, folder: Path):
    shutil.copy(tiny_draft / "model.safetensors", folder)
    assert resolve_source(str(folder)).kind == "folder"
    assert resolve_source(str(folder / "model.onnx")).kind == "graph"
