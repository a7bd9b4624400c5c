"""The speculative round.

Invariant before and after each round: the target has cached exactly `sequence[:-1]` (at the start, some prefix of it);
the drafter knows some prefix of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .decoder import Decoder
from .drafters import Drafter, Proposal
from .sampling import Logits, SamplingParams, token_distributions
from .verify import Verification, verify


@dataclass(frozen=True)
class Round:
    """One pass of the target and what came of it.

    Attributes:
        proposal: What the drafter proposed, k tokens.
        target_probs: float32 [k + 1, vocab_size], the target's distributions at their places and one behind.
        uniforms: float64 [k + 1], the numbers drawn.
        verification: The judgement.
    """

    proposal: Proposal
    target_probs: Logits
    uniforms: np.ndarray[tuple[int], np.dtype[np.float64]]
    verification: Verification

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens the round adds: those accepted, then the correction or the bonus."""
        return (*self.proposal.tokens[: self.verification.num_accepted], self.verification.next_token)

    @property
    def has_bonus(self) -> bool:
        """Whether nothing was refused."""
        return self.verification.num_accepted == len(self.proposal.tokens)


def speculative_round(
    target: Decoder,
    drafter: Drafter,
    sequence: Sequence[int],
    num_draft_tokens: int,
    params: SamplingParams,
    random: np.random.Generator,
) -> Round:
    """Proposes, checks all of it in one target pass, and judges; commits nothing and leaves rewinding to the caller.

    Args:
        target: The target; what it has not cached of the sequence is fed in the same pass.
        drafter: Proposes.
        sequence: Prompt and text so far, at least one token.
        num_draft_tokens: The most tokens to propose; 0 is an ordinary step by the same path.
        params: The sampling rules.
        random: Where the uniforms come from.
    """
    proposal = drafter.propose(sequence, num_draft_tokens) if num_draft_tokens > 0 else Proposal()
    k = len(proposal.tokens)
    logits = target.forward([*sequence[target.past_length :], *proposal.tokens], k + 1)
    target_probs = token_distributions(logits, sequence, proposal.tokens, params)
    uniforms = random.random(k + 1)
    return Round(proposal, target_probs, uniforms, verify(proposal.tokens, proposal.probs, target_probs, uniforms))
