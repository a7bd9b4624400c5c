"""The acceptance rule: figures worked by hand, and the law of what it emits, integrated exactly over the uniforms."""

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.verify import (
    Verification,
    acceptance_probability,
    draw,
    residual_distribution,
    verify,
    verify_choices,
)

A, B, C, D, E = range(5)
TARGET = [0.40, 0.25, 0.20, 0.10, 0.05]
DRAFT = [0.30, 0.30, 0.15, 0.15, 0.10]
LARGEST_UNIFORM = 1 - 2.0**-53
STEP = Fraction(1, 2**20)  # wider than the rounding of float32 probabilities, narrower than any step of the tests' rows

Row = tuple[Fraction, ...]


def one_hot(token: int, size: int = 5) -> list[float]:
    return [float(other == token) for other in range(size)]


# --- worked by hand ---------------------------------------------------------------------------------------------------


def test_three_accepted_and_a_bonus_are_four_tokens_from_one_pass() -> None:
    # The bonus row's cumulative probabilities are 0.40, 0.65, 0.85, 0.95, 1: 0.90 lies in D.
    done = verify([A, B, C], np.array([DRAFT] * 3), np.array([TARGET] * 4), [0.99, 0.72, 0.99, 0.90])
    assert done.drawing is not None
    assert [round(probability, 3) for probability in done.drawing.acceptance_probabilities] == [1.0, 0.833, 1.0]
    assert (done.num_accepted, done.next_token, done.drawing.residual) == (3, D, None)


@pytest.mark.parametrize(("uniform", "correction"), [(0.0, A), (0.66, A), (0.67, C), (LARGEST_UNIFORM, C)])
def test_a_refused_token_is_replaced_from_the_residual_and_ends_the_block(uniform: float, correction: int) -> None:
    draft_row, target_row = [0.30, 0.30, 0.15, 0.15, 0.10], [0.40, 0.10, 0.20, 0.10, 0.05]
    target_rows = np.array([TARGET, target_row, TARGET, TARGET])
    done = verify([A, B, C], np.array([DRAFT, draft_row, DRAFT]), target_rows, [0.5, 0.65, 0.0, uniform])
    assert done.drawing is not None
    assert [round(probability, 3) for probability in done.drawing.acceptance_probabilities] == [1.0, 0.333]
    assert done.num_accepted == 1
    assert done.drawing.residual is not None
    np.testing.assert_allclose(done.drawing.residual, [2 / 3, 0, 1 / 3, 0, 0], atol=1e-12)
    assert done.next_token == correction


@pytest.mark.parametrize(
    ("target", "draft", "expected"), [(0.4, 0.3, 1.0), (0.25, 0.30, 0.833), (0.1, 0.3, 0.333), (0.0, 0.5, 0.0), (0.3, 0.3, 1.0)]
)
def test_acceptance_probability(target: float, draft: float, expected: float) -> None:
    assert acceptance_probability(target, draft) == pytest.approx(expected, abs=5e-4)


def test_a_token_is_accepted_below_its_probability_and_refused_at_it() -> None:
    rows = np.array([[0.5, 0.5], [1.0, 0.0]])
    assert verify([1], None, rows, [np.nextafter(0.5, 0), 0]).num_accepted == 1
    done = verify([1], None, rows, [0.5, 0])
    assert (done.num_accepted, done.next_token) == (0, 0)
    assert done.drawing is not None
    assert done.drawing.acceptance_probabilities == (0.5,)
    np.testing.assert_array_equal(done.drawing.residual, [1.0, 0.0])


@pytest.mark.parametrize("draft_probs", [None, np.array([[0.5, 0.5]])])
def test_a_token_the_target_never_says_is_refused_even_at_uniform_zero(draft_probs: np.ndarray | None) -> None:
    done = verify([1], draft_probs, np.array([[1.0, 0.0], [0.5, 0.5]]), [0.0, 0.0])
    assert (done.num_accepted, done.next_token) == (0, 0)


@pytest.mark.parametrize("uniform", [0.0, 0.999, LARGEST_UNIFORM])
def test_equal_rows_refuse_nothing(uniform: float) -> None:
    rows = np.array([TARGET] * 4, np.float32)
    assert verify([E, D, E], rows[:3], rows, [uniform] * 4).num_accepted == 3


def test_equal_rows_have_the_target_itself_as_residual() -> None:
    row = np.array(TARGET, np.float32)
    assert residual_distribution(row, row) is row


def test_an_empty_proposal_draws_from_the_target() -> None:
    target_probs, uniforms = np.array([TARGET]), [0.84]
    done = verify([], None, target_probs, uniforms)
    assert (done.num_accepted, done.next_token, done.drawing.residual) == (0, C, None)
    assert (done.drawing.target_probs, done.drawing.uniforms, done.drawing.columns.count) == (target_probs, uniforms, 5)
    # One uniform, and no more: which it is does not matter to a proposal of nothing.
    assert verify([], np.empty((0, 5)), target_probs, uniforms).next_token == C


def test_a_drawing_holds_the_numbers_it_was_made_of() -> None:
    draft_probs, target_probs, uniforms = np.array([DRAFT] * 2), np.array([TARGET] * 3), np.array([0.0, 0.9, 0.1])
    before = [array.copy() for array in (draft_probs, target_probs, uniforms)]
    drawing = verify([A, E], draft_probs, target_probs, uniforms).drawing
    assert drawing is not None
    assert drawing.target_probs is target_probs
    assert drawing.uniforms is uniforms
    assert drawing.acceptance_probabilities == (1.0, 0.5)
    np.testing.assert_allclose(drawing.residual, [2 / 3, 0, 1 / 3, 0, 0], atol=1e-12)
    for array, copy in zip((draft_probs, target_probs, uniforms), before, strict=True):
        assert np.array_equal(array, copy)


def test_the_first_refusal_ends_the_judgement() -> None:
    # The second token has draft probability 0, which is an error where it is judged.
    done = verify([E, A], np.array([DRAFT, one_hot(B)]), np.array([TARGET] * 3), [0.99, 0.0, 0.0])
    assert done.num_accepted == 0
    assert done.drawing is not None
    assert done.drawing.acceptance_probabilities == (0.5,)


@pytest.mark.parametrize(
    ("probabilities", "uniform", "token"),
    [
        ([0.0, 0.5, 0.0, 0.5, 0.0], 0.0, 1),  # at 0 the first token is one that can be drawn
        ([0.0, 0.5, 0.0, 0.5, 0.0], 0.5, 3),
        ([0.0, 0.5, 0.0, 0.5, 0.0], LARGEST_UNIFORM, 3),
        ([0.2, 0.2, 0.0], LARGEST_UNIFORM, 1),  # the sum stands for 1
        ([1e-30, 0.0, 0.0], LARGEST_UNIFORM, 0),
        ([5e-324, 0.0], LARGEST_UNIFORM, 0),  # the product rounds up to the total itself
        ([0.0, 0.0, 1.0], 0.3, 2),
    ],
)
def test_draw(probabilities: list[float], uniform: float, token: int) -> None:
    assert draw(np.array(probabilities), uniform) == token


@given(st.lists(st.sampled_from([0.0, 1e-38, 1e-9, 0.1, 0.25, 1.0]), min_size=1, max_size=8).filter(any), st.floats(0, 1))
@example([0.1] * 7 + [0.0], LARGEST_UNIFORM)
def test_draw_never_gives_a_token_of_probability_zero(probabilities: list[float], uniform: float) -> None:
    for dtype in (np.float32, np.float64):
        row = np.array(probabilities, dtype)
        assert row[draw(row, min(uniform, LARGEST_UNIFORM))] > 0


DRAW_SIZES = [1, 5, 511, 512, 513, 1024, 2000]
WHOLE = 1 << 24


def whole_numbers(size: int, seed: int) -> list[int]:
    """Weights that sum to 2 ** 24, so that float32 and float64 hold them and all their sums exactly."""
    random = np.random.default_rng(seed)
    weights = random.integers(0, WHOLE // (2 * size), size)
    weights[random.random(size) < 0.3] = 0
    if size > 5:
        borders = [0, 1, 510, 511, 512, 513, 1023, 1024, 1535, 1536, size - 2, size - 1]
        weights[[token for token in borders if token < size and random.random() < 0.8]] = 0
    weights[random.integers(size)] += WHOLE - weights.sum()
    return weights.tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", DRAW_SIZES)
def test_draw_is_the_plain_cumulative_sum_at_every_step_of_it(size: int, dtype: type) -> None:
    for seed in range(3):
        weights = whole_numbers(size, seed)
        row = (np.array(weights) / WHOLE).astype(dtype)
        ends = list(itertools.accumulate(weights))
        steps = [0.0, *(end / WHOLE for end in ends)]
        chosen = steps if size < 600 else [*steps[:: size // 100], *steps[505:520], *steps[1020:1030], *steps[-5:]]
        for step in {*chosen, 0.5, LARGEST_UNIFORM}:
            for uniform in (np.nextafter(step, 0), step, np.nextafter(step, 1)):
                if 0 <= uniform < 1:
                    # The first token whose sum exceeds the uniform: scaling by a power of two is exact.
                    expected = bisect.bisect_right(ends, float(uniform) * WHOLE)
                    assert draw(row, float(uniform)) == expected, (seed, uniform)


@pytest.mark.parametrize("size", [511, 512, 513, 1024, 1025, 2000])
@pytest.mark.parametrize("only", [0, 1, 510, 511, 512, 513, 1023, 1024, 1999])
def test_draw_finds_the_only_token_there_is(size: int, only: int) -> None:
    if only < size:
        for value in (1.0, 0.7, 1e-38):
            row = np.zeros(size, np.float32)
            row[only] = value
            assert [draw(row, uniform) for uniform in (0.0, 0.5, LARGEST_UNIFORM)] == [only] * 3


@pytest.mark.parametrize("size", DRAW_SIZES)
def test_draw_of_rounded_rows_is_the_plain_sum_up_to_rounding(size: int) -> None:
    random = np.random.default_rng(size)
    for sparse in (0.0, 0.9):
        row = random.exponential(size=size) * (random.random(size) >= sparse)
        row[random.integers(size)] += 0.5
        row = (0.97 * row / row.sum()).astype(np.float32)
        ends = np.cumsum(row, dtype=np.longdouble)
        ends /= ends[-1]
        # Where the blocks meet, their sums and the running sum round differently: the token must be possible all the same.
        near = [
            ends[token] * (1 + ulps * 2.0**-53)
            for token in (510, 511, 512, 1023, size - 1)
            if token < size
            for ulps in (-2, -1, 0, 1)
        ]
        for uniform in np.minimum([*random.random(200), *map(float, near), 0.0], LARGEST_UNIFORM).tolist():
            token = draw(row, uniform)
            assert row[token] > 0
            assert (ends[token - 1] if token else 0) - 1e-14 <= uniform <= ends[token] + 1e-14


def test_a_draw_follows_float64_sums_of_float32_rows() -> None:
    # In float32 the sum of these stops growing at 1: the last million would never be drawn.
    row = np.full(1 << 21, 2.0**-24, np.float32)
    row[0] = 1.0
    assert draw(row, 0.999) > 1 << 20


@pytest.mark.parametrize("size", [512, 600, 1024])
def test_a_draw_adds_in_float64_inside_a_block_too(size: int) -> None:
    row = np.full(size, 2.0**-25, np.float32)
    row[0] = 1.0
    total = 1 + (size - 1) * 2.0**-25
    for token in (1, 2, 255, 510, 511, size - 1):
        assert draw(row, (1 + (token - 0.5) * 2.0**-25) / total) == token


# --- choices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("proposed", "choices", "expected"),
    [
        ((), (4,), (0, 4)),
        ((4,), (4, 2), (1, 2)),
        ((4,), (3, 2), (0, 3)),
        ((4, 2, 7), (4, 2, 7, 1), (3, 1)),
        ((4, 2, 7), (4, 3, 7, 1), (1, 3)),  # a token behind a refused one is not looked at, though it agrees
        ((4, 4), (4, 5, 4), (1, 5)),
    ],
)
def test_choices_are_accepted_up_to_the_first_that_differs(
    proposed: tuple[int, ...], choices: tuple[int, ...], expected: tuple[int, int]
) -> None:
    assert verify_choices(proposed, choices) == Verification(*expected, None)
    done = verify_choices(np.array(proposed, np.int64), np.array(choices))
    assert done == Verification(*expected)
    assert type(done.next_token) is int


def test_choices_are_the_one_hot_case_of_the_rule() -> None:
    for proposed in itertools.product(range(3), repeat=2):
        for choices in itertools.product(range(3), repeat=3):
            done = verify(proposed, None, np.array([one_hot(choice, 3) for choice in choices]), [0.5] * 3)
            assert verify_choices(proposed, choices) == Verification(done.num_accepted, done.next_token)


@pytest.mark.parametrize("num_choices", [0, 1, 2, 4])
def test_another_number_of_choices_is_refused(num_choices: int) -> None:
    with pytest.raises(ValueError, match=f"A proposal of 2 tokens needs 3 choices of the target; found {num_choices}"):
        verify_choices([1, 2], [1] * num_choices)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_draft_rows", "num_target_rows", "num_uniforms"), [(1, 3, 3), (3, 3, 3), (2, 2, 3), (2, 4, 3), (2, 3, 2), (None, 2, 3)]
)
def test_shapes_that_do_not_fit_are_refused(num_draft_rows: int | None, num_target_rows: int, num_uniforms: int) -> None:
    draft_probs = None if num_draft_rows is None else np.array([DRAFT] * num_draft_rows)
    with pytest.raises(ValueError, match="A proposal of 2 tokens needs 3 target rows and uniforms and 2 draft rows"):
        verify([A, B], draft_probs, np.array([TARGET] * num_target_rows), [0.1] * num_uniforms)


@pytest.mark.parametrize("probability", [0.0, -0.1, float("nan")])
def test_a_token_that_cannot_have_been_drawn_is_refused(probability: float) -> None:
    with pytest.raises(ValueError, match="not drawn from the row it came with"):
        verify([A], np.array([[probability, 1 - probability, 0, 0, 0]]), np.array([TARGET] * 2), [0.0, 0.0])


# --- the law, exactly -------------------------------------------------------------------------------------------------


def pieces(breakpoints: Sequence[Fraction]) -> Iterator[tuple[Fraction, list[float]]]:
    """Yields every interval between breakpoints: its length, and uniforms at both ends of it and inside."""
    inner = {point for point in breakpoints if 0 < point < 1}
    for low, high in itertools.pairwise(sorted({Fraction(0), Fraction(1), *inner})):
        margin = min(STEP, (high - low) / 3)
        yield high - low, [float(low + margin), float((low + high) / 2), float(high - margin)]


def normalised(weights: Sequence[Fraction]) -> Row:
    total = sum(weights, Fraction(0))
    return tuple(weight / total for weight in weights) if total else tuple(weights)


def emitted(
    tokens: Sequence[int], draft_rows: Sequence[Row] | None, target_rows: Sequence[Row], dtype: type
) -> Iterator[tuple[Fraction, tuple[int, ...]]]:
    """Yields every block verify can emit for one proposal, with the measure of the uniforms that lead to it.

    The result is a step function of each uniform. Its steps can only be at the acceptance probabilities, and at the cumulative
    sums of the rows a token is drawn from; that it is constant in between is checked, so the measure is exact.
    """
    k = len(tokens)
    draft = None if draft_rows is None else np.array([[float(p) for p in row] for row in draft_rows], dtype)
    target = np.array([[float(p) for p in row] for row in target_rows], dtype)
    proposed = [[Fraction(int(v == d)) for v in range(len(target_rows[0]))] for d in tokens]
    if draft_rows is not None:
        proposed = [list(row) for row in draft_rows]
    acceptance = [[target_rows[i][d] / proposed[i][d]] for i, d in enumerate(tokens)]
    residuals = [
        normalised([max(Fraction(0), t - q) for t, q in zip(target_rows[i], proposed[i], strict=True)]) for i in range(k)
    ]
    last = [point for row in [*residuals, target_rows[k]] for point in itertools.accumulate(row)]
    for combination in itertools.product(*(list(pieces(points)) for points in [*acceptance, last])):
        weight = Fraction(1)
        for length, _ in combination:
            weight *= length
        blocks = set()
        for uniforms in itertools.product(*(points for _, points in combination)):
            done = verify(tokens, draft, target, uniforms)
            blocks.add((*tokens[: done.num_accepted], done.next_token))
        assert len(blocks) == 1, f"a step inside an interval: {blocks}"
        yield weight, blocks.pop()


class Language:
    """A target and a draft of a few tokens: for every beginning a row of each, drawn once."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self._random = np.random.default_rng(seed)
        self._rows: dict[tuple[str, tuple[int, ...]], Row] = {}

    def row(self, model: str, prefix: tuple[int, ...]) -> Row:
        if (model, prefix) not in self._rows:
            # Zeros are frequent: where the target has mass the draft may have none, and the reverse.
            weights = self._random.integers(0, 5, self.size)
            weights[self._random.integers(self.size)] += 1
            self._rows[model, prefix] = normalised([Fraction(int(weight)) for weight in weights])
        return self._rows[model, prefix]

    def rows(self, model: str, tokens: tuple[int, ...], count: int) -> list[Row]:
        return [self.row(model, tokens[:i]) for i in range(count)]

    def probability(self, model: str, tokens: tuple[int, ...]) -> Fraction:
        product = Fraction(1)
        for i, token in enumerate(tokens):
            product *= self.row(model, tokens[:i])[token]
        return product


rows_of_five = (
    st.lists(st.integers(0, 6), min_size=5, max_size=5).filter(any).map(lambda w: normalised([Fraction(x) for x in w]))
)


@settings(max_examples=60, deadline=None)
@given(rows_of_five, rows_of_five, st.sampled_from([np.float32, np.float64]))
@example(normalised([Fraction(x) for x in (8, 5, 4, 2, 1)]), normalised([Fraction(x) for x in (6, 6, 3, 3, 2)]), np.float32)
@example((Fraction(0), Fraction(0), Fraction(1), Fraction(0), Fraction(0)), (Fraction(1, 5),) * 5, np.float32)  # greedy target
@example((Fraction(1, 2), Fraction(1, 2), *[Fraction(0)] * 3), (*[Fraction(0)] * 3, Fraction(1, 2), Fraction(1, 2)), np.float32)
def test_the_first_token_follows_the_targets_law(target: Row, draft: Row, dtype: type) -> None:
    law = [Fraction(0)] * 5
    for token, probability in enumerate(draft):
        if probability:
            for weight, block in emitted([token], [draft], [target, target], dtype):
                law[block[0]] += probability * weight
    np.testing.assert_allclose([float(p) for p in law], [float(p) for p in target], rtol=0, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(rows_of_five, st.integers(0, 4), st.sampled_from([np.float32, np.float64]))
def test_the_first_token_follows_the_targets_law_for_any_fixed_proposal(target: Row, token: int, dtype: type) -> None:
    law = [Fraction(0)] * 5
    for weight, block in emitted([token], None, [target, target], dtype):
        law[block[0]] += weight
    np.testing.assert_allclose([float(p) for p in law], [float(p) for p in target], rtol=0, atol=1e-6)


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "one-hot"])
@pytest.mark.parametrize("seed", range(4))
def test_three_tokens_of_a_round_follow_the_targets_joint_law(seed: int, drawn: bool) -> None:
    """Two are proposed; where the block is shorter, what follows is the target's own, as the next round would give it."""
    language, k = Language(3, seed), 2
    law: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    proposals = list(itertools.product(range(language.size), repeat=k)) if drawn else [(1, 2)]
    for proposal in proposals:
        proposed = language.probability("draft", proposal) if drawn else Fraction(1)
        if not proposed:
            continue
        draft_rows = language.rows("draft", proposal, k) if drawn else None
        for weight, block in emitted(proposal, draft_rows, language.rows("target", proposal, k + 1), np.float32):
            for rest in itertools.product(range(language.size), repeat=k + 1 - len(block)):
                text = (*block, *rest)
                behind = Fraction(1)
                for i in range(len(block), k + 1):
                    behind *= language.row("target", text[:i])[text[i]]
                law[text] += proposed * weight * behind
    for text in itertools.product(range(language.size), repeat=k + 1):
        assert float(law[text]) == pytest.approx(float(language.probability("target", text)), abs=1e-6)


def test_greedy_rows_accept_exactly_the_targets_own_tokens() -> None:
    target = np.array([one_hot(A), one_hot(B), one_hot(C)])
    for proposal in itertools.product(range(5), repeat=2):
        for uniform in (0.0, 0.5, LARGEST_UNIFORM):
            done = verify(proposal, None, target, [uniform] * 3)
            agreeing = 2 if proposal == (A, B) else int(proposal[0] == A)
            assert (done.num_accepted, done.next_token) == (agreeing, [A, B, C][agreeing])
