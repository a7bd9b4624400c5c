"""Rules that change a row by what stands before it, each against figures worked by hand and a plain search."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime import penalties
from runtime.candidates import Columns

LARGEST = float(np.finfo(np.float32).max)
INF = float("inf")


def row_of(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int64)


# --- bias -------------------------------------------------------------------------------------------------------------


def test_a_bias_is_added_to_its_own_token() -> None:
    row = row_of(1, 2, 3)
    penalties.add_bias(row, Columns(len(row)), ids(2, 0), np.array([0.5, -4.0]))
    assert row.tolist() == [-3, 2, 3.5]


def test_a_bias_is_added_in_float64() -> None:
    row = row_of(0.1)
    penalties.add_bias(row, Columns(len(row)), ids(0), np.array([1e-9 + 0.2]))
    assert row[0] == np.float32(float(np.float32(0.1)) + (1e-9 + 0.2))


# --- repetition -------------------------------------------------------------------------------------------------------


def test_repetition_divides_positive_logits_and_multiplies_negative_ones() -> None:
    row = row_of(3, -3, 0, 5, -5)
    penalties.penalise_repetition(row, Columns(len(row)), ids(2, 1, 0), 2.0)
    assert row.tolist() == [1.5, -6, 0, 5, -5]


def test_repetition_below_one_is_a_reward() -> None:
    row = row_of(3, -3)
    penalties.penalise_repetition(row, Columns(len(row)), ids(0, 1), 0.5)
    assert row.tolist() == [6, -1.5]


def test_repetition_counts_a_token_once_however_often_it_stands() -> None:
    row = row_of(3, -3)
    penalties.penalise_repetition(row, Columns(len(row)), ids(0, 1, 0, 0, 1), 2.0)
    assert row.tolist() == [1.5, -6]


@pytest.mark.parametrize(
    ("penalty", "expected"),
    [(1e-300, [LARGEST, 0, 0]), (1e-30, [3e30, 0, -3e-30]), (1e30, [3e-30, 0, -3e30]), (1e300, [0, 0, -LARGEST])],
)
def test_extreme_penalties_stay_in_float32(penalty: float, expected: list[float]) -> None:
    row = row_of(3, 0, -3)
    penalties.penalise_repetition(row, Columns(len(row)), ids(0, 1, 2), penalty)
    np.testing.assert_allclose(row, np.array(expected, np.float32), rtol=1e-6)


# --- presence and frequency -------------------------------------------------------------------------------------------


def test_presence_is_taken_once_and_frequency_for_each_time() -> None:
    row = row_of(1, 1, 1, 1)
    penalties.penalise_frequency(row, Columns(len(row)), ids(2, 0, 2, 2), 0.5, 0.25)
    assert row.tolist() == [1 - 0.75, 1, 1 - 1.25, 1]


def test_negative_presence_and_frequency_reward() -> None:
    row = row_of(1, -1)
    penalties.penalise_frequency(row, Columns(len(row)), ids(1, 1), -2.0, -1.0)
    assert row.tolist() == [1, 3]


def test_nothing_generated_changes_nothing() -> None:
    row = row_of(1, -1)
    penalties.penalise_frequency(row, Columns(len(row)), ids(), 2.0, 2.0)
    assert row.tolist() == [1, -1]


# --- what is forbidden ------------------------------------------------------------------------------------------------


def forbidden(row: np.ndarray) -> set[int]:
    assert not np.isnan(row).any()
    assert (row[~np.isneginf(row)] == 0).all()
    return set(np.flatnonzero(np.isneginf(row)).tolist())


def repeats(text: list[int], size: int) -> bool:
    last = text[-size:]
    return len(text) > size and any(text[start : start + size] == last for start in range(len(text) - size))


texts = st.lists(st.integers(0, 3), max_size=12)


@settings(max_examples=300, deadline=None)
@given(texts, st.integers(1, 5))
@example([1, 1], 2)
@example([1, 1, 1], 3)
@example([1], 1)
@example([1, 2], 3)
@example([], 1)
def test_no_run_of_tokens_is_completed_a_second_time(seen: list[int], size: int) -> None:
    row = np.zeros(4, np.float32)
    penalties.forbid_repeated_ngrams(row, Columns(len(row)), ids(*seen), size)
    assert forbidden(row) == {token for token in range(4) if repeats([*seen, token], size)}


words_of_ids = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(texts, words_of_ids)
@example([], [(2,)])
@example([1, 2], [(1, 2, 3)])  # the whole text is the word's beginning
@example([2], [(1, 2, 3)])  # a part of it is not
@example([0, 1], [(0,), (1, 2), (0, 2, 1), (0, 1, 3)])
@example([3, 0, 1], [(1, 1), (0, 1, 1, 1)])
def test_no_bad_word_is_completed(seen: list[int], words: list[tuple[int, ...]]) -> None:
    row = np.zeros(4, np.float32)
    penalties.forbid_words(row, Columns(len(row)), ids(*seen), words)
    expected = {token for token in range(4) if any(tuple([*seen, token][-len(word) :]) == word for word in words)}
    assert forbidden(row) == expected


# --- all of them ------------------------------------------------------------------------------------------------------

RULES = {
    "bias": lambda row, seen: penalties.add_bias(row, Columns(len(row)), np.unique(seen), np.full(len(np.unique(seen)), 1.5)),
    "repetition": lambda row, seen: penalties.penalise_repetition(row, Columns(len(row)), seen, 1.5),
    "frequency": lambda row, seen: penalties.penalise_frequency(row, Columns(len(row)), seen, 0.5, 0.25),
    "ngrams": lambda row, seen: penalties.forbid_repeated_ngrams(row, Columns(len(row)), seen, 1),
    "words": lambda row, seen: penalties.forbid_words(row, Columns(len(row)), seen, [(int(token),) for token in seen]),
    "forbid": lambda row, seen: penalties.forbid(row, Columns(len(row)), seen),
}


@pytest.mark.parametrize("name", RULES)
def test_tokens_the_row_does_not_have_are_passed_over(name: str) -> None:
    narrow, wide = row_of(1, -1, 2), row_of(1, -1, 2, 7, 7, 7)
    RULES[name](wide, ids(0, 5, 3))
    RULES[name](narrow, ids(0, 5, 3))
    assert narrow[0] != 1
    assert narrow.tolist() == wide[:3].tolist()


@pytest.mark.parametrize("name", RULES)
def test_only_tokens_the_row_does_not_have_change_nothing(name: str) -> None:
    row = row_of(1, -1, 2)
    RULES[name](row, ids(3, 9))
    assert row.tolist() == [1, -1, 2]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_what_is_forbidden_stays_so_and_what_is_large_stays_finite(name: str) -> None:
    row = row_of(-INF, LARGEST, -LARGEST)
    RULES[name](row, ids(0, 1, 2))
    assert row[0] == -INF
    assert not np.isnan(row).any()
    if name not in ("ngrams", "words", "forbid"):
        assert np.isfinite(row[1:]).all()


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(("bias", "expected"), [(1e300, LARGEST), (-1e300, -LARGEST), (100.0, 100.0)])
def test_an_extreme_bias_stays_in_float32(bias: float, expected: float) -> None:
    row = row_of(-INF, 0, 0)
    penalties.add_bias(row, Columns(len(row)), ids(0, 1), np.array([bias, bias]))
    assert row.tolist() == [-INF, expected, 0]
