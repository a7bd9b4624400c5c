"""The base graph: mobius turns a checkpoint into portable ONNX with its weights, one Attention node a layer."""

import json
import logging
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np
import onnx_ir as ir

from .errors import ExportError, OtherModelError
from .gguf_file import GGUFFile, dequantize_tensor
from .known_models import check_known
from .links import link_or_copy
from .source import Source

if TYPE_CHECKING:
    from mobius import ModelPackage
    from onnxscript import nn
    from transformers import PretrainedConfig


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

    from .deferred_tensor import make_lazy

    logging.getLogger("mobius").setLevel(logging.ERROR)
    check_known(source)
    try:
        if source.gguf is not None:
            with _deferred_weights(source.gguf):
                package: ModelPackage = mobius.build_from_gguf(source.path, dtype="f32")
        else:
            with _plain_folder(source.path) as folder:
                package = mobius.build(str(folder), dtype="f32", module_class=_module_class(folder))
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
    missing = [value for value in model.graph.initializers.values() if value.const_value is None]
    if source.kind == "folder" and missing:
        missing = _fill_absent_biases(missing, source.path)
    if missing:
        raise OtherModelError(
            f"{source.name} ('{source.architecture}') has no weights for {len(missing)} tensors of its graph, "
            f"{missing[0].name} first: complete the download, or, if it is complete, try --source optimum, as mobius-onnx "
            "builds such a model otherwise.",
            source.name,
        )
    make_lazy(model)
    return model


@contextmanager
def _deferred_weights(file: GGUFFile) -> Iterator[None]:
    """Lets mobius-onnx 0.1.0 read a GGUF file's tensors one by one, each when it is written; it would read all beforehand."""
    from mobius.integrations.gguf import _builder as builder
    from mobius.integrations.gguf._tensor_mapping import map_gguf_to_hf_names

    from .deferred_tensor import DeferredTensor

    def load(_model: object, architecture: str) -> dict[str, DeferredTensor]:
        named = [(map_gguf_to_hf_names(tensor.name, architecture), tensor) for tensor in file.tensors]
        return {
            name: DeferredTensor.of(tuple(reversed(tensor.shape.tolist())), partial(dequantize_tensor, file.path, tensor))
            for name, tensor in named
            if name is not None
        }

    with patch.object(builder, "_load_dequantized_state_dict", load):
        yield


def _module_class(folder: Path) -> "type[nn.Module] | None":
    import transformers

    from .corrected_modules import corrected_module

    return corrected_module(transformers.AutoConfig.from_pretrained(folder))


@contextmanager
def _plain_folder(folder: Path) -> Iterator[Path]:
    """Yields a folder that mobius-onnx 0.1.0 reads rightly: the given one, or a twin of hard links to its files.

    Two things need the twin: a config with fields that mobius reads otherwise than transformers does (config_changes), and
    weights behind symbolic links, which is what the hub's cache is made of and mobius refuses.
    """
    import transformers

    changes = config_changes(transformers.AutoConfig.from_pretrained(folder))
    if not changes and not any(file.is_symlink() for file in folder.iterdir()):
        yield folder
        return
    with tempfile.TemporaryDirectory(dir=_linkable_place(folder)) as name:
        twin = Path(name)
        for file in folder.iterdir():
            if file.is_file() and file.name != "config.json":
                link_or_copy(file, twin / file.name)
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (twin / "config.json").write_text(json.dumps(values | changes), encoding="utf-8")
        yield twin


def _linkable_place(folder: Path) -> Path | None:
    """A folder on the weights' own disk, where links to them can stand; None for the system's temporary folder."""
    weights = next(iter(sorted(folder.glob("*.safetensors"))), folder / "config.json")
    place = weights.resolve().parent
    return place if os.access(place, os.W_OK) else None


def config_changes(config: "PretrainedConfig") -> dict[str, object]:
    """Returns what a config must say so that mobius-onnx 0.1.0 builds what transformers computes.

    Each change says to mobius, in a field that it reads, what transformers makes of the config as it is.
    """
    changes: dict[str, object] = {}
    scaling = getattr(config, "rope_scaling", None) or {}
    theta = getattr(config, "rope_theta", None)
    # Dynamic scaling changes the angles only beyond max_position_embeddings, which no bundle serves.
    is_dynamic = scaling.get("rope_type", scaling.get("type")) == "dynamic"
    if is_dynamic:
        changes["rope_scaling"] = None
    if theta and (is_dynamic or (not scaling and math.isclose(theta, 10_000))):
        # The default theta without scaling is taken for a model without positions, unless this older field is there.
        changes["rotary_emb_base"] = theta
    if getattr(config, "rotary_dim", None) and theta is None:
        changes["rotary_emb_base"] = 10_000  # GPT-J and CodeGen have it in their code, and no field for it
    if not hasattr(config, "rope_interleave") and _rotates_neighbours(config):
        changes["rope_interleave"] = True
    if getattr(config, "mlp_bias", False):
        changes["use_mlp_bias"] = True
    return changes


def _rotates_neighbours(config: "PretrainedConfig") -> bool:
    """Whether transformers rotates neighbouring channels together, not the two halves: told by its own function."""
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return False
    module = sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__module__]
    rotate = getattr(module, "rotate_half", None)
    return rotate is not None and rotate(torch.arange(4)).tolist() == [-1, 0, -3, 2]


def _fill_absent_biases(missing: list[ir.Value], folder: Path) -> list[ir.Value]:
    """Gives zeros to biases that transformers' own layer of that name does not have; returns the other values."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return missing
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(config)
    modules = dict(reference.named_modules())
    others = []
    for value in missing:
        layer, _, parameter = value.name.rpartition(".")
        if parameter == "bias" and layer in modules and getattr(modules[layer], "bias", value) is None:
            value.const_value = ir.tensor(np.zeros(value.shape.numpy(), value.dtype.numpy()), name=value.name)
        else:
            others.append(value)
    return others
