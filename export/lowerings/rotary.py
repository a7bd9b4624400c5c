"""RotaryEmbedding written out in slices, products and sums."""

import onnx_ir as ir

from export.graph_edit import replace_node

from .writer import Writer


def write_out_rotations(graph: ir.Graph) -> None:
    """Replaces each RotaryEmbedding by first * cosine - second * sine and second * cosine + first * sine.

    First and second are the halves of the rotated channels, or the even and the odd ones where the model interleaves them.
    """
    for node in list(graph):
        if node.op_type == "RotaryEmbedding" and node.domain == "":
            _write_out(graph, node)


def _write_out(graph: ir.Graph, node: ir.Node) -> None:
    source, cosine, sine = node.inputs[:3]
    heads = node.attributes.get_int("num_heads")
    head_size, half = int(source.shape[-1]) // heads, int(cosine.shape[-1])
    interleaved = bool(node.attributes.get_int("interleaved", 0))
    write = Writer(graph)

    def channels(start: int, stop: int, step: int = 1) -> ir.Value:
        bounds = (write.integers(start), write.integers(stop), write.integers(3), write.integers(step))
        return write.op("Slice", by_head, *bounds)

    by_head = write.reshape(source, 0, 0, heads, head_size)
    if interleaved:
        first, second = channels(0, 2 * half, 2), channels(1, 2 * half, 2)
    else:
        first, second = channels(0, half), channels(half, 2 * half)
    # One position's row serves all heads.
    cosine, sine = (write.op("Unsqueeze", rows, write.integers(2)) for rows in (cosine, sine))
    parts = [
        write.op("Sub", write.op("Mul", first, cosine), write.op("Mul", second, sine)),
        write.op("Add", write.op("Mul", second, cosine), write.op("Mul", first, sine)),
    ]
    if interleaved:
        pairs = write.op("Concat", *(write.op("Unsqueeze", part, write.integers(-1)) for part in parts), axis=-1)
        parts = [write.reshape(pairs, 0, 0, heads, 2 * half)]
    if 2 * half < head_size:
        parts.append(channels(2 * half, head_size))
    joined = write.op("Concat", *parts, axis=-1) if len(parts) > 1 else parts[0]
    result = write.reshape(joined, 0, 0, heads * head_size)
    replace_node(graph, node, write.nodes, [result])
