"""One round: what is fed to whom, in which pass, and what the result says."""

from collections.abc import Sequence

import numpy as np
import pytest

from runtime.decoder import Decoder
from runtime.drafters import Proposal
from runtime.sampling import SamplingParams, token_distributions
from runtime.speculation import Round, speculative_round
from runtime.verify import Verification, verify
from tests.fakes import FakeModel, greedy_text

PROMPT = [1, 2, 3]
SAMPLED = SamplingParams(temperature=1.1, top_p=0.9, repetition_penalty=1.4)


class ScriptedDrafter:
    """Proposes what it was told, and remembers what it was asked."""

    name = "scripted"
    passes = 0
    seconds = 0.0

    def __init__(self, tokens: Sequence[int] = (), probs: np.ndarray | None = None) -> None:
        self.proposal = Proposal(tuple(tokens), probs)
        self.asked: list[tuple[tuple[int, ...], int]] = []

    def propose(self, sequence: Sequence[int], num_tokens: int) -> Proposal:
        self.asked.append((tuple(sequence), num_tokens))
        return self.proposal

    def rewind_to(self, length: int) -> None:
        raise AssertionError("rewinding is the caller's")


def run(
    model: FakeModel,
    drafter: ScriptedDrafter,
    params: SamplingParams,
    *,
    cached: int = 0,
    num_draft_tokens: int = 4,
    random: np.random.Generator | None = None,
) -> tuple[Round, Decoder]:
    target = Decoder(model, 32, num_rows=5)
    if cached:
        target.forward(PROMPT[:cached], 1)
    model.calls.clear()
    random = np.random.default_rng(0) if random is None else random
    return speculative_round(target, drafter, PROMPT, num_draft_tokens, params, random), target


@pytest.mark.parametrize("cached", [0, 1, 2])
@pytest.mark.parametrize("k", [0, 1, 4])
def test_the_target_sees_what_it_lacks_and_the_proposal_in_one_pass(cached: int, k: int) -> None:
    model = FakeModel(seed=2)
    drafter = ScriptedDrafter([5, 6, 7, 8][:k])
    done, target = run(model, drafter, SamplingParams(), cached=cached)
    assert model.calls == [(cached, 3 - cached + k, k + 1)]
    assert target.past_length == 3 + k
    assert drafter.asked == [((1, 2, 3), 4)]
    assert done.target_probs.shape == (k + 1, 16)
    assert done.uniforms.shape == (k + 1,)


def test_with_nothing_to_propose_the_drafter_is_not_asked() -> None:
    model, drafter = FakeModel(seed=2), ScriptedDrafter([5, 6])
    done, _ = run(model, drafter, SamplingParams(), num_draft_tokens=0)
    assert drafter.asked == []
    assert (done.proposal, done.tokens, done.has_bonus) == (Proposal(), tuple(greedy_text(model, PROMPT, 1)), True)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(repetition_penalty=1.4), SAMPLED], ids=str)
def test_every_row_is_the_targets_distribution_at_its_place(params: SamplingParams) -> None:
    model, proposed = FakeModel(seed=2), [5, 6, 5, 1]
    done, _ = run(model, ScriptedDrafter(proposed), params, cached=2)
    for i, row in enumerate(done.target_probs):
        before = [*PROMPT, *proposed[:i]]
        assert np.array_equal(row, token_distributions(model.logits(before)[None], before, [], params)[0])


def test_the_round_judges_with_the_drafts_own_rows_and_its_own_uniforms() -> None:
    model, draft_rows = FakeModel(seed=2), np.full((2, 16), 1 / 16, np.float32)
    for seed in range(20):
        drafter = ScriptedDrafter([5, 6], draft_rows)
        done, _ = run(model, drafter, SAMPLED, random=np.random.default_rng(seed))
        assert np.array_equal(done.uniforms, np.random.default_rng(seed).random(3))
        expected = verify([5, 6], draft_rows, done.target_probs, done.uniforms)
        assert (done.verification.num_accepted, done.verification.next_token) == (expected.num_accepted, expected.next_token)
        assert done.proposal.probs is draft_rows


@pytest.mark.parametrize("num_right", range(5))
def test_greedy_rounds_give_the_targets_own_tokens(num_right: int) -> None:
    model = FakeModel(seed=2)
    text = greedy_text(model, PROMPT, 5)
    proposed = text[:num_right] + [(token + 1) % 16 for token in text[num_right:4]]
    done, _ = run(model, ScriptedDrafter(proposed), SamplingParams())
    assert done.tokens == tuple(text[: num_right + 1])
    assert done.verification.num_accepted == num_right
    assert done.has_bonus == (num_right == 4)


def test_a_round_commits_nothing() -> None:
    sequence = list(PROMPT)
    speculative_round(
        Decoder(FakeModel(), 32, num_rows=5), ScriptedDrafter([5]), sequence, 4, SAMPLED, np.random.default_rng(0)
    )
    assert sequence == PROMPT


@pytest.mark.parametrize(
    ("num_accepted", "tokens", "bonus"), [(0, (9,), False), (2, (5, 6, 9), False), (3, (5, 6, 7, 9), True)]
)
def test_tokens_of_a_round(num_accepted: int, tokens: tuple[int, ...], bonus: bool) -> None:
    verification = Verification(num_accepted, 9, (), None)
    done = Round(Proposal((5, 6, 7)), np.zeros((4, 16), np.float32), np.zeros(4), verification)
    assert (done.tokens, done.has_bonus) == (tokens, bonus)
