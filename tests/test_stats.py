"""Counters of a generation, and the figures that follow from them."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.stats import GenerationStats


def count(stats: GenerationStats, num_proposed: int, num_accepted: int, num_kept: int) -> None:
    """Counts a round whose first tokens came to stand in the text at once."""
    stats.count_round(num_proposed)
    stats.count_kept(num_proposed, num_accepted, range(num_kept))


@pytest.mark.parametrize(
    ("num_proposed", "num_accepted", "num_kept", "accepted", "corrections", "bonuses"),
    [
        (4, 2, 3, 2, 1, 0),  # two accepted, one corrected
        (4, 0, 1, 0, 1, 0),
        (4, 4, 5, 4, 0, 1),
        (0, 0, 1, 0, 0, 1),  # behind an empty proposal stands a bonus
        (4, 4, 4, 4, 0, 0),  # the text ends with the last accepted token: the bonus is dropped
        (4, 4, 2, 2, 0, 0),  # it ends inside: what stands behind was not accepted into the text
        (4, 2, 2, 2, 0, 0),
        (4, 2, 1, 1, 0, 0),
    ],
)
def test_one_round(num_proposed: int, num_accepted: int, num_kept: int, accepted: int, corrections: int, bonuses: int) -> None:
    stats = GenerationStats()
    count(stats, num_proposed, num_accepted, num_kept)
    assert (stats.rounds, stats.new_tokens, stats.proposed_tokens) == (1, num_kept, num_proposed)
    assert (stats.accepted_tokens, stats.correction_tokens, stats.bonus_tokens) == (accepted, corrections, bonuses)
    assert stats.proposed_by_position == [1] * num_proposed
    assert stats.accepted_by_position == [1] * accepted + [0] * (num_proposed - accepted)


def test_rounds_add_up_by_position() -> None:
    stats = GenerationStats()
    for counts in ((2, 1, 2), (4, 4, 5), (0, 0, 1), (3, 0, 1), (4, 3, 2)):
        count(stats, *counts)
    assert stats.proposed_by_position == [4, 4, 3, 2]
    assert stats.accepted_by_position == [3, 2, 1, 1]
    assert (stats.rounds, stats.new_tokens, stats.proposed_tokens, stats.accepted_tokens) == (5, 11, 13, 7)
    assert (stats.correction_tokens, stats.bonus_tokens) == (2, 2)
    assert stats.acceptance_rate == pytest.approx(7 / 13)
    assert stats.mean_acceptance_length == pytest.approx(11 / 5)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[int, int, int]:
    num_proposed = draw(st.integers(0, 8))
    num_accepted = draw(st.integers(0, num_proposed))
    return num_proposed, num_accepted, draw(st.integers(1, num_accepted + 1))


@given(st.lists(rounds(), max_size=20))
def test_every_new_token_is_accepted_a_correction_or_a_bonus(counted: list[tuple[int, int, int]]) -> None:
    stats = GenerationStats()
    for counts in counted:
        count(stats, *counts)
    assert stats.new_tokens == stats.accepted_tokens + stats.correction_tokens + stats.bonus_tokens
    assert stats.new_tokens == sum(num_kept for _, _, num_kept in counted)
    assert stats.proposed_tokens == sum(stats.proposed_by_position)
    assert stats.accepted_tokens == sum(stats.accepted_by_position)
    assert len(stats.proposed_by_position) == len(stats.accepted_by_position)
    assert stats.accepted_by_position == sorted(stats.accepted_by_position, reverse=True)
    assert stats.correction_tokens + stats.bonus_tokens <= stats.rounds


@given(rounds(), st.lists(st.integers(0, 9), max_size=3))
def test_tokens_that_come_later_are_counted_as_if_they_had_come_at_once(counted: tuple[int, int, int], cuts: list[int]) -> None:
    num_proposed, num_accepted, num_kept = counted
    at_once, later = GenerationStats(), GenerationStats()
    count(at_once, *counted)
    later.count_round(num_proposed)
    bounds = sorted({0, num_kept, *(cut for cut in cuts if cut < num_kept)})
    for begin, end in itertools.pairwise(bounds):
        later.count_kept(num_proposed, num_accepted, range(begin, end))
    assert later == at_once


def test_a_round_of_which_nothing_stands_yet_has_proposed() -> None:
    stats = GenerationStats()
    stats.count_round(3)
    assert (stats.rounds, stats.proposed_tokens, stats.new_tokens, stats.accepted_tokens) == (1, 3, 0, 0)
    assert (stats.proposed_by_position, stats.accepted_by_position) == ([1, 1, 1], [0, 0, 0])


def test_figures_of_nothing_are_zero() -> None:
    stats = GenerationStats(total_seconds=1.0)
    assert (stats.acceptance_rate, stats.mean_acceptance_length, stats.decode_tokens_per_second) == (0, 0, 0)


def test_speed_is_that_behind_the_first_round() -> None:
    stats = GenerationStats(first_token_seconds=2.0, total_seconds=4.0, first_round_tokens=3)
    count(stats, 2, 2, 3)
    assert stats.decode_tokens_per_second == 0
    count(stats, 4, 4, 5)
    count(stats, 4, 2, 3)
    assert stats.decode_tokens_per_second == pytest.approx((11 - 3) / 2)


def test_two_generations_share_no_counters() -> None:
    first, second = GenerationStats(), GenerationStats()
    count(first, 3, 3, 4)
    assert second == GenerationStats()
