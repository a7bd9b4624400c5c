"""The scripts as a user calls them: help, errors, pipes, interrupts. The export script has its own file."""

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from runtime import Generator, SamplingParams

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def call(script: str, *arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("script", ["export.py", "generate.py", "demo.py"])
def test_help_teaches_by_example(script: str) -> None:
    done = call(script, "--help")
    assert done.returncode == 0
    assert "examples:" in done.stdout
    assert f"python scripts/{script}" in done.stdout


@pytest.mark.parametrize("script", ["export.py", "generate.py", "demo.py"])
def test_an_unknown_option_is_named(script: str, tmp_path: Path) -> None:
    done = call(script, tmp_path, "prompt", "--max-new-token", "3", "--no-such-option")
    assert done.returncode == 2
    assert "--no-such-option" in done.stderr or "required" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--num-draft-tokens", "-1"], "num_draft_tokens is -1"),
        (["--device", "cuda"], "The device 'cuda' is not available"),
        (["--threads", "0"], "threads is 0"),
        (["--stop", ""], "stop is"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(tiny_bundle: Path, arguments: list[str], sentence: str) -> None:
    done = call("generate.py", tiny_bundle, "1 2 3", *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_folder_that_is_no_bundle_and_an_empty_prompt(tiny_bundle: Path, tmp_path: Path) -> None:
    for arguments, sentence in (((tmp_path, "x"), "is not a bundle"), ((tiny_bundle, ""), "The prompt is empty")):
        done = call("generate.py", *arguments)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert sentence in done.stderr


def test_the_prompt_may_come_from_standard_input(tiny_bundle: Path) -> None:
    given = call("generate.py", tiny_bundle, "1 2 3", "--max-new-tokens", 12)
    piped = call("generate.py", tiny_bundle, "-", "--max-new-tokens", 12, stdin="1 2 3")
    assert given.returncode == piped.returncode == 0
    assert given.stdout == piped.stdout != ""


def test_drafters_print_the_same_text(tiny_bundle: Path) -> None:
    texts = {
        call("generate.py", tiny_bundle, "What is 3 + 4?", "--chat", "--drafter", name).stdout for name in ("model", "off")
    }
    assert len(texts) == 1


def test_a_reader_that_leaves_is_no_error(tiny_bundle: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "generate.py"), str(tiny_bundle), "1 2 3", "--trace"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
    process.wait(timeout=60)


def test_an_interrupt_ends_a_generation_in_a_sentence(tiny_bundle: Path) -> None:
    # A seed whose text does not end early, so that there is more to print than a pipe and its reader hold.
    generator = Generator.from_bundle(tiny_bundle)
    hot = SamplingParams(max_new_tokens=400, temperature=8, acceptance="coupled")
    texts = ((seed, generator.generate("1 2 3", replace(hot, seed=seed))) for seed in range(100))
    seed = next(seed for seed, result in texts if result.finish_reason == "length")
    options = ["--max-new-tokens", "400", "--temperature", "8", "--seed", str(seed), "--acceptance", "coupled", "--trace"]
    command = [sys.executable, str(SCRIPTS / "generate.py"), str(tiny_bundle), "1 2 3", *options]
    # A pipe this small is full in the middle of the text, so the signal finds the script there.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pipesize=4096)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("round 1: ")
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip() == "interrupted"


def test_demo_compares_both_ways(tiny_bundle: Path) -> None:
    done = call("demo.py", tiny_bundle, "--prompt", "What is 3 + 4?", "--max-new-tokens", 16)
    assert done.returncode == 0, done.stderr
    header, _, row = done.stdout.rstrip().splitlines()[-3:]
    for column in ("plain tok/s", "speculative tok/s", "ratio", "acceptance rate", "mean acceptance length", "identical"):
        assert column in header
    assert row.rstrip().endswith("yes")
