"""scripts/build_engines.py as a user calls it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from runtime.cuda_driver import probe_cuda_driver
from runtime.manifest import save_bundle

from .tiny_graph import with_lowering, write_tiny_bundle

SCRIPT = Path(__file__).parents[2] / "scripts" / "build_engines.py"
needs_rtx = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import tensorrt_rtx"], capture_output=True, check=False).returncode != 0,
    reason="needs TensorRT-RTX: pip install -e '.[tensorrt-rtx]'",
)
needs_no_driver = pytest.mark.skipif(probe_cuda_driver().trouble is None, reason="there is a GPU here")


def call(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_help_teaches_by_example() -> None:
    done = call("--help")
    assert done.returncode == 0
    assert "examples:" in done.stdout
    assert "--compile-only --compute-capability 86,89,120" in done.stdout


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--compile-only"], "--compile-only and --compute-capability go together"),
        (["--compute-capability", "86"], "--compile-only and --compute-capability go together"),
        (["--compile-only", "--compute-capability", "8.6"], "numbers such as 86,89,120 are expected"),
        (["--compile-only", "--compute-capability", "86", "--module", "tensorrt"], "builds on the GPU it builds for"),
        (
            ["--compile-only", "--compute-capability", "86", "--device", "cuda:3"],
            "--device cuda:3 is the GPU to build on, and --compile-only builds on none",
        ),
        (["--max-rows", "7"], "--max-rows is 7; at least 8 are expected, one more than --num-draft-tokens"),
        (["--num-draft-tokens", "3", "--max-rows", "3"], "--max-rows is 3; at least 4 are expected"),
        (["--device", "gpu"], "cuda, or cuda:1 for the second GPU, is expected"),
        (["--num-draft-tokens", "0"], "1 to 15 are expected"),
        (["--num-draft-tokens", "16"], "1 to 15 are expected"),
        (["--workspace-gb", "nan"], "a number above 0 is expected"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path: Path, options: list[str], sentence: str) -> None:
    done = call(tmp_path, *options)
    assert done.returncode == 2
    assert sentence in done.stderr


@needs_no_driver
def test_without_a_gpu_one_sentence_says_so(tmp_path: Path) -> None:
    write_tiny_bundle(tmp_path)
    done = call(tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: The device 'cuda'")
    assert "or build for a GPU that is not here: --compile-only --compute-capability 86" in done.stderr
    assert "device='cpu'" not in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("cause", ["from KeyboardInterrupt()", ""])
def test_an_interrupt_while_tensorrt_is_imported_is_a_word(tmp_path: Path, cause: str) -> None:
    """Its module of C++ reports it as a failure of its own, which is another thing than a module that cannot be loaded."""
    (tmp_path / "tensorrt_rtx.py").write_text(f"raise ImportError('initialization failed') {cause}\n")
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--compile-only", "--compute-capability", "86"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    if cause:
        assert (done.returncode, done.stderr) == (130, "\ninterrupted: what was not finished is gone\n")
    else:
        assert done.returncode == 1
        assert "'tensorrt_rtx' cannot be imported (initialization failed): pip install" in done.stderr


@needs_rtx
def test_types_that_a_gpu_lacks_are_told_with_the_precision_that_it_has(tmp_path: Path) -> None:
    write_tiny_bundle(tmp_path, np.float32, with_draft=False)
    done = call(tmp_path, "--compile-only", "--compute-capability", "75")
    assert done.returncode == 1
    sentence = done.stderr.splitlines()[-1]
    assert "FP32 GEMM is not supported" in sentence
    assert sentence.endswith("; that GPU may lack what fp32 needs: export the model in fp16")


@needs_rtx
def test_engines_are_built_for_several_gpus(tmp_path: Path) -> None:
    write_tiny_bundle(tmp_path, np.float16)
    done = call(tmp_path, "--compile-only", "--compute-capability", "86,120", "--num-draft-tokens", 3)
    assert done.returncode == 0, done.stderr
    assert "target: " in done.stdout
    assert "passes of 4, 1 to 48 rows" in done.stdout
    assert "passes of 2, 1 to 4, 1 to 48 rows" in done.stdout
    assert '"Explain tides." --device tensorrt-rtx' in done.stdout
    engines = sorted(str(path.relative_to(tmp_path / "engines")) for path in tmp_path.rglob("*.engine"))
    assert [name.partition("sm")[2] for name in engines] == [
        f"{capability}/{role}/{engine}.engine"
        for capability in ("120", "86")
        for role in ("draft", "target")
        for engine in ("model", "top-8")
    ]


@needs_rtx
def test_a_bundle_for_onnx_runtime_is_refused_with_the_export_command(tmp_path: Path) -> None:
    save_bundle(with_lowering(write_tiny_bundle(tmp_path), "gqa"))
    done = call(tmp_path, "--compile-only", "--compute-capability", "86")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"python scripts/export.py --add-lowering static --out {tmp_path}" in done.stderr


@needs_rtx
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    write_tiny_bundle(tmp_path, np.float16)
    capabilities = "75,80,86,89,120"
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--compile-only", "--compute-capability", capabilities]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "compute capability 8.0" in line:  # that of the first is built
            break
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.rstrip().endswith("interrupted: what was not finished is gone")
    there = [path.name.partition("sm")[2] for path in (tmp_path / "engines").iterdir()]
    assert there == ["75"]
