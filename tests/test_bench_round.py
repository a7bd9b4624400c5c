"""The clock of a round's parts, and the script that prints them."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def bench_round(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [*sys.path, str(SCRIPTS)])  # behind the packages, one of which a script is named like
    return importlib.import_module("bench_round")


def call(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "bench_round.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_a_part_is_timed_without_those_that_it_calls(bench_round: Any) -> None:
    now = 0

    def work(seconds: int) -> None:
        nonlocal now
        now += seconds

    clock = bench_round.PartClock(lambda: now)
    passes = clock.timed("passes", work)

    def propose() -> str:
        work(1)
        passes(20)
        work(2)
        passes(10)
        return "proposal"

    work(100)
    assert clock.timed("propose", propose)() == "proposal"
    assert clock.lap() == {"rest": 100, "propose": 3, "passes": 30}
    work(5)
    assert clock.lap() == {"rest": 5}


def test_a_part_ends_where_it_fails(bench_round: Any) -> None:
    times: Iterator[int] = iter(range(10))
    clock = bench_round.PartClock(lambda: next(times))
    with pytest.raises(ZeroDivisionError):
        clock.timed("judge", lambda: 1 // 0)()
    assert clock.lap() == {"rest": 2, "judge": 1}


def test_each_drafter_has_a_line_that_adds_up(tiny_bundle: Path) -> None:
    done = call(tiny_bundle, "--max-new-tokens", 24, "--temperature", 0.8, "--threads", 1)
    assert done.returncode == 0, done.stderr
    title, heads, *lines = done.stdout.splitlines()
    assert title == "milliseconds a round, medians"
    assert [line.split()[0] for line in lines] == ["off", "lookup", "model", "hybrid", "auto"]
    for line in lines:
        found = dict(zip(heads.split()[1:], line.split()[1:], strict=True))
        assert int(found["rounds"]) > 2
        assert 0 < float(found["share"].rstrip("%")) < 100
        assert float(found["passes"]) > 0
        assert (float(found["propose"]) > 0) == (line.split()[0] != "off")
        assert all(float(found[part]) > 0 for part in ("python", "feed", "judge", "text", "rest"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--drafters", "off,fast"], "error: The drafter 'fast' is unknown"),
        (["--drafters", " ,"], "' ,' names no drafter"),
        (["--max-new-tokens", "17", "--drafters", "off"], "--max-new-tokens is 17; at least 18 are needed"),
        (["--prompts", "absent.txt"], "absent.txt"),
        (["--temperature", "-1"], "temperature is -1"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(tiny_bundle: Path, options: list[str], sentence: str) -> None:
    done = call(tiny_bundle, "--threads", 1, *options)
    assert done.returncode in (1, 2)
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == "", "nothing is measured before all of it is checked"


def test_drafters_may_stand_apart_and_twice(bench_round: Any) -> None:
    read = bench_round.parse_arguments(["b", "--drafters", " off, auto,off "]).drafters
    usual = bench_round.DRAFTERS
    assert read == ("off", "auto")
    assert bench_round.chosen_drafters(read, usual, has_draft=False) == ("off", "auto")
    assert bench_round.chosen_drafters(None, usual, has_draft=False) == ("off", "lookup", "auto")
    with pytest.raises(ValueError, match="'hybrid' needs a draft model, and the bundle has none"):
        bench_round.chosen_drafters(["off", "hybrid"], usual, has_draft=False)


def test_what_takes_long_to_import_waits_for_the_handler_of_interrupts() -> None:
    code = f"import sys; sys.path.append({str(SCRIPTS)!r}); import bench_round; print('unittest.mock' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr
