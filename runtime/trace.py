"""A round told in words: what was proposed, what both models thought of it, what was drawn, and what came of it."""

from collections.abc import Callable, Iterator

import numpy as np

from .acceptance import Proposal
from .candidates import Candidates, Columns
from .speculation import Round
from .verify import Drawing, Probabilities, Verification

_HEAD = 3


def trace_lines(number: int, done: Round, num_kept: int, token_text: Callable[[int], str]) -> Iterator[str]:
    """Tells one round.

    Args:
        number: The round's number, from 1.
        done: The round.
        num_kept: How many of its tokens stand in the text; fewer than it gave where the text ended inside.
        token_text: The readable text of a token id.

    Yields:
        Lines without line ends: one for the proposal, one for each judged token, one for the token the target added.
    """

    def named(token: int) -> str:
        return f"{token_text(token)!r}"

    proposal, verification, drawing = done.proposal, done.verification, done.verification.drawing
    proposed = " ".join(map(named, proposal.tokens)) or "nothing"
    yield f"round {number}: proposed {proposed}"
    if drawing is None:
        yield from _choices(done, named)
    else:
        yield from _drawings(proposal, drawing, verification, token_text)
    if num_kept < len(done.tokens):
        yield f"  the text ends with {named(done.tokens[num_kept - 1])}: {len(done.tokens) - num_kept} dropped behind it"


def _choices(done: Round, named: Callable[[int], str]) -> Iterator[str]:
    verification = done.verification
    for token in done.proposal.tokens[: verification.num_accepted]:
        yield f"  {named(token):<14} the target's choice too  -> accepted"
    for token in done.proposal.tokens[verification.num_accepted :][:1]:
        yield f"  {named(token):<14} not the target's choice  -> refused"
    if verification.next_token is not None:
        yield f"  target's choice {named(verification.next_token)}"


def _drawings(
    proposal: Proposal, drawing: Drawing, verification: Verification, token_text: Callable[[int], str]
) -> Iterator[str]:
    for i, probability in enumerate(drawing.acceptance_probabilities):
        token = proposal.tokens[i]
        drawn_from = None if proposal.probs is None else proposal.probs[i]
        draft = 1.0 if drawn_from is None else drawn_from.number(0, token)
        target = Candidates(drawing.target_probs, drawing.columns).number(i, token)
        yield (
            f"  {token_text(token)!r:<14} target {target:.3f}  draft {draft:.3f}"
            f"{' (one-hot)' if drawn_from is None else ''}  acceptance {probability:.3f}  drawn {drawing.uniforms[i]:.3f}"
            f"  -> {'accepted' if i < verification.num_accepted else 'refused'}"
        )
    if verification.next_token is None:
        return
    added, drawn = repr(token_text(verification.next_token)), f"drawn {drawing.uniforms[-1]:.3f}"
    if drawing.residual is not None:
        yield f"  residual {_head(drawing.residual, drawing.columns, token_text)}  {drawn}  -> correction {added}"
    else:
        yield f"  target   {_head(drawing.target_probs[-1], drawing.columns, token_text)}  {drawn}  -> bonus {added}"


def _head(row: Probabilities, columns: Columns, token_text: Callable[[int], str]) -> str:
    """The most probable tokens of a row."""
    best = np.argsort(-row, kind="stable")[:_HEAD].tolist()
    shown = [f"{token_text(columns.token(place))!r} {row[place]:.3f}" for place in best if row[place] > 0]
    rest = np.count_nonzero(row) - len(shown)
    return "[" + ", ".join(shown) + (f", {rest:,} more" if rest else "") + "]"
