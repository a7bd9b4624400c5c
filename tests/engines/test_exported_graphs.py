"""What the exporter makes, compiled by TensorRT-RTX: the tiny pair in every form, every family, and SmolLM2 as it is used."""

from __future__ import annotations

import importlib
import json
import threading
from pathlib import Path

import pytest

from engines.build import BuildOptions
from engines.bundle import build_bundle_engines
from engines.trt_module import TensorRTModule
from runtime.contract import Bundle, DecoderSpec, FileRecord, TokenizerSpec

from .exported import export_decoder

pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install -e '.[tensorrt-rtx]'")
pytest.importorskip("mobius", reason="exporting needs the extra 'export'")


families = importlib.import_module("tests.export.families")  # which imports the exporter
RECORDED = json.loads(families.RESULTS.read_text(encoding="utf-8"))
# The form that a family's engines are built from: `static`, or `primitive` for what TensorRT's own attention has not.
FORMS = [
    (family, forms[0])
    for family in families.FAMILIES
    if (forms := [form for form in ("static", "primitive") if RECORDED[family.name][form] == families.TAKEN])
]


def compile_pair(folder: Path, target: DecoderSpec, draft: DecoderSpec | None, capability: tuple[int, int]) -> None:
    """Builds the engines and looks that their records are there."""
    (folder / "tokenizer.json").write_text("{}")
    tokenizer = TokenizerSpec(FileRecord.of(folder, "tokenizer.json"), None, None, None, (0,), 2)
    records = build_bundle_engines(
        Bundle(folder, tokenizer, target, draft, "tests"),
        TensorRTModule.load("tensorrt_rtx"),
        capability,
        num_draft_tokens=7,
        options=BuildOptions(),
        report=lambda *_: None,
        stop=threading.Event(),
    )
    for spec, record in zip([target, *([] if draft is None else [draft])], records.values(), strict=True):
        assert record.capacity == spec.cache_capacity
        assert record.size > 0.9 * sum(file.size for file in spec.graph)


# Never the draft in int8: TensorRT-RTX 1.7 fails on int8 matrices of one block a column, and only a model 32 wide has those.
@pytest.mark.parametrize(
    ("lowering", "precision", "draft_precision"),
    [
        ("static", "fp16", "int4"),
        ("static", "int8", "bf16"),
        ("static", "bf16", "fp32"),
        ("primitive", "int8", "fp16"),
        ("primitive", "int4", "bf16"),
    ],
)
def test_every_form_for_tensorrt_compiles(
    tiny_target: Path, tiny_draft: Path, tmp_path: Path, lowering: str, precision: str, draft_precision: str
) -> None:
    target = export_decoder(tmp_path, "target", str(tiny_target), lowering, precision, 128)
    draft = export_decoder(tmp_path, "draft", str(tiny_draft), lowering, draft_precision, 128)
    compile_pair(tmp_path, target, draft, (8, 6))


@pytest.mark.parametrize(("family", "form"), FORMS, ids=[family.name for family, _ in FORMS])
def test_every_family_compiles(family: families.Family, form: str, tiny_target: Path, tmp_path: Path) -> None:
    family.make(tmp_path / "checkpoint", tiny_target)
    target = export_decoder(tmp_path, "target", str(tmp_path / "checkpoint"), form, "fp16", 128)
    compile_pair(tmp_path, target, None, (8, 9))


@pytest.mark.real_weights
def test_smollm2_in_fp16_compiles_with_its_int4_draft(smollm2_gguf: Path, tmp_path: Path) -> None:
    target = export_decoder(tmp_path, "target", str(smollm2_gguf), "static", "fp16", 2048)
    draft = export_decoder(tmp_path, "draft", str(smollm2_gguf), "static", "int4", 2048)
    compile_pair(tmp_path, target, draft, (8, 9))
