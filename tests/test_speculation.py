"""One round: what is fed to whom, in which pass, and what the result says."""

from collections.abc import Sequence

import numpy as np
import pytest

from runtime.acceptance import AcceptanceRule, CoupledRule, GreedyRule, Proposal, RejectionRule
from runtime.candidates import Candidates
from runtime.decoder import Decoder
from runtime.noise import ExponentialNoise
from runtime.sampling import Sampler
from runtime.sampling_params import SamplingParams
from runtime.speculation import Round, speculative_round
from runtime.verify import Verification, verify
from tests.fakes import FakeModel, greedy_text, ruled

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


def sampler(params: SamplingParams) -> Sampler:
    return Sampler(params, prompt_length=len(PROMPT))


def run(
    model: FakeModel,
    drafter: ScriptedDrafter,
    rule: AcceptanceRule | None = None,
    *,
    cached: int = 0,
    num_draft_tokens: int = 4,
) -> tuple[Round, Decoder]:
    target = Decoder(model, 32, num_rows=5)
    if cached:
        target.forward(PROMPT[:cached], 1)
    model.calls.clear()
    rule = rule or GreedyRule(sampler(SamplingParams()))
    return speculative_round(target, drafter, PROMPT, num_draft_tokens, rule), target


@pytest.mark.parametrize("cached", [0, 1, 2])
@pytest.mark.parametrize("k", [0, 1, 4])
def test_the_target_sees_what_it_lacks_and_the_proposal_in_one_pass(cached: int, k: int) -> None:
    model = FakeModel(seed=2)
    drafter = ScriptedDrafter([5, 6, 7, 8][:k])
    done, target = run(model, drafter, cached=cached)
    assert model.calls == [(cached, 3 - cached + k, k + 1)]
    assert target.tokens == [1, 2, 3, 5, 6, 7, 8][: 3 + k]
    assert drafter.asked == [((1, 2, 3), 4)]
    assert done.logits.rows.shape == (k + 1, 16)


def test_with_nothing_to_propose_the_drafter_is_not_asked() -> None:
    model, drafter = FakeModel(seed=2), ScriptedDrafter([5, 6])
    done, _ = run(model, drafter, num_draft_tokens=0)
    assert drafter.asked == []
    assert (done.proposal, done.tokens) == (Proposal(), tuple(greedy_text(model, PROMPT, 1)))


@pytest.mark.parametrize("cached", [0, 2])
def test_every_row_is_the_targets_at_its_place(cached: int) -> None:
    model, proposed = FakeModel(seed=2), [5, 6, 5, 1]
    done, _ = run(model, ScriptedDrafter(proposed), cached=cached)
    expected = [model.logits([*PROMPT, *proposed[:i]]) for i in range(5)]
    assert np.array_equal(done.logits.rows, expected)


def test_the_round_judges_with_the_drafts_own_rows_and_its_own_uniforms() -> None:
    model, draft_rows, accepted = FakeModel(seed=2), np.full((2, 16), 0.02, np.float32), set()
    proposed = greedy_text(model, PROMPT, 2)
    draft_rows[[0, 1], proposed] = 0.7
    drawn_from = [Candidates.whole(row[None]) for row in draft_rows]
    for seed in range(20):
        rule = RejectionRule(sampler(SAMPLED), np.random.default_rng(seed))
        done, _ = run(model, ScriptedDrafter(proposed, drawn_from), rule)
        befores = [[*PROMPT, *proposed[:i]] for i in range(3)]
        target_probs = np.stack([ruled(sampler(SAMPLED).distributions, model.logits(one)[None], one, [])[0] for one in befores])
        expected = verify(proposed, draft_rows, target_probs, np.random.default_rng(seed).random(3))
        assert (done.verification.num_accepted, done.verification.next_token) == (expected.num_accepted, expected.next_token)
        assert np.array_equal(done.verification.drawing.target_probs, target_probs)
        assert done.proposal.probs is drawn_from
        accepted.add(expected.num_accepted)
    assert len(accepted) > 1


@pytest.mark.parametrize("num_right", range(5))
def test_greedy_rounds_give_the_targets_own_tokens(num_right: int) -> None:
    model = FakeModel(seed=2)
    text = greedy_text(model, PROMPT, 5)
    proposed = text[:num_right] + [(token + 1) % 16 for token in text[num_right:4]]
    done, _ = run(model, ScriptedDrafter(proposed))
    assert done.tokens == tuple(text[: num_right + 1])
    assert done.verification == Verification(num_right, text[num_right])


@pytest.mark.parametrize("num_right", range(4))
@pytest.mark.parametrize("cached", [0, 2])
def test_coupled_rounds_give_the_tokens_of_the_places_own_noise(num_right: int, cached: int) -> None:
    model, noise, text = FakeModel(seed=2), ExponentialNoise(4), []
    for place in range(3, 7):
        before = [*PROMPT, *text]
        weights = ruled(sampler(SAMPLED).weights, model.logits(before)[None], before, [])[0]
        text.append(int((weights / noise.row(place, 16)).argmax()))
    proposed = text[:num_right] + [(token + 1) % 16 for token in text[num_right:3]]
    done, _ = run(model, ScriptedDrafter(proposed), CoupledRule(sampler(SAMPLED), ExponentialNoise(4)), cached=cached)
    assert done.tokens == tuple(text[: num_right + 1])
    assert done.verification == Verification(num_right, text[num_right])


def test_a_round_commits_nothing() -> None:
    sequence = list(PROMPT)
    rule = RejectionRule(sampler(SAMPLED), np.random.default_rng(0))
    speculative_round(Decoder(FakeModel(), 32, num_rows=5), ScriptedDrafter([5]), sequence, 4, rule)
    assert sequence == PROMPT


@pytest.mark.parametrize(("num_accepted", "tokens"), [(0, (9,)), (2, (5, 6, 9)), (3, (5, 6, 7, 9))])
def test_tokens_of_a_round(num_accepted: int, tokens: tuple[int, ...]) -> None:
    done = Round(Proposal((5, 6, 7)), Candidates.whole(np.zeros((4, 16), np.float32)), Verification(num_accepted, 9))
    assert done.tokens == tokens
