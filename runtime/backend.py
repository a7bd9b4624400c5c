"""What the runtime asks of whatever computes logits, and how a device's name finds it.

A Model is loaded once and shared by all generations; a Context is one generation's caches and buffers on that model.
Neither knows what a proposal or a probability is, and nothing above this module knows which engine or device it has.
"""

from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from .contract import DecoderSpec
from .cuda_options import CudaOptions
from .errors import DeviceError
from .top_logits import TopLogits

if TYPE_CHECKING:
    from typing_extensions import Self

ENTRY_POINT_GROUP = "runtime.backends"
ONNX_RUNTIME_DEVICES = ("cpu", "cuda", "ort-tensorrt")


class Context(Protocol):
    """One generation's key/value caches on a model."""

    def run(self, token_ids: NDArray[np.int64], past_length: int, num_rows: int) -> NDArray[np.float32]:
        """Computes one pass and writes its keys and values behind the cached ones.

        Args:
            token_ids: int64 [rows], 1 to the context's `max_rows`.
            past_length: Cached tokens that are valid; what lies behind them is overwritten or never read.
            num_rows: How many rows of logits to return, the last ones, 0 to rows.

        Returns:
            float32 [num_rows, vocab_size]; a view that the next run overwrites.
        """
        ...

    def copy_from(self, source: "Self", length: int) -> None:
        """Takes over the first `length` cached tokens of another context on the same model, which keeps them."""
        ...


@runtime_checkable
class TopLogitsContext(Protocol):
    """What a context on a device can do besides: find the largest logits where they are, so that no whole rows come back."""

    @property
    def max_top(self) -> int:
        """How many of a row it can find at most; 0 for none."""
        ...

    def run_top(
        self, token_ids: NDArray[np.int64], past_length: int, num_rows: int, count: int, temperature: float
    ) -> TopLogits:
        """Computes one pass as `Context.run` does.

        Args:
            token_ids: See Context.run.
            past_length: Likewise.
            num_rows: How many rows to look at, the last ones, 1 to rows.
            count: How many logits of each to find, at least; 1 to max_top, and fewer than there are.
            temperature: Of the rows' sums, above 0.

        Returns:
            The largest logits of each row.
        """
        ...


@runtime_checkable
class ChainContext(TopLogitsContext, Protocol):
    """A context whose passes can be queued on the device, each fed the token that the one before it has chosen."""

    def run_chain(self, token_ids: NDArray[np.int64], past_length: int, row: int, num_passes: int) -> TopLogits:
        """Computes a pass, and then passes of one token each, the most probable one behind the pass before.

        Args:
            token_ids: Of the first pass; see Context.run.
            past_length: Cached tokens before it.
            row: The row of the first pass whose largest logit is fed to the second, from 0 on; rows behind it are padding.
            num_passes: At least 1. The last one's token is fed to none.

        Returns:
            The largest logits of each pass, num_passes rows.
        """
        ...


class Model(Protocol):
    """A loaded decoder; safe to use from several threads, each with contexts of its own."""

    @property
    def spec(self) -> DecoderSpec:
        """What the bundle says of this decoder."""
        ...

    @property
    def engine(self) -> str:
        """Engine, version, device and number of threads: what the cost of a pass depends on."""
        ...

    @property
    def description(self) -> str:
        """The engine and whatever else there is to say of it, in one line, for people."""
        ...

    def open_context(self, capacity: int, max_rows: int) -> Context:
        """Allocates caches for `capacity` tokens, spare slots included, and logits for passes of up to `max_rows`."""
        ...


class Backend(Protocol):
    """Loads decoders onto one device."""

    def load(self, spec: DecoderSpec, folder: Path) -> Model:
        """Loads a decoder's graph, of its forms the one that the device runs best; the model's spec is that form.

        Raises:
            BundleError: The engine cannot load the graph.
            DeviceError: The device does not take it.
        """
        ...


def open_backend(
    device: str, *, threads: int | None, shared_thread_pool: bool, cuda_options: CudaOptions | None = None
) -> Backend:
    """Returns the backend of a device.

    Args:
        device: "cpu"; "cuda" or "cuda:1" for ONNX Runtime on an NVIDIA GPU; "ort-tensorrt" for its TensorRT provider there; or
            a name (before any ":") that an installed package registers in the entry-point group `runtime.backends`.
        threads: Threads for a pass on the CPU; None for all the cores this process may use.
        shared_thread_pool: Whether all decoders use one thread pool of the whole process (see OrtBackend).
        cuda_options: For the devices that have them, others read none; see CudaOptions.check_devices.

    Raises:
        DeviceError: No such device here.
    """
    if not isinstance(device, str):
        raise DeviceError(f"The device is {device!r:.80}; a name such as 'cpu' is expected.")
    kind = device.partition(":")[0]
    if device == "cpu":
        from .ort.backend import OrtBackend

        return OrtBackend(threads=threads, shared_thread_pool=shared_thread_pool)
    if kind == "cuda":
        from .ort.cuda_backend import OrtCudaBackend

        return OrtCudaBackend(
            device_number(device), threads=threads, shared_thread_pool=shared_thread_pool, options=cuda_options
        )
    if kind == "ort-tensorrt":
        from .ort.tensorrt_backend import OrtTensorRTBackend

        return OrtTensorRTBackend(
            device_number(device), threads=threads, shared_thread_pool=shared_thread_pool, options=cuda_options
        )
    registered = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if kind in registered:
        backend: Backend = registered[kind].load()(device)
        return backend
    names = ", ".join([*ONNX_RUNTIME_DEVICES, *sorted(registered)])
    raise DeviceError(
        f"The device '{device}' is not available: the names are {names}; cuda:1 is the second GPU, and cpu takes no number."
    )


def device_number(device: str) -> int:
    """Returns the number behind a device's name, 0 where there is none.

    Raises:
        DeviceError: What stands there is no number.
    """
    if not isinstance(device, str):
        raise DeviceError(f"The device is {device!r:.80}; a name such as 'cpu' is expected.")
    kind, colon, number = device.partition(":")
    if colon and not (number.isascii() and number.isdecimal()):
        raise DeviceError(f"The device is '{device}'; '{kind}' or, for the second GPU, '{kind}:1' is expected.")
    return int(number or 0)
