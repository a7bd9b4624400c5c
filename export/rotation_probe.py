"""Finds the rotary embedding between two values of a graph by computing it, whatever operators the graph makes it from.

A rotation turns pairs of channels by angles that depend on the row's position alone. Fed with ones in the first channel of each
pair, it gives away its cosines and sines; that it does nothing else is then held against random rows at random positions.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from .errors import ExportError
from .traced_graph import width

_POSITIONS_IN_ONE_RUN = 512
_TRIED_ROWS = 64
# Float32 sums in another order.
_TOLERANCE = 1e-4
_OPSET, _IR_VERSION = 21, 10


@dataclass(frozen=True)
class Rotation:
    """By what a rotary embedding multiplies the channels of each pair.

    Attributes:
        cosine: float32 [context, pairs].
        sine: As cosine.
        interleaved: Whether neighbouring channels make a pair, not those of the two halves.
    """

    cosine: NDArray[np.float32]
    sine: NDArray[np.float32]
    interleaved: bool

    def apply(self, rows: NDArray[np.float32], positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rotates [..., rows, head_size] as RotaryEmbedding of opset 23 does; channels beyond the pairs stay."""
        first, second = _pairs(self.cosine.shape[1], interleaved=self.interleaved)
        cosine, sine = self.cosine[positions], self.sine[positions]
        rotated = rows.copy()
        rotated[..., first] = rows[..., first] * cosine - rows[..., second] * sine
        rotated[..., second] = rows[..., second] * cosine + rows[..., first] * sine
        return rotated


class RotationProbe:
    """The part of a graph between a query or key and its rotated form, as a session."""

    def __init__(self, graph: ir.Graph, source: ir.Value, rotated: ir.Value, position_ids: ir.Value, where: str) -> None:
        """Makes the session.

        Args:
            graph: Of both values.
            source: float [batch, heads, rows, head_size], heads and head_size known.
            rotated: As source.
            position_ids: The graph's input, int64 [batch, rows].
            where: What is rotated, for what is refused.

        Raises:
            ExportError: What stands between them reads something else too.
        """
        self._where = where
        self._heads, self._size = width(source, 1), width(source, 3)
        try:
            part = ir.convenience.extract(graph, [source, position_ids], [rotated])
        except ValueError as error:
            raise ExportError(f"{where} depends on more than its projection and its positions.") from error
        for value, name in zip((*part.inputs, *part.outputs), ("source", "positions", "rotated"), strict=True):
            value.name = name
        part.opset_imports.clear()
        part.opset_imports[""] = _OPSET
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        model = ir.to_proto(ir.Model(part, ir_version=_IR_VERSION)).SerializeToString()
        self._session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def read(self, context_length: int) -> Rotation:
        """Reads the tables for positions 0 to context_length - 1.

        Raises:
            ExportError: It is no rotary embedding.
        """
        positions = np.arange(context_length)
        one = np.zeros((context_length, self._size), np.float32)
        one[:, 0] = 1
        reached = np.abs(self._run(one, positions)).max(axis=0)
        partner = 1 + int(reached[1:].argmax())
        interleaved = partner == 1
        first, second = _pairs(self._size // 2 if interleaved else partner, interleaved=interleaved)
        if not reached[partner] or 2 * len(first) > self._size:
            raise self._refused()
        ones = np.zeros_like(one)
        ones[:, first] = 1
        turned = self._run(ones, positions)
        cosine, sine = turned[:, first], turned[:, second]
        if interleaved:
            pairs = 1 + int(np.flatnonzero(np.abs(sine).max(axis=0))[-1:].sum())
            cosine, sine = cosine[:, :pairs], sine[:, :pairs]
        rotation = Rotation(np.ascontiguousarray(cosine), np.ascontiguousarray(sine), interleaved)
        if not self.agrees(rotation):
            raise self._refused()
        return rotation

    def agrees(self, rotation: Rotation) -> bool:
        """Tells whether this is that rotation, by rows and positions drawn at random."""
        rng = np.random.default_rng(0)
        positions = rng.permutation(len(rotation.cosine))[:_TRIED_ROWS]
        rows = rng.standard_normal((len(positions), self._size)).astype(np.float32)
        return np.allclose(self._run(rows, positions), rotation.apply(rows, positions), atol=_TOLERANCE, rtol=0)

    def _run(self, rows: NDArray[np.float32], positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rotates [rows, head_size]: the same in each head, of which the last is returned."""
        found = []
        for start in range(0, len(rows), _POSITIONS_IN_ONE_RUN):
            some = slice(start, start + _POSITIONS_IN_ONE_RUN)
            source = np.broadcast_to(rows[some], (1, self._heads, *rows[some].shape))
            feeds = {"source": source, "positions": positions[None, some]}
            found.append(self._session.run(None, feeds)[0][0, -1])
        return np.concatenate(found)

    def _refused(self) -> ExportError:
        return ExportError(f"{self._where} is no rotary embedding by position.")


def _pairs(count: int, *, interleaved: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    numbers = np.arange(count)
    return (2 * numbers, 2 * numbers + 1) if interleaved else (numbers, count + numbers)
