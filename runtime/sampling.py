"""From rows of logits to the distributions tokens are drawn from.

One sampler serves the target's rows and the draft's. Every row is judged by the tokens that stand before it: row i of a block
has the block's own first i tokens in its history.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from . import filters, penalties
from .candidates import Candidates, Columns
from .errors import SamplingError
from .sampling_params import SamplingParams

Logits = NDArray[np.float32]


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

    @property
    def num_top(self) -> int | None:
        """How many of a row's largest logits decide its token, with all as large as the last of them; None for all logits."""
        if self._changes_logits:
            return None
        return 1 if self._params.greedy else self._params.top_k or None

    def admitted(self, logits: Candidates) -> Candidates:
        """Returns logits with columns that the rules can be applied to: rules on given tokens need to find them."""
        if not self._changes_logits or logits.columns.token_ids is None:
            return logits
        return Candidates.whole(logits.over(Columns(logits.columns.width), -np.inf))

    def scores(self, logits: Logits, history: Sequence[int], block: Sequence[int]) -> Logits:
        """Applies the rules that change logits: penalties, bias, and what is forbidden.

        Args:
            logits: float32 [rows, columns], as `admitted` gives them; not changed.
            history: Prompt and text so far.
            block: Tokens behind it that are not decided yet. The rows end with it: the last row's place is behind the
                whole block, the row before it is behind all but its last token, and so on.

        Returns:
            float32 [rows, columns], -inf where a token is forbidden; `logits` itself when no such rule is set.

        Raises:
            SamplingError: A row has no token left.
        """
        if not self._changes_logits:
            return logits
        scores = logits.copy()
        tokens = np.array([*history, *block], np.int64)
        first = len(tokens) - (len(scores) - 1)
        for length, row in enumerate(scores, start=first):
            self._change(row, tokens[:length])
        empty = np.isneginf(scores.max(axis=1))
        if empty.any():
            row = int(empty.argmax())
            raise SamplingError(
                f"The sampling rules leave no token to choose at position {first + row}: bad_words, no_repeat_ngram_size, "
                "min_new_tokens and logit_bias together forbid all of them; relax one.",
                row,
            )
        return scores

    def weights(self, logits: Logits, history: Sequence[int], block: Sequence[int]) -> Logits:
        """Applies all rules, for a temperature above 0; arguments and errors are those of `scores`.

        Returns:
            float32 [rows, columns], a new array: probabilities up to a factor for each row, 0 where a token is dropped.
        """
        return self._ruled(self.scores(logits, history, block), normalised=False)

    def distributions(self, logits: Logits, history: Sequence[int], block: Sequence[int]) -> Logits:
        """Applies all rules, for a temperature above 0; arguments and errors are those of `scores`.

        Returns:
            float32 [rows, columns], a new array; each row sums to 1.
        """
        return self._ruled(self.scores(logits, history, block), normalised=True)

    def _ruled(self, scores: Logits, *, normalised: bool) -> Logits:
        if not self._filters:
            weights = filters.weights_of(scores, self._params.temperature)
            if normalised:
                weights /= weights.sum(axis=1, keepdims=True, dtype=np.float64).astype(np.float32)
            return weights
        rows = np.zeros_like(scores)
        for row, score in zip(rows, scores, strict=True):
            tokens, kept = self._filtered(score)
            row[tokens] = kept / np.float32(kept.sum(dtype=np.float64)) if normalised else kept
        return rows

    def _filtered(self, row: Logits) -> tuple[NDArray[np.intp], filters.Weights]:
        """Returns the tokens of a row that the filters keep, and their weights."""
        params = self._params
        # By the logits already: the order is the same, and the rest needs no exponential.
        tokens = filters.top_k(row, params.top_k) if params.top_k else None
        weights = filters.weights_of(row if tokens is None else row[tokens], params.temperature)
        for keep, bound, unbounded in (
            (filters.top_p, params.top_p, 1),
            (filters.min_p, params.min_p, 0),
            (filters.typical_p, params.typical_p, 1),
        ):
            if bound != unbounded:
                kept = np.flatnonzero(keep(weights, bound))
                tokens, weights = kept if tokens is None else tokens[kept], weights[kept]
        assert tokens is not None, "called only where a filter is set"
        return tokens, weights

    def _change(self, row: penalties.Row, seen: penalties.Tokens) -> None:
        """Applies the rules to one row, in the order SamplingParams tells."""
        params = self._params
        generated = seen[self._prompt_length :]
        if len(self._biased):
            penalties.add_bias(row, self._biased, self._bias)
        if params.repetition_penalty != 1:
            penalties.penalise_repetition(row, seen, params.repetition_penalty)
        if params.presence_penalty != 0 or params.frequency_penalty != 0:
            penalties.penalise_frequency(row, generated, params.presence_penalty, params.frequency_penalty)
        if params.no_repeat_ngram_size:
            penalties.forbid_repeated_ngrams(row, seen, params.no_repeat_ngram_size)
        if self._bad_words:
            penalties.forbid_words(row, seen, self._bad_words)
        if len(generated) < params.min_new_tokens:
            penalties.forbid(row, self._end_token_ids)
