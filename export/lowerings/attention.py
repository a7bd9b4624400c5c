"""Reads the base graph's attention nodes into one typed description each, which every lowering starts from.

The base graph is what mobius builds: opset 24, one Attention node a layer with past and present in `[batch, rows, heads *
head_size]` form, rotary embedding before it. Nothing here knows an architecture; what is not recognised is refused by name.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from export.errors import ExportError


@dataclass(frozen=True)
class AttentionGeometry:
    """What a lowered graph's attention says of its cache; the manifest records it.

    Attributes:
        num_layers: Attention nodes, so pairs of key and value caches.
        num_key_value_heads: Heads in a cache.
        head_size: Width of a head.
        spare_slots: Cache slots behind the length that a pass may overwrite, padding rows aside.
        cache_capacity: Slots of the cache where the graph fixes them; None where a caller chooses.
    """

    num_layers: int
    num_key_value_heads: int
    head_size: int
    spare_slots: int = 0
    cache_capacity: int | None = None


@dataclass(frozen=True)
class AttentionLayer:
    """One Attention node of the base graph.

    Attributes:
        index: The layer's number from 0.
        node: The node itself.
        query: [batch, rows, num_heads * head_size], rotated where the model rotates.
        key: [batch, rows, num_key_value_heads * head_size], rotated likewise.
        value: As key, never rotated.
        mask: What the node reads as attn_mask, or None.
        is_causal: Whether the node hides later tokens by itself.
        past_key: The graph input [batch, num_key_value_heads, past, head_size].
        past_value: As past_key.
        num_heads: Query heads.
        num_key_value_heads: Key and value heads; each serves num_heads / num_key_value_heads query heads.
        head_size: Width of a head.
        scale: What a product of query and key is multiplied by.
        softcap: Scores become softcap * tanh(score / softcap); 0 for none.
    """

    index: int
    node: ir.Node
    query: ir.Value
    key: ir.Value
    value: ir.Value
    mask: ir.Value | None
    is_causal: bool
    past_key: ir.Value
    past_value: ir.Value
    num_heads: int
    num_key_value_heads: int
    head_size: int
    scale: float
    softcap: float


@dataclass(frozen=True)
class Rotation:
    """The rotary embedding of a query or a key.

    Attributes:
        source: The query or key before it is rotated.
        cosine_rows: [batch, rows, rotated channels / 2].
        sine_rows: As cosine_rows.
        interleaved: Whether neighbouring channels are rotated together, not the two halves.
    """

    source: ir.Value
    cosine_rows: ir.Value
    sine_rows: ir.Value
    interleaved: bool


def read_attention_layers(graph: ir.Graph, lowering: str) -> list[AttentionLayer]:
    """Reads every attention node, in the graph's order.

    Args:
        graph: The base graph.
        lowering: The lowering's name, for what is refused.

    Raises:
        ExportError: There is none, or one is not in the form that this module knows.
    """
    nodes = [node for node in graph if node.op_type == "Attention" and node.domain == ""]
    if not nodes:
        raise ExportError(
            f"The {lowering} lowering found no Attention node in the graph: the model has no key/value cache that can rewind "
            "(recurrent or state-space models cannot be exported)."
        )
    return [_read_layer(index, node) for index, node in enumerate(nodes)]


def cache_geometry(layers: Sequence[AttentionLayer], lowering: str) -> tuple[int, int]:
    """Returns the key/value heads and the head size that all layers share.

    Raises:
        ExportError: They differ between layers, or between keys and values.
    """
    shapes = {(int(past.shape[1]), int(past.shape[3])) for layer in layers for past in (layer.past_key, layer.past_value)}
    if len(shapes) != 1:
        raise ExportError(
            f"The model's caches differ in heads or head size ({sorted(shapes)}), keys from values as in latent attention or "
            f"one layer from another, and the {lowering} lowering needs them alike: take another model."
        )
    return shapes.pop()


def read_rotation(value: ir.Value) -> Rotation | None:
    """Reads the rotary embedding that a query or key comes from, or None where it comes from something else."""
    producer = without_casts(value).producer()
    if producer is None or producer.op_type != "RotaryEmbedding" or producer.domain != "":
        return None
    source, cosine_rows, sine_rows = producer.inputs[:3]
    return Rotation(without_casts(source), cosine_rows, sine_rows, bool(producer.attributes.get_int("interleaved", 0)))


def without_casts(value: ir.Value) -> ir.Value:
    """Returns the value that a chain of Cast nodes began with."""
    while (producer := value.producer()) is not None and producer.op_type == "Cast":
        value = producer.inputs[0]
    return value


def _read_layer(index: int, node: ir.Node) -> AttentionLayer:
    attributes = node.attributes
    inputs = [*node.inputs, *[None] * 6][:6]
    query, key, value, mask, past_key, past_value = inputs
    if past_key is None or past_value is None or "q_num_heads" not in attributes:
        raise ExportError(
            f"Layer {index}'s attention '{node.name}' has no past, or its heads on an axis of their own: this form is not "
            "supported."
        )
    num_heads, num_key_value_heads = attributes.get_int("q_num_heads"), attributes.get_int("kv_num_heads")
    head_size = int(past_key.shape[3])
    return AttentionLayer(
        index=index,
        node=node,
        query=query,
        key=key,
        value=value,
        mask=mask,
        is_causal=bool(attributes.get_int("is_causal", 0)),
        past_key=past_key,
        past_value=past_value,
        num_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        head_size=head_size,
        scale=attributes.get_float("scale", 1 / math.sqrt(head_size)),
        softcap=attributes.get_float("softcap", 0.0),
    )
