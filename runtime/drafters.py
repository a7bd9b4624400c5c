"""Drafters: what proposes tokens for the target to check. A new one is a new class behind the same protocol.

A drafter sees the sequence so far and nothing of the target; whatever it proposes, only the target decides what is said.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .acceptance import AcceptanceRule, Proposal
from .decoder import Decoder
from .errors import SamplingError


class Drafter(Protocol):
    """Proposes tokens for one generation."""

    name: str

    @property
    def passes(self) -> int:
        """Passes of a draft model so far."""
        ...

    @property
    def seconds(self) -> float:
        """Time spent in them."""
        ...

    def propose(self, sequence: Sequence[int], num_tokens: int) -> Proposal:
        """Returns up to `num_tokens` tokens that may follow the sequence; none is a fair answer."""
        ...

    def rewind_to(self, length: int) -> None:
        """Forgets everything about the sequence from `length` on."""
        ...


class ModelDrafter:
    """A smaller model, sampled by the same rules as the target."""

    name = "model"

    def __init__(
        self, decoder: Decoder, rule: AcceptanceRule, *, target_vocab_size: int, end_token_ids: frozenset[int]
    ) -> None:
        """Keeps a decoder of its own.

        Args:
            decoder: The draft model; what it has cached must be a beginning of the sequence.
            rule: How the generation's tokens are chosen.
            target_vocab_size: Width of the target's rows; the draft's are cut or filled up to it (padded vocabularies).
            end_token_ids: Ids behind which nothing is worth proposing.
        """
        self._decoder = decoder
        self._rule = rule
        self._target_vocab_size = target_vocab_size
        self._end_token_ids = end_token_ids

    @property
    def passes(self) -> int:
        """Passes of the draft model so far."""
        return self._decoder.passes

    @property
    def seconds(self) -> float:
        """Time spent in them."""
        return self._decoder.seconds

    def propose(self, sequence: Sequence[int], num_tokens: int) -> Proposal:
        """Chooses tokens one by one, each fed back.

        It stops early behind a token that ends the text, where the context ends, and where the sampling rules leave the draft
        no token.
        """
        decoder = self._decoder
        missing = sequence[decoder.past_length :]
        if max(missing) >= decoder.spec.vocab_size:
            return Proposal()  # a token only the target has: the draft cannot read on
        num_tokens = min(num_tokens, decoder.room() - len(missing) + 1)
        tokens: list[int] = []
        rows: list[NDArray[np.float32]] = []
        for _ in range(num_tokens):
            logits = self._fit(decoder.forward(missing, 1))
            try:
                token, row = self._rule.propose(logits, sequence, tokens)
            except SamplingError:
                break
            tokens.append(token)
            if row is not None:
                rows.append(row)
            if token in self._end_token_ids:
                break
            missing = tokens[-1:]
        return Proposal(tuple(tokens), np.stack(rows) if rows else None)

    def rewind_to(self, length: int) -> None:
        """Drops cached tokens from `length` on."""
        self._decoder.rewind_to(length)

    def _fit(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Cuts or fills rows to the target's width; a token the draft does not have cannot be proposed."""
        surplus = self._target_vocab_size - logits.shape[1]
        if surplus <= 0:
            return logits[:, : self._target_vocab_size]
        return np.pad(logits, ((0, 0), (0, surplus)), constant_values=-np.inf)


class LookupDrafter:
    """Proposes what followed the last occurrence of the sequence's own ending (prompt lookup, Saxena 2023)."""

    name = "lookup"
    passes = 0
    seconds = 0.0

    def __init__(self, *, longest: int = 3, shortest: int = 2) -> None:
        """Starts with an empty index.

        Args:
            longest: Tokens of an ending looked up first.
            shortest: The fewest tokens that still count as a match.

        Raises:
            ValueError: Not 1 <= shortest <= longest.
        """
        if not 1 <= shortest <= longest:
            raise ValueError(f"Lookup needs 1 <= shortest <= longest; found {shortest} and {longest}.")
        self._sizes = range(longest, shortest - 1, -1)
        self._follows: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def propose(self, sequence: Sequence[int], num_tokens: int) -> Proposal:
        """Copies what stands behind the latest earlier occurrence of the longest ending that has one."""
        # Every ending is indexed but the sequence's own, which would only find itself.
        for end in range(self._indexed + 1, len(sequence)):
            for size in self._sizes:
                if size <= end:
                    self._follows[tuple(sequence[end - size : end])] = end
        self._indexed = max(self._indexed, len(sequence) - 1)
        for size in self._sizes:
            start = self._follows.get(tuple(sequence[-size:]))
            if start is not None:
                return Proposal(tuple(sequence[start : start + num_tokens]))
        return Proposal()

    def rewind_to(self, length: int) -> None:
        """Keeps the index: it holds committed tokens only, which are never taken back within a generation."""


class NoDrafter:
    """Proposes nothing: the target decodes one token a pass, by the same path."""

    name = "off"
    passes = 0
    seconds = 0.0

    def propose(self, sequence: Sequence[int], num_tokens: int) -> Proposal:  # noqa: ARG002 - the protocol's signature
        """Returns an empty proposal."""
        return Proposal()

    def rewind_to(self, length: int) -> None:
        """Has nothing to forget."""
