"""scripts/bench.py: its figures from given measurements, its modes, and the script as a user calls it. No time is asserted."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
MODULES = ("bench_figures", "bench_engines", "bench_run", "bench_report", "bench_setup")


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """The modules beside the script, their names in one place, imported as the script does it."""
    sys.path.append(str(SCRIPTS))
    names = ModuleType("bench")
    try:
        for name in MODULES:
            names.__dict__.update({key: value for key, value in vars(importlib.import_module(name)).items() if key[0] != "_"})
        yield names
    finally:
        sys.path.remove(str(SCRIPTS))
        for name in MODULES:
            sys.modules.pop(name, None)


def call(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "bench.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def text_run(bench: Any, whole: float, first: float = 1.0, tokens: tuple[int, ...] = (1, 2, 3, 4, 5), **counts: Any) -> Any:
    work = {"target_passes": 5, "draft_passes": 0, "rounds": 5, "proposed": 0, "accepted": 0, "python_seconds": 0.5} | counts
    first_tokens = work.pop("first_tokens", 1)
    return bench.TextRun(tokens, first, whole, first_tokens, bench.Work(**work))


def test_decode_time_is_what_comes_behind_the_first_round(bench: Any) -> None:
    assert text_run(bench, 9.0).decode_seconds == 2.0
    assert text_run(bench, 9.0, first_tokens=3).decode_seconds == 4.0


def test_ratios_are_taken_within_a_repetition(bench: Any) -> None:
    """The machine slows down from one repetition to the next; a ratio of medians would be 4/3, 8/4, 10/4 or worse."""
    plain = [text_run(bench, whole) for whole in (5.0, 9.0, 41.0)]
    fast = [text_run(bench, whole) for whole in (3.0, 3.0, 21.0)]
    ratios = bench.Ratios.of(plain, fast)
    assert ratios.decode == bench.Spread(2.0, 2.0, 4.0)
    assert ratios.whole == bench.Spread(41 / 21, 5 / 3, 3.0)
    with pytest.raises(ValueError, match="shorter"):
        bench.Ratios.of(plain, fast[:2])


def test_figures_of_modes(bench: Any) -> None:
    model = bench.Mode("ours", "model", 4)
    runs = {
        bench.OURS_PLAIN: [text_run(bench, 9.0), text_run(bench, 9.0), text_run(bench, 9.0)],
        model: [
            text_run(bench, 5.0, target_passes=2, draft_passes=8, rounds=2, proposed=8, accepted=3, python_seconds=0.1),
            text_run(bench, 3.0, target_passes=3, draft_passes=9, rounds=3, proposed=8, accepted=5, python_seconds=0.4),
        ],
        bench.GENAI_PLAIN: [text_run(bench, 5.0, python_seconds=None)] * 3,
    }
    plain, drafted, genai = bench.mode_figures(runs, same_text=frozenset({"ours", "genai"}))
    # The third repetition was broken off before the second mode's turn.
    assert {len(one.runs) for one in (plain, drafted, genai)} == {2}
    assert (plain.tokens_per_second, plain.seconds, plain.tokens_per_round, plain.acceptance_rate) == (0.5, 9.0, 1.0, None)
    assert set(plain.ratios) == {"genai plain"}
    assert set(drafted.ratios) == {"off", "genai plain"}
    assert drafted.ratios["off"].decode == bench.Spread(3.0, 2.0, 4.0)
    assert drafted.ratios["genai plain"].decode == bench.Spread(1.5, 1.0, 2.0)
    assert (drafted.target_passes, drafted.draft_passes) == (2.5, 8.5)
    assert drafted.tokens_per_round == 2.0
    assert drafted.acceptance_rate == 0.5
    assert drafted.python_milliseconds_per_round == pytest.approx(100)
    assert genai.python_milliseconds_per_round is None
    assert [one.text for one in (plain, drafted, genai)] == [None, "identical", "identical"]
    assert bench.mode_figures({**runs, model: []}, same_text=frozenset()) == []


def test_texts_are_held_against_their_own_engines_plain_text(bench: Any) -> None:
    draft = bench.Mode("genai", "model", 4)
    texts = {
        bench.OURS_PLAIN: (1, 2, 3, 4, 5),
        bench.Mode("ours", "auto"): (1, 2, 3, 4, 6),
        bench.GENAI_PLAIN: (1, 7, 3, 4, 5),
        draft: (1, 7, 3, 4, 5),
        bench.LLAMA_PLAIN: (9, 9, 9, 9, 9),
    }
    runs = {mode: [text_run(bench, 9.0, tokens=tokens)] for mode, tokens in texts.items()}
    both = bench.mode_figures(runs, same_text=frozenset({"ours", "genai"}))
    assert [one.text for one in both] == [None, "parts at token 5", "parts at token 2", "identical", None]
    assert {one.text for one in bench.mode_figures(runs, same_text=frozenset())} == {None}
    # The earliest place of all repetitions.
    thrice = {mode: done * 3 for mode, done in runs.items()}
    thrice[draft] = [*runs[draft], *(text_run(bench, 9.0, tokens=tokens) for tokens in ((1, 7, 3, 5, 5), (1, 7, 3, 4, 9)))]
    assert bench.mode_figures(thrice, same_text=frozenset({"genai"}))[3].text == "parts at token 4"


@pytest.mark.parametrize(("other", "place"), [((1, 2, 3), None), ((1, 9, 3), 1), ((1, 2), 2), ((1, 2, 3, 4), 3), ((), 0)])
def test_parting(bench: Any, other: tuple[int, ...], place: int | None) -> None:
    assert bench.parting((1, 2, 3), other) == place


def test_overall_is_the_geometric_mean(bench: Any) -> None:
    spread = bench.overall([2.0, 0.5, 8.0])
    assert spread.median == pytest.approx(2.0)
    assert (spread.low, spread.high) == (0.5, 8.0)


def test_modes(bench: Any) -> None:
    """Each engine's plain decoding is there once, and ONNX Runtime GenAI gets the K it takes."""

    def names(drafters: list[str], numbers: list[int] | None, **options: bool) -> list[str]:
        options = {"genai": False, "genai_draft": False, "gguf": False} | options
        return [mode.name for mode in bench.modes_of(drafters, numbers, **options)]

    assert names(["auto", "off", "lookup", "auto"], None) == ["off", "auto", "lookup"]
    ours = ["off", "model K=2", "model K=20"]
    assert names(["model"], [2, 20]) == ours
    genai = ["genai plain", "genai draft K=2", "genai lookup K=2", "llama.cpp plain"]
    assert names(["model"], [2, 20], genai=True, genai_draft=True, gguf=True) == [*ours, *genai]
    assert names([], None, genai=True) == ["off", "genai plain", "genai lookup K=4"]


class EngineOfRecord:
    """Keeps what it was asked for."""

    version = "0"

    def __init__(self, bench: Any) -> None:
        self._bench = bench
        self.asked: list[tuple[str, str, int, int]] = []

    def run(self, mode: Any, request: Any) -> Any:
        self.asked.append((mode.name, "".join(map(str, request.prompt)), request.max_new_tokens, request.seed))
        return text_run(self._bench, 9.0)


def test_modes_take_turns_within_a_repetition(bench: Any) -> None:
    engine = EngineOfRecord(bench)
    modes = (bench.OURS_PLAIN, bench.Mode("ours", "auto"))
    cases = [bench.Case(name, bench.TextRequest((number,), 60)) for number, name in enumerate("ab")]
    titles: list[str] = []
    done = list(bench.measure({"ours": engine}, modes, cases, 2, titles.append))
    assert [case for case, _ in done] == cases
    warm_up, counted = engine.asked[:2], engine.asked[2:]
    assert {name for name, _, tokens, _ in warm_up if tokens < 60} == {"off", "auto"}
    turns = [("off", 1), ("auto", 1), ("off", 2), ("auto", 2)]
    assert counted == [(name, prompt, 60, seed) for prompt in "01" for name, seed in turns]
    assert titles == [f"{prompt}: {name}" for prompt in "ab" for name, _ in turns]


def test_an_interrupt_yields_the_repetitions_that_are_whole(bench: Any) -> None:
    class Interrupted(EngineOfRecord):
        def run(self, mode: Any, request: Any) -> Any:
            if len(self.asked) == 5:  # two texts warm up; then a whole repetition, and half of one
                raise KeyboardInterrupt
            return super().run(mode, request)

    modes = (bench.OURS_PLAIN, bench.Mode("ours", "auto"))
    cases = [bench.Case(name, bench.TextRequest((1,), 60)) for name in "ab"]
    done = bench.measure({"ours": Interrupted(bench)}, modes, cases, 3, str)
    case, figures = next(done)
    assert case.prompt == "a"
    assert [len(one.runs) for one in figures] == [1, 1]
    with pytest.raises(KeyboardInterrupt):
        next(done)


@pytest.mark.parametrize(
    ("options", "status", "sentence"),
    [
        (["--repeat", "0"], 2, "--repeat is 0; a number from 1"),
        (["--num-draft-tokens", "2", "65"], 2, "--num-draft-tokens is 65; a number from 1 to 64"),
        (["--max-new-tokens", "17"], 2, "--max-new-tokens is 17; a number from 18 to 100000 is expected, since speed"),
        (["--num-draft-tokens", "4", "--max-new-tokens", "5"], 2, "--max-new-tokens is 5; a number from 6"),
        (["--temperature", "0", "nan"], 2, "--temperature is nan"),
        (["--gguf", "nowhere.gguf"], 2, "--gguf is nowhere.gguf, which is no file"),
        (["--genai", "--draft-device", "cuda"], 2, "--genai and --gguf run on the CPU only: leave them out"),
        (["--device", "ort-tensorrt"], 1, "The device 'ort-tensorrt' is not available"),
        (["--plot", "plot.png"], 2, "--plot is plot.png; a name that ends with .svg"),
        (["--drafters", ""], 2, "'' names no drafter"),
        (["--drafters", "auto, magic"], 1, "The drafter 'magic' is unknown; there are auto"),
        (["--threads", "0"], 1, "threads is 0"),
        (["--json", "no/such/folder.json"], 1, "no/such/folder.json cannot be written"),
        (["--prompts", "nowhere.txt"], 1, "The prompts file nowhere.txt cannot be read"),
        (["--max-new-tokens", "400"], 1, "tokens; with 400 new ones and a long proposal, at most 47 fit"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(tiny_bundle: Path, options: list[str], status: int, sentence: str) -> None:
    done = call(tiny_bundle, *options)
    assert done.returncode == status, done.stderr
    assert sentence in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_it_measures_prints_writes_and_draws(tiny_bundle: Path, tmp_path: Path) -> None:
    """With ONNX Runtime GenAI where it is installed; otherwise a note says why it is not there."""
    genai = importlib.util.find_spec("onnxruntime_genai") is not None
    (tmp_path / "prompts.txt").write_text("1 2 3\nWhat is 3 + 4?\n")
    files = ["--json", tmp_path / "bench.json", "--plot", tmp_path / "bench.svg", "--prompts", tmp_path / "prompts.txt"]
    speed = ["--max-new-tokens", 20, "--repeat", 2, "--threads", 1]
    rules = ["--temperature", 0, 0.8, "--acceptance", "coupled", "--drafters", "model,lookup", "--num-draft-tokens", 3]
    done = call(tiny_bundle, *files, *speed, *rules, "--genai")
    assert done.returncode == 0, done.stderr
    header = next(line for line in done.stdout.splitlines() if line.startswith("mode  "))
    for column in ("tok/s", "vs off", "whole s", "whole vs off", "passes", "tok/round", "accepted", "python ms", "text"):
        assert column in header
    assert ("vs genai plain" in header) == genai
    assert ("genai is left out: onnxruntime_genai is not installed" in done.stdout) == (not genai)
    assert "over all prompts" in done.stdout
    assert (tmp_path / "bench.svg").read_text().count("temperature 0.8") == 1

    document = json.loads((tmp_path / "bench.json").read_text())
    assert document["complete"] is True
    assert document["threads"] == 1
    assert set(document) >= {"bundle", "pair", "machine", "versions", "settings", "notes", "load_average", "results"}
    assert [(one["prompt"], one["temperature"]) for one in document["results"]] == [
        (prompt, temperature) for prompt in ("prompt 1", "prompt 2") for temperature in (0, 0.8)
    ]
    others = ["genai plain", "genai draft K=3", "genai lookup K=3"] if genai else []
    for result in document["results"]:
        modes = {mode["name"]: mode for mode in result["modes"]}
        assert list(modes) == ["off", "model K=3", "lookup K=3", *others]
        assert all(len(run["tokens"]) == 20 for mode in modes.values() for run in mode["runs"])
        assert [modes[name]["text"] for name in ("model K=3", "lookup K=3")] == ["identical"] * 2
        assert modes["off"]["target_passes"] == 20
        assert 5 <= modes["model K=3"]["target_passes"] < 20
        assert modes["model K=3"]["tokens_per_round"] > 1
        assert set(modes["model K=3"]["ratios"]) == {"off", *others[:1]}
        assert set(modes["model K=3"]["ratios"]["off"]["decode"]) == {"median", "low", "high"}
        for name in others:
            assert 1 <= modes[name]["tokens_per_round"] <= 4
            # The same graphs, and every row has the same bits.
            assert modes[name]["text"] == (None if result["temperature"] else "identical")
    assert not list(tiny_bundle.parent.glob(".bench-*"))


def test_an_engine_that_cannot_load_is_named(bench: Any, tmp_path: Path) -> None:
    code = "import sys; print('cannot open that', file=sys.stderr); sys.exit(3)"
    pipe = subprocess.PIPE
    with (tmp_path / "errors").open("w+") as errors:
        process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=errors, text=True)
        with process, pytest.raises(ValueError, match=r"genai ended with status 3 \(cannot open that\)"):
            bench.WorkerEngine("genai", process, errors)


def test_a_missing_package_is_a_note(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    notes = bench.missing_packages(genai=True, gguf=True)
    assert "onnxruntime_genai is not installed (pip install -e '.[oracles]'" in notes["genai"]
    assert "llama_cpp is not installed" in notes["llama.cpp"]
    assert bench.missing_packages(genai=False, gguf=False) == {}


def test_a_bundle_that_genai_cannot_pair_is_explained(bench: Any, tiny_bundle: Path) -> None:
    from runtime.manifest import load_bundle

    bundle = load_bundle(tiny_bundle)
    assert bundle.draft is not None
    assert bench.genai_refusal(bundle, 4) is None
    wider = replace(bundle, draft=replace(bundle.draft, vocab_size=bundle.draft.vocab_size + 1))
    assert bench.genai_refusal(wider, 0) is None
    assert "equal widths" in bench.genai_refusal(wider, 4)


def test_an_interrupt_keeps_what_is_done(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("1 2 3\n")
    options = ["--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "40", "--repeat", "1000", "--threads", "1"]
    files = ["--json", str(tmp_path / "bench.json")]
    command = [sys.executable, str(SCRIPTS / "bench.py"), str(tiny_bundle), *options, *files]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "columns:" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip().splitlines()[-1] == "interrupted"
    document = json.loads((tmp_path / "bench.json").read_text())
    assert document["complete"] is False
    assert all(0 < len(mode["runs"]) < 1000 for result in document["results"] for mode in result["modes"])
