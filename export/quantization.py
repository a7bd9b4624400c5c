"""Weight-only quantisation in blocks: the arithmetic, in the layout of ONNX Runtime's MatMulNBits.

One float32 scale for every block of an output row. What is rounded here is symmetric; what a checkpoint brings may have zero
points, or an offset for each block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK_SIZES = (32, 64, 128)
BLOCK_SIZE = 32
BITS = {"int8": 8, "int4": 4}
# The precision of weights that keep the form their checkpoint has: see export.kept_weights.
KEPT = "checkpoint"
# Scales tried for a block of 4-bit weights, relative to the one that spares its largest weight. They save a tenth of the
# squared error of normal weights, and up to a third for matrices of Qwen2.5; more candidates save no more.
_SCALE_FACTORS = (0.95, 0.9, 0.84, 0.78, 0.72, 0.65)
_CHUNK = 1 << 18  # weights rounded at once: what fits a core's cache


@dataclass(frozen=True)
class BlockwiseWeights:
    """A weight matrix in blocks along its input dimension: weight = (code - zero point) * scale + offset.

    Attributes:
        packed: uint8 [rows, blocks, block_size * bits / 8]; with 4 bits the even weight stands in the low half of a byte.
        scales: float32 [rows, blocks].
        bits: 4 or 8.
        columns: The matrix's input dimension, before it was padded to whole blocks.
        block_size: Weights that share a scale.
        zero_points: uint8 [rows, blocks]; None where each is 2**(bits - 1).
        offsets: float32 [rows, blocks]; None where each is zero.
    """

    packed: NDArray[np.uint8]
    scales: NDArray[np.float32]
    bits: int
    columns: int
    block_size: int
    zero_points: NDArray[np.uint8] | None = None
    offsets: NDArray[np.float32] | None = None

    @classmethod
    def of_codes(
        cls,
        codes: NDArray[np.uint8],
        scales: NDArray[np.float32],
        bits: int,
        columns: int,
        *,
        zero_points: NDArray[np.uint8] | None = None,
        offsets: NDArray[np.float32] | None = None,
    ) -> "BlockwiseWeights":
        """Packs uint8 [rows, blocks, block_size] codes."""
        packed = codes[:, :, 0::2] | (codes[:, :, 1::2] << 4) if bits == 4 else codes
        return cls(packed, scales, bits, columns, codes.shape[2], zero_points, offsets)

    @property
    def codes(self) -> NDArray[np.uint8]:
        """The codes, uint8 [rows, blocks, block_size]."""
        if self.bits == 8:
            return self.packed
        return np.stack([self.packed & 0x0F, self.packed >> 4], axis=-1).reshape(*self.packed.shape[:2], self.block_size)

    @property
    def signed_codes(self) -> NDArray[np.int16]:
        """The codes less their zero points, int16 [rows, blocks, block_size]."""
        zero_points = np.int16(2 ** (self.bits - 1)) if self.zero_points is None else self.zero_points[:, :, None]
        return self.codes.astype(np.int16) - zero_points

    @classmethod
    def concatenated(cls, parts: "Sequence[BlockwiseWeights]") -> "BlockwiseWeights":
        """Puts matrices of one form below each other."""
        arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in parts[0].arrays}
        return replace(parts[0], **arrays)

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays there are, by name; each has the matrix's rows first."""
        names = ("packed", "scales", "zero_points", "offsets")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def take(self, rows: NDArray[np.intp]) -> "BlockwiseWeights":
        """Returns the matrix of these rows, by their numbers."""
        return replace(self, **{name: value[rows] for name, value in self.arrays.items()})


# Turns a float32 [rows, columns] matrix of a graph into its quantised form; None where it shall stay as it is.
Quantizer = Callable[[NDArray[np.float32]], BlockwiseWeights | None]


def rounding(bits: int, block_size: int = BLOCK_SIZE, *, positive_scales: bool = False) -> Quantizer:
    """Returns quantize_blockwise with these options; matrices that a block does not divide get smaller blocks."""

    def quantizer(weights: NDArray[np.float32]) -> BlockwiseWeights:
        return quantize_blockwise(weights, bits, block_size_of(weights.shape[1], block_size), positive_scales=positive_scales)

    return quantizer


def quantize_blockwise(
    weights: NDArray[np.float32], bits: int, block_size: int = BLOCK_SIZE, *, positive_scales: bool = False
) -> BlockwiseWeights:
    """Rounds a matrix to `bits` bits, each block with a scale of its own.

    With 8 bits a block's largest weight lands on the end of the range. The scale carries that weight's sign, so that the
    range's longer side (-8 of -8..7) is used, as GGML's Q4_0 does. With 4 bits smaller scales are tried too, which clip the
    largest weights and serve all others better; each is fitted to its codes by least squares, and the least squared error wins.

    Args:
        weights: float32 [rows, columns].
        bits: 4 or 8.
        block_size: Weights that share a scale.
        positive_scales: Never let a scale carry a sign, as TensorRT wants it: where the largest weight is positive, the
            range's shorter side is used.

    Returns:
        The packed matrix; `dequantize_blockwise` gives its values back.
    """
    rows, columns = weights.shape
    blocks = -(-columns // block_size)
    half = 2 ** (bits - 1)
    codes = np.empty((rows, blocks, block_size), np.uint8)
    scales = np.empty((rows, blocks), np.float32)
    step = max(1, _CHUNK // (blocks * block_size))
    for begin in range(0, rows, step):
        chunk = weights[begin : begin + step]
        padded = np.zeros((len(chunk), blocks * block_size), np.float32)
        padded[:, :columns] = chunk
        factors = _SCALE_FACTORS if bits == 4 else ()
        rounded, fitted = _round_blocks(padded.reshape(-1, block_size), half, factors, positive_scales=positive_scales)
        with np.errstate(invalid="ignore"):  # NaN weights are refused where the graph is checked
            codes[begin : begin + step] = (rounded + half).reshape(-1, blocks, block_size)
        scales[begin : begin + step] = fitted.reshape(-1, blocks)
    return BlockwiseWeights.of_codes(codes, scales, bits, columns)


def _round_blocks(
    blocks: NDArray[np.float32], half: int, factors: tuple[float, ...], *, positive_scales: bool
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Rounds blocks of weights.

    Args:
        blocks: float32 [blocks, block_size].
        half: Codes are -half to half - 1.
        factors: Scales to try beside the one that puts the largest weight on the end of the range, relative to it.
        positive_scales: See quantize_blockwise.

    Returns:
        float32 [blocks, block_size] whole codes, and float32 [blocks] scales.
    """
    if positive_scales:
        above, below = blocks.max(axis=1, keepdims=True), blocks.min(axis=1, keepdims=True)
        widest = np.maximum(above / np.float32(half - 1), below / np.float32(-half))
    else:
        widest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1) / np.float32(-half)
    codes, scales = _codes(blocks, widest, half), widest
    with np.errstate(over="ignore", invalid="ignore"):  # squares beyond float32 compare as equal: the widest scale stays
        error = _squared_error(codes, scales, blocks)
        for factor in factors:
            tried = _codes(blocks, widest * np.float32(factor), half)
            norm = np.einsum("ij,ij->i", tried, tried)[:, None]
            fitted = np.divide(np.einsum("ij,ij->i", tried, blocks)[:, None], norm, out=np.zeros_like(norm), where=norm > 0)
            tried_error = _squared_error(tried, fitted, blocks)
            better = tried_error < error
            codes[better], scales[better], error[better] = tried[better], fitted[better], tried_error[better]
    return codes, scales[:, 0]


def _squared_error(codes: NDArray[np.float32], scales: NDArray[np.float32], blocks: NDArray[np.float32]) -> NDArray[np.float32]:
    difference = codes * scales - blocks
    squared: NDArray[np.float32] = np.einsum("ij,ij->i", difference, difference)
    return squared


def _codes(blocks: NDArray[np.float32], scales: NDArray[np.float32], half: int) -> NDArray[np.float32]:
    with np.errstate(invalid="ignore"):  # NaN weights are refused where the graph is checked
        steps = np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales != 0)
    np.rint(steps, out=steps)
    return np.clip(steps, -half, half - 1, out=steps)


def dequantize_blockwise(weights: BlockwiseWeights) -> NDArray[np.float32]:
    """Returns the float32 [rows, columns] matrix that the packed one stands for."""
    values = weights.signed_codes.astype(np.float32) * weights.scales[:, :, None]
    if weights.offsets is not None:
        values += weights.offsets[:, :, None]
    return values.reshape(len(values), -1)[:, : weights.columns]


def block_size_of(columns: int, largest: int) -> int:
    """Returns the largest block size up to `largest` that cuts so many columns without waste; else the smallest."""
    return next((size for size in sorted(BLOCK_SIZES, reverse=True) if size <= largest and columns % size == 0), BLOCK_SIZES[0])
