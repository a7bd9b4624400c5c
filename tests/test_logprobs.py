"""Log-probabilities of the model itself, against a sort and a plain sum of exponentials."""

import math

import numpy as np
import pytest

from runtime.logprobs import TokenLogprob, token_logprob

INF = math.inf


def plain(row: list[float], token: int, num_top: int) -> TokenLogprob:
    largest = max(row)
    normaliser = largest + math.log(math.fsum(math.exp(logit - largest) for logit in row))
    top = sorted(range(len(row)), key=lambda other: (-row[other], other))[:num_top]
    return TokenLogprob(row[token] - normaliser, tuple((other, row[other] - normaliser) for other in top))


def check(row: np.ndarray, token: int, num_top: int) -> None:
    before = row.copy()
    got, expected = token_logprob(row, token, num_top), plain(row.tolist(), token, num_top)
    assert got.logprob == pytest.approx(expected.logprob, rel=1e-12, abs=1e-12)
    assert [other for other, _ in got.top] == [other for other, _ in expected.top]
    assert [logprob for _, logprob in got.top] == pytest.approx([logprob for _, logprob in expected.top], rel=1e-12, abs=1e-12)
    assert np.array_equal(row, before)


@pytest.mark.parametrize("num_top", [0, 1, 2, 5, 99, 100])
@pytest.mark.parametrize("vocab_size", [1, 2, 100, 3000])
def test_rows_agree_with_a_sort(num_top: int, vocab_size: int) -> None:
    random = np.random.default_rng(num_top * 31 + vocab_size)
    for scale in (1, 30):
        row = (scale * random.standard_normal(vocab_size)).astype(np.float32)
        for token in {0, vocab_size - 1, int(row.argmax()), int(row.argmin())}:
            check(row, token, num_top)


@pytest.mark.parametrize("num_top", [1, 2, 3, 20, 50])
def test_equal_tokens_stand_in_order_of_their_ids(num_top: int) -> None:
    row = np.random.default_rng(num_top).integers(0, 4, 50).astype(np.float32)
    check(row, 7, num_top)
    assert [token for token, _ in token_logprob(np.zeros(9, np.float32), 0, 4).top] == [0, 1, 2, 3]


def test_figures_worked_by_hand() -> None:
    row = np.log(np.array([0.5, 0.125, 0.125, 0.25])).astype(np.float32)
    got = token_logprob(row, 2, 3)
    assert got.logprob == pytest.approx(math.log(0.125), abs=1e-6)
    assert got.top == (
        (0, pytest.approx(math.log(0.5), abs=1e-6)),
        (3, pytest.approx(math.log(0.25), abs=1e-6)),
        (1, pytest.approx(math.log(0.125), abs=1e-6)),
    )
    assert got.top[2][1] == got.logprob


def test_the_chosen_token_need_not_be_among_the_top() -> None:
    got = token_logprob(np.array([9, 0, 8], np.float32), 1, 2)
    assert [token for token, _ in got.top] == [0, 2]
    assert got.logprob < got.top[1][1]


def test_adding_a_number_to_all_logits_changes_nothing() -> None:
    row = np.array([3, -1, 0.5, 2], np.float32)
    for shift in (-4096, 4096):  # whole, so that float32 keeps the differences
        moved = token_logprob(row + np.float32(shift), 1, 4)
        assert moved.logprob == pytest.approx(token_logprob(row, 1, 4).logprob, abs=1e-12)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_the_largest_logits_and_forbidden_tokens() -> None:
    got = token_logprob(np.array([3e38, -3e38, -INF, 3e38], np.float32), 2, 4)
    assert got.logprob == -INF
    assert [token for token, _ in got.top] == [0, 3, 1, 2]
    assert got.top[0][1] == got.top[1][1] == pytest.approx(-math.log(2))
    assert got.top[3][1] == -INF
    assert token_logprob(np.array([-7], np.float32), 0, 3) == TokenLogprob(0.0, ((0, 0.0),))


def test_many_small_probabilities_are_added_in_float64() -> None:
    # Beside the first token the others together weigh as much, though none of them changes a float32 sum.
    row = np.full(1 + (1 << 20), -20 * math.log(2), np.float32)
    row[0] = 0
    check(row, 0, 1)
    assert token_logprob(row, 0, 0).logprob == pytest.approx(-math.log(2), abs=1e-5)


def test_numbers_are_pythons_own() -> None:
    got = token_logprob(np.array([1, 2], np.float32), 0, 2)
    assert {type(got.logprob), *(type(value) for _, value in got.top)} == {float}
    assert {type(token) for token, _ in got.top} == {int}
