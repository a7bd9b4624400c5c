"""A draft with a vocabulary of its own, as if it read and spoke the target's tokens.

It knows how many of the draft's ids each token of the text has become, and nothing of what is proposed.
"""

import threading
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .candidates import Candidates
from .decoder import Decoder, length_in_common
from .draft_vocabulary import DraftVocabulary
from .top_logits import TopRule


class DraftDecoder:
    """A decoder in tokens of the target around one in tokens of the draft; see Decoder, whose methods these are.

    Attributes:
        tokens: The tokens of the target that have been read.
    """

    def __init__(self, decoder: Decoder, vocabulary: DraftVocabulary) -> None:
        """Takes over a decoder of the draft that has read nothing."""
        self.tokens: list[int] = []
        # How many of the draft's ids are cached when a token has been read; those of the prefix stand before the first.
        self._ends: list[int] = []
        self._decoder = decoder
        self._vocabulary = vocabulary

    @property
    def past_length(self) -> int:
        """How many tokens have been read."""
        return len(self.tokens)

    @property
    def passes(self) -> int:
        """See Decoder."""
        return self._decoder.passes

    @property
    def seconds(self) -> float:
        """See Decoder."""
        return self._decoder.seconds

    @property
    def last_total(self) -> float | None:
        """See Decoder."""
        return self._decoder.last_total

    @property
    def cancel(self) -> threading.Event | None:
        """See Decoder."""
        return self._decoder.cancel

    @cancel.setter
    def cancel(self, cancel: threading.Event | None) -> None:
        self._decoder.cancel = cancel

    def takes(self, token_ids: Sequence[int]) -> bool:
        """Tells whether `candidates` takes these: there is room for their spellings, and something to have logits behind."""
        ids, _ = self._spelled(token_ids)
        return self._decoder.past_length + len(ids) > 0 and len(ids) <= self._decoder.room() and self._knows(ids)

    def candidates(self, token_ids: Sequence[int], num_rows: int) -> Candidates:
        """Reads tokens that it `takes`, behind those read before.

        Args:
            token_ids: At least one token of the target.
            num_rows: 1: a token that is spelled with none of the draft's has no row of its own.

        Returns:
            One row of logits, what stands behind the last token, over the target's tokens that the draft has; a view that the
            next pass overwrites.

        Raises:
            LogitsError: As Decoder.candidates.
            Cancelled: Likewise; what was read before stays read.
        """
        assert num_rows == 1, num_rows
        ids, ends = self._spelled(token_ids)
        if not len(ids):
            # There are logits only behind an id that is fed: the last one is fed again.
            last = bisect_left(self._ends, self._ends[-1])
            token_ids = [*self.tokens[last:], *token_ids]
            self.rewind_to(last)
            ids, ends = self._spelled(token_ids)
        start = self._decoder.past_length
        try:
            logits = self._decoder.candidates(ids.tolist(), 1)
        finally:
            # All of them, unless the passes ended before: then those whose ids are all cached.
            read = int(np.searchsorted(ends, self._decoder.past_length - start, side="right"))
            self.tokens += token_ids[:read]
            self._ends += (start + ends[:read]).tolist()
            self.rewind_to(len(self.tokens))
        return self._vocabulary.translate(logits)

    def rewind_to(self, length: int) -> None:
        """Forgets all tokens from `length` on; does nothing when fewer have been read."""
        del self.tokens[length:]
        del self._ends[length:]
        self._decoder.rewind_to(self._ends[-1] if self._ends else 0)

    def begin(self, prompt: Sequence[int], cancel: threading.Event | None, rule: TopRule | None = None) -> None:
        """Starts a text, as Decoder.begin does."""
        self.rewind_to(length_in_common(self.tokens, prompt[:-1]))
        self._decoder.passes, self._decoder.seconds = 0, 0.0
        self._decoder.cancel = cancel
        # Logits that stand for no token of the target may be the largest.
        self._decoder.bring_top(rule if self._vocabulary.is_proposed_whole else None)

    def fork(self) -> "DraftDecoder":
        """Returns a decoder with a copy of the cache; neither sees what the other does from here on."""
        copy = DraftDecoder(self._decoder.fork(), self._vocabulary)
        copy.tokens, copy._ends = list(self.tokens), list(self._ends)
        return copy

    def _knows(self, ids: NDArray[np.int32]) -> bool:
        return not len(ids) or int(ids.max()) < self._vocabulary.num_input_ids

    def _spelled(self, token_ids: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Returns what the draft has to read for tokens behind those read before; see DraftVocabulary.spell."""
        ids, ends = self._vocabulary.spell(token_ids)
        spelling = self._vocabulary.spelling
        if spelling is None or self.tokens:
            return ids, ends
        return np.concatenate([spelling.prefix, ids]), ends + len(spelling.prefix)
