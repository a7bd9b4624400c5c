"""Questions that may kill whoever asks them: each is asked in a process of its own, and answered by one line of JSON.

Libraries of other people print, warn, leave threads behind and die of segmentation faults (TensorRT does, without a driver);
the doctor must not. `ask` starts this module as a program; a death becomes a sentence.
"""

import ctypes
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runtime.cuda_driver import free_device_memory, probe_cuda_driver
from runtime.errors import SpecError, first_line
from runtime.ort.tensorrt_library import library_path, load_tensorrt, needed_major

_ROOT = Path(__file__).resolve().parents[2]
_SECONDS = 120  # the first use of CUDA on a small device can take a minute
# What tells a library its own version: the call, and whether it fills an int or returns one.
_VERSION_CALLS = {
    "libcudart": ("cudaRuntimeGetVersion", True),
    "libcudnn": ("cudnnGetVersion", False),
    "libnvinfer": ("getInferLibVersion", False),
}
_LIBRARIES = (
    *("libcudart.so.12", "libcudart.so.13", "libcublasLt.so.12", "libcublasLt.so.13", "libcudnn.so.8", "libcudnn.so.9"),
    *("libnvinfer.so.8", "libnvinfer.so.10", "libnvinfer.so.11"),
)


class ProbeError(Exception):
    """A question got no answer; the text says why, in one line."""


def ask(question: str, *arguments: str, seconds: int | None = None) -> dict[str, Any]:
    """Asks one question in a process of its own.

    Args:
        question: A key of `QUESTIONS`.
        *arguments: The question's own.
        seconds: How long to wait for the answer; None for what a question of the machine may take.

    Raises:
        ProbeError: It raised, was killed, or took too long.
    """
    seconds = seconds or _SECONDS
    command = [sys.executable, "-m", __name__, question, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ProbeError(f"it did not answer within {seconds} seconds") from error
    if done.returncode < 0:
        raise ProbeError(f"the process died of {_signal_name(-done.returncode)}")
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise ProbeError(f"the process ended with status {done.returncode} and no answer") from error
    if (words := answer.pop("error", None)) is not None:
        # What the loader found missing stands in ONNX Runtime's log only.
        missing = re.search(r"with error: (.+)", done.stderr)
        raise ProbeError(missing.group(1).strip() if missing else words)
    return answer


def onnxruntime_facts() -> dict[str, Any]:
    """Returns version, package, CUDA version and providers of the ONNX Runtime that imports."""
    import onnxruntime

    return {
        "version": onnxruntime.__version__,
        "package": getattr(onnxruntime, "package_name", ""),
        "cuda_version": getattr(onnxruntime, "cuda_version", ""),
        "providers": onnxruntime.get_available_providers(),
        "tensorrt_major": needed_major(),
    }


def provider_trial(provider: str) -> dict[str, Any]:
    """Runs the tiny graph; raises DeviceError where it does not run."""
    import onnxruntime

    from runtime.ort.provider_trial import try_provider

    if provider != "CPUExecutionProvider" and hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()
    if provider == "TensorrtExecutionProvider":
        load_tensorrt()
    try_provider(provider)
    return {}


def library_versions() -> dict[str, Any]:
    """Returns the versions of those of NVIDIA's libraries that load, preloaded from its Python wheels where they are there."""
    try:
        import onnxruntime

        onnxruntime.preload_dlls()
    except (ImportError, AttributeError):
        pass  # an old ONNX Runtime, or none: the system's own libraries are looked for all the same
    found = {}
    for name in _LIBRARIES:
        try:
            library = ctypes.CDLL(library_path(name))
        except OSError:
            continue
        found[name] = _library_version(library, name.partition(".")[0])
    return found


def driver_facts() -> dict[str, Any]:
    """Returns what the driver says, and the free memory of its first GPU."""
    driver = probe_cuda_driver()
    return {**dataclasses.asdict(driver), "free": free_device_memory(0) if driver.gpus else None}


def bundle_trial(folder: str, device: str) -> dict[str, Any]:
    """Loads a bundle on a device, as every script does, and lets each model compute; raises SpecError where it does not."""
    from runtime.generator import Generator
    from runtime.manifest import read_manifest

    drafter = "lookup" if read_manifest(Path(folder)).draft is None else "model"  # "auto" would measure what passes cost
    Generator.from_bundle(folder, device=device, drafter=drafter, verify_files=False)
    return {}


QUESTIONS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "onnxruntime": onnxruntime_facts,
    "provider": provider_trial,
    "libraries": library_versions,
    "driver": driver_facts,
    "bundle": bundle_trial,
}


def version_text(library: str, number: int) -> str:
    """Writes a library's own version number for people.

    Args:
        library: "libcudart" (12060 is 12.6), "libcudnn" (90300 is 9.3.0) or "libnvinfer" (100300 is 10.3.0, 8601 is 8.6.1).
        number: Its number.
    """
    if library == "libcudart":
        return f"{number // 1000}.{number % 1000 // 10}"
    major, minor, patch = (10_000, 100, 1) if number >= 10_000 else (1000, 100, 1)
    return f"{number // major}.{number % major // minor}.{number % minor // patch}"


def _library_version(library: ctypes.CDLL, name: str) -> str:
    if name not in _VERSION_CALLS:
        return ""
    call, fills = _VERSION_CALLS[name]
    number = ctypes.c_int()
    if fills:
        getattr(library, call)(ctypes.byref(number))
    return version_text(name, number.value if fills else getattr(library, call)())


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _main(question: str, *arguments: str) -> None:
    try:
        answer = QUESTIONS[question](*arguments)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        answer = {"error": str(error) if isinstance(error, SpecError) else first_line(error)}
    print("\n" + json.dumps(answer), flush=True)
    os._exit(0)  # libraries' own clean-up may crash, and there is nothing to clean up


if __name__ == "__main__":
    _main(*sys.argv[1:])
