"""How far to propose: figures worked by hand, and what no adversary can make a policy lose."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.draft_policy import GUARDED_TOKENS, MAX_SLOWDOWN, AcceptanceEstimate, DraftPolicy
from runtime.pass_costs import PassCosts

# Milliseconds, for easy figures: 10 for a plain pass, 4 for each row more.
LINEAR = PassCosts(((1, 10.0), (2, 14.0)))
STEPPED = PassCosts(((1, 10.0), (2, 19.0), (3, 19.5), (17, 26.5)))
FLAT = PassCosts(((1, 10.0),))
ALLOWED = MAX_SLOWDOWN * GUARDED_TOKENS * 10
# With all of a text's time at stake, caution weighs next to nothing.
BOLD = 1e6


# --- acceptance -------------------------------------------------------------------------------------------------------


def test_a_rate_is_its_prior_and_what_was_counted() -> None:
    estimate = AcceptanceEstimate({"a": 0.6, 2: 0.9})
    assert estimate.rate("a") == pytest.approx(0.6)
    estimate.count("a", accepted=True)
    assert estimate.rate("a") == pytest.approx((1 + 2.4) / 5)
    estimate.count("a", accepted=False)
    assert estimate.rate("a") == pytest.approx((1 + 2.4) / 6)
    estimate.fade()
    assert estimate.rate("a") == pytest.approx((0.95 + 2.4) / 5.9)
    estimate.count("a", accepted=False)
    assert estimate.rate("a") == pytest.approx((0.95 + 2.4) / 6.9)
    assert estimate.rate(2) == pytest.approx(0.9)


@pytest.mark.parametrize("accepted", [True, False])
def test_what_was_counted_long_ago_is_forgotten(accepted: bool) -> None:
    estimate = AcceptanceEstimate({"a": 0.6})
    for _ in range(50):
        estimate.count("a", accepted=accepted)
    assert estimate.rate("a") == pytest.approx(52.4 / 54 if accepted else 2.4 / 54)
    far = [abs(estimate.rate("a") - 0.6)]
    for _ in range(300):
        estimate.fade()
        far.append(abs(estimate.rate("a") - 0.6))
    assert all(later < earlier for earlier, later in itertools.pairwise(far))
    assert far[-1] < 1e-4


def test_a_rate_follows_a_change() -> None:
    estimate = AcceptanceEstimate({"a": 0.7})
    for accepted, bound in ((True, 0.94), (False, 0.13), (True, 0.94)):
        for _ in range(100):
            estimate.fade()
            estimate.count("a", accepted=accepted)
        assert (estimate.rate("a") > bound) if accepted else (estimate.rate("a") < bound)


# --- one more token ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("proposed", "reach", "rate", "draft", "num_tokens", "expected"),
    [
        # A row of 4 takes the time of 0.4 plain tokens, and brings reach * rate.
        (0, 1.0, 0.41, 0.0, 8, True),
        (0, 1.0, 0.39, 0.0, 8, False),
        (1, 0.7, 0.60, 0.0, 8, True),  # 0.42
        (1, 0.7, 0.55, 0.0, 8, False),  # 0.385
        # With drafting, a token takes the time of 0.6.
        (0, 1.0, 0.61, 2.0, 8, True),
        (0, 1.0, 0.59, 2.0, 8, False),
        (0, 1.0, 0.99, 2.0, 0, False),
        (3, 1.0, 0.99, 2.0, 3, False),
        (2, 1.0, 0.99, 0.0, 3, True),
        # A draft as slow as the target can never pay.
        (0, 1.0, 1.0, 10.0, 8, False),
    ],
)
def test_one_more_token_is_worth_what_it_brings(
    proposed: int, reach: float, rate: float, draft: float, num_tokens: int, expected: bool
) -> None:
    assert DraftPolicy(LINEAR, BOLD).worth(proposed, 0.0, reach, rate, draft, num_tokens) == expected


@pytest.mark.parametrize(
    ("rate", "num_tokens", "expected"),
    [
        (0.85, 1, False),  # 0.85 for the time of 0.9
        (0.85, 2, True),  # 0.85 + 0.7225 for 0.95
        (0.50, 3, False),  # 0.875 for 1.0
        (0.50, 4, False),  # 0.9375 for 1.05, and more never brings 1
        (0.56, 3, True),  # 0.56 + 0.3136 + 0.1756 = 1.049 for 1.0
        (0.56, 2, False),  # 0.8736 for 0.95
        (0.95, 1, True),
    ],
)
def test_a_dear_second_row_is_paid_by_cheap_ones_behind_it(rate: float, num_tokens: int, expected: bool) -> None:
    assert DraftPolicy(STEPPED, BOLD).worth(0, 0.0, 1.0, rate, 0.0, num_tokens) == expected


def test_behind_a_dear_row_that_is_paid_for_more_is_cheap() -> None:
    assert DraftPolicy(STEPPED, BOLD).worth(1, 0.0, 0.2, 0.5, 0.0, 8)
    assert not DraftPolicy(STEPPED, BOLD).worth(0, 0.0, 0.2, 0.5, 0.0, 8)


def test_rows_that_cost_nothing_are_always_worth_it() -> None:
    assert DraftPolicy(FLAT).worth(15, 0.0, 1e-6, 0.01, 0.0, 16)
    assert not DraftPolicy(FLAT).worth(15, 0.0, 1.0, 0.0, 0.0, 16)


def test_time_is_worth_what_it_brought_lately() -> None:
    policy = DraftPolicy(LINEAR, BOLD)
    assert policy.worth(0, 0.0, 1.0, 0.41, 0.0, 1)
    policy.count_round(3, 0.0, 4)  # 4 tokens in 22: the rate goes from 0.1 to 0.9 * 0.1 + 0.1 * 4 / 22 = 0.1082
    assert policy.worth(0, 0.0, 1.0, 0.4328, 0.0, 1)
    assert not policy.worth(0, 0.0, 1.0, 0.4326, 0.0, 1)
    for _ in range(200):
        policy.count_round(0, 0.0, 1)
    assert policy.worth(0, 0.0, 1.0, 0.4001, 0.0, 1)
    policy.count_round(1, 0.0, 1)  # a loss does not make time cheaper than plain decoding's
    assert not policy.worth(0, 0.0, 1.0, 0.3999, 0.0, 1)


# --- what may be lost -------------------------------------------------------------------------------------------------


def allowance(policy: DraftPolicy) -> float:
    """The seconds the next round may lose: what can be spent before one sure token that takes 4 is no longer worth it."""
    low, high = -100.0, 100.0
    while high - low > 1e-9:
        spent = (low + high) / 2
        low, high = (spent, high) if policy.worth(0, spent, 1.0, 0.999, 0.0, 1) else (low, spent)
    return low + 4


def test_a_round_may_lose_what_64_tokens_may() -> None:
    assert pytest.approx(19.2) == ALLOWED
    assert allowance(DraftPolicy(LINEAR)) == pytest.approx(19.2)
    assert allowance(DraftPolicy(LINEAR, 0.1)) == pytest.approx(64)
    assert allowance(DraftPolicy(PassCosts(LINEAR.target_by_rows, None, 2.0))) == pytest.approx(0.03 * 64 * 12)


def test_the_worst_stretch_that_ends_here_is_what_counts() -> None:
    policy = DraftPolicy(LINEAR)
    for (proposed, spent, new_tokens), left in (
        ((1, 0.0, 1), ALLOWED - 4),  # one refused
        ((0, 3.0, 1), ALLOWED - 7),  # drafted, and not proposed
        ((0, 0.0, 1), ALLOWED - 7),  # a plain step loses nothing and wins nothing
        ((2, 0.0, 2), ALLOWED - 5),  # 18 for two: won 2
        ((3, 0.0, 4), ALLOWED),  # 22 for four: won 18, more than was lost
        ((1, 1.5, 1), ALLOWED - 5.5),  # and what was won before is no credit
    ):
        policy.count_round(proposed, spent, new_tokens)
        assert allowance(policy) == pytest.approx(left)


def test_bets_are_small_where_little_may_be_lost() -> None:
    policy = DraftPolicy(LINEAR)
    # 0.45 tokens for the time of 0.4; a refusal costs 4 of 19.2, which with its chance of 0.55 weighs 0.03 tokens more.
    assert policy.worth(0, 0.0, 1.0, 0.45, 0.0, 1)
    assert not policy.worth(0, 0.0, 1.0, 0.42, 0.0, 1)
    policy.count_round(0, 14.2, 1)
    assert allowance(policy) == pytest.approx(5)
    assert not policy.worth(0, 0.0, 1.0, 0.45, 0.0, 1), "of 5 it weighs 0.11"
    assert policy.worth(0, 0.0, 1.0, 0.55, 0.0, 1)


def test_what_was_lost_64_tokens_ago_counts_no_more() -> None:
    policy = DraftPolicy(LINEAR)
    policy.count_round(1, 6.0, 1)
    for _ in range(62):
        policy.count_round(0, 0.0, 1)
        assert allowance(policy) == pytest.approx(ALLOWED - 10)
    policy.count_round(0, 0.0, 1)
    assert allowance(policy) == pytest.approx(ALLOWED)


@pytest.mark.parametrize(("proposed", "spent", "lost"), [(0, 0.0, 0.0), (0, 3.0, 3.0), (1, 0.0, 4.0), (3, 5.0, 17.0)])
def test_what_a_round_risks(proposed: int, spent: float, lost: float) -> None:
    assert DraftPolicy(LINEAR).at_risk(proposed, spent) == pytest.approx(lost)


def test_where_nothing_may_be_lost_only_what_costs_nothing_is_proposed() -> None:
    assert not DraftPolicy(LINEAR, 0.0).worth(0, 0.0, 1.0, 0.99, 0.0, 16)
    assert not DraftPolicy(FLAT, 0.0).worth(0, 0.0, 1.0, 0.99, 1e-6, 16)
    assert DraftPolicy(FLAT, 0.0).worth(0, 0.0, 1.0, 0.01, 0.0, 16)


points = st.lists(st.floats(0, 12), min_size=1, max_size=16).map(
    lambda steps: tuple((rows, 10.0 + sum(steps[: rows - 1])) for rows in range(1, len(steps) + 2))
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(points, st.floats(0, 12), st.sampled_from([0.0, 0.01, 0.03, 0.2]), st.integers(0, 10**6), st.sampled_from([1, 4, 16]))
def test_no_adversary_makes_64_tokens_slower(
    target: tuple[tuple[int, float], ...], draft: float, max_slowdown: float, seed: int, num_tokens: int
) -> None:
    """Rates that mislead, drafts that are made and dropped, any number accepted; refusals come where they hurt."""
    random, policy = np.random.default_rng(seed), DraftPolicy(PassCosts(target), max_slowdown)
    ends, clock, kindness = [0.0], 0.0, random.random()
    for _ in range(150):
        proposed, spent = 0, 0.0
        while proposed < num_tokens:
            seconds = draft * float(random.random() < 0.7)
            if not policy.worth(proposed, spent, 1.0, float(random.random() ** 0.1), seconds, num_tokens):
                break
            spent += seconds
            if seconds and random.random() < 0.2:
                break
            proposed += 1
        accepted = int(random.integers(0, proposed + 1)) if random.random() < kindness else 0
        policy.count_round(proposed, spent, accepted + 1)
        clock += PassCosts(target).target(proposed + 1) + spent
        ends += [clock] * (accepted + 1)
    times = np.array(ends)
    for tokens in range(1, GUARDED_TOKENS + 1):
        assert (times[tokens:] - times[:-tokens]).max() - tokens * 10 <= max_slowdown * GUARDED_TOKENS * 10 + 1e-6


# --- what a draft is worth on the whole -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "draft", "num_tokens", "saved"),
    [
        (0.8, 1.0, 1, 10 - 15 / 1.8),
        (0.8, 1.0, 2, 10 - 20 / 2.44),
        (0.8, 1.0, 16, 10 - 20 / 2.44),  # three tokens take 25 for 2.952, which is worse
        (0.3, 1.0, 16, 0.0),
        (0.0, 0.0, 16, 0.0),
        (1.0, 0.0, 9, 10 - 46 / 10),
        (0.8, 1.0, 0, 0.0),
    ],
)
def test_what_a_draft_saves_for_each_token(rate: float, draft: float, num_tokens: int, saved: float) -> None:
    assert DraftPolicy(LINEAR).saved(rate, draft, num_tokens) == pytest.approx(saved)


def test_the_time_between_passes_is_saved_too() -> None:
    costs = PassCosts(LINEAR.target_by_rows, None, 5.0)
    assert DraftPolicy(costs).saved(0.8, 1.0, 1) == pytest.approx(15 - 20 / 1.8)
