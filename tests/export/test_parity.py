"""The parity check passes on the tiny pair, and names the step at which a damaged graph goes wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from export.errors import ExportError
from export.parity import TOLERANCE, Comparison, check_parity, exact_activations
from export.reference import load_reference
from export.source import Source
from runtime.backend import Context
from runtime.contract import DecoderSpec
from runtime.ort.backend import OrtModel
from runtime.ort.contexts import InPlaceContext

STEPS = ["prefill", "one_token", "block", "rewind"]
ROUNDING = ["rounded_weights", "rounded_weights_and_activations"]
Damage = Callable[[DecoderSpec, Callable[[onnx.ModelProto], None]], tuple[DecoderSpec, Path]]


def edit(model: onnx.ModelProto, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Replaces the values of an initializer."""
    (tensor,) = (tensor for tensor in model.graph.initializer if tensor.name == name)
    tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor)), name))


# --- right graphs ----------------------------------------------------------------------------------------------------


def test_every_precision_passes_and_tells_its_figures(
    decoders: dict[str, DecoderSpec], decoders_folder: Path, target_source: Source, probe: list[int]
):
    # All from one loading of the checkpoint: each must meet its own rounding, and the fp32 one none.
    specs = [decoders[precision] for precision in ("int4", "fp32", "int8")]
    four, plain, eight = check_parity(target_source, specs, decoders_folder, probe)
    assert list(plain) == STEPS
    assert list(four) == list(eight) == [*STEPS, *ROUNDING]
    for figures in (four, plain, eight):
        assert all(figures[step]["max_difference"] < 1e-3 for step in STEPS)
        assert all(figures[step]["same_top_token"] == 1.0 for step in STEPS)
    # The rounding's own effect is far above the tolerance, so a wrong nibble could not hide behind it.
    assert four["rounded_weights"]["divergence"] > 10 * eight["rounded_weights"]["divergence"] > 1e-4
    assert four["rounded_weights_and_activations"] != four["rounded_weights"]


def test_a_model_with_biases_passes(
    decoders: dict[str, DecoderSpec], decoders_folder: Path, draft_source: Source, probe: list[int]
):
    (figures,) = check_parity(draft_source, [decoders["draft"]], decoders_folder, probe)
    assert max(figures[step]["max_difference"] for step in STEPS) < 1e-3


def test_exact_activations_lends_a_twin_and_takes_it_back(decoders: dict[str, DecoderSpec], decoders_folder: Path):
    spec = decoders["int4"]
    before = sorted((decoders_folder / "int4").iterdir())

    def levels(path: str) -> set[int]:
        model = onnx.load(decoders_folder / path, load_external_data=False)
        nodes = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
        return {attribute.i for node in nodes for attribute in node.attribute if attribute.name == "accuracy_level"}

    with exact_activations(spec, decoders_folder) as twin:
        assert levels(twin.graph[0].path) == {0}
        assert levels(spec.graph[0].path) == {4}
    assert sorted((decoders_folder / "int4").iterdir()) == before


# --- damaged graphs --------------------------------------------------------------------------------------------------


def with_swapped_nibbles(model: onnx.ModelProto) -> None:
    name = next(tensor.name for tensor in model.graph.initializer if "q_proj" in tensor.name and "packed" in tensor.name)
    edit(model, name, lambda packed: (packed >> 4) | (packed << 4))


def with_one_weight_scaled(model: onnx.ModelProto) -> None:
    edit(model, "model.layers.2.mlp.down_proj.weight_t", lambda weights: weights * np.float32(1.05))


def with_one_scale_scaled(model: onnx.ModelProto) -> None:
    name = next(tensor.name for tensor in model.graph.initializer if "down_proj" in tensor.name and "scales" in tensor.name)
    edit(model, name, lambda scales: scales * np.float32(1.05))


def with_position_repeated(position: int) -> Callable[[onnx.ModelProto], None]:
    """From `position` on, each reads the rotary row before its own. (All rows moved alike would change nothing.)"""

    def change(model: onnx.ModelProto) -> None:
        for name in ("model.rotary_emb.cos_cache.kernel", "model.rotary_emb.sin_cache.kernel"):
            edit(model, name, lambda table: np.concatenate([table[:position], table[position - 1 : -1]]))

    return change


@pytest.mark.parametrize(
    ("precision", "change", "step"),
    [
        ("int4", with_swapped_nibbles, "prefill"),
        ("fp32", with_one_weight_scaled, "prefill"),
        ("int8", with_one_scale_scaled, "prefill"),
        ("fp32", with_position_repeated(20), "prefill"),
        ("fp32", with_position_repeated(32), "one_token"),
        ("fp32", with_position_repeated(33), "block"),
        ("int4", with_position_repeated(33), "block"),
    ],
)
def test_damaged_graph_is_refused_at_its_step(
    decoders: dict[str, DecoderSpec],
    damaged: Damage,
    target_source: Source,
    probe: list[int],
    precision: str,
    change: Callable[[onnx.ModelProto], None],
    step: str,
):
    spec, folder = damaged(decoders[precision], change)
    with pytest.raises(ExportError, match=rf"at the step '{step}' logits differ by .* \(at most {TOLERANCE}"):
        check_parity(target_source, [spec], folder, probe)
    assert [file.name for file in folder.iterdir()] == ["damaged.onnx"], "the twin is gone after a failure too"


def test_lost_bias_is_refused(decoders: dict[str, DecoderSpec], damaged: Damage, draft_source: Source, probe: list[int]):
    spec, folder = damaged(decoders["draft"], lambda model: edit(model, "model.layers.0.self_attn.v_proj.bias", np.zeros_like))
    with pytest.raises(ExportError, match="'prefill'"):
        check_parity(draft_source, [spec], folder, probe)


def test_figures_belong_to_the_damaged_one_of_two(
    decoders: dict[str, DecoderSpec], decoders_folder: Path, target_source: Source, probe: list[int]
):
    swapped = dataclasses.replace(decoders["int4"], precision="int8")  # an int4 graph that is said to be int8
    with pytest.raises(ExportError, match="'prefill'"):
        check_parity(target_source, [decoders["fp32"], swapped], decoders_folder, probe)


class ForgetfulContext:
    """A cache that does not rewind: it goes on behind everything it was ever fed."""

    def __init__(self, context: InPlaceContext) -> None:
        self._context, self._length = context, 0

    def run(self, token_ids: NDArray[np.int64], past_length: int, num_rows: int) -> NDArray[np.float32]:
        past_length = max(past_length, self._length)
        self._length = past_length + len(token_ids)
        return self._context.run(token_ids, past_length, num_rows)


class StaleContext:
    """A cache that rewinds its length and never writes a slot twice: what was there before the rewind is read again."""

    def __init__(self, context: InPlaceContext) -> None:
        self._context, self._length = context, 0

    def run(self, token_ids: NDArray[np.int64], past_length: int, num_rows: int) -> NDArray[np.float32]:
        stale = [cache[:, :, past_length : self._length].copy() for cache in self._context.caches]
        rows = []
        for place, token in enumerate(token_ids, start=past_length):
            rows.append(self._context.run(np.array([token]), place, 1).copy())
            for cache, old in zip(self._context.caches, stale, strict=True):
                cache[:, :, past_length : self._length] = old
        self._length = max(self._length, past_length + len(token_ids))
        return np.concatenate(rows)[-num_rows:]


@pytest.mark.parametrize("wrapper", [ForgetfulContext, StaleContext])
def test_cache_that_does_not_rewind_is_refused(
    decoders: dict[str, DecoderSpec],
    decoders_folder: Path,
    target_source: Source,
    probe: list[int],
    monkeypatch: pytest.MonkeyPatch,
    wrapper: Callable[[InPlaceContext], Context],
):
    opened = OrtModel.open_context
    monkeypatch.setattr(OrtModel, "open_context", lambda self, capacity, rows: wrapper(opened(self, capacity + 64, rows)))
    with pytest.raises(ExportError, match="at the step 'rewind'"):
        check_parity(target_source, [decoders["fp32"]], decoders_folder, probe)


# --- the comparison and the reference --------------------------------------------------------------------------------


def test_comparison_of_equal_logits():
    logits = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32)
    assert Comparison.of(logits, logits) == Comparison(0.0, 1.0, 0.0)


def test_comparison_counts_by_hand():
    expected = np.log(np.array([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]], np.float32))
    found = np.log(np.array([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]], np.float32))
    comparison = Comparison.of(expected, found)
    assert comparison.max_difference == pytest.approx(np.log(2), rel=1e-6)
    assert comparison.same_top_token == 0.5
    assert comparison.divergence == pytest.approx((0.5 * np.log(2) - 0.25 * np.log(2)) / 2, rel=1e-6)


def test_checkpoint_that_torch_cannot_load_is_refused(target_source: Source, tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ExportError, match=r"transformers could not load .* for the parity check"):
        load_reference(dataclasses.replace(target_source, path=tmp_path))
