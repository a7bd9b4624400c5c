"""From rows of logits to the distributions tokens are drawn from.

One sampler serves the target's rows and the draft's. Every row is judged by the tokens that stand before it: row i of a block
has the block's own first i tokens in its history.
"""

import functools
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from . import filters, penalties
from .candidates import Candidates, Columns
from .errors import SamplingError
from .sampling_params import SamplingParams
from .top_logits import TopLogits

# What top_p and min_p keep is mostly among so many of the largest.
_NUCLEUS = 64
# A device sums a vocabulary in float32; its sum is nearer than this to the right one.
_ROUNDING = 1e-5


class Sampler:
    """The rules of one text, ready to be applied."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_length: int = 0,
        end_token_ids: Iterable[int] = (),
        bad_words: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """Prepares the rules.

        Args:
            params: The rules; its bad_words are looked at in the form of the last argument only.
            prompt_length: Tokens of the history that are prompt: those behind them count as the new text.
            end_token_ids: Tokens that are forbidden before params.min_new_tokens.
            bad_words: Runs of ids that are never completed.
        """
        self._params = params
        self._prompt_length = prompt_length
        self._end_token_ids = np.array(sorted(end_token_ids), np.int64)
        self._bad_words = tuple(bad_words)
        self._biased = np.array(list(params.logit_bias), np.int64)
        self._bias = np.array(list(params.logit_bias.values()), np.float64)
        self._filters = params.top_k > 0 or params.top_p < 1 or params.min_p > 0 or params.typical_p < 1
        self._changes_logits = (
            bool(params.logit_bias or bad_words or params.no_repeat_ngram_size or params.min_new_tokens)
            or params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        )
        self._only_lowers = (
            all(bias <= 0 for bias in params.logit_bias.values())
            and params.repetition_penalty >= 1
            and min(params.presence_penalty, params.frequency_penalty) >= 0
        )
        ends_of_words = np.array([word[-1] for word in bad_words], np.int64)
        self._named_tokens = np.concatenate([self._end_token_ids, self._biased, ends_of_words])

    @property
    def num_top(self) -> int:
        """How many of a row's largest logits to look at, which mostly decide its token; 0 where no number does."""
        if self._changes_logits:
            return max(self._num_deciding, _NUCLEUS) if self._num_deciding and self._only_lowers else 0
        cuts = self._params.top_p < 1 or self._params.min_p > 0
        return self._num_deciding or (_NUCLEUS if cuts else 0)

    @property
    def top_temperature(self) -> float:
        """The temperature at which a row's other logits matter to these; 1 where they do not."""
        matters = self._params.top_p < 1 and not self._num_deciding
        return float(filters.usable_temperature(self._params.temperature)) if matters else 1.0

    def decides(self, top: TopLogits, history: Sequence[int], block: NDArray[np.int64]) -> bool:
        """Tells whether the rules leave of each whole row what they leave of these logits; see `scores` for the tokens."""
        if not self._num_deciding:
            return all(self._keeps_fewer(row, rest) for row, rest in zip(top.logits, top.rest, strict=True))
        # All logits that are as large as one of these have come.
        larger = top.logits > top.logits[:, -1:]
        if self._changes_logits:
            # No others are raised, and these stay as they are.
            larger &= ~np.isin(top.tokens, np.concatenate([self._named_tokens, history, block]))
        return bool((larger.sum(axis=1) >= self._num_deciding).all())

    @property
    def _num_deciding(self) -> int:
        """How many of the largest logits are left by greed or `top_k`, but for equal ones; 0 for any number."""
        return 1 if self._params.greedy else self._params.top_k

    def _keeps_fewer(self, row: NDArray[np.float32], rest: float) -> bool:
        """Tells whether the filters drop the last of the largest logits, and what they keep is the same for sums rounded."""
        weights = filters.weights_of(row, self._params.temperature)
        margin = _ROUNDING * (weights.sum(dtype=np.float64) + rest)
        least, most = (self._filtered(row, max(0.0, rest + sign * margin))[1] for sign in (-1, 1))
        return len(least) == len(most) and bool(most.min() > weights[-1])

    def scores(self, logits: Candidates, history: Sequence[int], block: Sequence[int]) -> Candidates:
        """Applies the rules that change logits: penalties, bias, and what is forbidden.

        Args:
            logits: Not changed.
            history: Prompt and text so far.
            block: Tokens behind it that are not decided yet. The rows end with it: the last row's place is behind the
                whole block, the row before it is behind all but its last token, and so on.

        Returns:
            Logits, -inf where a token is forbidden; `logits` itself when no such rule is set.

        Raises:
            SamplingError: A row has no token left.
        """
        if not self._changes_logits:
            return logits
        scores = logits.rows.copy()
        tokens = np.array([*history, *block], np.int64)
        first = len(tokens) - (len(scores) - 1)
        for length, row in enumerate(scores, start=first):
            self._change(row, logits.columns, tokens[:length])
        empty = np.isneginf(scores.max(axis=1))
        if empty.any():
            row = int(empty.argmax())
            raise SamplingError(
                f"The sampling rules leave no token to choose at position {first + row}: bad_words, no_repeat_ngram_size, "
                "min_new_tokens and logit_bias together forbid all of them; relax one.",
                row,
            )
        return Candidates(scores, logits.columns)

    def weights(self, logits: Candidates, history: Sequence[int], block: Sequence[int]) -> Candidates:
        """Applies all rules, for a temperature above 0; arguments and errors are those of `scores`.

        Returns:
            New rows: probabilities up to a factor for each row, 0 where a token is dropped.
        """
        return self._ruled(self.scores(logits, history, block), normalised=False)

    def distributions(self, logits: Candidates, history: Sequence[int], block: Sequence[int]) -> Candidates:
        """Applies all rules, for a temperature above 0; arguments and errors are those of `scores`.

        Returns:
            New rows, each of which sums to 1.
        """
        return self._ruled(self.scores(logits, history, block), normalised=True)

    def _ruled(self, scores: Candidates, *, normalised: bool) -> Candidates:
        if not self._filters:
            weights = filters.weights_of(scores.rows, self._params.temperature)
            if normalised:
                weights /= weights.sum(axis=1, keepdims=True, dtype=np.float64).astype(np.float32)
            return Candidates(weights, scores.columns)
        rows = np.zeros_like(scores.rows)
        rests = [0.0] * len(rows) if scores.rest is None else scores.rest.tolist()
        for row, score, rest in zip(rows, scores.rows, rests, strict=True):
            places, kept = self._filtered(score, rest)
            row[places] = kept / np.float32(kept.sum(dtype=np.float64)) if normalised else kept
        return Candidates(rows, scores.columns)

    def _filtered(self, row: NDArray[np.float32], rest: float) -> tuple[NDArray[np.intp], filters.Weights]:
        """Returns the places in a row that the filters keep, and their weights; see Candidates.rest."""
        params = self._params
        # By the logits already: the order is the same, and the rest needs no exponential.
        places = filters.top_k(row, params.top_k) if params.top_k else None
        weights = filters.weights_of(row if places is None else row[places], params.temperature)
        # Behind top_k, nothing of the rest is left.
        top_p = functools.partial(filters.top_p, rest=0.0 if params.top_k else rest)
        for keep, bound, unbounded in (
            (top_p, params.top_p, 1),
            (filters.min_p, params.min_p, 0),
            (filters.typical_p, params.typical_p, 1),
        ):
            if bound != unbounded:
                kept = np.flatnonzero(keep(weights, bound))
                places, weights = kept if places is None else places[kept], weights[kept]
        assert places is not None, "called only where a filter is set"
        return places, weights

    def _change(self, row: penalties.Row, columns: Columns, seen: penalties.Tokens) -> None:
        """Applies the rules to one row, in the order SamplingParams tells."""
        params = self._params
        generated = seen[self._prompt_length :]
        if len(self._biased):
            penalties.add_bias(row, columns, self._biased, self._bias)
        if params.repetition_penalty != 1:
            penalties.penalise_repetition(row, columns, seen, params.repetition_penalty)
        if params.presence_penalty != 0 or params.frequency_penalty != 0:
            penalties.penalise_frequency(row, columns, generated, params.presence_penalty, params.frequency_penalty)
        if params.no_repeat_ngram_size:
            penalties.forbid_repeated_ngrams(row, columns, seen, params.no_repeat_ngram_size)
        if self._bad_words:
            penalties.forbid_words(row, columns, seen, self._bad_words)
        if len(generated) < params.min_new_tokens:
            penalties.forbid(row, columns, self._end_token_ids)
