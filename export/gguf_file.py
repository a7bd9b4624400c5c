"""Opening a GGUF file: its metadata and tensor table, whole, or a sentence that says what is wrong."""

from pathlib import Path

from gguf import GGUFReader, GGUFValueType
from gguf.gguf_reader import ReaderField

from .errors import ExportError

_MAGIC = b"GGUF"


def read_gguf(path: Path) -> GGUFReader:
    """Maps a GGUF file; no tensor is read.

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
    except (OSError, ValueError, IndexError, KeyError, OverflowError, MemoryError):
        whole = False
    if not whole:
        raise ExportError(f"{path} is cut short or damaged ({path.stat().st_size:,} bytes): fetch it again.")
    return reader


def _is_whole(field: ReaderField) -> bool:
    """Whether a field's last string has its full length: the reader takes what there is."""
    return not field.types or field.types[-1] != GGUFValueType.STRING or len(field.parts[-1]) == field.parts[-2][0]
