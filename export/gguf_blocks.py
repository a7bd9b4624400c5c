"""The quantised tensors of a GGUF file, block for block, in the layout of export.quantization.

Only the scales and minimums are read here, as ggml's block structures lay them (ggml-common.h); which code a weight has follows
from the value that the gguf package makes of it, and is checked by going back. Types of 5, 6 and 8 bits, and those whose codes
stand for uneven steps, become 8 bits wide, which changes no value.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, dequantize
from gguf.constants import GGML_QUANT_SIZES
from gguf.gguf_reader import ReaderTensor
from gguf.quants import Q4_K
from numpy.typing import NDArray

from .errors import ExportError
from .gguf_file import GGUFFile
from .kept_weights import StoredMatrix
from .quantization import BlockwiseWeights, dequantize_blockwise

_CHUNK = 1 << 22  # weights turned at once, beside which a head of a gigabyte would need several
_Bytes = NDArray[np.uint8]
_Values = NDArray[np.float32]
_FLOATS = {GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16}


class BlockFormat(NamedTuple):
    """How a type's weights follow from codes: (code - zero_point) * scale + offset.

    Attributes:
        bits: Of the codes here, 4 or 8.
        block_size: Weights that share a scale.
        zero_point: The code that stands for the offset alone.
        scales: Given uint8 [n, bytes of ggml's block], returns float32 [n, k] scales, and offsets likewise or None.
    """

    bits: int
    block_size: int
    zero_point: int
    scales: Callable[[_Bytes], tuple[_Values, _Values | None]]


def _half(blocks: _Bytes, start: int) -> _Values:
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _scale(blocks: _Bytes) -> tuple[_Values, None]:
    return _half(blocks, 0), None


def _scale_and_minimum(blocks: _Bytes) -> tuple[_Values, _Values]:
    return _half(blocks, 0), _half(blocks, 2)


def _nibbles_behind_scale(blocks: _Bytes) -> tuple[_Values, _Values]:
    """Q2_K: 16 pairs of 4 bits, the codes, and the two factors of all."""
    steps, minimums = (blocks[:, :16] & 15).astype(np.float32), (blocks[:, :16] >> 4).astype(np.float32)
    return _half(blocks, 80) * steps, -(_half(blocks, 82) * minimums)


def _six_bits_in_twelve_bytes(blocks: _Bytes) -> tuple[_Values, None]:
    """Q3_K: high bits, codes, 16 signed steps of 6 bits (the low four of each first), the factor."""
    packed = blocks[:, 96:108]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high = np.concatenate([(packed[:, 8:] >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1)
    return _half(blocks, 108) * ((low | (high << 4)).astype(np.float32) - 32), None


def _six_bit_pairs(blocks: _Bytes) -> tuple[_Values, _Values]:
    """Q4_K and Q5_K: two factors, eight pairs of step and minimum in 6 bits each."""
    steps, minimums = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    return _half(blocks, 0) * steps.astype(np.float32), -(_half(blocks, 2) * minimums.astype(np.float32))


def _signed_bytes(blocks: _Bytes) -> tuple[_Values, None]:
    """Q6_K: the codes, 16 signed steps, the factor."""
    return _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32), None


def _six_bits_apart(blocks: _Bytes) -> tuple[_Values, None]:
    """IQ4_XS: the factor, the high two bits of eight steps, then their low four."""
    high = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(len(blocks), 8)
    return _half(blocks, 0) * ((low | ((high & 3) << 4)).astype(np.float32) - 32), None


FORMATS = {
    GGMLQuantizationType.Q4_0: BlockFormat(4, 32, 8, _scale),
    GGMLQuantizationType.Q4_1: BlockFormat(4, 32, 0, _scale_and_minimum),
    GGMLQuantizationType.Q5_0: BlockFormat(8, 32, 128, _scale),
    GGMLQuantizationType.Q5_1: BlockFormat(8, 32, 112, _scale_and_minimum),
    GGMLQuantizationType.Q8_0: BlockFormat(8, 32, 128, _scale),
    GGMLQuantizationType.Q2_K: BlockFormat(4, 16, 6, _nibbles_behind_scale),
    GGMLQuantizationType.Q3_K: BlockFormat(4, 16, 8, _six_bits_in_twelve_bytes),
    GGMLQuantizationType.Q4_K: BlockFormat(4, 32, 0, _six_bit_pairs),
    GGMLQuantizationType.Q5_K: BlockFormat(8, 32, 112, _six_bit_pairs),
    GGMLQuantizationType.Q6_K: BlockFormat(8, 16, 128, _signed_bytes),
    GGMLQuantizationType.IQ4_NL: BlockFormat(8, 32, 128, _scale),
    GGMLQuantizationType.IQ4_XS: BlockFormat(8, 32, 128, _six_bits_apart),
}


def gguf_matrices(file: GGUFFile) -> list[StoredMatrix]:
    """Returns the quantised tensors of a file; a layer's experts, which share a tensor, one below the other.

    Raises:
        ExportError: A tensor is of a type that has no such blocks; the sentence names both.
    """
    matrices = []
    for tensor in file.tensors:
        if tensor.tensor_type in _FLOATS or len(tensor.shape) < 2:  # vectors are norms and biases
            continue
        if tensor.tensor_type not in FORMATS:
            known = ", ".join(kind.name for kind in FORMATS)
            raise ExportError(
                f"The weights of '{tensor.name}' in {file.path.name} are of the type {tensor.tensor_type.name}, which cannot "
                f"be kept ({known} can): export in int8 or int4."
            )
        matrices.append(StoredMatrix(tensor.name, int(tensor.shape[0]), lambda tensor=tensor: _blocks_of(tensor)))
    return matrices


def matrix_with_offsets(file: GGUFFile) -> tuple[str, str] | None:
    """Returns the name and the type of the first matrix whose blocks have offsets; None where none has.

    An embedding is none, unless it is the head too.
    """
    has_head = any(tensor.name == "output.weight" for tensor in file.tensors)
    for tensor in file.tensors:
        kind = tensor.tensor_type
        if kind not in FORMATS or len(tensor.shape) < 2 or (has_head and tensor.name == "token_embd.weight"):
            continue
        if FORMATS[kind].scales(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8))[1] is not None:
            return tensor.name, kind.name
    return None


def _blocks_of(tensor: ReaderTensor) -> BlockwiseWeights:
    columns = int(tensor.shape[0])
    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    step = max(1, _CHUNK // columns)
    parts = [
        _of_rows(rows[begin : begin + step], tensor.tensor_type, columns, tensor.name) for begin in range(0, len(rows), step)
    ]
    return BlockwiseWeights.concatenated(parts)


def _of_rows(rows: _Bytes, kind: GGMLQuantizationType, columns: int, name: str) -> BlockwiseWeights:
    form = FORMATS[kind]
    scales, offsets = form.scales(rows.reshape(-1, GGML_QUANT_SIZES[kind][1]))
    scales = scales.reshape(len(rows), -1)
    values = dequantize(rows, kind).reshape(len(rows), -1, form.block_size)
    steps = values if offsets is None else values - offsets.reshape(*scales.shape, 1)
    with np.errstate(invalid="ignore", over="ignore"):  # what is no number fails the check below
        steps = np.divide(steps, scales[:, :, None], out=np.zeros_like(values), where=scales[:, :, None] != 0)
        # A scale can be too small beside its offset to tell codes apart: then any near the value does.
        codes = np.clip(np.rint(steps) + form.zero_point, 0, 2**form.bits - 1).astype(np.uint8)
    weights = BlockwiseWeights.of_codes(
        codes,
        scales,
        form.bits,
        columns,
        zero_points=None if form.zero_point == 2 ** (form.bits - 1) else np.full(scales.shape, form.zero_point, np.uint8),
        offsets=None if offsets is None else offsets.reshape(scales.shape),
    )
    if not np.array_equal(dequantize_blockwise(weights), values.reshape(len(rows), -1)):
        raise ExportError(
            f"The blocks of '{name}' stand for weights that are no numbers, or that no codes and scales give back: fetch the "
            "file again, or export in fp32."
        )
    return weights
