"""Sampling rules: from rows of logits to rows of probabilities.

The same function serves the target's rows and the draft's, each row with the tokens that stand before it. Order and
meaning are those of transformers: repetition penalty, temperature, top-k, top-p, min-p.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .checks import check_number, check_whole

Logits = NDArray[np.float32]
# Outside these float32 has no precise numbers; at them, sampling is greedy, or uniform, long since.
_TEMPERATURES = (1e-30, 1e30)
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a text ends.

    Attributes:
        max_new_tokens: The most tokens to generate, at least 1.
        temperature: 0 takes the most probable token (greedy); above 0 the logits are divided by it.
        top_k: Keep only the k most probable tokens; 0 keeps all.
        top_p: Keep the fewest most probable tokens whose probabilities sum to at least this; 1 keeps all.
        min_p: Keep tokens at least this fraction as probable as the most probable one; 0 keeps all.
        repetition_penalty: Above 1 makes tokens that already stand in the prompt or the text less likely (Keskar et al.
            2019): positive logits are divided by it, negative ones multiplied.
        seed: Makes sampled text repeatable; None draws a fresh seed.
        stop: Strings that end the text; none of them stands in it.
        ignore_eos: Go on past the model's end-of-text tokens, for measurements.

    Raises:
        ValueError: A value outside its range; the sentence names it.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Refuses values outside their range."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop is {self.stop!r}; a string, or a list of strings, of at least one character is expected.")
        object.__setattr__(self, "stop", tuple(stop))
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos is {self.ignore_eos!r}; True or False is expected.")
        check_whole("max_new_tokens", self.max_new_tokens, 1)
        check_whole("top_k", self.top_k, 0)
        if self.seed is not None:
            check_whole("seed", self.seed, 0)
        check_number("temperature", self.temperature, "a finite number of at least 0", lambda value: value >= 0)
        check_number("top_p", self.top_p, "a number above 0 and at most 1", lambda value: 0 < value <= 1)
        check_number("min_p", self.min_p, "a number from 0 to 1", lambda value: 0 <= value <= 1)
        check_number("repetition_penalty", self.repetition_penalty, "a finite number above 0", lambda value: value > 0)

    @property
    def greedy(self) -> bool:
        """Whether every distribution is one-hot."""
        return self.temperature == 0


def token_distributions(logits: Logits, history: Sequence[int], block: Sequence[int], params: SamplingParams) -> Logits:
    """Applies the sampling rules row by row.

    Args:
        logits: float32 [rows, vocab_size]; not changed.
        history: Prompt and text so far.
        block: Tokens behind it that are not decided yet. The rows end with it: the last row's place is behind the whole
            block, the row before it is behind all but its last token, and so on.
        params: The rules.

    Returns:
        float32 [rows, vocab_size]; each row sums to 1, one-hot where the rules are greedy.
    """
    if params.repetition_penalty != 1:
        logits = _penalise_repetition(logits, history, block, params.repetition_penalty)
    if params.greedy:
        probabilities = np.zeros_like(logits)
        probabilities[np.arange(len(logits)), logits.argmax(axis=1)] = 1
        return probabilities
    probabilities = _softmax(logits, params.temperature)
    if 0 < params.top_k < logits.shape[1]:
        probabilities = _keep_top_k(probabilities, params.top_k)
    if params.top_p < 1:
        probabilities = _keep_top_p(probabilities, params.top_p)
    if params.min_p > 0:
        floor = params.min_p * probabilities.max(axis=1, keepdims=True)
        probabilities = _renormalised(np.where(probabilities >= floor, probabilities, 0))
    return probabilities


def _penalise_repetition(logits: Logits, history: Sequence[int], block: Sequence[int], penalty: float) -> Logits:
    penalised = logits.copy()
    shared = len(block) - (len(logits) - 1)
    seen = {*history, *block[:shared]}
    for row, token in zip(penalised, (None, *block[shared:]), strict=True):
        if token is not None:
            seen.add(token)
        tokens = np.fromiter((token for token in seen if token < len(row)), np.int64)
        values = row[tokens].astype(np.float64)
        with np.errstate(over="ignore"):
            row[tokens] = np.clip(np.where(values > 0, values / penalty, values * penalty), -_LARGEST, _LARGEST)
    return penalised


def _softmax(logits: Logits, temperature: float) -> Logits:
    # The largest logit becomes 0 first, so that the smallest temperature overflows to -inf at most, which is probability 0.
    shifted = logits - logits.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):
        shifted /= np.float32(np.clip(temperature, *_TEMPERATURES))
    return _renormalised(np.exp(shifted))


def _keep_top_k(probabilities: Logits, top_k: int) -> Logits:
    # Tokens as probable as the k-th stay too, as in transformers.
    kth = np.partition(probabilities, -top_k, axis=1)[:, -top_k, None]
    return _renormalised(np.where(probabilities >= kth, probabilities, 0))


def _keep_top_p(probabilities: Logits, top_p: float) -> Logits:
    order = np.argsort(-probabilities, axis=1, kind="stable")
    descending = np.take_along_axis(probabilities, order, axis=1)
    before = np.cumsum(descending, axis=1, dtype=np.float64) - descending
    kept = np.zeros_like(probabilities)
    np.put_along_axis(kept, order, np.where(before < top_p, descending, 0), axis=1)
    return _renormalised(kept)


def _renormalised(weights: Logits) -> Logits:
    totals: Logits = weights.sum(axis=1, keepdims=True, dtype=np.float64).astype(np.float32)
    return weights / totals
