"""Graphs that people have already: folders of optimum, of onnx-community, of ONNX Runtime GenAI, taken as they are.

Nothing is exported and torch is not needed. The folder says where the graph is and what the graph leaves open; how the
runtime must feed it is read from its inputs and outputs.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime.contract import DecoderSpec, FileRecord

from .errors import ExportError
from .genai_config import CONFIG as GENAI_CONFIG
from .graph_interface import GraphInterface, read_interface
from .links import link_or_copy
from .source import Source, config_source, read_json
from .tokenizer import TokenizerAssets, tokenizer_from_folder

# What optimum and onnx-community call the decoder with its cache, in the order of preference.
_GRAPHS = ("model.onnx", "onnx/model.onnx", "decoder_model_merged.onnx", "onnx/decoder_model_merged.onnx")
_OTHER_PARTS = ("vision", "speech", "embedding", "encoder")
# A graph that this project exported writes one spare row behind a pass's tokens; a slot more harms no other.
_SPARE_SLOTS = 1


def find_graph(path: Path) -> Path | None:
    """Returns the graph that a user's path means, or None where it means something else.

    Args:
        path: A `.onnx` file, or a folder. A folder with weights in `.safetensors` is a checkpoint, whatever else it holds.

    Raises:
        ExportError: The folder holds graphs, and none by a name that says which is the decoder.
    """
    if path.suffix == ".onnx" and path.is_file():
        return path
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    graphs = sorted(file.relative_to(path).as_posix() for file in (*path.glob("*.onnx"), *path.glob("onnx/*.onnx")))
    if (usual := usual_graph(path, graphs)) is not None:
        graph = path / usual
        if not graph.is_file():
            raise ExportError(f"{path / GENAI_CONFIG} names the graph {graph.name}, which is not there: complete the folder.")
        return graph
    if graphs:
        raise ExportError(f"{path} holds {', '.join(graphs[:6])}, none of them named model.onnx: pass the file you mean.")
    return None


def usual_graph(folder: Path, graphs: Collection[str]) -> str | None:
    """Returns the graph that a folder's genai_config.json names, or else one of a usual name; None where there is neither.

    Args:
        folder: Where the configuration is.
        graphs: Paths of graphs, relative to it.
    """
    if (folder / GENAI_CONFIG).is_file():
        return str(_genai_model(folder)["decoder"]["filename"])
    return next((name for name in _GRAPHS if name in graphs), None)


def graph_source(name: str, graph: Path) -> Source:
    """Describes a graph as a source: what its folder's configuration says of the model.

    Args:
        name: As the user named it.
        graph: The `.onnx` file.

    Raises:
        ExportError: The graph cannot be used (see read_interface), or its folder says too little of the model, or that it is
            one part of a model in several graphs.
    """
    folder = _model_folder(graph)
    window = read_interface(graph).window
    if not (folder / GENAI_CONFIG).is_file():
        described = config_source(name, folder)
        windows = [tokens for tokens in (described.window, window) if tokens]
        return replace(described, kind="graph", path=graph, window=min(windows, default=None))
    model = _genai_model(folder)
    if parts := [part for part in _OTHER_PARTS if part in model]:
        raise ExportError(f"{folder} holds a model with the parts {', '.join(parts)}: only plain text decoders can be used.")
    context_length = model.get("context_length")
    if type(context_length) is not int or context_length < 1:
        raise ExportError(f"{folder / GENAI_CONFIG} names no context length (model.context_length): complete it.")
    sliding = model["decoder"].get("sliding_window")
    windows = [tokens for tokens in (sliding.get("window_size") if isinstance(sliding, dict) else None, window) if tokens]
    return Source(name, "graph", graph, str(model.get("type", "decoder")), context_length, min(windows, default=None), 0)


def graph_tokenizer(graph: Path) -> TokenizerAssets:
    """Reads the tokenizer beside a graph; a genai_config.json may know more ends of a text than the tokenizer's files.

    Raises:
        ExportError: As tokenizer_from_folder.
    """
    folder = _model_folder(graph)
    assets = tokenizer_from_folder(folder)
    if not (folder / GENAI_CONFIG).is_file():
        return assets
    ends = _genai_model(folder).get("eos_token_id", [])
    ids = ends if isinstance(ends, list) else [ends]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise ExportError(f"{folder / GENAI_CONFIG} has eos_token_id {ends!r}: expected a token id or a list of token ids.")
    return replace(assets, eos_token_ids=tuple(dict.fromkeys((*ids, *assets.eos_token_ids))))


def take_graph(source: Source, role: str, folder: Path, context_length: int) -> DecoderSpec:
    """Puts a graph and its weights into a bundle's folder, as hard links where the disk allows it.

    Args:
        source: Of kind "graph".
        role: The folder's name in the bundle: "target" or "draft".
        folder: The bundle's folder.
        context_length: Tokens to serve.

    Returns:
        The decoder; it is not checked yet, and the shape of its passes not known.

    Raises:
        ExportError: See read_interface.
    """
    interface = read_interface(source.path)
    files = (source.path.name, *interface.data_files)
    for file in files:
        link_or_copy(source.path.parent / file, folder / role / file)
    graph = tuple(FileRecord.of(folder, f"{role}/{file}") for file in files)
    return decoder_spec(source, _model_folder(source.path), interface, graph, context_length)


def decoder_spec(
    source: Source, configured: Path, interface: GraphInterface, graph: tuple[FileRecord, ...], context_length: int
) -> DecoderSpec:
    """Describes a graph to the runtime, the shape of its passes not measured yet.

    Args:
        source: The model.
        configured: The folder whose configuration says what the graph leaves open.
        interface: What the graph says.
        graph: The graph's file and its external data, in the bundle.
        context_length: Tokens to serve.

    Raises:
        ExportError: The configuration leaves it open too.
    """
    return DecoderSpec(
        source=source.name,
        architecture=source.architecture,
        graph=graph,
        lowering=interface.lowering,
        precision=interface.precision,
        num_layers=interface.num_layers,
        num_key_value_heads=interface.num_key_value_heads
        or _configured(configured, "num_key_value_heads", "num_attention_heads"),
        head_size=interface.head_size or _configured(configured, "head_size", "head_dim"),
        vocab_size=interface.vocab_size or _configured(configured, "vocab_size"),
        context_length=context_length,
        cache_dtype=interface.cache_dtype,
        spare_slots=_SPARE_SLOTS if interface.lowering == "gqa" else 0,
        min_rows=1,
        names=interface.names,
    )


def _model_folder(graph: Path) -> Path:
    """Where the configuration and the tokenizer are: beside the graph, or above its folder, as onnx-community has it."""
    here = graph.absolute().parent
    return next((folder for folder in (here, here.parent) if _has_config(folder)), here)


def _has_config(folder: Path) -> bool:
    return (folder / GENAI_CONFIG).is_file() or (folder / "config.json").is_file()


def _configured(folder: Path, *names: str) -> int:
    """A width by the first of its names that a configuration in the folder has."""
    for values in _configurations(folder):
        for name in names:
            if type(value := values.get(name)) is int and value > 0:
                return value
    raise ExportError(
        f"Neither the graph nor the configuration in {folder} says the model's {names[0]}: add it to config.json."
    )


def _configurations(folder: Path) -> Iterator[Mapping[str, Any]]:
    if (folder / GENAI_CONFIG).is_file():
        model = _genai_model(folder)
        yield from (model["decoder"], model)
    if (folder / "config.json").is_file():
        config = read_json(folder / "config.json", str(folder))
        yield config
        hidden_size, num_heads = config.get("hidden_size"), config.get("num_attention_heads")
        if type(hidden_size) is int and type(num_heads) is int and num_heads > 0:
            yield {"head_size": hidden_size // num_heads}


def _genai_model(folder: Path) -> Mapping[str, Any]:
    """The section "model" of a genai_config.json, which has a section "decoder" with one graph."""
    model = read_json(folder / GENAI_CONFIG, str(folder)).get("model")
    decoder = model.get("decoder") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(decoder, dict) or not isinstance(decoder.get("filename"), str):
        raise ExportError(
            f"{folder / GENAI_CONFIG} names no single graph as model.decoder.filename: only plain text decoders can be used."
        )
    return model
