"""What an export takes of the machine's memory: reckoned before the work, measured after it, and given back in between.

The pages of a checkpoint's mapped files are not reckoned: the kernel takes them away when memory is asked for.
"""

import ctypes
import sys
from collections.abc import Sequence

from runtime.memory import RESIDENT_SHARE

from .errors import ExportError
from .role import GPTQ, Role

# Python, torch, transformers, mobius-onnx and ONNX Runtime as they are imported: 0.35 GB were measured.
_PROCESS_BYTES = 4e8
# Of a float32 matrix while it is rounded: itself and its codes.
_MATRIX_COPIES = 1.5
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_LARGE_BYTES = 1 << 20


def check_memory(roles: Sequence[Role], free: int | None) -> None:
    """Refuses before the work what memory has no room for.

    Args:
        roles: What is to be made, one behind the other.
        free: Bytes that are free; None where that is unknown, and nothing is refused.

    Raises:
        ExportError: A decoder needs more.
    """
    if free is None:
        return
    for role in roles:
        if (needed := needed_bytes(role)) > free:
            option = "--precision" if role.name == "target" else "--draft-precision"
            elsewhere = "or add it on" if role.beside else f"choose a lower {option}, or export on"
            raise ExportError(
                f"Exporting {role.source.name} in {role.precision} needs about {needed / 1e9:.1f} GB of memory and "
                f"{free / 1e9:.1f} GB are free: end other programs, {elsewhere} a larger machine."
            )


def needed_bytes(role: Role) -> float:
    """Returns about what a decoder's export takes at its peak: to round its weights, or to load a form and check it."""
    rounded = role.form_bytes if role.is_quantised else 0  # others are written as they are read
    if role.quantizer == GPTQ:
        rounded *= 2  # what was calibrated is kept until the graph has been compared with it
    matrix = 4 * role.source.largest_matrix * _MATRIX_COPIES
    return _PROCESS_BYTES + max(rounded + matrix, role.form_bytes * RESIDENT_SHARE[role.precision])


def peak_bytes() -> int | None:
    """Returns the most memory that this process had so far, mapped files included; None where the system does not count it."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def give_back_large_arrays() -> None:
    """Lets glibc map each array of a megabyte or more on its own, so that freeing it gives its memory back; for the process.

    By itself glibc raises this limit up to 32 MB as it goes. Matrices that were read, rounded and freed then leave holes
    between what stays, which took half of a checkpoint's size. Other allocators are left alone.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
