"""A decoder's graph and its weights as files: what another form of the decoder has stored is referred to, not stored again.

Weights are the same where their name and every byte are. Forms in fp32, fp16 and bf16 share all that is large; `static` and
`primitive` share quantised weights too. `gqa` shares none of these: MatMulNBits reads codes without a sign, [columns, blocks,
block / 2], and scales with one; DequantizeLinear reads codes with a sign, [rows, columns], and TensorRT wants scales above
zero, so even the numbers are rounded otherwise.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

import onnx
import onnx_ir as ir
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from runtime.contract import DecoderSpec, FileRecord

from .errors import ExportError

# Smaller weights stand in the graph itself.
_INLINE_BYTES = 256
# A file of which a form would use less is left alone: a decoder's memory is reckoned from the sizes of its files.
_LEAST_SHARE = 0.5
_CHUNK = 1 << 22


class _Place(NamedTuple):
    """Where a form keeps a weight."""

    record: FileRecord
    offset: int
    length: int


def save_graph(
    model: ir.Model, folder: Path, role: str, name: str, forms: Sequence[DecoderSpec], on_tensor: Callable[[int, int], None]
) -> tuple[FileRecord, ...]:
    """Writes a graph and those of its weights that no other form has.

    Args:
        model: The graph; its weights' values may be replaced by references to files.
        folder: The bundle's.
        role: "target" or "draft", the folder of its decoder's files, which is made where it is not there.
        name: Of the file, without its suffix.
        forms: The forms of this decoder that lie there already.
        on_tensor: Called with (weights written, weights in all) after each; once with zeros where there are none.

    Returns:
        The graph's record, then those of the files that hold its weights.

    Raises:
        ExportError: The disk took only a part of the weights.
    """
    home = folder / role
    home.mkdir(exist_ok=True)
    shared = _refer_to_stored(model, home, forms)
    own = []
    for value in _constants(model):
        if value.const_value.nbytes <= _INLINE_BYTES:
            # What lies in the checkpoint's own file must not be read from there.
            value.const_value = ir.tensor(value.const_value.numpy(), value.const_value.dtype, name=value.name)
        elif value not in shared:
            own.append(value)
    path, data = home / f"{name}.onnx", f"{name}.onnx.data"
    for stray in (path, home / data):
        stray.unlink(missing_ok=True)  # it may be a link to a file in the bundle that this one is to replace
    if not own:
        on_tensor(0, 0)  # the step is told of although it is nothing
    else:
        _write_weights(own, home, data, on_tensor)
    ir.save(model, path)
    written = [FileRecord.of(folder, f"{role}/{file}") for file in ([path.name, data] if own else [path.name])]
    return (*written, *{record.path: record for record in shared.values()}.values())


def _write_weights(values: Sequence[ir.Value], home: Path, data: str, on_tensor: Callable[[int, int], None]) -> None:
    weights = [value.const_value for value in values]
    try:
        tensors = ir.external_data.convert_tensors_to_external(
            weights, home, data, lambda _tensor, state: on_tensor(state.index + 1, state.total)
        )
    except OSError as error:
        if error.strerror is not None:
            raise
        # numpy's tofile does not pass on the system's reason.
        raise ExportError(
            f"The weights {home.name}/{data} could not be written whole ({error}): the disk is full, or a limit on the size of "
            "files is reached (ulimit -f)."
        ) from error
    for value, tensor in zip(values, tensors, strict=True):
        value.const_value = tensor


def _constants(model: ir.Model) -> list[ir.Value]:
    constants = (value for graph in model.graphs() for value in graph.initializers.values())
    return [value for value in constants if value.const_value is not None]


def _refer_to_stored(model: ir.Model, home: Path, forms: Sequence[DecoderSpec]) -> dict[ir.Value, FileRecord]:
    """Points weights at the files of other forms that hold the same bytes, and returns the file of each."""
    shared: dict[ir.Value, FileRecord] = {}
    places = {(name, place.length): place for form in reversed(forms) for name, place in _places(form, home)}
    candidates: dict[str, list[tuple[ir.Value, _Place]]] = {}
    for value in _constants(model):
        if (place := places.get((value.name, value.const_value.nbytes))) is not None:
            candidates.setdefault(place.record.path, []).append((value, place))
    for pairs in candidates.values():
        record = pairs[0][1].record
        least = _LEAST_SHARE * record.size
        if sum(place.length for _, place in pairs) < least:
            continue
        with (home / PurePosixPath(record.path).name).open("rb") as stream:
            same = [pair for pair in pairs if _holds(stream, pair[1], pair[0].const_value.tobytes())]
        if sum(place.length for _, place in same) >= least:
            for value, place in same:
                value.const_value = _reference(value, place, home)
                shared[value] = record
    return shared


def _places(form: DecoderSpec, home: Path) -> Iterator[tuple[str, _Place]]:
    records = {PurePosixPath(record.path).name: record for record in form.graph}
    graph = onnx.load(home / PurePosixPath(form.graph[0].path).name, load_external_data=False).graph
    for tensor in graph.initializer:
        if uses_external_data(tensor):
            info = ExternalDataInfo(tensor)
            yield tensor.name, _Place(records[info.location], info.offset or 0, info.length)


def _holds(stream: BinaryIO, place: _Place, weights: bytes) -> bool:
    stream.seek(place.offset)
    view = memoryview(weights)
    chunks = range(0, place.length, _CHUNK)
    return all(stream.read(min(_CHUNK, place.length - begin)) == bytes(view[begin : begin + _CHUNK]) for begin in chunks)


def _reference(value: ir.Value, place: _Place, home: Path) -> ir.ExternalTensor:
    tensor = value.const_value
    file = PurePosixPath(place.record.path).name
    return ir.ExternalTensor(file, place.offset, place.length, tensor.dtype, shape=tensor.shape, name=value.name, base_dir=home)
