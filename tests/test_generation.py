"""The loop on fakes: speculation changes nothing but the number of passes, and every way to end leaves valid state."""

import itertools
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from scipy.stats import chi2

from runtime.errors import LogitsError, PromptError, SamplingError
from runtime.generation import GenerationResult, Piece
from runtime.generator import Generator
from runtime.sampling import Sampler
from runtime.sampling_params import SamplingParams
from tests.fakes import FakeModel, fake_generator, fake_tokenizer, greedy_text, ruled, text_of
from tests.plain_decoding import PlainText, plain_text

PROMPT = [1, 2, 3, 1, 2]
LOOP = [*range(8), *range(8)]  # a prompt whose text repeats itself on a model of period 8

DRAFTS = {
    "identical": lambda: FakeModel(seed=1),
    "partly": lambda: FakeModel(seed=1, noise=1.0),
    "unrelated": lambda: FakeModel(seed=77),
    "adversarial": lambda: FakeModel(seed=1, sharpness=-4.0),
}


def run(
    generator: Generator,
    prompt: Sequence[int] = PROMPT,
    params: SamplingParams | None = None,
    drafter: str | None = None,
    num_draft_tokens: int = 4,
    pieces: list[Piece] | None = None,
) -> GenerationResult:
    """Generates a text, and checks after every round what must hold whatever the text is."""
    params, drafter = params or SamplingParams(), drafter or generator._pair.drafter
    session = generator.session()
    generation = session.start(list(prompt), params, drafter=drafter, num_draft_tokens=num_draft_tokens)
    text, tokens, logprobs, result = "", [], (), None
    for piece in session.pieces(generation):
        if pieces is not None:
            pieces.append(piece)
        text, tokens, result = text + piece.text, [*tokens, *piece.token_ids], piece.result
        logprobs += piece.logprobs or ()
        assert piece.round is not None
        assert piece.token_ids == piece.round.tokens[: len(piece.token_ids)]
        assert generation.sequence == [*prompt, *tokens]
        for decoder in (session._target, session._draft):
            if decoder is not None:
                assert decoder.tokens == generation.sequence[: decoder.past_length]
                assert decoder._context._cache[: decoder.past_length].tolist() == decoder.tokens
        assert session._target.past_length == len(generation.sequence) - 1
        assert session._draft is None or session._draft.past_length < len(generation.sequence)
        check_counters(generation.stats, len(tokens), drafter)
    assert result is not None
    assert (result.text, list(result.token_ids)) == (text, tokens)
    assert result.logprobs == (None if params.logprobs is None else logprobs)
    assert result.stats.prompt_tokens == len(prompt)
    return result


def check_against_plain(result: GenerationResult, plain: PlainText) -> None:
    stats = result.stats
    assert (list(result.token_ids), result.text, result.finish_reason) == (plain.token_ids, plain.text, plain.finish_reason)
    assert (stats.proposed_by_position, stats.accepted_by_position) == (plain.proposed, plain.accepted)
    assert (stats.rounds, stats.correction_tokens, stats.bonus_tokens) == (plain.rounds, plain.corrections, plain.bonuses)
    if result.logprobs is not None:
        assert [entry.logprob for entry in result.logprobs] == pytest.approx(plain.logprobs, abs=1e-6)


def check_counters(stats: object, num_tokens: int, drafter: str) -> None:
    assert stats.new_tokens == num_tokens
    assert stats.new_tokens == stats.accepted_tokens + stats.correction_tokens + stats.bonus_tokens
    assert stats.rounds == stats.target_passes
    assert stats.rounds - 1 <= stats.correction_tokens + stats.bonus_tokens <= stats.rounds
    assert stats.draft_passes == (stats.proposed_tokens if drafter == "model" else 0)
    assert sum(stats.proposed_by_position) == stats.proposed_tokens
    assert sum(stats.accepted_by_position) == stats.accepted_tokens
    assert 0 < stats.first_token_seconds <= stats.total_seconds
    assert 0 < stats.target_seconds + stats.draft_seconds < stats.total_seconds
    assert 1 <= stats.first_round_tokens <= num_tokens


# --- greedy text is the target's, whoever drafts ----------------------------------------------------------------------


@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_text_with_a_draft_is_the_targets_own(name: str, num_draft_tokens: int) -> None:
    target = FakeModel(seed=1, min_rows=3)
    generator = fake_generator(target, DRAFTS[name]())
    rates = []
    for prompt in ([1, 2, 3, 1, 2], [7], [9, 9, 9, 9]):
        result = run(generator, prompt, SamplingParams(max_new_tokens=30), num_draft_tokens=num_draft_tokens)
        assert list(result.token_ids) == greedy_text(target, prompt, 30)
        assert result.text == text_of(result.token_ids)
        assert result.finish_reason == "length"
        rates.append(result.stats.acceptance_rate)
    # The drafts are what they are called; without refusals and acceptances this test would show nothing.
    expected = {
        "identical": rates == [1, 1, 1],
        "adversarial": rates == [0, 0, 0],
        "partly": 0.1 < min(rates) <= max(rates) < 1,
    }
    assert expected.get(name, max(rates) < 0.5)


def test_an_identical_draft_saves_passes() -> None:
    result = run(fake_generator(FakeModel(seed=1), FakeModel(seed=1)), params=SamplingParams(max_new_tokens=25))
    assert (result.stats.rounds, result.stats.bonus_tokens, result.stats.mean_acceptance_length) == (5, 5, 5)
    assert result.stats.proposed_by_position == result.stats.accepted_by_position == [5] * 4


@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
@pytest.mark.parametrize("prompt", [PROMPT, LOOP, [0] * 9])
@pytest.mark.parametrize("period", [0, 8])
def test_greedy_text_with_lookup_is_the_targets_own(period: int, prompt: list[int], num_draft_tokens: int) -> None:
    target = FakeModel(seed=1, period=period)
    params = SamplingParams(max_new_tokens=30)
    result = run(fake_generator(target), prompt, params, "lookup", num_draft_tokens)
    assert list(result.token_ids) == greedy_text(target, prompt, 30)
    if (period, prompt) == (8, LOOP):
        assert result.stats.acceptance_rate == 1
    elif period == 0 and prompt == [0] * 9:
        assert result.stats.acceptance_rate < 0.3  # the prompt goes on proposing what the target does not say


@pytest.mark.parametrize(("drafter", "num_draft_tokens"), [("off", 4), ("off", 0), ("model", 0), ("lookup", 0)])
def test_without_a_proposal_a_round_is_one_step_of_the_target(drafter: str, num_draft_tokens: int) -> None:
    target = FakeModel(seed=1)
    generator = fake_generator(target, FakeModel(seed=1))
    result = run(generator, PROMPT, SamplingParams(max_new_tokens=9), drafter, num_draft_tokens)
    assert list(result.token_ids) == greedy_text(target, PROMPT, 9)
    assert target.calls == [(0, 5, 1), *((past, 1, 1) for past in range(5, 13))]
    assert (result.stats.bonus_tokens, result.stats.proposed_tokens) == (9, 0)


@pytest.mark.parametrize("draft_vocab_size", [10, 15, 16, 20])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_of_another_vocabulary_serves(draft_vocab_size: int, temperature: float) -> None:
    target = FakeModel(16, seed=1)
    generator = fake_generator(target, FakeModel(draft_vocab_size, seed=1))
    result = run(generator, [1, 15, 12, 3], SamplingParams(max_new_tokens=30, temperature=temperature, seed=5))
    assert len(result.token_ids) == 30
    if temperature == 0:
        assert list(result.token_ids) == greedy_text(target, [1, 15, 12, 3], 30)
    if draft_vocab_size >= 16:
        assert result.stats.acceptance_rate == 1


def test_a_penalty_on_repetition_does_not_part_draft_and_target() -> None:
    # The rule sees the tokens of the block too: were it otherwise, an identical draft would be refused.
    target, params = FakeModel(seed=1), SamplingParams(max_new_tokens=40, repetition_penalty=3.0)
    assert greedy_text(target, PROMPT, 40) != list(run(fake_generator(target), params=params, drafter="off").token_ids)
    for name, draft in DRAFTS.items():
        result = run(fake_generator(target, draft()), params=params)
        assert result.token_ids == run(fake_generator(target), params=params, drafter="off").token_ids
        assert result.stats.acceptance_rate == 1 or name != "identical"


def test_a_long_prompt_is_fed_in_passes_and_changes_nothing() -> None:
    target, draft = FakeModel(seed=1, context_length=1000), FakeModel(seed=1, noise=1.0, context_length=1000)
    prompt = [i * i % 16 for i in range(600)]
    result = fake_generator(target, draft).generate(prompt, SamplingParams(max_new_tokens=12))
    assert list(result.token_ids) == greedy_text(target, prompt, 12)
    assert result.stats.target_passes == result.stats.rounds + 2
    assert result.stats.draft_passes == result.stats.proposed_tokens + 2


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["identical", "partly", "lookup"])
def test_every_length_is_kept_to_the_token(name: str, num_draft_tokens: int) -> None:
    target = FakeModel(seed=1, period=8) if name == "lookup" else FakeModel(seed=1)
    draft = None if name == "lookup" else DRAFTS[name]()
    text = greedy_text(target, LOOP, num_draft_tokens + 1)
    for max_new_tokens in range(1, num_draft_tokens + 2):
        params = SamplingParams(max_new_tokens=max_new_tokens)
        result = run(fake_generator(target, draft), LOOP, params, num_draft_tokens=num_draft_tokens)
        assert list(result.token_ids) == text[:max_new_tokens]
        assert result.finish_reason == "length"
        if name == "identical":
            assert (result.stats.rounds, result.stats.proposed_tokens) == (1, max_new_tokens - 1)


def distinct_text() -> tuple[FakeModel, list[int]]:
    """A target of 60 tokens whose greedy text behind PROMPT does not repeat one for a while."""
    target = FakeModel(60, seed=3)
    text = greedy_text(target, PROMPT, 11)
    assert len(set(text)) == 11
    return target, text


@pytest.mark.parametrize("position", range(10))
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_an_end_of_text_token_ends_the_text_wherever_it_stands_in_a_block(position: int, noise: float) -> None:
    target, text = distinct_text()
    eos = [text[position]]
    generator = fake_generator(target, FakeModel(60, seed=3, noise=noise), eos=eos)
    result = run(generator, PROMPT)
    assert list(result.token_ids) == text[: position + 1]
    assert (result.finish_reason, result.text) == ("eos", text_of(text[:position]))
    ignoring = run(generator, PROMPT, SamplingParams(max_new_tokens=11, ignore_eos=True))
    assert (list(ignoring.token_ids), ignoring.finish_reason) == (text, "length")
    # The generator is none the worse for it.
    assert run(generator, PROMPT).token_ids == result.token_ids


@pytest.mark.parametrize("position", range(8))
@pytest.mark.parametrize("num_draft_tokens", [3, 8])
def test_an_end_of_text_token_ends_a_text_whose_proposals_go_past_it(position: int, num_draft_tokens: int) -> None:
    # Lookup copies the prompt, end-of-text tokens included, and all of it is accepted.
    generator = fake_generator(FakeModel(seed=1, period=8), eos=[position])
    result = run(generator, LOOP, num_draft_tokens=num_draft_tokens)
    assert list(result.token_ids) == list(range(position + 1))
    assert (result.finish_reason, result.text) == ("eos", text_of(range(position)))
    assert result.stats.bonus_tokens == (position + 1) // (num_draft_tokens + 1)
    assert result.stats.accepted_tokens == position + 1 - result.stats.bonus_tokens


@pytest.mark.parametrize("position", range(10))
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_a_stop_string_ends_the_text_wherever_it_stands_in_a_block(position: int, width: int, noise: float) -> None:
    target, text = distinct_text()
    begin = max(0, position + 1 - width)
    stop = text_of(text[begin : position + 1])
    generator = fake_generator(target, FakeModel(60, seed=3, noise=noise))
    result = run(generator, PROMPT, SamplingParams(stop=[text_of(text[::-1]), stop]))
    assert list(result.token_ids) == text[: position + 1]
    assert (result.finish_reason, result.text) == ("stop", text_of(text[:begin]))


@pytest.mark.parametrize("position", range(8))
def test_a_stop_string_ends_a_text_whose_proposals_go_past_it(position: int) -> None:
    generator = fake_generator(FakeModel(seed=1, period=8))
    result = run(generator, LOOP, SamplingParams(stop=text_of([position])), num_draft_tokens=8)
    assert list(result.token_ids) == list(range(position + 1))
    assert (result.finish_reason, result.text) == ("stop", text_of(range(position)))


def test_text_that_could_begin_a_stop_string_is_handed_out_at_the_end() -> None:
    target, text = distinct_text()
    stop = text_of([text[5], text[4]])
    params = SamplingParams(max_new_tokens=6, stop=stop)
    pieces = list(fake_generator(target).stream(PROMPT, params, drafter="off"))
    assert [piece.text for piece in pieces] == [*(text_of([token]) for token in text[:5]), text_of([text[5]])]
    late = list(fake_generator(target).stream(PROMPT, SamplingParams(max_new_tokens=7, stop=stop), drafter="off"))
    assert [piece.text for piece in late][5:] == ["", text_of(text[5:7])]
    assert late[-1].result.text == text_of(text[:7])


def test_an_end_of_text_token_is_left_out_also_where_the_tokenizer_calls_it_no_special_one() -> None:
    target, text = distinct_text()
    generator = Generator(target, None, fake_tokenizer(60), [text[3]])
    result = run(generator)
    assert (result.finish_reason, result.text) == ("eos", text_of(text[:3]))


@pytest.mark.parametrize("drafter", ["model", "lookup", "off"])
@pytest.mark.parametrize("num_draft_tokens", [1, 4, 20])
@pytest.mark.parametrize("prompt_length", [1, 10, 18, 19])
def test_a_text_ends_with_the_context(prompt_length: int, num_draft_tokens: int, drafter: str) -> None:
    target, draft = FakeModel(seed=1, context_length=20, min_rows=2), FakeModel(seed=1, noise=1.0, context_length=20)
    prompt = LOOP[:prompt_length] if prompt_length < 17 else (LOOP + LOOP)[:prompt_length]
    result = run(fake_generator(target, draft), prompt, SamplingParams(max_new_tokens=999), drafter, num_draft_tokens)
    assert list(result.token_ids) == greedy_text(target, prompt, 20 - prompt_length)
    assert result.finish_reason == "length"


@pytest.mark.parametrize("draft_context", [1, 4, 5, 9, 40])
def test_a_draft_of_a_shorter_context_stops_proposing(draft_context: int) -> None:
    target, draft = FakeModel(seed=1, context_length=40), FakeModel(seed=1, context_length=draft_context)
    result = run(fake_generator(target, draft), PROMPT, SamplingParams(max_new_tokens=35))
    assert list(result.token_ids) == greedy_text(target, PROMPT, 35)
    # Its cache holds draft_context tokens, and one more can be proposed behind the last of them.
    assert (result.stats.proposed_tokens > 0) == (draft_context >= len(PROMPT))
    assert all(past + rows <= draft_context for past, rows, _ in draft.calls)


# --- cuts, against text made the slow way -----------------------------------------------------------------------------

RULES_OF_CHOICE = {
    "greedy": {},
    "rejection": {"temperature": 0.8, "seed": 6},
    "coupled": {"temperature": 0.8, "seed": 6, "acceptance": "coupled"},
}
DRAFTING = ["model", "lookup", "off"]
NUM_POSITIONS = 11
every_rule = pytest.mark.parametrize("rule", RULES_OF_CHOICE)
every_drafter = pytest.mark.parametrize("drafter", DRAFTING)


def pair(drafter: str, context_length: int = 128) -> tuple[FakeModel, FakeModel]:
    """Models that agree often and not always, the target one that repeats itself where text is looked up."""
    period = 8 if drafter == "lookup" else 0
    return (
        FakeModel(60, seed=3, period=period, context_length=context_length),
        FakeModel(60, seed=3, noise=0.4, period=period, context_length=context_length),
    )


def uncut(rule: str, drafter: str) -> list[int]:
    """The first tokens of the text that nothing cuts."""
    params = SamplingParams(max_new_tokens=NUM_POSITIONS + 3, **RULES_OF_CHOICE[rule])
    return plain_text(fake_generator(*pair(drafter)), LOOP, params, drafter, 4).token_ids


def check_cuts(
    rule: str, drafter: str, cuts: Sequence[tuple[dict[str, object], dict[str, object]]], *, bracketed: bool = False
) -> Counter[tuple[str, int]]:
    """Runs one text for each cut, given as (arguments of fake_generator, of SamplingParams), against the slow way.

    Returns:
        How often a text ended with which reason at which place of its last round, where that had more tokens.
    """
    inside: Counter[tuple[str, int]] = Counter()
    target, draft = pair(drafter)
    for models, changes in cuts:
        generator = fake_generator(target, draft, bracketed=bracketed, **models)
        params = SamplingParams(**{"max_new_tokens": 25, "logprobs": 1, **RULES_OF_CHOICE[rule], **changes})
        pieces: list[Piece] = []
        result = run(generator, LOOP, params, drafter, 4, pieces)
        check_against_plain(result, plain_text(generator, LOOP, params, drafter, 4))
        for entry, token in zip(result.logprobs, result.token_ids, strict=True):
            assert len(entry.top) == 1
            assert (entry.logprob == entry.top[0][1]) == (token == entry.top[0][0])
        if (kept := len(pieces[-1].token_ids)) < len(pieces[-1].round.tokens):
            inside[result.finish_reason, kept] += 1
    return inside


@every_rule
@every_drafter
def test_end_of_text_tokens_cut_a_text_like_the_slow_way(rule: str, drafter: str) -> None:
    text = uncut(rule, drafter)
    cuts = [({"eos": eos}, {}) for token in range(NUM_POSITIONS) for eos in ([text[token]], text[token : token + 3])]
    inside = check_cuts(rule, drafter, cuts)
    assert bool(inside) == (drafter != "off")


@every_rule
@every_drafter
@pytest.mark.parametrize("include_stop", [False, True])
def test_stop_tokens_cut_a_text_like_the_slow_way(rule: str, drafter: str, include_stop: bool) -> None:
    text = uncut(rule, drafter)
    cuts = [
        ({"eos": text[position + 1 : position + 2]}, {"stop_token_ids": ids, "include_stop": include_stop})
        for position in range(NUM_POSITIONS)
        for ids in ([text[position]], text[position : position + 3], [text[position + 1]])
    ]
    inside = check_cuts(rule, drafter, cuts, bracketed=True)
    assert bool(inside) == (drafter != "off")


@every_rule
@every_drafter
@pytest.mark.parametrize("include_stop", [False, True])
def test_stop_strings_cut_a_text_inside_tokens_like_the_slow_way(rule: str, drafter: str, include_stop: bool) -> None:
    text = "".join(f"<{text_of([token])}>" for token in uncut(rule, drafter))
    cuts = []
    for position in range(NUM_POSITIONS):
        for begin, length in ((1, 1), (0, 3), (1, 2), (2, 3), (2, 2), (1, 4), (1, 7)):
            stop = text[3 * position + begin :][:length]
            cuts.append(({}, {"stop": [stop, text[::-1]], "include_stop": include_stop}))
    inside = check_cuts(rule, drafter, cuts, bracketed=True)
    assert len(inside) >= (0 if drafter == "off" else 3)


@every_rule
@every_drafter
def test_lengths_cut_a_text_like_the_slow_way(rule: str, drafter: str) -> None:
    inside = check_cuts(rule, drafter, [({}, {"max_new_tokens": length}) for length in range(1, NUM_POSITIONS + 2)])
    # Where the tokens do not depend on the rounds, no more is proposed than there is room for.
    assert bool(inside) == (rule == "rejection" and drafter != "off")


@every_rule
@every_drafter
@pytest.mark.parametrize("max_new_tokens", [3, 99])
def test_the_contexts_end_cuts_a_text_like_the_slow_way(rule: str, drafter: str, max_new_tokens: int) -> None:
    for length in range(1, NUM_POSITIONS + 2):
        generator = fake_generator(*pair(drafter, len(LOOP) + length))
        params = SamplingParams(max_new_tokens=max_new_tokens, logprobs=0, **RULES_OF_CHOICE[rule])
        result = run(generator, LOOP, params, drafter, 4)
        check_against_plain(result, plain_text(generator, LOOP, params, drafter, 4))
        assert (len(result.token_ids), result.finish_reason) == (min(length, max_new_tokens), "length")


@every_rule
@every_drafter
def test_a_smaller_length_gives_a_prefix(rule: str, drafter: str) -> None:
    generator = fake_generator(*pair(drafter))
    whole = run(generator, LOOP, SamplingParams(max_new_tokens=20, logprobs=0, **RULES_OF_CHOICE[rule]), drafter, 5)
    for length in range(1, 20):
        params = SamplingParams(max_new_tokens=length, logprobs=0, **RULES_OF_CHOICE[rule])
        # The generator's own way too, with no more cache than the text needs.
        for result in (
            run(generator, LOOP, params, drafter, 5),
            generator.generate(LOOP, params, drafter=drafter, num_draft_tokens=5),
        ):
            assert result.token_ids == whole.token_ids[:length]
            assert result.text == text_of(whole.token_ids[:length])
            assert result.logprobs == whole.logprobs[:length]


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 3, 8, 64])
@every_drafter
def test_coupled_text_is_one_for_a_seed(drafter: str, num_draft_tokens: int) -> None:
    texts = set()
    for seed in range(6):
        params = SamplingParams(max_new_tokens=25, temperature=1.2, top_p=0.9, seed=seed, acceptance="coupled", logprobs=3)
        plain = run(fake_generator(FakeModel(seed=1)), LOOP, params, "off")
        for draft in DRAFTS.values():
            result = run(fake_generator(FakeModel(seed=1), draft()), LOOP, params, drafter, num_draft_tokens)
            assert (result.token_ids, result.text, result.logprobs) == (plain.token_ids, plain.text, plain.logprobs)
        texts.add(plain.text)
    assert len(texts) == 6


def test_coupled_drafts_are_accepted_more_often_than_by_chance() -> None:
    params = SamplingParams(max_new_tokens=100, temperature=1.0, acceptance="coupled", seed=2)
    rates = {
        name: run(fake_generator(FakeModel(seed=1), draft()), PROMPT, params).stats.acceptance_rate
        for name, draft in DRAFTS.items()
    }
    assert rates["identical"] == 1
    assert rates["partly"] > 0.4 > rates["unrelated"] > 0


def test_logprobs_are_the_models_own_whatever_the_rules() -> None:
    target = FakeModel(seed=1)
    params = SamplingParams(max_new_tokens=20, temperature=1.5, top_k=3, repetition_penalty=1.5, seed=3, logprobs=4)
    result = run(fake_generator(target, DRAFTS["partly"]()), PROMPT, params)
    assert 0 < result.stats.acceptance_rate < 1
    for place, (entry, token) in enumerate(zip(result.logprobs, result.token_ids, strict=True)):
        row = target.logits([*PROMPT, *result.token_ids[:place]]).astype(np.float64)
        row -= np.log(np.exp(row).sum())
        best = np.argsort(-row)[:4]
        assert entry.logprob == pytest.approx(row[token])
        assert [one for one, _ in entry.top] == best.tolist()
        assert [value for _, value in entry.top] == pytest.approx(row[best])


def test_without_logprobs_there_are_none() -> None:
    pieces: list[Piece] = []
    assert run(fake_generator(FakeModel(seed=1)), PROMPT, pieces=pieces).logprobs is None
    assert {piece.logprobs for piece in pieces} == {None}


def test_the_fewest_tokens_hold_off_all_that_ends_a_text() -> None:
    target, text = distinct_text()
    generator = fake_generator(target, FakeModel(60, seed=3, noise=1.0), eos=text[2:3])
    for fewest in range(1, 9):
        params = SamplingParams(max_new_tokens=11, min_new_tokens=fewest, stop_token_ids=text[5:6])
        result = run(generator, PROMPT, params)
        first = next((place for place, token in enumerate(result.token_ids) if token in (text[2], text[5])), 10)
        assert first + 1 == len(result.token_ids) > fewest
        assert result.token_ids[: min(fewest, 2)] == tuple(text[: min(fewest, 2)])


def test_rules_that_leave_no_token_end_a_text_and_not_the_generator() -> None:
    generator = fake_generator(FakeModel(4, seed=1), FakeModel(4, seed=1))
    words = [[token, other] for token in range(4) for other in range(4) if token != 3 or other == 3]
    params = SamplingParams(max_new_tokens=9, bad_words=[*words, [3, 0], [3, 1], [3, 2]])
    with pytest.raises(SamplingError, match="leave no token to choose at position 3"):
        run(generator, [1, 2, 3], params)
    assert len(run(generator, [1, 2, 3], SamplingParams(max_new_tokens=9)).token_ids) == 9


# --- texts that go on -------------------------------------------------------------------------------------------------


def test_a_text_that_came_to_its_own_end_cannot_go_on() -> None:
    target, text = distinct_text()
    for params, reason in ((SamplingParams(stop=text_of(text[3:4])), "stop"), (SamplingParams(), "eos")):
        session = fake_generator(target, eos=text[6:7]).session()
        generation = session.start(PROMPT, params)
        result = [*session.pieces(generation)][-1].result
        assert result.finish_reason == reason
        with pytest.raises(ValueError, match=f"ended with '{reason}': only one that was cut off or cancelled can go on"):
            generation.extend(5)
        assert (generation.finish_reason, generation.text, list(session.pieces(generation))) == (reason, result.text, [])


def test_a_text_that_fills_the_context_cannot_go_on() -> None:
    session = fake_generator(FakeModel(seed=1, context_length=20)).session()
    generation = session.start(PROMPT, SamplingParams(max_new_tokens=99))
    assert sum(len(piece.token_ids) for piece in session.pieces(generation)) == 15
    with pytest.raises(ValueError, match="context of 20 tokens is full"):
        generation.extend(1)
    assert generation.finish_reason == "length"


@pytest.mark.parametrize("number", [0, -1, 1.0, True, None, "5"], ids=repr)
def test_a_number_of_further_tokens_is_a_whole_one(number: object) -> None:
    session = fake_generator(FakeModel(seed=1)).session()
    generation = session.start(PROMPT, SamplingParams(max_new_tokens=3))
    list(session.pieces(generation))
    with pytest.raises(ValueError, match=r"max_new_tokens is .*; a whole number of at least 1 is expected"):
        generation.extend(number)
    assert generation.finish_reason == "length"


# --- the law ----------------------------------------------------------------------------------------------------------

FALSE_ALARM = 1e-6  # of each test, were the seeds not fixed
NUM_TEXTS = 4000
SHOWN = 3  # positions looked at; the texts are one token longer, so that the first round proposes three


def joint_law(target: FakeModel, prompt: Sequence[int], params: SamplingParams) -> dict[tuple[int, ...], float]:
    law = {(): 1.0}
    for _ in range(SHOWN):
        longer = {}
        for text, probability in law.items():
            before = [*prompt, *text]
            row = ruled(Sampler(params, prompt_length=len(prompt)).distributions, target.logits(before)[None], before, [])[0]
            longer |= {(*text, token): probability * float(row[token]) for token in range(len(row))}
        law = longer
    return law


def chi_square_p(observed: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """The probability of counts at least as far from the law; cells that expect fewer than five are taken together."""
    total = sum(observed.values())
    cells, rest = [], (0.0, 0.0)
    for text, probability in law.items():
        if probability == 0:
            assert observed[text] == 0, f"{text} cannot be said"
        cell = (observed[text], probability * total)
        if cell[1] < 5:
            rest = (rest[0] + cell[0], rest[1] + cell[1])
        else:
            cells.append(cell)
    cells = sorted([*cells, rest], key=lambda cell: cell[1])
    if cells[0][1] < 5:  # what is still too small joins the smallest
        cells[:2] = [(cells[0][0] + cells[1][0], cells[0][1] + cells[1][1])]
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    return float(chi2.sf(statistic, len(cells) - 1))


def sample_texts(
    generator: Generator, prompt: Sequence[int], rules: dict[str, float]
) -> tuple[Counter[tuple[int, ...]], int, int]:
    observed, proposed, accepted = Counter(), 0, 0
    for seed in range(NUM_TEXTS):
        params = SamplingParams(max_new_tokens=SHOWN + 1, seed=seed, **rules)
        result = generator.generate(prompt, params, num_draft_tokens=SHOWN)
        observed[result.token_ids[:SHOWN]] += 1
        proposed += result.stats.proposed_tokens
        accepted += result.stats.accepted_tokens
    return observed, proposed, accepted


RULES = [
    {"temperature": 1.0},
    {"temperature": 1.6, "top_k": 3, "repetition_penalty": 1.5},
    {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_sampled_text_with_a_draft_follows_the_targets_joint_law(rules: dict[str, float]) -> None:
    target, draft = FakeModel(4, seed=11, sharpness=2.0), FakeModel(4, seed=12, sharpness=2.0)
    observed, proposed, accepted = sample_texts(fake_generator(target, draft), [0, 1, 2], rules)
    assert 0.2 < accepted / proposed < 0.95
    assert chi_square_p(observed, joint_law(target, [0, 1, 2], SamplingParams(**rules))) > FALSE_ALARM


@pytest.mark.parametrize("rules", RULES[:2], ids=str)
def test_sampled_text_with_lookup_follows_the_targets_joint_law(rules: dict[str, float]) -> None:
    target, prompt = FakeModel(4, seed=11, sharpness=0.6, period=3), [0, 1, 2, 0, 1, 2, 0, 1]
    observed, proposed, accepted = sample_texts(fake_generator(target), prompt, rules)
    assert proposed > 2 * NUM_TEXTS
    assert 0.2 < accepted / proposed < 0.95
    assert chi_square_p(observed, joint_law(target, prompt, SamplingParams(**rules))) > FALSE_ALARM


def test_the_chi_square_tells_another_law_apart() -> None:
    target, draft = FakeModel(4, seed=11, sharpness=2.0), FakeModel(4, seed=11, sharpness=2.0, noise=0.5)
    observed, _, _ = sample_texts(fake_generator(draft), [0, 1, 2], {"temperature": 1.0})
    assert chi_square_p(observed, joint_law(draft, [0, 1, 2], SamplingParams(temperature=1.0))) > FALSE_ALARM
    assert chi_square_p(observed, joint_law(target, [0, 1, 2], SamplingParams(temperature=1.0))) < FALSE_ALARM


def test_a_sampled_identical_draft_is_never_refused() -> None:
    generator = fake_generator(FakeModel(seed=1), FakeModel(seed=1))
    for rules in (
        {"temperature": 0.6},
        {"temperature": 1.5, "top_p": 0.9, "top_k": 9, "min_p": 0.01, "repetition_penalty": 1.3},
    ):
        result = run(generator, PROMPT, SamplingParams(max_new_tokens=60, seed=4, **rules))
        assert result.stats.acceptance_rate == 1


@pytest.mark.parametrize("drafter", ["model", "lookup", "off"])
def test_a_seed_repeats_a_text_and_another_gives_another(drafter: str) -> None:
    generator = fake_generator(FakeModel(seed=1), FakeModel(seed=1, noise=1.0))

    def text(seed: int | None) -> str:
        return generator.generate(LOOP, SamplingParams(max_new_tokens=30, temperature=2.0, seed=seed), drafter=drafter).text

    assert [text(seed) for seed in range(5)] == [text(seed) for seed in range(5)]
    assert len({text(seed) for seed in [*range(5), None, None]}) == 7


# --- stopping early, failing, sharing ---------------------------------------------------------------------------------

SAMPLED = SamplingParams(max_new_tokens=25, temperature=0.8, seed=9)


@pytest.mark.parametrize("num_taken", range(4))
def test_a_stream_can_be_closed_at_any_time(num_taken: int) -> None:
    target = FakeModel(seed=1)
    generator = fake_generator(target, FakeModel(seed=1, noise=1.0))
    stream = generator.stream(PROMPT, SamplingParams(max_new_tokens=25))
    taken = [token for piece in itertools.islice(stream, num_taken) for token in piece.token_ids]
    stream.close()
    assert taken == greedy_text(target, PROMPT, len(taken))
    assert list(stream) == []
    assert list(run(generator).token_ids) == greedy_text(target, PROMPT, 123)[:128]


def test_only_the_last_piece_carries_the_result() -> None:
    pieces = list(fake_generator(FakeModel(seed=1)).stream(PROMPT, SamplingParams(max_new_tokens=6), drafter="off"))
    assert [piece.result is None for piece in pieces] == [True] * 5 + [False]


def test_a_cancelled_generation_does_not_begin() -> None:
    target, cancel = FakeModel(seed=1), threading.Event()
    cancel.set()
    generator = fake_generator(target, FakeModel(seed=1))
    (piece,) = generator.stream(PROMPT, cancel=cancel)
    assert (piece.text, piece.token_ids, piece.round) == ("", (), None)
    assert (piece.result.text, piece.result.token_ids, piece.result.finish_reason) == ("", (), "cancelled")
    assert target.calls == []
    assert len(generator.generate(PROMPT, SamplingParams(max_new_tokens=5)).token_ids) == 5


@pytest.mark.parametrize("drafter", ["model", "lookup", "off"])
@pytest.mark.parametrize("num_passes", range(1, 8))
def test_cancelling_keeps_what_is_decided(num_passes: int, drafter: str) -> None:
    target, draft, cancel = FakeModel(seed=1), FakeModel(seed=1, noise=1.0), threading.Event()
    generator = fake_generator(target, draft)
    passes = itertools.count(1)

    def count() -> None:
        if next(passes) == num_passes:
            cancel.set()

    target.on_pass = draft.on_pass = count
    text = greedy_text(target, PROMPT, 30)
    stop = text_of([text[0], text[0], text[0]])  # never complete, but its beginning is held back
    pieces = list(generator.stream(PROMPT, SamplingParams(stop=stop), drafter=drafter, cancel=cancel))
    assert len(target.calls) + len(draft.calls) == num_passes
    tokens = [token for piece in pieces for token in piece.token_ids]
    result = pieces[-1].result
    assert tokens == text[: len(tokens)] == list(result.token_ids)
    assert "".join(piece.text for piece in pieces) == text_of(tokens) == result.text
    assert (result.finish_reason, result.stats.new_tokens) == ("cancelled", len(tokens))
    cancel.clear()
    target.on_pass = draft.on_pass = lambda: None
    assert list(run(generator, drafter=drafter, params=SamplingParams(max_new_tokens=30)).token_ids) == text


def test_a_cancelled_generation_counts_the_passes_it_ran() -> None:
    target, cancel = FakeModel(seed=1, context_length=1000), threading.Event()
    target.on_pass = cancel.set
    result = fake_generator(target).generate([1] * 600, drafter="off", cancel=cancel)
    assert result.finish_reason == "cancelled"
    assert result.stats.target_passes == len(target.calls) == 1


@pytest.mark.parametrize("broken", ["target", "draft"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_logits_end_a_text_and_not_the_generator(broken: str, value: float) -> None:
    models = {"target": FakeModel(seed=1, broken_value=value), "draft": FakeModel(seed=1, noise=1.0, broken_value=value)}
    models[broken].broken_at = 20
    generator = fake_generator(models["target"], models["draft"])
    text, tokens = greedy_text(models["target"], PROMPT, 40), []
    stream = generator.stream(PROMPT, SamplingParams(max_new_tokens=40))
    with pytest.raises(LogitsError, match="NaN or infinite logits at position"):
        tokens.extend(token for piece in stream for token in piece.token_ids)
    assert 10 <= len(tokens) <= 16
    assert tokens == text[: len(tokens)]
    assert list(run(generator, PROMPT, SamplingParams(max_new_tokens=10)).token_ids) == text[:10]
    models[broken].broken_at = None
    assert list(run(generator, PROMPT, SamplingParams(max_new_tokens=40)).token_ids) == text


@pytest.mark.parametrize("params", [SamplingParams(max_new_tokens=25), SAMPLED], ids=["greedy", "sampled"])
def test_interleaved_streams_are_those_of_one_at_a_time(params: SamplingParams) -> None:
    generator = fake_generator(FakeModel(seed=1), FakeModel(seed=1, noise=1.0))
    prompts = [[1, 2, 3, 1, 2], [4, 4], [1, 2, 3, 1, 2], [9, 8, 7]]
    alone = [generator.generate(prompt, params).token_ids for prompt in prompts]
    texts = [[] for _ in prompts]
    for pieces in itertools.zip_longest(*(generator.stream(prompt, params) for prompt in prompts)):
        for text, piece in zip(texts, pieces, strict=True):
            text.extend(piece.token_ids if piece else ())
    assert [tuple(text) for text in texts] == alone


@pytest.mark.parametrize("params", [SamplingParams(max_new_tokens=25), SAMPLED], ids=["greedy", "sampled"])
def test_threads_are_as_one_at_a_time(params: SamplingParams) -> None:
    generator = fake_generator(FakeModel(seed=1), FakeModel(seed=1, noise=1.0))
    prompts = [[1 + i % 3, 2, i] for i in range(16)] * 3
    alone = [generator.generate(prompt, params).text for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda prompt: generator.generate(prompt, params).text, prompts)) == alone


# --- prompts and arguments --------------------------------------------------------------------------------------------


def test_a_prompt_is_a_string_or_ids_of_any_kind() -> None:
    generator, params = fake_generator(FakeModel(seed=1)), SamplingParams(max_new_tokens=6)
    expected = tuple(greedy_text(generator.target, PROMPT, 6))
    for prompt in (text_of(PROMPT), PROMPT, tuple(PROMPT), np.array(PROMPT), list(np.array(PROMPT, np.int32))):
        assert generator.generate(prompt, params).token_ids == expected


@pytest.mark.parametrize("prompt", ["", [], (), np.array([], np.int64)], ids=repr)
def test_an_empty_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(PromptError, match="The prompt is empty"):
        fake_generator(FakeModel()).stream(prompt)


@pytest.mark.parametrize("token", [-1, 16, 2**40, 1.0, True, False, "a", None, [1]], ids=repr)
def test_unknown_tokens_are_refused(token: object) -> None:
    for prompt in ([token], [1, 2, token]):
        with pytest.raises(PromptError, match=r"The prompt holds .*; token ids from 0 to 15 are expected"):
            fake_generator(FakeModel()).stream(prompt)


@pytest.mark.parametrize("prompt", [None, 5, b"\1\2", {"role": "user", "content": "a"}], ids=repr)
def test_what_is_no_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(PromptError, match="prompt"):
        fake_generator(FakeModel()).stream(prompt)


@pytest.mark.parametrize(("length", "surplus"), [(20, 1), (25, 6)])
def test_a_prompt_longer_than_the_context_is_refused(length: int, surplus: int) -> None:
    with pytest.raises(PromptError, match=f"has {length} tokens and the context holds 20, .*by {surplus} or more"):
        fake_generator(FakeModel(context_length=20)).stream([1] * length)


@pytest.mark.parametrize("drafter", ["models", "", "OFF", 3])
def test_an_unknown_drafter_is_refused(drafter: object) -> None:
    with pytest.raises(ValueError, match="is unknown; there are auto, hybrid, model, lookup, off"):
        fake_generator(FakeModel(), FakeModel()).stream(PROMPT, drafter=drafter)
    with pytest.raises(ValueError, match="is unknown; there are auto, hybrid, model, lookup, off"):
        fake_generator(FakeModel(), FakeModel(), drafter=drafter)


def test_drafting_with_a_model_needs_one() -> None:
    with pytest.raises(ValueError, match="needs a draft model"):
        fake_generator(FakeModel()).stream(PROMPT, drafter="model")
    with pytest.raises(ValueError, match="needs a draft model"):
        fake_generator(FakeModel(), drafter="model")


@pytest.mark.parametrize("number", [-1, 65, 1.0, True, "4", float("nan")])
def test_a_number_of_draft_tokens_out_of_range_is_refused(number: object) -> None:
    with pytest.raises(ValueError, match=r"num_draft_tokens is .*; a whole number from 0 to 64 is expected"):
        fake_generator(FakeModel()).stream(PROMPT, num_draft_tokens=number)
    with pytest.raises(ValueError, match=r"num_draft_tokens is .*; a whole number from 0 to 64 is expected"):
        fake_generator(FakeModel(), num_draft_tokens=number)


def test_the_generators_own_settings_hold_where_a_call_names_none() -> None:
    draft, params = FakeModel(seed=1), SamplingParams(max_new_tokens=7)
    for generator, settings, passes in (
        (fake_generator(FakeModel(seed=1), draft, num_draft_tokens=2), {}, 3),
        (fake_generator(FakeModel(seed=1), draft, num_draft_tokens=2), {"num_draft_tokens": 6}, 1),
        (fake_generator(FakeModel(seed=1), draft, num_draft_tokens=2), {"drafter": "off"}, 7),
        (fake_generator(FakeModel(seed=1), draft, drafter="off"), {}, 7),
        (fake_generator(FakeModel(seed=1), draft, num_draft_tokens=64), {}, 1),
    ):
        assert generator.generate(PROMPT, params, **settings).stats.rounds == passes
    assert fake_generator(FakeModel(), FakeModel()).describe()["drafter"] == "model"
    assert fake_generator(FakeModel()).describe()["drafter"] == "lookup"
