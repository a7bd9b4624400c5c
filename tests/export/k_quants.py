"""Q4_K and Q6_K blocks of given weights, which the gguf package reads and does not write; laid out as in ggml-common.h."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType, quants

_BLOCK = 256
_LEAST = 1e-6  # which is not yet zero in float16


def quantize(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Returns a float32 [rows, columns] matrix as uint8 [rows, any]; by the gguf package where it can."""
    own = {GGMLQuantizationType.Q4_K: _q4_k, GGMLQuantizationType.Q6_K: _q6_k}
    if kind not in own:
        return quants.quantize(values, kind)
    return own[kind](values.reshape(-1, _BLOCK)).reshape(len(values), -1)


def _half(factors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A factor of each block as float16 has it, and its two bytes."""
    rounded = np.maximum(factors, _LEAST).astype(np.float16)
    return rounded.astype(np.float32)[:, None], rounded[:, None].view(np.uint8)


def _rint(quotients: np.ndarray, low: int, high: int) -> np.ndarray:
    return np.clip(np.rint(quotients), low, high).astype(np.int64)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    """Factors of steps and of minimums; eight pairs of these in 6 bits each; codes of 32 weights beside the next 32's."""
    parts = blocks.reshape(-1, 8, 32)
    minimums = np.maximum(-parts.min(axis=2), 0)
    steps = np.maximum(parts.max(axis=2) + minimums, 1e-6) / 15
    (step, step_bytes), (minimum, minimum_bytes) = _half(steps.max(axis=1) / 63), _half(minimums.max(axis=1) / 63)
    steps, minimums = _rint(steps / step, 1, 63), _rint(minimums / minimum, 0, 63)
    codes = _rint((parts + (minimum * minimums)[:, :, None]) / (step * steps)[:, :, None], 0, 15)
    packed = [
        steps[:, :4] | (steps[:, 4:] >> 4) << 6,
        minimums[:, :4] | (minimums[:, 4:] >> 4) << 6,
        (steps[:, 4:] & 15) | (minimums[:, 4:] & 15) << 4,
    ]
    codes = (codes[:, ::2] | codes[:, 1::2] << 4).reshape(len(blocks), 128)
    return np.concatenate([step_bytes, minimum_bytes, *packed, codes], axis=1).astype(np.uint8)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    """Low four bits, high two bits, sixteen signed steps, their factor; each half of a block is four runs of 32 weights."""
    parts = blocks.reshape(-1, 16, 16)
    steps = np.abs(parts).max(axis=2) / 31
    factor, factor_bytes = _half(steps.max(axis=1) / 127)
    steps = _rint(steps / factor, 1, 127)
    codes = _rint(parts / (factor * steps)[:, :, None], -32, 31) + 32
    runs = codes.reshape(-1, 2, 4, 32)
    low = (runs[:, :, :2] & 15 | (runs[:, :, 2:] & 15) << 4).reshape(len(blocks), 128)
    high = np.bitwise_or.reduce(runs >> 4 << np.array([0, 2, 4, 6])[:, None], axis=2).reshape(len(blocks), 64)
    return np.concatenate([low, high, steps, factor_bytes], axis=1).astype(np.uint8)
