"""Measures from how many rows on a decoder gives the same bits for a row, however the text is cut into passes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.backend import Model
from runtime.decoder import Decoder

_CANDIDATES = (1, 2, 4, 8, 16)


def measure_min_rows(model: Model, token_ids: Sequence[int]) -> int | None:
    """Compares all logits of a text, computed in one pass, with those of the same text in many other cuts.

    Args:
        model: The loaded decoder; its spec's own min_rows must be 1, so that nothing is padded.
        token_ids: At least 48 tokens of an ordinary text.

    Returns:
        The smallest of 1, 2, 4, 8, 16 from which on every cut gives bit-equal rows; None when there is none.
    """
    tokens = list(token_ids)
    whole = _logits(model, tokens, [len(tokens)])
    for rows in _CANDIDATES:
        cuts = [_even(len(tokens), rows), _even(len(tokens), rows + 1), _even(len(tokens), 2 * rows + 3), _mixed(tokens, rows)]
        if all(np.array_equal(_logits(model, tokens, cut), whole) for cut in cuts):
            return rows
    return None


def _logits(model: Model, tokens: list[int], cut: list[int]) -> NDArray[np.float32]:
    decoder = Decoder(model, len(tokens), num_rows=max(cut))
    parts = []
    for rows in cut:
        start = decoder.past_length
        parts.append(decoder.forward(tokens[start : start + rows], rows).copy())
    return np.concatenate(parts)


def _even(length: int, rows: int) -> list[int]:
    """Passes of `rows`, the last one longer where they do not fit, never shorter."""
    count = length // rows
    return [*[rows] * (count - 1), length - rows * (count - 1)]


def _mixed(tokens: list[int], rows: int) -> list[int]:
    """A prefill and then blocks of changing size, as rounds with refusals make them."""
    cut = [len(tokens) // 2]
    size = 0
    while (left := len(tokens) - sum(cut)) > 0:
        wanted = rows + size % 5
        cut.append(wanted if left - wanted >= rows else left)
        size += 3
    return cut
