"""Whatever pays: texts are the target's own whatever is proposed, and what a round costs is what the policy is told."""

import itertools
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from runtime.acceptance import GreedyRule, Proposal
from runtime.candidates import Candidates
from runtime.decoder import Decoder
from runtime.drafters import AdaptiveDrafter, Drafter, LookupDrafter, ModelDrafter
from runtime.drafters.adaptive import _confidence_kind
from runtime.generator import Generator
from runtime.pass_costs import PassCosts
from runtime.sampling import Sampler
from runtime.sampling_params import SamplingParams
from tests.drafters.test_hybrid import (
    FALSE_ALARM,
    FREE,
    HISTORY,
    UNKNOWN,
    MixedWorld,
    all_proposals,
    chi_square,
    patterns,
    with_costs,
)
from tests.fakes import FakeModel, fake_generator, greedy_text
from tests.test_acceptance import SMALL_RULES, Text, check_law
from tests.test_guard import TABLES
from tests.test_session import facts, read

# Here a token is worth it only where all of the proposal is expected to be accepted with 0.23 at least.
CHOOSY = PassCosts(((1, 10.0), (2, 12.3)), ((1, 1e-6),))


def adaptive(costs: PassCosts) -> object:
    def make(lookup: LookupDrafter, model: ModelDrafter) -> Drafter:
        drafter = AdaptiveDrafter(lookup, model, costs, max_slowdown=1.0)
        drafter.expect_end(10_000)
        return drafter

    return make


# --- the law ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("costs", [FREE, CHOOSY], ids=["all", "choosy"])
@pytest.mark.parametrize("history", [HISTORY, UNKNOWN], ids=["known", "unknown"])
@pytest.mark.parametrize("name", ["plain", "penalty", "filters", "presence-frequency"])
def test_what_is_worth_proposing_leaves_the_law_the_targets_own(name: str, history: Text, costs: PassCosts) -> None:
    world = MixedWorld(SMALL_RULES[name], 4, 9)
    check_law(world, history, 3, all_proposals(world, history, 3, adaptive(costs)))


def test_the_enumeration_sees_proposals_of_all_kinds() -> None:
    world = MixedWorld({}, 4, 9)
    assert {"DDD", "DLL", "DDL"} <= patterns(all_proposals(world, UNKNOWN, 3, adaptive(FREE))).keys()
    found = patterns(all_proposals(world, UNKNOWN, 3, adaptive(CHOOSY)))
    assert found.total() == pytest.approx(1)
    assert found.keys() == {"D", "DD", "DDD"}  # what was drawn before decides whether there is more
    assert min(found.values()) > 0.05


def drop_what_is_improbable(patch: pytest.MonkeyPatch) -> None:
    """A drawn token is looked at, and not proposed where the draft itself thought little of it."""
    choose = ModelDrafter.choose

    def mutated(drafter: ModelDrafter, logits: Candidates, sequence: Sequence[int], block: Sequence[int]) -> object:
        drafted = choose(drafter, logits, sequence, block)
        return None if drafted is None or drafted.row.number(0, drafted.token) < 0.3 else drafted

    patch.setattr(ModelDrafter, "choose", mutated)


def test_a_token_that_is_dropped_for_what_it_is_changes_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proof that the law tests would tell: the drafter as it is drops none."""
    drop_what_is_improbable(monkeypatch)
    world = MixedWorld({}, 4, 9)
    with pytest.raises(AssertionError):
        check_law(world, UNKNOWN, 3, all_proposals(world, UNKNOWN, 3, adaptive(FREE)))
    assert chi_square("auto", {"temperature": 1.0})[0] < FALSE_ALARM


@pytest.mark.parametrize("rules", [{"temperature": 1.0}, {"temperature": 1.6, "top_k": 3, "repetition_penalty": 1.5}], ids=str)
@pytest.mark.parametrize("costs", [FREE, CHOOSY], ids=["all", "choosy"])
def test_sampled_text_follows_the_targets_joint_law(rules: dict[str, float], costs: PassCosts) -> None:
    p, counted = chi_square("auto", rules, costs=costs, num_draft_tokens=3)
    assert p > FALSE_ALARM
    assert 0.3 < counted["accepted"] / counted["proposed"] < 0.95
    if costs is FREE:
        assert 0.3 < counted["drafted"] < counted["proposed"] - 0.3
    else:
        assert 0.1 < counted["proposed"] < chi_square("auto", rules, 50, num_draft_tokens=3)[1]["proposed"]


# --- texts are those without a draft ----------------------------------------------------------------------------------

RULES = {
    "greedy": {},
    "coupled": {"temperature": 0.9, "seed": 6, "acceptance": "coupled"},
    "coupled-rules": {"temperature": 0.9, "seed": 2, "acceptance": "coupled", "top_p": 0.9, "repetition_penalty": 1.1},
}
PROMPTS = ([1, 2, 3, 1, 2], [9], [*range(8), *range(8)], [5, 5, 5, 5, 9, 1, 2, 3] * 5)
LENGTH = 90
every_rule = pytest.mark.parametrize("rule", RULES)
every_drafter = pytest.mark.parametrize("drafter", ["auto", "hybrid"])
every_table = pytest.mark.parametrize("table", ["qwen", "flat", "smollm2"])


def generator_of(table: str = "flat", noise: float = 1.0, **settings: object) -> Generator:
    """Texts that repeat themselves sometimes, and a draft that agrees sometimes."""
    target = FakeModel(seed=1, period=8, sharpness=1.5, context_length=256)
    draft = FakeModel(seed=1, period=8, sharpness=1.5, noise=noise, context_length=256)
    return with_costs(fake_generator(target, draft, **settings), TABLES[table])


def without_order(table: str = "flat", noise: float = 1.0) -> Generator:
    """Texts that do not repeat themselves, so that it is the draft that is asked."""
    target, draft = FakeModel(seed=1, context_length=256), FakeModel(seed=1, noise=noise, context_length=256)
    return with_costs(fake_generator(target, draft), TABLES[table])


def params_of(rule: str, **changes: object) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": LENGTH, "logprobs": 1, **RULES[rule], **changes})


@every_rule
@every_drafter
@every_table
def test_texts_are_those_without_a_draft(rule: str, drafter: str, table: str) -> None:
    generator, plain = generator_of(table), generator_of(table)
    session, proposed, refused = generator.session(), 0, 0
    for number, prompt in enumerate([*PROMPTS, PROMPTS[2][:5], PROMPTS[0]]):
        params = params_of(rule)
        expected = facts(plain.generate(prompt, params, drafter="off"))
        assert facts(generator.generate(prompt, params, drafter=drafter)) == expected
        if number % 2:  # a text in between, left half-way
            list(itertools.islice(session.stream([*prompt[:3], 7, 8], params, drafter="auto"), number))
        _, result = read(session, session.stream(prompt, params, drafter=drafter))
        assert facts(result) == expected
        proposed += result.stats.proposed_tokens
        refused += result.stats.proposed_tokens - result.stats.accepted_tokens
    assert 0 < refused < proposed


@every_rule
@every_drafter
def test_texts_that_are_cut_are_those_without_a_draft(rule: str, drafter: str) -> None:
    text = generator_of().generate(PROMPTS[2], params_of(rule), drafter="off")
    inside = 0
    for place in range(0, 40, 3):
        for ends, eos in (
            ({"stop_token_ids": [text.token_ids[place]]}, ()),
            ({"stop": [text.text[place : place + 2]], "include_stop": True}, ()),
            ({}, [text.token_ids[place]]),
            ({"max_new_tokens": place + 1}, ()),
        ):
            params = params_of(rule, **ends)
            plain = generator_of(eos=eos).generate(PROMPTS[2], params, drafter="off")
            result = generator_of(eos=eos).generate(PROMPTS[2], params, drafter=drafter)
            assert facts(result) == facts(plain)
            inside += result.stats.rounds < len(result.token_ids)
    assert inside > 5


@every_rule
@every_drafter
@pytest.mark.parametrize("lengths", [[1] * 6 + [LENGTH - 6], [30, 1, LENGTH - 31], [5, 17, 40, LENGTH - 62]], ids=str)
def test_a_text_that_goes_on_is_the_text_without_a_draft(rule: str, drafter: str, lengths: list[int]) -> None:
    plain = generator_of().generate(PROMPTS[3], params_of(rule), drafter="off")
    session = generator_of().session()
    for number, length in enumerate(lengths):
        params = params_of(rule, max_new_tokens=length)
        _, result = read(session, session.resume(length) if number else session.stream(PROMPTS[3], params, drafter=drafter))
    assert facts(result) == facts(plain)


@every_rule
@every_drafter
def test_a_text_cancelled_in_the_middle_of_a_round_goes_on(rule: str, drafter: str) -> None:
    params, ends = params_of(rule, max_new_tokens=40), set()
    plain = without_order().generate(PROMPTS[3], params, drafter="off")
    for num_passes in range(1, 20):
        generator, cancel, ran = without_order(), threading.Event(), itertools.count(1)

        def run_down(cancel: threading.Event = cancel, ran: object = ran, last: int = num_passes) -> None:
            if next(ran) == last:
                cancel.set()

        generator.target.on_pass = generator.draft.on_pass = run_down
        session = generator.session()
        _, cut = read(session, session.stream(PROMPTS[3], params, drafter=drafter, cancel=cancel))
        assert cut.finish_reason == "cancelled"
        ends.add(len(cut.token_ids))
        _, result = read(session, session.resume(40 - len(cut.token_ids)))
        assert facts(result) == facts(plain)
    assert 3 < len(ends) < 19  # some passes are in the middle of a round


@every_rule
def test_texts_with_gaps_are_those_without_a_draft(rule: str) -> None:
    """A draft that is dropped for long, and comes back to read a few tokens only; then the session's next text."""
    generator, plain = without_order("qwen", noise=3.0), without_order()
    session, gaps = generator.session(), 0
    for prompt in (PROMPTS[3], [*PROMPTS[3], 7], PROMPTS[3][:20]):
        params = params_of(rule, max_new_tokens=150)
        result = None
        for piece in session.stream(prompt, params, drafter="auto"):
            result = piece.result
            model = session._current._drafter._model
            gap = model._gap_end - model._gap_start
            gaps += gap > 0
            sequence, tokens = session._current.sequence, session._draft.tokens
            if gap:
                kept = [*sequence[: model._gap_start], *sequence[model._gap_end : -1]]
                assert tokens == kept[: len(tokens)]
            else:
                assert tokens == sequence[: len(tokens)]
            assert session._draft._context._cache[: len(tokens)].tolist() == tokens
        assert facts(result) == facts(plain.generate(prompt, params, drafter="off"))
    assert gaps > 20


@pytest.mark.parametrize("prompt_length", [10, 60])
def test_a_smaller_length_gives_a_prefix_of_a_text_by_rejection(prompt_length: int) -> None:
    """A limit must not change the rounds before it, where the tokens depend on them."""
    prompt, rules = [(3 * place * place) % 16 for place in range(prompt_length)], {"temperature": 0.9, "seed": 6}
    whole = generator_of("qwen").generate(prompt, SamplingParams(max_new_tokens=80, **rules), drafter="auto")
    for length in (1, 5, 10, 20, 40, 79):
        result = generator_of("qwen").generate(prompt, SamplingParams(max_new_tokens=length, **rules), drafter="auto")
        assert result.token_ids == whole.token_ids[:length]


# --- what a round is said to cost -------------------------------------------------------------------------------------


def drafter_on(
    model: FakeModel, costs: PassCosts, *, max_length: int = 1000, capacity: int = 1000, max_slowdown: float = 1.0
) -> tuple[AdaptiveDrafter, list[float]]:
    """A drafter, and what it books of drafting, round by round."""
    rule = GreedyRule(Sampler(SamplingParams()))
    reader = ModelDrafter(Decoder(model, capacity, num_rows=1), rule, target_vocab_size=16, end_token_ids=frozenset())
    drafter = AdaptiveDrafter(LookupDrafter(), reader, costs, max_slowdown=max_slowdown)
    drafter.expect_end(max_length)
    booked, count_round = [], drafter._policy.count_round

    def counted(proposed: int, spent: float, new_tokens: int) -> None:
        booked.append(spent)
        count_round(proposed, spent, new_tokens)

    drafter._policy.count_round = counted
    return drafter, booked


DEAR_ROWS = PassCosts(((1, 20.0), (2, 20.5), (17, 28.0)), ((1, 1.0), (2, 1.5), (17, 9.0)))


@pytest.mark.parametrize("behind", [1, 4, 8, 9, 30])
@pytest.mark.parametrize("looked_up", [0, 1, 3, 7, 12])
def test_a_round_books_all_rows_that_the_draft_reads(behind: int, looked_up: int) -> None:
    """What was looked up stands in the same pass as what the draft has missed, and behind a gap too."""
    model = FakeModel(seed=3, sharpness=30.0)
    drafter, booked = drafter_on(model, DEAR_ROWS)
    text = [(7 * place * place + 3 * place) % 16 for place in range(80)]
    drafter._lookup.next_token = lambda sequence, block: None
    assert drafter.propose(text[:20], 1).tokens
    drafter.observe(1)
    drafter.rewind_to(20)
    for length in range(21, 20 + behind):
        drafter._lookup.extend(text[:length])
        drafter.rewind_to(length - 1)
    model.calls.clear()
    drafter._lookup.next_token = lambda sequence, block: (5, 6) if len(block) < looked_up else None
    proposal = drafter.propose(text[: 20 + behind], looked_up + 1)
    drafter.observe(0)
    ((_, rows, _),) = model.calls
    assert len(proposal.tokens) == looked_up + 1
    assert booked[-1] == pytest.approx(DEAR_ROWS.draft(rows)), f"a pass of {rows} rows"


def test_a_pass_that_was_not_run_is_not_booked() -> None:
    """Where the draft's context ends, or it does not have a token, nothing is spent, and lookups keep what they may risk."""
    model = FakeModel(12, seed=3, sharpness=30.0)
    drafter, booked = drafter_on(model, DEAR_ROWS)
    for text in ([1, 2, 3, 15], [1, 2, 3, 15, 4], [1, 2, 3, 15, 4, 9]):
        assert drafter.propose(text, 4) == Proposal()
        drafter.observe(0)
        drafter.rewind_to(len(text) - 1)
    assert (model.calls, booked) == ([], [0.0, 0.0, 0.0])
    drafter, booked = drafter_on(model, DEAR_ROWS, capacity=3)
    assert drafter.propose([1, 2, 3, 4], 4) == Proposal()
    drafter.observe(0)
    assert (model.calls, booked) == ([], [0.0])


def test_a_round_that_asks_for_nothing_counts_nothing() -> None:
    drafter, booked = drafter_on(FakeModel(seed=3, sharpness=30.0), DEAR_ROWS)
    assert drafter.propose([1, 2, 3], 4).tokens
    drafter.observe(0)
    rates = [drafter._model_rates.rate("any"), *map(drafter._model_rates.rate, range(7))]
    drafter.observe(0)
    assert booked[1] == 0
    assert drafter._kinds == []
    assert [drafter._model_rates.rate("any") > rates[0]] == [True]  # faded towards its prior, and nothing more


def test_a_proposal_that_a_cancelled_round_left_is_not_judged_by_the_next() -> None:
    """The text goes on with room for one token, so with a round that proposes nothing."""
    session, cancel, booked = with_costs(generator_of(), FREE).session(), threading.Event(), []
    cancel.set()  # found by the target's pass: a proposal of looked-up tokens needs none of the draft's
    read(session, session.stream(PROMPTS[3], SamplingParams(max_new_tokens=5), drafter="auto", cancel=cancel))
    drafter = session._current._drafter
    assert drafter._kinds
    drafter._policy.count_round = lambda proposed, spent, new_tokens: booked.append((proposed, spent, new_tokens))
    _, result = read(session, session.resume(1))
    assert (len(result.token_ids), booked) == (1, [(0, 0.0, 1)])
    assert drafter._model_rates._counts == drafter._lookup_rates._counts == {}


def test_only_tokens_that_were_judged_are_counted() -> None:
    drafter, _ = drafter_on(FakeModel(seed=3, sharpness=30.0), DEAR_ROWS)
    for accepted, tried in ((2, 3), (0, 1), (4, 4)):
        drafter._model_rates._counts.clear()
        assert len(drafter.propose([1, 2, 3], 4).tokens) == 4
        drafter.observe(accepted)
        drafter.rewind_to(2)
        count = drafter._model_rates._counts["any"]
        assert (count.accepted, count.tried) == (accepted, tried)


@pytest.mark.parametrize(
    ("probability", "kind"),
    [(0.1, 0), (0.29, 0), (0.31, 1), (0.51, 2), (0.71, 3), (0.86, 4), (0.951, 5), (0.985, 5), (0.991, 6), (1.0, 6)],
)
def test_confidence_is_the_probability_of_the_most_probable_token(probability: float, kind: int) -> None:
    with np.errstate(divide="ignore"):
        logits = np.log(np.array([(1 - probability) / 20] * 10 + [probability] + [(1 - probability) / 20] * 10, np.float32))
    for shift in (0, 50, -70):
        assert _confidence_kind(logits + np.float32(shift)) == kind


def test_a_draft_that_pays_only_for_several_tokens_together_is_heard() -> None:
    """The second row costs more than a plain token, and those behind it next to nothing."""
    costs = PassCosts(((1, 20.0), (2, 42.0), (17, 44.0)), ((1, 1.0), (17, 3.0)))
    drafter, _ = drafter_on(FakeModel(seed=3, sharpness=60.0), costs)
    assert len(drafter.propose([1, 2, 3], 8).tokens) > 1


def test_a_text_that_was_extended_may_ask_a_draft_that_was_not_worth_it_before() -> None:
    session = without_order("qwen", noise=0.0).session()
    assert session.generate([*range(16)] * 5, SamplingParams(max_new_tokens=1), drafter="auto").stats.draft_passes == 0
    (*_, last) = session.resume(200)
    assert last.result.stats.draft_passes > 0


def test_an_end_of_text_token_of_the_model_ends_the_proposal() -> None:
    model = FakeModel(seed=3, sharpness=30.0)
    text = greedy_text(model, [1, 2, 3], 5)
    drafter, _ = drafter_on(model, DEAR_ROWS)
    drafter._model._end_token_ids = frozenset(text[2:3])
    assert drafter.propose([1, 2, 3], 5).tokens == tuple(text[: text.index(text[2]) + 1])
