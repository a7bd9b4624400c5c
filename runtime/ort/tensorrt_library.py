"""The TensorRT that ONNX Runtime's provider was linked with: which one that is, and loading it before a session asks for it.

A provider serves one major version of TensorRT and no other, whatever else is installed: that of ONNX Runtime 1.31 links
libnvinfer.so.10, and pip's newest TensorRT brings libnvinfer.so.11. What ONNX Runtime says of it stands in its log only.
"""

import ctypes
import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from runtime.errors import DeviceError

_PROVIDER = "libonnxruntime_providers_tensorrt.so"
_NEEDED = re.compile(rb"libnvinfer\.so\.(\d+)")
_LIBRARIES = ("libnvinfer.so", "libnvinfer_plugin.so", "libnvonnxparser.so")
_WHEEL = "tensorrt_libs"  # the folder in which TensorRT's Python packages keep the libraries, on no loader's path
_PACKAGES = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12")


def needed_major(folder: Path | None = None) -> int | None:
    """Returns the major version of TensorRT that ONNX Runtime's provider links, or None where there is no provider.

    Args:
        folder: Where ONNX Runtime keeps its providers; None for the installed one's.
    """
    import onnxruntime as ort  # the doctor loads this module where there may be none

    provider = (folder or Path(ort.__file__).parent / "capi") / _PROVIDER
    found = _NEEDED.search(provider.read_bytes()) if provider.is_file() else None
    return None if found is None else int(found[1])


def load_tensorrt() -> str:
    """Loads the libraries the provider links, from TensorRT's Python packages or the system; returns TensorRT's version.

    Raises:
        DeviceError: ONNX Runtime has no such provider, or that TensorRT is not installed; the sentence's end.
    """
    import onnxruntime as ort

    major = needed_major()
    if major is None:
        raise DeviceError(f"the installed ONNX Runtime {ort.__version__} has no TensorRT provider")
    try:
        # What is loaded once under a name is what every later library that links that name gets.
        libraries = [ctypes.CDLL(library_path(f"{name}.{major}")) for name in _LIBRARIES]
    except OSError as error:
        raise DeviceError(
            f"ONNX Runtime {ort.__version__}'s provider is linked with TensorRT {major} and needs its libraries "
            f"({error}){_other_version(major)}: {install_command(major, getattr(ort, 'cuda_version', ''))}, or take "
            "device='tensorrt' and engines built before"
        ) from error
    number = libraries[0].getInferLibVersion()
    return f"{number // 10_000}.{number % 10_000 // 100}.{number % 100}"


def install_command(major: int, cuda_version: str) -> str:
    """Returns what installs a TensorRT for an ONNX Runtime.

    Args:
        major: TensorRT's major version.
        cuda_version: The CUDA that ONNX Runtime was built with, "13.0" for instance.
    """
    return f'pip install "tensorrt-cu{cuda_version.partition(".")[0] or 12}=={major}.*"'


def library_path(name: str) -> str:
    """Returns where one of TensorRT's libraries lies in its Python packages, or the name alone, for the loader to look for."""
    package = find_spec(_WHEEL)
    folders = [Path(folder) for folder in (package.submodule_search_locations or ())] if package is not None else []
    return str(next((folder / name for folder in folders if (folder / name).is_file()), name))


def _other_version(major: int) -> str:
    for package in _PACKAGES:
        try:
            installed = version(package)
        except PackageNotFoundError:
            continue
        if installed.partition(".")[0] != str(major):
            return f"; the installed {package} {installed} cannot serve it"
    return ""
