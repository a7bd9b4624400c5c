"""Drafters: what proposes tokens for the target to check. A new one is a new class behind the same protocol.

A drafter sees the sequence so far and nothing of the target; whatever it proposes, only the target decides what is said.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .decoder import Decoder
from .sampling import SamplingParams, token_distributions
from .verify import draw


@dataclass(frozen=True)
class Proposal:
    """Tokens for the target to check.

    Attributes:
        tokens: [k] ids, in order.
        probs: float32 [k, vocab_size], row i being the distribution tokens[i] was drawn from; None when nothing was
            drawn (one-hot).
    """

    tokens: tuple[int, ...] = ()
    probs: NDArray[np.float32] | None = None


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
        self,
        decoder: Decoder,
        params: SamplingParams,
        random: np.random.Generator,
        target_vocab_size: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        """Keeps a decoder of its own.

        Args:
            decoder: The draft model with an empty cache.
            params: The generation's sampling rules.
            random: Where the draws come from.
            target_vocab_size: Width of the target's rows; the draft's are cut or filled up to it (padded vocabularies).
            eos_token_ids: Ids behind which nothing is worth proposing.
        """
        self._decoder = decoder
        self._params = params
        self._random = random
        self._target_vocab_size = target_vocab_size
        self._eos_token_ids = eos_token_ids

    @property
    def passes(self) -> int:
        """Passes of the draft model so far."""
        return self._decoder.passes

    @property
    def seconds(self) -> float:
        """Time spent in them."""
        return self._decoder.seconds

    def propose(self, sequence: Sequence[int], num_tokens: int) -> Proposal:
        """Draws tokens one by one, each fed back; stops early behind an end-of-text token and where the context ends."""
        decoder = self._decoder
        missing = sequence[decoder.past_length :]
        if max(missing) >= decoder.spec.vocab_size:
            return Proposal()  # a token only the target has: the draft cannot read on
        num_tokens = min(num_tokens, decoder.room() - len(missing) + 1)
        tokens: list[int] = []
        rows: list[NDArray[np.float32]] = []
        for _ in range(num_tokens):
            logits = self._fit(decoder.forward(missing, 1))
            row = token_distributions(logits, sequence, tokens, self._params)[0]
            tokens.append(int(row.argmax()) if self._params.greedy else draw(row, self._random.random()))
            rows.append(row)
            if tokens[-1] in self._eos_token_ids:
                break
            missing = tokens[-1:]
        return Proposal(tuple(tokens), None if self._params.greedy or not rows else np.stack(rows))

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
