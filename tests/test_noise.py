"""The noise that two models share: what it is exactly, and that its numbers know nothing of each other.

Every statistic is of fixed seeds. Its bound is set so that independent exponential numbers would break it once in a million.
"""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from runtime.candidates import Candidates, Columns
from runtime.noise import ExponentialNoise

FALSE_ALARM = 1e-6
SEED = 20_261_103
# The logarithm is the platform's: its last bits may differ, the words under it may not.
LAST_BITS = 1e-6


def philox(key: tuple[int, int], counter: int) -> list[int]:
    """One block of Philox 4x64-10 (Salmon et al. 2011, section 3.3), in plain integers."""
    low, c = (1 << 64) - 1, [counter & ((1 << 64) - 1), 0, 0, 0]
    first, second = key
    for _ in range(10):
        one, two = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(two >> 64) ^ c[1] ^ first, two & low, (one >> 64) ^ c[3] ^ second, one & low]
        first, second = (first + 0x9E3779B97F4A7C15) & low, (second + 0xBB67AE8584CAA73B) & low
    return c


def plain_row(seed: int, position: int, vocab_size: int) -> list[float]:
    """The same row from the definition: four bytes a token, in the middle of their interval, then minus a logarithm."""
    key = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])
    blocks = (philox((key, position), counter) for counter in itertools.count(1))  # numpy counts before it draws
    halves = ((word >> shift) & 0xFFFFFFFF for block in blocks for word in block for shift in (0, 32))
    largest = 1 - 2.0**-24
    uniforms = (min(float(np.float32((half + 0.5) * 2.0**-32)), largest) for half in itertools.islice(halves, vocab_size))
    return [-math.log1p(-uniform) for uniform in uniforms]


# --- exactly ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (7, 3), (2**64 - 1, 5), (2**100, 4_000_000), (SEED, 2**40)])
@pytest.mark.parametrize("vocab_size", [1, 2, 7, 8, 9, 1000])
def test_a_row_is_philox_keyed_by_seed_and_position(seed: int, position: int, vocab_size: int) -> None:
    row = ExponentialNoise(seed).row(position, vocab_size)
    assert row.dtype == np.float32
    assert row.shape == (vocab_size,)
    np.testing.assert_allclose(row, plain_row(seed, position, vocab_size), rtol=LAST_BITS)


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (7, 3), (2**64 - 1, 5), (SEED, 2**40)])
@pytest.mark.parametrize("count", [1, 8, 57, 300, 3000])
def test_a_few_tokens_have_the_numbers_they_have_in_a_row(seed: int, position: int, count: int) -> None:
    vocab_size = 151_936
    random = np.random.default_rng(count)
    token_ids = np.sort(random.permutation(vocab_size)[:count])
    weights = random.integers(0, 3, (3, count)).astype(np.float32)  # many are 0
    whole = np.stack([ExponentialNoise(seed).row(position + row, vocab_size) for row in range(3)])
    divided = Candidates(weights.copy(), Columns.of(token_ids))
    ExponentialNoise(seed).divide(divided, position)
    assert np.array_equal(divided.rows, weights / whole[:, token_ids])


def test_whole_rows_are_divided_by_whole_rows() -> None:
    weights = np.random.default_rng(0).random((3, 100), np.float32)
    divided = Candidates.whole(weights.copy())
    ExponentialNoise(5).divide(divided, 7)
    assert np.array_equal(divided.rows, weights / np.stack([ExponentialNoise(5).row(7 + row, 100) for row in range(3)]))


def test_a_row_for_two_widths_is_made_once() -> None:
    noise = ExponentialNoise(3)
    noise.row(0, 120)
    noise.row(1, 100)
    assert len(noise._rows[1]) == 120


@pytest.mark.parametrize(
    ("seed", "position", "start"),
    [
        (7, 3, [0.5779368281364441, 2.5379996299743652, 2.407167911529541, 0.15530942380428314, 1.4233670234680176]),
        (0, 0, [0.07139628380537033, 0.6238147020339966, 0.10320790857076645, 1.1415764093399048, 0.04395119100809097]),
        (
            2**70,
            1_000_000,
            [1.9236171245574951, 2.9848079681396484, 1.6703238487243652, 0.6022171378135681, 0.12899746000766754],
        ),
    ],
)
def test_texts_of_a_seed_stay_what_they_are(seed: int, position: int, start: list[float]) -> None:
    """A change here changes every sampled text of every user who kept a seed."""
    np.testing.assert_allclose(ExponentialNoise(seed).row(position, 5), start, rtol=LAST_BITS)


def test_a_shorter_row_is_the_beginning_of_a_longer_one() -> None:
    longest = ExponentialNoise(SEED).row(9, 1001)
    for size in (1, 2, 3, 500, 999, 1000):
        assert np.array_equal(ExponentialNoise(SEED).row(9, size), longest[:size])


@pytest.mark.parametrize("sizes", [(10, 1000, 10), (1000, 10, 1000), (7, 8, 9)])
def test_rows_of_any_length_may_be_asked_for_in_any_order(sizes: tuple[int, ...]) -> None:
    noise, longest = ExponentialNoise(SEED), ExponentialNoise(SEED).row(9, 1000)
    for size in sizes:
        row = noise.row(9, size)
        assert row.shape == (size,)
        assert np.array_equal(row, longest[:size])


def test_the_order_of_positions_changes_nothing() -> None:
    forwards, backwards = ExponentialNoise(SEED), ExponentialNoise(SEED)
    rows = [forwards.row(position, 50) for position in range(20)]
    for position in reversed(range(20)):
        assert np.array_equal(backwards.row(position, 50), rows[position])


def test_numbers_are_above_zero_and_finite_even_at_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ends:
        def __init__(self, key: np.ndarray) -> None:
            pass

        def random_raw(self, size: int) -> np.ndarray:
            return np.array([0xFFFFFFFF00000000, 0xFFFFFF80FFFFFF7F][:size], np.uint64)

    monkeypatch.setattr(np.random, "Philox", Ends)
    row = ExponentialNoise(1).row(0, 4)
    np.testing.assert_allclose(row[:2], [2.0**-33, 24 * math.log(2)], rtol=LAST_BITS)
    assert (row > 0).all()
    assert np.isfinite(row).all()


# --- the cache --------------------------------------------------------------------------------------------------------


def test_a_row_is_made_once_until_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    made, philox_of_numpy = [], np.random.Philox
    monkeypatch.setattr(np.random, "Philox", lambda key: made.append(int(key[1])) or philox_of_numpy(key=key))
    noise = ExponentialNoise(SEED)
    before = {position: noise.row(position, 30).copy() for position in (4, 5, 6)}
    for position in (4, 5, 6):
        noise.row(position, 20)
    assert made == [4, 5, 6]
    noise.forget_before(6)
    noise.row(6, 30)
    assert made == [4, 5, 6]
    for position in (4, 5):
        assert np.array_equal(noise.row(position, 30), before[position])
    assert made == [4, 5, 6, 4, 5]


def test_forgetting_frees_all_that_stands_before() -> None:
    noise = ExponentialNoise(SEED)
    for position in range(100):
        noise.row(position, 10)
        noise.forget_before(position)
    assert len(noise._rows) == 1


# --- as random numbers ------------------------------------------------------------------------------------------------


def test_no_seed_is_a_fresh_one_each_time() -> None:
    assert not np.array_equal(ExponentialNoise(None).row(0, 8), ExponentialNoise(None).row(0, 8))


def test_the_numbers_are_standard_exponential() -> None:
    numbers = np.concatenate([ExponentialNoise(SEED).row(position, 2000) for position in range(50)]).astype(np.float64)
    assert stats.kstest(numbers, "expon").pvalue > FALSE_ALARM
    assert stats.kstest(numbers[numbers < 0.01], lambda x: -np.expm1(-x) / -math.expm1(-0.01)).pvalue > FALSE_ALARM


def cube(what: str) -> np.ndarray:
    """Uniform numbers [300, 300] whose rows differ in one part of the key, and in that alone."""
    if what == "positions":
        rows = [ExponentialNoise(SEED).row(position, 300) for position in range(300)]
    elif what == "seeds":
        rows = [ExponentialNoise(seed).row(17, 300) for seed in range(300)]
    elif what == "distant seeds":
        rows = [ExponentialNoise(seed << 64).row(17, 300) for seed in range(1, 301)]
    else:  # a seed and a position move together: a key of their sum, or of their difference, would show
        rows = [ExponentialNoise(5000 - step).row(step, 300) for step in range(300)]
    return -np.expm1(-np.array(rows, np.float64))


@pytest.mark.parametrize("what", ["positions", "seeds", "distant seeds", "both"])
def test_rows_and_tokens_know_nothing_of_each_other(what: str) -> None:
    numbers = cube(what)
    assert len(np.unique(numbers)) > 0.99 * numbers.size
    # Correlations at distances 1, 2, 3, 4, 8 and 64 along both axes: each a sum of about normal law, so the bound is two-sided
    # and shared by all twelve.
    centred = (numbers - 0.5) * math.sqrt(12)
    bound = stats.norm.isf(FALSE_ALARM / 2 / 12)
    for axis in (0, 1):
        moved = np.moveaxis(centred, axis, 0)
        for distance in (1, 2, 3, 4, 8, 64):
            products = moved[distance:] * moved[:-distance]
            assert abs(products.sum()) / math.sqrt(products.size) < bound, (axis, distance)
    # Pairs of neighbours along both axes fill the square evenly.
    for one, two in ((numbers[::2], numbers[1::2]), (numbers[:, ::2], numbers[:, 1::2])):
        cells = np.histogram2d(one.ravel(), two.ravel(), bins=10, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(cells.ravel()).pvalue > FALSE_ALARM / 2


def test_the_largest_quotient_of_weight_and_noise_follows_the_weights() -> None:
    weights = np.array([1.0, 0.5, 0.25, 0.0, 0.01, 0.24], np.float32)
    noise = ExponentialNoise(SEED)
    counts = np.bincount([int((weights / noise.row(position, 6)).argmax()) for position in range(20_000)], minlength=6)
    assert counts[3] == 0
    possible = weights[weights > 0].astype(np.float64)
    assert stats.chisquare(counts[weights > 0], 20_000 * possible / possible.sum()).pvalue > FALSE_ALARM
