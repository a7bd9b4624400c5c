"""What an ONNX file says of itself beside its graph, read without the onnx package and without reading the graph.

The graphs we lower hold how many tokens they were made for. Behind these their tables of positions end, and what they compute
is wrong without an error, so the manifest's word is not taken for it.
"""

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from .contract import MANIFEST, Bundle
from .errors import BundleError

CONTEXT_LENGTH = "specrt.context_length"
# Field numbers of onnx.proto, and the two wire types of protobuf that a ModelProto's fields have.
_METADATA_PROPS, _KEY, _VALUE = 14, 1, 2
_VARINT, _LENGTH_DELIMITED = 0, 2


def check_context_lengths(bundle: Bundle) -> None:
    """Holds the contexts that a manifest promises against those that its graphs were made for, where they say so.

    Raises:
        BundleError: A graph was made for less.
    """
    for role, decoder in (("target", bundle.target), ("draft", bundle.draft)):
        for form in () if decoder is None else decoder.forms:
            path = bundle.folder / form.graph[0].path
            made_for = read_metadata(path).get(CONTEXT_LENGTH, "")
            if made_for.isdecimal() and form.context_length > int(made_for):
                raise BundleError(
                    f"{bundle.folder / MANIFEST}: {role}: context_length is {form.context_length}, and {path} was made for "
                    f"{made_for} tokens: put that number back, or export with a longer --max-length."
                )


def read_metadata(path: Path) -> dict[str, str]:
    """Returns the metadata of an ONNX file; none of a file that is something else, which whoever loads it will say."""
    found = {}
    with path.open("rb") as stream:
        for number, contents in _fields(stream, path.stat().st_size, {_METADATA_PROPS}):
            if number == _METADATA_PROPS:
                entry = dict(_fields(BytesIO(contents), len(contents), {_KEY, _VALUE}))
                found[entry.get(_KEY, b"").decode(errors="replace")] = entry.get(_VALUE, b"").decode(errors="replace")
    return found


def _fields(stream: BinaryIO, end: int, wanted: set[int]) -> Iterator[tuple[int, bytes]]:
    """Yields a message's fields of those numbers, and steps over all others; stops where it is no protobuf message."""
    while (tag := _varint(stream)) is not None:
        size = _varint(stream)
        if size is None or tag & 7 not in (_VARINT, _LENGTH_DELIMITED):
            return
        if tag & 7 == _VARINT:
            continue  # the number that was read is the field's value
        if size > end - stream.tell():
            return
        if tag >> 3 in wanted:
            yield tag >> 3, stream.read(size)
        else:
            stream.seek(size, 1)


def _varint(stream: BinaryIO) -> int | None:
    """Reads a number in groups of seven bits, the lowest first; None at the end of the stream."""
    number = shift = 0
    while (byte := stream.read(1)) and shift < 64:
        number |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return number
        shift += 7
    return None
