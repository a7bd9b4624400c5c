"""What the runtime asks of whatever computes logits, and how a device's name finds it.

A Model is loaded once and shared by all generations; a Context is one generation's caches and buffers on that model.
Neither knows what a proposal or a probability is, and nothing above this module knows which engine or device it has.
"""

from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from .contract import DecoderSpec
from .errors import DeviceError

if TYPE_CHECKING:
    from typing_extensions import Self

ENTRY_POINT_GROUP = "runtime.backends"


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
        """Loads a decoder's graph.

        Raises:
            BundleError: The engine cannot load the graph.
            DeviceError: The device does not take it.
        """
        ...


def open_backend(device: str, *, threads: int | None, shared_thread_pool: bool) -> Backend:
    """Returns the backend of a device.

    Args:
        device: "cpu"; "cuda" or "cuda:1" for ONNX Runtime on an NVIDIA GPU; or a name (before any ":") that an installed
            package registers in the entry-point group `runtime.backends`.
        threads: Threads for a pass on the CPU; None for all the cores this process may use.
        shared_thread_pool: Whether all decoders use one thread pool of the whole process (see OrtBackend).

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

        return OrtCudaBackend(device_number(device), threads=threads, shared_thread_pool=shared_thread_pool)
    registered = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if kind in registered:
        backend: Backend = registered[kind].load()(device)
        return backend
    names = ", ".join(["cpu", "cuda", *sorted(registered)])
    raise DeviceError(f"The device '{device}' is not available: this installation offers {names}.")


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
