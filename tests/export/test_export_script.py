"""scripts/export.py as a user calls it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "export.py"


def call(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=120, cwd=cwd, check=False
    )


def test_help_teaches_by_example():
    result = call("--help")
    assert result.returncode == 0
    examples = result.stdout.partition("examples:")[2]
    for option in ("--target", "--draft", "--out", "--precision", "--max-length", "--draft self"):
        assert option in examples, option
    assert "--overwrite" in result.stdout
    assert "--draft-precision" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--target", "a", "--out", "b", "--colour", "red"], "--colour"),
        (["--target", "a", "--out", "b", "--prec", "int4"], "--prec"),  # no abbreviations
        (["--target", "a", "--out", "b", "--precision", "int3"], "int3"),
        (["--target", "a", "--out", "b", "--max-length", "many"], "many"),
        (["--target", "a"], "--out"),
        (["--out", "b"], "--target"),
        (["--add-lowering", "static"], "--out"),
        (["--add-lowering", "static", "--out", "b", "--precision", "int4"], "so --precision has no place"),
        (["--add-lowering", "static", "--out", "b", "--precision", "fp32"], "so --precision has no place"),  # the default
        (["--target", "a", "--out", "b", "--draft-precision", "int4"], "--draft-precision is for a draft model"),
        (["--add-lowering", "static", "--out", "b", "--draft", "self"], "--draft self has no place with --add-lowering"),
        (["--add-lowering", "static", "--out", "b", "--overwrite"], "so --overwrite has no place"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], named: str):
    result = call(*arguments)
    assert result.returncode == 2
    assert named in result.stderr
    assert "Traceback" not in result.stderr


def test_pair_is_exported(tiny_target: Path, tiny_draft: Path, tmp_path: Path):
    # From another folder than the repository's, with relative paths.
    (tmp_path / "target").symlink_to(tiny_target)
    result = call(
        "--target", "target", "--draft", tiny_draft, "--out", "out/bundle", "--precision", "int8", "--max-length", "256",
        "--emit-genai-config", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    manifest = json.loads((tmp_path / "out" / "bundle" / "bundle.json").read_text(encoding="utf-8"))
    assert (manifest["target"]["source"], manifest["target"]["precision"]) == ("target", "int8")
    assert (manifest["draft"]["source"], manifest["draft"]["precision"]) == (str(tiny_draft), "int4")
    assert manifest["target"]["context_length"] == 256
    lines = result.stdout.splitlines()
    assert lines[0].startswith("target: target, int8, ")
    assert any(
        line.startswith("draft: ") and "int4" in line and "rows are bit-equal, passes need no padding" in line for line in lines
    )
    assert any("prefill: max difference" in line for line in lines)
    assert "written: out/bundle" in lines
    assert "scripts/generate.py out/bundle" in lines[-1]
    assert "quantising the weights" in result.stderr
    assert "Traceback" not in result.stderr
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["bundle"]
    genai = json.loads((tmp_path / "out" / "bundle" / "genai_config.json").read_text(encoding="utf-8"))
    assert genai["speculative"] == {"max_draft_tokens": 4}


def test_a_form_is_added_to_a_bundle(tiny_draft: Path, tmp_path: Path):
    made = call("--target", tiny_draft, "--out", tmp_path / "b", "--precision", "fp16", "--max-length", "96")
    assert made.returncode == 0, made.stderr
    added = call("--add-lowering", "static", "--out", "b", cwd=tmp_path)
    assert added.returncode == 0, added.stderr
    first, second = (line for line in added.stdout.splitlines() if line.startswith("target: "))
    assert "lowering gqa, 0." in first
    assert "lowering static, 0.0 MB more" in second
    assert "step 1 of 4: target (fp16): building the graph" in added.stderr
    assert "written: b" in added.stdout.splitlines()
    again = call("--add-lowering", "static", "--out", tmp_path / "b")
    assert again.returncode == 1
    assert again.stderr.splitlines()[-1].startswith("error: The target in ")
    assert "has the lowering static already" in again.stderr


def test_a_form_for_devices_only_is_not_timed(tiny_draft: Path, tmp_path: Path):
    result = call("--target", tiny_draft, "--out", tmp_path / "b", "--precision", "bf16", "--max-length", "96")
    assert result.returncode == 0, result.stderr
    assert "rewind: max difference" in result.stdout
    assert "passes here" not in result.stdout
    assert result.stdout.splitlines()[-1].endswith(" --chat --device cuda")


def test_a_bundle_may_be_made_where_one_stands(tiny_draft: Path, tmp_path: Path):
    """The folder under the script's feet is replaced: a relative path leads nowhere from there."""
    (folder := tmp_path / "b").mkdir()
    asked = ["--precision", "fp16", "--max-length", "100000", "--overwrite"]
    made = call("--target", tiny_draft, "--out", ".", *asked, cwd=folder)
    added = call("--add-lowering", "static", "--out", ".", cwd=folder)
    for result in (made, added):
        assert result.returncode == 0, result.stderr
        assert "passes here" in result.stdout
        assert f"written: {folder}" in result.stdout.splitlines()
        assert result.stdout.splitlines()[-1] == f"note: the folder that you are in was replaced by the new one: cd {folder}"
    note = "note: --max-length is 100000, and the model's own context 512 tokens: the bundle's is the latter"
    assert note in made.stdout.splitlines()
    assert "--max-length" not in added.stdout


def test_refusal_is_one_sentence_on_stderr(tiny_target: Path, tmp_path: Path):
    (tmp_path / "bundle").mkdir()
    result = call("--target", tiny_target, "--out", tmp_path / "bundle")
    assert result.returncode == 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert errors == [f"error: {tmp_path / 'bundle'} exists already: choose another --out, or pass --overwrite to replace it."]
    assert result.stderr.splitlines()[-1] == errors[0]
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_an_interrupt_behind_the_export_does_not_deny_the_bundle(tmp_path: Path):
    """While passes are timed: the bundle is in its place by then."""
    code = (
        "import importlib.util, sys, types; path = sys.argv.pop(1); sys.path.insert(0, path)\n"
        "spec = importlib.util.spec_from_file_location('script', path + '/export.py')\n"
        "script = importlib.util.module_from_spec(spec); spec.loader.exec_module(script)\n"
        "def interrupt(*_): raise KeyboardInterrupt\n"
        "script._print_bundle, script._export = interrupt, lambda *_: types.SimpleNamespace(folder='some/bundle')\n"
        "import command_line; sys.exit(command_line.run(script.main, extra='', interrupted='nothing was written'))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, SCRIPT.parent, "--target", "a", "--out", tmp_path / "b"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 130
    assert result.stderr.endswith("interrupted: the bundle is written, some/bundle\n")
    assert "nothing was written" not in result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for one process")
@pytest.mark.parametrize(("signal_number", "line"), [("SIGINT", "loading"), ("SIGINT", "building"), ("SIGTERM", "building")])
def test_interrupt_leaves_nothing(tiny_target: Path, tmp_path: Path, signal_number: str, line: str):
    # exec hands an ignored signal on, and a shell that runs tests in the background has had this one ignored.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "-u", SCRIPT, "--target", tiny_target, "--out", tmp_path / "bundle"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    signal.signal(signal.SIGINT, inherited)
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    try:
        assert process.stderr is not None
        heard = []
        for text in process.stderr:
            heard.append(text)
            if line in text:
                os.kill(process.pid, getattr(signal, signal_number))
                break
        stdout, stderr = process.communicate(timeout=60)
    finally:
        watchdog.cancel()
        process.kill()
    assert process.returncode == 130, "".join(heard) + stderr
    assert stderr.rstrip().endswith("interrupted: nothing was written")
    assert "Traceback" not in stderr
    assert stdout == ""
    assert not list(tmp_path.iterdir())
