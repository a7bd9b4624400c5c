"""A draft model: its tokens are chosen by the rule from its own rows, and what it has not read hurts nobody but itself."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.acceptance import AcceptanceRule, CoupledRule, GreedyRule, Proposal, RejectionRule
from runtime.decoder import Cancelled, Decoder
from runtime.drafters import ModelDrafter
from runtime.errors import LogitsError
from runtime.noise import ExponentialNoise
from runtime.sampling import Sampler
from runtime.sampling_params import SamplingParams
from runtime.verify import draw
from tests.fakes import FakeModel, greedy_text, ruled

SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.3)
COUPLED = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.3, acceptance="coupled", seed=3)
UNIFORMS = (0.1, 0.9, 0.4, 0.7, 0.2, 0.6)


class Scripted:
    """Gives prepared uniforms in place of random ones, and refuses to give more."""

    def __init__(self, uniforms: Sequence[float]) -> None:
        self.left = list(uniforms)

    def random(self) -> float:
        return self.left.pop(0)


def rule_of(params: SamplingParams, uniforms: Sequence[float] = UNIFORMS, prompt_length: int = 3) -> AcceptanceRule:
    sampler = Sampler(params, prompt_length=prompt_length)
    if params.greedy:
        return GreedyRule(sampler)
    if params.acceptance == "coupled":
        return CoupledRule(sampler, ExponentialNoise(params.seed))
    return RejectionRule(sampler, Scripted(uniforms))


def model_drafter(
    model: FakeModel,
    params: SamplingParams = SAMPLED,
    *,
    uniforms: Sequence[float] = UNIFORMS,
    max_length: int = 64,
    target_vocab_size: int = 16,
    end_token_ids: Sequence[int] = (),
) -> ModelDrafter:
    decoder = Decoder(model, max_length, num_rows=1)
    rule = rule_of(params, uniforms)
    return ModelDrafter(decoder, rule, target_vocab_size=target_vocab_size, end_token_ids=frozenset(end_token_ids))


@pytest.mark.parametrize("params", [SAMPLED, SamplingParams(temperature=0.5), SamplingParams(temperature=2.0, top_k=5)])
def test_every_token_was_drawn_from_the_row_that_comes_with_it(params: SamplingParams) -> None:
    model, sequence, uniforms = FakeModel(seed=3), [1, 2, 3], [0.05, 0.95, 0.5, 0.31]
    proposal = model_drafter(model, params, uniforms=uniforms).propose(sequence, 4)
    assert len(proposal.tokens) == 4
    assert proposal.probs is not None
    assert {(row.rows.shape, row.rows.dtype, row.columns.count) for row in proposal.probs} == {((1, 16), np.dtype("f4"), 16)}
    for i, (token, uniform) in enumerate(zip(proposal.tokens, uniforms, strict=True)):
        before = [*sequence, *proposal.tokens[:i]]
        row = ruled(Sampler(params, prompt_length=3).distributions, model.logits(before)[None], before, [])[0]
        assert np.array_equal(proposal.probs[i].rows[0], row)
        assert token == draw(row, uniform)


def test_coupled_tokens_are_chosen_with_the_noise_of_their_place() -> None:
    model, sequence = FakeModel(seed=3), [1, 2, 3]
    proposal = model_drafter(model, COUPLED).propose(sequence, 4)
    assert (len(proposal.tokens), proposal.probs) == (4, None)
    noise = ExponentialNoise(COUPLED.seed)
    for i, token in enumerate(proposal.tokens):
        before = [*sequence, *proposal.tokens[:i]]
        weights = ruled(Sampler(COUPLED, prompt_length=3).weights, model.logits(before)[None], before, [])[0]
        assert token == (weights / noise.row(len(before), 16)).argmax()


def test_greedy_proposals_are_one_hot_and_draw_nothing() -> None:
    model = FakeModel(seed=3)
    proposal = model_drafter(model, SamplingParams(), uniforms=[]).propose([1, 2, 3], 4)
    assert proposal == Proposal(tuple(greedy_text(model, [1, 2, 3], 4)), None)


def test_the_draft_feeds_only_what_it_has_not_cached() -> None:
    model = FakeModel(seed=3)
    drafter = model_drafter(model, SamplingParams())
    sequence = [1, 2, 3]
    proposal = drafter.propose(sequence, 3)
    assert model.calls == [(0, 3, 1), (3, 1, 1), (4, 1, 1)]
    # All accepted, and a bonus: the last proposed token was never fed to the draft, nor the bonus.
    sequence = [*sequence, *proposal.tokens, 9]
    drafter.rewind_to(len(sequence) - 1)
    assert drafter.propose(sequence, 2).tokens == tuple(greedy_text(model, sequence, 2))
    assert model.calls[3:] == [(5, 2, 1), (7, 1, 1)]
    # All refused: the correction stands where the first proposed token was.
    sequence = [*sequence, 4]
    drafter.rewind_to(len(sequence) - 1)
    assert drafter.propose(sequence, 1).tokens == tuple(greedy_text(model, sequence, 1))
    assert model.calls[5:] == [(7, 1, 1)]
    assert drafter.passes == 6
    assert drafter.seconds > 0


def test_proposals_end_behind_an_end_of_text_token() -> None:
    model = FakeModel(seed=3)
    text = greedy_text(model, [1, 2, 3], 5)
    first = text.index(text[2])
    proposal = model_drafter(model, SamplingParams(), end_token_ids=[text[2]]).propose([1, 2, 3], 5)
    assert proposal.tokens == tuple(text[: first + 1])
    assert len(model.calls) == first + 1


@pytest.mark.parametrize(("max_length", "proposed"), [(2, 0), (3, 1), (4, 2), (5, 3), (6, 4), (7, 4)])
def test_a_draft_whose_context_ends_proposes_what_fits(max_length: int, proposed: int) -> None:
    # The last token proposed need not be fed, so three tokens of room for three tokens of text still give one.
    model = FakeModel(seed=3)
    for params in (SAMPLED, COUPLED, SamplingParams()):
        proposal = model_drafter(model, params, max_length=max_length).propose([1, 2, 3], 4)
        assert len(proposal.tokens) == proposed
        assert (proposal.probs is None) == (params != SAMPLED or proposed == 0)


@pytest.mark.parametrize("params", [SAMPLED, COUPLED, SamplingParams()], ids=["sampled", "coupled", "greedy"])
def test_a_wider_draft_is_cut_to_the_targets_vocabulary(params: SamplingParams) -> None:
    wide, narrow = FakeModel(20, seed=6), FakeModel(12, seed=6)
    proposal = model_drafter(wide, params, target_vocab_size=12).propose([1, 2, 3], 4)
    same = model_drafter(narrow, params, target_vocab_size=12).propose([1, 2, 3], 4)
    assert proposal.tokens == same.tokens
    if proposal.probs is not None:
        assert np.array_equal([row.rows for row in proposal.probs], [row.rows for row in same.probs])
        assert {(row.rows.shape, row.columns.count) for row in proposal.probs} == {((1, 12), 12)}


@pytest.mark.parametrize("params", [SAMPLED, COUPLED, SamplingParams()], ids=["sampled", "coupled", "greedy"])
def test_a_narrower_draft_proposes_what_it_has(params: SamplingParams) -> None:
    model = FakeModel(12, seed=6)
    proposal = model_drafter(model, params, target_vocab_size=20).propose([1, 2, 3], 4)
    own = model_drafter(model, params, target_vocab_size=12).propose([1, 2, 3], 4)
    assert proposal.tokens == own.tokens
    if proposal.probs is not None:
        assert np.array_equal([row.rows for row in proposal.probs], [row.rows for row in own.probs])
        assert {(row.rows.shape, row.columns.count) for row in proposal.probs} == {((1, 12), 12)}


@pytest.mark.parametrize("token", [12, 15])
def test_a_narrower_draft_proposes_nothing_behind_a_token_that_only_the_target_has(token: int) -> None:
    model = FakeModel(12, seed=6)
    drafter = model_drafter(model, SamplingParams(), target_vocab_size=20)
    assert len(drafter.propose([1, 2, 3], 2).tokens) == 2
    calls = len(model.calls)
    for sequence in ([1, token, 3], [1, token, 3, 4]):
        drafter.rewind_to(1)
        assert drafter.propose(sequence, 4) == Proposal()
    assert len(model.calls) == calls
    assert drafter.propose([1, 11, 3], 4).tokens == tuple(greedy_text(model, [1, 11, 3], 4))


def test_a_draft_that_the_rules_leave_no_token_proposes_what_it_has() -> None:
    # The target could go on: it has tokens that the draft does not.
    model = FakeModel(4, seed=6)
    params = SamplingParams(bad_words=[[0], [1], [2]])
    text = [3, 3]
    for words, proposed in (([(0,), (1,), (2,), (3,)], 0), ([(0,), (1,), (2,), (3, 3, 3)], 1)):
        rule = GreedyRule(Sampler(params, prompt_length=2, bad_words=words))
        drafter = ModelDrafter(Decoder(model, 20, num_rows=1), rule, target_vocab_size=8, end_token_ids=frozenset())
        sequence = [1, *text[1:]]
        assert drafter.propose(sequence, 4) == Proposal((3,) * proposed)
        assert drafter.passes == proposed + 1


@pytest.mark.parametrize("failing", range(1, 4))
def test_a_draft_that_fails_goes_on_from_what_is_rewound(failing: int) -> None:
    model = FakeModel(seed=3)
    drafter = model_drafter(model, SamplingParams())
    model.broken_at = 2 + failing - 1
    with pytest.raises(LogitsError):
        drafter.propose([1, 2, 3], 4)
    model.broken_at = None
    drafter.rewind_to(2)
    assert drafter.propose([1, 2, 3], 4).tokens == tuple(greedy_text(model, [1, 2, 3], 4))


def test_a_cancelled_draft_says_so() -> None:
    class Set:
        def is_set(self) -> bool:
            return True

    drafter = model_drafter(FakeModel(seed=3), SamplingParams())
    drafter._decoder.begin([1, 2, 3], Set())
    with pytest.raises(Cancelled):
        drafter.propose([1, 2, 3], 4)


# --- gaps -------------------------------------------------------------------------------------------------------------

TEXT = [(7 * place * place + 3 * place) % 16 for place in range(80)]


def with_a_gap(model: FakeModel) -> ModelDrafter:
    """A drafter that has read the tokens before 10 and those from 22 on, up to 29."""
    drafter = model_drafter(model, SamplingParams(), max_length=128)
    drafter.logits(TEXT[:10], [])
    drafter.skip_to_last(8, TEXT[:30])
    assert drafter.missing(TEXT[:30], []) == 8
    assert drafter.propose(TEXT[:30], 3).tokens == tuple(greedy_text(model, TEXT[:10] + TEXT[22:30], 3))
    assert model.calls == [(0, 10, 1), (10, 8, 1), (18, 1, 1), (19, 1, 1)]
    drafter.rewind_to(29)
    model.calls.clear()
    return drafter


def test_behind_a_gap_the_model_goes_on_from_what_it_has_read() -> None:
    model = FakeModel(seed=3)
    drafter = with_a_gap(model)
    assert drafter.missing(TEXT[:31], [5]) == 3
    assert drafter.propose(TEXT[:31], 2).tokens == tuple(greedy_text(model, TEXT[:10] + TEXT[22:31], 2))
    assert model.calls[0] == (17, 2, 1)


@pytest.mark.parametrize("num_tokens", [20, 21, 100])
def test_there_is_no_gap_where_no_more_is_missing(num_tokens: int) -> None:
    model = FakeModel(seed=3)
    drafter = model_drafter(model, SamplingParams())
    drafter.logits(TEXT[:10], [])
    drafter.skip_to_last(num_tokens, TEXT[:30])
    assert drafter.missing(TEXT[:30], []) == 20
    assert drafter.propose(TEXT[:30], 2).tokens == tuple(greedy_text(model, TEXT[:30], 2))


@pytest.mark.parametrize(
    ("length", "missing", "read"),
    [
        (40, 11, 17),  # nothing to forget
        (25, 15, 13),
        (23, 17, 11),
        (22, 18, 10),  # all behind the gap
        (21, 30, 10),  # into the gap: it is forgotten
        (11, 30, 10),
        (10, 30, 10),
        (9, 31, 9),
        (4, 36, 4),
        (0, 40, 0),
    ],
)
def test_a_rewind_across_a_gap_forgets_it(length: int, missing: int, read: int) -> None:
    model = FakeModel(seed=3)
    drafter = with_a_gap(model)
    for _ in range(2):
        drafter.rewind_to(length)
    assert drafter.missing(TEXT[:40], []) == missing
    tail = TEXT[:10] + TEXT[22:40] if missing < 20 else TEXT[:40]
    assert drafter.propose(TEXT[:40], 3).tokens == tuple(greedy_text(model, tail, 3))
    assert model.calls[0] == (read, missing, 1)


def test_a_second_gap_takes_the_place_of_the_first() -> None:
    model = FakeModel(seed=3)
    drafter = with_a_gap(model)
    drafter.skip_to_last(5, TEXT[:60])
    assert drafter.missing(TEXT[:60], []) == 5
    assert drafter.propose(TEXT[:60], 3).tokens == tuple(greedy_text(model, TEXT[:10] + TEXT[55:60], 3))
    drafter.rewind_to(50)
    assert drafter.propose(TEXT[:60], 3).tokens == tuple(greedy_text(model, TEXT[:60], 3))


def test_a_second_gap_that_is_never_filled() -> None:
    model = FakeModel(seed=3)
    drafter = with_a_gap(model)
    drafter.skip_to_last(5, TEXT[:60])
    drafter.skip_to_last(5, TEXT[:75])
    drafter.rewind_to(74)
    assert drafter.propose(TEXT[:75], 3).tokens == tuple(greedy_text(model, TEXT[:10] + TEXT[70:75], 3))


@pytest.mark.parametrize(("text", "kept"), [(TEXT, 10), ([4] * 80, 17), (TEXT[:9] + [3] * 70, 17)], ids=["10", "all", "run"])
def test_the_next_text_keeps_what_is_a_beginning_of_it(text: list[int], kept: int) -> None:
    """What the cache holds was computed from just the tokens it holds, so it may serve where these come in a row."""
    model = FakeModel(seed=3)
    drafter = model_drafter(model, SamplingParams(), max_length=128)
    drafter.logits(text[:10], [])
    drafter.skip_to_last(8, text[:30])
    drafter.propose(text[:30], 3)
    drafter.rewind_to(29)
    decoder = drafter._decoder
    decoder.begin(text[:50], None)
    assert decoder.past_length == kept
    model.calls.clear()
    later = ModelDrafter(decoder, rule_of(SamplingParams()), target_vocab_size=16, end_token_ids=frozenset())
    assert later.propose(text[:50], 3).tokens == tuple(greedy_text(model, text[:50], 3))
    assert model.calls[0] == (kept, 50 - kept, 1)


def kept_before_a_gap(positions: list[int]) -> list[int]:
    return [position for place, position in enumerate(positions) if position == place]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.integers(1, 12)),
        st.tuples(st.just("ask"), st.lists(st.integers(0, 15), max_size=5)),
        st.tuples(st.just("skip"), st.integers(1, 9)),
        st.tuples(st.just("rewind"), st.integers(0, 100)),
    ),
    min_size=5,
    max_size=30,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(steps)
def test_gaps_and_rewinds_in_any_order(script: list[tuple[str, object]]) -> None:
    """Against a list of the places that are read, which is searched anew for every question."""
    model = FakeModel(seed=3, context_length=1000)
    drafter = model_drafter(model, SamplingParams(), max_length=1000)
    text, read, reached = [1, 2, 3], [], 0
    for step, argument in script:
        if step == "grow":
            text = text + [(len(text) * len(text) + place) % 16 for place in range(argument)]
        elif step == "skip":
            drafter.skip_to_last(argument, text)
            if len(text) - reached > argument:
                read, reached = kept_before_a_gap(read), len(text) - argument
        elif step == "ask":
            full = [*text, *argument]
            assert drafter.missing(text, argument) == len(full) - reached
            logits = drafter.logits(text, argument)
            read, reached = [*read, *range(reached, len(full))], len(full)
            assert np.array_equal(logits.rows[0], model.logits([full[position] for position in read]))
        if step in ("ask", "rewind"):
            length = len(text) - 1 if step == "ask" else min(argument, len(text) - 1)
            drafter.rewind_to(length)
            before, behind = kept_before_a_gap(read), [p for place, p in enumerate(read) if p != place]
            gap_end = behind[0] if behind else reached if reached > len(read) else 0
            if length < gap_end:
                read = [position for position in before if position < length]
                reached = len(read)
            else:
                read = [position for position in read if position < length]
                reached = max(gap_end, min(reached, length))
