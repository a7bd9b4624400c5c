"""examples/speak_lines.py on the tiny pair: answers, a state that outlives the process, memory that is bounded."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from runtime import Generator, SamplingParams
from runtime.manifest import load_bundle
from runtime.memory import MemoryBudget

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "speak_lines.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def example() -> ModuleType:
    specification = importlib.util.spec_from_file_location("speak_lines", EXAMPLE)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generator(tiny_bundle: Path) -> Generator:
    return Generator.from_bundle(tiny_bundle, drafter="model")


def call(bundle: Path, state: Path, *arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), str(bundle), "--state", str(state), *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=120, env=ENVIRONMENT)


def roles(state: Path) -> str:
    return " ".join(message["role"] for message in json.loads(state.read_text()))


def test_a_restart_goes_on_where_it_stopped(tiny_bundle: Path, tmp_path: Path):
    lines = ["What is 3 + 4?", "And 5 + 1?"]
    options = ("--max-new-tokens", 12)
    whole = call(tiny_bundle, tmp_path / "whole.json", *options, stdin="\n".join(lines))
    assert (whole.returncode, whole.stderr) == (0, "")
    assert len(whole.stdout.splitlines()) >= 2
    parts = [call(tiny_bundle, tmp_path / "parts.json", *options, stdin=line).stdout for line in lines]
    assert "".join(parts) == whole.stdout
    assert (tmp_path / "parts.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert roles(tmp_path / "whole.json") == "user assistant user assistant"


def test_a_line_that_was_left_open_is_answered(tiny_bundle: Path, tmp_path: Path):
    asked = call(tiny_bundle, tmp_path / "asked.json", stdin="What is 3 + 4?")
    state = tmp_path / "open.json"
    state.write_text(json.dumps([{"role": "user", "content": "What is 3 + 4?"}]))
    assert call(tiny_bundle, state).stdout == asked.stdout != ""
    assert roles(state) == "user assistant"
    assert call(tiny_bundle, state).stdout == ""  # and once only


def test_the_oldest_turns_are_forgotten_and_memory_stays(example: ModuleType, generator: Generator, tmp_path: Path):
    conversation = example.Conversation(tmp_path / "state.json")
    speaker = example.Speaker(generator, conversation, 96, SamplingParams(max_new_tokens=16, ignore_eos=True))
    caches = speaker._session._target._context
    speaker.speak(f"What is {number} + 4?" for number in range(12))
    assert conversation.messages[-2]["content"] == "What is 11 + 4?"
    assert roles(tmp_path / "state.json").startswith("user assistant")
    assert len(generator.prompt_tokens(conversation.messages[:-1])) <= 80
    assert len(conversation.messages) < 24
    assert speaker._session._target._context is caches


def test_a_line_too_long_for_the_device_is_told_and_the_next_is_answered(
    example: ModuleType, generator: Generator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    conversation = example.Conversation(tmp_path / "state.json")
    speaker = example.Speaker(generator, conversation, 128, SamplingParams(max_new_tokens=8))
    speaker.speak(["What is 1 + 4?", "What is 3 + 4? " * 40, "What is 3 + 4?"])
    assert "The prompt has" in capsys.readouterr().err
    said = [message["content"] for message in conversation.messages if message["role"] == "user"]
    assert said == ["What is 1 + 4?", "What is 3 + 4?"]  # nothing was forgotten for a line that cannot be answered
    assert roles(tmp_path / "state.json") == "user assistant user assistant"


def test_what_stops_an_answer_leaves_its_line_open(
    example: ModuleType, generator: Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    conversation = example.Conversation(tmp_path / "state.json")
    speaker = example.Speaker(generator, conversation, 96, SamplingParams(max_new_tokens=16, ignore_eos=True))
    monkeypatch.setattr("builtins.print", lambda *_words, **_options: speaker.stop())  # behind the first piece
    speaker.speak(["What is 3 + 4?", "not taken any more"])
    assert roles(tmp_path / "state.json") == "user"
    monkeypatch.undo()
    again = example.Speaker(generator, example.Conversation(tmp_path / "state.json"), 96, SamplingParams(max_new_tokens=16))
    again.speak([])
    assert roles(tmp_path / "state.json") == "user assistant"


def test_a_failure_while_writing_keeps_the_old_state(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    conversation = example.Conversation(tmp_path / "state.json")
    conversation.add("user", "one")
    monkeypatch.setattr("os.fsync", lambda _file: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        conversation.add("assistant", "two")
    assert example.Conversation(tmp_path / "state.json").messages == [{"role": "user", "content": "one"}]


def test_more_memory_than_allowed_is_refused_before_anything_is_loaded(tiny_bundle: Path, tmp_path: Path):
    bundle = load_bundle(tiny_bundle)
    peak = MemoryBudget.of(bundle.target, bundle.draft, 1024).peak / 1e9
    refused = call(tiny_bundle, tmp_path / "state.json", "--memory-gb", peak / 2, stdin="What is 3 + 4?")
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (1, "", 1)
    assert "of memory" in refused.stderr
    assert not (tmp_path / "state.json").exists()
    assert call(tiny_bundle, tmp_path / "state.json", "--memory-gb", peak * 2, stdin="What is 3 + 4?").returncode == 0


@pytest.mark.parametrize("contents", ["", "{", "[1]", '{"a": 1}', '[{"role": "user"}]'])
def test_a_damaged_state_is_one_sentence(tiny_bundle: Path, tmp_path: Path, contents: str, example: ModuleType):
    (tmp_path / "state.json").write_text(contents)
    with pytest.raises(ValueError, match=r"The state file .*state\.json cannot be read .*: remove it to begin anew\."):
        example.Conversation(tmp_path / "state.json")


def test_sigterm_ends_it_and_nothing_is_lost(tiny_bundle: Path, tmp_path: Path):
    state = tmp_path / "state.json"
    command = [sys.executable, str(EXAMPLE), str(tiny_bundle), "--state", str(state)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert process.stdin is not None
    process.stdin.write("What is 3 + 4?\n")
    process.stdin.flush()
    while not state.exists() or "assistant" not in roles(state):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)  # it waits for a line that never comes
    assert process.wait(timeout=60) == 0
    process.stdin.close()
    assert roles(state) == "user assistant"
