"""One generation: its sequence, its text, and the loop of rounds. Whoever stops early leaves nothing behind."""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from .acceptance import AcceptanceRule
from .checks import check_whole
from .decoder import Cancelled, Decoder
from .drafters import Drafter
from .logprobs import TokenLogprob, token_logprob
from .output_text import OutputText
from .sampling_params import SamplingParams
from .speculation import Round, speculative_round
from .stats import GenerationStats

_USUAL_NEW_TOKENS = 128
FinishReason = Literal["eos", "stop", "length", "cancelled"]


@dataclass(frozen=True)
class GenerationResult:
    """A finished text.

    Attributes:
        text: The new text, without end-of-text tokens, and without what stopped it unless include_stop.
        token_ids: The new tokens; they end with the token that ended the text, or completed a stop string.
        finish_reason: "eos", "stop", "length" (max_new_tokens, or the context is full) or "cancelled".
        stats: What it cost.
        logprobs: One entry a token; None unless asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: GenerationStats
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True)
class Piece:
    """What one round added to a text.

    Attributes:
        text: New text; never ends inside a character, and may be empty.
        token_ids: The new tokens.
        round: The round itself, for traces; None where no round was run: at the end of a cancelled generation, and for tokens
            that a limit had cut off before.
        logprobs: One entry a token; None unless asked for.
        result: The whole, with the last piece; None before.
    """

    text: str
    token_ids: tuple[int, ...]
    round: Round | None
    logprobs: tuple[TokenLogprob, ...] | None = None
    result: GenerationResult | None = None


@dataclass(frozen=True)
class _Block:
    """Tokens of a round that are judged and not in the text yet; those before `begin` are."""

    round: Round
    logprobs: tuple[TokenLogprob, ...] | None
    begin: int = 0


class Generation:
    """The state of one text while it grows.

    Attributes:
        sequence: Prompt and text.
        stats: What it has cost so far.
        finish_reason: Why the text has ended; None while it has not.
    """

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        rule: AcceptanceRule,
        num_draft_tokens: int,
        max_length: int,
        capacity: int,
        eos_token_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        """Starts with the prompt; nothing is computed yet.

        Args:
            target: The target; what it has cached must be a beginning of the prompt, and not all of it.
            drafter: A fresh drafter.
            prompt: At least one token, fewer than max_length.
            params: Where the text ends.
            rule: How its tokens are chosen.
            num_draft_tokens: The most tokens a round proposes.
            max_length: The most tokens of prompt and text together.
            capacity: The most tokens the target can cache, proposals included; at least max_length.
            eos_token_ids: Ids that end the text.
            decode: Token ids to text.
        """
        self.sequence = list(prompt)
        top = 0 if target.top_rule is None else target.top_rule.num_top
        self.stats = GenerationStats(prompt_tokens=len(prompt), cached_tokens=target.past_length, top_logits=top)
        self.finish_reason: FinishReason | None = None
        self._target = target
        self._drafter = drafter
        self._params = params
        self._rule = rule
        self._num_draft_tokens = num_draft_tokens
        self._max_length = max_length
        self._capacity = capacity
        self._eos_token_ids = eos_token_ids
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._text = OutputText(decode, params.stop, prompt, include_stop=params.include_stop)
        self._logprobs: tuple[TokenLogprob, ...] | None = None if params.logprobs is None else ()
        self._ahead: _Block | None = None
        self._set_limit(params.max_new_tokens)

    @property
    def text(self) -> str:
        """The new text as if it ended here."""
        return self._text.text

    def pieces(self) -> Iterator[Piece]:
        """Runs rounds until the text ends, and yields what each adds.

        Raises:
            LogitsError: A model returned NaN or infinite logits.
            SamplingError: The sampling rules leave no token.
        """
        while self.finish_reason is None:
            # Taken anew each round: the reader's own time between two pieces is not ours.
            started = time.perf_counter()
            try:
                yield self._next_piece(started)
            except Cancelled:
                self.finish_reason = "cancelled"
                self._count_cost(started)
                yield Piece(self._text.flush(), (), None, self._logprobs and (), self._result())

    def extend(self, max_new_tokens: int) -> None:
        """Lets a text that ended for its length, was cancelled, or was left, grow by up to so many tokens more.

        It goes on as if it had never stopped; `pieces` yields what is new, and its result is the whole.

        Raises:
            ValueError: The text has come to its own end, or the context is full.
        """
        check_whole("max_new_tokens", max_new_tokens, 1)
        if self.finish_reason in ("eos", "stop"):
            raise ValueError(f"The text ended with '{self.finish_reason}': only one that was cut off or cancelled can go on.")
        if len(self.sequence) >= self._max_length:
            raise ValueError(f"The context of {self._max_length} tokens is full: the text cannot go on.")
        self._set_limit(int(max_new_tokens))
        self.finish_reason = None

    def _set_limit(self, max_new_tokens: int) -> None:
        self._limit = min(self._max_length, len(self.sequence) + max_new_tokens)
        # Where rounds matter to the text, they must not depend on a limit that may be raised.
        usual = self.stats.prompt_tokens + _USUAL_NEW_TOKENS
        self._drafter.expect_end(usual if self._rule.depends_on_rounds else self._limit)

    def _next_piece(self, started: float) -> Piece:
        block = self._ahead or self._run_round()
        count = self._commit(block)
        end = block.begin + count
        done = block.round
        self._ahead = _Block(done, block.logprobs, end) if self.finish_reason == "length" and end < len(done.tokens) else None
        logprobs = None
        if block.logprobs is not None and self._logprobs is not None:
            logprobs = block.logprobs[block.begin : end]
            self._logprobs += logprobs
        self._settle()
        if block.begin == 0:
            self._drafter.observe(done.verification.num_accepted)
        self.stats.count_kept(len(done.proposal.tokens), done.verification.num_accepted, range(block.begin, end))
        self._count_cost(started)
        text = self._text.take() if self.finish_reason is None else self._text.flush()
        return Piece(
            text,
            done.tokens[block.begin : end],
            done if block.begin == 0 else None,
            logprobs,
            None if self.finish_reason is None else self._result(),
        )

    def _run_round(self) -> _Block:
        try:
            done = speculative_round(self._target, self._drafter, self.sequence, self._budget(), self._rule)
        except BaseException:
            self._settle()
            raise
        self.stats.count_round(len(done.proposal.tokens))
        if (num_top := self._params.logprobs) is None:
            return _Block(done, None)
        rows = zip(done.logits.rows, done.tokens, strict=False)
        return _Block(done, tuple(token_logprob(row, token, num_top) for row, token in rows))

    def _budget(self) -> int:
        """How many tokens to propose: one more of the block is the target's own, so that one is never proposed."""
        limit = self._capacity if self._rule.depends_on_rounds else self._limit
        return min(self._num_draft_tokens, limit - len(self.sequence) - 1)

    def _commit(self, block: _Block) -> int:
        """Appends the block's tokens up to the first that ends the text, and returns how many."""
        tokens = block.round.tokens[block.begin :]
        for count, token in enumerate(tokens, start=1):
            self.sequence.append(token)
            if token in self._eos_token_ids:
                self.finish_reason = "eos"
            elif token in self._stop_token_ids:
                if self._params.include_stop:
                    self._text.append(token)
                self.finish_reason = "stop"
            elif self._text.append(token):
                self.finish_reason = "stop"
            elif len(self.sequence) == self._limit:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return count
        return len(tokens)

    def _settle(self) -> None:
        """Rewinds both caches to the invariant, before anyone sees the round."""
        self._target.rewind_to(len(self.sequence) - 1)
        self._drafter.rewind_to(len(self.sequence) - 1)

    def _count_cost(self, started: float) -> None:
        """Brings the counters up to date behind a round, or behind one that was cancelled, begun at `started`."""
        stats = self.stats
        seconds = time.perf_counter() - started
        stats.target_passes, stats.target_seconds = self._target.passes, self._target.seconds
        stats.draft_passes, stats.draft_seconds = self._drafter.passes, self._drafter.seconds
        stats.repeated_passes = self._target.repeated_passes
        stats.total_seconds += seconds
        if stats.rounds == 1 and not stats.first_round_tokens:
            stats.first_token_seconds, stats.first_round_tokens = seconds, stats.new_tokens

    def _result(self) -> GenerationResult:
        assert self.finish_reason is not None, "a text that has not ended has no result"
        new = tuple(self.sequence[self.stats.prompt_tokens :])
        return GenerationResult(self.text, new, self.finish_reason, copy.deepcopy(self.stats), self._logprobs)
