"""Rules that keep some tokens: each against a sort of the whole row, in plain numbers."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime import filters

INF = float("inf")


def weights_like(kind: str, size: int, seed: int) -> np.ndarray:
    """A row with the heaviest token at 1."""
    random = np.random.default_rng(seed)
    if kind == "smooth":
        return filters.weights_of((2 * random.standard_normal(size)).astype(np.float32), 1.0)
    if kind == "flat":
        return np.ones(size, np.float32)
    if kind == "peaked":
        return filters.weights_of((30 * random.standard_normal(size)).astype(np.float32), 1.0)
    # Powers of two: sums are exact, so that a mass can be met exactly, and ties are many.
    row = 2.0 ** -random.integers(0, 5, size)
    row[random.random(size) < 0.2] = 0
    row[random.integers(size)] = 1
    return row.astype(np.float32)


def mass_order(weights: np.ndarray, keys: list[float], mass: float) -> set[int]:
    """The first tokens by key that make up the mass, and all whose key is as good as the last one's."""
    total, covered, bound = math.fsum(weights.tolist()), 0.0, -INF
    for token in sorted(range(len(weights)), key=lambda token: keys[token]):
        if covered >= mass * total:
            break
        covered += float(weights[token])
        bound = keys[token]
    return {token for token in range(len(weights)) if keys[token] <= bound and weights[token] > 0}


def kept_by(rule: object, weights: np.ndarray, bound: float) -> set[int]:
    """The tokens a rule keeps; one of weight 0 cannot be drawn, kept or not."""
    before = weights.copy()
    kept = rule(weights, bound)
    assert kept.dtype == bool
    assert np.array_equal(weights, before)
    assert kept[weights.argmax()] or rule is filters.typical_p
    return set(np.flatnonzero(kept & (weights > 0)).tolist())


KINDS = ("smooth", "flat", "peaked", "ties")
SIZES = (1, 2, 7, 300)

# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.25, 1, 1.0, 3.7])
def test_weights_are_the_exponentials_with_the_largest_at_one(temperature: float) -> None:
    logits = np.array([[1.0, 3.0, -2.0, -INF], [50.0, 49.0, 50.0, -900.0]], np.float32)
    before = logits.copy()
    weights = filters.weights_of(logits, temperature)
    expected = [[math.exp((logit - max(row)) / temperature) for logit in row] for row in logits.tolist()]
    np.testing.assert_allclose(weights, expected, rtol=1e-6, atol=1e-37)
    assert weights.dtype == np.float32
    assert np.array_equal(logits, before)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-40, 1e-38, 1e-6])
def test_the_smallest_temperatures_leave_the_largest_logits(temperature: float) -> None:
    logits = np.array([[1.0, 3.0, 3.0, -INF], [-1e38, 1e38, 0.0, 1e30]], np.float32)
    assert filters.weights_of(logits, temperature).tolist() == [[0, 1, 1, 0], [0, 1, 0, 0]]


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("temperature", [1e30, 1e38, 3.4e38, 1e39, 1e300])
def test_the_largest_temperatures_weigh_ordinary_logits_alike(temperature: float) -> None:
    weights = filters.weights_of(np.array([[1.0, 3.0, -200.0, -INF]], np.float32), temperature)
    assert weights.tolist() == [[1, 1, 1, 0]]


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("scale", [1e-20, 1e20, 1e38])
def test_a_large_temperature_divides_logits_as_large(scale: float) -> None:
    weights = filters.weights_of(np.array([2 * scale, scale], np.float32), scale)
    np.testing.assert_allclose(weights, [1, math.exp(-1)], rtol=1e-6)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("temperature", [1e-40, 1.0, 10.0])
def test_logits_as_far_apart_as_float32_allows_overflow_to_weight_zero(temperature: float) -> None:
    assert filters.weights_of(np.array([-3e38, 3e38], np.float32), temperature).tolist() == [0, 1]


# --- top_k ------------------------------------------------------------------------------------------------------------


def plain_top_k(logits: np.ndarray, k: int) -> list[int]:
    least = sorted(logits.tolist(), reverse=True)[min(k, len(logits)) - 1]
    return [token for token, logit in enumerate(logits.tolist()) if logit >= least]


@pytest.mark.parametrize("size", [1, 2, 511, 512, 513, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("levels", [2, 5, 600, 100_000])
def test_top_k_is_a_sort_however_the_row_is_cut_into_stripes(size: int, levels: int) -> None:
    random = np.random.default_rng(size * levels)
    for k in {1, 2, 40, 510, 511, 512, 513, size - 1, size, size + 1, 10 * size} - {0}:
        logits = random.integers(0, levels, size).astype(np.float32)
        logits[random.random(size) < 0.1] = -INF
        logits[random.integers(size)] = 1
        before = logits.copy()
        assert filters.top_k(logits, k).tolist() == plain_top_k(logits, k)
        assert np.array_equal(logits, before)


@pytest.mark.parametrize("k", [1, 3, 511])
def test_top_k_finds_the_largest_where_they_share_a_stripe_or_stand_behind_the_last_whole_one(k: int) -> None:
    logits = np.random.default_rng(k).standard_normal(512 * 4 + 100).astype(np.float32)
    logits[[7, 7 + 512, 7 + 1024, 7 + 1536, 2048, 2147]] = [9, 8, 7, 6, 8.5, 10]  # one stripe, and the tail
    assert filters.top_k(logits, k).tolist() == plain_top_k(logits, k)


def test_top_k_keeps_all_that_are_as_large_as_the_last() -> None:
    assert filters.top_k(np.array([1, 2, 1, 0, 1], np.float32), 2).tolist() == [0, 1, 2, 4]
    assert filters.top_k(np.zeros(1000, np.float32), 3).tolist() == list(range(1000))


def test_top_k_of_fewer_tokens_than_k_keeps_those_there_are() -> None:
    logits = np.full(600, -INF, np.float32)
    logits[[5, 599]] = [1, 2]
    weights = filters.weights_of(logits[filters.top_k(logits, 40)], 1.0)
    np.testing.assert_allclose(np.sort(weights[weights > 0]), [math.exp(-1), 1], rtol=1e-6)


# --- top_p ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_top_p_keeps_the_heaviest_tokens_of_a_sort(kind: str, size: int) -> None:
    for seed in range(5):
        weights = weights_like(kind, size, seed)
        keys = [-weight for weight in weights.tolist()]
        for mass in (1e-300, 1e-12, 0.1, 0.5, 0.75, 0.9, 0.999, 1 - 1e-9):
            assert kept_by(filters.top_p, weights, mass) == mass_order(weights, keys, mass), (seed, mass)


def test_top_p_keeps_the_token_that_reaches_the_mass_and_none_behind() -> None:
    weights = np.array([0.25, 1, 0.5, 0.25], np.float32)  # halves, quarters and eighths of the whole
    for mass, kept in ((0.5, {1}), (0.5 + 1e-9, {1, 2}), (0.75, {1, 2}), (0.75 + 1e-9, {0, 1, 2, 3})):
        assert kept_by(filters.top_p, weights, mass) == kept


def test_top_p_keeps_equal_tokens_together() -> None:
    assert kept_by(filters.top_p, np.ones(8, np.float32), 1e-12) == set(range(8))
    assert kept_by(filters.top_p, np.array([0.5, 1, 0.5, 0.25, 0.5], np.float32), 0.4) == {0, 1, 2, 4}


def test_top_p_adds_in_float64() -> None:
    # In float32 the sum stops growing at 1: half of the mass would never be reached.
    weights = np.full((1 << 20) + 1, 2.0**-25, np.float32)
    weights[0] = 1
    assert kept_by(filters.top_p, weights, 1 / (1 + 2.0**-5)) == {0}
    assert len(kept_by(filters.top_p, weights, 1 / (1 + 2.0**-5) + 1e-9)) == len(weights)


@pytest.mark.parametrize(
    ("mass", "rest", "kept"), [(0.5, 0.0, 1), (0.5, 0.9, 2), (0.5, 2.0, 3), (0.9, 0.5, 3), (0.9, 0.1, 2), (0.9999, 1e-9, 3)]
)
def test_top_p_counts_what_is_not_among_the_weights(mass: float, rest: float, kept: int) -> None:
    # All of them are kept where they do not make up the mass, the light one too.
    weights = np.array([0.001, 1, 0.5], np.float32)
    assert filters.top_p(weights, mass, rest).sum() == kept


# --- min_p ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_min_p_keeps_what_is_near_the_heaviest(kind: str, size: int) -> None:
    weights = weights_like(kind, size, 3)
    for fraction in (1e-300, 1e-12, 0.0625, 0.25, 0.5, 1.0):
        expected = {token for token, weight in enumerate(weights.tolist()) if weight >= fraction and weight > 0}
        assert kept_by(filters.min_p, weights, fraction) == expected


# --- typical_p --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["smooth", "flat", "peaked"])
@pytest.mark.parametrize("size", SIZES)
def test_typical_p_keeps_the_least_surprising_surprises_of_a_sort(kind: str, size: int) -> None:
    for seed in range(5):
        weights = weights_like(kind, size, seed)
        total = math.fsum(weights.tolist())
        surprisal = [math.log(total / weight) if weight else INF for weight in weights.tolist()]
        mean = math.fsum(s * w / total for s, w in zip(surprisal, weights.tolist(), strict=True) if w)
        # Rounded, so that what float32 takes for equal is equal here.
        keys = [round(abs(s - mean), 5) for s in surprisal]
        for mass in (1e-300, 1e-12, 0.1, 0.37, 0.66, 0.9, 0.999):
            assert kept_by(filters.typical_p, weights, mass) == mass_order(weights, keys, mass), (seed, mass)


def test_typical_p_may_drop_the_heaviest_token() -> None:
    # Surprisals 0.69 (once) and 2.77 (eight times), mean 1.73: both 1.04 away; a little more weight makes the many nearer.
    weights = np.array([1] + [1 / 7] * 8, np.float32)
    assert kept_by(filters.typical_p, weights, 0.1) == set(range(1, 9))


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("mass", [1e-300, 0.5, 1 - 2**-53])
def test_typical_p_on_edges(mass: float) -> None:
    assert kept_by(filters.typical_p, np.ones(1, np.float32), mass) == {0}
    assert kept_by(filters.typical_p, np.array([0, 1, 0], np.float32), mass) == {1}
    assert kept_by(filters.typical_p, np.ones(5, np.float32), mass) == set(range(5))
    assert kept_by(filters.typical_p, np.array([1, 1e-45], np.float32), mass) >= {0}


# --- all of them ------------------------------------------------------------------------------------------------------

rows = st.lists(st.sampled_from([0.0, 1e-45, 1e-30, 0.1, 0.3, 0.5, 1.0]), min_size=1, max_size=12).filter(
    lambda row: 1.0 in row
)


@settings(max_examples=200, deadline=None)
@given(rows, st.sampled_from(["top_p", "min_p", "typical_p"]), st.sampled_from([1e-300, 1e-6, 0.3, 0.7, 0.999999, 1.0]))
@example([1.0], "typical_p", 1e-300)
def test_something_is_kept_and_equal_tokens_fare_alike(row: list[float], name: str, bound: float) -> None:
    weights = np.array(row, np.float32)
    kept = getattr(filters, name)(weights, bound)
    assert weights[kept].any()
    for weight in set(row):
        assert len(set(kept[weights == np.float32(weight)].tolist())) == 1


@settings(max_examples=200, deadline=None)
@given(rows, st.sampled_from(["top_p", "min_p", "typical_p"]), st.sampled_from([1e-6, 0.3, 0.7, 0.9]), st.randoms())
def test_where_a_token_stands_in_the_vocabulary_decides_nothing(row: list[float], name: str, bound: float, random) -> None:
    order = list(range(len(row)))
    random.shuffle(order)
    weights = np.array(row, np.float32)
    rule = getattr(filters, name)
    assert np.array_equal(rule(weights, bound)[order], rule(weights[order], bound))
