"""Finding out what is on this machine. Thin: it asks and records; `checks` judges."""

import platform
import re
from importlib.metadata import PackageNotFoundError, distribution, distributions, packages_distributions
from pathlib import Path

from runtime.cuda_driver import CudaDriver, Gpu
from runtime.errors import SpecError
from runtime.manifest import load_bundle
from runtime.memory import MemoryBudget, free_memory, promised_length

from .facts import BundleFacts, JetsonFacts, MachineFacts, OnnxRuntimeFacts
from .probes import ProbeError, ask

_PACKAGES = re.compile(r"numpy|tokenizers|jinja2|onnxruntime.*|tensorrt.*|nvidia-.*")
_TRIED = ("CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider")


def gather_facts(bundle: Path | None = None) -> MachineFacts:
    """Returns what is on this machine; takes some seconds, and raises nothing of what it meets.

    Args:
        bundle: A bundle to look at too.
    """
    wheels = tuple(sorted(set(packages_distributions().get("onnxruntime", ()))))
    runtime, trouble = _onnxruntime()
    driver, free_on_device = _driver()
    return MachineFacts(
        system=platform.system(),
        machine=platform.machine(),
        python=platform.python_version(),
        packages=_packages(),
        onnxruntime_wheels=wheels,
        pypi_wheels=tuple(name for name in wheels if _is_from_pypi(name)),
        onnxruntime=runtime,
        onnxruntime_trouble=trouble,
        trials={provider: _trial(provider) for provider in _TRIED if runtime is not None and provider in runtime.providers},
        libraries=_libraries(),
        driver=driver,
        jetson=jetson_facts(),
        free_memory=free_memory(),
        free_device_memory=free_on_device,
        bundle=None if bundle is None else bundle_facts(bundle),
    )


def jetson_facts(root: Path = Path("/")) -> JetsonFacts | None:
    """Returns what a Jetson's own files say, or None on another machine.

    Args:
        root: Where these files are.
    """
    try:
        model = (root / "proc/device-tree/model").read_text(encoding="utf-8", errors="replace").strip("\0\n ")
    except OSError:
        return None
    if "jetson" not in model.lower():
        return None
    try:
        release = (root / "etc/nv_tegra_release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        release = ""
    found = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", release)
    version = None if found is None else (int(found[1]), *(int(part) for part in found[2].split(".") if part))
    return JetsonFacts(model, version)


def bundle_facts(folder: Path) -> BundleFacts:
    """Returns what a bundle holds, its files compared with their hashes."""
    try:
        bundle = load_bundle(folder)
    except SpecError as error:
        return BundleFacts(str(folder), str(error))
    specs = {"target": bundle.target, "draft": bundle.draft}
    summary = "; ".join(
        f"{role} {spec.source}, {spec.precision}, {' and '.join(form.lowering for form in spec.forms)} lowering"
        for role, spec in specs.items()
        if spec is not None
    )
    length = promised_length(None, bundle.target.context_length)
    return BundleFacts(str(folder), None, summary, MemoryBudget.of(bundle.target, bundle.draft, length).peak)


def _packages() -> dict[str, str]:
    found = {}
    for package in distributions():
        name = (package.metadata["Name"] or "").lower().replace("_", "-")
        if _PACKAGES.fullmatch(name):
            found[name] = package.version
    return found


def _is_from_pypi(name: str) -> bool:
    try:
        return "manylinux" in (distribution(name).read_text("WHEEL") or "")
    except PackageNotFoundError:
        return False


def _onnxruntime() -> tuple[OnnxRuntimeFacts | None, str | None]:
    try:
        answer = ask("onnxruntime")
    except ProbeError as error:
        return None, str(error)
    cuda = [int(part) for part in answer["cuda_version"].split(".")[:2] if part.isdigit()]
    version = (cuda[0], cuda[1] if len(cuda) > 1 else 0) if cuda else None
    facts = OnnxRuntimeFacts(
        answer["version"], answer["package"], version, tuple(answer["providers"]), answer["tensorrt_major"]
    )
    return facts, None


def _trial(provider: str) -> str | None:
    try:
        ask("provider", provider)
    except ProbeError as error:
        return str(error)
    return None


def _libraries() -> dict[str, str]:
    try:
        return ask("libraries")
    except ProbeError:
        return {}


def _driver() -> tuple[CudaDriver, int | None]:
    try:
        answer = ask("driver")
    except ProbeError as error:
        return CudaDriver(None, (), f"asking the NVIDIA driver failed ({error})"), None
    version = answer["cuda_version"]
    gpus = [
        Gpu(gpu["name"], tuple(gpu["compute_capability"]), gpu["total_memory"], gpu["integrated"]) for gpu in answer["gpus"]
    ]
    driver = CudaDriver(None if version is None else (version[0], version[1]), tuple(gpus), answer["trouble"])
    return driver, answer["free"]
