"""Weights that GPTQ has rounded in torch on texts, found again in a graph by the values they had before.

Layers are rounded as the texts pass through them, so that each sees the inputs that the rounded layers before it give, and
one matrix's calibration is in memory at a time. Graph and parity check ask for the blocks by the rows' values; so nothing
here knows how a graph calls, orders, joins or splits the matrices. Embedding and head are not calibrated.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.memory import free_memory

from .errors import ExportError
from .gptq import error_factor, quantize_by_gptq
from .kept_weights import row_hashes
from .quantization import BlockwiseWeights, Quantizer, block_size_of, dequantize_blockwise
from .reference import Reference, is_matrix, matrix_rows

# A Hessian, its factor and the factor's inverse, in float64.
_BYTES_A_CELL = 24


class CalibratedWeights:
    """Rounded matrices, looked up row by row by the values they stand for."""

    def __init__(self, names: Sequence[str], hashes: Sequence[NDArray[np.uint64]], weights: Sequence[BlockwiseWeights]) -> None:
        """Takes each matrix's name, row_hashes of its values, and its blocks; of rows with the same values the first count."""
        self._names, self._weights = names, weights
        sizes = [len(part) for part in hashes]
        self._hashes, first = np.unique(np.concatenate(hashes), return_index=True)
        self._matrix = np.repeat(np.arange(len(sizes)), sizes)[first]
        self._row = np.concatenate([np.arange(size) for size in sizes])[first]
        self._was_found = np.zeros(len(first), np.bool_)

    def before(self, otherwise: Quantizer) -> Quantizer:
        """Returns what gives a matrix's calibrated rows, and those of `otherwise` for all others.

        `require_all_found` counts from here.
        """
        self._was_found[:] = False

        def quantizer(values: NDArray[np.float32]) -> BlockwiseWeights | None:
            hashes = row_hashes(values)
            places = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
            known = (self._hashes[places] == hashes) & (hashes != 0)  # a row of zeros is found anywhere
            if not known.any():
                return otherwise(values)
            self._was_found[places[known]] = True
            numbers = np.unique(self._matrix[places[known]])
            some = self._weights[numbers[0]]
            rounded = some.take(np.zeros(len(values), np.intp)) if known.all() else otherwise(values)
            assert rounded is not None, "what rounds the other rows rounds all matrices"
            arrays = rounded.arrays
            for number in numbers:
                rows = np.flatnonzero(known & (self._matrix[places] == number))
                for name, array in self._weights[number].arrays.items():
                    arrays[name][rows] = array[self._row[places[rows]]]
            return replace(rounded, **arrays)

        return quantizer

    def require_all_found(self) -> None:
        """Refuses a graph that does not hold a matrix as torch has it, and so would have been rounded without calibration.

        Raises:
            ExportError: The sentence names it.
        """
        lost = np.unique(self._matrix[~self._was_found & (self._hashes != 0)])
        if len(lost):
            raise ExportError(
                f"The graph does not hold the values of '{self._names[lost[0]]}' as they are in torch ({len(lost)} of "
                f"{len(self._names)} matrices), so GPTQ's weights have no place in it: leave --quantizer out."
            )


def calibrate(
    reference: Reference,
    texts: Sequence[list[int]],
    bits: int,
    block_size: int,
    on_matrix: Callable[[int, int], None],
    *,
    positive_scales: bool,
) -> CalibratedWeights:
    """Rounds a model's matrices by GPTQ, layer by layer; one that no token comes to, as in an expert, is left out.

    Args:
        reference: The model.
        texts: Token ids, texts of one length.
        bits: 4 or 8.
        block_size: The most weights that share a scale.
        on_matrix: Called with (matrices done, matrices in all) after each.
        positive_scales: See export.quantization.quantize_blockwise.

    Raises:
        ExportError: The memory is too small, or the model does not run in torch.
    """
    body = reference.module.base_model
    matrices = {module: name for name, module in body.named_modules() if is_matrix(module)}
    needed = _BYTES_A_CELL * max(max(module.weight.shape) for module in matrices) ** 2
    if (free := free_memory()) is not None and needed > free:
        raise ExportError(
            f"GPTQ needs about {needed / 1e9:.1f} GB of memory for the widest matrix and {free / 1e9:.1f} GB are free: end "
            "other programs, or leave --quantizer out."
        )
    names: list[str] = []
    hashes: list[NDArray[np.uint64]] = []
    weights: list[BlockwiseWeights] = []
    seen: list[Any] = [None, None]  # the inputs that came last, which several matrices may share, and their factor

    def round_matrix(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        if arguments[0] is not seen[0]:
            seen[:] = arguments[0], error_factor(arguments[0])
        rows = matrix_rows(module)
        size = block_size_of(rows.shape[1], block_size)
        rounded = quantize_by_gptq(rows, seen[1], bits, size, positive_scales=positive_scales)
        names.append(matrices[module])
        hashes.append(row_hashes(rows))
        weights.append(rounded)
        rows[:] = dequantize_blockwise(rounded)
        on_matrix(len(names), len(matrices))

    with reference.lent(as_copies=True):
        hooks = [module.register_forward_pre_hook(round_matrix) for module in matrices]
        try:
            body(torch.tensor(texts), use_cache=False)
        except Exception as error:  # whatever a config with odd values makes torch raise
            reason = str(error).partition("\n")[0][:200]
            raise ExportError(
                f"GPTQ cannot round the model, which does not run in torch ({type(error).__name__}: {reason}): "
                "leave --quantizer out."
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
    return CalibratedWeights(names, hashes, weights)
