"""Row-count equality: a row of logits has the same bits however its text was cut into passes."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.backend import Model
from runtime.decoder import Decoder

from .verdict import Advance, Verdict

_BLOCKS = (1, 2, 3, 5, 9, 17)
_RANDOM_CUTS = 2


@dataclass(frozen=True)
class RowEquality:
    """Feeds one text in many ways, rewinds among them, and compares all bits of all rows.

    Attributes:
        role: "target" or "draft".
        model: The model.
        tokens: The text, at least two tokens.
    """

    role: str
    model: Model
    tokens: Sequence[int]

    @property
    def title(self) -> str:
        """See Check."""
        return f"logits of the {self.role}"

    @property
    def steps(self) -> int:
        """See Check."""
        return len(_BLOCKS) + _RANDOM_CUTS + 1

    def run(self, advance: Advance) -> list[Verdict]:
        """See Check."""
        length = len(self.tokens)
        decoder = Decoder(self.model, length, num_rows=length)
        whole = decoder.forward(self.tokens, length).copy()
        advance()
        largest, differing, compared = 0.0, 0, 0
        for cut in _cuts(length):
            for rows in self._rows(decoder, cut):
                place = decoder.past_length
                expected = whole[place - len(rows) : place]
                compared += len(rows)
                differing += int((rows != expected).any(axis=1).sum())
                largest = max(largest, float(np.abs(rows - expected).max()))
            advance()
        return [
            Verdict(
                f"A row of the {self.role}'s logits has the same bits however the text is cut into passes, rewinds included.",
                differing == 0,
                f"{differing} of {compared} rows differ from those of a single pass over {length} tokens; largest difference "
                f"{largest:.3g}.",
                figures={"rows": compared, "differing_rows": differing, "largest_difference": largest},
            )
        ]

    def _rows(self, decoder: Decoder, cut: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """Feeds the text by one cut from the start; every second pass is made twice, with other tokens in between."""
        decoder.rewind_to(0)
        other = [self.tokens[0]] * max(cut)
        for number, rows in enumerate(cut):
            start = decoder.past_length
            if number % 2:
                decoder.forward(other[:rows], rows)
                decoder.rewind_to(start)
            yield decoder.forward(self.tokens[start : start + rows], rows)


def _cuts(length: int) -> Iterator[list[int]]:
    """Ways to cut a text into passes: equal blocks, from lone rows on, and mixtures of them."""
    for rows in _BLOCKS:
        yield [min(rows, length - start) for start in range(0, length, rows)]
    random = np.random.default_rng(0)
    for _ in range(_RANDOM_CUTS):
        places = [0, *np.flatnonzero(random.random(length - 1) < 0.25) + 1, length]
        yield [int(end - start) for start, end in itertools.pairwise(places)]
