"""A checkpoint's own quantised matrices, found again in a graph by the values they stand for.

The graph is built in float32. Where each row of one of its matrices has, bit for bit, the values of a row that the checkpoint
holds quantised, that row's codes and scales take its place. So nothing here knows how tensors are called, in which order a
reader put their rows, which of them it joined, or which rows a smaller head kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import ExportError
from .quantization import KEPT, BlockwiseWeights, dequantize_blockwise
from .source import Source

_CHUNK = 1 << 22  # weights dequantised at once
_Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix as a checkpoint holds it.

    Attributes:
        name: Its name there.
        columns: Its input dimension.
        read: Returns its blocks; may read the file anew.
    """

    name: str
    columns: int
    read: Callable[[], BlockwiseWeights]


class KeptWeights:
    """The quantised matrices of one checkpoint, looked up by their rows' values; see export.quantization.Quantizer."""

    def __init__(self, matrices: Sequence[StoredMatrix]) -> None:
        """Reads every matrix once, and remembers 64 bits of each row.

        Raises:
            ExportError: The scales or offsets of one hold NaN or infinity.
        """
        self._matrices = matrices
        self._hashes = [np.concatenate([row_hashes(part) for part in _parts(_finite(matrix))]) for matrix in matrices]
        self._all_hashes = np.unique(np.concatenate(self._hashes))
        self._kept: set[int] = set()
        self._float_shapes: set[tuple[int, ...]] = set()

    @classmethod
    def of(cls, source: Source) -> "KeptWeights":
        """Returns those of a GGUF file, or of a folder that GPTQ or AWQ has quantised.

        Raises:
            ExportError: See stored_matrices, and weights that are not finite.
        """
        return cls(stored_matrices(source))

    def __call__(self, values: NDArray[np.float32]) -> BlockwiseWeights | None:
        """Returns the blocks that stand for a float32 [rows, columns] matrix; None where the checkpoint holds it in floats.

        Raises:
            ExportError: Only some of its rows are quantised in the checkpoint, or not all in one way.
        """
        hashes = row_hashes(values)
        if not np.isin(hashes[hashes != 0], self._all_hashes).any():  # rows of zeros are found anywhere
            self._float_shapes.add(values.shape)
            return None
        left, places, parts = np.arange(len(values)), [], []
        while len(left) and (found := self._take_most(hashes, left, values.shape[1])) is not None:
            places.append(found[0])
            parts.append(found[1])
            left = np.setdiff1d(left, found[0])
        if len(left) or len({_form(part) for part in parts}) > 1:
            raise ExportError(
                f"A matrix of {len(values)} by {values.shape[1]} weights is made of tensors that the checkpoint holds "
                "in different forms: its weights cannot be kept, export in int8 or int4."
            )
        weights = BlockwiseWeights.concatenated(parts).take(np.argsort(np.concatenate(places)))
        assert np.array_equal(dequantize_blockwise(weights), values), "two rows have one hash"
        return weights

    def _take_most(
        self, hashes: _Hashes, left: NDArray[np.intp], columns: int
    ) -> tuple[NDArray[np.intp], BlockwiseWeights] | None:
        """Returns those of the rows left that one matrix has, the one with the most, and their blocks; None for none."""
        inside = {
            number: np.isin(hashes[left], stored)
            for number, stored in enumerate(self._hashes)
            if self._matrices[number].columns == columns and (stored == hashes[left[0]]).any()
        }
        if not inside:
            return None
        number = max(inside, key=lambda number: int(inside[number].sum()))
        self._kept.add(number)
        rows = left[inside[number]]
        order = np.argsort(self._hashes[number])
        found = order[np.searchsorted(self._hashes[number], hashes[rows], sorter=order)]
        return rows, self._matrices[number].read().take(found)

    def require_all_found(self) -> None:
        """Refuses a graph that holds a matrix in floats where the checkpoint has one quantised.

        Raises:
            ExportError: The sentence names it.
        """
        lost = [
            matrix.name
            for number, matrix in enumerate(self._matrices)
            if number not in self._kept
            and (not self._kept or (len(self._hashes[number]), matrix.columns) in self._float_shapes)
        ]
        if lost:
            raise ExportError(
                f"The graph does not hold the values of '{lost[0]}' as they are in the checkpoint ({len(lost)} of "
                f"{len(self._matrices)} quantised tensors), so they cannot be kept: export in int8 or int4."
            )


def stored_matrices(source: Source) -> list[StoredMatrix]:
    """Returns the quantised matrices of a checkpoint; their names and sizes are read, and no weights.

    Raises:
        ExportError: It has none, or has them in a form that cannot be kept.
    """
    from .gguf_blocks import gguf_matrices
    from .packed_checkpoint import PackedCheckpoint

    packed = PackedCheckpoint.find(source.path) if source.kind == "folder" else None
    matrices = gguf_matrices(source.gguf) if source.gguf is not None else packed.matrices() if packed is not None else []
    if not matrices:
        raise ExportError(
            f"{source.name} has no quantised weights to keep: the precision {KEPT} is for GGUF files and for folders quantised "
            "by GPTQ or AWQ, choose another one."
        )
    return matrices


def _finite(matrix: StoredMatrix) -> BlockwiseWeights:
    weights = matrix.read()
    if not all(np.isfinite(values).all() for values in (weights.scales, weights.offsets) if values is not None):
        raise ExportError(f"The scales of '{matrix.name}' in the checkpoint hold NaN or infinity: download the model again.")
    return weights


def _form(weights: BlockwiseWeights) -> tuple[object, ...]:
    return weights.bits, weights.block_size, weights.zero_points is None, weights.offsets is None


def _parts(weights: BlockwiseWeights) -> list[NDArray[np.float32]]:
    rows = np.arange(len(weights.packed))
    pieces = np.array_split(rows, -(-len(rows) * weights.columns // _CHUNK))
    return [dequantize_blockwise(weights.take(piece)) for piece in pieces]


def row_hashes(values: NDArray[np.float32]) -> _Hashes:
    """Returns 64 bits of each row: a sum of the columns' bits with odd factors, modulo 2**64; rows of zeros have 0.

    Args:
        values: float32 [rows, columns].

    Returns:
        uint64 [rows].
    """
    factors = np.random.default_rng(0).integers(0, 2**63, values.shape[1], np.uint64) * np.uint64(2) + np.uint64(1)
    hashes: _Hashes = np.empty(len(values), np.uint64)
    step = max(1, _CHUNK // values.shape[1])
    for begin in range(0, len(values), step):
        part = np.ascontiguousarray(values[begin : begin + step]) + np.float32(0)  # a zero's sign does not matter
        hashes[begin : begin + step] = part.view(np.uint32).astype(np.uint64) @ factors
    return hashes
