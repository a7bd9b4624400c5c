"""Measures which passes give the same bits for a row, however the text is cut into them.

Some kernels compute a lone row on another path, and some the odd row that is left of rows taken by twos (ONNX Runtime's 4-bit
product on x86 with blocks of 64 weights or more). Padding rows that stand behind the text's own then keep all bits alike.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.backend import Context, Model
from runtime.decoder import Decoder


class PassShape(NamedTuple):
    """What a pass's rows must be: at least so many, and a multiple of so many."""

    min_rows: int
    row_multiple: int = 1


# Cheapest first.
_CANDIDATES = (PassShape(1), PassShape(2), PassShape(2, 2), PassShape(4), PassShape(4, 4), PassShape(8), PassShape(16))


class PaddedModel:
    """A model whose passes have another shape than its spec says; see runtime.backend.Model."""

    def __init__(self, model: Model, shape: PassShape) -> None:
        """Takes a loaded model."""
        self._model = model
        self.spec = dataclasses.replace(model.spec, min_rows=shape.min_rows, row_multiple=shape.row_multiple)
        self.engine, self.description = model.engine, model.description

    def open_context(self, capacity: int, max_rows: int) -> Context:
        """See Model.open_context."""
        return self._model.open_context(capacity, max_rows)


def measure_row_equality(model: Model, token_ids: Sequence[int]) -> PassShape | None:
    """Compares all logits of a text, computed in one pass, with those of the same text in many other cuts, padded.

    Args:
        model: The loaded decoder.
        token_ids: At least 48 tokens of an ordinary text, a multiple of 16.

    Returns:
        The cheapest shape with which every cut gives bit-equal rows; None when none of those tried does.
    """
    tokens = list(token_ids)
    whole = logits_in_passes(model, tokens, [len(tokens)])
    cuts = [*(even_cut(len(tokens), rows) for rows in (1, 2, 5)), _mixed(len(tokens))]
    for shape in _CANDIDATES:
        padded = PaddedModel(model, shape)
        if all(np.array_equal(logits_in_passes(padded, tokens, cut), whole) for cut in cuts):
            return shape
    return None


def logits_in_passes(model: Model, tokens: Sequence[int], cut: Sequence[int]) -> NDArray[np.float32]:
    """Returns the logits of a text, float32 [len(tokens), vocab_size], computed in passes of so many tokens each."""
    decoder = Decoder(model, len(tokens), num_rows=max(cut))
    parts = []
    for rows in cut:
        start = decoder.past_length
        parts.append(decoder.forward(tokens[start : start + rows], rows).copy())
    return np.concatenate(parts)


def even_cut(length: int, rows: int) -> list[int]:
    """Returns passes of `rows`, the last one with what is left."""
    return [rows] * (length // rows) + ([length % rows] if length % rows else [])


def _mixed(length: int) -> list[int]:
    """A prefill and then blocks of changing size, as rounds with refusals make them."""
    cut = [length // 2]
    size = 0
    while (left := length - sum(cut)) > 0:
        cut.append(min(left, 1 + size % 9))
        size += 4
    return cut
