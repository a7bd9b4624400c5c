"""Lookup where the text repeats itself, the draft model where it does not, chained into one proposal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from runtime.acceptance import Proposal

from .lookup import LookupDrafter
from .model import ModelDrafter

if TYPE_CHECKING:
    from runtime.candidates import Candidates


class HybridDrafter:
    """Asks the text first at each place of a proposal, then the model."""

    name = "hybrid"

    def __init__(self, lookup: LookupDrafter, model: ModelDrafter) -> None:
        """Takes both drafters of one generation."""
        self._lookup = lookup
        self._model = model

    @property
    def passes(self) -> int:
        """Passes of the draft model so far."""
        return self._model.passes

    @property
    def seconds(self) -> float:
        """Time spent in them."""
        return self._model.seconds

    def expect_end(self, length: int) -> None:
        """Has nothing to plan."""

    def propose(self, sequence: Sequence[int], num_tokens: int) -> Proposal:
        """Looks up what it can, and lets the model say what it cannot."""
        self._lookup.extend(sequence)
        tokens: list[int] = []
        rows: list[Candidates | None] = []
        while len(tokens) < num_tokens:
            if (found := self._lookup.next_token(sequence, tokens)) is not None:
                tokens.append(found[0])
                rows.append(None)
                continue
            drafted = self._model.next_token(sequence, tokens)
            if drafted is None:
                break
            tokens.append(drafted.token)
            rows.append(drafted.row)
            if drafted.ends_text:
                break
        return Proposal.of(tokens, rows)

    def observe(self, num_accepted: int) -> None:
        """Has nothing to learn."""

    def rewind_to(self, length: int) -> None:
        """Drops what the model has cached from `length` on."""
        self._model.rewind_to(length)
