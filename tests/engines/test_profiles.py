"""Profiles: which sizes of passes an engine serves, and which of them a pass uses."""

from dataclasses import replace
from pathlib import Path

import pytest

from engines.profiles import Profile, choose_profile, input_shapes, plan_profiles, slots_needed
from runtime.steps import cut_pass, in_steps

from .tiny_graph import CAPACITY, HEAD_SIZE, KEY_VALUE_HEADS, LAYERS, build_tiny_graph, write_decoder


def test_a_targets_step_and_verification_are_one_fixed_profile() -> None:
    assert plan_profiles(fixed_rows=8, num_draft_tokens=7, max_rows=170) == (
        Profile("fixed", 8, 8, 8),
        Profile("prefill", 1, 170, 170),
    )


def test_a_draft_steps_alone_and_catches_up_in_a_profile_of_its_own() -> None:
    assert plan_profiles(fixed_rows=1, num_draft_tokens=7, max_rows=170) == (
        Profile("fixed", 1, 1, 1),
        Profile("short", 1, 8, 8),
        Profile("prefill", 1, 170, 170),
    )


@pytest.mark.parametrize(
    ("fixed_rows", "num_draft_tokens", "max_rows", "names"),
    [(8, 7, 8, ["fixed"]), (1, 7, 8, ["fixed", "prefill"]), (1, 1, 2, ["fixed", "prefill"]), (5, 1, 9, ["fixed", "prefill"])],
)
def test_no_profile_repeats_another(fixed_rows: int, num_draft_tokens: int, max_rows: int, names: list[str]) -> None:
    assert [profile.name for profile in plan_profiles(fixed_rows, num_draft_tokens, max_rows)] == names


@pytest.mark.parametrize("numbers", [(0, 4, 16), (17, 4, 16), (5, 0, 16), (5, 16, 16), (1, 4, 0)])
def test_numbers_that_do_not_fit_each_other_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"Passes of up to {numbers[2]} rows cannot hold steps of {numbers[0]} rows"):
        plan_profiles(*numbers)


def test_a_pass_uses_the_first_profile_that_holds_it() -> None:
    profiles = plan_profiles(fixed_rows=1, num_draft_tokens=4, max_rows=9)
    assert [choose_profile(profiles, rows) for rows in range(1, 10)] == [0, 1, 1, 1, 1, 2, 2, 2, 2]
    profiles = plan_profiles(fixed_rows=4, num_draft_tokens=3, max_rows=9)
    assert [choose_profile(profiles, rows) for rows in range(1, 10)] == [1, 1, 1, 0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("rows", "num_rows", "pieces"),
    [
        (4, 1, [(0, 4)]),
        (12, 9, [(0, 4), (4, 8), (8, 12)]),
        (12, 8, [(0, 4), (4, 8), (8, 12)]),
        (40, 5, [(0, 32), (32, 36), (36, 40)]),
        (40, 4, [(0, 36), (36, 40)]),
        (40, 0, [(0, 40)]),
        (11, 11, [(0, 3), (3, 7), (7, 11)]),
        (3, 2, [(0, 3)]),
    ],
)
def test_rows_that_are_wanted_are_cut_into_steps(rows: int, num_rows: int, pieces: list[tuple[int, int]]) -> None:
    assert list(cut_pass(rows, num_rows, 4)) == pieces


def test_a_decoder_in_steps_is_padded_to_them_and_needs_slots_for_that(tmp_path: Path) -> None:
    spec = replace(write_decoder(tmp_path, "target", build_tiny_graph()), min_rows=2, row_multiple=2, spare_slots=1)
    stepped = in_steps(spec, 5)
    assert [stepped.rows_of_pass(tokens) for tokens in (1, 5, 6, 11)] == [5, 5, 10, 15]
    assert slots_needed(spec, 5) == spec.context_length + 4 + 1


def test_every_input_of_the_graph_has_a_shape(tmp_path: Path) -> None:
    model = build_tiny_graph()
    shapes = input_shapes(write_decoder(tmp_path, "target", model), 5, 3)
    assert set(shapes) == {value.name for value in model.graph.input}
    assert shapes["input_ids"] == (1, 5)
    assert shapes["past_length"] == (1,)
    assert shapes["logits_rows"] == (3,)
    caches = [shape for name, shape in shapes.items() if "past_key" in name]
    assert caches == [(1, KEY_VALUE_HEADS, CAPACITY, HEAD_SIZE)] * 2 * LAYERS
