"""Whether CUDA and TensorRT serve, judged from what was found: the first thing that stands in the way, and its remedy."""

import re
from collections.abc import Iterator

from runtime.ort.provider_trial import has_no_kernels
from runtime.ort.tensorrt_library import install_command

from .facts import Finding, MachineFacts
from .jetpack import jetpack_of

CUDA, TENSORRT = "CUDAExecutionProvider", "TensorrtExecutionProvider"
# What cannot run without CUDA, and without the provider.
_CUDA_DEVICES, _PROVIDER = ("cuda", "ort-tensorrt"), ("ort-tensorrt",)
# PyPI's wheels: CUDA 12 up to 1.26, CUDA 13 from 1.27 on (their extra "cuda" names the packages).
_LAST_CUDA_12 = "1.26.0"
# TensorRT's own cache and attention layers, which the "static" lowering needs; see docs/devices.md.
# TensorRT-RTX and the packages it is made of: it compiles where there is no GPU.
_COMPILE_ANYWHERE = {"tensorrt-rtx", "tensorrt-rtx-cu13", "tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu13-libs"}
_STATIC_TENSORRT = (10, 15)


def check_cuda(facts: MachineFacts) -> Iterator[Finding]:
    """Yields whether ONNX Runtime computes on the GPU, and if not, the first reason."""
    runtime, driver = facts.onnxruntime, facts.driver
    if runtime is None:
        return
    gpu = driver.gpus[0] if driver.gpus else None
    if CUDA not in runtime.providers:
        if gpu is not None:
            sentence = f"ONNX Runtime {runtime.version} is a build without CUDA, and this machine has an {gpu.name}."
            yield _broken_cuda(sentence, _wheel_with_cuda(facts))
        else:
            yield Finding("CUDA", "note", f"ONNX Runtime {runtime.version} is a build without CUDA.", hinders=_CUDA_DEVICES)
        return
    trouble = facts.trials.get(CUDA, "it was not tried")
    if trouble is None and gpu is not None:
        served = ".".join(map(str, driver.cuda_version or ()))
        yield Finding(
            "CUDA",
            "works",
            f"ONNX Runtime {runtime.version} computes on {gpu.name} ({gpu.architecture}, driver for CUDA {served}).",
        )
        return
    if gpu is None:
        sentence = (
            f"ONNX Runtime lists CUDA, but {driver.trouble}; in a container, start it with --gpus all or --runtime nvidia."
        )
        yield _broken_cuda(sentence, _driver_for(facts))
        return
    yield _why_cuda_fails(facts, trouble or "")


def _why_cuda_fails(facts: MachineFacts, trouble: str) -> Finding:
    runtime, driver, gpu = facts.onnxruntime, facts.driver, facts.driver.gpus[0]
    assert runtime is not None
    wanted, served = runtime.cuda_version, driver.cuda_version
    # A driver serves all of its major version's CUDA (minor version compatibility), and nothing newer.
    if wanted is not None and served is not None and served[0] < wanted[0]:
        return _broken_cuda(
            f"ONNX Runtime {runtime.version} is built for CUDA {wanted[0]} and the driver serves CUDA {served[0]}.{served[1]}: "
            "update the driver, or take a build for the older CUDA.",
            f'pip install "onnxruntime-gpu[cuda,cudnn]=={_LAST_CUDA_12}"' if facts.jetson is None else _wheel_with_cuda(facts),
        )
    if has_no_kernels(trouble) or (facts.jetson is not None and "onnxruntime-gpu" in facts.pypi_wheels):
        return _broken_cuda(
            f"ONNX Runtime {runtime.version} has no kernels for {gpu.name} ({gpu.architecture})"
            + (": PyPI's wheels have none for any Jetson." if facts.jetson is not None else ": take a build that has them."),
            _wheel_with_cuda(facts),
        )
    if ".so" in trouble and "cannot open" in trouble:
        version = "" if wanted is None else f"CUDA {wanted[0]} and "
        return _broken_cuda(
            f"ONNX Runtime {runtime.version} needs {version}cuDNN 9, and the loader says: {trouble}.", _cuda_libraries(facts)
        )
    return _broken_cuda(f"ONNX Runtime {runtime.version} does not compute on {gpu.name}: {trouble}.")


def has_tensorrt_to_run(facts: MachineFacts) -> bool:
    """Whether a TensorRT package is installed that is of use here: TensorRT-RTX compiles for other machines without a GPU."""
    packages = {name for name in facts.packages if name.startswith("tensorrt")}
    return bool(packages - _COMPILE_ANYWHERE) or (bool(packages) and facts.driver.trouble is None)


def check_tensorrt(facts: MachineFacts) -> Iterator[Finding]:
    """Yields what TensorRT there is, which graphs it takes, and whether ONNX Runtime's provider can use it."""
    found = {name: version for name, version in facts.libraries.items() if name.startswith("libnvinfer")}
    packages = {name: version for name, version in facts.packages.items() if name.startswith("tensorrt")}
    package = packages.get("tensorrt") or next(iter(packages.values()), None)
    if package is None and not found:
        yield Finding("TensorRT", "note", "TensorRT is not installed.", hinders=("tensorrt",))
        return
    if facts.driver.trouble is not None and not found and not has_tensorrt_to_run(facts):
        sentence = (
            f"TensorRT-RTX {packages['tensorrt-rtx']} is installed, and {facts.driver.trouble}: it compiles engines for other "
            "machines (build_engines.py --compile-only), and runs none here."
        )
        yield Finding("TensorRT", "note", sentence, hinders=("tensorrt",))
        return
    if facts.driver.trouble is not None:
        sentence = (
            f"TensorRT is installed ({_listed(packages, found)}), but {facts.driver.trouble}: it builds and runs nothing here."
        )
        yield Finding("TensorRT", "broken", sentence, _driver_for(facts), ("tensorrt",))
        return
    if package is None:
        yield Finding(
            "TensorRT", "note", f"TensorRT's libraries are there ({_listed(packages, found)}), its Python package is not.",
            "sudo apt install python3-libnvinfer", ("tensorrt",),
        )  # fmt: skip
    elif "tensorrt-rtx" in packages and "tensorrt" not in packages:
        yield Finding(
            "TensorRT", "works", f"TensorRT-RTX {packages['tensorrt-rtx']} is installed: it takes the static lowering."
        )
    else:
        lowering = "static" if _version(package) >= _STATIC_TENSORRT else "primitive"
        yield Finding("TensorRT", "works", f"TensorRT {package} is installed: it takes the {lowering} lowering.")


def check_tensorrt_provider(facts: MachineFacts) -> Iterator[Finding]:
    """Yields whether ONNX Runtime's TensorRT provider runs, and if not, which TensorRT it lacks."""
    runtime = facts.onnxruntime
    if runtime is None or CUDA not in runtime.providers:
        return  # that is what has to be said
    if TENSORRT not in runtime.providers:
        sentence = f"ONNX Runtime {runtime.version} is a build without the TensorRT provider (device='ort-tensorrt')."
        yield Finding("TensorRT provider", "note", sentence, hinders=_PROVIDER)
        return
    trouble = facts.trials.get(TENSORRT, "it was not tried")
    major = runtime.tensorrt_major
    if trouble is None:
        yield Finding("TensorRT provider", "works", f"ONNX Runtime's provider runs TensorRT {_loaded(facts, major)}.")
    elif major is not None and f"libnvinfer.so.{major}" not in facts.libraries:
        found = {name for name in facts.packages if name.startswith("tensorrt")} - _COMPILE_ANYWHERE
        installed = {name: facts.packages[name] for name in sorted(found)}
        libraries = {name: version for name, version in facts.libraries.items() if name.startswith("libnvinfer")}
        there = f"{_listed(installed, libraries)}, which cannot serve it" if installed or libraries else "no TensorRT"
        cuda = runtime.cuda_version or (12, 0)
        yield Finding(
            "TensorRT provider",
            "note",
            f"ONNX Runtime {runtime.version}'s provider (device='ort-tensorrt') is linked with TensorRT {major}, and there is "
            f"{there}; device='tensorrt' does not need it.",
            install_command(major, f"{cuda[0]}.{cuda[1]}"),
            _PROVIDER,
        )
    else:
        sentence = f"ONNX Runtime's TensorRT provider (device='ort-tensorrt') does not run: {trouble}."
        yield Finding("TensorRT provider", "note", sentence, hinders=_PROVIDER)


def _loaded(facts: MachineFacts, major: int | None) -> str:
    return facts.libraries.get(f"libnvinfer.so.{major}") or str(major)


def _broken_cuda(sentence: str, remedy: str = "") -> Finding:
    return Finding("CUDA", "broken", sentence, remedy, _CUDA_DEVICES)


def _driver_for(facts: MachineFacts) -> str:
    return "sudo apt install nvidia-jetpack" if facts.jetson is not None else "sudo ubuntu-drivers install"


def _wheel_with_cuda(facts: MachineFacts) -> str:
    if facts.jetson is not None:
        generation = jetpack_of(facts.jetson)
        return generation.wheel if generation is not None else "head -1 /etc/nv_tegra_release"
    wheels = " ".join(facts.onnxruntime_wheels)
    served = facts.driver.cuda_version
    version = "" if served is None or served[0] >= 13 else f"=={_LAST_CUDA_12}"
    return f'pip uninstall -y {wheels} && pip install "onnxruntime-gpu[cuda,cudnn]{version}"'


def _cuda_libraries(facts: MachineFacts) -> str:
    if facts.jetson is not None:
        return "sudo apt install nvidia-jetpack"
    assert facts.onnxruntime is not None
    return f'pip install "onnxruntime-gpu[cuda,cudnn]=={facts.onnxruntime.version}"'


def _listed(packages: dict[str, str], found: dict[str, str]) -> str:
    return ", ".join([*(f"{name} {version}" for name, version in packages.items()), *found])


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])
