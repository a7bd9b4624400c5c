"""The `gqa` lowering: a base graph's attention nodes become GroupQueryAttention on one buffer bound as past and present.

The base graph is what mobius builds: opset 24, one Attention node a layer with past and present, RotaryEmbedding reading
rows of a table, RMSNormalization. This pass looks at those nodes only; it knows no architecture, and what it does not
recognise it refuses by name. The result loads in ONNX Runtime 1.23 and later (opset 21, IR 10).

One thing is added: a spare row. The contrib attention kernel takes another path for a lone query row, whose sums round
differently. So attention, and attention alone, always sees one row more than the pass has: its last row once again.
Its output is dropped, and its key and value lie beyond the cache's length, where nothing reads.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from .errors import ExportError
from .graph_edit import add_initializer, replace_node

OPSET = 21
IR_VERSION = 10
CONTRIB = "com.microsoft"
SPARE_ROWS = 1

# What a plain causal mask is made of in the base graph: the padding mask, stretched. Anything else there
# (a comparison, a Where, a bias) would be a window, an ALiBi slope or a prefix, which this lowering would lose.
_PLAIN_MASK_OPS = frozenset({"Cast", "Unsqueeze", "Expand", "Shape", "Concat"})


@dataclass(frozen=True)
class AttentionGeometry:
    """What a graph's attention says of its cache.

    Attributes:
        num_layers: Attention nodes, so pairs of key and value caches.
        num_key_value_heads: Heads in a cache.
        head_size: Width of a head.
        position_rows: Rows of the rotary table, so the longest context the graph can be asked for.
    """

    num_layers: int
    num_key_value_heads: int
    head_size: int
    position_rows: int


def lower_to_group_query_attention(model: ir.Model, context_length: int) -> AttentionGeometry:
    """Rewrites a base graph in place to the `gqa` form.

    Args:
        model: The base graph, weights applied; its inputs are input_ids, attention_mask, position_ids and the caches.
        context_length: Tokens the graph must serve; the rotary tables are cut to it (plus the spare row).

    Returns:
        The cache geometry that the manifest records.

    Raises:
        ExportError: A node of the graph has no counterpart in this lowering; the sentence names it.
    """
    graph = model.graph
    attentions = [node for node in graph if node.op_type == "Attention" and node.domain == ""]
    if not attentions:
        raise ExportError(
            "The gqa lowering found no Attention node in the graph: the model has no key/value cache that can rewind "
            "(recurrent or state-space models cannot be exported)."
        )
    shared = _SharedInputs.insert(graph, attentions[0], context_length)
    geometry = _geometry(attentions, shared.position_rows)
    for layer, node in enumerate(attentions):
        _replace_attention(graph, node, layer, shared)
    _lower_norms(graph)
    for function in list(model.functions):
        del model.functions[function]
    _remove_unused(graph)
    _pin_versions(model)
    return geometry


@dataclass(frozen=True)
class _SharedInputs:
    """Values every layer's attention reads: made once, before the first of them."""

    cached_tokens: ir.Value  # int32 [batch]: tokens cached after the pass, less one, the spare row counted
    total_tokens: ir.Value  # int32 []: the longest of the batch, the spare row counted
    rows_and_spare: ir.Value  # int64 [rows + 1]: 0, 1 .. rows - 1, rows - 1
    row_count: ir.Value  # int64 [1]
    cosine_table: ir.Value  # float [context + 1, head_size / 2]
    sine_table: ir.Value
    cosine_rows: ir.Value  # the base graph's own Gather of the table, to check each layer against
    sine_rows: ir.Value
    position_rows: int

    @classmethod
    def insert(cls, graph: ir.Graph, first: ir.Node, context_length: int) -> "_SharedInputs":
        inputs = {value.name: value for value in graph.inputs}
        mask, token_ids = inputs["attention_mask"], inputs["input_ids"]
        rotary = _rotary_of(first.inputs[0], first, layer=0)
        cosine_rows, sine_rows = rotary.inputs[1], rotary.inputs[2]
        cosine_table, position_rows = _position_table(graph, cosine_rows, "rotary.cosine_table", context_length)
        sine_table, _ = _position_table(graph, sine_rows, "rotary.sine_table", context_length)

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
        return cls(
            cached_tokens,
            total_tokens,
            rows_and_spare,
            row_count,
            cosine_table,
            sine_table,
            cosine_rows,
            sine_rows,
            position_rows,
        )


def _rotary_of(value: ir.Value | None, attention: ir.Node, layer: int) -> ir.Node:
    producer = value.producer() if value is not None else None
    if producer is None or producer.op_type != "RotaryEmbedding" or producer.domain != "":
        found = "a graph input" if producer is None else f"{producer.op_type} node '{producer.name}'"
        raise ExportError(
            f"The gqa lowering needs queries and keys that come from RotaryEmbedding; layer {layer}'s attention "
            f"'{attention.name}' reads {found} instead. This position scheme is not supported."
        )
    return producer


def _position_table(graph: ir.Graph, rows: ir.Value, name: str, context_length: int) -> tuple[ir.Value, int]:
    gather = rows.producer()
    table = gather.inputs[0] if gather is not None and gather.op_type == "Gather" else None
    if table is None or table.const_value is None:
        raise ExportError(
            f"The gqa lowering needs a constant rotary table indexed by position; '{rows.name}' is computed in the graph "
            "(dynamic RoPE scaling is not supported)."
        )
    values = table.const_value.numpy()
    if context_length > len(values):
        raise ExportError(
            f"The model's rotary table has {len(values)} positions, and {context_length} were asked for: "
            f"pass --max-length {len(values)} or less."
        )
    if values.shape[1] % 8:
        raise ExportError(
            f"The model rotates {2 * values.shape[1]} channels of a head, and ONNX Runtime's attention rotates multiples of "
            "16 only: it cannot be exported in this lowering."
        )
    # The spare row of the very last token reads one position more; what stands there never shows.
    values = np.concatenate([values[:context_length], values[context_length - 1 : context_length]])
    return add_initializer(graph, name, values), context_length


def _geometry(attentions: list[ir.Node], position_rows: int) -> AttentionGeometry:
    shapes = {(past.shape[1], past.shape[3]) for node in attentions for past in (node.inputs[4], node.inputs[5])}
    if len(shapes) != 1:
        raise ExportError(
            f"The layers' caches differ in heads or head size ({sorted(shapes)}): the gqa lowering needs them alike."
        )
    heads, head_size = shapes.pop()
    if head_size % 8:
        raise ExportError(f"The model's heads are {head_size} wide; ONNX Runtime's attention takes multiples of 8 only.")
    return AttentionGeometry(len(attentions), int(heads), int(head_size), position_rows)


def _replace_attention(graph: ir.Graph, node: ir.Node, layer: int, shared: _SharedInputs) -> None:
    query, key, value, bias, past_key, past_value = node.inputs[:6]
    _require_plain_mask(node, bias, layer)
    rotaries = [_rotary_of(value, node, layer) for value in (query, key)]
    for rotary in rotaries:
        if rotary.inputs[1] is not shared.cosine_rows or rotary.inputs[2] is not shared.sine_rows:
            raise ExportError(
                f"Layer {layer}'s attention uses a rotary table of its own ('{rotary.inputs[1].name}'); "
                "the gqa lowering serves models whose layers share one."
            )
    # Softcapping and scaling carry over; the rotation moves into the attention kernel.
    attributes = {
        "num_heads": node.attributes.get_int("q_num_heads"),
        "kv_num_heads": node.attributes.get_int("kv_num_heads"),
        "scale": node.attributes.get_float("scale"),
        "do_rotary": 1,
        "rotary_interleaved": rotaries[0].attributes.get_int("interleaved", 0),
    }
    if softcap := node.attributes.get_float("softcap", 0.0):
        attributes["softcap"] = softcap

    before: list[ir.Node] = []
    with_spare: list[ir.Value] = []
    for name, source in zip(("query", "key", "value"), (rotaries[0].inputs[0], rotaries[1].inputs[0], value), strict=True):
        gather = ir.node("Gather", [source, shared.rows_and_spare], attributes={"axis": 1})
        gather.outputs[0].name = f"layers.{layer}.attention.{name}_and_spare"
        before.append(gather)
        with_spare.append(gather.outputs[0])
    attention = ir.node(
        "GroupQueryAttention",
        [*with_spare, past_key, past_value, shared.cached_tokens, shared.total_tokens, shared.cosine_table, shared.sine_table],
        attributes=attributes,
        domain=CONTRIB,
        num_outputs=3,
        name=f"layers.{layer}.attention",
    )
    attention.outputs[0].name = f"layers.{layer}.attention.rows_and_spare"
    zero = add_initializer(graph, "spare.zero_vector", np.array([0], np.int64))
    axis = graph.initializers["spare.one_vector"]
    drop_spare = ir.node("Slice", [attention.outputs[0], zero, shared.row_count, axis])
    drop_spare.outputs[0].name = f"layers.{layer}.attention.output"
    replace_node(graph, node, [*before, attention, drop_spare], [drop_spare.outputs[0], *attention.outputs[1:]])


def _require_plain_mask(node: ir.Node, bias: ir.Value | None, layer: int) -> None:
    for ancestor in _ancestors(bias):
        if ancestor.op_type not in _PLAIN_MASK_OPS:
            raise ExportError(
                f"Layer {layer}'s attention mask is made with {ancestor.op_type} ('{ancestor.name}'), so it may hold a sliding "
                "window, a prefix or a positional bias; the gqa lowering keeps plain causal masks only."
            )
    if not node.attributes.get_int("is_causal", 0):
        raise ExportError(f"Layer {layer}'s attention '{node.name}' is not causal: only decoders can be exported.")


def _ancestors(value: ir.Value | None) -> Iterator[ir.Node]:
    waiting, seen = [value], set()
    while waiting:
        current = waiting.pop()
        producer = current.producer() if current is not None else None
        if producer is not None and producer not in seen:
            seen.add(producer)
            yield producer
            waiting.extend(producer.inputs)


def _lower_norms(graph: ir.Graph) -> None:
    # ONNX Runtime keeps the contrib ancestor of RMSNormalization in the default domain; it serves every opset.
    for node in graph:
        if node.op_type == "RMSNormalization" and node.domain == "":
            node.op_type = "SimplifiedLayerNormalization"
            node.attributes.add(ir.AttrInt64("stash_type", 1))


def _remove_unused(graph: ir.Graph) -> None:
    for node in reversed(list(graph)):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)
    for name in [name for name, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]
    for value in [value for value in graph.inputs if not value.uses()]:
        graph.inputs.remove(value)


def _pin_versions(model: ir.Model) -> None:
    for node in model.graph:
        if node.domain == "" and node.op_type != "SimplifiedLayerNormalization":
            try:
                onnx.defs.get_schema(node.op_type, OPSET, "")
            except onnx.defs.SchemaError as error:
                raise ExportError(
                    f"The graph's operator {node.op_type} ('{node.name}') is newer than opset {OPSET}, "
                    "which the gqa lowering is pinned to."
                ) from error
        node.version = None
    model.opset_imports.clear()
    model.opset_imports.update({"": OPSET, CONTRIB: 1})
    model.ir_version = IR_VERSION
