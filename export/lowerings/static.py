"""The `static` lowering: standard operators of opset 24 only, on a cache of fixed size that is written in place.

For TensorRT 10.15 and later, TensorRT-RTX, and ONNX Runtime 1.26 and later. Keys and values go into the cache by
TensorScatter, and Attention reads the whole cache under an additive float mask: never is_causal with a mask, never a
boolean mask, never nonpad_kv_seqlen, each of which one of these engines refuses or reads otherwise. The cost of a pass
follows the cache's capacity, not what is in it.
"""

import onnx_ir as ir

from export.errors import ExportError
from export.graph_edit import replace_node

from .attention import AttentionGeometry, AttentionLayer, cache_geometry
from .finish import fix_shapes, pin_versions, remove_unused
from .positions import Positions, cache_capacity, insert_positions
from .standard import read_for_standard_operators
from .writer import Writer

OPSET = 24
IR_VERSION = 11
NAME = "static"


def lower_to_static_cache(
    model: ir.Model, context_length: int, *, element_type: ir.DataType = ir.DataType.FLOAT
) -> AttentionGeometry:
    """Rewrites a base graph in place to the `static` form.

    Args:
        model: The base graph, weights applied; its inputs are input_ids, attention_mask, position_ids and the caches.
        context_length: Tokens the graph must serve; the cache's axis is that, and room for padding rows.
        element_type: Of weights, activations and cache; see half_precision.

    Returns:
        The cache geometry that the manifest records.

    Raises:
        ExportError: A node of the graph has no counterpart in this lowering; the sentence names it.
    """
    graph = model.graph
    layers = read_for_standard_operators(graph, context_length, NAME, element_type)
    heads, head_size = cache_geometry(layers, NAME)
    if any(layer.softcap for layer in layers):
        raise ExportError("The model caps its attention scores, which TensorRT's attention does not: use --lowering primitive.")
    positions = insert_positions(graph, context_length, element_type)
    for layer in layers:
        _replace_attention(graph, layer, positions)
    fix_shapes(graph, cache_capacity(context_length))
    remove_unused(model)
    pin_versions(model, NAME, opset=OPSET, ir_version=IR_VERSION)
    return AttentionGeometry(len(layers), heads, head_size, cache_capacity=cache_capacity(context_length))


def _replace_attention(graph: ir.Graph, layer: AttentionLayer, positions: Positions) -> None:
    write = Writer(graph)

    def by_head(value: ir.Value, heads: int) -> ir.Value:
        """[1, rows, heads * head_size] to [1, heads, rows, head_size]."""
        return write.transpose(write.reshape(value, 0, 0, heads, layer.head_size), 0, 2, 1, 3)

    query = by_head(layer.query, layer.num_heads)
    keys, values = (
        write.op("TensorScatter", past, by_head(value, layer.num_key_value_heads), positions.past_length, axis=2)
        for past, value in ((layer.past_key, layer.key), (layer.past_value, layer.value))
    )
    name = f"layers.{layer.index}.attention"
    attended = write.op("Attention", query, keys, values, positions.mask, scale=layer.scale, name=name)
    output = write.reshape(write.transpose(attended, 0, 2, 1, 3), 0, 0, layer.num_heads * layer.head_size)
    replace_node(graph, layer.node, write.nodes, [output, keys, values])
