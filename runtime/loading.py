"""A bundle's models, each on its device."""

from collections.abc import Sequence
from dataclasses import dataclass

from .backend import Backend, Model, open_backend
from .contract import Bundle, DecoderSpec
from .cuda_options import CudaOptions
from .row_record import load_measured


@dataclass(frozen=True)
class LoadedPair:
    """What was loaded.

    Attributes:
        target: The model whose text is generated.
        draft: The model that proposes, or None.
        exactness: What holds of the target's rows, a sentence for people.
    """

    target: Model
    draft: Model | None
    exactness: str


def load_pair(
    bundle: Bundle,
    draft: DecoderSpec | None,
    devices: tuple[str, str],
    token_ids: Sequence[int],
    *,
    threads: int | None,
    shared_thread_pool: bool,
    cuda_options: CudaOptions,
) -> LoadedPair:
    """Loads a target and a draft. Only the target decides what is said, so only its rows are measured where that was not done.

    Args:
        bundle: The bundle.
        draft: The draft, or None where none is to be loaded.
        devices: Where the target and the draft run.
        token_ids: See load_measured.
        threads: See open_backend.
        shared_thread_pool: See open_backend.
        cuda_options: See open_backend.

    Raises:
        BundleError: As Backend.load and load_measured raise.
        DeviceError: As open_backend and Backend.load raise.
        ValueError: Options that neither device has.
    """
    cuda_options.check_devices(devices if draft is not None else devices[:1])

    def opened(device: str) -> Backend:
        return open_backend(device, threads=threads, shared_thread_pool=shared_thread_pool, cuda_options=cuda_options)

    backend = opened(devices[0])
    target, exactness = load_measured(backend, bundle.target, bundle.folder, _cpu_kernels(devices[0]), token_ids)
    if draft is None:
        return LoadedPair(target, None, exactness)
    if devices[1] != devices[0]:
        backend = opened(devices[1])
    return LoadedPair(target, backend.load(draft, bundle.folder), exactness)


def _cpu_kernels(device: str) -> str | None:
    if device != "cpu":
        return None
    from .ort.backend import cpu_kernels  # `import runtime` loads no ONNX Runtime

    return cpu_kernels()
