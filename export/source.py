"""Where a model comes from: GGUF file, Hugging Face folder, hub name, ONNX graph; and what can be told before work.

Everything here reads headers and configuration only. What cannot be exported is refused here, in one sentence.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .errors import ExportError

if TYPE_CHECKING:
    from .gguf_file import GGUFFile

# States instead of keys and values: what was read cannot be unread, so a refused token could not be taken back.
_RECURRENT = re.compile(
    r"mamba|rwkv|jamba|bamba|zamba|nemotron_?h|falcon_?(h1|mamba)|recurrent_?gemma|granite(moe)?_?hybrid|lfm2|plamo2|"
    r"qwen3_?next|qwen3_?5|kimi_?linear|xlstm|mini_?max(?!_m2)|deltanet|arwkv"
)


@dataclass(frozen=True)
class Source:
    """A model to export.

    Attributes:
        name: As the user named it.
        kind: "gguf", "folder", or "graph" for an ONNX file that is taken as it is.
        path: The GGUF file, the Hugging Face folder, or the ONNX file.
        architecture: The model type, "llama" for example.
        context_length: Tokens the model was made for; a sliding window does not count as context.
        window: The sliding window's tokens, or None.
        num_parameters: Weights, tied ones once; 0 for a graph, whose files are linked.
        largest_matrix: Weights of the largest tensor; 0 for a graph.
        num_layers: Layers with a cache; 0 where that is not told.
        is_packed: Whether GPTQ or AWQ has packed its matrices, which are written as floats before they are read.
        gguf: The opened file of the kind "gguf".
    """

    name: str
    kind: Literal["gguf", "folder", "graph"]
    path: Path
    architecture: str
    context_length: int
    window: int | None
    num_parameters: int
    largest_matrix: int = 0
    num_layers: int = 0
    is_packed: bool = False
    gguf: "GGUFFile | None" = field(default=None, compare=False, repr=False)

    def require_rewindable_cache(self, max_length: int) -> None:
        """Refuses models whose cache cannot be rewound by lowering its length.

        Args:
            max_length: The context asked for; a window at least as long never slides.

        Raises:
            ExportError: Recurrent state, or a sliding window shorter than the context.
        """
        if _RECURRENT.search(self.architecture):
            raise ExportError(
                f"{self.name} is a '{self.architecture}' model: it keeps a recurrent state, which cannot be rewound when "
                "a proposed token is refused. Speculative decoding needs a model with attention in every layer."
            )
        if self.window is not None and max_length > self.window:
            raise ExportError(
                f"{self.name} ('{self.architecture}') attends through a sliding window of {self.window} tokens, and its cache "
                f"cannot be rewound once the window slides: pass --max-length {self.window} or less, so that it never does."
            )


def resolve_source(name: str) -> Source:
    """Finds a model by file, folder or hub name; downloads it in the last case.

    Args:
        name: A path to a `.gguf` file, a path to a Hugging Face folder, "owner/name" on the hub or "owner/name/model.onnx" for
            one graph there, or a path to an ONNX graph or to a folder that holds one instead of weights.

    Raises:
        ExportError: Nothing there, or what is there is no model.
    """
    from .existing_graph import find_graph, graph_source
    from .hub import download, is_hub_name

    if not name.strip():
        raise ExportError("The name of a model is empty: pass a file, a folder or a hub name.")
    path = Path(name).expanduser()
    if (graph := find_graph(path)) is not None:
        return graph_source(name, graph)
    if path.is_dir():
        return _folder_source(name, path)
    if path.is_file():
        if path.suffix in (".safetensors", ".json", ".bin"):
            raise ExportError(f"{path} is one file of a model's folder: pass the folder, {path.parent}.")
        return _gguf_source(name, path)
    if not is_hub_name(name):
        raise ExportError(f"There is no file or folder {path}, and '{name}' is no hub name of the form owner/name.")
    downloaded = download(name)
    return graph_source(name, downloaded) if downloaded.suffix == ".onnx" else _folder_source(name, downloaded)


def _folder_source(name: str, folder: Path) -> Source:
    source = config_source(name, folder)
    sizes = _tensor_sizes(folder, name)
    source = replace(source, num_parameters=sum(sizes), largest_matrix=max(sizes, default=0))
    if "quantization_config" in read_json(folder / "config.json", name):
        from .packed_checkpoint import PackedCheckpoint

        if (packed := PackedCheckpoint.find(folder)) is not None:
            return replace(source, num_parameters=packed.num_parameters, is_packed=True)
    return source


def config_source(name: str, folder: Path) -> Source:
    """Returns what the config.json of a model's folder says; its weights are not looked at, and counted as none.

    Raises:
        ExportError: No config.json there, or it names no model type or no context length.
    """
    config = read_json(folder / "config.json", name)
    architecture = config.get("model_type")
    if not isinstance(architecture, str):
        raise ExportError(f"{folder / 'config.json'} names no model_type: {name} is not a Hugging Face model folder.")
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise ExportError(f"text_config in {folder / 'config.json'} is {text!r} where an object is expected.")
    context_length = text.get("max_position_embeddings") or text.get("n_positions") or text.get("seq_length")
    if not isinstance(context_length, int) or context_length < 1:
        raise ExportError(f"{folder / 'config.json'} names no context length (max_position_embeddings).")
    context_length = min(context_length, _longrope_start(text) or context_length)
    return Source(name, "folder", folder, architecture, context_length, _window(text), 0, num_layers=_num_layers(text))


def _num_layers(config: Mapping[str, Any]) -> int:
    """Layers with a cache of their own; 0 where the configuration does not say."""
    layers, shared = config.get("num_hidden_layers", config.get("n_layer")), config.get("num_kv_shared_layers") or 0
    return layers - shared if isinstance(layers, int) and isinstance(shared, int) else 0


def _longrope_start(config: Mapping[str, Any]) -> int | None:
    """Tokens from which LongRoPE turns to other factors for the whole text: a cached key would have to turn with them."""
    scaling = config.get("rope_scaling")
    if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type")) not in ("longrope", "su"):
        return None
    start = config.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
    return start if isinstance(start, int) and start > 0 else None


def _window(config: Mapping[str, Any]) -> int | None:
    window = config.get("sliding_window")
    layer_types = config.get("layer_types") or ()
    if not isinstance(layer_types, list | tuple) or not all(isinstance(kind, str) for kind in layer_types):
        raise ExportError(f"layer_types in config.json is {layer_types!r} where a list of names is expected.")
    slides = any("sliding" in kind for kind in layer_types) if layer_types else config.get("use_sliding_window", True)
    if window and not isinstance(window, int):
        raise ExportError(f"sliding_window in config.json is {window!r} where a whole number is expected.")
    return int(window) if window and slides else None


def _tensor_sizes(folder: Path, name: str) -> list[int]:
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index, name).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ExportError(f"{index} has no weight_map of tensor names to files: download it again.")
        wanted = sorted(set(weight_map.values()))
        if missing := [file for file in wanted if not (folder / file).is_file()]:
            raise ExportError(f"{name} lacks {', '.join(missing)}, which its index names: complete the download.")
        files = [folder / file for file in wanted]
    if not files:
        raise ExportError(f"{folder} holds a config and no .safetensors weights: complete the download.")
    return [size for file in files for size in _sizes_in(file)]


def _sizes_in(file: Path) -> list[int]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as tensors:
            return [math.prod(tensors.get_slice(key).get_shape()) for key in tensors.keys()]  # noqa: SIM118 - no dict
    except (SafetensorError, OSError, ValueError) as error:
        raise ExportError(f"{file} cannot be read ({error}): the file is truncated or damaged.") from error


def _gguf_source(name: str, path: Path) -> Source:
    from .gguf_file import read_gguf

    file = read_gguf(path)
    architecture = file.metadata.get("general.architecture")
    if architecture is None:
        raise ExportError(f"{path} names no architecture (general.architecture): convert the model again.")

    def number(key: str) -> int | None:
        value = file.metadata.get(f"{architecture}.{key}")
        return int(value) if isinstance(value, int | float) and value else None

    context_length = number("context_length")
    if context_length is None:
        raise ExportError(f"{path} names no context length ({architecture}.context_length): it is no text model.")
    if any(tensor.name.startswith("rope_factors_long") for tensor in file.tensors):
        context_length = min(context_length, number("rope.scaling.original_context_length") or context_length)
    sizes = [int(tensor.n_elements) for tensor in file.tensors]
    window = number("attention.sliding_window")
    layers = (number("block_count") or 0) - (number("nextn_predict_layers") or 0) - (number("attention.shared_kv_layers") or 0)
    largest = max(sizes, default=0)
    return Source(name, "gguf", path, str(architecture), context_length, window, sum(sizes), largest, layers, gguf=file)


def read_json(path: Path, name: str) -> dict[str, Any]:
    """Returns the object in a model's JSON file.

    Raises:
        ExportError: No such file, or what it holds is no JSON object.
    """
    if not path.is_file():
        raise ExportError(f"{name} holds no {path.name}: it is not a Hugging Face model folder.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ExportError(f"{path} is not valid JSON ({error}).") from error
    if not isinstance(value, dict):
        raise ExportError(f"{path} holds a JSON {type(value).__name__} where an object is expected.")
    return value
