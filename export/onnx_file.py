"""An ONNX file and the files of external data it names: whether they are whole, found before anything loads them."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import onnx
from onnx import GraphProto, TensorProto
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from .errors import ExportError


def load_onnx(path: Path) -> onnx.ModelProto:
    """Reads a graph without its external data.

    Raises:
        ExportError: The file is no ONNX graph, or not the whole of one.
    """
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf raises a class that is not public
        raise ExportError(f"{path} is no ONNX graph, or is truncated: download or export it again.") from error
    if not model.graph.output:
        raise ExportError(f"{path} holds no graph with outputs: it is truncated, or no ONNX file; download or export it again.")
    return model


def external_files(model: onnx.ModelProto, path: Path) -> tuple[str, ...]:
    """Returns the files of a graph's external data, relative to its folder.

    Args:
        model: The graph.
        path: Where it was read from.

    Raises:
        ExportError: A file is missing, shorter than what the graph reads of it, or outside the folder, where ONNX Runtime
            refuses it.
    """
    sizes = external_sizes(model)
    for location, size in sizes.items():
        _check_external_file(path, location, size)
    return tuple(sorted(sizes))


def external_sizes(model: onnx.ModelProto) -> dict[str, int]:
    """Returns the names of a graph's external data, and how many bytes of each it reads; they need not be there."""
    sizes: dict[str, int] = {}
    for graph in all_graphs(model.graph):
        for tensor in _constants(graph):
            if uses_external_data(tensor):
                info = ExternalDataInfo(tensor)
                sizes[info.location] = max(sizes.get(info.location, 0), (info.offset or 0) + (info.length or 0))
    return sizes


def all_graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """Yields a graph and those inside its nodes: the branches of an If, the body of a Loop."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from all_graphs(inner)


def _constants(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)


def _check_external_file(path: Path, location: str, size: int) -> None:
    if PurePosixPath(location).is_absolute() or ".." in PurePosixPath(location).parts:
        raise ExportError(f"{path} keeps weights in '{location}', outside its folder: save it again with them beside it.")
    file = path.parent / location
    if not file.is_file():
        raise ExportError(f"{path} keeps its weights in '{location}', which is not there: download that file too.")
    if (found := file.stat().st_size) < size:
        raise ExportError(f"{file} has {found:,} bytes, and {path.name} reads {size:,}: it is truncated; download it again.")
