"""GPTQ: the error of each weight that is rounded is passed on to those not rounded yet, by how inputs occur together.

Frantar, Ashkboos, Hoefler and Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers"
(2023): a small squared error of a matrix's outputs on calibration inputs, column by column in their order. The scale of a
block is searched as always (export.quantization), on the weights as they are when the block is reached.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from .quantization import BlockwiseWeights, quantize_blockwise

# Added to the diagonal, relative to its mean: the paper's value.
_DAMPENING = 0.01
_TOKENS = 512  # taken to float64 at once


def error_factor(inputs: torch.Tensor) -> NDArray[np.float32]:
    """Returns what says where a column's error goes: the upper Cholesky factor of the inverse Hessian.

    The Hessian of a matrix's squared output error is 2 X^T X. Its scale does not matter here: each row of the factor is only
    ever divided by the row's diagonal.

    Args:
        inputs: float [..., columns], a matrix's calibration inputs. An input that is always zero passes no error on, and gets
            none.

    Returns:
        float32 [columns, columns], upper triangular.
    """
    columns = inputs.shape[-1]
    hessian = torch.zeros(columns, columns, dtype=torch.float64)
    for part in inputs.reshape(-1, columns).split(_TOKENS):
        values = part.double()
        hessian.addmm_(values.T, values)
    diagonal = hessian.diagonal()
    diagonal[diagonal == 0] = 1
    diagonal += _DAMPENING * diagonal.mean()
    # With the axes turned round, the lower factor of H is the upper R of H = R R^T; then H^-1 = U^T U with U = R^-1.
    turned = torch.linalg.cholesky(hessian.flip(0, 1)).flip(0, 1)
    del hessian, diagonal
    inverse = torch.linalg.solve_triangular(turned, torch.eye(columns, dtype=torch.float64), upper=True)
    factor: NDArray[np.float32] = inverse.float().numpy()
    return factor


def quantize_by_gptq(
    weights: NDArray[np.float32], factor: NDArray[np.float32], bits: int, block_size: int, *, positive_scales: bool = False
) -> BlockwiseWeights:
    """Rounds a matrix so that its outputs change little.

    Args:
        weights: float32 [rows, columns].
        factor: float32 [columns, columns], error_factor of its inputs.
        bits: 4 or 8.
        block_size: Weights that share a scale.
        positive_scales: See export.quantization.quantize_blockwise.
    """
    rows, columns = weights.shape
    half = 2 ** (bits - 1)
    blocks = -(-columns // block_size)
    codes = np.full((rows, blocks * block_size), half, np.uint8)
    scales = np.empty((rows, blocks), np.float32)
    left = np.array(weights.T, np.float32, order="C")  # [columns, rows]: a column is one piece of memory
    for number, begin in enumerate(range(0, columns, block_size)):
        end = min(begin + block_size, columns)
        searched = quantize_blockwise(left[begin:end].T, bits, block_size, positive_scales=positive_scales)
        scale = scales[:, number] = searched.scales[:, 0]
        errors = np.empty((end - begin, rows), np.float32)
        for place, column in enumerate(range(begin, end)):
            steps = np.divide(left[column], scale, out=np.zeros(rows, np.float32), where=scale != 0)
            code = np.clip(np.rint(steps), -half, half - 1)
            codes[:, column] = code + half
            errors[place] = (left[column] - code * scale) / factor[column, column]
            left[column + 1 : end] -= np.outer(factor[column, column + 1 : end], errors[place])
        left[end:] -= factor[begin:end, end:].T @ errors
    return BlockwiseWeights.of_codes(codes.reshape(rows, blocks, block_size), scales, bits, columns)
