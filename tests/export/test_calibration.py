"""GPTQ's weights find their places in every form of a graph, and a bundle of them is as exact as any other."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import export.calibration_text
from export.added_forms import add_lowerings
from export.base_graph import build_base_graph
from export.bundle import export_bundle
from export.calibration import CalibratedWeights, calibrate
from export.calibration_text import read_calibration_text
from export.errors import ExportError
from export.kept_weights import row_hashes
from export.quantization import BlockwiseWeights, dequantize_blockwise, quantize_blockwise, rounding
from export.reference import load_reference, matrix_rows
from export.source import Source
from export.stored_codes import _blocks_in, stored_weights
from runtime import Generator, SamplingParams
from runtime.contract import Bundle, DecoderSpec
from runtime.manifest import load_bundle
from scripts.tiny_corpus import make_document


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of the kind that the tiny pair knows."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    random = np.random.default_rng(99)
    path.write_text("".join(make_document(random) for _ in range(100)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def bundle(tiny_target: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The tiny target in int8 and its own weights in int4 as its draft: both rounded by GPTQ, in two forms."""
    out = tmp_path_factory.mktemp("gptq") / "bundle"
    options: dict[str, Any] = {"precision": "int8", "draft_precision": "int4", "lowering": "gqa,static"}
    return export_bundle(str(tiny_target), "self", out, quantizer="gptq", calibration_text=text, max_length=128, **options)


def random_matrix(rows: int, columns: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


def marked(values: np.ndarray) -> BlockwiseWeights:
    """Blocks that are told from those of the search: twice the values."""
    return quantize_blockwise(2 * values, 4, 32)


def calibrated(*matrices: np.ndarray) -> CalibratedWeights:
    names = [f"matrix {number}" for number in range(len(matrices))]
    return CalibratedWeights(names, [row_hashes(each) for each in matrices], [marked(each) for each in matrices])


# --- looked up by value ----------------------------------------------------------------------------------------------


def test_rows_are_found_however_a_graph_joins_and_orders_them() -> None:
    first, second, wide = random_matrix(6, 64, 0), random_matrix(3, 64, 1), random_matrix(4, 96, 2)
    weights = calibrated(first, second, wide)
    quantizer = weights.before(lambda _: pytest.fail("all rows are calibrated"))
    joined = np.concatenate([second, first])[[4, 0, 8, 1, 2, 3, 5, 6, 7]]
    for values in (joined, wide[::-1]):
        found = quantizer(values)
        assert found is not None
        assert np.array_equal(dequantize_blockwise(found), dequantize_blockwise(marked(values)))
    weights.require_all_found()


def test_other_rows_are_rounded_as_without_calibration() -> None:
    known, other = random_matrix(4, 64, 0), random_matrix(5, 64, 1)
    other[2] = 0  # no mark of any matrix
    weights = calibrated(known, np.zeros((1, 96), np.float32))
    quantizer = weights.before(rounding(4))
    found, mixed = quantizer(other), quantizer(np.concatenate([other, known]))
    assert found is not None
    assert mixed is not None
    searched = quantize_blockwise(other, 4, 32)
    assert np.array_equal(found.packed, searched.packed)
    assert np.array_equal(mixed.packed, np.concatenate([searched.packed, marked(known).packed]))
    assert np.array_equal(mixed.scales, np.concatenate([searched.scales, marked(known).scales]))


def test_a_graph_without_a_matrix_is_refused_by_its_name() -> None:
    first, second = random_matrix(4, 64, 0), random_matrix(4, 64, 1)
    weights = calibrated(first, second)
    weights.before(rounding(4))(first)
    with pytest.raises(ExportError, match=r"does not hold the values of 'matrix 1' as they are in torch \(1 of 2 matrices\)"):
        weights.require_all_found()
    quantizer = weights.before(rounding(4))  # another form, counted anew
    quantizer(second[:3])
    with pytest.raises(ExportError, match=r"'matrix 0' .*\(2 of 2"):
        weights.require_all_found()


# --- calibrated in torch ---------------------------------------------------------------------------------------------


def test_a_models_outputs_change_less_and_twice_the_same(target_source: Source, text: Path, tiny_tokenizer: Any) -> None:
    reference = load_reference(target_source)
    ids = tiny_tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False).ids
    texts = [ids[begin : begin + 96] for begin in range(0, 96 * 20, 96)]
    seen: list[tuple[int, int]] = []
    weights = calibrate(reference, texts[:16], 4, 32, lambda *done: seen.append(done), positive_scales=False)
    assert seen == [(number, 28) for number in range(1, 29)]  # 4 layers of 7 matrices; embedding and head have no part in it
    again = calibrate(reference, texts[:16], 4, 32, lambda *_: None, positive_scales=False)

    def divergence(quantizer: Any) -> float:
        def round_module(module: Any) -> None:
            if type(module).__name__ == "Linear" and module is not reference.module.get_output_embeddings():
                rows = matrix_rows(module)
                rows[:] = dequantize_blockwise(quantizer(rows))

        probs = [np.float64(reference.logits(texts[16:], each)) for each in (None, round_module)]
        first, second = (np.log(np.exp(each) / np.exp(each).sum(-1, keepdims=True)) for each in probs)
        return float((np.exp(first) * (first - second)).sum(-1).mean())

    gptq = weights.before(rounding(4))
    # On texts that it has not seen.
    assert divergence(gptq) < 0.8 * divergence(rounding(4))
    assert divergence(gptq) == divergence(again.before(rounding(4)))


def test_inputs_are_those_of_rounded_layers(target_source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = load_reference(target_source)
    texts = [[7, 30, 12, 99, 201, 5, 64, 80]]
    last: list[Any] = []
    plain = export.calibration.error_factor
    monkeypatch.setattr(export.calibration, "error_factor", lambda inputs: last.append(inputs.clone()) or plain(inputs))
    calibrate(reference, texts, 4, 32, lambda *_: None, positive_scales=False)
    assert len(last) == 4 * 4  # of each layer: query, key and value share one, gate and up another
    body = reference.module.base_model
    exact: list[Any] = []
    hook = body.layers[3].mlp.down_proj.register_forward_pre_hook(lambda _module, inputs: exact.append(inputs[0].clone()))
    reference.logits(texts)
    hook.remove()
    assert not np.allclose(last[-1], exact[0], atol=1e-3)


# --- bundles ---------------------------------------------------------------------------------------------------------


def test_every_form_is_held_against_the_calibrated_weights(bundle: Bundle) -> None:
    assert bundle.draft is not None
    for decoder in (bundle.target, bundle.draft):
        assert [form.lowering for form in decoder.forms] == ["gqa", "static"]
        for form in decoder.forms:
            assert form.quantizer == "gptq"
            assert form.parity["block"]["same_top_token"] == 1.0
            assert form.parity["rounded_weights"]["divergence"] > 0
    assert load_bundle(bundle.folder).target.quantizer == "gptq"


def test_greedy_text_is_the_targets_own(bundle: Bundle) -> None:
    params = SamplingParams(max_new_tokens=48)
    plain = Generator.from_bundle(bundle.folder, drafter="off").generate("Ada went to", params)
    drafted = Generator.from_bundle(bundle.folder, drafter="model", num_draft_tokens=4).generate("Ada went to", params)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.target_passes < plain.stats.target_passes


def test_both_are_calibrated_on_what_the_target_writes_once(
    tiny_target: Path, tiny_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    plain = export.calibration_text.sample_tokens

    def counted(spec: Any, *arguments: Any, **options: Any) -> list[int]:
        calls.append(spec.graph[0].path)
        return plain(spec, *arguments, **options)

    monkeypatch.setattr(export.calibration_text, "sample_tokens", counted)
    monkeypatch.setattr(export.calibration_text, "_TOKENS_A_PROMPT", 110)
    options: dict[str, Any] = {"precision": "int4", "draft_precision": "int4", "max_length": 256}
    titles: list[str] = []
    made = export_bundle(
        str(tiny_target),
        str(tiny_draft),
        tmp_path / "b",
        quantizer="gptq",
        report=lambda title, *_: titles.append(title),
        **options,
    )
    assert calls == ["rough/model.onnx"]
    assert sorted(path.name for path in made.folder.iterdir() if path.is_dir()) == ["draft", "target"]
    assert made.draft is not None
    assert made.target.quantizer == made.draft.quantizer == "gptq"
    numbers = [title.partition(":")[0] for title in dict.fromkeys(titles) if title.startswith("step ")]
    assert numbers == [f"step {number} of {len(numbers)}" for number in range(1, len(numbers) + 1)]
    assert [title for title in dict.fromkeys(titles) if not title.startswith("step ")] == ["reading the sources"]


def test_a_form_that_is_added_has_the_codes_that_are_there(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was calibrated depends on a text that is gone."""
    monkeypatch.setattr("export.calibration.calibrate", lambda *_, **__: pytest.fail("rounded anew"))
    folder = shutil.copytree(bundle.folder, tmp_path / "bundle")
    said: list[str] = []
    added = add_lowerings(folder, "gqa-half,primitive", report=lambda title, *_: said.append(title))
    assert load_bundle(folder) == added
    assert added.draft is not None
    for decoder in (added.target, added.draft):
        gqa, half, static, primitive = decoder.forms
        assert {form.quantizer for form in decoder.forms} == {"gptq"}
        assert {record.path for record in primitive.graph} & {record.path for record in static.graph}
        assert {record.path for record in half.graph} & {record.path for record in gqa.graph}
        codes = [codes_of(form, folder) for form in decoder.forms]
        layers = set(codes[0]) & set(codes[2])
        assert len(layers) == 28
        for name in layers:
            assert all(np.array_equal(codes[0][name], other[name]) for other in codes[1:]), name
    assert not any("rounding by GPTQ" in title for title in said)


def codes_of(form: DecoderSpec, folder: Path) -> dict[str, np.ndarray]:
    """The codes of a form's matrices but the head, by name."""
    blocks = dict(_blocks_in(folder / form.graph[0].path))
    return {name: weights.signed_codes for name, weights in blocks.items() if "layers" in name}


def test_codes_for_scales_of_either_sign_are_no_codes_for_positive_ones(tiny_draft: Path, text: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": "int4", "quantizer": "gptq", "calibration_text": text, "max_length": 128}
    bundle = export_bundle(str(tiny_draft), None, tmp_path / "b", **options)
    with pytest.raises(ExportError, match="was rounded by GPTQ with scales of either sign, which static and primitive cannot"):
        add_lowerings(bundle.folder, "static")
    assert load_bundle(bundle.folder) == bundle


def test_codes_of_another_model_are_refused_by_the_matrix(bundle: Bundle, draft_source: Source) -> None:
    base = build_base_graph(draft_source)
    with pytest.raises(ExportError, match=r"does not hold the matrix 'model\.layers\.0\..*' of .* as it is built here"):
        stored_weights(bundle.target, bundle.folder, base)


def test_a_text_that_is_too_short_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Ada went to the garden.", encoding="utf-8")
    with pytest.raises(
        ExportError, match=r"calibrate the target on has \d+ tokens; at least 1024 are needed: give a longer one"
    ):
        export_bundle(str(tiny_target), None, tmp_path / "b", precision="int4", quantizer="gptq", calibration_text=short)
    assert not (tmp_path / "b").exists()


def test_a_text_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="of --calibration-text cannot be read: No such file"):
        read_calibration_text(tmp_path / "absent")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ExportError, match="cannot be read: it is no UTF-8 text"):
        read_calibration_text(tmp_path / "binary")
