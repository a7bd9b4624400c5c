"""Options that would change nothing, and sources that are no models: one sentence before any work."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES

import export.decoders
from export.bundle import export_bundle
from export.errors import ExportError
from export.genai_config import write_genai_files
from export.gguf_blocks import matrix_with_offsets
from export.gguf_file import read_gguf
from export.options import check_no_bundle
from runtime.manifest import load_bundle
from tests import growing_graphs

from .quantized_checkpoints import write_gguf


@pytest.fixture
def graph(tiny_bundle: Path, tiny_draft: Path, tmp_path: Path) -> Path:
    """A model's folder with a graph of the form gqa, as another exporter might have left it."""
    folder = shutil.copytree(tiny_bundle / "draft", tmp_path / "graph")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (tiny_draft / name).is_file():
            shutil.copy(tiny_draft / name, folder)
    return folder


@pytest.fixture(autouse=True)
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    for step in ("build_base_graph", "take_graph"):
        monkeypatch.setattr(export.decoders, step, lambda *_: pytest.fail("work began"))


def refused(target: Path, out: Path, sentence: str, **options: Any) -> None:
    with pytest.raises(ExportError, match=sentence) as caught:
        export_bundle(str(target), options.pop("draft", None), out, **options)
    assert "\n" not in str(caught.value)
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"block_size": 64}, "--block-size is for weights in .*int4, and the target would have fp32"),
        ({"block_size": 32, "precision": "fp16"}, "--block-size is for weights in .*, and the target would have fp16"),
        (
            {"draft": "self", "draft_precision": "fp16", "draft_block_size": 128},
            "--draft-block-size is for weights in .*, and the draft would have fp16",
        ),
        ({"draft_block_size": 64}, "--draft-block-size is for a draft model, and there is none"),
        ({"quantizer": "gptq"}, "--quantizer gptq rounds a checkpoint to int8 or int4, and the target would have fp32: leave"),
        (
            {"quantizer": "gptq", "draft": "self", "draft_precision": "fp16"},
            "--quantizer gptq .*, and the target would have fp32 and the draft would have fp16",
        ),
        ({"quantizer": "hqq", "precision": "int4"}, "The quantizer 'hqq' is unknown; there are search, gptq"),
        ({"quantizer": "gptq", "precision": "checkpoint"}, "--quantizer gptq .*, and the target would have checkpoint"),
        (
            {"calibration_text": Path(__file__), "precision": "int4"},
            "--calibration-text is read by --quantizer gptq only: pass both, or neither",
        ),
        (
            {"draft": "self", "precision": "fp16", "draft_precision": "fp16"},
            "--draft self in fp16 would be the target itself: pass a lower --draft-precision, or no draft",
        ),
        (
            {"draft": "self", "precision": "int4"},
            "itself: int4 is the lowest precision there is, so pass --draft-block-size 64 or 128, --draft-vocab, another ",
        ),
        (
            {"draft": "self", "precision": "int4", "block_size": 128, "draft_block_size": 128},
            "int4 is the lowest precision there is, so pass --draft-vocab, another --draft, a higher --precision, or no draft",
        ),
        ({"draft": "self", "draft_vocab": 512}, "--draft-vocab is 512, and the draft has 512 tokens"),
        ({"draft": "self", "draft_vocab": 100_000}, "--draft-vocab is 100000, and the draft has 512 tokens"),
    ],
)
def test_an_option_without_effect_on_a_checkpoint_is_refused(
    tiny_draft: Path, tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    refused(tiny_draft, tmp_path / "bundle", sentence, **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"block_size": 32}, "--block-size rounds a checkpoint, and .* is a graph that is taken as it is"),
        ({"exporter": "optimum"}, "--source optimum says what makes a checkpoint's graph, and .* taken as it is"),
        ({"exporter": "mobius"}, "--source mobius says what makes a checkpoint's graph"),
        (
            {"quantizer": "gptq", "precision": "int4"},
            "--quantizer gptq rounds a checkpoint .*, and the target would be taken as",
        ),
        ({"lowering": "gqa,static"}, "--lowering gqa,static rewrites what is built from a checkpoint"),
    ],
)
def test_an_option_without_effect_on_a_graph_is_refused(
    graph: Path, tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    refused(graph, tmp_path / "bundle", sentence, **options)


def test_a_draft_that_is_a_graph_takes_no_block_size(tiny_draft: Path, graph: Path, tmp_path: Path) -> None:
    refused(tiny_draft, tmp_path / "b", "--draft-block-size rounds a checkpoint", draft=str(graph), draft_block_size=64)


def test_a_growing_graph_is_refused_for_genai_before_the_work(graph: Path, tiny_draft: Path, tmp_path: Path) -> None:
    growing = growing_graphs.growing_folder(tiny_draft, tmp_path / "growing")
    refused(growing, tmp_path / "b", "--emit-genai-config needs the lowering gqa, and .* growing", emit_genai_config=True)


def test_offsets_are_refused_before_the_work_where_operators_have_none(tiny_target: Path, tmp_path: Path) -> None:
    source = write_gguf(tiny_target, tmp_path / "m.gguf", GGMLQuantizationType.Q5_1)
    sentence = r"weights of '\S+' in .*m\.gguf are of the type Q5_1, whose blocks have an offset.* lowering primitive cannot"
    refused(source, tmp_path / "b", sentence, precision="checkpoint", lowering="gqa, primitive")


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q6_K"])
def test_blocks_without_offsets_are_not_refused(tmp_path: Path, kind: str) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    for name, chosen in (("token_embd.weight", "Q4_1"), ("output.weight", kind)):  # an embedding is looked up, not multiplied
        writer.add_tensor(name, np.zeros((1, GGML_QUANT_SIZES[GGMLQuantizationType[chosen]][1]), np.uint8),
                          raw_dtype=GGMLQuantizationType[chosen])  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert matrix_with_offsets(read_gguf(tmp_path / "m.gguf")) is None


@pytest.mark.parametrize("part", ["", "target", "draft", "target/model.onnx"])
def test_a_bundle_is_no_model(tiny_bundle: Path, tmp_path: Path, part: str) -> None:
    sentence = r"is (a bundle|part of the bundle .*), not a model: pass what the bundle was made from, or add a form to it"
    refused(tiny_bundle / part, tmp_path / "b", sentence)
    refused(tiny_bundle.parent / "absent", tmp_path / "b", "There is no file or folder")


def test_a_bundle_is_no_draft_either(tiny_draft: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    refused(tiny_draft, tmp_path / "b", "is part of the bundle", draft=str(tiny_bundle / "draft"))


def test_a_bundle_that_genai_loads_may_be_taken_as_such(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    write_genai_files(load_bundle(folder))
    check_no_bundle(str(folder))
