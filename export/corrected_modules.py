"""Models that mobius-onnx 0.1.0 builds otherwise than transformers computes them, corrected in subclasses of its modules.

What differs was found by the check against torch, and each is what transformers' own module of that name does. A config's field
that mobius reads by another name is no case for this module: see base_graph.config_changes.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from mobius import ArchitectureConfig
from mobius.models.cohere import CohereCausalLMModel
from mobius.models.falcon import FalconCausalLMModel
from mobius.models.gpt_neox import GPTNeoXCausalLMModel
from mobius.models.gptj_codegen import GPTJCausalLMModel
from onnxscript import nn

if TYPE_CHECKING:
    import onnx_ir as ir
    from onnxscript import OpBuilder
    from transformers import PretrainedConfig


def corrected_module(config: "PretrainedConfig") -> type[nn.Module] | None:
    """Returns the module class to build a model with, or None for mobius's own."""
    if config.model_type == "gpt_neox" and not config.use_parallel_residual:
        return SequentialGPTNeoX
    return {"cohere2": Cohere2, "falcon": Falcon, "gptj": GPTJ}.get(config.model_type)


class Cohere2(CohereCausalLMModel):
    """Rotates in the layers that have a sliding window, and in no other (transformers: Cohere2Attention.forward)."""

    def __init__(self, config: ArchitectureConfig) -> None:
        """Tells the layers without a window to leave the places of tokens out."""
        super().__init__(config)
        for layer, kind in zip(self.model.layers, config.layer_types, strict=True):
            if kind == "full_attention":
                layer.self_attn.forward = partial(_without_places, layer.self_attn.forward)


def _without_places(forward: Callable[..., Any], op: "OpBuilder", hidden_states: "ir.Value", **inputs: Any) -> Any:
    return forward(op, hidden_states, **(inputs | {"position_embeddings": None}))


class GPTJ(GPTJCausalLMModel):
    """Has biases in its feed-forward blocks, which no field of the config says (transformers: GPTJMLP)."""

    def __init__(self, config: ArchitectureConfig) -> None:
        """Says so to mobius."""
        super().__init__(dataclasses.replace(config, mlp_bias=True))


class SequentialGPTNeoX(GPTNeoXCausalLMModel):
    """Feeds the feed-forward block what attention has added to (transformers: GPTNeoXLayer, use_parallel_residual false)."""

    def __init__(self, config: ArchitectureConfig) -> None:
        """Replaces how layers compute, and none of their weights."""
        super().__init__(config)
        for layer in self.gpt_neox.layers:
            layer.forward = partial(_sequential_forward, layer)


def _sequential_forward(
    layer: nn.Module,
    op: "OpBuilder",
    hidden_states: "ir.Value",
    attention_bias: "ir.Value | None",
    position_embeddings: tuple["ir.Value", ...],
    past_key_value: tuple["ir.Value", ...] | None = None,
) -> tuple["ir.Value", tuple["ir.Value", ...]]:
    attended, present = layer.attention(
        op, layer.input_layernorm(op, hidden_states), attention_bias, position_embeddings, past_key_value
    )
    attended = op.Add(hidden_states, attended)
    return op.Add(attended, layer.mlp(op, layer.post_attention_layernorm(op, attended))), present


class Falcon(FalconCausalLMModel):
    """Finds the norms of the older decoders under their own names (transformers: FalconDecoderLayer, Falcon-7B and -RW)."""

    def preprocess_weights(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Renames norms, then does what mobius does."""
        names = {".input_layernorm.": ".ln_attn.", ".post_attention_layernorm.": ".ln_mlp."}
        renamed = {}
        for name, weights in state_dict.items():
            for theirs, ours in names.items():
                name = name.replace(theirs, ours)  # noqa: PLW2901 - one of the two is in a name
            renamed[name] = weights
        return super().preprocess_weights(renamed)
