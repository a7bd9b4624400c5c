"""What the exporter makes, compiled by TensorRT-RTX: the tiny pair in every form for TensorRT, and SmolLM2 as it is used."""

from __future__ import annotations

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


def compile_pair(folder: Path, target: DecoderSpec, draft: DecoderSpec, capability: tuple[int, int]) -> None:
    """Builds both engines and looks that their records are there."""
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
    for spec, record in zip((target, draft), records.values(), strict=True):
        assert record.capacity == spec.cache_capacity
        assert record.size > 0.9 * sum(file.size for file in spec.graph)


# Never the draft in int8: TensorRT-RTX 1.7 fails on int8 matrices of one block a column, and only a model 32 wide has those.
@pytest.mark.parametrize(
    ("lowering", "precision", "draft_precision"),
    [("static", "fp16", "int4"), ("static", "int8", "fp32"), ("primitive", "int8", "fp16"), ("primitive", "int4", "fp32")],
)
def test_every_form_for_tensorrt_compiles(
    tiny_target: Path, tiny_draft: Path, tmp_path: Path, lowering: str, precision: str, draft_precision: str
) -> None:
    target = export_decoder(tmp_path, "target", str(tiny_target), lowering, precision, 128)
    draft = export_decoder(tmp_path, "draft", str(tiny_draft), lowering, draft_precision, 128)
    compile_pair(tmp_path, target, draft, (8, 6))


@pytest.mark.real_weights
def test_smollm2_in_fp16_compiles_with_its_int4_draft(smollm2_gguf: Path, tmp_path: Path) -> None:
    target = export_decoder(tmp_path, "target", str(smollm2_gguf), "static", "fp16", 2048)
    draft = export_decoder(tmp_path, "draft", str(smollm2_gguf), "static", "int4", 2048)
    compile_pair(tmp_path, target, draft, (8, 9))
