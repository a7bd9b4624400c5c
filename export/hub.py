"""Models by their name on the hub: a checkpoint's folder, or where there is none, one graph with its weights and tokenizer."""

import re
from collections.abc import Sequence
from pathlib import Path

from .errors import ExportError
from .existing_graph import usual_graph
from .onnx_file import external_sizes, load_onnx

_REPOSITORY = r"[\w.-]+/[\w.-]+"
_NAME = re.compile(_REPOSITORY)
_GRAPH = re.compile(rf"({_REPOSITORY})/([\w./-]+\.onnx)")
_SETTINGS = ("*.json", "*.jinja", "*.model", "*.txt")
_WEIGHTS = "*.safetensors"
_MOST_NAMED = 12


def is_hub_name(name: str) -> bool:
    """Tells whether a name has the form owner/name, or owner/name/path/to/model.onnx."""
    return bool(_GRAPH.fullmatch(name)) or (bool(_NAME.fullmatch(name)) and not name.endswith((".gguf", ".onnx")))


def download(name: str) -> Path:
    """Downloads a model into the hub client's own cache.

    A repository without `.safetensors` weights gives one of its graphs: the one that is named, or the usual_graph.

    Args:
        name: Of the form that is_hub_name asks for.

    Returns:
        The checkpoint's folder, or the `.onnx` file of a graph, its external data beside it.

    Raises:
        ExportError: The hub does not give it, or the repository holds neither; or several graphs, none of which is chosen.
    """
    named = _GRAPH.fullmatch(name)
    repository = named[1] if named else name
    folder = _snapshot(repository, [*_SETTINGS] if named else [*_SETTINGS, _WEIGHTS])
    if not named and any(folder.glob(_WEIGHTS)):
        return folder
    graph = _choose(repository, named[2] if named else None, folder)
    folder = _snapshot(repository, [*_SETTINGS, graph])
    if data := external_sizes(load_onnx(folder / graph)):
        folder = _snapshot(repository, [*_SETTINGS, graph, *((Path(graph).parent / file).as_posix() for file in data)])
    return folder / graph


def _choose(repository: str, named: str | None, folder: Path) -> str:
    """Returns the path of the graph that is meant, in its repository."""
    files = _list(repository)
    graphs = [file for file in files if file.endswith(".onnx")]
    if not graphs:
        there = ", ".join(sorted(files)[:_MOST_NAMED])
        raise ExportError(
            f"'{repository}' on the hub holds neither .safetensors weights nor .onnx graphs (there are {there}): name another "
            "repository, or download its .gguf file, if it has one, and pass that."
        )
    chosen = named or usual_graph(folder, graphs)
    if chosen not in graphs:
        problem = f"has no {chosen}" if chosen else f"holds {len(graphs)} graphs, none of them named model.onnx"
        raise ExportError(
            f"'{repository}' on the hub {problem}: pass one of {', '.join(sorted(graphs)[:_MOST_NAMED])} behind its name, "
            f"--target {repository}/{min(graphs)} for instance."
        )
    return chosen


def _snapshot(repository: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=list(patterns)))
    except Exception as error:  # the hub client raises classes of three libraries
        raise _refused(repository, error) from error


def _list(repository: str) -> list[str]:
    from huggingface_hub import list_repo_files

    try:
        return list(list_repo_files(repository))
    except Exception as error:  # as above
        raise _refused(repository, error) from error


def _refused(repository: str, error: Exception) -> ExportError:
    reason = str(error).strip().partition("\n")[0][:200]
    return ExportError(
        f"'{repository}' is neither a file nor a folder here, and the hub did not give it ({type(error).__name__}: {reason}). "
        "Check the name and the network, or pass a local folder."
    )
