"""A decoder's cache: however the text is cut, fed, taken back and fed again, the rows are the same."""

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.decoder import Cancelled, Decoder
from runtime.errors import LogitsError
from tests.fakes import FakeModel

texts = st.lists(st.integers(0, 15), min_size=1, max_size=12)


def all_rows(model: FakeModel, tokens: list[int]) -> np.ndarray:
    return np.stack([model.logits(tokens[: end + 1]) for end in range(len(tokens))])


@settings(max_examples=100, deadline=None)
@given(
    texts, st.sets(st.integers(1, 11)), st.sampled_from([1, 2, 3, 5]), st.sampled_from([1, 2, 4]), st.sampled_from([0, 1, 2])
)
def test_one_piece_equals_any_cut(
    tokens: list[int], cuts: set[int], min_rows: int, row_multiple: int, spare_slots: int
) -> None:
    model = FakeModel(min_rows=min_rows, row_multiple=row_multiple, spare_slots=spare_slots)
    decoder = Decoder(model, len(tokens), num_rows=len(tokens))
    bounds = sorted({0, *(cut for cut in cuts if cut < len(tokens)), len(tokens)})
    rows = [decoder.forward(tokens[a:b], b - a).copy() for a, b in itertools.pairwise(bounds)]
    assert np.array_equal(np.concatenate(rows), all_rows(model, tokens))
    assert (decoder.tokens, decoder.past_length) == (tokens, len(tokens))
    assert decoder.passes == len(bounds) - 1
    assert decoder.room() == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(texts, st.integers(0, 30)), min_size=1, max_size=8), st.sampled_from([1, 3]), st.sampled_from([1, 2]))
def test_rewinding_and_feeding_again_equals_a_fresh_decoder(
    steps: list[tuple[list[int], int]], min_rows: int, row_multiple: int
) -> None:
    model = FakeModel(min_rows=min_rows, row_multiple=row_multiple)
    decoder, sequence = Decoder(model, 100, num_rows=12), []
    for tokens, length in steps:
        rows = decoder.forward(tokens, len(tokens))
        assert np.array_equal(rows, all_rows(model, sequence + tokens)[len(sequence) :])
        decoder.rewind_to(length)
        sequence = (sequence + tokens)[:length]
        assert (decoder.tokens, decoder.past_length) == (sequence, len(sequence))


def test_rewinding_is_absolute_and_never_goes_forward() -> None:
    decoder = Decoder(FakeModel(), 10, num_rows=1)
    decoder.forward([1, 2, 3, 4], 1)
    for length, left in ((9, 4), (3, 3), (3, 3), (5, 3), (0, 0)):
        decoder.rewind_to(length)
        assert (decoder.past_length, decoder.room()) == (left, 10 - left)


@pytest.mark.parametrize("num_rows", range(1, 5))
def test_the_last_rows_are_those_asked_for(num_rows: int) -> None:
    model = FakeModel(min_rows=2)
    rows = Decoder(model, 10, num_rows=4).forward([3, 1, 4, 1], num_rows)
    assert np.array_equal(rows, all_rows(model, [3, 1, 4, 1])[-num_rows:])


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "passes"),
    [
        (600, 1, [(0, 256, 0), (256, 256, 0), (512, 88, 1)]),
        (512, 1, [(0, 256, 0), (256, 256, 1)]),
        (513, 5, [(0, 256, 0), (256, 252, 0), (508, 5, 5)]),  # the last pass holds all the rows that are wanted
        (258, 5, [(0, 253, 0), (253, 5, 5)]),
        (256, 5, [(0, 256, 5)]),
        (3, 3, [(0, 3, 3)]),
    ],
)
def test_long_inputs_are_cut_into_passes_of_bounded_size(
    num_tokens: int, num_rows: int, passes: list[tuple[int, int, int]]
) -> None:
    model, tokens = FakeModel(), [i * i % 16 for i in range(num_tokens)]
    decoder = Decoder(model, 1000, num_rows=5)
    rows = decoder.forward(tokens, num_rows)
    assert model.calls == passes
    assert decoder.passes == len(passes)
    expected = [model.logits(tokens[:end]) for end in range(num_tokens - num_rows + 1, num_tokens + 1)]
    assert np.array_equal(rows, expected)


@pytest.mark.parametrize(("num_rows", "min_rows", "sizes"), [(1, 1, [4, 4, 2]), (5, 1, [5, 5]), (1, 7, [7, 7])])
def test_a_wide_vocabulary_bounds_the_rows_of_a_pass(num_rows: int, min_rows: int, sizes: list[int]) -> None:
    # Four rows of two million float32 are 32 MiB, the bound; what must be in one pass still is.
    model = FakeModel(1 << 21, min_rows=min_rows)
    Decoder(model, 20, num_rows=num_rows).forward([1] * 10, 1)
    assert [rows for _, rows, _ in model.calls] == sizes


def test_short_passes_are_filled_up_behind_and_only_real_tokens_count() -> None:
    model = FakeModel(min_rows=4)
    decoder = Decoder(model, 6, num_rows=2)
    decoder.forward([1, 2], 1)
    decoder.forward([3], 1)
    rows = decoder.forward([4, 5, 6], 2)  # up to the last slot, padding still fits
    assert [(past, rows) for past, rows, _ in model.calls] == [(0, 4), (2, 4), (3, 4)]
    assert np.array_equal(rows, all_rows(model, [1, 2, 3, 4, 5, 6])[-2:])
    assert decoder.past_length == 6


def test_passes_are_filled_up_to_a_multiple() -> None:
    model = FakeModel(row_multiple=4)
    decoder = Decoder(model, 9, num_rows=5)
    assert (model.spec.padding, model.spec.most_padding) == ("passes are padded to multiples of 4 rows", 3)
    decoder.forward([1, 2, 3, 4], 1)
    rows = decoder.forward([5, 6, 7, 8, 9], 5)  # up to the last slot, padding still fits
    assert [(past, rows) for past, rows, _ in model.calls] == [(0, 4), (4, 8)]
    assert np.array_equal(rows, all_rows(model, list(range(1, 10)))[-5:])
    assert decoder.past_length == 9


@pytest.mark.parametrize("prompt", range(1, 40))
def test_a_proposal_does_not_move_the_cuts_of_its_prompt(prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.decoder._MAX_ROWS", 8)

    def in_front(proposed: int) -> list[tuple[int, int]]:
        """(begin, end) of what each pass computes before its rows that are asked for, these being taken by fours."""
        model = FakeModel(row_multiple=4)
        Decoder(model, 60, num_rows=10).forward([1] * (prompt + proposed), proposed + 1)
        assert all(rows <= 16 for _, rows, _ in model.calls)
        return [(past, past + rows - -(-num_rows // 4) * 4) for past, rows, num_rows in model.calls]

    plain = [part for part in in_front(0) if part[0] < part[1]]
    for proposed in range(1, 10):
        assert [part for part in in_front(proposed) if part[0] < part[1]] == plain


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("num_tokens", [4, 300])
def test_broken_logits_are_refused_and_the_cache_stays(value: float, num_tokens: int) -> None:
    model = FakeModel(broken_value=value)
    decoder = Decoder(model, 400, num_rows=3)
    decoder.forward([7, 7], 1)
    model.broken_at = num_tokens  # the row before the last
    tokens = [i % 16 for i in range(num_tokens)]
    with pytest.raises(LogitsError, match=rf"'fake-0' \(fp32\) returned NaN or infinite logits at position {num_tokens + 2}"):
        decoder.forward(tokens, 3)
    assert decoder.tokens == [7, 7]
    model.broken_at = None
    expected = [model.logits([7, 7, *tokens[:end]]) for end in range(num_tokens - 2, num_tokens + 1)]
    assert np.array_equal(decoder.forward(tokens, 3), expected)


def test_one_broken_logit_among_many_is_found() -> None:
    model = FakeModel(1000)
    row = model.logits([5]).copy()
    row[417] = np.nan
    model._memory[np.array([5]).tobytes()] = row
    with pytest.raises(LogitsError):
        Decoder(model, 4, num_rows=1).forward([5], 1)


def test_opposite_infinities_do_not_hide_each_other() -> None:
    model = FakeModel(4)
    model._memory[np.array([3]).tobytes()] = np.array([np.inf, 0, -np.inf, 0], np.float32)
    with pytest.raises(LogitsError):
        Decoder(model, 4, num_rows=1).forward([3], 1)


def test_the_largest_float32_logits_are_no_infinities() -> None:
    model = FakeModel(4)
    model._memory[np.array([3]).tobytes()] = np.full(4, np.finfo(np.float32).max)
    assert Decoder(model, 4, num_rows=1).forward([3], 1).shape == (1, 4)


def test_a_cancelled_decoder_runs_no_pass() -> None:
    model, cancel = FakeModel(), threading.Event()
    decoder = Decoder(model, 10, num_rows=1)
    decoder.begin([1, 2], cancel)
    cancel.set()
    with pytest.raises(Cancelled):
        decoder.forward([1, 2], 1)
    assert (model.calls, decoder.tokens, decoder.passes, decoder.seconds) == ([], [], 0, 0)
    decoder.cancel = None
    assert np.array_equal(decoder.forward([1, 2], 1)[0], model.logits([1, 2]))


def test_cancelling_stops_a_long_prompt_between_two_passes() -> None:
    model, cancel = FakeModel(), threading.Event()
    model.on_pass = cancel.set
    decoder = Decoder(model, 1000, num_rows=1)
    tokens = [i % 16 for i in range(600)]
    decoder.begin(tokens, cancel)
    with pytest.raises(Cancelled):
        decoder.forward(tokens, 1)
    assert model.calls == [(0, 256, 0)]
    assert decoder.tokens == tokens[:256]
    # What is cached is valid, so going on from there gives the row of the whole.
    model.on_pass = cancel.clear
    cancel.clear()
    assert np.array_equal(decoder.forward(tokens[decoder.past_length :], 1)[0], model.logits(tokens))


@pytest.mark.parametrize(("tokens", "num_rows"), [([], 1), ([1], 0), ([1, 2], 3), ([1] * 5, 1)])
def test_impossible_calls_are_our_own_mistakes(tokens: list[int], num_rows: int) -> None:
    with pytest.raises(AssertionError):
        Decoder(FakeModel(), 4, num_rows=4).forward(tokens, num_rows)


def test_time_in_passes_is_counted() -> None:
    decoder = Decoder(FakeModel(), 10, num_rows=1)
    assert decoder.seconds == 0
    decoder.forward([1], 1)
    first = decoder.seconds
    decoder.forward([2], 1)
    assert 0 < first < decoder.seconds


# --- beginning a text behind another, and copies ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cached", "prompt", "kept"),
    [
        ([], [1, 2, 3], 0),
        ([1, 2, 3], [1, 2, 3], 2),  # the last token is fed again: its row is the text's first
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([1, 2, 3], [1, 2, 3, 4, 5, 6], 3),
        ([1, 2, 3, 4, 5], [1, 2, 3], 2),
        ([1, 2, 3, 4, 5], [1, 2, 9, 4, 5, 6], 2),
        ([1, 2, 3], [9, 2, 3], 0),
        ([1, 2, 3], [1], 0),
        ([1, 2, 3], [1, 2, 4], 2),
        ([1, 2], [2, 1, 2], 0),
    ],
)
def test_a_text_keeps_what_is_cached_of_its_beginning(cached: list[int], prompt: list[int], kept: int) -> None:
    model = FakeModel()
    decoder = Decoder(model, 10, num_rows=1)
    if cached:
        decoder.forward(cached, 1)
    decoder.begin(prompt, None)
    assert decoder.tokens == prompt[:kept]
    assert (decoder.passes, decoder.seconds) == (0, 0)
    model.calls.clear()
    assert np.array_equal(decoder.forward(prompt[kept:], 1)[0], model.logits(prompt))
    assert model.calls == [(kept, len(prompt) - kept, 1)]
    assert decoder.passes == 1


def test_a_text_has_its_own_cancel_event() -> None:
    decoder, cancel = Decoder(FakeModel(), 10, num_rows=1), threading.Event()
    cancel.set()
    decoder.begin([1, 2], cancel)
    with pytest.raises(Cancelled):
        decoder.forward([1, 2], 1)
    decoder.begin([1, 2], None)
    assert decoder.forward([1, 2], 1).shape == (1, 16)


@settings(max_examples=60, deadline=None)
@given(texts, texts, texts, st.integers(0, 12), st.sampled_from([1, 3]))
def test_forks_go_separate_ways(common: list[int], mine: list[int], theirs: list[int], length: int, min_rows: int) -> None:
    model = FakeModel(min_rows=min_rows)
    decoder = Decoder(model, 40, num_rows=12)
    decoder.forward(common, 1)
    decoder.rewind_to(length)
    common = common[:length]
    fork = decoder.fork()
    assert (fork.tokens, fork.passes, fork.seconds, fork.cancel) == (common, 0, 0, None)
    model.calls.clear()
    for one, tokens in ((decoder, mine), (fork, theirs), (decoder, theirs), (fork, mine)):
        before = len(one.tokens)
        expected = all_rows(model, [*one.tokens, *tokens])[before:]
        if before + len(tokens) <= 40:
            assert np.array_equal(one.forward(tokens, len(tokens)), expected)
    assert decoder.tokens[len(common) :] == mine + theirs
    assert fork.tokens[len(common) :] == theirs + mine
    assert min(past for past, _, _ in model.calls) == len(common)  # nothing was fed again


def test_a_fork_is_not_cancelled_with_its_origin() -> None:
    decoder, cancel = Decoder(FakeModel(), 10, num_rows=1), threading.Event()
    decoder.begin([1, 2], cancel)
    fork = decoder.fork()
    cancel.set()
    assert fork.forward([1, 2], 1).shape == (1, 16)
