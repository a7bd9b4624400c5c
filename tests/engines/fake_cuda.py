"""`cuda.bindings.runtime` without a GPU: device memory that the CPU cannot reach by address, and streams that really wait.

Work given to a stream is done when the stream is synchronised, not before, so whoever reads too early, or overwrites what is
still to be copied, gets wrong numbers. Fresh device memory is full of NaN.
"""

# ruff: noqa: N802, N815 - the names are those of the module it stands for

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

import numpy as np

Work = Callable[[], None]


class Status(enum.Enum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorStreamCaptureUnsupported = 900


class MemcpyKind(enum.Enum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class CaptureMode(enum.Enum):
    cudaStreamCaptureModeThreadLocal = 1


class FakeStream:
    def __init__(self, number: int) -> None:
        self.number = number
        self.waiting: list[Work] = []
        self.recorded: list[Work] | None = None

    def __int__(self) -> int:
        return self.number

    def give(self, work: Work) -> None:
        (self.waiting if self.recorded is None else self.recorded).append(work)


class FakeCudart:
    """Stands for the module.

    Attributes:
        freed: Addresses given back.
        launches: Graphs launched.
        device: The current device of each thread.
        refused: Names of functions that fail from now on.
    """

    cudaError_t = Status
    cudaMemcpyKind = MemcpyKind
    cudaStreamCaptureMode = CaptureMode
    cudaHostAllocDefault = 0
    cudaStreamNonBlocking = 1

    def __init__(self) -> None:
        self.freed: list[int] = []
        self.launches = 0
        self.device = threading.local()
        self.refused: set[str] = set()
        self._blocks: dict[int, np.ndarray] = {}
        self._pinned: dict[int, np.ndarray] = {}
        self._streams: dict[int, FakeStream] = {}
        self._next_address = 0x7F0000000000

    # --- what the fake TensorRT uses ---

    def stream(self, handle: int) -> FakeStream:
        return self._streams[handle]

    def device_bytes(self, address: int, size: int) -> np.ndarray:
        """A view of device memory; the whole of it must lie in one block that is not freed."""
        return self._view(self._blocks, address, size)

    # --- the module's functions ---

    def cudaSetDevice(self, number: int) -> tuple[Status]:
        self.device.number = number
        return (Status.cudaSuccess,)

    def cudaGetErrorString(self, status: Status) -> tuple[Status, bytes]:
        return Status.cudaSuccess, status.name.encode()

    def cudaMalloc(self, size: int) -> tuple[Status, int | None]:
        if "cudaMalloc" in self.refused:
            return Status.cudaErrorMemoryAllocation, None
        address, self._next_address = self._next_address, self._next_address + (size // 256 + 2) * 256
        self._blocks[address] = np.full(size, 0xFF, np.uint8)
        return Status.cudaSuccess, address

    def cudaFree(self, address: int) -> tuple[Status]:
        del self._blocks[address]
        self.freed.append(address)
        return (Status.cudaSuccess,)

    def cudaHostAlloc(self, size: int, flags: int) -> tuple[Status, int]:
        block = np.full(size, 0xFF, np.uint8)
        self._pinned[block.ctypes.data] = block
        return Status.cudaSuccess, block.ctypes.data

    def cudaFreeHost(self, address: int) -> tuple[Status]:
        del self._pinned[address]
        return (Status.cudaSuccess,)

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Status, FakeStream]:
        stream = FakeStream(1000 + len(self._streams))
        self._streams[int(stream)] = stream
        return Status.cudaSuccess, stream

    def cudaStreamDestroy(self, stream: FakeStream) -> tuple[Status]:
        del self._streams[int(stream)]
        return (Status.cudaSuccess,)

    def cudaStreamSynchronize(self, stream: FakeStream) -> tuple[Status]:
        if stream.recorded is not None:
            return (Status.cudaErrorStreamCaptureUnsupported,)
        waiting, stream.waiting = stream.waiting, []
        for work in waiting:
            work()
        return (Status.cudaSuccess,)

    def cudaMemsetAsync(self, address: int, value: int, size: int, stream: FakeStream) -> tuple[Status]:
        stream.give(lambda: self.device_bytes(address, size).fill(value))
        return (Status.cudaSuccess,)

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: MemcpyKind, stream: FakeStream) -> tuple[Status]:
        targets = self._pinned if kind is MemcpyKind.cudaMemcpyDeviceToHost else self._blocks
        sources = self._pinned if kind is MemcpyKind.cudaMemcpyHostToDevice else self._blocks

        def copy() -> None:
            self._view(targets, target, size)[:] = self._view(sources, source, size)

        stream.give(copy)
        return (Status.cudaSuccess,)

    def cudaMemcpy2DAsync(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        height: int,
        kind: MemcpyKind,
        stream: FakeStream,
    ) -> tuple[Status]:
        assert kind is MemcpyKind.cudaMemcpyDeviceToDevice

        def copy() -> None:
            for row in range(height):
                part = self.device_bytes(source + row * source_pitch, width)
                self.device_bytes(target + row * target_pitch, width)[:] = part

        stream.give(copy)
        return (Status.cudaSuccess,)

    def cudaStreamBeginCapture(self, stream: FakeStream, mode: CaptureMode) -> tuple[Status]:
        assert mode is CaptureMode.cudaStreamCaptureModeThreadLocal
        stream.recorded = []
        return (Status.cudaSuccess,)

    def cudaStreamEndCapture(self, stream: FakeStream) -> tuple[Status, list[Work] | None]:
        recorded, stream.recorded = stream.recorded, None
        if "cudaStreamEndCapture" in self.refused:
            return Status.cudaErrorStreamCaptureUnsupported, None
        return Status.cudaSuccess, recorded

    def cudaGraphInstantiate(self, graph: list[Work], flags: int) -> tuple[Status, list[Work]]:
        return Status.cudaSuccess, list(graph)

    def cudaGraphDestroy(self, graph: list[Work]) -> tuple[Status]:
        graph.clear()
        return (Status.cudaSuccess,)

    def cudaGraphLaunch(self, executable: list[Work], stream: FakeStream) -> tuple[Status]:
        self.launches += 1
        for work in executable:
            stream.give(work)
        return (Status.cudaSuccess,)

    def cudaGraphExecDestroy(self, executable: list[Work]) -> tuple[Status]:
        executable.clear()
        return (Status.cudaSuccess,)

    @staticmethod
    def _view(blocks: dict[int, np.ndarray], address: int, size: int) -> np.ndarray:
        for start, block in blocks.items():
            if start <= address and address + size <= start + len(block):
                return block[address - start : address - start + size]
        raise AssertionError(f"no block holds {size} bytes at {address:#x}")
