"""What mobius builds wrongly is tried by optimum where the user left that open, and said to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from export import corrected_modules
from export.bundle import export_bundle
from export.errors import ExportError

from .families import FAMILIES

pytest.importorskip("optimum.exporters.onnx", reason="needs the extra 'optimum'")


@pytest.fixture
def sequential(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that mobius alone builds as another model."""
    return uncorrected("GPT-NeoX, one branch after the other", tiny_target, tmp_path, monkeypatch)


def uncorrected(name: str, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(corrected_modules, "corrected_module", lambda config: None)
    next(family for family in FAMILIES if family.name == name).make(tmp_path / "checkpoint", tokenizer)
    return tmp_path / "checkpoint"


def test_auto_falls_to_optimum_and_says_so(sequential: Path, tmp_path: Path):
    said: list[str] = []
    bundle = export_bundle(
        str(sequential), "self", tmp_path / "bundle", max_length=64, report=lambda title, *_: said.append(title)
    )
    assert bundle.target.parity["block"]["max_difference"] < 1e-3
    assert (bundle.target.lowering, bundle.draft.lowering) == ("growing", "growing")
    assert bundle.target.exporter == "optimum"
    (sentence,) = {title for title in said if title.startswith("optimum is tried, because")}
    assert "('gpt_neox') does not compute what its checkpoint does: at the step 'prefill'" in sentence
    assert [path.name for path in (tmp_path / "bundle" / "target").iterdir() if "model.onnx" not in path.name] == []
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "bundle"}


def test_mobius_that_was_asked_for_stays(sequential: Path, tmp_path: Path):
    with pytest.raises(ExportError, match=r"does not compute what .* agree; what built it .*: try the other --source"):
        export_bundle(str(sequential), None, tmp_path / "bundle", max_length=64, exporter="mobius")
    assert not (tmp_path / "bundle").exists()


def test_both_reasons_are_told_where_both_fail(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoint = uncorrected("Cohere 2", tiny_target, tmp_path, monkeypatch)
    with pytest.raises(
        ExportError, match=r"\('cohere2'\) does not compute .*; nor did optimum's graph serve: optimum-onnx \S+ could"
    ):
        export_bundle(str(checkpoint), None, tmp_path / "bundle", max_length=64)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
