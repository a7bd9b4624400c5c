"""Caches that outlive a text: only what is new is computed, and no text is another for it."""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from runtime.errors import DeviceError, LogitsError, PromptError
from runtime.generation import GenerationResult, Piece
from runtime.generator import Generator
from runtime.sampling_params import SamplingParams
from runtime.session import Session
from tests.fakes import FakeModel, fake_generator, greedy_text, text_of
from tests.plain_decoding import plain_text

PROMPT = [1, 2, 3, 1, 2]
LOOP = [*range(8), *range(8)]
RULES = {
    "greedy": {},
    "rejection": {"temperature": 0.9, "seed": 6},
    "coupled": {"temperature": 0.9, "seed": 6, "acceptance": "coupled"},
}
every_rule = pytest.mark.parametrize("rule", RULES)
every_drafter = pytest.mark.parametrize("drafter", ["model", "lookup", "off"])


def fakes(**settings: object) -> Generator:
    """A generator whose texts repeat themselves sometimes, and whose draft agrees sometimes."""
    target = FakeModel(seed=1, period=8, sharpness=1.5, **settings)
    return fake_generator(target, FakeModel(seed=1, period=8, sharpness=1.5, noise=2.0, **settings))


def rules(rule: str, **changes: object) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 20, "logprobs": 1, **RULES[rule], **changes})


def facts(result: GenerationResult) -> tuple[object, ...]:
    """All of a result that does not tell how it was computed."""
    return result.token_ids, result.text, result.finish_reason, result.logprobs


def counts(result: GenerationResult) -> tuple[object, ...]:
    """What a result's rounds came to."""
    stats = result.stats
    tokens = (stats.new_tokens, stats.accepted_tokens, stats.correction_tokens, stats.bonus_tokens)
    return stats.rounds, tokens, stats.proposed_by_position, stats.accepted_by_position


def check_caches(session: Session) -> None:
    """What is cached of the current text is a beginning of it, in the decoders' books and in the fakes' slots."""
    sequence = session._current.sequence
    for decoder in (session._target, session._draft):
        if decoder is not None:
            assert decoder._context._cache[: decoder.past_length].tolist() == decoder.tokens
    # A draft that the current text does not ask keeps what it had of another one.
    for decoder in [session._target] + [session._draft] * (session._current._drafter.name == "model"):
        assert decoder.past_length < len(sequence)
        assert decoder.tokens == sequence[: decoder.past_length]


def read(session: Session, pieces: Iterator[Piece]) -> tuple[list[Piece], GenerationResult]:
    """Reads a stream to its end and checks the caches after every piece."""
    taken = []
    for piece in pieces:
        taken.append(piece)
        check_caches(session)
        if piece.round is not None:
            assert session._target.tokens == session._current.sequence[:-1]
    return taken, taken[-1].result


def tokens_of(pieces: Sequence[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


# --- what is cached saves work and changes nothing --------------------------------------------------------------------


@every_rule
@every_drafter
def test_a_text_is_that_of_a_fresh_generator_whatever_was_cached(rule: str, drafter: str) -> None:
    generator, session = fakes(), fakes().session()
    prompts = [PROMPT, PROMPT, [*PROMPT, 4, 5], PROMPT[:2], LOOP, [9], LOOP[:9], [*LOOP, *LOOP]]
    for number, prompt in enumerate(prompts * 2):
        params = rules(rule, seed=number)
        if number % 3 == 1:  # a text between that is left half-way, by another drafter
            left = session.stream([*prompt[:3], 7, 8], params, drafter=["model", "lookup", "off"][number % 4 - 1])
            list(itertools.islice(left, number % 4))
        _, result = read(session, session.stream(prompt, params, drafter=drafter))
        fresh = generator.generate(prompt, params, drafter=drafter)
        assert facts(result) == facts(fresh)
        assert counts(result) == counts(fresh)


TEXT = [*PROMPT, *fake_generator(FakeModel(seed=1)).generate(PROMPT, SamplingParams(max_new_tokens=10)).token_ids]


@pytest.mark.parametrize(
    ("prompt", "cached", "drafted"),
    [
        ([*TEXT, 4, 4], 14, 13),  # the last token of a text is never cached; the draft has not fed its own last one either
        (TEXT, 14, 13),
        ([*TEXT[:8], 15, 15, 15], 8, 8),
        (TEXT[:6], 5, 5),  # the last token of a prompt is fed whatever is cached
        ([TEXT[0] + 1, *TEXT[1:]], 0, 0),
    ],
)
def test_only_what_is_new_is_fed(prompt: list[int], cached: int, drafted: int) -> None:
    generator = fake_generator(FakeModel(seed=1), FakeModel(seed=1))
    target, draft, session = generator.target, generator.draft, generator.session()
    params = SamplingParams(max_new_tokens=10)
    assert session.generate(PROMPT, params).stats.cached_tokens == 0
    # An identical draft: four accepted and a bonus, twice.
    assert target.calls == [(0, 9, 5), (9, 5, 5)]
    assert draft.calls == [
        (0, 5, 1),
        *((past, 1, 1) for past in (5, 6, 7)),
        (8, 2, 1),
        *((past, 1, 1) for past in (10, 11, 12)),
    ]
    target.calls.clear()
    draft.calls.clear()
    result = session.generate(prompt, params)
    begin = len(prompt)
    assert result.stats.cached_tokens == cached
    assert target.calls == [(cached, begin + 4 - cached, 5), (begin + 4, 5, 5)]
    assert draft.calls[:2] == [(drafted, begin - drafted, 1), (begin, 1, 1)]
    assert (result.stats.target_passes, result.stats.draft_passes) == (len(target.calls), len(draft.calls))
    assert list(result.token_ids) == greedy_text(target, prompt, 10)


def test_a_cached_prompt_of_the_same_tokens_costs_one_row() -> None:
    generator = fake_generator(FakeModel(seed=1))
    session, params = generator.session(), SamplingParams(max_new_tokens=3)
    session.generate(PROMPT, params, drafter="off")
    generator.target.calls.clear()
    assert session.generate(PROMPT, params, drafter="off").stats.cached_tokens == 4
    assert generator.target.calls == [(4, 1, 1), (5, 1, 1), (6, 1, 1)]


def test_a_draft_that_was_not_asked_catches_up() -> None:
    generator = fake_generator(FakeModel(seed=1), FakeModel(seed=1))
    session, params = generator.session(), SamplingParams(max_new_tokens=10)
    first = session.generate(PROMPT, params, drafter="off")
    assert session._draft is None
    prompt = [*PROMPT, *first.token_ids, 3]
    second = session.generate(prompt, params)
    assert generator.draft.calls[0] == (0, len(prompt), 1)
    third = session.generate([*prompt, *second.token_ids, 2], params, drafter="lookup")
    drafted = len(session._draft.tokens)
    generator.draft.calls.clear()
    prompt = [*prompt, *second.token_ids, 2, *third.token_ids, 1]
    result = session.generate(prompt, params)
    assert generator.draft.calls[0] == (drafted, len(prompt) - drafted, 1)
    assert facts(result) == facts(fake_generator(FakeModel(seed=1)).generate(prompt, params))


@every_drafter
def test_a_session_may_be_shorter_than_the_context(drafter: str) -> None:
    generator, params = fakes(), rules("greedy", max_new_tokens=50)
    result = generator.session(max_length=20).generate(PROMPT, params, drafter=drafter)
    assert (len(result.token_ids), result.finish_reason) == (15, "length")
    assert facts(result) == facts(fakes(context_length=20).generate(PROMPT, params, drafter=drafter))
    with pytest.raises(PromptError, match="has 20 tokens and the context holds 20"):
        generator.session(max_length=20).generate([1] * 20)
    assert len(generator.session(max_length=2).generate([1]).token_ids) == 1


@pytest.mark.parametrize("max_length", [0, 1, 129, -5, 5.0, True, "9", None], ids=repr)
def test_a_length_out_of_range_is_refused(max_length: object) -> None:
    generator = fakes()
    for make in (generator.session,):
        if max_length is None:
            assert make(max_length=None) is not None
        else:
            with pytest.raises(ValueError, match=r"max_length is .*; a number from 2 to the context's 128 is expected"):
                make(max_length=max_length)


# --- going on ---------------------------------------------------------------------------------------------------------


def resumed(
    generator: Generator, params: Callable[[int], SamplingParams], lengths: Sequence[int], drafter: str
) -> tuple[list[list[Piece]], list[GenerationResult]]:
    """A text that grows by these lengths, one after the other."""
    session = generator.session()
    parts, results = [], []
    for number, length in enumerate(lengths):
        stream = session.resume(length) if number else session.stream(PROMPT, params(length), drafter=drafter)
        pieces, result = read(session, stream)
        parts.append(pieces)
        results.append(result)
        if result.finish_reason != "length":
            break
    return parts, results


@every_rule
@every_drafter
def test_a_text_that_was_cut_off_goes_on_as_if_it_had_not(rule: str, drafter: str) -> None:
    generator = fakes()
    whole = generator.generate(PROMPT, rules(rule), drafter=drafter)
    cuts = [[n, 20 - n] for n in range(1, 20)] + [[1] * 20, [2, 1, 1, 3, 3, 10], [4, 1, 5, 5, 5]]
    without_a_round = 0
    for lengths in cuts:
        parts, results = resumed(generator, lambda length: rules(rule, max_new_tokens=length), lengths, drafter)
        assert facts(results[-1]) == facts(whole)
        assert [len(tokens_of(part)) for part in parts] == lengths
        assert [token for part in parts for token in tokens_of(part)] == list(whole.token_ids)
        assert "".join(piece.text for part in parts for piece in part) == whole.text
        assert sum((piece.logprobs for part in parts for piece in part), ()) == whole.logprobs
        for length, result in zip(itertools.accumulate(lengths), results, strict=True):
            assert (result.token_ids, result.text) == (whole.token_ids[:length], text_of(whole.token_ids[:length]))
            assert result.logprobs == whole.logprobs[:length]
        if rule == "rejection" or drafter == "off":
            assert counts(results[-1]) == counts(whole)
            assert results[-1].stats.target_passes == whole.stats.target_passes
        else:  # here a round proposes no more than the text has room for, so a cut begins a new one
            stats = results[-1].stats
            assert stats.new_tokens == stats.accepted_tokens + stats.correction_tokens + stats.bonus_tokens == 20
            assert stats.rounds == stats.target_passes == stats.correction_tokens + stats.bonus_tokens
        without_a_round += sum(piece.round is None for part in parts for piece in part)
    assert bool(without_a_round) == (rule == "rejection" and drafter != "off")


def test_what_was_cut_off_inside_a_block_is_not_computed_again() -> None:
    generator = fake_generator(FakeModel(seed=1), FakeModel(seed=1))
    session, params = generator.session(), SamplingParams(max_new_tokens=2, temperature=0.8, seed=3, logprobs=0)
    session.generate(PROMPT, params)
    passes = len(generator.target.calls), len(generator.draft.calls)
    for _ in range(3):
        (piece,) = session.resume(1)
        assert (piece.round, len(piece.token_ids), len(piece.logprobs)) == (None, 1, 1)
    assert (len(generator.target.calls), len(generator.draft.calls)) == passes
    (piece,) = session.resume(1)
    assert piece.round is not None
    assert len(generator.target.calls) == passes[0] + 1
    assert piece.result.stats.proposed_by_position == [2] * 4


@every_rule
@every_drafter
def test_an_end_in_what_was_cut_off_still_ends_the_text(rule: str, drafter: str) -> None:
    target = FakeModel(60, seed=3, period=8)
    draft = FakeModel(60, seed=3, period=8, noise=0.4)
    text = fake_generator(target, draft).generate(LOOP, rules(rule), drafter=drafter).token_ids
    for position in range(9):
        for changes, eos in (
            ({"stop_token_ids": text[position : position + 1]}, ()),
            ({"stop": text_of(text[position - 1 : position + 1])}, ()),
            ({"stop": text_of(text[position - 1 : position + 1]), "include_stop": True}, ()),
            ({}, text[position : position + 1]),
        ):
            if not changes.get("stop", "x"):
                continue
            generator = fake_generator(target, draft, eos=eos)
            whole = plain_text(generator, LOOP, rules(rule, **changes), drafter, 4)
            for cut in range(1, len(whole.token_ids)):
                session = generator.session()
                session.generate(LOOP, rules(rule, max_new_tokens=cut, **changes), drafter=drafter)
                _, result = read(session, session.resume(20 - cut))
                assert list(result.token_ids) == whole.token_ids
                assert (result.text, result.finish_reason) == (whole.text, whole.finish_reason)


@every_rule
@every_drafter
@pytest.mark.parametrize("after", range(5))
def test_a_text_that_was_left_or_cancelled_goes_on(rule: str, drafter: str, after: int) -> None:
    generator = fakes()
    whole = generator.generate(PROMPT, rules(rule), drafter=drafter)
    for cancelled in (False, True):
        session, cancel = generator.session(), threading.Event()
        stream = session.stream(PROMPT, rules(rule), drafter=drafter, cancel=cancel)
        before = list(itertools.islice(stream, after))
        if cancelled:
            cancel.set()
            before += stream
            assert before[-1].result.finish_reason == "cancelled"
            assert before[-1].round is None
        stream.close()
        missing = 20 - len(tokens_of(before))
        behind, result = read(session, session.resume(missing))
        assert tokens_of(before + behind) == list(result.token_ids)
        assert "".join(piece.text for piece in before + behind) == result.text
        assert sum((piece.logprobs for piece in before + behind), ()) == result.logprobs
        assert result.finish_reason == "length"
        assert facts(result) == facts(whole)
        if rule == "rejection" or drafter == "off":
            assert counts(result) == counts(whole)


@every_rule
@every_drafter
def test_a_text_cancelled_in_the_middle_of_a_round_goes_on(rule: str, drafter: str) -> None:
    generator = fakes()
    whole = generator.generate(PROMPT, rules(rule), drafter=drafter)
    for num_passes in range(1, 12):
        session, cancel, ran = generator.session(), threading.Event(), itertools.count(1)

        def run_down(num_passes: int = num_passes, cancel: threading.Event = cancel, ran: Iterator[int] = ran) -> None:
            if next(ran) == num_passes:
                cancel.set()

        generator.target.on_pass = generator.draft.on_pass = run_down
        before, cut = read(session, session.stream(PROMPT, rules(rule), drafter=drafter, cancel=cancel))
        generator.target.on_pass = generator.draft.on_pass = lambda: None
        assert cut.finish_reason == ("cancelled" if len(cut.token_ids) < 20 else "length")
        if cut.finish_reason == "cancelled":
            behind, result = read(session, session.resume(20 - len(cut.token_ids)))
            assert result.token_ids[: len(cut.token_ids)] == cut.token_ids
            assert tokens_of(before + behind) == list(result.token_ids)
            # The draws of a proposal that was cancelled are gone, so a text by rejection goes on by others.
            assert len(result.token_ids) == 20
            assert facts(result) == facts(whole) or rule == "rejection"


def test_a_result_is_not_changed_by_what_comes_after_it() -> None:
    session = fakes().session()
    first = session.generate(PROMPT, rules("greedy", max_new_tokens=5))
    kept = counts(first), first.stats.total_seconds, first.stats.target_passes, facts(first)
    list(session.resume(7))
    assert (counts(first), first.stats.total_seconds, first.stats.target_passes, facts(first)) == kept
    assert first.stats.new_tokens == len(first.token_ids) == 5


def test_a_resumed_text_can_be_cancelled_and_the_old_event_is_forgotten() -> None:
    session, cancel, other = fakes().session(), threading.Event(), threading.Event()
    cancel.set()
    assert session.generate(PROMPT, rules("greedy"), cancel=cancel).finish_reason == "cancelled"
    stream = session.resume(20, cancel=other)
    next(stream)
    other.set()
    *_, last = stream
    assert last.result.finish_reason == "cancelled"
    *_, last = session.resume(20 - len(last.result.token_ids))
    assert facts(last.result) == facts(fakes().generate(PROMPT, rules("greedy")))


def test_what_cannot_go_on_says_so() -> None:
    session = fakes().session()
    with pytest.raises(ValueError, match="There is no text to go on with: generate one first"):
        session.resume(5)
    with pytest.raises(ValueError, match="There is no text to go on with"):
        session.fork().resume(5)
    session.generate(PROMPT, rules("greedy", stop_token_ids=range(16)))
    with pytest.raises(ValueError, match="ended with 'stop'"):
        session.resume(5)
    short = fakes(context_length=10).session()
    short.generate(PROMPT)
    with pytest.raises(ValueError, match="context of 10 tokens is full"):
        short.resume(5)


@pytest.mark.parametrize("cancel", [True, "stop", threading.Event], ids=repr)
def test_an_event_of_another_kind_is_refused_everywhere(cancel: object) -> None:
    session = fakes().session()
    for call in (session.generate, session.stream, session.start):
        with pytest.raises(ValueError, match=r"cancel is .*; a threading.Event is expected, or None"):
            call(PROMPT, cancel=cancel)
    session.generate(PROMPT, rules("greedy", max_new_tokens=5))
    with pytest.raises(ValueError, match=r"cancel is .*; a threading.Event is expected, or None"):
        list(session.resume(5, cancel=cancel))
    *_, last = session.resume(15)
    assert facts(last.result) == facts(fakes().generate(PROMPT, rules("greedy")))


# --- forks ------------------------------------------------------------------------------------------------------------


@every_rule
@every_drafter
@pytest.mark.parametrize("taken", range(4))
def test_forks_go_separate_ways_in_the_middle_of_a_text_too(rule: str, drafter: str, taken: int) -> None:
    generator = fakes()
    whole = generator.generate(PROMPT, rules(rule), drafter=drafter)
    session = generator.session()
    stream = session.stream(PROMPT, rules(rule), drafter=drafter)
    before = list(itertools.islice(stream, taken))
    fork, second = session.fork(), session.fork()
    generator.target.calls.clear()
    other = [*PROMPT, *whole.token_ids[:3], 9, 9]
    pieces = fork.stream(other, rules(rule), drafter=drafter)
    mixed = list(itertools.zip_longest(stream, pieces))
    assert tokens_of(before + [mine for mine, _ in mixed if mine]) == list(whole.token_ids)
    assert tokens_of([theirs for _, theirs in mixed if theirs]) == list(
        generator.generate(other, rules(rule), drafter=drafter).token_ids
    )
    check_caches(session)
    check_caches(fork)
    # The copy was a copy: what was cached is not computed again.
    cached = min(len(PROMPT) + len(tokens_of(before)) - 1, len(PROMPT) + 3) if taken else 0
    assert mixed[-1][1].result.stats.cached_tokens == cached if mixed[-1][1] else True
    again = second.generate([*PROMPT, *whole.token_ids[:2]], rules(rule, max_new_tokens=3), drafter=drafter)
    assert again.stats.cached_tokens == (min(len(PROMPT) + len(tokens_of(before)) - 1, len(PROMPT) + 1) if taken else 0)


def test_a_fork_copies_the_draft_too() -> None:
    generator, params = fake_generator(FakeModel(seed=1), FakeModel(seed=1)), SamplingParams(max_new_tokens=10)
    session = generator.session()
    text = [*PROMPT, *session.generate(PROMPT, params).token_ids]
    fork = session.fork()
    session.generate([9, 9], params)
    generator.target.calls.clear()
    generator.draft.calls.clear()
    fork.generate([*text, 1], params)
    assert (generator.target.calls[0], generator.draft.calls[0]) == ((14, 6, 5), (13, 3, 1))


# --- streams that are stale, arguments and failures -------------------------------------------------------------------


@pytest.mark.parametrize("taken", range(3))
@pytest.mark.parametrize("begin", [Session.stream, Session.generate, Session.start])
def test_a_stale_stream_says_so_and_disturbs_nothing(taken: int, begin: Callable[..., object]) -> None:
    generator = fakes()
    session = generator.session()
    stale = session.stream(PROMPT, rules("greedy"))
    list(itertools.islice(stale, taken))
    begun = begin(session, LOOP, rules("greedy"))
    cached = list(session._target.tokens)
    with pytest.raises(RuntimeError, match="its session has begun another text"):
        next(stale)
    assert session._target.tokens == cached
    assert list(stale) == []
    if begin is Session.stream:
        _, result = read(session, begun)
        assert facts(result) == facts(generator.generate(LOOP, rules("greedy")))


def test_a_stream_that_has_given_its_result_ends_quietly() -> None:
    session = fakes().session()
    stream = session.stream(PROMPT, rules("greedy"))
    while next(stream).result is None:
        pass
    session.generate(LOOP, rules("greedy"))
    assert list(stream) == []


@pytest.mark.parametrize("close", [True, False])
def test_a_closed_stream_leaves_a_session_usable(close: bool) -> None:
    generator = fakes()
    for taken in range(4):
        session = generator.session()
        stream = session.stream(PROMPT, rules("greedy"))
        list(itertools.islice(stream, taken))
        if close:
            stream.close()
        _, result = read(session, session.stream(LOOP, rules("greedy")))
        assert facts(result) == facts(generator.generate(LOOP, rules("greedy")))


REFUSED = [
    ({"prompt": []}, PromptError, "The prompt is empty"),
    ({"prompt": [1, 99]}, PromptError, "The prompt holds 99"),
    ({"prompt": None}, PromptError, "The prompt is None"),
    ({"prompt": [1] * 128}, PromptError, "has 128 tokens and the context holds 128"),
    ({"params": {"temperature": 1}}, ValueError, "params is .*SamplingParams are expected, or None"),
    ({"params": SamplingParams(stop_token_ids=[16])}, ValueError, "name token 16; the target's are 0 to 15"),
    ({"drafter": "none"}, ValueError, "The drafter 'none' is unknown"),
    ({"num_draft_tokens": 65}, ValueError, "num_draft_tokens is 65"),
    ({"cancel": 5}, ValueError, "cancel is 5"),
]


@pytest.mark.parametrize(("arguments", "error", "sentence"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_is_refused_leaves_the_text_before_as_it_was(
    arguments: dict[str, object], error: type[Exception], sentence: str
) -> None:
    generator = fakes()
    session = generator.session()
    stream = session.stream(PROMPT, rules("greedy"))
    first = next(stream)
    for call in (session.generate, session.stream, session.start, generator.generate, generator.stream):
        with pytest.raises(error, match=sentence) as caught:
            call(**{"prompt": LOOP, **arguments})
        assert "\n" not in str(caught.value)
    pieces, result = read(session, stream)
    assert tokens_of([first, *pieces]) == list(result.token_ids)
    assert facts(result) == facts(generator.generate(PROMPT, rules("greedy")))


def test_a_draft_that_finds_no_memory_leaves_the_text_before_as_it_was() -> None:
    generator = fakes()
    session = generator.session()
    session.generate(PROMPT, rules("greedy", max_new_tokens=5), drafter="off")

    def no_memory(capacity: int, max_rows: int) -> None:
        raise DeviceError("no memory")

    generator.draft.open_context = no_memory
    with pytest.raises(DeviceError, match="no memory"):
        session.generate(LOOP, drafter="model")
    *_, last = session.resume(15)
    assert facts(last.result) == facts(generator.generate(PROMPT, rules("greedy"), drafter="off"))


@every_rule
@pytest.mark.parametrize("broken", ["target", "draft"])
@pytest.mark.parametrize("num_passes", range(1, 6))
def test_broken_logits_end_a_text_and_not_the_session(rule: str, broken: str, num_passes: int) -> None:
    generator = fakes()
    session, model, tokens = generator.session(), getattr(generator, broken), []
    whole = generator.generate(PROMPT, rules(rule))
    past, rows, _ = model.calls[num_passes - 1]
    session.generate(LOOP, rules(rule))
    model.broken_at, model.broken_value = past + rows - 1, np.nan
    with pytest.raises(LogitsError):
        tokens.extend(token for piece in session.stream(PROMPT, rules(rule)) for token in piece.token_ids)
    check_caches(session)
    assert tokens == list(whole.token_ids[: len(tokens)])
    with pytest.raises(LogitsError):
        list(session.resume(20))
    check_caches(session)
    model.broken_at = None
    _, result = read(session, session.resume(20 - len(tokens)))
    assert list(result.token_ids[: len(tokens)]) == tokens
    assert len(result.token_ids) == 20
    assert facts(result) == facts(whole) or rule == "rejection"
    _, result = read(session, session.stream(PROMPT, rules(rule)))
    assert facts(result) == facts(whole)


def test_a_session_in_use_says_so_to_another_thread() -> None:
    generator = fakes()
    session, inside, go_on = generator.session(), threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert go_on.wait(30)

    generator.target.on_pass = wait
    results: list[GenerationResult] = []
    worker = threading.Thread(target=lambda: results.append(session.generate(PROMPT, rules("greedy"))))
    worker.start()
    assert inside.wait(30)
    for call in (lambda: session.generate(LOOP, rules("greedy")), lambda: list(session.resume(3))):
        with pytest.raises(RuntimeError, match="in use by another thread: give each thread a session of its own"):
            call()
    go_on.set()
    worker.join(30)
    assert facts(results[0]) == facts(fakes().generate(PROMPT, rules("greedy")))
    generator.target.on_pass = lambda: None
    assert session.generate(LOOP, rules("greedy")).token_ids == generator.generate(LOOP, rules("greedy")).token_ids


def test_a_resumed_text_retires_the_stream_it_was_left_in() -> None:
    session = fakes().session()
    old = session.stream(PROMPT, rules("greedy", max_new_tokens=4))
    next(old)
    new = session.resume(6)
    with pytest.raises(RuntimeError, match="gone on with this one elsewhere"):
        next(old)
    *_, last = new
    assert last.result is not None
    assert last.result.text == fakes().generate(PROMPT, rules("greedy", max_new_tokens=len(last.result.token_ids))).text


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.uint16, np.uint64])
def test_numpys_small_numbers_do_not_overflow(kind: type) -> None:
    generator = fakes()
    prompt = [1, 2] * 50
    small = {"max_new_tokens": kind(20), "min_new_tokens": kind(2), "top_k": kind(3), "no_repeat_ngram_size": kind(5)}
    params = SamplingParams(**small, temperature=np.float16(0.5), seed=kind(9), logprobs=kind(2))
    plain = SamplingParams(20, 2, top_k=3, no_repeat_ngram_size=5, temperature=0.5, seed=9, logprobs=2)
    assert params == plain
    for one, number in ((generator.session(max_length=kind(126)), kind(4)), (generator.session(), kind(3))):
        result = one.generate(prompt, params, num_draft_tokens=number)
        assert result.token_ids == generator.generate(prompt, plain, num_draft_tokens=int(number)).token_ids
        if len(prompt) + 24 <= 126:
            *_, last = one.resume(kind(3))
            assert last.result is not None
