"""All of CUDA that this project calls itself, on `cuda-bindings`: memory, one stream, copies, and launches kept as a graph.

Nothing here knows TensorRT. Addresses are plain integers, as TensorRT takes them. What is allocated is freed when nobody holds
it any more.
"""

import ctypes
import importlib
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from runtime.errors import DeviceError


class DeviceMemory:
    """A block of a GPU's memory.

    Attributes:
        address: Where it begins; of no use to the CPU.
        size: Bytes.
    """

    def __init__(self, address: int, size: int, free: Callable[[int], object]) -> None:
        """Takes over a block; used by CudaDevice."""
        self.address = address
        self.size = size
        weakref.finalize(self, free, address)


class CudaDevice:
    """One GPU through the CUDA runtime."""

    def __init__(self, number: int) -> None:
        """Imports the bindings; the driver must have been probed before.

        Args:
            number: The GPU's, from 0 on.

        Raises:
            DeviceError: The bindings are not installed.
        """
        try:
            self.cudart = importlib.import_module("cuda.bindings.runtime")
        except ImportError as error:
            raise DeviceError(f"The package cuda-bindings cannot be imported ({error}): pip install cuda-bindings") from error
        self._number = number

    def use(self) -> None:
        """Makes this the GPU of the calling thread: CUDA keeps that by thread."""
        self.call(self.cudart.cudaSetDevice(self._number))

    def call(self, result: tuple[Any, ...]) -> Any:
        """Returns what a call of the bindings gave beside its status.

        Raises:
            DeviceError: The status is an error; the sentence is CUDA's own, to be put into context by the caller.
        """
        status, *values = result
        if status != self.cudart.cudaError_t.cudaSuccess:
            _, text = self.cudart.cudaGetErrorString(status)
            raise DeviceError(text.decode() if isinstance(text, bytes) else str(text))
        return values[0] if values else None

    def allocate(self, size: int) -> DeviceMemory:
        """Returns memory of the GPU; it holds whatever lay there."""
        return DeviceMemory(self.call(self.cudart.cudaMalloc(size)), size, self.cudart.cudaFree)

    def allocate_pinned(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Returns an array in page-locked host memory, which copies go to and from while the CPU goes on."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        address = self.call(self.cudart.cudaHostAlloc(size, self.cudart.cudaHostAllocDefault))
        block = (ctypes.c_byte * size).from_address(int(address))
        weakref.finalize(block, self.cudart.cudaFreeHost, address)
        return np.ctypeslib.as_array(block).view(dtype).reshape(shape)

    def create_stream(self) -> "CudaStream":
        """Returns a stream of this GPU that does not wait for the default one."""
        return CudaStream(self, self.call(self.cudart.cudaStreamCreateWithFlags(self.cudart.cudaStreamNonBlocking)))


class CudaStream:
    """Work for a GPU, done in the order it is given.

    Attributes:
        handle: What TensorRT enqueues on.
    """

    def __init__(self, device: CudaDevice, stream: Any) -> None:
        """Takes over a stream; used by CudaDevice."""
        self.handle = int(stream)
        self._device = device
        self._stream = stream
        weakref.finalize(self, device.cudart.cudaStreamDestroy, stream)

    def copy_to_device(self, target: DeviceMemory, source: NDArray[Any]) -> None:
        """Copies a contiguous pinned array to the beginning of a block; the array must stay as it is until then."""
        cudart = self._device.cudart
        kind = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._device.call(cudart.cudaMemcpyAsync(target.address, source.ctypes.data, source.nbytes, kind, self._stream))

    def copy_to_host(self, target: NDArray[Any], source: DeviceMemory, offset: int) -> None:
        """Copies from a block, `offset` bytes behind its beginning, to a contiguous pinned array."""
        cudart = self._device.cudart
        kind = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
        start = source.address + offset
        self._device.call(cudart.cudaMemcpyAsync(target.ctypes.data, start, target.nbytes, kind, self._stream))

    def copy_on_device(self, target: DeviceMemory, source: DeviceMemory, offset: int, size: int) -> None:
        """Copies `size` bytes, which begin `offset` bytes behind a block's beginning, to the beginning of another."""
        cudart = self._device.cudart
        kind = cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self._device.call(cudart.cudaMemcpyAsync(target.address, source.address + offset, size, kind, self._stream))

    def copy_rows(self, target: DeviceMemory, source: DeviceMemory, *, rows: int, pitch: int, width: int) -> None:
        """Copies the first `width` bytes of each of `rows` rows, which lie `pitch` bytes apart in both blocks."""
        cudart = self._device.cudart
        kind = cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        arguments = (target.address, pitch, source.address, pitch, width, rows, kind, self._stream)
        self._device.call(cudart.cudaMemcpy2DAsync(*arguments))

    def clear(self, memory: DeviceMemory) -> None:
        """Fills a block with zeros."""
        self._device.call(self._device.cudart.cudaMemsetAsync(memory.address, 0, memory.size, self._stream))

    def synchronize(self) -> None:
        """Waits for all that was given; raises what went wrong in it."""
        self._device.call(self._device.cudart.cudaStreamSynchronize(self._stream))

    def capture(self, enqueue: Callable[[], None]) -> "CudaGraph":
        """Records what a function enqueues instead of doing it.

        Raises:
            DeviceError: The function raised it, or what it enqueued cannot be recorded; the stream is as it was.
        """
        cudart, call = self._device.cudart, self._device.call
        # Other threads may allocate meanwhile.
        call(cudart.cudaStreamBeginCapture(self._stream, cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal))
        try:
            enqueue()
        finally:
            ended = cudart.cudaStreamEndCapture(self._stream)
        graph = call(ended)
        try:
            return CudaGraph(self._device, call(cudart.cudaGraphInstantiate(graph, 0)), self._stream)
        finally:
            cudart.cudaGraphDestroy(graph)


class CudaGraph:
    """Recorded work that is launched as one."""

    def __init__(self, device: CudaDevice, executable: Any, stream: Any) -> None:
        """Takes over an executable graph; used by CudaStream."""
        self._device = device
        self._executable = executable
        self._stream = stream
        weakref.finalize(self, device.cudart.cudaGraphExecDestroy, executable)

    def launch(self) -> None:
        """Gives the recorded work to the stream it was recorded on."""
        self._device.call(self._device.cudart.cudaGraphLaunch(self._executable, self._stream))
