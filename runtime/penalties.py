"""Rules that change a row of logits by the tokens that stand before it.

Each function changes its row in place; -inf forbids a token. Rows are float32 [columns], but what is gathered from them is
computed in float64. Tokens that have no column (a draft may know fewer than its target) are passed over.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .candidates import Columns

Row = NDArray[np.float32]
Tokens = NDArray[np.int64]
_LARGEST = float(np.finfo(np.float32).max)


def add_bias(row: Row, columns: Columns, tokens: Tokens, bias: NDArray[np.float64]) -> None:
    """Adds bias[i] to the logit of tokens[i]; the tokens are distinct."""
    places, here = columns.find(tokens)
    _store(row, places, row[places] + bias[here])


def penalise_repetition(row: Row, columns: Columns, seen: Tokens, penalty: float) -> None:
    """Divides positive logits of seen tokens by the penalty and multiplies negative ones (Keskar et al. 2019, section 4.1)."""
    places, _ = columns.find(seen)
    values = row[places].astype(np.float64)
    with np.errstate(over="ignore"):
        _store(row, places, np.where(values > 0, values / penalty, values * penalty))


def penalise_frequency(row: Row, columns: Columns, generated: Tokens, presence: float, frequency: float) -> None:
    """Takes `presence`, and `frequency` times its count, from each generated token's logit (the OpenAI API's rule)."""
    tokens, counts = np.unique(generated, return_counts=True)
    places, here = columns.find(tokens)
    _store(row, places, row[places] - (presence + frequency * counts[here]))


def forbid_repeated_ngrams(row: Row, columns: Columns, seen: Tokens, size: int) -> None:
    """Forbids every token that would complete a run of `size` tokens a second time."""
    if len(seen) >= size:
        windows = np.lib.stride_tricks.sliding_window_view(seen, size)
        beginning = seen[len(seen) - size + 1 :]
        forbid(row, columns, windows[(windows[:, :-1] == beginning).all(axis=1), -1])


def forbid_words(row: Row, columns: Columns, seen: Tokens, words: Sequence[tuple[int, ...]]) -> None:
    """Forbids the last token of each word, a run of ids, whose other tokens stand at the end."""
    ending = seen[max(0, len(seen) - max(map(len, words)) + 1) :].tolist()
    last = [word[-1] for word in words if ending[len(ending) - len(word) + 1 :] == list(word[:-1])]
    forbid(row, columns, np.array(last, np.int64))


def forbid(row: Row, columns: Columns, tokens: Tokens) -> None:
    """Forbids these tokens."""
    row[columns.find(tokens)[0]] = -np.inf


def _store(row: Row, places: NDArray[np.intp], values: NDArray[np.float64]) -> None:
    """Writes values that float32 can hold; what was forbidden stays so."""
    row[places] = np.where(np.isneginf(row[places]), -np.inf, np.clip(values, -_LARGEST, _LARGEST))
