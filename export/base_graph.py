"""The base graph: mobius turns a checkpoint into portable ONNX with its weights, one Attention node a layer."""

import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from .errors import ExportError
from .source import Source

if TYPE_CHECKING:
    from mobius import ModelPackage


def build_base_graph(source: Source) -> ir.Model:
    """Builds a decoder's base graph in float32.

    Args:
        source: A resolved source.

    Returns:
        The graph with weights applied: inputs input_ids, attention_mask, position_ids and past key/values; outputs logits
        for every row and present key/values.

    Raises:
        ExportError: mobius does not know the architecture, or cannot read the weights.
    """
    import mobius

    logging.getLogger("mobius").setLevel(logging.ERROR)
    if source.kind == "folder" and source.architecture not in mobius.registry:
        raise ExportError(
            f"{source.name} is a '{source.architecture}' model, which mobius-onnx {mobius.__version__} does not know; "
            f"closest known: {', '.join(_closest(source.architecture, mobius.registry.architectures()))}."
        )
    try:
        if source.kind == "gguf":
            package: ModelPackage = mobius.build_from_gguf(source.path, dtype="f32")
        else:
            with _plain_folder(source.path) as folder:
                package = mobius.build(str(folder), dtype="f32")
    except Exception as error:  # whatever a damaged or unknown checkpoint makes mobius and its readers raise
        reason = str(error).strip().partition("\n")[0][:300]
        raise ExportError(
            f"mobius-onnx {mobius.__version__} could not build {source.name} ('{source.architecture}'): "
            f"{type(error).__name__}: {reason}"
        ) from error
    if list(package) != ["model"]:
        raise ExportError(
            f"{source.name} ('{source.architecture}') is made of {', '.join(package)}; "
            "only plain text decoders can be exported."
        )
    model = package["model"]
    if missing := [name for name, value in model.graph.initializers.items() if value.const_value is None]:
        raise ExportError(
            f"{source.name} has no weights for {len(missing)} tensors of its graph, {missing[0]} first: the checkpoint is "
            "incomplete, or of another architecture than its config says."
        )
    return model


@contextmanager
def _plain_folder(folder: Path) -> Iterator[Path]:
    """Yields a folder that mobius-onnx 0.1.0 reads rightly: the given one, or a twin of hard links to its files.

    Two things need the twin. mobius takes a rope_theta of 10000 without rope_scaling, the default of Llama 2 and many
    others, for a model without positions; the twin's config says `"rope_type": "default"`, which means the same to
    transformers. And it refuses weights behind symbolic links, which is what the hub's cache is made of.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    default_theta = math.isclose(getattr(config, "rope_theta", None) or 0, 10_000)
    silent_rotary = default_theta and not getattr(config, "rope_scaling", None)
    if not silent_rotary and not any(file.is_symlink() for file in folder.iterdir()):
        yield folder
        return
    with tempfile.TemporaryDirectory(dir=_linkable_place(folder)) as name:
        twin = Path(name)
        for file in folder.iterdir():
            if file.is_file() and file.name != "config.json":
                _link_or_copy(file.resolve(), twin / file.name)
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if silent_rotary:
            values["rope_scaling"] = {"rope_type": "default"}
        (twin / "config.json").write_text(json.dumps(values), encoding="utf-8")
        yield twin


def _linkable_place(folder: Path) -> Path | None:
    """A folder on the weights' own disk, where links to them can stand; None for the system's temporary folder."""
    weights = next(iter(sorted(folder.glob("*.safetensors"))), folder / "config.json")
    place = weights.resolve().parent
    return place if os.access(place, os.W_OK) else None


def _link_or_copy(file: Path, link: Path) -> None:
    try:
        link.hardlink_to(file)
    except OSError:
        shutil.copyfile(file, link)


def _closest(name: str, known: list[str]) -> list[str]:
    import difflib

    return difflib.get_close_matches(name, known, n=3, cutoff=0.4) or sorted(known)[:3]
