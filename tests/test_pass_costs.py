"""Costs of passes: what lies between measured points, what a document may hold, and what measuring runs."""

import dataclasses
import gc
import itertools
import json
import weakref

import numpy as np
import pytest

from runtime import pass_costs
from runtime.decoder import Decoder
from runtime.pass_costs import ROWS, PassCosts, measure_costs
from tests.fakes import FakeModel

POINTS = ((1, 0.010), (2, 0.014), (5, 0.020), (17, 0.044))


# --- between and beyond points ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [
        (1, 0.010),
        (2, 0.014),
        (3, 0.016),
        (4, 0.018),
        (5, 0.020),
        (6, 0.022),
        (11, 0.032),
        (17, 0.044),
        (18, 0.046),
        (65, 0.140),
    ],
)
def test_cost_grows_linearly_between_points_and_beyond_the_last(rows: int, seconds: float) -> None:
    costs = PassCosts(POINTS, tuple((rows, 2 * known) for rows, known in POINTS))
    assert costs.target(rows) == pytest.approx(seconds)
    assert costs.draft(rows) == pytest.approx(2 * seconds)


@pytest.mark.parametrize("rows", [1, 2, 17, 100])
def test_one_point_holds_for_all_passes(rows: int) -> None:
    assert PassCosts(((1, 0.02),), ((1, 0.01),)).target(rows) == 0.02
    assert PassCosts(((1, 0.02),), ((1, 0.01),)).draft(rows) == 0.01


def test_a_pass_never_takes_less_than_no_time() -> None:
    costs = PassCosts(((1, 0.03), (2, 0.02)))
    assert costs.target(3) == pytest.approx(0.01)
    assert costs.target(4) == pytest.approx(0)
    assert costs.target(60) == 0


def test_a_draft_pass_is_one_row_unless_more_are_named() -> None:
    assert PassCosts(POINTS, POINTS).draft() == 0.010


def test_a_pair_without_a_draft_has_no_cost_of_drafting() -> None:
    with pytest.raises(AssertionError, match="without a draft model"):
        PassCosts(POINTS).draft(1)


# --- as a document ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("costs", [PassCosts(POINTS), PassCosts(POINTS, POINTS[:1], 0.001), PassCosts(POINTS[:1], POINTS)])
def test_costs_survive_a_document(costs: PassCosts) -> None:
    document = dataclasses.asdict(costs)
    assert PassCosts.from_dict(document) == costs
    assert PassCosts.from_dict(json.loads(json.dumps(document))) == costs
    assert PassCosts.from_dict(json.loads(json.dumps(document | {"later": 1}))) == costs


GOOD = {"target_by_rows": [[1, 0.1], [2, 0.2]], "draft_by_rows": None, "round_seconds": 0.0}
BAD_POINTS = [
    None,
    [],
    5,
    "ab",
    [1, 0.1],
    [[1]],
    [[1, 0.1, 2]],
    [[2, 0.1]],
    [[1, 0.1], [1, 0.2]],
    [[1, 0.1], [3, 0.2], [2, 0.3]],
    [[1, 0.0]],
    [[1, -0.1]],
    [[1, float("nan")]],
    [[1, float("inf")]],
    [[1, "fast"]],
    [[1, None]],
    [[None, 0.1]],
    [[1, 0.1], [float("nan"), 0.2]],
    [[1, 0.1], [float("inf"), 0.2]],
    [[1, 10**400]],
    {"1": 0.1},
]
BAD = [
    *({**GOOD, "target_by_rows": points} for points in BAD_POINTS),
    *({**GOOD, "draft_by_rows": points} for points in BAD_POINTS[1:]),
    *({name: value for name, value in GOOD.items() if name != missing} for missing in GOOD),
    *({**GOOD, "round_seconds": value} for value in (-0.1, float("nan"), float("inf"), "soon", None, [0.1], 10**400)),
    {},
    None,
    [],
    [1, 2],
    "costs",
    5,
]


@pytest.mark.parametrize("document", BAD, ids=lambda document: str(document)[:60])
def test_a_document_of_another_form_is_refused_in_one_sentence(document: object) -> None:
    assert PassCosts.from_dict(GOOD) == PassCosts(((1, 0.1), (2, 0.2)))
    with pytest.raises(ValueError, match=r"^Measured costs (lack something|say) .*: measure again\.$") as caught:
        PassCosts.from_dict(document)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


# --- measuring --------------------------------------------------------------------------------------------------------


def test_measuring_runs_each_kind_of_pass_in_turns_and_a_few_times() -> None:
    target, draft, order = FakeModel(seed=1), FakeModel(seed=2), []
    target.on_pass, draft.on_pass = lambda: order.append("target"), lambda: order.append("draft")
    costs = measure_costs(target, draft)
    expected = [(0, 64, 1), *[(64, rows, rows) for rows in ROWS] * 4]
    assert target.calls == expected
    assert draft.calls == [(past, rows, 1) for past, rows, _ in expected]
    assert order == ["target", "draft"] * len(expected)
    for points in (costs.target_by_rows, costs.draft_by_rows):
        assert [rows for rows, _ in points] == list(ROWS)
        assert all(seconds > 0 for _, seconds in points)
    assert PassCosts.from_dict(dataclasses.asdict(costs)) == costs


def test_measuring_without_a_draft() -> None:
    target = FakeModel(seed=1)
    costs = measure_costs(target, None)
    assert costs.draft_by_rows is None
    assert len(target.calls) == 1 + 4 * len(ROWS)


def test_the_fastest_is_taken_behind_a_repetition_that_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    models, now, number = {"target": FakeModel(seed=1), "draft": FakeModel(seed=2)}, [0.0], itertools.count()

    def pass_takes(seconds: float) -> None:
        repetition, place = divmod(next(number) // 2 - 1, len(ROWS))
        if repetition >= 0:
            now[0] += seconds * ROWS[place] * (0.5, 4, 1, 2)[repetition]

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return now[0]

    models["target"].on_pass, models["draft"].on_pass = lambda: pass_takes(0.01), lambda: pass_takes(0.001)
    monkeypatch.setattr(pass_costs, "time", Clock)
    costs = measure_costs(models["target"], models["draft"])
    for points, seconds in ((costs.target_by_rows, 0.01), (costs.draft_by_rows, 0.001)):
        np.testing.assert_allclose(points, [(rows, rows * seconds) for rows in ROWS])
    assert costs.round_seconds == 0


def test_costs_are_measured_on_both_sides_of_every_jump() -> None:
    costs = measure_costs(FakeModel(seed=1, row_multiple=8), None)
    assert {8, 9, 16, 17} <= {rows for rows, _ in costs.target_by_rows}
    assert [rows for rows, _ in measure_costs(FakeModel(seed=1, row_multiple=2), None).target_by_rows] == list(ROWS)


def test_measuring_leaves_nothing_behind() -> None:
    class Watched(FakeModel):
        contexts: list[weakref.ref]

        def open_context(self, capacity: int, max_rows: int) -> object:
            context = super().open_context(capacity, max_rows)
            self.contexts.append(weakref.ref(context))
            return context

    model = Watched(seed=1)
    model.contexts = []
    decoder = Decoder(model, 40, num_rows=1)
    decoder.forward([1, 2, 3], 1)
    measure_costs(model, model)
    gc.collect()
    assert [context() is None for context in model.contexts] == [False, True, True]
    assert np.array_equal(decoder.forward([4], 1)[0], model.logits([1, 2, 3, 4]))


@pytest.mark.parametrize("context_length", [20, 64, 80, 81, 128])
def test_measuring_stays_inside_the_models_context(context_length: int) -> None:
    model = FakeModel(seed=1, context_length=context_length)
    measure_costs(model, None)
    assert max(past + rows for past, rows, _ in model.calls) <= context_length
