"""Measures which passes give the same bits for a row, however the text is cut into them.

Some kernels compute a lone row on another path, and some the odd row that is left of rows taken by twos (ONNX Runtime's 4-bit
product on x86 with blocks of 64 weights or more). Padding rows that stand behind the text's own then keep all bits alike.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .backend import Context, Model
from .contract import DecoderSpec
from .decoder import Decoder
from .steps import SteppedModel, with_pass_shape


class PassShape(NamedTuple):
    """What a pass's rows must be: at least so many, and a multiple of so many."""

    min_rows: int
    row_multiple: int = 1

    def applied(self, spec: DecoderSpec) -> DecoderSpec:
        """Returns a decoder whose passes have this shape; see runtime.steps.with_pass_shape."""
        return with_pass_shape(spec, self.min_rows, self.row_multiple)


PROBE_TEXT = (
    "The tides are the regular rise and fall of the sea, caused by the pull of the moon and of the sun on the turning earth. "
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n"
)
PROBE_TOKENS = 64
# Cheapest first.
_CANDIDATES = (PassShape(1), PassShape(2), PassShape(2, 2), PassShape(4), PassShape(4, 4), PassShape(8), PassShape(16))
_STEPS = (8, 16)  # what 7 or 15 draft tokens need: beside so many rows, fewer cost a GPU no less


class PaddedModel:
    """A model whose passes have another shape than its spec says; see runtime.backend.Model."""

    def __init__(self, model: Model, shape: PassShape) -> None:
        """Takes a loaded model."""
        self._model = model
        self.spec = shape.applied(model.spec)
        self.engine, self.description = model.engine, model.description

    def open_context(self, capacity: int, max_rows: int) -> Context:
        """See Model.open_context."""
        return self._model.open_context(capacity, max_rows)


def measure_row_equality(model: Model, token_ids: Sequence[int]) -> PassShape | None:
    """Compares all logits of a text, computed in one pass, with those of the same text in many other cuts, padded.

    Args:
        model: The loaded decoder. No shape is tried that is less than what its spec asks for.
        token_ids: At least 48 tokens of an ordinary text, a multiple of 16.

    Returns:
        The cheapest shape with which every cut gives bit-equal rows; None when none of those tried does.
    """
    tokens = list(token_ids)
    least = PassShape(model.spec.min_rows, model.spec.row_multiple)
    whole = logits_in_passes(model, tokens, [len(tokens)])
    cuts = [*(even_cut(len(tokens), rows) for rows in (1, 2, 5)), _mixed(len(tokens))]
    for shape in dict.fromkeys(_at_least(least, candidate) for candidate in _CANDIDATES):
        padded = PaddedModel(model, shape)
        if all(np.array_equal(logits_in_passes(padded, tokens, cut), whole) for cut in cuts):
            return shape
    return None


def measure_fixed_rows(model: Model, token_ids: Sequence[int]) -> int | None:
    """Returns the fewest rows of a step that gives a row the same bits wherever in it, and in whatever pass, the row stands.

    Args:
        model: The loaded decoder.
        token_ids: See measure_row_equality.

    Returns:
        Rows; None when none of those tried does.
    """
    tokens = list(token_ids)
    cuts = [[len(tokens)], *(even_cut(len(tokens), rows) for rows in (1, 5)), _mixed(len(tokens))]
    for fixed_rows in _STEPS:
        stepped = SteppedModel(model, fixed_rows)
        first, *others = (logits_in_passes(stepped, tokens, cut) for cut in cuts)
        if all(np.array_equal(first, other) for other in others):
            return fixed_rows
    return None


def repeated(token_ids: Sequence[int]) -> list[int]:
    """Returns the first PROBE_TOKENS ids of a text; it is repeated where it has fewer."""
    return list(itertools.islice(itertools.cycle(token_ids), PROBE_TOKENS))


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


def _at_least(least: PassShape, shape: PassShape) -> PassShape:
    return PassShape(max(least.min_rows, shape.min_rows), math.lcm(least.row_multiple, shape.row_multiple))


def _mixed(length: int) -> list[int]:
    """A prefill and then blocks of changing size, as rounds with refusals make them."""
    cut = [length // 2]
    size = 0
    while (left := length - sum(cut)) > 0:
        cut.append(min(left, 1 + size % 9))
        size += 4
    return cut
