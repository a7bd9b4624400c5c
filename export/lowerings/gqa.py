"""The `gqa` lowering: a base graph's attention nodes become GroupQueryAttention on one buffer bound as past and present.

The result loads in ONNX Runtime 1.23 and later, on the CPU and CUDA. The rotation moves into the attention kernel where the
kernel can do it, and is written out in front of it elsewhere; whatever else reads positions gets them from the mask's length.

One thing is added: a spare row. The contrib attention kernel takes another path for a lone query row, whose sums round
differently. So attention, and attention alone, always sees one row more than the pass has: its last row once again.
Its output is dropped, and its key and value lie beyond the cache's length, where nothing reads.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from export.errors import ExportError
from export.graph_edit import CONTRIB, add_initializer, replace_node
from export.half_precision import to_half_precision

from .attention import AttentionGeometry, AttentionLayer, Rotation, cache_geometry, read_attention_layers, read_rotation
from .finish import pin_versions, remove_unused
from .masks import drop_causal_masks
from .positions import PADDING_ROWS, place_rows, require_positions
from .rotary import write_out_rotations
from .writer import Writer

OPSET = 21
IR_VERSION = 10
NAME = "gqa"
SPARE_ROWS = 1
# Rows of a rotary table that the kernel takes are multiples of so many wide.
_KERNEL_WIDTHS = 8
# The contrib kernels of norms and attention sum in float32 of their own accord.
FLOAT32_OPERATORS = frozenset({"LayerNormalization", "Softmax"})


def lower_to_group_query_attention(
    model: ir.Model, context_length: int, *, element_type: ir.DataType = ir.DataType.FLOAT
) -> AttentionGeometry:
    """Rewrites a base graph in place to the `gqa` form.

    Args:
        model: The base graph, weights applied; its inputs are input_ids, attention_mask, position_ids and the caches.
        context_length: Tokens the graph must serve; tables that are read by position are cut to it.
        element_type: Of weights, activations and cache; see half_precision.

    Returns:
        The cache geometry that the manifest records.

    Raises:
        ExportError: A node of the graph has no counterpart in this lowering; the sentence names it.
    """
    graph = model.graph
    drop_causal_masks(graph, context_length, NAME)
    if element_type != ir.DataType.FLOAT:
        to_half_precision(graph, FLOAT32_OPERATORS, element_type)
    layers = read_attention_layers(graph, NAME)
    heads, head_size = cache_geometry(layers, NAME)
    if head_size % 8:
        raise ExportError(f"The model's heads are {head_size} wide; ONNX Runtime's attention takes multiples of 8 only.")
    shared = _SharedInputs.insert(graph)
    for layer in layers:
        _replace_attention(graph, layer, context_length, shared)
    _rename_norms(graph)
    remove_unused(model)
    _place_rows(graph, shared, context_length)
    write_out_rotations(graph)
    remove_unused(model)
    pin_versions(model, NAME, opset=OPSET, ir_version=IR_VERSION, domains={CONTRIB}, known={"SimplifiedLayerNormalization"})
    return AttentionGeometry(len(layers), heads, head_size, spare_slots=SPARE_ROWS)


@dataclass(frozen=True)
class _SharedInputs:
    """Values every layer's attention reads: made once, before the first of them."""

    cached_tokens: ir.Value  # int32 [batch]: tokens cached after the pass, less one, the spare row counted
    total_tokens: ir.Value  # int32 []: the longest of the batch, the spare row counted
    rows_and_spare: ir.Value  # int64 [rows + 1]: 0, 1 .. rows - 1, rows - 1
    row_count: ir.Value  # int64 [1]
    text_length: ir.Value  # int64 [batch]: tokens after the pass, the spare row not counted

    @classmethod
    def insert(cls, graph: ir.Graph) -> "_SharedInputs":
        inputs = {value.name: value for value in graph.inputs}
        mask, token_ids = inputs["attention_mask"], inputs["input_ids"]
        nodes: list[ir.Node] = []

        def add(op: str, operands: list[ir.Value], name: str, **attributes: int) -> ir.Value:
            node = ir.node(op, operands, attributes=attributes or None)
            node.outputs[0].name = name
            nodes.append(node)
            return node.outputs[0]

        zero = add_initializer(graph, "spare.zero", np.array(0, np.int64))
        one = add_initializer(graph, "spare.one", np.array(1, np.int64))
        one_vector = add_initializer(graph, "spare.one_vector", np.array([1], np.int64))
        total = add("Shape", [mask], "spare.mask_length", start=1, end=2)
        total_and_spare = add("Add", [total, one_vector], "spare.total_length")
        total_scalar = add("Squeeze", [total_and_spare], "spare.total_scalar")
        total_tokens = add("Cast", [total_scalar], "total_tokens", to=ir.DataType.INT32)
        # One less than the tokens after the pass, and one more for the spare row: the mask's own sum.
        ones = add("ReduceSum", [mask, one_vector], "spare.mask_sum", keepdims=0)
        cached_tokens = add("Cast", [ones], "cached_tokens", to=ir.DataType.INT32)
        row_count = add("Shape", [token_ids], "row_count", start=1, end=2)
        row_scalar = add("Squeeze", [row_count], "row_scalar")
        rows = add("Range", [zero, row_scalar, one], "rows")
        last = add("Sub", [row_count, one_vector], "last_row")
        rows_and_spare = add("Concat", [rows, last], "rows_and_spare", axis=0)
        graph.insert_before(graph[0], nodes)
        return cls(cached_tokens, total_tokens, rows_and_spare, row_count, ones)


def _kernel_rotations(layer: AttentionLayer) -> tuple[Rotation, Rotation] | None:
    """Reads how the attention kernel can rotate a layer's queries and keys; None where the graph has to, or nothing does.

    The kernel rotates both alike, by tables that are constant, and whole blocks of 16 channels.
    """
    query, key = read_rotation(layer.query), read_rotation(layer.key)
    if query is None or key is None:
        return None
    if (query.cosine_rows, query.sine_rows, query.interleaved) != (key.cosine_rows, key.sine_rows, key.interleaved):
        return None
    tables = _looked_up(query.cosine_rows), _looked_up(query.sine_rows)
    if any(table is None or table.shape[1] % _KERNEL_WIDTHS for table in tables):
        return None
    return query, key


def _looked_up(rows: ir.Value) -> ir.Value | None:
    """Returns the constant table that rows are looked up in by position, or None where they come from something else."""
    gather = rows.producer()
    if gather is None or gather.op_type != "Gather" or gather.inputs[1].name != "position_ids":
        return None
    return gather.inputs[0] if gather.inputs[0].const_value is not None else None


def _kernel_table(graph: ir.Graph, rows: ir.Value, context_length: int) -> ir.Value:
    """Returns the table that `_looked_up` finds, as long as the kernel wants it; layers share it."""
    table = _looked_up(rows)
    assert table is not None, "_kernel_rotations looked"
    name = f"{table.name}.kernel"
    if name in graph.initializers:
        return graph.initializers[name]
    require_positions(table, context_length)
    # Padding rows and the spare row behind the very last token read further; what stands there never shows.
    values = np.pad(table.const_value.numpy()[:context_length], ((0, PADDING_ROWS + SPARE_ROWS), (0, 0)), mode="edge")
    return add_initializer(graph, name, values)


def _place_rows(graph: ir.Graph, shared: _SharedInputs, context_length: int) -> None:
    """Makes position_ids in the graph where something outside the attention kernel still reads them."""
    if any(value.name == "position_ids" for value in graph.inputs):
        write = Writer(graph)
        place_rows(graph, write, write.op("Sub", shared.text_length, shared.row_count), context_length)
        graph.insert_after(shared.rows_and_spare.producer(), write.nodes)


def _replace_attention(graph: ir.Graph, layer: AttentionLayer, context_length: int, shared: _SharedInputs) -> None:
    attributes = {"num_heads": layer.num_heads, "kv_num_heads": layer.num_key_value_heads, "scale": layer.scale}
    sources, tables = [layer.query, layer.key, layer.value], []
    if (rotations := _kernel_rotations(layer)) is not None:
        sources = [*(rotation.source for rotation in rotations), layer.value]
        rows = (rotations[0].cosine_rows, rotations[0].sine_rows)
        tables = [_kernel_table(graph, values, context_length) for values in rows]
        attributes |= {"do_rotary": 1, "rotary_interleaved": int(rotations[0].interleaved)}
    if layer.softcap:
        attributes["softcap"] = layer.softcap

    where = f"layers.{layer.index}.attention"
    before: list[ir.Node] = []
    with_spare: list[ir.Value] = []
    for name, source in zip(("query", "key", "value"), sources, strict=True):
        gather = ir.node("Gather", [source, shared.rows_and_spare], attributes={"axis": 1})
        gather.outputs[0].name = f"{where}.{name}_and_spare"
        before.append(gather)
        with_spare.append(gather.outputs[0])
    attention = ir.node(
        "GroupQueryAttention",
        [*with_spare, layer.past_key, layer.past_value, shared.cached_tokens, shared.total_tokens, *tables],
        attributes=attributes,
        domain=CONTRIB,
        num_outputs=3,
        name=where,
    )
    attention.outputs[0].name = f"{where}.rows_and_spare"
    zero = add_initializer(graph, "spare.zero_vector", np.array([0], np.int64))
    axis = graph.initializers["spare.one_vector"]
    drop_spare = ir.node("Slice", [attention.outputs[0], zero, shared.row_count, axis])
    drop_spare.outputs[0].name = f"{where}.output"
    replace_node(graph, layer.node, [*before, attention, drop_spare], [drop_spare.outputs[0], *attention.outputs[1:]])


def _rename_norms(graph: ir.Graph) -> None:
    # ONNX Runtime keeps the contrib ancestor of RMSNormalization in the default domain; it serves every opset.
    for node in graph:
        if node.op_type == "RMSNormalization" and node.domain == "":
            node.op_type = "SimplifiedLayerNormalization"
            node.attributes.add(ir.AttrInt64("stash_type", 1))
