"""The acceptance rule of speculative decoding, as pure functions on arrays.

The draft proposed tokens d_0 .. d_{k-1}, each drawn from its own distribution draft_probs[i]; the target's distributions
for the same places, and for the one behind them, are target_probs[0] .. target_probs[k]. Going through them in order,
token d_i is accepted with probability min(1, target_probs[i, d_i] / draft_probs[i, d_i]). The first that is refused is
replaced by a draw from the residual, max(0, target_probs[i] - draft_probs[i]) normalised, and what follows it is dropped.
If none is refused, one more token is drawn from target_probs[k]. Each token then follows the target's own law, whatever
the draft proposed (Leviathan et al. 2023, theorem 1; Chen et al. 2023).

A proposal that was not drawn at all (a lookup) is one-hot: its draft probability is 1, so it is accepted with the target's
probability, and the residual is the target's row without it.

Where the target chooses a token itself, by its largest logit or with noise that both models share, there is nothing to
draw: a proposed token is accepted when it is the one chosen. Greedy text is the case without noise. The chance that two
coupled choices agree is at least (1 - d) / (1 + d), d being the total variation distance of the two rows, where the
rejection rule reaches 1 - d (Daliri, Musco & Suresh 2024, theorem 3).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .candidates import Columns

Probabilities = NDArray[np.floating]
_BLOCK = 512


@dataclass(frozen=True)
class Verification:
    """What the target made of a proposal.

    Attributes:
        num_accepted: Proposed tokens accepted, 0 to k; they are the first ones.
        next_token: The token behind them: the correction when num_accepted < k, the bonus otherwise. None where the sampling
            rules leave nothing that could stand there.
        drawing: What was drawn, and from what; None where the target chose by itself.
    """

    num_accepted: int
    next_token: int | None
    drawing: "Drawing | None" = None


@dataclass(frozen=True)
class Drawing:
    """The numbers behind a verification by the rejection rule.

    Attributes:
        target_probs: [k + 1, columns], as given to `verify`.
        uniforms: float [k + 1], as given to `verify`.
        acceptance_probabilities: float [min(num_accepted + 1, k)], one for each token that was judged.
        residual: [columns], what the correction was drawn from; None when nothing was refused.
        columns: What the columns of these stand for.
    """

    target_probs: Probabilities
    uniforms: Sequence[float] | NDArray[np.float64]
    acceptance_probabilities: tuple[float, ...]
    residual: Probabilities | None
    columns: Columns


def verify(
    draft_tokens: Sequence[int],
    draft_probs: Sequence[Probabilities | None] | None,
    target_probs: Probabilities,
    uniforms: Sequence[float] | NDArray[np.float64],
) -> Verification:
    """Judges a proposal by the target's distributions.

    Args:
        draft_tokens: [k], the proposal; k may be 0.
        draft_probs: k rows of [vocab_size], row i being the very distribution draft_tokens[i] was drawn from; None for a
            one-hot row, or for all of them.
        target_probs: [k + 1, vocab_size], row i being the target's distribution at the place of draft_tokens[i].
        uniforms: [k + 1] numbers from [0, 1): number i decides token i, which is accepted when it is below the acceptance
            probability; the last one draws the correction or the bonus.

    Returns:
        How many were accepted, and the token that follows them.

    Raises:
        ValueError: Shapes that do not fit each other, or a proposed token whose draft probability is 0.
    """
    k = len(draft_tokens)
    if len(target_probs) != k + 1 or len(uniforms) != k + 1 or (draft_probs is not None and len(draft_probs) != k):
        raise ValueError(
            f"A proposal of {k} tokens needs {k + 1} target rows and uniforms and {k} draft rows; found "
            f"{len(target_probs)}, {len(uniforms)} and {'none' if draft_probs is None else len(draft_probs)}."
        )
    judged: list[float] = []
    for i, token in enumerate(draft_tokens):
        drawn_from = None if draft_probs is None else draft_probs[i]
        draft_probability = 1.0 if drawn_from is None else float(drawn_from[token])
        judged.append(acceptance_probability(float(target_probs[i, token]), draft_probability))
        if uniforms[i] >= judged[-1]:
            draft_row = _one_hot(token, target_probs[i]) if drawn_from is None else drawn_from
            residual = residual_distribution(target_probs[i], draft_row)
            drawing = Drawing(target_probs, uniforms, tuple(judged), residual, Columns(target_probs.shape[1]))
            return Verification(i, draw(residual, uniforms[k]), drawing)
    drawing = Drawing(target_probs, uniforms, tuple(judged), None, Columns(target_probs.shape[1]))
    return Verification(k, draw(target_probs[k], uniforms[k]), drawing)


def verify_choices(draft_tokens: Sequence[int], target_choices: Sequence[int]) -> Verification:
    """Judges a proposal by the tokens the target chooses itself.

    Args:
        draft_tokens: [k], the proposal; k may be 0.
        target_choices: [k + 1], choice i being the target's for the place of draft_tokens[i].

    Returns:
        How many first tokens are the target's own choices, and its choice behind them.

    Raises:
        ValueError: Not one choice more than there are tokens.
    """
    k = len(draft_tokens)
    if len(target_choices) != k + 1:
        raise ValueError(f"A proposal of {k} tokens needs {k + 1} choices of the target; found {len(target_choices)}.")
    refused = (i for i in range(k) if draft_tokens[i] != target_choices[i])
    num_accepted = next(refused, k)
    return Verification(num_accepted, int(target_choices[num_accepted]))


def acceptance_probability(target: float, draft: float) -> float:
    """Returns min(1, target / draft) for the probabilities the two models give to one proposed token.

    Raises:
        ValueError: The draft probability is not above 0: such a token cannot have been drawn from the draft.
    """
    if not draft > 0:
        raise ValueError(f"A proposed token has draft probability {draft}: it was not drawn from the row it came with.")
    return min(1.0, target / draft)


def residual_distribution(target_row: Probabilities, draft_row: Probabilities) -> Probabilities:
    """Returns max(0, target - draft), normalised: what a correction is drawn from.

    Args:
        target_row: [vocab_size], the target's distribution.
        draft_row: [vocab_size], the distribution the refused token was drawn from.

    Returns:
        [vocab_size], summing to 1. Where the two rows are equal the residual is empty, and no token is ever refused;
        should rounding refuse one all the same, the target's row is the limit of the rule and is returned.
    """
    residual = np.maximum(target_row - draft_row, 0)
    total = residual.sum(dtype=np.float64)
    return residual / residual.dtype.type(total) if total > 0 else target_row


def draw(probabilities: Probabilities, uniform: float) -> int:
    """Returns the token at which the cumulative probability first exceeds `uniform` (inverse transform sampling).

    Args:
        probabilities: [vocab_size], not negative; its sum stands for 1, so rounding in it is harmless.
        uniform: A number from [0, 1).

    Returns:
        A token id whose probability is above 0.
    """
    # First the block of tokens, then the token in it: summing blocks is much faster than accumulating a whole vocabulary.
    whole = len(probabilities) // _BLOCK * _BLOCK
    blocks = probabilities[:whole].reshape(-1, _BLOCK).sum(axis=1, dtype=np.float64)
    ends = np.cumsum(np.append(blocks, probabilities[whole:].sum(dtype=np.float64)))
    point = uniform * ends[-1]
    block = int(np.searchsorted(ends, point, side="right"))
    if block == len(ends):  # uniform * total rounded up to the total: the last token that can be drawn at all
        return int(np.flatnonzero(probabilities)[-1])
    start = block * _BLOCK
    inside = probabilities[start : start + _BLOCK]
    cumulative = np.cumsum(inside, dtype=np.float64) + (ends[block - 1] if block else 0.0)
    token = int(np.searchsorted(cumulative, point, side="right"))
    # Likewise where the two ways of summing a block round differently at its end.
    return start + (token if token < len(inside) else int(np.flatnonzero(inside)[-1]))


def _one_hot(token: int, like: Probabilities) -> Probabilities:
    row = np.zeros_like(like)
    row[token] = 1
    return row
