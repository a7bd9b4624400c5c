"""What was found on a machine: records without behaviour, which `checks` judges and tests write by hand."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from runtime.cuda_driver import CudaDriver


@dataclass(frozen=True)
class OnnxRuntimeFacts:
    """What the importable ONNX Runtime says of itself.

    Attributes:
        version: Its version.
        package: The wheel it was built as, "onnxruntime-gpu" for instance; empty where it does not say.
        cuda_version: The CUDA it was built with, (13, 0) for instance; None for a CPU build.
        providers: What it lists, which is what it was compiled with, working or not.
        tensorrt_major: The major version of TensorRT that its provider is linked with; None without that provider.
    """

    version: str
    package: str
    cuda_version: tuple[int, int] | None
    providers: tuple[str, ...]
    tensorrt_major: int | None = None


@dataclass(frozen=True)
class JetsonFacts:
    """A Jetson's own files.

    Attributes:
        model: /proc/device-tree/model.
        linux_version: Jetson Linux's version, (36, 4, 7) for instance, from /etc/nv_tegra_release; None in most containers.
    """

    model: str
    linux_version: tuple[int, ...] | None


@dataclass(frozen=True)
class BundleFacts:
    """What a bundle turned out to be.

    Attributes:
        folder: Where it is.
        trouble: Why it cannot be used here, a whole sentence; None where it is whole and its files are those of the manifest.
        summary: What it holds, for people.
        peak_memory: Bytes that a text of the default length takes.
    """

    folder: str
    trouble: str | None
    summary: str = ""
    peak_memory: int = 0


@dataclass(frozen=True)
class MachineFacts:
    """Everything that was found.

    Attributes:
        system: "Linux" and so on.
        machine: "x86_64" or "aarch64" and so on.
        python: Python's version.
        packages: Versions of the installed packages that matter, by name.
        onnxruntime_wheels: Names of the packages that put files into the folder "onnxruntime".
        pypi_wheels: Which of these bear a tag that PyPI takes (manylinux); what was built on a device bears none.
        onnxruntime: The one that imports, or None.
        onnxruntime_trouble: Why none imports.
        trials: By provider, why the tiny graph did not run on it, in its own words; None where it ran.
        libraries: Versions of the CUDA, cuDNN and TensorRT libraries that can be loaded, by file name.
        driver: NVIDIA's.
        jetson: None on any other machine.
        free_memory: Bytes free on the machine; None where that is not known.
        free_device_memory: The same of the first GPU.
        bundle: None where none was named.
    """

    system: str
    machine: str
    python: str
    packages: Mapping[str, str]
    onnxruntime_wheels: tuple[str, ...]
    pypi_wheels: tuple[str, ...]
    onnxruntime: OnnxRuntimeFacts | None
    driver: CudaDriver
    onnxruntime_trouble: str | None = None
    trials: Mapping[str, str | None] = field(default_factory=dict)
    libraries: Mapping[str, str] = field(default_factory=dict)
    jetson: JetsonFacts | None = None
    free_memory: int | None = None
    free_device_memory: int | None = None
    bundle: BundleFacts | None = None


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        subject: What it is about, in a word or two.
        state: "works", "broken", or "note" for what hinders nothing.
        sentence: What was found.
        remedy: A command that mends it, where there is one.
        hinders: The devices that cannot be used because of it: "cpu", "cuda", "tensorrt", "ort-tensorrt"; "bundle" for the
            bundle.
    """

    subject: str
    state: str
    sentence: str
    remedy: str = ""
    hinders: tuple[str, ...] = ()
