"""The numbers and the time left of an export's steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from export.bundle import export_bundle
from export.role import Role
from export.source import Source
from export.steps import Steps, planned_steps

SOURCE = Source("model", "folder", Path("model"), "llama", 512, None, 1_000_000)
OTHER = Source("other", "folder", Path("other"), "llama", 512, None, 1_000)


def shown(planned: dict[str, float], reports: list[tuple[float, str]]) -> list[str]:
    """Titles as handed on, of reports at so many seconds after the start."""
    titles: list[str] = []
    clock = iter([0.0, *(seconds for seconds, _ in reports)])
    now = [next(clock)]
    steps = Steps(planned, lambda title, _done, _total: titles.append(title), lambda: now[0])
    for seconds, title in reports:
        now[0] = seconds
        steps(title, 0, 0)
    return titles


def test_time_left_follows_the_speed_so_far() -> None:
    planned = {"a": 10.0, "b": 30.0, "c": 60.0}
    # 10 of 100 parts in 60 s leave 540 s; 40 in 300 s, slower, leave 450 s.
    assert shown(planned, [(0, "a"), (60, "b"), (300, "c")]) == [
        "step 1 of 3: a",
        "step 2 of 3: b (about 9 min left in all)",
        "step 3 of 3: c (about 8 min left in all)",
    ]


def test_a_step_keeps_its_title_while_it_goes_on() -> None:
    planned = {"a": 1.0, "b": 1.0}
    titles = shown(planned, [(0, "a"), (10, "b"), (500, "b"), (900, "b")])
    assert titles[1:] == ["step 2 of 2: b (less than a minute left in all)"] * 3


def test_what_was_not_planned_is_handed_on() -> None:
    assert shown({"a": 1.0}, [(0, "a note"), (5, "a")]) == ["a note", "step 1 of 1: a"]


def test_no_time_is_told_where_nothing_was_measured() -> None:
    assert shown({"a": 0.0, "b": 1.0}, [(0, "a"), (5, "b")]) == ["step 1 of 2: a", "step 2 of 2: b"]


def test_larger_models_are_more_work() -> None:
    planned = planned_steps([Role("target", SOURCE, "fp32", 64), Role("draft", OTHER, "fp32", 64)])
    target, draft = (sum(work for title, work in planned.items() if title.startswith(name)) for name in ("target", "draft"))
    assert target == pytest.approx(1000 * draft)


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("fp16", {"lowering": "gqa,static"}),
        ("int4", {"draft": "self", "draft_vocab": 100, "draft_precision": "int8", "lowering": "static,primitive"}),
        ("fp32", {"draft": "tiny"}),
    ],
)
def test_every_planned_step_of_an_export_comes_in_its_turn(
    tiny_draft: Path, tiny_target: Path, tmp_path: Path, precision: str, options: dict[str, object]
) -> None:
    draft = options.pop("draft", None)
    titles: list[str] = []

    def report(title: str, _done: int, _total: int) -> None:
        if title not in titles:
            titles.append(title)

    export_bundle(
        str(tiny_draft),
        str(tiny_target) if draft == "tiny" else draft,
        tmp_path / "b",
        precision=precision,
        max_length=96,
        report=report,
        **options,
    )
    numbers = [title.partition(":")[0] for title in titles if title.startswith("step ")]
    assert numbers == [f"step {number} of {len(numbers)}" for number in range(1, len(numbers) + 1)]
    assert [title for title in titles if not title.startswith("step ")] == ["reading the sources"]
