"""Hub names: which files of a repository are downloaded, and what becomes of them. The hub is a folder here."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path

import onnx
import pytest
from onnx import external_data_helper

from export.bundle import export_bundle
from export.errors import ExportError
from export.hub import download, is_hub_name
from export.source import Source, resolve_source

Hub = Callable[[], list[str]]


@pytest.fixture
def repository(tiny_target: Path, tmp_path: Path, tiny_bundle: Path) -> Path:
    """What onnx-community would publish: settings, and graphs in onnx/ with weights beside them; no checkpoint."""
    folder = tmp_path / "hub" / "owner" / "model"
    (folder / "onnx").mkdir(parents=True)
    for file in tiny_target.glob("*.json"):
        shutil.copy(file, folder)
    # onnx reads no weights from a file that has a second name, as another test may have given it.
    shutil.copytree(tiny_bundle / "target", tmp_path / "graph")
    for name in ("model.onnx", "model_q4.onnx", "model_fp16.onnx"):
        model = onnx.load(tmp_path / "graph" / "model.onnx")
        external_data_helper.convert_model_to_external_data(model, location=f"{name}_data", size_threshold=1024)
        onnx.save(model, folder / "onnx" / name)
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    return folder


@pytest.fixture
def hub(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Serves `repository` as owner/model, and returns a function that lists what has been downloaded."""
    cache = tmp_path / "cache"

    def files() -> list[str]:
        return sorted(path.relative_to(repository).as_posix() for path in repository.rglob("*") if path.is_file())

    def snapshot_download(name: str, *, allow_patterns: Sequence[str]) -> str:
        assert name == "owner/model"
        for file in files():
            if any(fnmatch(file, pattern) for pattern in allow_patterns) and not (cache / file).exists():
                (cache / file).parent.mkdir(parents=True, exist_ok=True)
                (cache / file).symlink_to(repository / file)  # as the client's cache has it
        return str(cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda name: files())
    return lambda: sorted(
        path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.suffix != ".json" and not path.is_dir()
    )


@pytest.mark.parametrize(
    ("name", "graph"),
    [
        ("owner/model", "model.onnx"),
        ("owner/model/onnx/model_q4.onnx", "model_q4.onnx"),
    ],
)
def test_one_graph_is_downloaded_with_its_weights(hub: Hub, tmp_path: Path, name: str, graph: str):
    source = resolve_source(name)
    assert source == Source(name, "graph", tmp_path / "cache" / "onnx" / graph, "llama", 512, None, 0, num_layers=4)
    assert hub() == [f"onnx/{graph}", f"onnx/{graph}_data"]


def test_a_bundle_is_made_of_it(hub: Hub, tmp_path: Path):
    bundle = export_bundle("owner/model", None, tmp_path / "bundle")
    assert bundle.target.source == "owner/model"
    assert [record.path for record in bundle.target.graph] == ["target/model.onnx", "target/model.onnx_data"]


def test_a_checkpoint_goes_before_graphs_unless_one_is_named(hub: Hub, repository: Path, tiny_target: Path):
    shutil.copy(tiny_target / "model.safetensors", repository)
    assert resolve_source("owner/model/onnx/model.onnx").kind == "graph"
    assert "model.safetensors" not in hub(), "the whole checkpoint beside one graph"
    assert resolve_source("owner/model").kind == "folder"
    assert hub() == ["model.safetensors", "onnx/model.onnx", "onnx/model.onnx_data"]
    assert resolve_source("owner/model/onnx/model.onnx").kind == "graph", "whatever lies in the client's cache"


def test_the_graph_that_a_genai_config_names_is_the_one(hub: Hub, repository: Path):
    (repository / "genai_config.json").write_text('{"model": {"decoder": {"filename": "onnx/model_fp16.onnx"}}}')
    assert download("owner/model").name == "model_fp16.onnx"


def test_graphs_of_which_none_is_meant_are_listed(hub: Hub, repository: Path):
    (repository / "onnx" / "model.onnx").unlink()
    with pytest.raises(ExportError) as caught:
        resolve_source("owner/model")
    assert str(caught.value) == (
        "'owner/model' on the hub holds 2 graphs, none of them named model.onnx: pass one of onnx/model_fp16.onnx, "
        "onnx/model_q4.onnx behind its name, --target owner/model/onnx/model_fp16.onnx for instance."
    )
    assert hub() == []


def test_a_graph_that_is_not_there_is_told_from_those_that_are(hub: Hub):
    with pytest.raises(ExportError, match=r"has no onnx/model_q8\.onnx: pass one of onnx/model\.onnx, .*model_q4\.onnx behind"):
        resolve_source("owner/model/onnx/model_q8.onnx")


def test_a_repository_with_neither_is_refused(hub: Hub, repository: Path):
    shutil.rmtree(repository / "onnx")
    with pytest.raises(ExportError, match=r"neither \.safetensors weights nor \.onnx graphs \(there are .*pytorch_model\.bin"):
        resolve_source("owner/model")


def test_weights_that_are_missing_on_the_hub_are_named(hub: Hub, repository: Path):
    (repository / "onnx" / "model.onnx_data").unlink()
    with pytest.raises(ExportError, match=r"keeps its weights in 'model\.onnx_data', which is not there"):
        resolve_source("owner/model")


def test_names_that_the_hub_cannot_have():
    assert [is_hub_name(name) for name in ("owner/model", "owner/model/model.onnx", "owner/model/onnx/model.onnx")] == [
        True
    ] * 3
    others = ("model", "owner/model.gguf", "owner/model.onnx", "a b/c", "owner/model/onnx", "owner/model/weights.bin", "")
    assert not any(is_hub_name(name) for name in others)
