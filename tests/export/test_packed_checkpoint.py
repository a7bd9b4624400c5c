"""Folders of GPTQ and AWQ: the values they stand for, their codes as they are, and what is refused."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from export.bundle import export_bundle
from export.errors import ExportError
from export.packed_checkpoint import PackedCheckpoint, unpacked
from export.quantization import dequantize_blockwise
from export.role import Role
from export.source import resolve_source
from export.staging import check_disk

from .quantized_checkpoints import write_packed

KINDS = {
    "gptq": {},
    "gptq_v2": {"symmetric": True},
    "gptq in 2 bits": {"bits": 2},
    "gptq in 8 bits": {"bits": 8},
    "gptq in another order": {"act_order": True},
    "awq": {},
    "awq in one group": {"group_size": 1 << 20},
}


def packed(tiny_target: Path, out: Path, kind: str) -> tuple[Path, dict[str, np.ndarray]]:
    return write_packed(tiny_target, out, kind.partition(" ")[0], **KINDS[kind])


def found(folder: Path) -> PackedCheckpoint:
    checkpoint = PackedCheckpoint.find(folder)
    assert checkpoint is not None
    return checkpoint


@pytest.mark.parametrize("kind", KINDS)
def test_model_in_float32_has_the_values_of_the_format(kind: str, tiny_target: Path, tmp_path: Path):
    folder, expected = packed(tiny_target, tmp_path / "model", kind)
    place = tmp_path / "place"
    place.mkdir()
    with unpacked(resolve_source(str(folder)), place) as source:
        assert source.path.parent == place
        model = transformers.AutoModelForCausalLM.from_pretrained(source.path)
    assert list(place.iterdir()) == []
    assert len(expected) == 4 * 7
    for layer, values in expected.items():
        assert np.array_equal(model.get_submodule(layer).weight.detach().numpy(), values)
    embedding = load_file(tiny_target / "model.safetensors")["model.embed_tokens.weight"].astype(np.float16)
    assert np.array_equal(model.get_input_embeddings().weight.detach().numpy(), embedding)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "order" not in kind])
def test_blocks_have_the_values_of_the_format_bit_for_bit(kind: str, tiny_target: Path, tmp_path: Path):
    folder, expected = packed(tiny_target, tmp_path / "model", kind)
    for matrix in found(folder).matrices():
        weights = matrix.read()
        assert np.array_equal(dequantize_blockwise(weights), expected[matrix.name])
        assert weights.bits == (8 if "8" in kind else 4)
        assert (weights.zero_points is None) == (kind == "gptq_v2")
        assert weights.offsets is None
        assert matrix.columns == weights.columns == expected[matrix.name].shape[1]


def test_unpacked_source_of_floats_is_the_source_itself(tiny_target: Path, tmp_path: Path):
    source = resolve_source(str(tiny_target))
    with unpacked(source, tmp_path) as same:
        assert same is source


def test_weights_are_counted_as_such(tiny_target: Path, tmp_path: Path):
    for kind in ("gptq", "awq"):
        folder, _ = packed(tiny_target, tmp_path / kind, kind)
        assert resolve_source(str(folder)).num_parameters == resolve_source(str(tiny_target)).num_parameters


def test_layers_may_lie_across_files_and_the_twin_too(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, expected = packed(tiny_target, tmp_path / "model", "gptq")
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors, key=lambda name: name.rpartition(".")[2])
    files = {f"model-{number}.safetensors": names[number::3] for number in range(3)}
    for file, keys in files.items():
        save_file({key: tensors[key] for key in keys}, folder / file)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {key: file for file, keys in files.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    monkeypatch.setattr("export.packed_checkpoint._SHARD_BYTES", 100_000)
    with unpacked(resolve_source(str(folder)), tmp_path) as source:
        assert len(list(source.path.glob("*.safetensors"))) > 3
        model = transformers.AutoModelForCausalLM.from_pretrained(source.path)
    for layer, values in expected.items():
        assert np.array_equal(model.get_submodule(layer).weight.detach().numpy(), values)


def test_zero_point_of_16_takes_a_fifth_bit(tiny_target: Path, tmp_path: Path):
    folder, _ = packed(tiny_target, tmp_path / "model", "gptq")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    tensors[f"{name}.qzeros"] = np.full_like(tensors[f"{name}.qzeros"], -1)  # 15 everywhere, less one
    save_file(tensors, folder / "model.safetensors")
    matrix = next(matrix for matrix in found(folder).matrices() if matrix.name == name)
    weights = matrix.read()
    assert weights.bits == 8
    assert (weights.zero_points == 16).all()
    assert weights.signed_codes.max() <= -1


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_groups_in_another_order_are_exported_as_floats(precision: str, tiny_target: Path, tmp_path: Path):
    folder, _ = packed(tiny_target, tmp_path / "model", "gptq in another order")
    bundle = export_bundle(str(folder), None, tmp_path / "bundle", precision=precision)
    assert bundle.target.parity["block"]["max_difference"] < 1e-3
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bundle", "model"]
    assert {file.name for file in bundle.folder.iterdir() if file.is_dir()} == {"target"}


def test_groups_in_another_order_cannot_be_kept(tiny_target: Path, tmp_path: Path):
    folder, _ = packed(tiny_target, tmp_path / "model", "gptq in another order")
    with pytest.raises(ExportError, match=r"groups that are not in order \(desc_act, act-order\), which cannot be kept"):
        export_bundle(str(folder), None, tmp_path / "bundle", precision="checkpoint")


@pytest.mark.parametrize("missing", ["qzeros", "scales"])
def test_layer_that_is_not_whole_is_refused_by_name(missing: str, tiny_target: Path, tmp_path: Path):
    folder, _ = packed(tiny_target, tmp_path / "model", "awq")
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.layers.2.mlp.up_proj.{missing}"]
    save_file(tensors, folder / "model.safetensors")
    with (
        pytest.raises(ExportError, match=r"tensors of 'model.layers.2.mlp.up_proj' do not fit each other \(qweight \[64, 20\]"),
        unpacked(resolve_source(str(folder)), tmp_path),
    ):
        pytest.fail("lent what it could not read")


def unpack_damaged(folder: Path, **changes: object) -> None:
    """Unpacks a folder whose first layer's q_proj has these tensors, None for those it shall lack."""
    tensors = load_file(folder / "model.safetensors")
    for key, value in changes.items():
        tensors.pop(f"{Q_PROJ}.{key}", None)
        if value is not None:
            tensors[f"{Q_PROJ}.{key}"] = np.asarray(value)
    save_file(tensors, folder / "model.safetensors")
    place = folder.parent / "place"
    place.mkdir()
    with unpacked(resolve_source(str(folder)), place):
        pass


Q_PROJ = "model.layers.0.self_attn.q_proj"
UNFIT = rf"The packed tensors of '{Q_PROJ}' do not fit each other \(.*\) and a group_size of 32: download"
NOT_FINITE = rf"'{Q_PROJ}.scales' in model holds NaN or infinity: download"
DAMAGE = {
    "codes as floats": ("qweight", np.float32, rf"'{Q_PROJ}.qweight' holds float32 where int32 are expected: download"),
    "zero points as floats": ("qzeros", np.float32, rf"'{Q_PROJ}.qzeros' holds float32 where int32 are expected"),
    "codes of 64 bits": ("qweight", np.int64, rf"'{Q_PROJ}.qweight' holds int64 where int32 are expected"),
    "scales as whole numbers": ("scales", np.int32, rf"'{Q_PROJ}.scales' holds int32 where floats are expected"),
    "groups as floats": ("g_idx", np.float32, rf"'{Q_PROJ}.g_idx' holds float32 where whole numbers are expected"),
    "negative groups": ("g_idx", lambda groups: groups - 1, UNFIT),
    "groups beyond the last": ("g_idx", lambda groups: groups + 1, UNFIT),
    "one group only": ("g_idx", np.zeros_like, UNFIT),
    "too few groups": ("g_idx", lambda groups: groups[:-8], UNFIT),
    "no scales": ("scales", lambda scales: scales[:0], UNFIT),
    "no columns": ("qweight", lambda codes: codes[:0], UNFIT),
    "scales that are NaN": ("scales", lambda scales: scales * np.float16("nan"), NOT_FINITE),
    "infinite scales": ("scales", lambda scales: scales + np.float16("inf"), NOT_FINITE),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_tensors_are_refused_by_name(damage: str, tiny_target: Path, tmp_path: Path):
    key, change, sentence = DAMAGE[damage]
    folder, _ = packed(tiny_target, tmp_path / "model", "gptq")
    stored = load_file(folder / "model.safetensors")[f"{Q_PROJ}.{key}"]
    with pytest.raises(ExportError, match=sentence):
        unpack_damaged(folder, **{key: stored.astype(change) if isinstance(change, type) else change(stored)})


@pytest.mark.parametrize("precision", ["fp32", "checkpoint"])
def test_weights_that_are_no_numbers_are_told_of_once(precision: str, tiny_target: Path, tmp_path: Path):
    folder, _ = packed(tiny_target, tmp_path / "model", "gptq")
    tensors = load_file(folder / "model.safetensors")
    name = f"{Q_PROJ}.scales" if precision == "checkpoint" else "model.norm.weight"
    tensors[name].flat[0] = np.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ExportError) as caught:
        export_bundle(str(folder), None, tmp_path / "bundle", precision=precision)
    assert str(caught.value) == f"'{name}' in model holds NaN or infinity: download the model again."


@pytest.mark.parametrize("has_index", [True, False])
def test_last_group_may_be_smaller(has_index: bool, tiny_target: Path, tmp_path: Path):
    folder, expected = write_packed(tiny_target, tmp_path / "model", "gptq", group_size=48)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if has_index or not name.endswith("g_idx")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with unpacked(resolve_source(str(folder)), tmp_path) as source:
        model = transformers.AutoModelForCausalLM.from_pretrained(source.path)
    for layer, values in expected.items():
        assert np.array_equal(model.get_submodule(layer).weight.detach().numpy(), values)
    with pytest.raises(ExportError, match="has groups of 48 weights, which cannot be kept"):
        found(folder).matrices()


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_group_size_is_held_against_the_tensors(kind: str, tiny_target: Path, tmp_path: Path):
    folder, _ = packed(tiny_target, tmp_path / "model", kind)
    change_quantization(folder, group_size=16)
    with pytest.raises(ExportError, match=r"do not fit each other \(.*\) and a group_size of 16: download"):
        unpack_damaged(folder)


def test_group_size_of_minus_one_is_one_group(tiny_target: Path, tmp_path: Path):
    folder, expected = packed(tiny_target, tmp_path / "model", "awq in one group")
    change_quantization(folder, group_size=-1)
    for matrix in found(folder).matrices():
        assert np.array_equal(dequantize_blockwise(matrix.read()), expected[matrix.name])


@pytest.mark.parametrize("group_size", [None, 0, -2, "many", 32.0, True])
def test_group_size_that_is_none_is_refused(group_size: object, tiny_target: Path, tmp_path: Path):
    folder, _ = packed(tiny_target, tmp_path / "model", "gptq")
    change_quantization(folder, group_size=group_size)
    with pytest.raises(ExportError, match=rf"The group_size in the quantization_config of .* is {group_size!r} where a whole"):
        resolve_source(str(folder))


def test_numbers_may_be_written_as_strings(tiny_target: Path, tmp_path: Path):
    folder, expected = packed(tiny_target, tmp_path / "model", "gptq")
    change_quantization(folder, bits="4", group_size="32")
    for matrix in found(folder).matrices():
        assert np.array_equal(dequantize_blockwise(matrix.read()), expected[matrix.name])


def test_zero_point_beyond_8_bits_is_refused(tiny_target: Path, tmp_path: Path):
    folder, _ = packed(tiny_target, tmp_path / "model", "gptq in 8 bits")
    zero_points = load_file(folder / "model.safetensors")[f"{Q_PROJ}.qzeros"]
    with pytest.raises(ExportError, match=rf"'{Q_PROJ}' has a zero point of 256, one more than 8 bits hold"):
        unpack_damaged(folder, qzeros=np.full_like(zero_points, -1))  # 255 everywhere, less one


@pytest.mark.parametrize("free", [1_000_000, 1_700_000])
def test_disk_has_room_for_the_floats_too(free: int, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, _ = packed(tiny_target, tmp_path / "model", "awq")
    needs = r"needs about 0.9 MB, and 0.8 MB more while its packed weights are read as floats, and 1.0 MB are free"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    roles = [Role("target", resolve_source(str(folder)), "fp32", 512)]  # 205,376 weights, twice in 4 bytes
    with nullcontext() if free > 1_690_000 else pytest.raises(ExportError, match=needs):
        check_disk(tmp_path / "bundle", roles)


def change_quantization(folder: Path, **changes: object) -> None:
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    values["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "fp8"}, "'fp8'"),
        ({"quant_method": "gptq", "bits": 3}, r"'gptq' \(3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, r"'gptq' \(4 bits, marlin\)"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, r"'awq' \(4 bits, gemv\)"),
        ("int4", "'None'"),
    ],
)
def test_other_quantisation_is_refused_by_name(config: object, named: str, tiny_target: Path, tmp_path: Path):
    folder, _ = packed(tiny_target, tmp_path / "model", "gptq")
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": config}), encoding="utf-8")
    with pytest.raises(ExportError, match=f"is quantised by {named}.* and only GPTQ with 2, 4 or 8 bits and AWQ"):
        resolve_source(str(folder))
