"""Models that nothing here builds are refused before any work, with what stands closest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from export.bundle import export_bundle
from export.errors import ExportError
from export.known_models import check_known
from export.source import Source, resolve_source

CopyCheckpoint = Callable[..., Path]
OWN_CODE = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}


def of(architecture: str, kind: str = "folder") -> Source:
    return Source("the model", kind, Path("model.gguf"), architecture, 512, None, 1)


@pytest.mark.parametrize(
    ("can_trace", "whom"), [(False, r"mobius-onnx \S+ does not know"), (True, "neither .* nor transformers knows")]
)
def test_an_unknown_model_is_told_what_is_closest(
    tiny_draft: Path, copy_checkpoint: CopyCheckpoint, can_trace: bool, whom: str
):
    source = resolve_source(str(copy_checkpoint(tiny_draft, model_type="lama")))
    with pytest.raises(ExportError, match=rf"is a 'lama' model, which {whom}; closest known: .*\bllama\b"):
        check_known(source, can_trace=can_trace)


def test_a_model_of_its_own_code_is_refused_and_the_code_not_run(
    tiny_draft: Path, copy_checkpoint: CopyCheckpoint, tmp_path: Path
):
    folder = copy_checkpoint(tiny_draft, model_type="own", auto_map=OWN_CODE)
    (folder / "configuration_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(
        ExportError, match=r"is a 'own' model, which only code of its own computes .*never run here: take a model"
    ):
        export_bundle(str(folder), None, tmp_path / "bundle")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_code_beside_a_model_that_is_known_does_not_matter(tiny_draft: Path, copy_checkpoint: CopyCheckpoint):
    check_known(resolve_source(str(copy_checkpoint(tiny_draft, auto_map=OWN_CODE))))


def test_what_transformers_knows_may_be_traced(
    tiny_draft: Path, copy_checkpoint: CopyCheckpoint, monkeypatch: pytest.MonkeyPatch
):
    import mobius

    monkeypatch.setattr(mobius.registry, "_map", {})
    source = resolve_source(str(tiny_draft))
    check_known(source, can_trace=True)
    with pytest.raises(ExportError, match="does not know"):
        check_known(source)


def test_a_gguf_file_of_an_unknown_model_is_refused():
    check_known(of("qwen2", "gguf"))
    with pytest.raises(
        ExportError, match=r"is a GGUF file of a 'lama' model, which mobius-onnx \S+ does not read; closest known: llama"
    ):
        check_known(of("lama", "gguf"))
