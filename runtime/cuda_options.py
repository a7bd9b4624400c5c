"""What a user may ask of ONNX Runtime on a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from .checks import check_whole, shown

# Which kinds of device have which option. Engines built before (tensorrt, tensorrt-rtx) had theirs when they were built.
_SCRIPT_OPTIONS = {"memory_limit": "--gpu-memory-limit", "tf32": "--tf32", "cuda_graphs": "--cuda-graphs"}
_DEVICES = {"memory_limit": ("cuda",), "tf32": ("cuda", "ort-tensorrt"), "cuda_graphs": ("cuda",)}


@dataclass(frozen=True)
class CudaOptions:
    """Options of the devices "cuda" and "ort-tensorrt"; the defaults keep a model what it is.

    Attributes:
        memory_limit: The most bytes a session's own memory may take on the GPU: weights and intermediate results, not caches.
            None for no limit.
        tf32: Whether float32 products may be rounded to 10 bits of mantissa: faster, and another model.
        cuda_graphs: Whether passes of up to 32 rows are captured and replayed whole, one graph for each number of rows and each
            cache, kept until the model is dropped: for programs that keep their sessions.

    Raises:
        ValueError: A limit below 1, or what is no truth value.
    """

    memory_limit: int | None = None
    tf32: bool = False
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        """Refuses values out of range."""
        if self.memory_limit is not None:
            check_whole("memory_limit", self.memory_limit, 1)
        for name in ("tf32", "cuda_graphs"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} is {shown(value)}; True or False is expected.")

    def check_devices(self, devices: Sequence[str]) -> None:
        """Refuses what was asked for and none of a pair's devices has.

        Args:
            devices: Where the target and the draft run.

        Raises:
            ValueError: The sentence names the first such option.
        """
        kinds = {device.partition(":")[0] for device in devices}
        for item in fields(self):
            if getattr(self, item.name) != item.default and not kinds & set(_DEVICES[item.name]):
                having = " and ".join(f"'{device}'" for device in _DEVICES[item.name])
                there = " and ".join(f"'{device}'" for device in dict.fromkeys(devices))
                raise ValueError(
                    f"{item.name} ({_SCRIPT_OPTIONS[item.name]}) is an option of the device {having}; this is {there}: "
                    "leave it out."
                )
