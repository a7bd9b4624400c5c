"""A checkpoint's own blocks found again by their values; and bundles that keep them, against the checkpoint in torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from export.bundle import export_bundle
from export.errors import ExportError
from export.kept_weights import KeptWeights, StoredMatrix, stored_matrices
from export.quantization import BlockwiseWeights, dequantize_blockwise, quantize_blockwise
from export.source import resolve_source
from runtime import Generator, SamplingParams
from runtime.contract import Bundle
from runtime.manifest import load_bundle

from .quantized_checkpoints import write_gguf, write_packed


def rounded(rows: int, columns: int = 64, bits: int = 4, seed: int = 0) -> BlockwiseWeights:
    return quantize_blockwise(np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32), bits)


def stored(name: str, weights: BlockwiseWeights) -> StoredMatrix:
    return StoredMatrix(name, weights.columns, lambda: weights)


def assert_found(kept: KeptWeights, values: np.ndarray, bits: int) -> None:
    found = kept(values)
    assert found is not None
    assert found.bits == bits
    assert np.array_equal(dequantize_blockwise(found), values)


# --- the search ------------------------------------------------------------------------------------------------------


def test_matrices_are_found_whatever_their_order_and_whichever_rows_are_there():
    first, second, other = rounded(40), rounded(24, seed=1), rounded(16, columns=96, bits=8, seed=2)
    kept = KeptWeights([stored("first", first), stored("second", second), stored("other", other)])
    one, two = dequantize_blockwise(first), dequantize_blockwise(second)
    order = np.random.default_rng(0).permutation(40)
    both = np.concatenate([one, two])
    for values in (one, one[order], one[::3], both, both[::-1], both[np.arange(64) * 27 % 64], one[[5, 5, 5]]):
        assert_found(kept, values, 4)
    assert_found(kept, np.asfortranarray(one), 4)
    assert_found(kept, dequantize_blockwise(other), 8)
    kept.require_all_found()


def test_rows_of_zeros_come_from_the_matrix_they_stand_in():
    four, eight = rounded(8).take(np.arange(8)), rounded(8, bits=8, seed=1)
    for weights in (four, eight):
        weights.scales[2] = 0
    kept = KeptWeights([stored("eight", eight), stored("four", four)])
    assert_found(kept, dequantize_blockwise(four)[2:], 4)
    assert_found(kept, dequantize_blockwise(eight)[2:], 8)


def test_sign_of_a_zero_does_not_matter():
    weights = rounded(8)
    values = dequantize_blockwise(weights)
    assert (values == 0).any()
    assert_found(KeptWeights([stored("matrix", weights)]), np.where(values == 0, -values, values), 4)


def test_matrix_of_floats_stays_one():
    weights = rounded(8)
    weights.scales[2] = 0
    kept = KeptWeights([stored("matrix", weights)])
    floats = np.random.default_rng(3).normal(size=(8, 64)).astype(np.float32)
    floats[4] = 0
    assert kept(floats) is None
    # One bit of one weight is enough.
    changed = dequantize_blockwise(weights)[:1].copy()
    changed[0, 17] = np.nextafter(changed[0, 17], np.float32(np.inf))
    assert kept(changed) is None


@pytest.mark.parametrize("other", [rounded(8, bits=8, seed=1), np.ones((8, 64), np.float32)])
def test_matrix_that_is_kept_in_part_only_is_refused(other: BlockwiseWeights | np.ndarray):
    weights = rounded(8)
    matrices = [stored("matrix", weights)]
    if isinstance(other, BlockwiseWeights):
        matrices.append(stored("other", other))
        other = dequantize_blockwise(other)
    with pytest.raises(ExportError, match=r"A matrix of 16 by 64 weights is made of tensors .* in different forms"):
        KeptWeights(matrices)(np.concatenate([dequantize_blockwise(weights), other]))


def test_matrix_that_the_graph_holds_otherwise_is_refused_by_name():
    first, second = rounded(8), rounded(8, seed=1)
    kept = KeptWeights([stored("first", first), stored("second", second)])
    with pytest.raises(ExportError, match=r"'first' as they are in the checkpoint \(2 of 2 quantised tensors\)"):
        kept.require_all_found()
    assert_found(kept, dequantize_blockwise(first), 4)
    kept.require_all_found()  # a tensor that the graph has no use for
    assert kept(dequantize_blockwise(second) * 2) is None
    with pytest.raises(ExportError, match=r"'second' as they are in the checkpoint \(1 of 2 quantised tensors\)"):
        kept.require_all_found()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scales_that_are_no_numbers_are_refused_by_name(value: float):
    weights = rounded(8)
    scales, offsets = weights.scales.copy(), np.zeros_like(weights.scales)
    scales[2, 1] = offsets[2, 1] = value
    for damaged in (replace(weights, scales=scales), replace(weights, offsets=offsets)):
        with pytest.raises(ExportError, match="The scales of 'second' in the checkpoint hold NaN or infinity: download"):
            KeptWeights([stored("first", weights), stored("second", damaged)])


def test_source_without_quantised_weights_is_refused(tiny_target: Path, tmp_path: Path):
    path = write_gguf(tiny_target, tmp_path / "floats.gguf", GGMLQuantizationType.F16)
    for source in (resolve_source(str(tiny_target)), resolve_source(str(path))):
        with pytest.raises(ExportError, match="has no quantised weights to keep"):
            stored_matrices(source)


# --- bundles ---------------------------------------------------------------------------------------------------------


def checkpoint(tiny_target: Path, folder: Path, kind: str) -> Path:
    if kind in GGMLQuantizationType.__members__:
        return write_gguf(tiny_target, folder / f"{kind}.gguf", GGMLQuantizationType[kind])
    return write_packed(tiny_target, folder / kind, kind)[0]


def graph_of(bundle: Bundle, role: str = "target") -> onnx.ModelProto:
    return onnx.load(bundle.folder / role / "model.onnx")


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "gptq", "awq"])
def test_bundle_keeps_the_checkpoints_weights(kind: str, tiny_target: Path, tmp_path: Path):
    source = checkpoint(tiny_target, tmp_path, kind)
    bundle = export_bundle(str(source), None, tmp_path / "bundle", precision="checkpoint")
    assert load_bundle(bundle.folder).target.precision == "checkpoint"
    parity = bundle.target.parity
    assert all(parity[step]["max_difference"] < 1e-3 for step in ("prefill", "one_token", "block", "rewind"))
    assert 0 < parity["rounded_activations"]["divergence"] < 0.01
    assert "rounded_weights" not in parity
    model = graph_of(bundle)
    embedding = "Gather" if kind in ("gptq", "awq") else "GatherBlockQuantized"
    assert operators(model).count("MatMulNBits") == 4 * 7 + (embedding != "Gather")
    assert embedding in operators(model)
    bits = {attribute.i for node in model.graph.node for attribute in node.attribute if attribute.name == "bits"}
    assert bits == {8 if kind == "Q8_0" else 4}


def test_speculation_leaves_the_text_of_kept_weights_as_it_is(tiny_target: Path, tmp_path: Path):
    source = checkpoint(tiny_target, tmp_path, "Q4_1")
    bundle = export_bundle(str(source), "self", tmp_path / "bundle", precision="checkpoint")
    generator = Generator.from_bundle(bundle.folder)
    params = SamplingParams(max_new_tokens=32)
    plain, speculative = (generator.generate("Once upon a time", params, drafter=drafter) for drafter in ("off", "model"))
    assert plain.token_ids == speculative.token_ids
    assert speculative.stats.acceptance_rate > 0


def test_kept_codes_and_scales_are_the_files_own(tiny_target: Path, tmp_path: Path):
    path = checkpoint(tiny_target, tmp_path, "Q4_0")
    bundle = export_bundle(str(path), None, tmp_path / "bundle", precision="checkpoint")
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph_of(bundle).graph.initializer}
    there = {
        sorted_values(dequantize_blockwise(BlockwiseWeights(packed, scales, 4, scales.shape[1] * 32, 32)))
        for name, packed in constants.items()
        if name.endswith(".packed") and (scales := constants[name.replace(".packed", ".scales")]) is not None
    }
    quantised = [tensor for tensor in GGUFReader(path).tensors if tensor.tensor_type == GGMLQuantizationType.Q4_0]
    assert len(there) == len(quantised) == 29
    assert there == {sorted_values(dequantize(tensor.data, tensor.tensor_type)) for tensor in quantised}


def sorted_values(values: np.ndarray) -> bytes:
    """Each column sorted, since rows of queries and keys stand in another order; a zero's sign does not matter."""
    return np.sort(values + np.float32(0), axis=0).tobytes()


def test_smaller_head_keeps_its_rows(tiny_target: Path, tmp_path: Path):
    path = checkpoint(tiny_target, tmp_path, "Q8_0")
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog sat on the log " * 20, encoding="utf-8")
    bundle = export_bundle(
        str(path), "self", tmp_path / "bundle", draft_precision="checkpoint", draft_vocab=64, draft_vocab_text=text
    )
    assert bundle.draft is not None
    assert bundle.draft.vocab_size == 64
    assert bundle.draft.parity["block"]["max_difference"] < 1e-3
    assert "MatMul" not in operators(graph_of(bundle, "draft"))


@pytest.mark.parametrize(("kind", "lowering"), [("Q4_0", "static"), ("gptq", "primitive")])
def test_standard_operators_keep_what_they_can_say(kind: str, lowering: str, tiny_target: Path, tmp_path: Path):
    source = checkpoint(tiny_target, tmp_path, kind)
    bundle = export_bundle(str(source), None, tmp_path / "bundle", precision="checkpoint", lowering=lowering)
    types = {tensor.data_type for tensor in graph_of(bundle).graph.initializer if tensor.name.endswith(".codes")}
    # Negative scales and zero points take the eighth bit.
    assert onnx.TensorProto.INT8 in types
    assert types <= {onnx.TensorProto.INT8, onnx.TensorProto.INT4}
    assert bundle.target.parity["block"]["divergence"] < 1e-4
    assert "rounded_activations" not in bundle.target.parity


def test_minimums_are_refused_where_the_operators_have_none(tiny_target: Path, tmp_path: Path):
    source = checkpoint(tiny_target, tmp_path, "Q4_1")
    with pytest.raises(
        ExportError, match=r"whose blocks have an offset, which the lowering static cannot say: make a bundle of its own"
    ):
        export_bundle(str(source), None, tmp_path / "bundle", precision="checkpoint", lowering="static")
    assert [file.name for file in tmp_path.iterdir()] == ["Q4_1.gguf"]


def test_plain_checkpoint_is_refused_before_any_work(tiny_target: Path, tmp_path: Path):
    reports: list[str] = []
    with pytest.raises(ExportError, match="has no quantised weights to keep: the precision checkpoint is for GGUF files"):
        export_bundle(
            str(tiny_target), None, tmp_path / "bundle", precision="checkpoint", report=lambda title, *_: reports.append(title)
        )
    assert reports == ["reading the sources"]


def test_block_size_has_no_say(tiny_target: Path, tmp_path: Path):
    source = checkpoint(tiny_target, tmp_path, "Q4_0")
    with pytest.raises(ExportError, match="--block-size is for weights in int8 or int4, and the target would have checkpoint"):
        export_bundle(str(source), None, tmp_path / "bundle", precision="checkpoint", block_size=64)


def test_each_file_is_opened_once_by_us_and_once_by_either_reader_that_wants_a_path(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are mobius-onnx and transformers: each opening takes seconds for a large vocabulary."""
    opened: list[str] = []

    class CountedReader(GGUFReader):
        def __init__(self, path: Path | str, *arguments: object) -> None:
            opened.append(Path(path).name)
            super().__init__(path, *arguments)

    for module in ("gguf", "export.gguf_file"):
        monkeypatch.setattr(f"{module}.GGUFReader", CountedReader)
    target = write_gguf(tiny_target, tmp_path / "target.gguf", GGMLQuantizationType.Q8_0)
    draft = write_gguf(tiny_target, tmp_path / "draft.gguf", GGMLQuantizationType.Q4_0)
    export_bundle(
        str(target), str(draft), tmp_path / "bundle", precision="checkpoint", lowering="gqa,static", max_length=96
    )  # fmt: skip
    assert sorted(opened) == ["draft.gguf"] * 3 + ["target.gguf"] * 3
