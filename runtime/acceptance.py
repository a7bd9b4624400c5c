"""How a draft chooses the tokens it proposes, and how the target judges them: two rules that belong together in pairs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .candidates import Candidates, Columns
from .errors import SamplingError
from .noise import ExponentialNoise
from .sampling import Sampler
from .verify import Verification, draw, verify, verify_choices


@dataclass(frozen=True)
class Proposal:
    """Tokens for the target to check.

    Attributes:
        tokens: [k] ids, in order.
        probs: k entries, entry i being one row, the distribution tokens[i] was drawn from, or None where it was not drawn, but
            chosen or looked up; None when none was drawn.
    """

    tokens: tuple[int, ...] = ()
    probs: Sequence[Candidates | None] | None = None

    @classmethod
    def of(cls, tokens: Sequence[int], rows: Sequence[Candidates | None]) -> "Proposal":
        """Puts tokens and the rows they came from together."""
        return cls(tuple(tokens), tuple(rows) if any(row is not None for row in rows) else None)


class AcceptanceRule(Protocol):
    """One generation's way to choose and judge tokens. Logits are not changed."""

    depends_on_rounds: bool
    """Whether where a round begins changes the tokens (not their law): then a limit must not cut a proposal short."""

    @property
    def sampler(self) -> Sampler:
        """The text's sampling rules."""
        ...

    def propose(self, logits: Candidates, history: Sequence[int], block: Sequence[int]) -> tuple[int, Candidates | None]:
        """Chooses the draft's next token.

        Args:
            logits: One row, at the place behind history and block.
            history: Prompt and text so far.
            block: Tokens proposed behind it.

        Returns:
            The token; and one row, the distribution it was drawn from, if it was drawn.

        Raises:
            SamplingError: The sampling rules leave no token.
        """
        ...

    def judge(self, proposal: Proposal, logits: Candidates, history: Sequence[int]) -> Verification:
        """Judges a proposal by the target's k + 1 rows.

        Raises:
            SamplingError: The sampling rules leave no token.
        """
        ...


class RejectionRule:
    """Draws from the draft, and accepts with probability min(1, target / draft); see `verify`."""

    depends_on_rounds = True

    def __init__(self, sampler: Sampler, random: np.random.Generator) -> None:
        """Takes the rules of the text, and where all its draws come from."""
        self.sampler = sampler
        self._random = random

    def propose(self, logits: Candidates, history: Sequence[int], block: Sequence[int]) -> tuple[int, Candidates | None]:
        """Draws a token; see AcceptanceRule."""
        row = self.sampler.distributions(logits, history, block)
        return row.columns.token(draw(row.rows[0], self._random.random())), row

    def judge(self, proposal: Proposal, logits: Candidates, history: Sequence[int]) -> Verification:
        """Accepts by chance, and draws the correction or the bonus; see AcceptanceRule."""
        target_probs, reachable = _reachable(self.sampler.distributions, logits, history, proposal)
        verification = _verify(reachable, target_probs, self._random.random(len(target_probs.rows)))
        return _without_impossible(verification, reachable, proposal)


class GreedyRule:
    """Both models choose the most probable token."""

    depends_on_rounds = False

    def __init__(self, sampler: Sampler) -> None:
        """Takes the rules of the text."""
        self.sampler = sampler

    def propose(self, logits: Candidates, history: Sequence[int], block: Sequence[int]) -> tuple[int, Candidates | None]:
        """Chooses a token; see AcceptanceRule."""
        scores = self.sampler.scores(logits, history, block)
        return scores.columns.token(int(scores.largest[0])), None

    def judge(self, proposal: Proposal, logits: Candidates, history: Sequence[int]) -> Verification:
        """Accepts what the target would have chosen; see AcceptanceRule."""
        scores, reachable = _reachable(self.sampler.scores, logits, history, proposal)
        verification = verify_choices(reachable.tokens, scores.columns.tokens(scores.largest))
        return _without_impossible(verification, reachable, proposal)


class CoupledRule:
    """Both models sample with the same noise at a position, so that they mostly choose alike (Daliri et al. 2024)."""

    depends_on_rounds = False

    def __init__(self, sampler: Sampler, noise: ExponentialNoise) -> None:
        """Takes the rules of the text and its noise."""
        self.sampler = sampler
        self._noise = noise

    def propose(self, logits: Candidates, history: Sequence[int], block: Sequence[int]) -> tuple[int, Candidates | None]:
        """Chooses a token; see AcceptanceRule."""
        weights = self.sampler.weights(logits, history, block)
        return self._choices(weights, len(history) + len(block))[0], None

    def judge(self, proposal: Proposal, logits: Candidates, history: Sequence[int]) -> Verification:
        """Accepts what the target would have chosen; see AcceptanceRule."""
        self._noise.forget_before(len(history))
        weights, reachable = _reachable(self.sampler.weights, logits, history, proposal)
        verification = verify_choices(reachable.tokens, self._choices(weights, len(history)))
        return _without_impossible(verification, reachable, proposal)

    def _choices(self, weights: Candidates, position: int) -> list[int]:
        """Chooses a token for each row, the first of which stands at `position`; the weights are used up."""
        self._noise.divide(weights, position)
        return weights.columns.tokens(weights.largest)


def _verify(proposal: Proposal, target_probs: Candidates, uniforms: NDArray[np.float64]) -> Verification:
    """Judges as `verify` does, with all rows brought over the same columns."""
    drafts = [None] * len(proposal.tokens) if proposal.probs is None else proposal.probs
    columns = Columns.joined([target_probs.columns, *(row.columns for row in drafts if row is not None)], proposal.tokens)
    draft_rows = [None if row is None else row.over(columns, 0)[0] for row in drafts]
    done = verify(columns.places(proposal.tokens).tolist(), draft_rows, target_probs.over(columns, 0), uniforms)
    if columns.token_ids is None:
        return done
    assert done.next_token is not None, "a rule without tokens is looked at before and behind"
    assert done.drawing is not None, "it has drawn"
    return replace(done, next_token=columns.token(done.next_token), drawing=replace(done.drawing, columns=columns))


def _reachable(
    apply: Callable[[Candidates, Sequence[int], Sequence[int]], Candidates],
    logits: Candidates,
    history: Sequence[int],
    proposal: Proposal,
) -> tuple[Candidates, Proposal]:
    """Applies sampling rules to a proposal's rows, and cuts it where they leave no token.

    Such a row may stand behind a token that is refused, and then it is no error: the text never gets there.

    Returns:
        k + 1 rows, and the k tokens up to the first such row, for which the one before stands in.

    Raises:
        SamplingError: The first row has no token left.
    """
    try:
        return apply(logits, history, proposal.tokens), proposal
    except SamplingError as error:
        if error.row == 0:
            raise
        before = apply(logits.first(error.row), history, proposal.tokens[: error.row - 1])
        probs = None if proposal.probs is None else proposal.probs[: error.row]
        rows = np.concatenate([before.rows, before.rows[-1:]])
        return Candidates(rows, before.columns), Proposal(proposal.tokens[: error.row], probs)


def _without_impossible(verification: Verification, reachable: Proposal, proposal: Proposal) -> Verification:
    """Takes the last token away where it comes from a row that only stands in for one without tokens."""
    if reachable is proposal or verification.num_accepted < len(reachable.tokens):
        return verification
    return replace(verification, next_token=None)
