"""Lookup: what is copied is what a slow search finds, and the cost of a token does not grow with the text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.acceptance import Proposal
from runtime.drafters import LookupDrafter, NoDrafter
from runtime.drafters.lookup import LONGEST, SHORTEST, NgramIndex
from tests.plain_decoding import plain_lookup


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(0, 2),
    st.lists(st.integers(1, 5), min_size=40, max_size=40),
    st.integers(1, 6),
)
def test_lookup_finds_what_a_search_finds(
    tokens: list[int], shortest: int, wider: int, steps: list[int], num_tokens: int
) -> None:
    drafter, length = LookupDrafter(longest=shortest + wider, shortest=shortest), 1
    for step in steps:
        sequence = tokens[:length]
        expected = plain_lookup(sequence, num_tokens, shortest + wider, shortest)
        assert drafter.propose(sequence, num_tokens) == Proposal(tuple(expected))
        drafter.rewind_to(length - 1)
        length = min(length + step, len(tokens))


@pytest.mark.parametrize(
    ("sequence", "proposed"),
    [
        ([1, 2, 7, 8, 1, 2, 9, 8, 1, 2], (9, 8, 1)),  # the latest of two
        ([0, 1, 2, 7, 8, 5, 1, 2, 9, 0, 1, 2], (7, 8, 5)),  # a longer one before a later one
        ([1, 2, 3, 4], ()),
        ([1, 2], ()),  # only the ending itself
        ([5], ()),
        ([3, 1, 4, 1], ()),  # one token is no match
        ([6, 6, 6, 6], (6, 6, 6)),  # overlapping the ending, and going on behind what was proposed
        ([1, 2, 3, 1, 2], (3, 1, 2)),
        ([1, 2, 5, 9, 1, 2, 5, 8, 1, 2, 7, 6, 1, 2], (5, 8, 1)),  # twice outweighs once, though that was later
    ],
)
def test_lookup_by_hand(sequence: list[int], proposed: tuple[int, ...]) -> None:
    assert LookupDrafter().propose(sequence, 3) == Proposal(proposed, None)


def test_lookup_counts_no_passes() -> None:
    drafter = LookupDrafter()
    drafter.propose([1, 2, 3, 1, 2], 3)
    assert (drafter.name, drafter.passes, drafter.seconds) == ("lookup", 0, 0.0)


@pytest.mark.parametrize(("longest", "shortest"), [(2, 3), (3, 0), (0, 0), (2, -1)])
def test_lookup_refuses_sizes_out_of_order(longest: int, shortest: int) -> None:
    with pytest.raises(ValueError, match=f"1 <= shortest <= longest; found {shortest} and {longest}"):
        LookupDrafter(longest=longest, shortest=shortest)


def test_no_drafter_proposes_nothing() -> None:
    drafter = NoDrafter()
    assert drafter.propose([1, 2, 1, 2], 4) == Proposal((), None)
    drafter.rewind_to(0)
    assert (drafter.name, drafter.passes, drafter.seconds) == ("off", 0, 0.0)


# --- the index --------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.lists(st.integers(0, 2), max_size=4))
def test_a_match_is_as_long_as_a_search_says(text: list[int], block: list[int]) -> None:
    drafter = LookupDrafter()
    drafter.extend(text)
    ending = [*text, *block]
    sizes = [
        size
        for size in range(SHORTEST, min(LONGEST, len(ending)) + 1)
        if any(text[end - size : end] == ending[len(ending) - size :] for end in range(size, len(text)))
    ]
    found = drafter.next_token(text, block)
    assert (found is None) == (not sizes)
    if found is not None:
        assert found[1] == max(sizes)


def test_what_was_proposed_is_looked_up_and_not_learned() -> None:
    drafter = LookupDrafter()
    drafter.extend([1, 2, 3])
    for _ in range(3):
        assert drafter.next_token([1, 2, 3], [1, 2]) == (3, 2)
        assert drafter.next_token([1, 2, 3], [9, 1, 2]) == (3, 2)
        assert drafter.next_token([1, 2, 3], [9, 9, 9]) is None
    drafter.extend([1, 2, 3, 9, 9, 9, 9])
    assert drafter.next_token([1, 2, 3, 9, 9, 9, 9], []) == (9, 3)


def test_what_was_added_stays_and_is_added_once() -> None:
    index = NgramIndex()
    for text in ([1, 2, 5, 1, 2, 6], [1, 2, 5], [1, 2, 5, 1, 2, 6], [1, 2, 5, 1, 2, 6, 1, 2, 5]):
        index.extend_to(text)
    assert index.next_token([1, 2]) == (5, 2)  # twice, where 6 followed once
    index.extend_to([1, 2, 5, 1, 2, 6, 1, 2, 5, 1, 2, 6])
    assert index.next_token([1, 2]) == (6, 2)  # as often, and later


class CountingDict(dict):
    """A dictionary that counts how often it is asked or told something."""

    operations = 0

    def get(self, key: object, default: object = None) -> object:
        self.operations += 1
        return super().get(key, default)

    def __getitem__(self, key: object) -> object:
        self.operations += 1
        return super().__getitem__(key)

    def __setitem__(self, key: object, value: object) -> None:
        self.operations += 1
        super().__setitem__(key, value)

    def __contains__(self, key: object) -> bool:
        self.operations += 1
        return super().__contains__(key)

    def __iter__(self) -> object:
        raise AssertionError("the index was searched")

    keys = values = items = __iter__


class CountingList(list):
    """A text that counts the tokens read from it."""

    read = 0

    def __getitem__(self, place: object) -> object:
        found = super().__getitem__(place)
        self.read += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self) -> object:
        raise AssertionError("the whole text was read")


@pytest.mark.parametrize("vocab_size", [2, 1000])
def test_a_token_costs_the_same_however_long_the_text_is(vocab_size: int) -> None:
    index, text = NgramIndex(), CountingList()
    index._followers = followers = CountingDict()
    num_sizes = LONGEST - SHORTEST + 1
    for place in range(1500):
        text.append(hash((place * 7919 % 8191, 3)) % vocab_size)
        followers.operations = text.read = 0
        index.extend_to(text)
        assert followers.operations <= 2 * num_sizes
        assert text.read <= num_sizes * (LONGEST + 1)
    followers.operations = 0
    index.next_token(text[-LONGEST:])
    assert followers.operations <= num_sizes
