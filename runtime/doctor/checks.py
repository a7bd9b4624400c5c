"""Judging what was found: each check is a function of the facts alone, so that it can be tried without the machine."""

from collections.abc import Collection, Iterator

from .cuda_checks import CUDA, check_cuda, check_tensorrt, check_tensorrt_provider, has_tensorrt_to_run
from .facts import Finding, MachineFacts
from .jetpack import jetpack_of

DEVICES = ("cpu", "cuda", "tensorrt", "ort-tensorrt")
_DEPENDENCIES = ("numpy", "tokenizers", "jinja2")


def examine(facts: MachineFacts) -> list[Finding]:
    """Returns everything there is to say of a machine, in the order in which it should be read and mended."""
    checks = (
        *(check_packages, check_onnxruntime, check_cpu, check_jetson, check_cuda, check_tensorrt, check_tensorrt_provider),
        *(check_memory, check_bundle),
    )
    return [finding for check in checks for finding in check(facts)]


def devices_asked_for(facts: MachineFacts) -> tuple[str, ...]:
    """Returns what the installation promises, where the user names no device: the CPU, and whatever was installed for a GPU."""
    asked = ["cpu"]
    if "onnxruntime-gpu" in facts.onnxruntime_wheels or (facts.onnxruntime is not None and CUDA in facts.onnxruntime.providers):
        asked.append("cuda")
    if has_tensorrt_to_run(facts):
        asked.append("tensorrt")
    return tuple(asked)


def failures(findings: Collection[Finding], facts: MachineFacts, named: Collection[str] = ()) -> list[Finding]:
    """Returns what stands in the way of the devices that were asked for, and of the bundle.

    Args:
        findings: Everything that was said.
        facts: What it was said of.
        named: Devices the user named, which fail by whatever hinders them; without any, those that the installation promises
            fail by what is broken.
    """
    asked = {"bundle", *(named or devices_asked_for(facts))}
    return [finding for finding in findings if asked & set(finding.hinders) and (finding.state == "broken" or named)]


def check_packages(facts: MachineFacts) -> Iterator[Finding]:
    """Yields whether the runtime's own needs are installed."""
    missing = [name for name in _DEPENDENCIES if name not in facts.packages]
    if missing:
        yield Finding(
            "packages", "broken", f"Not installed: {', '.join(missing)}.", f"pip install {' '.join(missing)}", DEVICES
        )


def check_onnxruntime(facts: MachineFacts) -> Iterator[Finding]:
    """Yields which ONNX Runtime imports, and whether more than one was installed over it."""
    wheels = [f"{name} {facts.packages.get(name, '')}".strip() for name in facts.onnxruntime_wheels]
    reinstall = _one_wheel(facts)
    if facts.onnxruntime is None:
        if wheels:
            sentence = f"ONNX Runtime ({' and '.join(wheels)}) is installed and does not import: {facts.onnxruntime_trouble}."
        else:
            sentence = "ONNX Runtime is not installed."
        yield Finding("ONNX Runtime", "broken", sentence, reinstall, DEVICES)
    elif len(wheels) > 1:
        package = facts.onnxruntime.package or "ONNX Runtime"
        hides_cuda = CUDA not in facts.onnxruntime.providers
        yield Finding(
            "ONNX Runtime",
            "broken" if hides_cuda else "note",
            f"{' and '.join(wheels)} share one folder, so the last one installed hides the others: what imports is {package} "
            f"{facts.onnxruntime.version}{', which has no CUDA' if hides_cuda else ''}.",
            reinstall,
            ("cuda", "ort-tensorrt") if hides_cuda else (),
        )
    else:
        yield Finding("ONNX Runtime", "works", f"{wheels[0] if wheels else facts.onnxruntime.version} imports.")


def check_cpu(facts: MachineFacts) -> Iterator[Finding]:
    """Yields whether the CPU computes."""
    if facts.onnxruntime is None:
        return
    trouble = facts.trials.get("CPUExecutionProvider", "it was not tried")
    if trouble is None:
        yield Finding("CPU", "works", f"ONNX Runtime {facts.onnxruntime.version} computes on the CPU ({facts.machine}).")
    else:
        sentence = f"ONNX Runtime {facts.onnxruntime.version} does not compute on the CPU: {trouble}."
        yield Finding("CPU", "broken", sentence, _one_wheel(facts), ("cpu",))


def check_jetson(facts: MachineFacts) -> Iterator[Finding]:
    """Yields which Jetson and JetPack this is, and whether Python is the one its wheels are built for."""
    if facts.jetson is None:
        return
    generation = jetpack_of(facts.jetson)
    if facts.jetson.linux_version is None:
        sentence = f"{facts.jetson.model}; /etc/nv_tegra_release is not there, so its JetPack is unknown (a container?)."
        yield Finding("Jetson", "note", sentence)
        return
    linux = ".".join(map(str, facts.jetson.linux_version))
    if generation is None:
        sentence = f"{facts.jetson.model} with Jetson Linux {linux}: JetPack 6.1, 6.2 and 7 are supported, update it."
        yield Finding("Jetson", "note", sentence)
        return
    yield Finding(
        "Jetson",
        "works",
        f"{facts.jetson.model} with {generation.name} (Jetson Linux {linux}): Python {generation.python}, CUDA "
        f"{generation.cuda}, TensorRT {generation.tensorrt}.",
    )
    if not facts.python.startswith(generation.python + "."):
        sentence = f"This is Python {facts.python}; what {generation.name} brings is built for Python {generation.python}."
        yield Finding("Jetson", "note", sentence, f"python{generation.python} -m venv --system-site-packages .venv")


def check_memory(facts: MachineFacts) -> Iterator[Finding]:
    """Yields what is free."""
    parts = [] if facts.free_memory is None else [f"{_gigabytes(facts.free_memory)} on the machine"]
    if facts.free_device_memory is not None and facts.driver.gpus:
        gpu = facts.driver.gpus[0]
        parts.append(f"{_gigabytes(facts.free_device_memory)} on {gpu.name}{', the same memory' if gpu.integrated else ''}")
    if parts:
        yield Finding("memory", "works", f"Free are {' and '.join(parts)}.")


def check_bundle(facts: MachineFacts) -> Iterator[Finding]:
    """Yields whether the bundle is whole, and whether its usual text fits into what is free."""
    bundle = facts.bundle
    if bundle is None:
        return
    if bundle.trouble is not None:
        yield Finding("bundle", "broken", bundle.trouble, "python scripts/export.py --help", ("bundle",))
        return
    yield Finding("bundle", "works", f"{bundle.folder} is whole: {bundle.summary}.")
    if facts.free_memory is not None and bundle.peak_memory > facts.free_memory:
        yield Finding(
            "bundle",
            "broken",
            f"A text of the default length takes {_gigabytes(bundle.peak_memory)}, {_gigabytes(facts.free_memory)} are free: "
            "pass a smaller max_length, export in int4, or free some memory.",
            hinders=("cpu",),
        )


def _one_wheel(facts: MachineFacts) -> str:
    """The command that leaves one ONNX Runtime in the folder: the GPU's where that was installed, or a GPU is there."""
    installed = " ".join(facts.onnxruntime_wheels)
    uninstall = f"pip uninstall -y {installed} && " if installed else ""
    wants_cuda = "onnxruntime-gpu" in facts.onnxruntime_wheels or bool(facts.driver.gpus)
    generation = None if facts.jetson is None else jetpack_of(facts.jetson)
    if wants_cuda and generation is not None:
        return generation.wheel
    version = facts.packages.get("onnxruntime-gpu")
    if wants_cuda:
        return f'{uninstall}pip install "onnxruntime-gpu[cuda,cudnn]{f"=={version}" if version else ""}"'
    return f"{uninstall}pip install onnxruntime"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
