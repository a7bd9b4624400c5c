"""What NVIDIA's driver says of itself and its GPUs, asked through its own library before anything else of CUDA is loaded.

Whoever loads CUDA or TensorRT without a driver gets an obscure failure, or a segmentation fault; this module gets a sentence.
It needs no package. Calls and attribute numbers are those of the CUDA driver API (cuda.h).
"""

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

from .errors import DeviceError

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_MAJOR, _MINOR, _INTEGRATED = 75, 76, 18  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*, CU_DEVICE_ATTRIBUTE_INTEGRATED
_NAME_BYTES = 128


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        name: As the driver calls it.
        compute_capability: Major and minor number: (8, 7) is an Orin.
        total_memory: Bytes; of the whole machine where the GPU shares its memory.
        integrated: Whether it shares the machine's memory.
    """

    name: str
    compute_capability: tuple[int, int]
    total_memory: int
    integrated: bool

    @property
    def architecture(self) -> str:
        """The name compilers give the compute capability: sm_87."""
        major, minor = self.compute_capability
        return f"sm_{major}{minor}"


@dataclass(frozen=True)
class CudaDriver:
    """What the driver said.

    Attributes:
        cuda_version: The newest CUDA it serves, (12, 6) for instance; None where there is no driver.
        gpus: What it offers, in its own order, which CUDA_VISIBLE_DEVICES changes.
        trouble: Why there is no GPU to use, as the end of a sentence; None where there is one.
    """

    cuda_version: tuple[int, int] | None
    gpus: tuple[Gpu, ...]
    trouble: str | None


class _CallError(Exception):
    """A call returned an error, named by the driver."""


def probe_cuda_driver(library: Any = None) -> CudaDriver:
    """Asks the driver; raises nothing.

    Args:
        library: The driver's library as ctypes loads it; None to look for it.
    """
    if library is None:
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError:
            return CudaDriver(None, (), f"this machine has no NVIDIA driver ({_LIBRARY} is not there)")
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    cuda_version = (version.value // 1000, version.value % 1000 // 10)
    try:
        _call(library, "cuInit", 0)
        count = ctypes.c_int()
        _call(library, "cuDeviceGetCount", ctypes.byref(count))
        gpus = tuple(_gpu(library, number) for number in range(count.value))
    except _CallError as error:
        return CudaDriver(cuda_version, (), f"the NVIDIA driver offers no GPU ({error})")
    return CudaDriver(cuda_version, gpus, None if gpus else "the NVIDIA driver offers no GPU")


def checked_gpu(device: str, number: int, driver: CudaDriver, *, instead: str = "take device='cpu'") -> Gpu:
    """Returns the GPU of a number.

    Args:
        device: What the user asked for, for the sentence.
        number: From 0 on.
        driver: See `probe_cuda_driver`.
        instead: What whoever has no GPU can do.

    Raises:
        DeviceError: There is no driver, or no such GPU.
    """
    if driver.trouble is not None:
        raise DeviceError(
            f"The device '{device}' is not available: {driver.trouble}. Install the driver (in a container, start it with "
            f"--gpus all, on a Jetson with --runtime nvidia), or {instead}."
        )
    if number >= len(driver.gpus):
        names = ", ".join(f"{index}: {gpu.name}" for index, gpu in enumerate(driver.gpus))
        raise DeviceError(f"The device '{device}' is not available: the driver offers {names}.")
    return driver.gpus[number]


def free_device_memory(number: int, library: Any = None) -> int | None:
    """Returns the bytes that are free on a GPU, or None where the driver does not tell.

    Args:
        number: The GPU's.
        library: See `probe_cuda_driver`.
    """
    context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    try:
        library = ctypes.CDLL(_LIBRARY) if library is None else library
        _call(library, "cuInit", 0)
        # The primary context is the one that ONNX Runtime and TensorRT use too, so asking leaves nothing of its own behind.
        _call(library, "cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
    except (OSError, _CallError):
        return None
    try:
        _call(library, "cuCtxPushCurrent_v2", context)
        _call(library, "cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        _call(library, "cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
    except _CallError:
        return None
    finally:
        library.cuDevicePrimaryCtxRelease_v2(number)
    return free.value


def _gpu(library: Any, number: int) -> Gpu:
    name, memory = ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_size_t()
    _call(library, "cuDeviceGetName", name, _NAME_BYTES, number)
    _call(library, "cuDeviceTotalMem_v2", ctypes.byref(memory), number)
    return Gpu(
        name.value.decode("utf-8", "replace"),
        (_attribute(library, _MAJOR, number), _attribute(library, _MINOR, number)),
        memory.value,
        bool(_attribute(library, _INTEGRATED, number)),
    )


def _attribute(library: Any, attribute: int, number: int) -> int:
    value = ctypes.c_int()
    _call(library, "cuDeviceGetAttribute", ctypes.byref(value), attribute, number)
    return value.value


def _call(library: Any, name: str, *arguments: Any) -> None:
    status = getattr(library, name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        library.cuGetErrorName(status, ctypes.byref(text))
        raise _CallError((text.value or b"").decode("ascii", "replace") or f"{name} returned {status}")
