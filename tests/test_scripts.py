"""The scripts as a user calls them: help, errors, pipes, interrupts. The export script has its own file."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from runtime import Generator, SamplingParams
from runtime.manifest import load_bundle, save_bundle

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
        (["--device", "CPU"], "The device 'CPU' is not available: the names are cpu, cuda, ort-tensorrt"),
        (["--device", "cpu:0"], "and cpu takes no number"),
        (["--device", "ort-tensorrt:1"], "The device 'ort-tensorrt:1' is not available"),
        (["--draft-device", "cuda", "--drafter", "model"], "The device 'cuda' is not available"),
        (["--tf32"], "tf32 (--tf32) is an option of the device 'cuda' and 'ort-tensorrt'; this is 'cpu': leave it out"),
        (["--cuda-graphs"], "cuda_graphs (--cuda-graphs) is an option of the device 'cuda'; this is 'cpu'"),
        (["--gpu-memory-limit", "1.5"], "memory_limit (--gpu-memory-limit) is an option of the device 'cuda'; this is 'cpu'"),
        (["--gpu-memory-limit", "nan"], "--gpu-memory-limit is nan; gigabytes are expected, such as 4 or 0.5."),
        (["--gpu-memory-limit", "1e300"], "--gpu-memory-limit is 1e+300; gigabytes are expected"),
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


@pytest.mark.parametrize(
    ("bias", "sentence"),
    [
        ('{"01": 5, "1": 3}', "'01' is no token id"),
        ('{"1": 5, "1": 3}', "token 1 stands there twice"),
        ('{"1": true}', "the bias of 1 is true, which is no number"),
        ('{"1": "5"}', 'the bias of 1 is "5", which is no number'),
        ('{"a": 5}', "'a' is no token id"),
        ("[1]", "'[1]' is no object"),
        ("{", "'{' is no JSON"),
        ("[" * 10_000, " is no JSON"),
    ],
)
def test_a_bias_that_says_two_things_or_none_is_refused(bias: str, sentence: str) -> None:
    done = call("generate.py", "no-bundle", "1 2 3", "--logit-bias", bias)
    assert done.returncode == 2
    assert sentence in done.stderr.splitlines()[-1]


def test_a_bias_may_be_whole_or_not(tiny_bundle: Path) -> None:
    usual = call("generate.py", tiny_bundle, "1 2 3", "--max-new-tokens", 4)
    biased = call("generate.py", tiny_bundle, "1 2 3", "--max-new-tokens", 4, "--logit-bias", '{"7": 100, "0": -2.5}')
    assert usual.returncode == biased.returncode == 0
    assert usual.stdout != biased.stdout


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--vocab-size", "99999999999"], "--vocab-size is 99999999999; a number from 1000 to 1000000 is expected"),
        (["--vocab-size", "8"], "--vocab-size is 8; a number from 1000"),
        (["--history", "99999999999"], "--history is 99999999999; a number from 1 to 1000000"),
        (["--num-draft-tokens", "65"], "--num-draft-tokens is 65; a number from 1 to 64"),
        (["--repeat", "0"], "--repeat is 0; a number from 1"),
    ],
)
def test_sampling_is_timed_within_bounds(options: list[str], sentence: str) -> None:
    done = call("bench_sampling.py", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr


def test_sampling_is_timed_with_the_fewest_tokens() -> None:
    done = call("bench_sampling.py", "--vocab-size", 1000, "--history", 20_000, "--repeat", 1)
    assert done.returncode == 0, done.stderr
    assert "penalties, no-repeat" in done.stdout


@pytest.mark.parametrize(("worker", "starter"), [("bench_worker.py", "bench.py"), ("device_worker.py", "device_check.py")])
def test_a_worker_says_who_starts_it(worker: str, starter: str) -> None:
    done = call(worker, "--help")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert f"{worker} is started by scripts/{starter}" in done.stderr


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


@pytest.mark.parametrize(("drafter", "told"), [("off", ", nothing proposed, "), ("model", ", acceptance rate ")])
def test_no_acceptance_rate_is_told_of_nothing(tiny_bundle: Path, drafter: str, told: str) -> None:
    done = call("generate.py", tiny_bundle, "1 2 3", "--max-new-tokens", 8, "--drafter", drafter, "--trace")
    assert done.returncode == 0
    assert told in done.stderr
    assert ("acceptance rate" in done.stderr) == (drafter == "model")


def test_a_reader_that_leaves_is_no_error(tiny_bundle: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "generate.py"), str(tiny_bundle), "1 2 3", "--trace"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
    process.wait(timeout=60)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_is_one_sentence(tiny_bundle: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "generate.py"), str(tiny_bundle), "1 2 3", "--max-new-tokens", "4"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


def test_an_output_that_is_closed_is_one_sentence(tiny_bundle: Path) -> None:
    command = shlex.join([sys.executable, str(SCRIPTS / "generate.py"), str(tiny_bundle), "1 2 3"])
    done = subprocess.run(["/bin/sh", "-c", f"{command} >&-"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: The standard output is closed")


def test_with_closed_errors_work_goes_on(tiny_bundle: Path) -> None:
    """Without a progress bar."""
    command = shlex.join([sys.executable, str(SCRIPTS / "chat.py"), str(tiny_bundle), "--max-new-tokens", "4"])
    done = subprocess.run(["/bin/sh", "-c", f"{command} 2>&-"], input="hello\n", capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.strip()


@pytest.mark.parametrize("told", ["", "Unable to allocate 5 GiB"])
def test_too_little_memory_is_one_sentence(tmp_path: Path, told: str) -> None:
    code = f"from command_line import run\ndef main():\n    raise MemoryError({told!r})\nraise SystemExit(run(main, extra=''))"
    (tmp_path / "script.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    reason = f" ({told})" if told else ""
    assert (done.returncode, done.stderr) == (1, f"error: There is too little memory for this{reason}: ask for less.\n")


def test_text_that_the_output_cannot_write_is_one_sentence(tiny_bundle: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "generate.py"), str(tiny_bundle), "cat = le", "--max-new-tokens", "30"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert re.match(
        r"error: The output's encoding, ascii, cannot write '\\\S+': set PYTHONIOENCODING=utf-8:replace\.", done.stderr
    )


@pytest.mark.parametrize(("script", "arguments", "status"), [("generate.py", ["-"], 1), ("chat.py", [], 0)])
def test_an_input_that_is_closed_has_ended(tiny_bundle: Path, script: str, arguments: list[str], status: int) -> None:
    command = shlex.join([sys.executable, str(SCRIPTS / script), str(tiny_bundle), *arguments])
    done = subprocess.run(["/bin/sh", "-c", f"{command} <&-"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith("error: The prompt is empty") if status else done.stderr == ""


def test_a_chat_without_a_template_names_the_script_that_needs_none(tiny_bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_bundle, folder := tmp_path / "bundle")
    bundle = load_bundle(folder)
    save_bundle(replace(bundle, tokenizer=replace(bundle.tokenizer, chat_template=None)))
    done = call("chat.py", folder)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "has no chat template, so it holds no conversation" in done.stderr
    assert f"python scripts/generate.py {folder}" in done.stderr


def test_a_chat_does_what_its_commands_say(tiny_bundle: Path) -> None:
    long = "a " * 600
    said = [long, "What is 3 + 4?", "/more", long, "/back", "/more", "/again", "/nope", " /nope", "", "/exit", "not read"]
    done = call("chat.py", tiny_bundle, "--max-new-tokens", 2, stdin="\n".join(said))
    told = [line for line in done.stderr.splitlines() if not line.startswith("[")]
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == done.stderr.count("\n[") == 3, "two turns, and more of the first"
    assert [line[:15] for line in told[:2]] == ["The prompt has "] * 2
    assert [line.endswith(" Forget the last turn with /back.") for line in told[:2]] == [False, True]
    assert told[2].startswith("There is no answer to go on with")
    assert told[3:] == ["There is no message to answer again.", "'/nope' is unknown; there are /more, /again, /back, /exit."]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_modules_are_imported_is_a_word(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "numpy.py").write_text(f"import os, time\nos.kill(os.getpid(), {int(number)})\ntime.sleep(20)\n")
    command = [sys.executable, str(SCRIPTS / "generate.py"), str(tmp_path), "1 2 3"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")


def test_an_interrupt_that_a_module_reports_as_its_own_failure_is_a_word(tmp_path: Path) -> None:
    """As onnxruntime's module of C++ does."""
    code = (
        "from command_line import run\ndef main():\n    raise ImportError('initialization failed') from KeyboardInterrupt()\n"
    )
    (tmp_path / "script.py").write_text(f"{code}raise SystemExit(run(main, extra='.[cpu]'))\n")
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "\ninterrupted\n")


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
