"""The `primitive` lowering: attention, rotation and norms written out in operators that old parsers know.

For TensorRT 10.3 (JetPack 6), which has no attention, cache, rotary or RMS normalisation layers. The cache has a fixed size
and is written by ScatterND. Norms, rotations and softmax are computed in float32. Pinned to opset 21 because that is where
DequantizeLinear in blocks and INT4 came; every other operator is as old as opset 18.
"""

import numpy as np
import onnx_ir as ir

from export.graph_edit import add_initializer, replace_node

from .attention import AttentionGeometry, AttentionLayer, cache_geometry
from .finish import fix_shapes, pin_versions, remove_unused
from .norms import write_out_norms
from .positions import Positions, cache_capacity, insert_positions
from .rotary import write_out_rotations
from .standard import read_for_standard_operators
from .writer import Writer

OPSET = 21
IR_VERSION = 10
NAME = "primitive"


def lower_to_primitives(
    model: ir.Model, context_length: int, *, element_type: ir.DataType = ir.DataType.FLOAT
) -> AttentionGeometry:
    """Rewrites a base graph in place to the `primitive` form; arguments, result and errors as lower_to_static_cache has."""
    graph = model.graph
    layers = read_for_standard_operators(graph, context_length, NAME, element_type)
    heads, head_size = cache_geometry(layers, NAME)
    capacity = cache_capacity(context_length)
    positions = insert_positions(graph, context_length, ir.DataType.FLOAT)
    indices = _cache_indices(graph, positions, heads)
    for layer in layers:
        _write_out_attention(graph, layer, positions, indices)
    write_out_rotations(graph)
    write_out_norms(graph)
    fix_shapes(graph, capacity)
    remove_unused(model)
    pin_versions(model, NAME, opset=OPSET, ir_version=IR_VERSION)
    return AttentionGeometry(len(layers), heads, head_size, cache_capacity=capacity)


def _cache_indices(graph: ir.Graph, positions: Positions, heads: int) -> ir.Value:
    """int64 [1, heads, rows, 3]: where ScatterND puts the row of each head, as (batch, head, slot)."""
    write = Writer(graph)
    batch_and_head = np.zeros((1, heads, 1, 2), np.int64)
    batch_and_head[0, :, 0, 1] = np.arange(heads)
    numbers = add_initializer(graph, "attention.batch_and_head", batch_and_head)
    zeros = add_initializer(graph, "attention.head_zeros", np.zeros((1, heads, 1, 1), np.int64))
    slots = write.reshape(positions.slots, 1, 1, -1, 1)
    # Adding zeros stretches both parts to the same shape, without a shape computed in the graph.
    stretched = write.op("Add", numbers, write.op("Mul", slots, write.scalar(0, np.int64)))
    indices = write.op("Concat", stretched, write.op("Add", slots, zeros), axis=-1)
    indices.name = "cache_indices"
    graph.insert_after(positions.slots.producer(), write.nodes)
    return indices


def _write_out_attention(graph: ir.Graph, layer: AttentionLayer, positions: Positions, indices: ir.Value) -> None:
    """Attention of grouped heads without repeating the cache: the queries of a group stand behind each other as rows."""
    write = Writer(graph)
    heads, size = layer.num_key_value_heads, layer.head_size
    group = layer.num_heads // heads
    keys, values = (
        write.op("ScatterND", past, indices, write.transpose(write.reshape(value, 1, -1, heads, size), 0, 2, 1, 3))
        for past, value in ((layer.past_key, layer.key), (layer.past_value, layer.value))
    )
    query = write.op("Mul", layer.query, write.scalar(layer.scale, layer.past_key.dtype.numpy()))
    query = write.transpose(write.reshape(query, 1, -1, heads, group, size), 0, 2, 3, 1, 4)
    scores = write.op("MatMul", write.reshape(query, 1, heads, -1, size), write.transpose(keys, 0, 1, 3, 2))
    attended = write.op("MatMul", _weights(write, layer, scores, positions), values)
    attended = write.transpose(write.reshape(attended, 1, heads, group, -1, size), 0, 3, 1, 2, 4)
    output = write.reshape(attended, 1, -1, layer.num_heads * size)
    output.name = f"layers.{layer.index}.attention.output"
    replace_node(graph, layer.node, write.nodes, [output, keys, values])


def _weights(write: Writer, layer: AttentionLayer, scores: ir.Value, positions: Positions) -> ir.Value:
    """Scores to weights by way of float32, both [1, key_value_heads, group * rows, capacity] in the cache's element type."""
    element_type, heads = layer.past_key.dtype, layer.num_key_value_heads
    if element_type != ir.DataType.FLOAT:
        scores = write.cast(scores, ir.DataType.FLOAT)
    if layer.softcap:
        softcap = write.scalar(layer.softcap, np.float32)
        scores = write.op("Mul", write.op("Tanh", write.op("Div", scores, softcap)), softcap)
    by_row = write.reshape(scores, 1, heads, layer.num_heads // heads, -1, positions.capacity)
    weights = write.op("Softmax", write.op("Add", by_row, positions.mask), axis=-1)
    weights = write.reshape(weights, 1, heads, -1, positions.capacity)
    return weights if element_type == ir.DataType.FLOAT else write.cast(weights, element_type)
