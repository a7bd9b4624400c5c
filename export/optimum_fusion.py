"""From the small operators that optimum's tracer writes back to the base graph: Attention, RotaryEmbedding, RMSNormalization.

Where that can be done, what stands between two points of the graph is not read but computed: masks, rotations. No architecture
is named. The first thing that is not recognised ends the pass, and has its name in the error.
"""

import onnx_ir as ir
from onnx_shape_inference import infer_symbolic_shapes

from .errors import ExportError
from .graph_edit import CONTRIB, add_initializer, replace_node
from .lowerings.finish import remove_unread_nodes
from .lowerings.masks import drop_causal_masks
from .lowerings.writer import Writer
from .rotation_probe import Rotation, RotationProbe
from .traced_attention import TracedAttention, read_attention, side_by_side, split_heads
from .traced_graph import fix_reshapes, fuse_norms, named, read_sizes_from_inputs, remove_idle_nodes, width

_BASE_OPSET = 24


def fuse_decoder(model: ir.Model, context_length: int) -> None:
    """Rewrites a decoder in place to the base graph that the lowerings read; where that fails it is left half rewritten.

    Args:
        model: float32, its cache growing by Concat: inputs past_key_values.N.key and .value, input_ids, attention_mask,
            and maybe position_ids.
        context_length: Tokens it must serve: rotary tables get as many rows, and a window as long never hides anything.

    Raises:
        ExportError: Something is not recognised; the sentence names the first such thing.
    """
    graph = model.graph
    caches = _caches(graph)
    try:
        infer_symbolic_shapes(model)
    except ValueError as error:
        raise ExportError(f"The shapes of its values cannot be told ({error}).") from error
    remove_idle_nodes(graph)
    read_sizes_from_inputs(graph)
    fix_reshapes(graph)
    fuse_norms(graph)
    remove_unread_nodes(graph)
    position_ids = next((value for value in graph.inputs if value.name == "position_ids"), None)
    if position_ids is None:
        raise ExportError(
            "There is no input position_ids, nor does the graph count positions from the number of cached tokens."
        )
    rotations = _Rotations(graph, position_ids, context_length)
    attentions = [
        _replace(graph, read_attention(index, past_key, past_value), rotations)
        for index, (past_key, past_value) in enumerate(caches)
    ]
    remove_unread_nodes(graph)
    for index, attention in enumerate(attentions):
        if readers := [node for cache in attention.outputs[1:] for node, _ in cache.uses()]:
            raise ExportError(f"Layer {index}'s cache is read outside its attention, by {named(readers[0])}.")
    model.opset_imports.clear()
    model.opset_imports.update({"": _BASE_OPSET, CONTRIB: 1})
    infer_symbolic_shapes(model)
    drop_causal_masks(graph, context_length, "gqa")
    for attention in attentions:
        attention.attributes.add(ir.AttrInt64("is_causal", 1))


def _caches(graph: ir.Graph) -> list[tuple[ir.Value, ir.Value]]:
    """Returns the inputs with past keys and values, layer by layer."""
    inputs = {value.name: value for value in graph.inputs}
    keys, values = ([name for name in inputs if name.endswith(f".{kind}")] for kind in ("key", "value"))
    if not keys or len(keys) != len(values) or not {"input_ids", "attention_mask"} <= inputs.keys():
        raise ExportError(f"Its inputs are {', '.join(list(inputs)[:4])}, not those of a decoder with keys and values cached.")
    return [(inputs[key], inputs[value]) for key, value in zip(keys, values, strict=True)]


class _Rotations:
    """The rotary embeddings of a graph: equal ones share their tables, and the rows that are looked up in them."""

    def __init__(self, graph: ir.Graph, position_ids: ir.Value, context_length: int) -> None:
        self._graph, self._position_ids, self._context_length = graph, position_ids, context_length
        self._known: list[tuple[Rotation, ir.Value, ir.Value]] = []

    def find(self, source: ir.Value, rotated: ir.Value, where: str) -> tuple[Rotation, ir.Value, ir.Value]:
        """Returns a rotation, and the rows of its tables for the rows of a pass: float [batch, rows, pairs]."""
        probe = RotationProbe(self._graph, source, rotated, self._position_ids, where)
        for known in self._known:
            if probe.agrees(known[0]):
                return known
        rotation = probe.read(self._context_length)
        write = Writer(self._graph)
        tables = {"cosine": rotation.cosine, "sine": rotation.sine}
        cosine, sine = (
            write.op("Gather", add_initializer(self._graph, f"rotary.{len(self._known)}.{name}", table), self._position_ids)
            for name, table in tables.items()
        )
        self._graph.insert_before(self._graph[0], write.nodes)
        self._known.append((rotation, cosine, sine))
        return self._known[-1]


def _replace(graph: ir.Graph, layer: TracedAttention, rotations: _Rotations) -> ir.Node:
    """Returns the Attention node with past and present that it puts in a layer's place; what was there is left unread."""
    write = Writer(graph)
    operands: list[ir.Value] = []
    heads: list[int] = []
    for name, value in (("query", layer.query), ("key", layer.key), ("value", layer.value)):
        where = f"Layer {layer.index}'s {name}"
        source = split_heads(value, width(layer.past_key, 3), where)
        heads.append(width(source, 1))
        operands.append(side_by_side(write, source))
        if source is not value:
            found = rotations.find(source, value, where)
            operands[-1] = _rotated(write, operands[-1], found, heads[-1], width(source, 3))
    attention = ir.node(
        "Attention",
        [*operands, layer.mask, layer.past_key, layer.past_value],
        attributes={"q_num_heads": heads[0], "kv_num_heads": heads[1], "scale": layer.scale},
        num_outputs=3,
        name=layer.output.name,
    )
    replace_node(graph, layer.output, [*write.nodes, attention], attention.outputs[:1])
    replace_node(graph, layer.present_key, [], attention.outputs[1:2])
    replace_node(graph, layer.present_value, [], attention.outputs[2:])
    return attention


def _rotated(write: Writer, rows: ir.Value, found: tuple[Rotation, ir.Value, ir.Value], heads: int, head_size: int) -> ir.Value:
    rotation, cosine, sine = found
    channels = 2 * rotation.cosine.shape[1]
    return write.op(
        "RotaryEmbedding",
        rows,
        cosine,
        sine,
        num_heads=heads,
        interleaved=int(rotation.interleaved),
        rotary_embedding_dim=channels if channels < head_size else 0,  # 0 is all
    )
