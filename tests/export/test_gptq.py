"""GPTQ spares a matrix's outputs what rounding each block for itself does to them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from export.gptq import error_factor, quantize_by_gptq
from export.quantization import BlockwiseWeights, dequantize_blockwise, quantize_blockwise

Array = NDArray[np.float32]


def correlated_inputs(columns: int, tokens: int = 512, common: int = 8) -> Array:
    """Inputs that a few common causes move together, as hidden states do."""
    random = np.random.default_rng(0)
    causes = random.normal(size=(tokens, common)) @ random.normal(size=(common, columns))
    return (causes + 0.3 * random.normal(size=(tokens, columns))).astype(np.float32)


def matrix(columns: int, rows: int = 24) -> Array:
    return np.random.default_rng(1).normal(size=(rows, columns)).astype(np.float32)


def output_error(inputs: Array, weights: Array, rounded: BlockwiseWeights) -> float:
    return float(((inputs @ (weights - dequantize_blockwise(rounded)).T) ** 2).sum())


def to_nearest(weights: Array, block_size: int) -> BlockwiseWeights:
    """Rounding to nearest, the largest weight of a block on the end of its range."""
    blocks = weights.reshape(len(weights), -1, block_size)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2, keepdims=True), axis=2)
    scales = (largest / np.float32(-8)).astype(np.float32)
    codes = (np.clip(np.rint(blocks / scales), -8, 7) + 8).astype(np.uint8)
    return BlockwiseWeights.of_codes(codes, scales[:, :, 0], 4, weights.shape[1])


def scales_of(searched: BlockwiseWeights, weights: Array) -> Array:
    return np.repeat(searched.scales, searched.block_size, axis=1)[:, : weights.shape[1]]


@pytest.mark.parametrize(("columns", "block_size"), [(128, 32), (128, 64), (72, 32)])
@pytest.mark.parametrize("positive_scales", [False, True])
def test_outputs_change_less_than_by_rounding_each_block(columns: int, block_size: int, *, positive_scales: bool) -> None:
    inputs, weights = correlated_inputs(columns), matrix(columns)
    factor = error_factor(torch.from_numpy(inputs))
    rounded = quantize_by_gptq(weights, factor, 4, block_size, positive_scales=positive_scales)
    error = output_error(inputs, weights, rounded)
    searched = quantize_blockwise(weights, 4, block_size, positive_scales=positive_scales)
    # A half where errors stay within their block, a quarter where they are passed on to the blocks behind it too.
    assert error < 0.35 * output_error(inputs, weights, searched)
    if columns % block_size == 0:
        assert error < 0.35 * output_error(inputs, weights, to_nearest(weights, block_size))
    if positive_scales:
        assert (rounded.scales >= 0).all()


def test_the_factor_is_that_of_the_inverse_hessian() -> None:
    inputs = correlated_inputs(40).astype(np.float64)
    hessian = inputs.T @ inputs
    dampened = hessian + 0.01 * np.diag(hessian).mean() * np.eye(40)
    factor = error_factor(torch.from_numpy(inputs)).astype(np.float64)
    assert np.array_equal(factor, np.triu(factor))
    np.testing.assert_allclose(factor.T @ factor @ dampened, np.eye(40), atol=1e-4)


def test_inputs_that_do_not_occur_together_leave_the_searched_scales_and_the_nearest_codes() -> None:
    weights = matrix(96)
    factor = error_factor(torch.eye(96))
    rounded, searched = quantize_by_gptq(weights, factor, 4, 32), quantize_blockwise(weights, 4, 32)
    assert np.array_equal(rounded.scales, searched.scales)
    # The search fits a scale to its codes and leaves these; GPTQ rounds to the fitted scale.
    nearest = np.clip(np.rint(weights / scales_of(searched, weights)), -8, 7)
    assert np.array_equal(rounded.signed_codes.reshape(weights.shape), nearest)
    # In 8 bits nothing is fitted, and the two are one.
    rounded, searched = quantize_by_gptq(weights, factor, 8, 32), quantize_blockwise(weights, 8, 32)
    assert np.array_equal(rounded.packed, searched.packed)
    assert np.array_equal(rounded.scales, searched.scales)


def test_inputs_that_are_always_zero_neither_divide_by_zero_nor_lose_their_weights() -> None:
    inputs, weights = correlated_inputs(64), matrix(64)
    inputs[:, [0, 5, 40, 63]] = 0
    factor = error_factor(torch.from_numpy(inputs))
    assert np.isfinite(factor).all()
    values = dequantize_blockwise(quantize_by_gptq(weights, factor, 4, 32))
    assert np.isfinite(values).all()
    # They may have values in other texts, so their weights are rounded, not dropped.
    assert np.abs(values - weights)[:, [0, 5, 40, 63]].max() < 0.6
    assert np.isfinite(error_factor(torch.zeros(0, 64))).all()


def test_rows_of_zeros_stay_zeros() -> None:
    weights = matrix(64)
    weights[3] = 0
    rounded = quantize_by_gptq(weights, error_factor(torch.from_numpy(correlated_inputs(64))), 4, 32)
    assert not dequantize_blockwise(rounded)[3].any()


def test_the_same_inputs_give_the_same_codes() -> None:
    inputs, weights = torch.from_numpy(correlated_inputs(64)), matrix(64)
    first, second = (quantize_by_gptq(weights, error_factor(inputs), 4, 32) for _ in range(2))
    assert np.array_equal(first.packed, second.packed)
    assert np.array_equal(first.scales, second.scales)
