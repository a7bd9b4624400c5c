"""From sources to a bundle folder that appears whole or not at all."""

from __future__ import annotations

import dataclasses
import errno
import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jsonschema
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import export.bundle
import export.decoders
import runtime.contract
from export.bundle import export_bundle
from export.errors import ExportError
from runtime.contract import Bundle, DecoderSpec, FileRecord, GraphNames, TokenizerSpec
from runtime.manifest import load_bundle
from runtime.row_equality import PassShape

CopyCheckpoint = Callable[..., Path]
SCHEMA = json.loads((Path(runtime.contract.__file__).parent / "bundle.schema.json").read_text(encoding="utf-8"))


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def tree(folder: Path) -> dict[str, bytes]:
    """Every file under a folder with its bytes, folders with none."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "bundle.json").read_text(encoding="utf-8"))


@pytest.fixture
def old_bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A bundle of the pair at `out`, for exports that would replace it."""
    return shutil.copytree(tiny_bundle, tmp_path / "bundle")


# --- what is written -------------------------------------------------------------------------------------------------


def test_manifest_is_valid_by_the_schema(tiny_bundle: Path):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.Draft202012Validator(SCHEMA).validate(manifest_of(tiny_bundle))


@pytest.mark.parametrize(
    ("record", "schema"),
    [
        (Bundle, SCHEMA),
        (TokenizerSpec, SCHEMA["$defs"]["tokenizer"]),
        (DecoderSpec, SCHEMA["$defs"]["decoder"]),
        (GraphNames, SCHEMA["$defs"]["names"]),
        (FileRecord, SCHEMA["$defs"]["file"]),
    ],
)
def test_schema_and_contract_have_the_same_fields(record: type, schema: dict[str, Any]):
    fields = {item.name: item for item in dataclasses.fields(record) if item.name not in {"unknown", "folder"}}
    extra = {"format_version"} if record is Bundle else set()
    assert set(schema["properties"]) == set(fields) | extra
    missing = dataclasses.MISSING
    needed = {name for name, item in fields.items() if item.default is missing and item.default_factory is missing}
    assert set(schema.get("required", [])) == needed | extra


def test_schema_knows_every_record_of_the_contract():
    records = {value for value in vars(runtime.contract).values() if dataclasses.is_dataclass(value)}
    assert records == {Bundle, TokenizerSpec, DecoderSpec, GraphNames, FileRecord}
    assert set(SCHEMA["$defs"]) == {"tokenizer", "decoder", "names", "file"}


def test_pair_is_written_whole(tiny_bundle: Path, tiny_target: Path, tiny_draft: Path):
    bundle = load_bundle(tiny_bundle)  # compares every hash
    assert {"bundle.json", *(record.path for record in bundle.files())} == {
        name for name in tree(tiny_bundle) if (tiny_bundle / name).is_file()
    }
    assert [file.name for file in tiny_bundle.parent.iterdir()] == [tiny_bundle.name]
    assert bundle.draft is not None
    assert (bundle.target.source, bundle.target.architecture) == (str(tiny_target), "llama")
    assert (bundle.draft.source, bundle.draft.architecture) == (str(tiny_draft), "qwen2")
    for spec in (bundle.target, bundle.draft):
        assert (spec.precision, spec.context_length, spec.vocab_size, spec.min_rows) == ("fp32", 512, 512, 1)
        assert list(spec.parity) == ["prefill", "one_token", "block", "rewind"]
    assert (bundle.target.num_layers, bundle.target.num_key_value_heads, bundle.target.head_size) == (4, 2, 16)
    assert (bundle.draft.num_layers, bundle.draft.num_key_value_heads, bundle.draft.head_size) == (1, 1, 16)
    assert bundle.tokenizer.eos_token_ids == (0, 2)
    assert bundle.tokenizer.vocab_size == 512
    assert (tiny_bundle / "tokenizer.json").read_bytes() == (tiny_target / "tokenizer.json").read_bytes()


def test_returned_bundle_is_the_one_on_the_disk(tiny_draft: Path, tmp_path: Path):
    out = tmp_path / "new" / "folders" / "bundle"
    bundle = export_bundle(str(tiny_draft), None, out)
    assert bundle == load_bundle(out)
    assert bundle.folder == out


def test_no_draft_is_written_as_null(tiny_draft: Path, tmp_path: Path):
    bundle = export_bundle(str(tiny_draft), None, tmp_path / "bundle")
    assert bundle.draft is None
    assert manifest_of(tmp_path / "bundle")["draft"] is None
    assert not (tmp_path / "bundle" / "draft").exists()


def test_self_is_the_target_rounded_further(tiny_draft: Path, tmp_path: Path):
    bundle = export_bundle(str(tiny_draft), "self", tmp_path / "bundle", precision="int8", draft_precision="int4")
    assert bundle.draft is not None
    assert bundle.draft.source == bundle.target.source == str(tiny_draft)
    assert (bundle.target.precision, bundle.draft.precision) == ("int8", "int4")
    sizes = [sum(record.size for record in spec.graph) for spec in (bundle.target, bundle.draft)]
    assert sizes[1] < sizes[0]
    # The target was held against its own rounding, not the draft's.
    assert bundle.target.parity["rounded_weights"]["divergence"] < bundle.draft.parity["rounded_weights"]["divergence"]
    jsonschema.Draft202012Validator(SCHEMA).validate(manifest_of(tmp_path / "bundle"))


@pytest.mark.parametrize(("max_length", "context"), [(None, 512), (64, 64), (512, 512), (100_000, 512)])
def test_context_is_cut_to_max_length(tiny_draft: Path, tmp_path: Path, max_length: int | None, context: int):
    assert export_bundle(str(tiny_draft), None, tmp_path / "b", max_length=max_length).target.context_length == context


def test_draft_with_a_shorter_context_keeps_it(tiny_draft: Path, copy_checkpoint: CopyCheckpoint, tmp_path: Path):
    short = copy_checkpoint(tiny_draft, max_position_embeddings=128)
    bundle = export_bundle(str(tiny_draft), str(short), tmp_path / "bundle", draft_precision="fp32")
    assert bundle.draft is not None
    assert (bundle.target.context_length, bundle.draft.context_length) == (512, 128)


def test_model_with_a_window_is_served_within_it(tiny_draft: Path, copy_checkpoint: CopyCheckpoint, tmp_path: Path):
    windowed = copy_checkpoint(
        tiny_draft, sliding_window=64, use_sliding_window=True, max_window_layers=0, layer_types=["sliding_attention"]
    )
    out = tmp_path / "bundle"
    with pytest.raises(ExportError, match="sliding window of 64 tokens"):
        export_bundle(str(windowed), None, out)
    assert not out.exists()
    assert export_bundle(str(windowed), None, out, max_length=64).target.context_length == 64


def test_report_tells_what_happens(tiny_draft: Path, tmp_path: Path):
    reports: list[tuple[str, int, int]] = []
    export_bundle(str(tiny_draft), None, tmp_path / "bundle", precision="int8", report=lambda *report: reports.append(report))
    titles = list(dict.fromkeys(title for title, _, _ in reports))
    left = " (less than a minute left in all)"
    assert titles == [
        "reading the sources",
        f"step 1 of 5: target (int8): building the graph from {tiny_draft}",
        f"step 2 of 5: target (int8): quantising the weights{left}",
        f"step 3 of 5: target (int8): writing the weights{left}",
        f"step 4 of 5: comparing with {tiny_draft} in torch{left}",
        f"step 5 of 5: target (int8): measuring row equality{left}",
    ]
    for title in titles[2:4]:
        done = [(now, total) for name, now, total in reports if name == title]
        assert done == [(number, len(done)) for number in range(1, len(done) + 1)]


# --- what is refused before any work ---------------------------------------------------------------------------------


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test when a graph is built."""
    monkeypatch.setattr(export.decoders, "build_base_graph", lambda _: pytest.fail("work began"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"precision": "int3"}, "The target's precision 'int3' is unknown; there are fp32, fp16, "),
        ({"draft": "self", "draft_precision": "fp8"}, "The draft's precision 'fp8' is unknown"),
        ({"block_size": 48}, "The target's block size 48 is unknown; there are 32, 64, 128"),
        ({"lowering": "dense"}, "The lowering 'dense' is unknown"),
        ({"draft_vocab": 100}, "--draft-vocab cuts the vocabulary of a draft model, and there is none"),
        ({"draft": "self", "draft_vocab": 10}, "--draft-vocab is 10; at least 64 tokens are needed"),
        ({"draft": "self", "draft_vocab_text": Path("x")}, "counts tokens for --draft-vocab, which is not given"),
        (
            {"draft": "self", "draft_vocab": 99, "draft_vocab_text": Path("no-such-text")},
            "no-such-text of --draft-vocab-text cannot be read: No such",
        ),
        *[({"max_length": length}, f"The max length is {length}; at least 64 tokens are needed") for length in (1, 2, 37, 63)],
        ({"max_length": 0}, "The max length is 0"),
        ({"max_length": -5}, "The max length is -5"),
        (
            {"draft": "self", "precision": "int4", "draft_precision": "int4", "draft_block_size": 32},
            "would be the target itself",
        ),
        ({"draft": "self", "precision": "fp32", "draft_precision": "fp32"}, "would be the target itself"),
        ({"draft": "no-such-model"}, "There is no file or folder no-such-model"),
        ({"target": "no-such-model"}, "There is no file or folder no-such-model"),
    ],
)
@pytest.mark.usefixtures("no_work")
def test_bad_option_is_refused(tiny_draft: Path, tmp_path: Path, options: dict[str, Any], sentence: str):
    target, draft = options.pop("target", str(tiny_draft)), options.pop("draft", None)
    with pytest.raises(ExportError, match=sentence):
        export_bundle(target, draft, tmp_path / "bundle", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_work")
def test_draft_that_shares_too_little_is_refused(
    tiny_target: Path, tiny_draft: Path, copy_checkpoint: CopyCheckpoint, tmp_path: Path
):
    other = copy_checkpoint(tiny_draft)
    unknown = "<unk>"
    Tokenizer(WordLevel({"the": 0, "sea": 1, unknown: 2}, unk_token=unknown)).save(str(other / "tokenizer.json"))
    with pytest.raises(ExportError, match=r"can propose too little of what .* says, 0 of the target's 509 tokens"):
        export_bundle(str(tiny_target), str(other), tmp_path / "bundle")


@pytest.mark.usefixtures("no_work")
def test_recurrent_draft_is_refused(tiny_target: Path, tiny_draft: Path, copy_checkpoint: CopyCheckpoint, tmp_path: Path):
    other = copy_checkpoint(tiny_draft, model_type="mamba2")
    with pytest.raises(ExportError, match="'mamba2' model: it keeps a recurrent state"):
        export_bundle(str(tiny_target), str(other), tmp_path / "bundle")


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.usefixtures("no_work")
def test_model_with_a_context_too_short_to_check_is_refused(
    tiny_draft: Path, copy_checkpoint: CopyCheckpoint, tmp_path: Path, role: str
):
    short = str(copy_checkpoint(tiny_draft, max_position_embeddings=32))
    target, draft = (short, None) if role == "target" else (str(tiny_draft), short)
    with pytest.raises(ExportError, match="would serve 32 tokens; at least 64 are needed"):
        export_bundle(target, draft, tmp_path / "bundle")


@pytest.mark.usefixtures("no_work")
def test_disk_that_is_too_small_is_refused(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9 - 800_000, 800_000))
    with pytest.raises(ExportError, match=r"needs about 0.9 MB and 0.8 MB are free at .*: free some disk"):
        export_bundle(str(tiny_target), None, tmp_path / "bundle")  # 205,376 weights of 4 bytes
    assert not list(tmp_path.iterdir())


def test_weights_that_no_file_may_hold_are_told_of(tiny_target: Path, tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(ExportError, match=r"target/model.onnx.data could not be written whole .*: the disk is full, or a"):
            export_bundle(str(tiny_target), None, tmp_path / "bundle")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_disk_that_is_large_enough_is_taken(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 0, 900_000))
    export_bundle(str(tiny_target), None, tmp_path / "bundle")


# --- what is there already -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_work")
def test_existing_bundle_is_refused_without_overwrite(old_bundle: Path, tiny_draft: Path):
    before = tree(old_bundle)
    with pytest.raises(ExportError, match="exists already: choose another --out, or pass --overwrite"):
        export_bundle(str(tiny_draft), None, old_bundle)
    assert tree(old_bundle) == before


def test_overwrite_replaces_a_bundle(old_bundle: Path, tiny_draft: Path, tmp_path: Path):
    (old_bundle / "costs.json").write_text("{}")
    export_bundle(str(tiny_draft), None, old_bundle, overwrite=True)
    bundle = load_bundle(old_bundle)
    assert (bundle.target.source, bundle.draft) == (str(tiny_draft), None)
    assert not (old_bundle / "draft").exists()
    assert not (old_bundle / "costs.json").exists()
    assert list(tmp_path.iterdir()) == [old_bundle]


def test_overwrite_takes_an_empty_folder_and_one_that_is_not_there(tiny_draft: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new"):
        export_bundle(str(tiny_draft), None, tmp_path / name, overwrite=True)
        load_bundle(tmp_path / name)


@pytest.mark.usefixtures("no_work")
def test_folder_that_is_no_bundle_is_never_replaced(tiny_draft: Path, tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("more of it")
    before = tree(tmp_path)
    for name in ("folder", "file"):
        for overwrite in (False, True):
            with pytest.raises(ExportError, match="is no bundle: it is not replaced" if overwrite else "exists already"):
                export_bundle(str(tiny_draft), None, tmp_path / name, overwrite=overwrite)
    assert tree(tmp_path) == before


def test_rests_of_a_killed_export_do_not_get_in(tiny_draft: Path, tmp_path: Path):
    rests = tmp_path / ".bundle.partial"
    (rests / "target").mkdir(parents=True)
    (rests / "target" / "old.bin").write_bytes(b"x")
    export_bundle(str(tiny_draft), None, tmp_path / "bundle")
    assert not (tmp_path / "bundle" / "target" / "old.bin").exists()
    assert not rests.exists()


def test_rests_of_an_export_killed_while_replacing_do_not_stop_the_next(old_bundle: Path, tiny_draft: Path, tmp_path: Path):
    shutil.copytree(old_bundle, tmp_path / ".bundle.old")
    export_bundle(str(tiny_draft), None, old_bundle, overwrite=True)
    assert load_bundle(old_bundle).draft is None
    assert list(tmp_path.iterdir()) == [old_bundle]


def test_bundle_behind_a_symbolic_link_is_replaced(old_bundle: Path, tiny_draft: Path, tmp_path: Path):
    (tmp_path / "current").symlink_to(old_bundle.name)
    export_bundle(str(tiny_draft), None, tmp_path / "current", overwrite=True)
    assert load_bundle(tmp_path / "current").draft is None
    assert {file.name for file in tmp_path.iterdir()} == {"current", old_bundle.name}


def test_bundle_is_replaced_from_within(old_bundle: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(old_bundle)
    export_bundle(str(tiny_draft), None, Path(), overwrite=True)
    assert load_bundle(old_bundle).draft is None


@pytest.mark.usefixtures("no_work")
def test_out_below_a_file_is_refused(tiny_draft: Path, tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ExportError, match="bundle"):
        export_bundle(str(tiny_draft), None, tmp_path / "file" / "bundle")
    assert tree(tmp_path) == {"file": b"x"}


# --- failures in the middle ------------------------------------------------------------------------------------------

FAILURES = [ExportError("the graph is wrong"), KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize(
    ("module", "step"),
    [
        (export.decoders, "check_parity"),
        (export.decoders, "measure_row_equality"),
        (export.decoders, "save_graph"),
        (export.bundle, "save_bundle"),
    ],
)
def test_failure_leaves_nothing(
    tiny_draft: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    step: str,
    failure: BaseException,
):
    def fail(*_: object) -> None:
        assert list(tmp_path.iterdir()) == [tmp_path / ".bundle.partial"], "the work is done beside the goal"
        raise failure

    monkeypatch.setattr(module, step, fail)
    with pytest.raises(ExportError if isinstance(failure, OSError) else type(failure)) as caught:
        export_bundle(str(tiny_draft), None, tmp_path / "bundle")
    if isinstance(failure, OSError):
        assert str(caught.value) == f"The bundle could not be written to {tmp_path / 'bundle'}: No space left on device."
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_failure_leaves_the_old_bundle(
    old_bundle: Path, tiny_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
):
    def fail(*_: object) -> None:
        raise failure

    before = tree(tmp_path)
    monkeypatch.setattr(export.decoders, "check_parity", fail)
    with pytest.raises(ExportError if isinstance(failure, OSError) else type(failure)):
        export_bundle(str(tiny_draft), None, old_bundle, overwrite=True)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(errno.EIO, "Input/output error")], ids=["interrupt", "disk"])
def test_failure_at_the_very_end_leaves_the_old_bundle_or_the_new_one(
    old_bundle: Path, tiny_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
):
    rename = Path.rename

    def fail(self: Path, goal: Path) -> Path:
        if Path(goal) == old_bundle and self.name == ".bundle.partial":
            raise failure
        return rename(self, goal)

    before = tree(tmp_path)
    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else ExportError):
        export_bundle(str(tiny_draft), None, old_bundle, overwrite=True)
    assert tree(tmp_path) == before


def test_rows_that_never_agree_are_refused(tiny_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(export.decoders, "measure_row_equality", lambda *_: None)
    with pytest.raises(ExportError, match="gives other bits for a row"):
        export_bundle(str(tiny_draft), None, tmp_path / "bundle")
    assert not list(tmp_path.iterdir())


def test_measured_rows_are_written(tiny_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(export.decoders, "measure_row_equality", lambda *_: PassShape(4, 2))
    export_bundle(str(tiny_draft), None, tmp_path / "bundle")
    target = manifest_of(tmp_path / "bundle")["target"]
    assert (target["min_rows"], target["row_multiple"]) == (4, 2)


def test_graph_that_computes_something_else_is_not_written(tiny_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    built = export.decoders.build_base_graph

    def wrong(source: object) -> object:
        model = built(source)
        bias = model.graph.initializers["model.layers.0.self_attn.v_proj.bias"]
        bias.const_value = type(bias.const_value)(bias.const_value.raw * 1.5 + 1, name=bias.name)
        return model

    monkeypatch.setattr(export.decoders, "build_base_graph", wrong)
    with pytest.raises(ExportError, match="does not compute what its checkpoint does: at the step 'prefill'"):
        export_bundle(str(tiny_draft), None, tmp_path / "bundle", exporter="mobius")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_checkpoint_with_undefined_weights_is_refused(
    tiny_draft: Path, copy_checkpoint: CopyCheckpoint, tmp_path: Path, precision: str
):
    broken = copy_checkpoint(tiny_draft)
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"][3, 5] = torch.nan
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(ExportError, match=r"\b(nan|NaN)\b"):
        export_bundle(str(broken), None, tmp_path / "bundle", precision=precision)
    assert not (tmp_path / "bundle").exists()


def test_checkpoint_that_torch_cannot_run_is_refused(tiny_target: Path, copy_checkpoint: CopyCheckpoint, tmp_path: Path):
    odd = copy_checkpoint(tiny_target, rms_norm_eps=None)
    with pytest.raises(ExportError, match=r"does not run in torch|could not"):
        export_bundle(str(odd), None, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_tokenizer_with_more_tokens_than_the_model_is_refused(
    tiny_draft: Path, copy_checkpoint: CopyCheckpoint, tmp_path: Path
):
    folder = copy_checkpoint(tiny_draft)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 9999}))
    with pytest.raises(ExportError, match="the tokenizer does not belong to the model"):
        export_bundle(str(folder), None, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
