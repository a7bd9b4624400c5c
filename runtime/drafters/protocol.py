"""What a generation asks of a drafter."""

from collections.abc import Sequence
from typing import Protocol

from runtime.acceptance import Proposal


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

    def expect_end(self, length: int) -> None:
        """Hears at which length of prompt and text the text is expected to end: at its start, and when a limit is raised."""
        ...

    def propose(self, sequence: Sequence[int], num_tokens: int) -> Proposal:
        """Returns up to `num_tokens` tokens that may follow the sequence; none is a fair answer."""
        ...

    def observe(self, num_accepted: int) -> None:
        """Learns how many tokens of the last proposal were accepted; also told where none was asked for, or none came."""
        ...

    def rewind_to(self, length: int) -> None:
        """Forgets everything about the sequence from `length` on."""
        ...
