"""A decoder in one generation: a model, its cache, and the tokens that are in it.

"Feed whatever is not cached" is all it does: prefill, one step, verification and catching up are the same call. It cuts
long inputs into passes of a bounded size, so memory does not grow with the prompt times the vocabulary.
"""

import itertools
import math
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from .backend import ChainContext, Model, TopLogitsContext
from .candidates import Candidates, Columns
from .contract import DecoderSpec
from .errors import LogitsError
from .top_logits import SPARE, TopRule

_MAX_ROWS = 256
_LOGITS_BYTES = 32 << 20


def context_size(spec: DecoderSpec, max_length: int, num_rows: int) -> tuple[int, int]:
    """Returns the cache slots and the rows of logits that a Decoder of these arguments allocates."""
    tokens = max(num_rows, min(_MAX_ROWS, _LOGITS_BYTES // (4 * spec.vocab_size), max_length))
    return spec.cache_capacity or max_length + spec.most_padding + spec.spare_slots, spec.rows_of_pass(tokens)


def length_in_common(cached: Sequence[int], tokens: Sequence[int]) -> int:
    """Returns how many tokens two texts have in common from their beginnings on."""
    pairs = enumerate(zip(cached, tokens, strict=False))
    return next((length for length, (one, other) in pairs if one != other), min(len(cached), len(tokens)))


class Cancelled(Exception):  # noqa: N818 - a signal, not an error
    """The generation's cancel event was set between two passes."""


class Decoder:
    """A model with a cache that can be rewound.

    Attributes:
        tokens: The cached tokens. The next forward continues behind them.
        cancel: Checked before every pass; None for no check.
        passes: Passes run for the text in hand.
        seconds: Time spent in them.
        top_rule: Tells which of a row's largest logits decide the text in hand, where `candidates` brings only these from the
            device; None where it brings whole rows.
        repeated_passes: Passes that were run again for whole rows, since what came did not decide.
        last_total: The sum of exp(logit - largest) over the whole of the last row; None where it is not known.
    """

    def __init__(self, model: Model, max_length: int, *, num_rows: int) -> None:
        """Allocates the cache.

        Args:
            model: The loaded decoder.
            max_length: Tokens the cache must hold at most.
            num_rows: The most rows of logits one forward will be asked for.
        """
        self.spec = model.spec
        self.tokens: list[int] = []
        self.cancel: threading.Event | None = None
        self.passes = 0
        self.seconds = 0.0
        self.top_rule: TopRule | None = None
        self.repeated_passes = 0
        self.last_total: float | None = None
        self._model = model
        self._vocabulary = Columns(self.spec.vocab_size)
        self._max_length = max_length
        self._num_rows = num_rows
        capacity, self._max_rows = context_size(self.spec, max_length, num_rows)
        self._context = model.open_context(capacity, self._max_rows)
        self._top_context = self._context if isinstance(self._context, TopLogitsContext) else None
        self._chain_context = self._context if isinstance(self._context, ChainContext) else None

    @property
    def past_length(self) -> int:
        """How many tokens are cached."""
        return len(self.tokens)

    def room(self) -> int:
        """Returns how many more tokens the cache can take."""
        return self._max_length - len(self.tokens)

    def takes(self, token_ids: Sequence[int]) -> bool:
        """Tells whether at least one token can be fed: there is room for all, and the model has them."""
        return len(token_ids) <= self.room() and max(token_ids) < self.spec.vocab_size

    def forward(self, token_ids: Sequence[int], num_rows: int) -> NDArray[np.float32]:
        """Feeds tokens behind the cached ones and caches them.

        Args:
            token_ids: At least one token, at most `room()`.
            num_rows: Rows of logits wanted: those of the last tokens, 1 to len(token_ids).

        Returns:
            float32 [num_rows, vocab_size]; a view that the next pass overwrites. Row -1 predicts the token behind the last one
            fed.

        Raises:
            LogitsError: A row that was asked for holds NaN or +inf, or nothing but -inf; the cache is as it was before.
            Cancelled: The cancel event was set.
        """
        return self._feed(token_ids, num_rows, None).rows

    def candidates(self, token_ids: Sequence[int], num_rows: int) -> Candidates:
        """Feeds tokens as `forward` does, and returns of their rows what decides the text in hand, see `top_rule`."""
        return self._feed(token_ids, num_rows, self.top_rule)

    def rewind_to(self, length: int) -> None:
        """Forgets all cached tokens from `length` on; does nothing when fewer are cached."""
        del self.tokens[length:]

    def begin(self, prompt: Sequence[int], cancel: threading.Event | None, rule: TopRule | None = None) -> None:
        """Starts a text: counts anew, and keeps what is cached of its beginning.

        Args:
            prompt: At least one token. The last one is never kept: feeding it gives the text's first row.
            cancel: Checked before every pass from here on.
            rule: Tells which of a row's largest logits decide the text: `candidates` need not bring more of a row from a
                device. None where whole rows are needed.
        """
        self.rewind_to(length_in_common(self.tokens, prompt[:-1]))
        self.passes, self.seconds, self.repeated_passes = 0, 0.0, 0
        self.cancel = cancel
        self.bring_top(rule)

    def bring_top(self, rule: TopRule | None) -> None:
        """Lets `candidates` bring the largest logits only, where the context can; see `begin`."""
        self.top_rule = None
        if rule is not None and rule.num_top and self._top_context is not None:
            most = min(self._top_context.max_top, self.spec.vocab_size - 1)
            self.top_rule = rule if rule.num_top + SPARE <= most else None

    @property
    def can_chain(self) -> bool:
        """Whether `chain` can be called in this text."""
        return self.top_rule is not None and self._chain_context is not None

    def chain(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Feeds tokens behind the cached ones, and then each most probable token but the last, without leaving the device.

        Args:
            token_ids: At least one token.
            num_tokens: How many to choose, at least 1; there is room for all but the last.

        Returns:
            The tokens chosen.

        Raises:
            LogitsError: As `forward`.
            Cancelled: The cancel event was set before.
        """
        assert self._chain_context is not None, "can_chain tells"
        assert len(token_ids) + num_tokens - 1 <= self.room(), (len(token_ids), num_tokens, self.room())
        start = self.past_length
        tokens = np.asarray(token_ids, np.int64)
        last = len(tokens) % self._max_rows or self._max_rows
        for begin in range(0, len(tokens) - last, self._max_rows):
            self._run(tokens[begin : begin + self._max_rows], 0, None)
        padded = self._padded(tokens[-last:])
        started = time.perf_counter()
        top = self._chain_context.run_chain(padded, self.past_length, last - 1, num_tokens)
        self.seconds += time.perf_counter() - started
        self.passes += num_tokens
        chosen: list[int] = top.tokens[:, 0].tolist()
        self.tokens += [*tokens[-last:].tolist(), *chosen[:-1]]
        if not top.are_sound:
            self._refuse_logits(start)
        return chosen

    def fork(self) -> "Decoder":
        """Returns a decoder with a copy of the cache; neither sees what the other does from here on."""
        copy = Decoder(self._model, self._max_length, num_rows=self._num_rows)
        copy._context.copy_from(self._context, len(self.tokens))
        copy.tokens = list(self.tokens)
        return copy

    def _feed(self, token_ids: Sequence[int], num_rows: int, rule: TopRule | None) -> Candidates:
        assert 1 <= num_rows <= len(token_ids) <= self.room(), (num_rows, len(token_ids), self.room())
        start = self.past_length
        tokens = np.asarray(token_ids, np.int64)
        # The last pass must hold all the rows that are wanted; those before it are as large as they may be.
        last = max(num_rows, len(tokens) % self._max_rows or self._max_rows)
        bounds = [*range(0, len(tokens) - last, self._max_rows), len(tokens) - last, len(tokens)]
        for begin, end in itertools.pairwise(bounds):
            if begin < end:
                logits = self._run(tokens[begin:end], num_rows if end == len(tokens) else 0, rule)
        return self._refuse_logits(start) if logits is None else logits

    def _run(self, tokens: NDArray[np.int64], num_rows: int, rule: TopRule | None) -> Candidates | None:
        """Runs one pass; returns its last rows of logits, None where they hold NaN or infinity."""
        padded = self._padded(tokens)
        started = time.perf_counter()
        logits = self._compute(padded, tokens, num_rows, rule)
        self.seconds += time.perf_counter() - started
        self.passes += 1
        self.tokens += tokens.tolist()
        return logits

    def _padded(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns a pass's tokens with padding rows behind them; raises Cancelled where that is asked for."""
        if self.cancel is not None and self.cancel.is_set():
            raise Cancelled
        padding = self.spec.rows_of_pass(len(tokens)) - len(tokens)
        return np.pad(tokens, (0, padding), mode="edge") if padding else tokens

    def _compute(
        self, padded: NDArray[np.int64], tokens: NDArray[np.int64], num_rows: int, rule: TopRule | None
    ) -> Candidates | None:
        past = len(self.tokens)
        # Padding rows stand behind the real ones, which cannot see them; their cache slots are written over next time. They are
        # asked for even where no row is wanted: a backend may compute such rows apart, and this keeps them the same ones
        # whatever is proposed behind a prompt.
        asked = num_rows + len(padded) - len(tokens)
        if num_rows and rule is not None:
            assert self._top_context is not None, "bring_top has looked"
            top = self._top_context.run_top(padded, past, asked, rule.num_top + SPARE, rule.top_temperature).first(num_rows)
            if not top.are_sound:
                return None
            if rule.decides(top, self.tokens, tokens):
                self.last_total = float(top.totals[-1]) if rule.top_temperature == 1 else None
                return top.candidates()
            self.passes += 1
            self.repeated_passes += 1
        self.last_total = None
        logits = Candidates(self._context.run(padded, past, asked)[:num_rows], self._vocabulary)
        # The largest of a row tells: NaN is larger than all, and -inf is the largest only where there is nothing else.
        for row, column in enumerate(logits.largest.tolist()):
            if not math.isfinite(logits.rows.item(row, column)):
                return None
        return logits

    def _refuse_logits(self, start: int) -> NoReturn:
        """Forgets what was fed behind `start`, and raises LogitsError."""
        position = self.past_length
        self.rewind_to(start)
        raise LogitsError(
            f"The model '{self.spec.source}' ({self.spec.precision}) returned NaN or infinite logits at position "
            f"{position}: its weights are damaged or its precision overflows; check it, or export it in fp32."
        )
