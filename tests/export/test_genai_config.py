"""The folder for ONNX Runtime GenAI; tests/test_oracles.py runs that engine on larger models."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from export.errors import ExportError
from export.genai_config import genai_config, write_genai_files, write_genai_folder
from runtime import Generator, SamplingParams
from runtime.contract import Bundle
from runtime.manifest import load_bundle


@pytest.fixture
def bundle(tiny_bundle: Path) -> Bundle:
    return load_bundle(tiny_bundle)


def config_of(*args: Any, **options: Any) -> dict[str, Any]:
    return json.loads(genai_config(*args, **options))


@pytest.mark.parametrize("role", ["target", "draft"])
def test_plain_config_describes_the_decoder_of_the_role(bundle: Bundle, role: str) -> None:
    spec = getattr(bundle, role)
    config = config_of(bundle, role)
    assert config == {
        "model": {
            "type": "decoder",
            "context_length": 512,
            "vocab_size": 512,
            "eos_token_id": [0, 2],
            "decoder": {
                "session_options": {"provider_options": [], "session.force_spinning_stop": "1"},
                "filename": f"{role}/model.onnx",
                "head_size": spec.head_size,
                "num_hidden_layers": {"target": 4, "draft": 1}[role],
                "num_key_value_heads": spec.num_key_value_heads,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {"do_sample": False, "max_length": 512, "past_present_share_buffer": True},
    }


@pytest.mark.parametrize(("role", "other"), [("target", "draft"), ("draft", "target")])
def test_speculative_config_has_the_other_decoder_as_draft(bundle: Bundle, role: str, other: str) -> None:
    config = config_of(bundle, role, num_draft_tokens=3)
    assert config["model"]["decoder"] == config_of(bundle, role)["model"]["decoder"]
    assert config["model"]["draft"] == config_of(bundle, other)["model"]["decoder"]
    assert config["speculative"] == {"max_draft_tokens": 3}


def test_names_are_those_of_the_manifest(bundle: Bundle) -> None:
    names = replace(bundle.target.names, input_ids="tokens", past_key="cache.{layer}.k", logits="scores")
    decoder = config_of(replace(bundle, target=replace(bundle.target, names=names)))["model"]["decoder"]
    assert decoder["inputs"]["input_ids"] == "tokens"
    assert decoder["inputs"]["past_key_names"] == "cache.%d.k"
    assert decoder["outputs"]["logits"] == "scores"


def test_a_pair_has_the_shorter_context(bundle: Bundle) -> None:
    assert bundle.draft is not None
    shorter = replace(bundle, draft=replace(bundle.draft, context_length=100))
    config = config_of(shorter, num_draft_tokens=4)
    assert (config["model"]["context_length"], config["search"]["max_length"]) == (100, 100)
    assert config_of(shorter)["search"]["max_length"] == 512


def test_threads_are_set_for_both_decoders(bundle: Bundle) -> None:
    model = config_of(bundle, num_draft_tokens=4, threads=3)["model"]
    assert [model[name]["session_options"]["intra_op_num_threads"] for name in ("decoder", "draft")] == [3, 3]


@pytest.mark.parametrize("number", [-1, 17])
def test_numbers_of_draft_tokens_the_engine_refuses_are_refused(bundle: Bundle, number: int) -> None:
    with pytest.raises(ExportError, match=f"num_draft_tokens is {number}; .* takes 1 to 16, and 0 means plain"):
        genai_config(bundle, num_draft_tokens=number)


def test_what_is_not_there_is_refused(bundle: Bundle) -> None:
    alone = replace(bundle, draft=None)
    assert "draft" not in config_of(alone)["model"]
    for role, options in (("draft", {}), ("target", {"num_draft_tokens": 4})):
        with pytest.raises(ExportError, match="has no draft model: export it with --draft"):
            genai_config(alone, role, **options)
    with pytest.raises(ExportError, match="The role is 'drafter'; 'target' or 'draft' is expected"):
        genai_config(bundle, "drafter")  # type: ignore[arg-type]


def test_what_the_engine_cannot_run_is_refused(bundle: Bundle) -> None:
    wider = replace(bundle, target=replace(bundle.target, vocab_size=640))
    with pytest.raises(ExportError, match=r"give 640 and 512 logits a row, .*: pass num_draft_tokens=0"):
        genai_config(wider, num_draft_tokens=4)
    assert config_of(wider)["model"]["vocab_size"] == 640
    other = replace(bundle, target=replace(bundle.target, lowering="growing"))
    with pytest.raises(ExportError, match="has the lowering 'growing'; 'gqa' is expected"):
        genai_config(other)
    inexact = replace(bundle, target=replace(bundle.target, min_rows=2))
    with pytest.raises(
        ExportError, match="is exact where passes are padded to 2 rows, and ONNX Runtime GenAI feeds what there is"
    ):
        genai_config(inexact)


def test_a_bundle_is_a_folder_of_genai_once_its_files_are_written(bundle: Bundle, tmp_path: Path) -> None:
    copy = shutil.copytree(bundle.folder, tmp_path / "bundle")
    write_genai_files(load_bundle(copy))
    assert (copy / "genai_config.json").read_text() == genai_config(bundle, num_draft_tokens=4)
    assert "chat_template" in json.loads((copy / "tokenizer_config.json").read_text())
    assert load_bundle(copy).target == bundle.target
    alone = replace(load_bundle(copy), draft=None)
    write_genai_files(alone)
    assert (copy / "genai_config.json").read_text() == genai_config(bundle)
    (copy / "genai_config.json").unlink()
    with pytest.raises(ExportError, match="'gqa' is expected"):
        write_genai_files(replace(alone, target=replace(alone.target, lowering="growing")))
    assert not (copy / "genai_config.json").exists()


@pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_genai") is None, reason="needs ONNX Runtime GenAI: pip install '.[oracles]'"
)
def test_the_engine_runs_the_pair_in_the_bundles_folder(bundle: Bundle, tmp_path: Path) -> None:
    folder = shutil.copytree(bundle.folder, tmp_path / "bundle")
    write_genai_files(load_bundle(folder))
    generator = Generator.from_bundle(folder)
    prompts = [generator.prompt_tokens(text) for text in ("1 2 3 4", "What is 3 + 4?", "a b c a b c a b")]
    ours = [generator.generate(prompt, SamplingParams(max_new_tokens=24)) for prompt in prompts]
    # Its texts do not hold the token that ended them.
    expected = [list(text.token_ids)[: -1 if text.finish_reason == "eos" else None] for text in ours]
    job = {"folder": str(folder), "prompts": prompts, "max_new_tokens": 24, "rounds": None, "seeds": [0], "search_options": {}}
    (tmp_path / "job.json").write_text(json.dumps(job | {"draft_options": {"max_draft_tokens": 4}}), encoding="utf-8")
    command = [sys.executable, Path(__file__).parents[1] / "oracle_genai.py", tmp_path / "job.json", tmp_path / "result.json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert [tokens for tokens, _ in found] == expected
    assert sum(sum(accepted) for _, accepted in found) > 0


def test_folder_holds_the_pair_as_hard_links(bundle: Bundle, tmp_path: Path) -> None:
    folder = write_genai_folder(bundle, tmp_path / "new" / "folder", num_draft_tokens=4)
    assert bundle.draft is not None
    graphs = [record.path for spec in (bundle.target, bundle.draft) for record in spec.graph]
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == {*graphs, "tokenizer.json", "tokenizer_config.json", "genai_config.json"}
    for path in (*graphs, "tokenizer.json"):
        assert (folder / path).read_bytes() == (bundle.folder / path).read_bytes()
    assert all((folder / path).samefile(bundle.folder / path) for path in graphs)
    assert (folder / "genai_config.json").read_text() == genai_config(bundle, num_draft_tokens=4)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    template = (bundle.folder / "chat_template.jinja").read_text()
    assert tokenizer == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bundle.tokenizer.bos_token,
        "eos_token": bundle.tokenizer.eos_token,
        "chat_template": template,
    }


def test_folder_of_one_role_holds_nothing_of_the_other(bundle: Bundle, tmp_path: Path) -> None:
    folder = write_genai_folder(bundle, tmp_path / "draft", "draft")
    assert (folder / "draft" / "model.onnx").is_file()
    assert not (folder / "target").exists()


def test_graphs_are_copied_where_links_fail(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    graph = write_genai_folder(bundle, tmp_path / "copy") / "target" / "model.onnx"
    assert graph.read_bytes() == (bundle.folder / "target" / "model.onnx").read_bytes()
    assert not graph.samefile(bundle.folder / "target" / "model.onnx")


def test_symbolic_links_of_a_bundle_are_followed(bundle: Bundle, tmp_path: Path) -> None:
    twin = tmp_path / "twin"
    shutil.copytree(bundle.folder, twin)
    (twin / "target" / "model.onnx.data").unlink()
    (twin / "target" / "model.onnx.data").symlink_to(bundle.folder / "target" / "model.onnx.data")
    weights = write_genai_folder(load_bundle(twin), tmp_path / "folder") / "target" / "model.onnx.data"
    assert not weights.is_symlink()
    assert weights.samefile(bundle.folder / "target" / "model.onnx.data")


def test_a_folder_in_use_is_left_alone(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ExportError, match="holds files already: choose a folder that does not exist yet"):
        write_genai_folder(bundle, tmp_path)
    with pytest.raises(ExportError, match="could not be written: Not a directory"):
        write_genai_folder(bundle, tmp_path / "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
