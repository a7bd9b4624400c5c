"""Faults of a speculative loop, each planted by replacing one function: what a certificate must find."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime import acceptance, verify
from runtime.acceptance import CoupledRule, RejectionRule
from runtime.candidates import Candidates
from runtime.decoder import Decoder
from runtime.generation import Generation
from runtime.noise import ExponentialNoise
from runtime.sampling import Sampler

Mutation = Callable[[pytest.MonkeyPatch], None]


def _flattened(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """The same tokens, with other probabilities."""
    weights = np.sqrt(rows)
    return weights / weights.sum(axis=-1, keepdims=True)


def wrong_residual(patch: pytest.MonkeyPatch) -> None:
    """The correction is drawn from the target's row, not from what is left of it."""
    patch.setattr(verify, "residual_distribution", lambda target_row, _: target_row)


def refused_token_left_in_the_residual(patch: pytest.MonkeyPatch) -> None:
    """The correction behind a looked-up token may be that token again."""
    patch.setattr(verify, "_one_hot", lambda _, like: np.zeros_like(like))


def q_from_another_array(patch: pytest.MonkeyPatch) -> None:
    """The draft's probabilities in the acceptance are not those its tokens were drawn from."""
    patch.setattr(
        acceptance,
        "verify",
        lambda tokens, probs, target, uniforms: verify.verify(
            tokens, [None if row is None else _flattened(row) for row in probs], target, uniforms
        ),
    )


def draft_row_with_other_filters(patch: pytest.MonkeyPatch) -> None:
    """The draft draws by other rules than the row it reports."""
    propose = RejectionRule.propose

    def mutated(rule: RejectionRule, logits: Candidates, history: Sequence[int], block: Sequence[int]) -> tuple[int, object]:
        row = propose(rule, logits, history, block)[1]
        assert row is not None
        return row.columns.token(verify.draw(_flattened(row.rows[0]), rule._random.random())), row

    patch.setattr(RejectionRule, "propose", mutated)


def rewind_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """One refused token stays in the caches."""

    def mutated(decoder: Decoder, length: int) -> None:
        del decoder.tokens[length + 1 :]

    patch.setattr(Decoder, "rewind_to", mutated)


def eos_run_past(patch: pytest.MonkeyPatch) -> None:
    """An end-of-text token ends the text only where its block ends with it."""
    commit = Generation._commit

    def mutated(generation: Generation, block: object) -> int:
        ends, tokens = generation._eos_token_ids, block.round.tokens[block.begin :]
        generation._eos_token_ids = ends if tokens[-1] in ends else frozenset()
        count = commit(generation, block)
        generation._eos_token_ids = ends
        return count

    patch.setattr(Generation, "_commit", mutated)


def history_without_the_block(patch: pytest.MonkeyPatch) -> None:
    """Penalties do not see the tokens of the block that stand before a row."""
    scores = Sampler.scores
    patch.setattr(
        Sampler, "scores", lambda sampler, logits, history, block: scores(sampler, logits, history, [history[-1]] * len(block))
    )


def accepting_too_much(patch: pytest.MonkeyPatch) -> None:
    """A token is accepted half as often again as it may be."""
    patch.setattr(verify, "acceptance_probability", lambda target, draft: min(1.0, 1.5 * target / draft))


def noise_without_the_position(patch: pytest.MonkeyPatch) -> None:
    """Coupled sampling uses the same noise at every position."""
    row = ExponentialNoise.row
    patch.setattr(ExponentialNoise, "row", lambda noise, _, size: row(noise, 0, size))


def draft_with_other_noise(patch: pytest.MonkeyPatch) -> None:
    """The draft's coupled choice is made with noise of its own, so that the two agree by chance only."""
    other, propose = ExponentialNoise(99), CoupledRule.propose

    def mutated(rule: CoupledRule, logits: Candidates, history: Sequence[int], block: Sequence[int]) -> tuple[int, None]:
        return propose(CoupledRule(rule.sampler, other), logits, history, block)

    patch.setattr(CoupledRule, "propose", mutated)


def choice_not_checked(patch: pytest.MonkeyPatch) -> None:
    """The last proposed token is taken without a look."""
    check = acceptance.verify_choices
    patch.setattr(
        acceptance, "verify_choices", lambda tokens, choices: check(tokens, [*choices[:-2], *tokens[-1:], choices[-1]])
    )


# Each with a word of the title of the check that must find it.
MUTATIONS: tuple[tuple[Mutation, str], ...] = (
    (wrong_residual, "3 tokens jointly, rejection"),
    (refused_token_left_in_the_residual, "rejection rule, drafter lookup"),
    (q_from_another_array, "3 tokens jointly, rejection"),
    (draft_row_with_other_filters, "first token, rejection"),
    (rewind_off_by_one, "cuts"),
    (rewind_off_by_one, "greedy"),
    (eos_run_past, "cuts"),
    (history_without_the_block, "3 tokens jointly, rejection"),
    (accepting_too_much, "first token, rejection"),
    (noise_without_the_position, "3 tokens jointly, coupled"),
    (draft_with_other_noise, "first token, coupled"),
    (choice_not_checked, "greedy"),
    (choice_not_checked, "coupled texts"),
)
