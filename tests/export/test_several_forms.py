"""Several lowerings of one model in a bundle: weights stored once, each form checked, each device with its own; more later."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from gguf import GGMLQuantizationType

import export.added_forms
import export.decoders
import export.optimum_graph
import runtime.contract
from export.added_forms import _roles, add_lowerings
from export.bundle import export_bundle
from export.errors import ExportError
from export.graph_files import save_graph
from export.lowerings import STANDARD_FORMS
from export.staging import check_disk
from runtime import Generator, SamplingParams
from runtime.contract import Bundle, DecoderSpec
from runtime.device_memory import check_pair_fits
from runtime.errors import BundleError
from runtime.manifest import load_bundle, read_manifest, save_bundle
from runtime.ort.backend import OrtBackend
from runtime.tokenizer import Tokenizer

from .quantized_checkpoints import write_gguf

CopyCheckpoint = Callable[..., Path]
SCHEMA = json.loads((Path(runtime.contract.__file__).parent / "bundle.schema.json").read_text(encoding="utf-8"))
CONTEXT = 96
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def sizes(spec: DecoderSpec) -> dict[str, int]:
    """Bytes of every file of a decoder's forms, each file once."""
    return {record.path: record.size for form in spec.forms for record in form.graph}


def text_of(spec: DecoderSpec, folder: Path) -> list[int]:
    """A greedy text of a form alone."""
    bundle = load_bundle(folder, hash_contents=False)
    tokenizer = Tokenizer.from_spec(bundle.tokenizer, folder)
    model = OrtBackend(threads=1).load(spec, folder)
    return list(
        Generator(model, None, tokenizer, bundle.tokenizer.eos_token_ids, drafter="off").generate("The sea", PARAMS).token_ids
    )


@pytest.fixture(scope="module")
def pair(tiny_target: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The pair for ONNX Runtime and TensorRT: the target in fp32, the draft in int4 with a head of 200 tokens."""
    out = tmp_path_factory.mktemp("forms") / "pair"
    return export_bundle(
        str(tiny_target), str(tiny_draft), out, lowering="static,gqa", max_length=CONTEXT, draft_vocab=200,
        draft_vocab_text=tiny_target / "tokenizer.json",
    )  # fmt: skip


@pytest.fixture(scope="module")
def single(tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The tiny draft alone, in fp16, for ONNX Runtime only; copy it before adding to it."""
    out = tmp_path_factory.mktemp("forms") / "single"
    return export_bundle(str(tiny_draft), None, out, precision="fp16", max_length=CONTEXT)


@pytest.fixture
def copied(single: Bundle, tmp_path: Path) -> Bundle:
    return dataclasses.replace(single, folder=shutil.copytree(single.folder, tmp_path / "bundle"))


# --- what is written -------------------------------------------------------------------------------------------------


def test_each_form_is_described_and_checked(pair: Bundle) -> None:
    assert load_bundle(pair.folder) == pair
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads((pair.folder / "bundle.json").read_text(encoding="utf-8")))
    assert pair.draft is not None
    for decoder in (pair.target, pair.draft):
        gqa, static = decoder.forms
        # ONNX Runtime's form comes first, whatever was asked for first.
        assert (gqa.lowering, static.lowering) == ("gqa", "static")
        assert gqa.cache_capacity is None
        assert static.cache_capacity is not None
        assert gqa.vocab_size == static.vocab_size
        for form in decoder.forms:
            assert {"prefill", "one_token", "block", "rewind"} <= set(form.parity)
            assert form.context_length == CONTEXT


def test_weights_with_the_same_bytes_are_stored_once(pair: Bundle) -> None:
    there = sizes(pair.target)
    assert set(there) == {"target/model.onnx", "target/model.onnx.data", "target/gqa.onnx", "target/gqa.onnx.data"}
    # What gqa has of its own are the tables of its rotation.
    assert there["target/gqa.onnx.data"] < 0.05 * there["target/model.onnx.data"]
    assert pair.target.forms[0].graph[-1] == pair.target.forms[1].graph[1]


def test_quantised_weights_of_the_two_kinds_share_nothing(pair: Bundle) -> None:
    assert pair.draft is not None
    gqa, static = pair.draft.forms
    assert not {record.path for record in gqa.graph} & {record.path for record in static.graph}


def test_the_manifest_names_each_file_once(pair: Bundle) -> None:
    paths = [record.path for record in pair.files()]
    assert len(set(paths)) == len(paths)
    on_disk = {str(path.relative_to(pair.folder)) for path in pair.folder.rglob("*") if path.is_file()}
    assert {*paths, "bundle.json"} == on_disk


def test_forms_give_the_same_text(pair: Bundle) -> None:
    gqa, static = pair.target.forms
    assert text_of(gqa, pair.folder) == text_of(static, pair.folder)


@pytest.mark.parametrize("precision", ["fp16", "int4"])
def test_standard_forms_share_all_that_is_large(tiny_draft: Path, tmp_path: Path, precision: str) -> None:
    bundle = export_bundle(
        str(tiny_draft), None, tmp_path / "b", precision=precision, lowering="static,primitive", max_length=CONTEXT
    )
    assert set(sizes(bundle.target)) == {"target/model.onnx", "target/model.onnx.data", "target/primitive.onnx"}
    static, primitive = (text_of(form, bundle.folder) for form in bundle.target.forms)
    assert static == primitive


def test_a_weight_that_differs_in_one_byte_is_not_shared(single: Bundle, tmp_path: Path) -> None:
    folder = shutil.copytree(single.folder, tmp_path / "bundle")
    model = ir.load(folder / "target" / "model.onnx")
    matrix = next(value for name, value in model.graph.initializers.items() if "k_proj.weight" in name)
    changed = matrix.const_value.numpy().copy()
    changed.reshape(-1)[-1] += np.float16(1)
    matrix.const_value = ir.tensor(changed, name=matrix.name)
    records = save_graph(model, folder, "target", "other", (single.target,), lambda *_: None)
    assert [record.path for record in records] == ["target/other.onnx", "target/other.onnx.data", "target/model.onnx.data"]
    assert records[1].size == changed.nbytes
    written = ir.load(folder / "target" / "other.onnx")
    for name, value in model.graph.initializers.items():
        np.testing.assert_array_equal(written.graph.initializers[name].const_value.numpy(), value.const_value.numpy())


def test_a_file_of_which_little_would_be_used_is_left_alone(single: Bundle, tmp_path: Path) -> None:
    """A decoder's memory is reckoned from its files."""
    folder = shutil.copytree(single.folder, tmp_path / "bundle")
    model = ir.load(folder / "target" / "model.onnx")
    stored = [value for value in model.graph.initializers.values() if isinstance(value.const_value, ir.ExternalTensor)]
    for value in sorted(stored, key=lambda value: -value.const_value.nbytes)[:-2]:
        value.const_value = ir.tensor(value.const_value.numpy() * 0, name=value.name)
    records = save_graph(model, folder, "target", "other", (single.target,), lambda *_: None)
    assert [record.path for record in records] == ["target/other.onnx", "target/other.onnx.data"]


@pytest.mark.parametrize("place", [("target",), ("target", "other_forms", 0), ("draft",), ("draft", "other_forms", 0)])
def test_a_longer_context_than_a_graph_was_made_for_is_refused(pair: Bundle, tmp_path: Path, place: tuple[str | int]) -> None:
    """Behind it a graph repeats its last position, or meets the end of a table: wrong text, or an error inside one."""
    folder = shutil.copytree(pair.folder, tmp_path / "bundle")
    document = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))
    form = document
    for key in place:
        form = form[key]
    for length, is_refused in ((CONTEXT - 1, False), (CONTEXT + 1, True)):
        form["context_length"] = length
        (folder / "bundle.json").write_text(json.dumps(document), encoding="utf-8")
        graph = folder / form["graph"][0]["path"]
        expected = f"{place[0]}: context_length is {length}, and {graph} was made for {CONTEXT} tokens: put that number back"
        with pytest.raises(BundleError, match=re.escape(expected)) if is_refused else nullcontext():
            load_bundle(folder, hash_contents=False)


# --- what is loaded --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lowerings", "found"),
    [
        (("primitive", "static"), "static"),
        (("static", "gqa"), "static"),
        (("gqa", "growing", "static"), "gqa"),
        (("x",), "gqa"),
    ],
)
def test_best_form_follows_the_order_asked_for(pair: Bundle, lowerings: tuple[str, ...], found: str) -> None:
    form = pair.target.best_form(lowerings)
    assert form.lowering == found
    assert form.other_forms == ()


def test_onnx_runtime_takes_its_own_form(pair: Bundle) -> None:
    generator = Generator.from_bundle(pair.folder, threads=1, drafter="model", num_draft_tokens=3)
    assert generator.draft is not None
    assert (generator.target.spec.lowering, generator.draft.spec.lowering) == ("gqa", "gqa")
    expected = text_of(pair.target.forms[1], pair.folder)
    assert list(generator.generate("The sea", PARAMS).token_ids) == expected


def test_memory_is_reckoned_for_the_form_of_the_device(pair: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("runtime.device_memory.check_fits", lambda target, *_: asked.append(target.lowering))
    monkeypatch.setattr("runtime.device_memory.free_memory_of", lambda _: None)
    for device in ("cpu", "cuda:1", "tensorrt", "tensorrt-rtx:1", "ort-tensorrt"):
        check_pair_fits(pair.target, None, 64, (device, device))
    # gqa in fp32 has no attention on CUDA; without primitive, the provider is given the first, and refuses it.
    assert asked == ["gqa", "static", "static", "static", "gqa"]


def test_older_readers_see_the_first_form(pair: Bundle) -> None:
    """Format 1.0 has no other_forms, and keeps what it does not know."""
    document = json.loads((pair.folder / "bundle.json").read_text(encoding="utf-8"))
    assert document["format_version"] == "1.1"
    assert document["target"]["lowering"] == "gqa"
    assert document["target"]["graph"][0]["path"] == "target/gqa.onnx"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"lowering": "gqa", "names": {}, "cache_capacity": None}, "gives it the lowerings gqa, gqa; each once is expected"),
        ({"vocab_size": 511}, "'static' has a vocab_size of 511; 512 is expected"),
        ({"other_forms": [...]}, "'static' has other_forms of its own; one list is expected"),
    ],
)
def test_forms_that_contradict_each_other_are_refused(
    pair: Bundle, tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    document = json.loads((pair.folder / "bundle.json").read_text(encoding="utf-8"))
    other = document["target"]["other_forms"][0]
    nested = {key: [dict(other)] if value == [...] else value for key, value in change.items()}
    document["target"]["other_forms"] = [other | nested]
    (tmp_path / "bundle.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(BundleError, match=sentence):
        load_bundle(tmp_path)


def test_a_form_that_computes_something_else_is_not_written(
    tiny_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered = STANDARD_FORMS["static"]

    def wrong(model: Any, *arguments: Any, **options: Any) -> object:
        bias = model.graph.initializers["model.layers.0.self_attn.v_proj.bias"]
        bias.const_value = ir.tensor(bias.const_value.numpy() * 1.5 + 1, name=bias.name)
        return lowered(model, *arguments, **options)

    monkeypatch.setitem(STANDARD_FORMS, "static", wrong)
    with pytest.raises(ExportError, match="does not compute what its checkpoint does"):
        export_bundle(str(tiny_draft), None, tmp_path / "bundle", lowering="gqa,static", max_length=CONTEXT)
    assert not list(tmp_path.iterdir())


# --- what is added later ---------------------------------------------------------------------------------------------


def test_a_form_is_added_and_the_rest_stays(copied: Bundle, tmp_path: Path) -> None:
    (copied.folder / "plan.json").write_text("{}")
    before = tree(copied.folder)
    bundle = add_lowerings(copied.folder, "static")
    assert load_bundle(copied.folder) == bundle
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    after = tree(copied.folder)
    assert set(after) - set(before) == {"target/static.onnx", "target/static.onnx.data"}
    assert {name for name in before if before[name] != after[name]} == {"bundle.json"}
    assert bundle.target.forms[0] == copied.target
    added = bundle.target.forms[1]
    assert (added.lowering, added.precision, added.context_length) == ("static", "fp16", CONTEXT)
    assert set(added.parity) == {"prefill", "one_token", "block", "rewind"}
    # The embedding and the matrices are the ones that are there.
    assert sizes(bundle.target)["target/static.onnx.data"] < 0.2 * sizes(bundle.target)["target/model.onnx.data"]


def test_the_files_that_stay_are_not_copied(copied: Bundle) -> None:
    data = copied.folder / "target" / "model.onnx.data"
    inode = data.stat().st_ino
    add_lowerings(copied.folder, "primitive")
    assert data.stat().st_ino == inode


def test_forms_for_onnx_runtime_come_first_when_added_last(tiny_draft: Path, tmp_path: Path) -> None:
    export_bundle(str(tiny_draft), None, tmp_path / "b", lowering="primitive", max_length=CONTEXT)
    bundle = add_lowerings(tmp_path / "b", "static,gqa")
    assert [form.lowering for form in bundle.target.forms] == ["gqa", "static", "primitive"]
    assert [form.graph[0].path for form in bundle.target.forms] == [
        "target/gqa.onnx",
        "target/static.onnx",
        "target/model.onnx",
    ]
    texts = [text_of(form, bundle.folder) for form in bundle.target.forms]
    assert texts[0] == texts[1] == texts[2]


def test_a_draft_keeps_its_cut_head(pair: Bundle, tmp_path: Path) -> None:
    folder = shutil.copytree(pair.folder, tmp_path / "bundle")
    bundle = add_lowerings(folder, "primitive")
    assert bundle.draft is not None
    assert [form.lowering for form in bundle.draft.forms] == ["gqa", "static", "primitive"]
    assert {form.vocab_size for form in bundle.draft.forms} == {200}
    # int4 codes of static, which has the numbers of primitive.
    assert "draft/model.onnx.data" in {record.path for record in bundle.draft.forms[2].graph}


def test_another_checkpoint_is_refused(
    copied: Bundle, tiny_draft: Path, copy_checkpoint: CopyCheckpoint, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    other = copy_checkpoint(tiny_draft, "other")
    weights = load_file(other / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"] *= 2
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    before = tree(tmp_path)
    with pytest.raises(ExportError, match="if the bundle was made from another checkpoint, that one is needed"):
        add_lowerings(copied.folder, "static", target=str(other))
    assert tree(tmp_path) == before


def test_a_model_that_is_plainly_another_is_refused_before_the_work(
    copied: Bundle, tiny_target: Path, tiny_draft: Path, copy_checkpoint: CopyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export.decoders, "build_base_graph", lambda _: pytest.fail("work began"))
    with pytest.raises(ExportError, match="its architecture is llama, and the bundle's qwen2; pass --target with"):
        add_lowerings(copied.folder, "static", target=str(tiny_target))
    deeper = copy_checkpoint(tiny_draft, "deeper")
    config = json.loads((deeper / "config.json").read_text(encoding="utf-8"))
    (deeper / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}), encoding="utf-8")
    with pytest.raises(ExportError, match="its number of layers is 9, and the bundle's 1;"):
        add_lowerings(copied.folder, "static", target=str(deeper))
    smaller = dataclasses.replace(copied, tokenizer=dataclasses.replace(copied.tokenizer, vocab_size=500))
    save_bundle(smaller)
    with pytest.raises(ExportError, match="its number of tokens is 512, and the bundle's 500;"):
        add_lowerings(copied.folder, "static")


def test_a_gguf_file_is_found_again_where_the_user_named_it(tiny_target: Path, tmp_path: Path) -> None:
    named = write_gguf(tiny_target, tmp_path / "m.gguf", GGMLQuantizationType.Q8_0)
    bundle = export_bundle(str(named), None, tmp_path / "b", precision="checkpoint", max_length=CONTEXT)
    assert bundle.target.source == str(named)
    added = add_lowerings(tmp_path / "b", "static")
    assert [form.precision for form in added.target.forms] == ["checkpoint", "checkpoint"]


def test_two_files_of_one_name_are_two_models(pair: Bundle, tiny_target: Path, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_gguf(tiny_target, tmp_path / folder / "m.gguf", GGMLQuantizationType.Q8_0)
    target, draft = (
        dataclasses.replace(spec, source=str(tmp_path / folder / "m.gguf"), num_layers=4)
        for spec, folder in ((pair.target, "a"), (pair.target, "b"))
    )
    found = _roles(dataclasses.replace(pair, target=target, draft=draft), "primitive", None, None, "auto")
    assert [role.source.path.parent.name for role in found] == ["a", "b"]


def test_a_form_is_made_by_what_made_the_others(copied: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    assert copied.target.exporter == "mobius"
    traced = dataclasses.replace(copied, target=dataclasses.replace(copied.target, exporter="optimum"))
    monkeypatch.setattr(export.optimum_graph, "_installed", lambda: "0")
    assert [_roles(traced, "static", None, None, asked)[0].exporter for asked in ("auto", "mobius")] == ["optimum", "mobius"]


def test_what_another_export_has_added_meanwhile_is_not_lost(copied: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle is read before its folder is locked."""
    other = dataclasses.replace(copied, producer="another export")
    monkeypatch.setattr("export.added_forms.check_disk", lambda *_: save_bundle(other))
    with pytest.raises(ExportError, match=f"^The bundle {copied.folder} was changed by another export meanwhile: begin anew"):
        add_lowerings(copied.folder, "static")
    assert read_manifest(copied.folder) == other
    assert not copied.folder.with_name(f".{copied.folder.name}.partial").exists()


def test_what_is_added_is_held_against_disk_and_memory(copied: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    (role,) = _roles(copied, "static", None, None, "auto")
    assert role.weight_bytes == 0  # both have the same weights in fp16
    int4 = dataclasses.replace(role, precision="int4")
    assert int4.weight_bytes == int4.form_bytes
    assert dataclasses.replace(int4, beside=("gqa", "primitive")).weight_bytes == 0
    monkeypatch.setattr(export.added_forms, "free_memory", lambda: 1)
    with pytest.raises(
        ExportError, match=r"GB of memory and 0\.0 GB are free: end other programs, or add it on a larger machine\.$"
    ):
        add_lowerings(copied.folder, "static")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1))
    with pytest.raises(ExportError, match=r"^What is added needs about .* free some disk\.$"):
        check_disk(copied.folder, [int4])


def test_a_stray_file_is_not_written_through_its_link(copied: Bundle, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    for name in ("static.onnx", "static.onnx.data"):
        (copied.folder / "target" / name).hardlink_to(tmp_path / "mine")
    add_lowerings(copied.folder, "static")
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lowering": "gqa"}, "has the lowering gqa already"),
        ({"lowering": "static,gqa"}, "has the lowering gqa already"),
        ({"lowering": "dense"}, "The lowering 'dense' is unknown"),
        ({"lowering": "static", "draft": "x"}, "--draft names a draft model, and the bundle .* has none"),
        ({"lowering": "static", "target": ""}, "The name of a model is empty"),
        ({"lowering": "static", "target": "no-such-model"}, "There is no file or folder no-such-model"),
    ],
)
def test_what_cannot_be_added_is_refused_before_the_work(
    single: Bundle, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], sentence: str
) -> None:
    monkeypatch.setattr(export.decoders, "build_base_graph", lambda _: pytest.fail("work began"))
    before = tree(single.folder)
    with pytest.raises(ExportError, match=sentence):
        add_lowerings(single.folder, **options)
    assert tree(single.folder) == before


def test_a_checkpoint_that_moved_is_asked_for(
    tiny_draft: Path, copy_checkpoint: CopyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_checkpoint(tiny_draft, "first")
    export_bundle(str(folder), None, tmp_path / "b", max_length=CONTEXT)
    folder.rename(tmp_path / "second")
    with pytest.raises(ExportError, match=r"was made from '.*first', which does not lead to it from here .*: pass --target"):
        add_lowerings(tmp_path / "b", "static")
    assert len(add_lowerings(tmp_path / "b", "static", target=str(tmp_path / "second")).target.forms) == 2


@pytest.mark.parametrize(
    "failure", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=["interrupt", "full disk"]
)
@pytest.mark.parametrize("step", ["check_decoders", "save_bundle"])
def test_failure_leaves_the_bundle_as_it_was(
    copied: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, failure: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise failure

    before = tree(tmp_path)
    monkeypatch.setattr(export.added_forms, step, fail)
    with pytest.raises(KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else ExportError):
        add_lowerings(copied.folder, "static")
    assert tree(tmp_path) == before


def test_shared_weights_are_read_by_onnx_from_the_file_of_the_other_form(pair: Bundle) -> None:
    model = onnx.load(pair.folder / "target" / "gqa.onnx", load_external_data=False)
    locations = {entry.value for tensor in model.graph.initializer for entry in tensor.external_data if entry.key == "location"}
    assert locations == {"model.onnx.data", "gqa.onnx.data"}
    assert not any(path.is_symlink() for path in pair.folder.rglob("*"))
