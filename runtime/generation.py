"""One generation: its sequence, its caches, its text, and the loop of rounds. Whoever stops early leaves nothing behind."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .decoder import Cancelled, Decoder
from .drafters import Drafter
from .output_text import OutputText
from .sampling import SamplingParams
from .speculation import Round, speculative_round
from .stats import GenerationStats

FinishReason = Literal["eos", "stop", "length", "cancelled"]


@dataclass(frozen=True)
class GenerationResult:
    """A finished text.

    Attributes:
        text: The new text, without end-of-text tokens and stop strings.
        token_ids: The new tokens; they end with the end-of-text token, or the token that completed a stop string.
        finish_reason: "eos", "stop", "length" (max_new_tokens, or the context is full) or "cancelled".
        stats: What it cost.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: GenerationStats


@dataclass(frozen=True)
class Piece:
    """What one round added to a text.

    Attributes:
        text: New text; never ends inside a character, and may be empty.
        token_ids: The new tokens.
        round: The round itself, for traces; None where a cancelled generation ends.
        result: The whole, with the last piece; None before.
    """

    text: str
    token_ids: tuple[int, ...]
    round: Round | None
    result: GenerationResult | None = None


class Generation:
    """The state of one text while it grows."""

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        num_draft_tokens: int,
        max_new_tokens: int,
        eos_token_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str],
        random: np.random.Generator,
    ) -> None:
        """Starts with the prompt; nothing is computed yet.

        Args:
            target: An empty decoder with room for the prompt and the new tokens.
            drafter: A fresh drafter.
            prompt: At least one token.
            params: The sampling rules.
            num_draft_tokens: The most tokens a round proposes.
            max_new_tokens: params.max_new_tokens, or fewer where the context ends.
            eos_token_ids: Ids that end the text.
            decode: Token ids to text.
            random: Where all draws of this generation come from.
        """
        self.sequence = list(prompt)
        self.stats = GenerationStats(prompt_tokens=len(prompt))
        self._target = target
        self._drafter = drafter
        self._params = params
        self._num_draft_tokens = num_draft_tokens
        self._max_new_tokens = max_new_tokens
        self._eos_token_ids = eos_token_ids
        self._text = OutputText(decode, params.stop, prompt)
        self._random = random

    def pieces(self) -> Iterator[Piece]:
        """Runs rounds until the text ends, and yields what each adds.

        Raises:
            LogitsError: A model returned NaN or infinite logits.
        """
        reason: FinishReason | None = None
        while reason is None:
            # Taken anew each round: the reader's own time between two pieces is not ours.
            started = time.perf_counter()
            # One token of the block is the correction or bonus, so that one is never proposed.
            budget = min(self._num_draft_tokens, self._max_new_tokens - self.stats.new_tokens - 1)
            try:
                done = speculative_round(self._target, self._drafter, self.sequence, budget, self._params, self._random)
            except Cancelled:
                self._count_cost(time.perf_counter() - started)
                yield Piece(self._text.finish(), (), None, self._result("cancelled"))
                return
            kept, reason = self._commit(done.tokens)
            self._settle(done, len(kept), time.perf_counter() - started)
            if reason is None:
                yield Piece(self._text.take(), kept, done)
            else:
                yield Piece(self._text.finish(), kept, done, self._result(reason))

    def _commit(self, tokens: Sequence[int]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Appends the round's tokens up to the first that ends the text, and returns those and the reason."""
        room = self._max_new_tokens - self.stats.new_tokens
        for count, token in enumerate(tokens, start=1):
            self.sequence.append(token)
            if token in self._eos_token_ids:
                return tuple(tokens[:count]), "eos"
            if self._text.append(token):
                return tuple(tokens[:count]), "stop"
            if count == room:
                return tuple(tokens[:count]), "length"
        return tuple(tokens), None

    def _settle(self, done: Round, num_kept: int, seconds: float) -> None:
        """Rewinds both caches to the invariant and counts, before anyone sees the round."""
        self._target.rewind_to(len(self.sequence) - 1)
        self._drafter.rewind_to(len(self.sequence) - 1)
        stats = self.stats
        stats.count_round(len(done.proposal.tokens), done.verification.num_accepted, num_kept)
        self._count_cost(seconds)
        if stats.rounds == 1:
            stats.first_token_seconds, stats.first_round_tokens = seconds, num_kept

    def _count_cost(self, seconds: float) -> None:
        """Brings the counters up to date behind a round, or behind one that was cancelled, of so many seconds."""
        stats = self.stats
        stats.target_passes, stats.target_seconds = self._target.passes, self._target.seconds
        stats.draft_passes, stats.draft_seconds = self._drafter.passes, self._drafter.seconds
        stats.total_seconds += seconds

    def _result(self, reason: FinishReason) -> GenerationResult:
        return GenerationResult(self._text.text, tuple(self.sequence[self.stats.prompt_tokens :]), reason, self.stats)
