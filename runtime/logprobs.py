"""Log-probabilities of the tokens of a text, as its model gives them: before any sampling rule."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TokenLogprob:
    """What the target thought of one token of the text.

    Attributes:
        logprob: Natural logarithm of the token's probability, from the model's own logits: no penalty, no temperature.
        top: The most probable tokens at its place with theirs, the most probable first; ties by id.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprob(row: NDArray[np.float32], token: int, num_top: int) -> TokenLogprob:
    """Looks a token and the `num_top` most probable ones up in a row of logits, float32 [vocab_size]."""
    logits = row.astype(np.float64)
    largest = logits.max()
    logits -= largest
    normaliser = np.log(np.exp(logits).sum())
    num_top = min(num_top, len(row))
    top: list[int] = []
    if num_top:
        least = np.partition(row, -num_top)[-num_top]
        candidates = np.flatnonzero(row >= least)
        top = candidates[np.argsort(-row[candidates], kind="stable")][:num_top].tolist()
    return TokenLogprob(float(logits[token] - normaliser), tuple((best, float(logits[best] - normaliser)) for best in top))
