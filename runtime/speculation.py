"""The speculative round.

Invariant before and after each round: the target has cached exactly `sequence[:-1]` (at the start, some prefix of it);
the drafter knows some prefix of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .acceptance import AcceptanceRule, Proposal
from .candidates import Candidates
from .decoder import Decoder
from .drafters import Drafter
from .verify import Verification


@dataclass(frozen=True)
class Round:
    """One pass of the target and what came of it.

    Attributes:
        proposal: What the drafter proposed, k tokens.
        logits: The target's k + 1 rows, at their places and one behind; a view that the target's next pass overwrites.
        verification: The judgement.
    """

    proposal: Proposal
    logits: Candidates
    verification: Verification

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens the round adds: those accepted, then the target's own, if there can be one: correction or bonus."""
        accepted = self.proposal.tokens[: self.verification.num_accepted]
        return accepted if self.verification.next_token is None else (*accepted, self.verification.next_token)


def speculative_round(
    target: Decoder, drafter: Drafter, sequence: Sequence[int], num_draft_tokens: int, rule: AcceptanceRule
) -> Round:
    """Proposes, checks all of it in one target pass, and judges; commits nothing and leaves rewinding to the caller.

    Args:
        target: The target; what it has not cached of the sequence is fed in the same pass.
        drafter: Proposes.
        sequence: Prompt and text so far, at least one token.
        num_draft_tokens: The most tokens to propose; 0 is an ordinary step by the same path.
        rule: How tokens are chosen and judged.
    """
    proposal = drafter.propose(sequence, num_draft_tokens) if num_draft_tokens > 0 else Proposal()
    logits = target.candidates([*sequence[target.past_length :], *proposal.tokens], len(proposal.tokens) + 1)
    return Round(proposal, logits, rule.judge(proposal, logits, sequence))
