"""A row over a few columns is the row that is as wide as the vocabulary, and -inf in all other places."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from runtime.acceptance import AcceptanceRule, CoupledRule, GreedyRule, Proposal, RejectionRule
from runtime.candidates import Candidates, Columns
from runtime.noise import ExponentialNoise
from runtime.sampling import Sampler
from runtime.sampling_params import SamplingParams

VOCAB = 30
HISTORY = [3, 4, 3, 9, 28]
RULES: dict[str, Callable[[Sampler], AcceptanceRule]] = {
    "greedy": GreedyRule,
    "rejection": lambda sampler: RejectionRule(sampler, np.random.default_rng(5)),
    "coupled": lambda sampler: CoupledRule(sampler, ExponentialNoise(5)),
}
PARAMS = {
    "plain": {},
    "filters": {"top_k": 6, "top_p": 0.9, "min_p": 0.02},
    "typical": {"typical_p": 0.8},
    "penalties": {"repetition_penalty": 1.5, "logit_bias": {3: 2.0, 29: 9.0}, "no_repeat_ngram_size": 2},
}


def random_rows(random: np.random.Generator, rows: int, *, narrow: bool) -> Candidates:
    """Logits, some of them -inf as where another row has a column."""
    token_ids = np.sort(random.permutation(VOCAB)[: random.integers(2, 12)]) if narrow else None
    columns = Columns(VOCAB) if token_ids is None else Columns.of(token_ids)
    logits = random.normal(0, 2, (rows, columns.count)).astype(np.float32)
    logits[:, 1:][random.random((rows, columns.count - 1)) < 0.2] = -np.inf
    return Candidates(logits, columns)


def widened(logits: Candidates) -> Candidates:
    return Candidates.whole(logits.over(Columns(VOCAB), -np.inf))


def assert_equal_rows(found: Candidates | None, expected: Candidates | None) -> None:
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        np.testing.assert_allclose(found.over(Columns(VOCAB), 0), expected.over(Columns(VOCAB), 0), rtol=1e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize(("target_narrow", "draft_narrow"), [*itertools.product([False, True], repeat=2)])
def test_a_round_over_columns_is_the_round_over_the_vocabulary(
    rule: str, params: str, target_narrow: bool, draft_narrow: bool
) -> None:
    random, accepted, refused = np.random.default_rng(7), 0, 0
    for seed in range(60):
        sampler = Sampler(SamplingParams(temperature=0.8 if rule != "greedy" else 0, seed=seed, **PARAMS[params]))
        over_columns, over_all = RULES[rule](sampler), RULES[rule](sampler)
        tokens, rows, wide_rows = [], [], []
        target = random_rows(random, 4, narrow=target_narrow)
        for place in range(3):
            # Mostly like the target, so that some of it is accepted.
            logits = random_rows(random, 1, narrow=draft_narrow)
            if random.random() < 0.7:
                logits = Candidates(target.rows[place : place + 1], target.columns)
            token, row = over_columns.propose(logits, HISTORY, tokens)
            expected_token, expected_row = over_all.propose(widened(logits), HISTORY, tokens)
            assert token == expected_token
            assert_equal_rows(row, expected_row)
            if random.random() < 0.2:  # looked up
                token, row, expected_row = int(random.integers(VOCAB)), None, None
            tokens.append(token)
            rows.append(row)
            wide_rows.append(expected_row)
        found = over_columns.judge(Proposal.of(tokens, rows), target, HISTORY)
        expected = over_all.judge(Proposal.of(tokens, wide_rows), widened(target), HISTORY)
        assert (found.num_accepted, found.next_token) == (expected.num_accepted, expected.next_token)
        accepted, refused = accepted + found.num_accepted, refused + (found.num_accepted < 3)
        assert (found.drawing is None) == (expected.drawing is None) == (rule != "rejection")
        if found.drawing is not None and expected.drawing is not None:
            assert found.drawing.acceptance_probabilities == pytest.approx(expected.drawing.acceptance_probabilities)
            one, other = (Candidates(done.target_probs, done.columns) for done in (found.drawing, expected.drawing))
            assert_equal_rows(one, other)
    assert min(accepted, refused) > 20


def test_columns_are_joined_in_ascending_order() -> None:
    some, others = Columns.of(np.array([2, 5, 9])), Columns.of(np.array([5, 7]))
    joined = Columns.joined([some, others], [7, 11])
    assert (joined.width, joined.count) == (12, 5)
    assert joined.tokens(np.arange(5)) == [2, 5, 7, 9, 11]
    assert [joined.token(place) for place in joined.places([9, 2])] == [9, 2]
    # Of a whole row, all; also where another one, or a token, lies behind its end.
    assert [Columns.joined([some, Columns(width)], [3]).width for width in (4, 30)] == [10, 30]
    assert Columns.joined([Columns(4)], [6]).width == 7


def test_rows_are_spread_and_cut() -> None:
    rows = np.array([[1, 2, 3]], np.float32)
    narrow, whole = Candidates(rows, Columns.of(np.array([1, 4, 5]))), Candidates.whole(rows)
    assert narrow.over(Columns(7), 0).tolist() == [[0, 1, 0, 0, 2, 3, 0]]
    assert narrow.over(Columns.of(np.array([0, 1, 4, 5, 8])), -1).tolist() == [[-1, 1, 2, 3, -1]]
    assert whole.over(Columns(5), 9).tolist() == [[1, 2, 3, 9, 9]]
    assert whole.over(Columns(3), 0) is rows
    assert narrow.over(narrow.columns, 0) is rows
    assert narrow.number(0, 4) == whole.number(0, 1) == 2
    for vocab_size, count in ((6, 3), (5, 2), (4, 1)):
        cut = narrow.below(vocab_size)
        assert cut.rows.tolist() == rows[:, :count].tolist()
        assert cut.columns.tokens(np.arange(count)) == [1, 4, 5][:count]
    assert [whole.below(size).columns.count for size in (2, 3, 4)] == [2, 3, 3]
