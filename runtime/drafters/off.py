"""No drafting: the target decodes one token a pass, by the same path."""

from collections.abc import Sequence

from runtime.acceptance import Proposal


class NoDrafter:
    """Proposes nothing."""

    name = "off"
    passes = 0
    seconds = 0.0

    def expect_end(self, length: int) -> None:
        """Has nothing to plan."""

    def propose(self, sequence: Sequence[int], num_tokens: int) -> Proposal:  # noqa: ARG002 - the protocol's signature
        """Returns an empty proposal."""
        return Proposal()

    def observe(self, num_accepted: int) -> None:
        """Has nothing to learn."""

    def rewind_to(self, length: int) -> None:
        """Has nothing to forget."""
