"""What finds the largest logits of a step: an engine, its buffers, and the way to the host or into the next step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import DeviceError
from runtime.top_logits import TopLogits

from .cuda import CudaDevice, CudaStream, DeviceMemory


@dataclass(frozen=True)
class _Output:
    """An output of the engine: where it lies on the GPU, and where what is wanted of it is copied to."""

    memory: DeviceMemory
    host: NDArray[Any]

    @property
    def row_bytes(self) -> int:
        return self.host.strides[0]


class TopExecution:
    """Reads the logits where the decoder's engine has left them; see runtime.top_logits.

    Attributes:
        count: How many logits of each row it finds.
    """

    def __init__(
        self,
        execution: Any,
        count: int,
        fixed_rows: int,
        logits: DeviceMemory,
        vocab_size: int,
        max_rows: int,
        cuda: CudaDevice,
        stream: CudaStream,
        failure: Callable[[], DeviceError],
    ) -> None:
        """Allocates and binds.

        Args:
            execution: TensorRT's execution context.
            count: See the class.
            fixed_rows: Rows of a step; the engine looks at so many.
            logits: The step's, float32 [fixed_rows, vocab_size].
            vocab_size: Width of a row.
            max_rows: The most rows of a pass.
            cuda: Gives memory.
            stream: Where everything is given to.
            failure: Tells what TensorRT logged last.
        """
        self.count = count
        self._execution, self._stream, self._failure = execution, stream, failure
        widths: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {
            "tokens": ((count,), np.int64),
            "values": ((count,), np.float32),
            "totals": ((), np.float32),
        }
        self._outputs = {}
        for name, (width, dtype) in widths.items():
            host = cuda.allocate_pinned((max_rows, *width), dtype)
            self._outputs[name] = _Output(cuda.allocate(fixed_rows * host.strides[0]), host)
        self._temperature = cuda.allocate_pinned((1,), np.float32)
        self._device_temperature = cuda.allocate(self._temperature.nbytes)
        addresses = {name: output.memory for name, output in self._outputs.items()}
        addresses |= {"logits": logits, "temperature": self._device_temperature}
        bound = all(execution.set_tensor_address(name, memory.address) for name, memory in addresses.items())
        shapes = {"logits": (1, fixed_rows, vocab_size), "temperature": (1,)}
        if not bound or not all(execution.set_input_shape(name, shape) for name, shape in shapes.items()):
            raise failure()

    def set_temperature(self, temperature: float) -> None:
        """Sets that of the rows' sums; gives a copy to the stream where it changes. No earlier one may be under way."""
        if self._temperature[0] != np.float32(temperature):
            self._temperature[0] = temperature
            self._stream.copy_to_device(self._device_temperature, self._temperature)

    def enqueue(self, row: int, first: int, end: int) -> None:
        """Gives it to the stream, with the copy of some rows; what they are called on the host is theirs in the pass.

        Args:
            row: The first of them in the step.
            first: The first of them in the pass.
            end: One behind the last in the pass.
        """
        if not self._execution.execute_async_v3(self._stream.handle):
            raise self._failure()
        for output in self._outputs.values():
            self._stream.copy_to_host(output.host[first:end], output.memory, row * output.row_bytes)

    def feed(self, token_ids: DeviceMemory, row: int) -> None:
        """Copies the most probable token of a row of the step to the beginning of a pass's input."""
        tokens = self._outputs["tokens"]
        self._stream.copy_on_device(token_ids, tokens.memory, row * tokens.row_bytes, tokens.host.itemsize)

    def found(self, first: int, end: int) -> TopLogits:
        """Returns rows of the pass, once the stream has come to them; views that the next pass overwrites."""
        tokens, values, totals = (output.host[first:end] for output in self._outputs.values())
        return TopLogits(tokens, values, totals, float(self._temperature[0]))
