"""The sampling rules, each against a slow and plain one after transformers' definitions."""

import math
import warnings
from collections.abc import Sequence

import numpy as np
import pytest

from runtime.sampling import SamplingParams, token_distributions


def softmax(scores: Sequence[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    return [weight / sum(weights) for weight in weights]


def reference_row(logits: Sequence[float], before: Sequence[int], params: SamplingParams) -> list[float]:
    """One row: what a rule removes gets -inf, and the next rule looks at the softmax of what is left."""
    scores = [float(logit) for logit in logits]
    for token in set(before) & set(range(len(scores))):
        score, penalty = scores[token], params.repetition_penalty
        scores[token] = score * penalty if score < 0 else score / penalty
    if params.temperature == 0:
        best = scores.index(max(scores))
        return [float(token == best) for token in range(len(scores))]
    scores = [score / params.temperature for score in scores]
    if params.top_k:
        kth = sorted(scores, reverse=True)[min(params.top_k, len(scores)) - 1]
        scores = [score if score >= kth else -math.inf for score in scores]
    if params.top_p < 1:
        probabilities, total = softmax(scores), 0.0
        for token in sorted(range(len(scores)), key=lambda token: -probabilities[token]):
            if total >= params.top_p:
                scores[token] = -math.inf
            total += probabilities[token]
    if params.min_p:
        probabilities = softmax(scores)
        floor = params.min_p * max(probabilities)
        scores = [score if p >= floor else -math.inf for score, p in zip(scores, probabilities, strict=True)]
    return softmax(scores)


def random_logits(rows: int, vocab_size: int, seed: int, scale: float = 3.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal((rows, vocab_size))).astype(np.float32)


RULES = {
    "greedy": SamplingParams(),
    "greedy-penalty": SamplingParams(repetition_penalty=1.7),
    "plain": SamplingParams(temperature=1.0),
    "cold": SamplingParams(temperature=0.3),
    "hot": SamplingParams(temperature=2.5),
    "penalty": SamplingParams(temperature=1.0, repetition_penalty=1.7),
    "reward": SamplingParams(temperature=1.0, repetition_penalty=0.6),
    "top-k": SamplingParams(temperature=1.0, top_k=3),
    "top-1": SamplingParams(temperature=1.0, top_k=1),
    "top-k-all": SamplingParams(temperature=1.0, top_k=11),
    "top-k-beyond": SamplingParams(temperature=1.0, top_k=100),
    "top-p": SamplingParams(temperature=1.3, top_p=0.8),
    "top-p-tiny": SamplingParams(temperature=1.3, top_p=1e-9),
    "min-p": SamplingParams(temperature=1.3, min_p=0.2),
    "min-p-one": SamplingParams(temperature=1.3, min_p=1.0),
    "all": SamplingParams(temperature=1.4, top_k=7, top_p=0.85, min_p=0.1, repetition_penalty=1.3),
    "all-narrow": SamplingParams(temperature=0.8, top_k=4, top_p=0.6, min_p=0.3, repetition_penalty=0.8),
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", RULES)
def test_rules_follow_their_definitions(name: str, seed: int) -> None:
    params, logits = RULES[name], random_logits(4, 11, seed)
    history, block = [1, 5, 1], [8, 2, 5]
    got = token_distributions(logits, history, block, params)
    expected = [reference_row(logits[row], history + block[:row], params) for row in range(4)]
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-9)
    assert np.array_equal(got > 0, np.array(expected) > 0)
    assert got.dtype == np.float32


@pytest.mark.parametrize("name", RULES)
def test_rows_sum_to_one_and_logits_are_left_alone(name: str) -> None:
    logits = random_logits(3, 1000, 1)
    before = logits.copy()
    rows = token_distributions(logits, [1], [2, 3], RULES[name])
    np.testing.assert_allclose(rows.sum(axis=1, dtype=np.float64), 1, rtol=0, atol=1e-6)
    assert np.array_equal(logits, before)
    assert not np.shares_memory(rows, logits)


@pytest.mark.parametrize("name", RULES)
def test_a_row_does_not_depend_on_the_rows_it_is_computed_with(name: str) -> None:
    # The draft sees one row at a time, the target all of them: the same logits must give the same bits.
    logits, history, block = random_logits(4, 50, 2), [3, 4], [7, 3, 9]
    together = token_distributions(logits, history, block, RULES[name])
    for row in range(4):
        alone = token_distributions(logits[row : row + 1], history, block[:row], RULES[name])
        assert np.array_equal(alone[0], together[row])


def test_the_penalty_sees_the_tokens_of_the_block_row_by_row() -> None:
    logits = np.array([[2.0, 2.0, -2.0, -2.0, 0.0]] * 2, np.float32)
    rows = token_distributions(logits, [4], [0, 2, 1], SamplingParams(temperature=1.0, repetition_penalty=2.0))
    # The last row stands behind all three tokens, the one before it behind the first two.
    np.testing.assert_allclose(rows[0], softmax([1.0, 2.0, -4.0, -2.0, 0.0]), rtol=1e-6)
    np.testing.assert_allclose(rows[1], softmax([1.0, 1.0, -4.0, -2.0, 0.0]), rtol=1e-6)


def test_the_penalty_counts_a_token_once_however_often_it_stands() -> None:
    logits, params = random_logits(1, 6, 3), SamplingParams(temperature=1.0, repetition_penalty=1.5)
    once = token_distributions(logits, [2], [], params)
    assert np.array_equal(once, token_distributions(logits, [2, 2, 2], [2, 2], params))


def test_the_penalty_passes_over_tokens_the_row_does_not_have() -> None:
    logits, params = random_logits(1, 6, 3), SamplingParams(temperature=1.0, repetition_penalty=1.5)
    assert np.array_equal(token_distributions(logits, [2, 6, 99], [], params), token_distributions(logits, [2], [], params))


def test_greedy_takes_the_first_of_equal_logits() -> None:
    rows = token_distributions(np.array([[0, 3, 3, 1]], np.float32), [], [], SamplingParams())
    assert rows.tolist() == [[0, 1, 0, 0]]


@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-38, 1e-6])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    logits = np.vstack([random_logits(3, 20, 4), np.full((1, 20), -1e38), random_logits(1, 20, 5) * 1e30])
    logits[3, 7] = 1e38
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = token_distributions(logits.astype(np.float32), [], [0] * 4, SamplingParams(temperature=temperature))
    assert np.array_equal(rows, np.eye(20)[logits.argmax(axis=1)])


@pytest.mark.parametrize("temperature", [1e30, 3e38, 1e39, 1e300])
def test_the_largest_temperatures_are_uniform(temperature: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = token_distributions(random_logits(2, 20, 4), [], [0], SamplingParams(temperature=temperature))
    np.testing.assert_allclose(rows, 1 / 20, rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1.0, 1e30, 1e39])
def test_a_token_of_logit_minus_infinity_has_probability_zero(temperature: float) -> None:
    logits = np.array([[-np.inf, 2.0, 1.0, -np.inf]], np.float32)
    row = token_distributions(logits, [0, 1], [], SamplingParams(temperature=temperature, repetition_penalty=1.2))[0]
    assert row[[0, 3]].tolist() == [0, 0]
    assert row.sum() == pytest.approx(1)


@pytest.mark.parametrize("penalty", [1e-300, 1e-40, 1e-30, 1e30, 1e39, 1e300])
def test_extreme_penalties_still_give_distributions(penalty: float) -> None:
    logits, params = np.array([[3.0, -3.0, 0.0]], np.float32), SamplingParams(temperature=1.0, repetition_penalty=penalty)
    row = token_distributions(logits, [0, 1, 2], [], params)[0]
    assert np.isfinite(row).all()
    assert row.sum() == pytest.approx(1)


def test_top_k_keeps_ties_as_transformers_does() -> None:
    rows = token_distributions(np.array([[2, 1, 1, 0]], np.float32), [], [], SamplingParams(temperature=1.0, top_k=2))
    assert (rows > 0).tolist() == [[True, True, True, False]]


def test_top_p_keeps_the_token_that_reaches_it_and_none_behind() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32))
    for top_p, kept in ((0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.96, 4)):
        row = token_distributions(logits, [], [], SamplingParams(temperature=1.0, top_p=top_p))[0]
        assert np.count_nonzero(row) == kept
        np.testing.assert_allclose(row[:kept], [0.5, 0.3, 0.15, 0.05][:kept] / np.sum([0.5, 0.3, 0.15, 0.05][:kept]), rtol=1e-5)


def test_equal_probabilities_at_the_edge_of_top_p_are_taken_in_order_of_their_ids() -> None:
    row = token_distributions(np.zeros((1, 8), np.float32), [], [], SamplingParams(temperature=1.0, top_p=0.3))[0]
    np.testing.assert_allclose(row, [1 / 3] * 3 + [0] * 5, rtol=1e-6)


# --- parameters -------------------------------------------------------------------------------------------------------

NOT_NUMBERS = [None, "1", True, [1.0], float("nan"), float("inf"), -float("inf")]
WRONG = {
    "max_new_tokens": [0, -1, 1.0, *NOT_NUMBERS],
    "top_k": [-1, 2.0, *NOT_NUMBERS],
    "seed": [np.timedelta64(3), -1, 0.0, *NOT_NUMBERS[1:]],
    "temperature": [10**400, np.timedelta64(3), -0.1, -1, *NOT_NUMBERS],
    "top_p": [0, 0.0, -0.5, 1.0001, 2, *NOT_NUMBERS],
    "min_p": [-0.1, 1.1, *NOT_NUMBERS],
    "repetition_penalty": [0, 0.0, -1.2, *NOT_NUMBERS],
    "stop": ["", [""], ["a", ""], [1], ["a", None], [b"a"], None, 5],
    "ignore_eos": ["no", None, 2],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_value_outside_its_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is .*expected"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"max_new_tokens": 1, "top_k": 0, "top_p": 1, "min_p": 0, "temperature": 0, "repetition_penalty": 1, "seed": 0},
        {"min_p": 1, "top_p": 1e-9, "temperature": 1e-9, "seed": 2**100, "ignore_eos": True},
        {"max_new_tokens": np.int64(3), "temperature": np.float32(0.5), "top_k": np.int32(2), "seed": np.uint32(7)},
    ],
)
def test_the_edges_of_the_ranges_and_numpy_numbers_are_taken(fields: dict[str, object]) -> None:
    params = SamplingParams(**fields)
    assert {name: getattr(params, name) for name in fields} == fields


def test_stop_may_be_one_string_or_several() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams().stop == ()


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (0.0, True), (1e-9, False), (1, False)])
def test_greedy_is_temperature_zero(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy
