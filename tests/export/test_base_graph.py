"""The base graph: checkpoints as they are found in the wild, and those that cannot be built."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file, save_file

import export.base_graph
from export.base_graph import build_base_graph
from export.bundle import export_bundle
from export.errors import ExportError
from export.source import resolve_source

CopyCheckpoint = Callable[..., Path]


def tree(folder: Path) -> dict[str, bytes]:
    """Every file under a folder with its bytes, folders with none."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def like_the_hub_cache(folder: Path, cache: Path) -> Path:
    """A snapshot folder whose files are relative links to blobs, as huggingface_hub lays its cache out."""
    blobs, snapshot = cache / "blobs", cache / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copyfile(file, blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number:040x}")
    return snapshot


def without_tensor(folder: Path, name: str) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("rope_scaling", [None, ...], ids=["null", "left out"])
def test_default_rope_theta_keeps_its_rotary_embedding(
    tiny_target: Path, copy_checkpoint: CopyCheckpoint, tmp_path: Path, rope_scaling: object
):
    folder = copy_checkpoint(tiny_target, rope_scaling=rope_scaling)
    before = tree(folder)
    model = build_base_graph(resolve_source(str(folder)))
    assert Counter(node.op_type for node in model.graph)["RotaryEmbedding"] == 2 * 4
    del model
    export_bundle(str(folder), None, tmp_path / "bundle")  # compares with torch
    assert tree(folder) == before


def test_folder_of_symbolic_links_works_and_stays_as_it_was(tiny_draft: Path, tmp_path: Path):
    snapshot = like_the_hub_cache(tiny_draft, tmp_path / "cache")
    before = tree(tmp_path / "cache")
    bundle = export_bundle(str(snapshot), None, tmp_path / "bundle")
    assert bundle.target.parity["prefill"]["max_difference"] < 1e-3
    assert tree(tmp_path / "cache") == before
    assert all((snapshot / file.name).is_symlink() for file in tiny_draft.iterdir())


def test_weights_on_a_disk_without_hard_links_are_copied(tiny_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError("Operation not permitted")

    snapshot = like_the_hub_cache(tiny_draft, tmp_path / "cache")
    monkeypatch.setattr(Path, "hardlink_to", refuse)
    assert len(build_base_graph(resolve_source(str(snapshot))).graph) > 0


def test_links_are_gone_after_a_failure(tiny_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    snapshot = like_the_hub_cache(tiny_draft, tmp_path / "cache")
    before = tree(tmp_path / "cache")
    seen: list[Path] = []

    def fail(folder: str, **_: object) -> None:
        seen.append(Path(folder))
        raise KeyboardInterrupt

    monkeypatch.setattr("mobius.build", fail)
    with pytest.raises(KeyboardInterrupt):
        build_base_graph(resolve_source(str(snapshot)))
    assert seen[0] != snapshot, "mobius gets a twin of the folder"
    assert not seen[0].exists()
    assert tree(tmp_path / "cache") == before


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (transformers.LlamaConfig(), {"rotary_emb_base": 10000.0}),
        (transformers.LlamaConfig(rope_theta=500000.0), {}),
        (transformers.LlamaConfig(rope_scaling={"rope_type": "linear", "factor": 2.0}), {}),
        (
            transformers.LlamaConfig(rope_theta=5e5, rope_scaling={"type": "dynamic", "factor": 2.0}),
            {"rope_scaling": None, "rotary_emb_base": 5e5},
        ),
        (transformers.LlamaConfig(rope_theta=5e5, mlp_bias=True), {"use_mlp_bias": True}),
        (transformers.CohereConfig(rope_theta=5e5), {"rope_interleave": True}),
        (transformers.GPT2Config(), {}),
    ],
)
def test_config_says_to_mobius_what_transformers_makes_of_it(config: transformers.PretrainedConfig, changes: dict[str, object]):
    assert export.base_graph.config_changes(config) == changes


def test_plain_folder_is_read_where_it_lies(tiny_draft: Path):
    with export.base_graph._plain_folder(tiny_draft) as folder:
        assert folder == tiny_draft


def test_unknown_architecture_is_refused_with_a_suggestion(tiny_draft: Path, copy_checkpoint: CopyCheckpoint):
    source = resolve_source(str(copy_checkpoint(tiny_draft, model_type="lama")))
    with pytest.raises(
        ExportError, match=r"is a 'lama' model, which mobius-onnx \S+ does not know; closest known: .*\bllama\b"
    ):
        build_base_graph(source)


def test_model_that_is_no_text_decoder_is_refused(tiny_draft: Path, copy_checkpoint: CopyCheckpoint):
    source = resolve_source(str(copy_checkpoint(tiny_draft, model_type="whisper")))
    with pytest.raises(ExportError, match="'whisper'"):
        build_base_graph(source)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.bias", "model.norm.weight"]
)
def test_missing_tensor_is_refused_by_name(tiny_draft: Path, copy_checkpoint: CopyCheckpoint, name: str):
    folder = copy_checkpoint(tiny_draft)
    without_tensor(folder, name)
    with pytest.raises(ExportError, match=rf"has no weights for 1 tensors of its graph, {name}.* first: complete the download"):
        build_base_graph(resolve_source(str(folder)))


def test_weights_of_another_shape_than_the_config_says_are_refused(
    tiny_draft: Path, copy_checkpoint: CopyCheckpoint, tmp_path: Path
):
    folder = copy_checkpoint(tiny_draft, intermediate_size=128)
    with pytest.raises(ExportError, match=r"(?i)could not build .*shape"):
        export_bundle(str(folder), None, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_damaged_weights_are_refused(tiny_draft: Path, copy_checkpoint: CopyCheckpoint):
    folder = copy_checkpoint(tiny_draft)
    source = resolve_source(str(folder))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])  # between the look at its header and the reading
    with pytest.raises(ExportError, match=r"mobius-onnx \S+ could not build .* \('qwen2'\): SafetensorError"):
        build_base_graph(source)
