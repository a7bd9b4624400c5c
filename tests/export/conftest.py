"""Decoders of the tiny pair in every precision, and copies of them with a deliberate mistake."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from tokenizers import Tokenizer

from export.decoders import write_decoder
from export.probe import probe_tokens
from export.role import PRECISIONS, Role
from export.source import Source, resolve_source
from export.tokenizer import tokenizer_from_folder
from runtime.contract import DecoderSpec

CopyCheckpoint = Callable[..., Path]
Damage = Callable[[DecoderSpec, Callable[[onnx.ModelProto], None]], tuple[DecoderSpec, Path]]


@pytest.fixture(scope="session")
def target_source(tiny_target: Path) -> Source:
    return resolve_source(str(tiny_target))


@pytest.fixture(scope="session")
def draft_source(tiny_draft: Path) -> Source:
    return resolve_source(str(tiny_draft))


@pytest.fixture(scope="session")
def probe(tiny_target: Path) -> list[int]:
    """64 tokens of an ordinary text."""
    return probe_tokens(tokenizer_from_folder(tiny_target))


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_target: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_target / "tokenizer.json"))


@pytest.fixture(scope="session")
def decoders_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the graphs of `decoders` lie."""
    return tmp_path_factory.mktemp("decoders")


@pytest.fixture(scope="session")
def decoders(target_source: Source, draft_source: Source, decoders_folder: Path) -> dict[str, DecoderSpec]:
    """The tiny target under the name of each precision, and the tiny draft in fp32 under "draft"."""
    roles = [Role(precision, target_source, precision, 512) for precision in PRECISIONS]
    roles.append(Role("draft", draft_source, "fp32", 512))
    return {role.name: write_decoder(role, decoders_folder, lambda *_: None) for role in roles}


@pytest.fixture
def damaged(decoders_folder: Path, tmp_path: Path) -> Damage:
    """A function that copies one of `decoders`, changes its graph, and returns the spec and its folder."""

    def damage(spec: DecoderSpec, change: Callable[[onnx.ModelProto], None]) -> tuple[DecoderSpec, Path]:
        model = onnx.load(decoders_folder / spec.graph[0].path)
        change(model)
        onnx.save(model, tmp_path / "damaged.onnx")
        return dataclasses.replace(spec, graph=(dataclasses.replace(spec.graph[0], path="damaged.onnx"),)), tmp_path

    return damage


@pytest.fixture
def copy_checkpoint(tmp_path: Path) -> CopyCheckpoint:
    """A function that copies a checkpoint's folder, with some fields of its config.json changed, or left out (...)."""

    def copy(folder: Path, name: str = "model", **config: Any) -> Path:
        twin = tmp_path / name
        shutil.copytree(folder, twin)
        values = json.loads((twin / "config.json").read_text(encoding="utf-8")) | config
        kept = {key: value for key, value in values.items() if not (key in config and value is ...)}
        (twin / "config.json").write_text(json.dumps(kept), encoding="utf-8")
        return twin

    return copy
