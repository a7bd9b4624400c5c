"""Opening a GGUF file: its metadata and tensor table, whole, or a sentence that says what is wrong; and one tensor's values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, dequantize
from gguf.gguf_reader import ReaderField, ReaderTensor
from numpy.typing import NDArray

from .errors import ExportError

_MAGIC = b"GGUF"
_CHUNK = 1 << 22  # values dequantised at once: gguf's own functions hold them twice


@dataclass(frozen=True)
class GGUFFile:
    """What a GGUF file says of its model; its tensors are mapped and not read.

    Attributes:
        path: The file.
        metadata: Values by key, without what is for people only.
        tensors: The table of its tensors.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Sequence[ReaderTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Opens a GGUF file; no tensor is read.

    The reader takes seconds and half a gigabyte for a large vocabulary, so an export opens a file once (Source.gguf).

    Raises:
        ExportError: No such file, no GGUF file, or one that was cut short.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror}.") from error
    if magic != _MAGIC:
        raise ExportError(f"{path} is not a GGUF file: it begins with {magic!r}, not {_MAGIC!r}.")
    try:
        # Opening maps every tensor too, so a file that was cut inside the weights is found here.
        reader = GGUFReader(path)
        whole = all(_is_whole(field) for field in reader.fields.values())
        metadata = {name: field.contents() for name, field in reader.fields.items() if whole and _is_read(name)}
    except (OSError, ValueError, IndexError, KeyError, OverflowError, MemoryError):
        whole = False
    if not whole:
        raise ExportError(f"{path} is cut short or damaged ({path.stat().st_size:,} bytes): fetch it again.")
    return GGUFFile(path, metadata, reader.tensors)


def dequantize_tensor(path: Path, tensor: ReaderTensor) -> NDArray[np.float32]:
    """Returns a tensor's values, float32 [rows, columns] or as its shape is, in memory of their own.

    The codes are read, not mapped: mapped pages would count as this process's memory long after the tensor was needed.

    Args:
        path: The file.
        tensor: An entry of the table that `read_gguf` gave.
    """
    shape = tuple(reversed(tensor.shape.tolist()))
    stored = tensor.data.reshape(-1, tensor.data.shape[-1])  # only its shape and type are looked at
    values = np.empty((len(stored), shape[-1]), np.float32)
    step = max(1, _CHUNK // shape[-1])
    with path.open("rb") as file:
        file.seek(int(tensor.data_offset))
        for begin in range(0, len(stored), step):
            rows = stored[begin : begin + step]
            codes = np.frombuffer(file.read(rows.nbytes), stored.dtype).reshape(rows.shape)
            values[begin : begin + step] = dequantize(codes, tensor.tensor_type)
    return values.reshape(shape)


def _is_read(name: str) -> bool:
    return name == "general.architecture" or not name.startswith("general.")


def _is_whole(field: ReaderField) -> bool:
    """Whether a field's last string has its full length: the reader takes what there is."""
    return not field.types or field.types[-1] != GGUFValueType.STRING or len(field.parts[-1]) == field.parts[-2][0]
