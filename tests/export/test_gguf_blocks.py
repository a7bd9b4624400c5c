"""Blocks of GGUF tensors: the same values as the gguf package's own reader has, bit for bit, for every type that is kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from export.errors import ExportError
from export.gguf_blocks import FORMATS, gguf_matrices
from export.gguf_file import read_gguf
from export.quantization import dequantize_blockwise

KINDS = list(FORMATS)
# Where the float16 factors of a block stand; all other bytes may be anything.
FACTORS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}


def random_blocks(kind: GGMLQuantizationType, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Bytes of a tensor, uint8 [rows, any]: random codes and steps, and factors of both signs, some of them zero."""
    elements, size = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * columns // elements, size), np.uint8)
    for start in FACTORS.get(kind.name, (0,)):
        factors = rng.normal(size=len(blocks)) * rng.choice([0, 1e-6, 1e-3, 1], len(blocks), p=[0.1, 0.2, 0.4, 0.3])
        blocks[:, start : start + 2] = factors.astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


def write(path: Path, kind: GGMLQuantizationType, *tensors: np.ndarray) -> Path:
    writer = GGUFWriter(path, "llama")
    for number, tensor in enumerate(tensors):
        writer.add_tensor(f"tensor.{number}", tensor, raw_dtype=kind)
    writer.add_tensor("norm", np.ones(256, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_type_has_the_readers_values_bit_for_bit(kind: GGMLQuantizationType, tmp_path: Path):
    raw = random_blocks(kind, 40, 512)
    (matrix,) = gguf_matrices(read_gguf(write(tmp_path / "model.gguf", kind, raw)))
    assert (matrix.name, matrix.columns) == ("tensor.0", 512)
    weights = matrix.read()
    expected = dequantize(raw, kind)
    assert np.count_nonzero(expected) > expected.size / 2
    assert np.array_equal(dequantize_blockwise(weights), expected)
    assert weights.packed.shape == (40, 512 // weights.block_size, weights.block_size * weights.bits // 8)
    assert weights.codes.shape == (40, 512 // weights.block_size, weights.block_size)


def test_four_bits_stay_four_bits():
    assert {kind.name for kind in KINDS if FORMATS[kind].bits == 4} == {"Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K"}
    symmetric = {kind.name for kind in KINDS if FORMATS[kind].zero_point == 2 ** (FORMATS[kind].bits - 1)}
    assert symmetric == {"Q3_K", "Q4_0", "Q5_0", "Q6_K", "Q8_0", "IQ4_NL", "IQ4_XS"}


def test_large_tensors_are_turned_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("export.gguf_blocks._CHUNK", 3 * 512)
    raw = random_blocks(GGMLQuantizationType.Q4_K, 40, 512)
    (matrix,) = gguf_matrices(read_gguf(write(tmp_path / "model.gguf", GGMLQuantizationType.Q4_K, raw)))
    assert np.array_equal(dequantize_blockwise(matrix.read()), dequantize(raw, GGMLQuantizationType.Q4_K))


def test_experts_stand_below_each_other(tmp_path: Path):
    kind = GGMLQuantizationType.Q8_0
    raw = random_blocks(kind, 3 * 8, 64)
    (matrix,) = gguf_matrices(read_gguf(write(tmp_path / "model.gguf", kind, raw.reshape(3, 8, -1))))
    assert matrix.columns == 64
    assert np.array_equal(dequantize_blockwise(matrix.read()), dequantize(raw, kind))


def test_floats_are_no_quantised_matrices(tmp_path: Path):
    path = write(tmp_path / "model.gguf", GGMLQuantizationType.F16, np.ones((4, 64), np.float16))
    assert gguf_matrices(read_gguf(path)) == []


def test_type_without_such_blocks_is_refused_by_name(tmp_path: Path):
    kind = GGMLQuantizationType.TQ2_0
    raw = np.zeros((4, GGML_QUANT_SIZES[kind][1]), np.uint8)
    with pytest.raises(ExportError, match=r"'tensor.0' in model.gguf are of the type TQ2_0, which cannot be kept \(Q4_0, "):
        gguf_matrices(read_gguf(write(tmp_path / "model.gguf", kind, raw)))


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_scale_that_is_no_number_is_refused(tmp_path: Path):
    raw = random_blocks(GGMLQuantizationType.Q8_0, 4, 64)
    raw[2, :2] = np.array([np.nan], np.float16).view(np.uint8)
    (matrix,) = gguf_matrices(read_gguf(write(tmp_path / "model.gguf", GGMLQuantizationType.Q8_0, raw)))
    with pytest.raises(ExportError, match=r"'tensor\.0' stand for weights that are no numbers"):
        matrix.read()
