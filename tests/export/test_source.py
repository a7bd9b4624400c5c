"""Finding a model: what is no model is refused in one sentence, before any work."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from export.errors import ExportError
from export.source import Source, resolve_source

CopyCheckpoint = Callable[..., Path]


def write_gguf(path: Path, **numbers: int) -> Path:
    """A GGUF file of a 'llama' with one tensor and the given metadata."""
    writer = GGUFWriter(path, "llama")
    for key, value in numbers.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# --- what is there ---------------------------------------------------------------------------------------------------


def test_folder_tells_its_facts(tiny_target: Path, tiny_draft: Path):
    target, draft = resolve_source(str(tiny_target)), resolve_source(str(tiny_draft))
    assert target == Source(str(tiny_target), "folder", tiny_target, "llama", 512, None, 205_376, 32_768, 4)
    assert (draft.architecture, draft.context_length, draft.window, draft.num_parameters) == ("qwen2", 512, None, 25_760)


def test_home_is_expanded(tiny_target: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tiny_target.parent))
    assert resolve_source("~/tiny-target").path == tiny_target


def test_gguf_file_tells_its_facts(tmp_path: Path):
    path = write_gguf(tmp_path / "model.gguf", context_length=2048, block_count=3, nextn_predict_layers=1)
    assert resolve_source(str(path)) == Source(str(path), "gguf", path, "llama", 2048, None, 8 * 32, 8 * 32, 2)


def test_sharded_folder_counts_what_its_index_names(tiny_draft: Path, copy_checkpoint: CopyCheckpoint):
    folder = copy_checkpoint(tiny_draft)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    (folder / "consolidated.safetensors").write_bytes(b"the same weights once more, which no index names")
    assert resolve_source(str(folder)).num_parameters == 25_760


# --- folders that are none -------------------------------------------------------------------------------------------


def test_folder_without_config(tmp_path: Path):
    with pytest.raises(ExportError, match=r"holds no config\.json: it is not a Hugging Face model folder"):
        resolve_source(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("{}", "names no model_type"),
        ('{"model_type": 7}', "names no model_type"),
        ('{"model_type": "llama"}', "names no context length"),
        ('{"model_type": "llama", "max_position_embeddings": "512"}', "names no context length"),
        ('{"model_type": "llama", "max_position_embeddings": 0}', "names no context length"),
        ('{"model_type": "llama", "max_position_embeddings": 512, "sliding_window": "[1]"}', "sliding_window in config.json"),
        ('{"model_type": "llama", "text_config": null}', "config.json"),
        ('{"model_type": "llama", "max_position_embeddings": 512, "layer_types": [1]}', "config.json"),
        ('{"model_type": "llama", "max_pos', "config.json is not valid JSON"),
        ("[]", "holds a JSON list where an object is expected"),
        ("\x00\xff garbage", "config.json is not valid JSON"),
    ],
)
def test_config_that_is_none(tiny_draft: Path, copy_checkpoint: CopyCheckpoint, config: str, sentence: str):
    folder = copy_checkpoint(tiny_draft)
    (folder / "config.json").write_bytes(config.encode("latin-1"))
    with pytest.raises(ExportError, match=sentence):
        resolve_source(str(folder))


def test_folder_without_weights(tiny_draft: Path, copy_checkpoint: CopyCheckpoint):
    folder = copy_checkpoint(tiny_draft)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ExportError, match=r"holds a config and no \.safetensors weights: complete the download"):
        resolve_source(str(folder))


def test_index_that_names_a_missing_shard(tiny_draft: Path, copy_checkpoint: CopyCheckpoint):
    folder = copy_checkpoint(tiny_draft)
    shards = {"a": "model.safetensors", "b": "model-2.safetensors", "c": "model-3.safetensors", "d": "model-3.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ExportError, match=r"lacks model-2\.safetensors, model-3\.safetensors, which its index names"):
        resolve_source(str(folder))


@pytest.mark.parametrize("index", ['{"weight_map"', '["model.safetensors"]', '{"weight_map": ["model.safetensors"]}'])
def test_index_that_is_none(tiny_draft: Path, copy_checkpoint: CopyCheckpoint, index: str):
    folder = copy_checkpoint(tiny_draft)
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ExportError, match=r"model\.safetensors\.index\.json"):
        resolve_source(str(folder))


@pytest.mark.parametrize("size", [0, 5, 300, -1])  # nothing, inside the header's length, the header, the weights
def test_truncated_safetensors(tiny_draft: Path, copy_checkpoint: CopyCheckpoint, size: int):
    folder = copy_checkpoint(tiny_draft)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(ExportError, match=r"model\.safetensors cannot be read \(.*\): the file is truncated or damaged"):
        resolve_source(str(folder))


# --- files that are none ---------------------------------------------------------------------------------------------


def test_file_that_is_no_gguf(tmp_path: Path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"<!DOCTYPE html>")
    with pytest.raises(ExportError, match="is not a GGUF file"):
        resolve_source(str(path))


@pytest.mark.parametrize("left", [6, 40, -1])
def test_truncated_gguf(tmp_path: Path, left: int):
    path = write_gguf(tmp_path / "model.gguf", context_length=2048)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(ExportError, match="is cut short or damaged"):
        resolve_source(str(path))


def test_gguf_without_a_context_length(tmp_path: Path):
    with pytest.raises(ExportError, match=r"names no context length \(llama.context_length\)"):
        resolve_source(str(write_gguf(tmp_path / "model.gguf", block_count=1)))


def test_gguf_without_an_architecture(tmp_path: Path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    with pytest.raises(ExportError, match="architecture"):
        resolve_source(str(path))


# --- names -----------------------------------------------------------------------------------------------------------


def test_one_file_of_a_folder_is_refused_with_the_folder(tiny_target: Path):
    with pytest.raises(ExportError, match=rf"is one file of a model's folder: pass the folder, {tiny_target}\."):
        resolve_source(str(tiny_target / "model.safetensors"))


@pytest.mark.parametrize("name", ["no-such-folder", "./no/such/folder", "missing.gguf", "owner/missing.gguf", "a b/c", ""])
def test_name_that_is_neither_path_nor_hub_name(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    sentence = "is no hub name of the form owner/name" if name else "The name of a model is empty"
    with pytest.raises(ExportError, match=sentence):
        resolve_source(name)


def test_hub_name_without_a_network(monkeypatch: pytest.MonkeyPatch):
    def offline(*_: Any, **__: Any) -> str:
        raise ConnectionError("Name or service not known\nand a second line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ExportError) as caught:
        resolve_source("owner/model")
    sentence = str(caught.value)
    assert sentence.startswith("'owner/model' is neither a file nor a folder here, and the hub did not give it")
    assert "ConnectionError: Name or service not known" in sentence
    assert "second line" not in sentence
    assert "Check the name and the network" in sentence


def test_hub_name_is_downloaded(tiny_target: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[str, list[str]]] = []

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tiny_target)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    source = resolve_source("owner/model")
    assert source == Source("owner/model", "folder", tiny_target, "llama", 512, None, 205_376, 32_768, 4)
    ((name, patterns),) = asked
    assert name == "owner/model"
    for file in tiny_target.iterdir():
        assert any(Path(file.name).match(pattern) for pattern in patterns), file.name
    assert not any(Path(name).match(pattern) for name in ("pytorch_model.bin", "model.gguf") for pattern in patterns)


# --- caches that cannot rewind ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"sliding_window": 128}, 128),
        ({"sliding_window": 128, "use_sliding_window": True}, 128),
        ({"sliding_window": 128, "use_sliding_window": False}, None),
        ({"sliding_window": None}, None),
        ({}, None),
        ({"sliding_window": 128, "layer_types": ["full_attention", "sliding_attention"]}, 128),
        ({"sliding_window": 128, "layer_types": ["full_attention", "full_attention"]}, None),
        ({"sliding_window": 128, "layer_types": ["sliding_attention"], "use_sliding_window": False}, 128),
    ],
)
def test_window_is_read_where_it_slides(
    tiny_target: Path, copy_checkpoint: CopyCheckpoint, config: dict[str, Any], window: int | None
):
    assert resolve_source(str(copy_checkpoint(tiny_target, **config))).window == window


def test_window_of_a_nested_text_config_is_read(tiny_target: Path, copy_checkpoint: CopyCheckpoint):
    text = {"max_position_embeddings": 300, "sliding_window": 64}
    source = resolve_source(str(copy_checkpoint(tiny_target, model_type="gemma3", text_config=text)))
    assert (source.context_length, source.window) == (300, 64)


def test_window_of_a_gguf_file_is_read(tmp_path: Path):
    path = write_gguf(tmp_path / "model.gguf", **{"context_length": 2048, "attention.sliding_window": 64})
    assert resolve_source(str(path)).window == 64


def test_window_is_refused_above_it_and_served_within(tiny_target: Path, copy_checkpoint: CopyCheckpoint):
    source = resolve_source(str(copy_checkpoint(tiny_target, sliding_window=128)))
    with pytest.raises(ExportError, match=r"\('llama'\) attends through a sliding window of 128 .* --max-length 128 or less"):
        source.require_rewindable_cache(129)
    source.require_rewindable_cache(128)


@pytest.mark.parametrize(
    "architecture",
    [
        *("mamba", "mamba2", "falcon_mamba", "falcon_h1", "rwkv", "rwkv7", "jamba", "bamba", "zamba2", "nemotron_h"),
        *("recurrent_gemma", "granitemoehybrid", "lfm2", "plamo2", "qwen3_next", "qwen3_5", "qwen3_5_moe"),
        *("kimi_linear", "xlstm", "minimax"),
    ],
)
def test_recurrent_model_is_refused_by_name(tiny_target: Path, copy_checkpoint: CopyCheckpoint, architecture: str):
    source = resolve_source(str(copy_checkpoint(tiny_target, model_type=architecture)))
    with pytest.raises(ExportError, match=f"is a '{architecture}' model: it keeps a recurrent state"):
        source.require_rewindable_cache(16)


@pytest.mark.parametrize(
    "architecture", ["llama", "qwen2", "qwen3", "qwen3_moe", "granite", "granitemoe", "falcon", "gemma", "nemotron", "phi3"]
)
def test_model_with_attention_in_every_layer_is_not_refused(
    tiny_target: Path, copy_checkpoint: CopyCheckpoint, architecture: str
):
    resolve_source(str(copy_checkpoint(tiny_target, model_type=architecture))).require_rewindable_cache(512)


def test_longrope_is_served_up_to_where_its_factors_turn(tiny_draft: Path, copy_checkpoint: CopyCheckpoint):
    scaling = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    folder = copy_checkpoint(tiny_draft, rope_scaling=scaling, original_max_position_embeddings=128)
    assert resolve_source(str(folder)).context_length == 128
