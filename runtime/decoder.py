"""A decoder in one generation: a model, its cache, and one integer that says how far it is.

"Feed whatever is not cached" is all it does: prefill, one step, verification and catching up are the same call. It cuts
long inputs into passes of a bounded size, so memory does not grow with the prompt times the vocabulary.
"""

import itertools
import threading
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .backend import Model
from .errors import LogitsError

_MAX_ROWS = 256
_LOGITS_BYTES = 32 << 20


class Cancelled(Exception):  # noqa: N818 - a signal, not an error
    """The generation's cancel event was set between two passes."""


class Decoder:
    """A model with a cache that can be rewound.

    Attributes:
        past_length: Tokens cached and valid. The next forward continues behind them.
        passes: Passes run so far.
        seconds: Time spent in them.
    """

    def __init__(self, model: Model, max_length: int, *, num_rows: int, cancel: threading.Event | None = None) -> None:
        """Allocates the cache.

        Args:
            model: The loaded decoder.
            max_length: Tokens the cache must hold at most.
            num_rows: The most rows of logits one forward will be asked for.
            cancel: Checked before every pass.
        """
        self.spec = model.spec
        self.past_length = 0
        self.passes = 0
        self.seconds = 0.0
        self._max_length = max_length
        self._cancel = cancel
        rows_within_budget = _LOGITS_BYTES // (4 * self.spec.vocab_size)
        self._max_rows = max(num_rows, self.spec.min_rows, min(_MAX_ROWS, rows_within_budget, max_length))
        padding = self.spec.min_rows - 1
        self._context = model.open_context(max_length + padding + self.spec.spare_slots, self._max_rows)

    def room(self) -> int:
        """Returns how many more tokens the cache can take."""
        return self._max_length - self.past_length

    def forward(self, token_ids: Sequence[int], num_rows: int) -> NDArray[np.float32]:
        """Feeds tokens behind the cached ones and caches them.

        Args:
            token_ids: At least one token, at most `room()`.
            num_rows: Rows of logits wanted: those of the last tokens, 1 to len(token_ids).

        Returns:
            float32 [num_rows, vocab_size]; a view that the next forward overwrites. Row -1 predicts the token behind
            the last one fed.

        Raises:
            LogitsError: A row that was asked for holds NaN or an infinity; the cache is as it was before.
            Cancelled: The cancel event was set.
        """
        assert 1 <= num_rows <= len(token_ids) <= self.room(), (num_rows, len(token_ids), self.room())
        start = self.past_length
        tokens = np.asarray(token_ids, np.int64)
        # The last pass must hold all the rows that are wanted; those before it are as large as they may be.
        last = max(num_rows, len(tokens) % self._max_rows or self._max_rows)
        bounds = [*range(0, len(tokens) - last, self._max_rows), len(tokens) - last, len(tokens)]
        for begin, end in itertools.pairwise(bounds):
            if begin < end:
                logits = self._run(tokens[begin:end], num_rows if end == len(tokens) else 0)
        # One sum finds them all: it is finite exactly when every logit is.
        with np.errstate(invalid="ignore"):
            finite = np.isfinite(logits.sum(dtype=np.float64))
        if not finite:
            self.past_length = start
            raise LogitsError(
                f"The model '{self.spec.source}' ({self.spec.precision}) returned NaN or infinite logits at position "
                f"{start + len(tokens)}: its weights are damaged or its precision overflows; check it, or export it in fp32."
            )
        return logits

    def rewind_to(self, length: int) -> None:
        """Forgets all cached tokens from `length` on; does nothing when fewer are cached."""
        self.past_length = min(self.past_length, length)

    def _run(self, tokens: NDArray[np.int64], num_rows: int) -> NDArray[np.float32]:
        if self._cancel is not None and self._cancel.is_set():
            raise Cancelled
        padding = max(0, self.spec.min_rows - len(tokens))
        started = time.perf_counter()
        # Padding rows stand behind the real ones, which cannot see them; their cache slots are written over next time.
        padded = np.pad(tokens, (0, padding), mode="edge") if padding else tokens
        logits = self._context.run(padded, self.past_length, num_rows + padding)[:num_rows]
        self.seconds += time.perf_counter() - started
        self.passes += 1
        self.past_length += len(tokens)
        return logits
