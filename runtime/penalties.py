"""Rules that change a row of logits by the tokens that stand before it.

Each function changes its row in place; -inf forbids a token. Rows are float32 [vocab_size], but what is gathered from them is
computed in float64. Tokens that the row does not have (a draft may know fewer than its target) are passed over.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Tokens = NDArray[np.int64]
_LARGEST = float(np.finfo(np.float32).max)


def add_bias(row: Row, tokens: Tokens, bias: NDArray[np.float64]) -> None:
    """Adds bias[i] to the logit of tokens[i]; the tokens are distinct."""
    here = tokens < len(row)
    _store(row, tokens[here], row[tokens[here]] + bias[here])


def penalise_repetition(row: Row, seen: Tokens, penalty: float) -> None:
    """Divides positive logits of seen tokens by the penalty and multiplies negative ones (Keskar et al. 2019, section 4.1)."""
    tokens = seen[seen < len(row)]
    values = row[tokens].astype(np.float64)
    with np.errstate(over="ignore"):
        _store(row, tokens, np.where(values > 0, values / penalty, values * penalty))


def penalise_frequency(row: Row, generated: Tokens, presence: float, frequency: float) -> None:
    """Takes `presence`, and `frequency` times its count, from each generated token's logit (the OpenAI API's rule)."""
    tokens, counts = np.unique(generated[generated < len(row)], return_counts=True)
    _store(row, tokens, row[tokens] - (presence + frequency * counts))


def forbid_repeated_ngrams(row: Row, seen: Tokens, size: int) -> None:
    """Forbids every token that would complete a run of `size` tokens a second time."""
    if len(seen) >= size:
        windows = np.lib.stride_tricks.sliding_window_view(seen, size)
        beginning = seen[len(seen) - size + 1 :]
        forbid(row, windows[(windows[:, :-1] == beginning).all(axis=1), -1])


def forbid_words(row: Row, seen: Tokens, words: Sequence[tuple[int, ...]]) -> None:
    """Forbids the last token of each word, a run of ids, whose other tokens stand at the end."""
    ending = seen[max(0, len(seen) - max(map(len, words)) + 1) :].tolist()
    forbid(row, np.array([word[-1] for word in words if ending[len(ending) - len(word) + 1 :] == list(word[:-1])], np.int64))


def forbid(row: Row, tokens: Tokens) -> None:
    """Forbids these tokens."""
    row[tokens[tokens < len(row)]] = -np.inf


def _store(row: Row, tokens: Tokens, values: NDArray[np.float64]) -> None:
    """Writes values that float32 can hold; what was forbidden stays so."""
    row[tokens] = np.where(np.isneginf(row[tokens]), -np.inf, np.clip(values, -_LARGEST, _LARGEST))
