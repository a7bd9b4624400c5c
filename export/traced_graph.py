"""Reads a traced graph, and puts in order what a tracer leaves: idle casts, sizes read from anywhere, norms in parts."""

import numpy as np
import onnx_ir as ir

from .errors import ExportError
from .graph_edit import add_initializer, replace_node
from .lowerings.writer import Writer


def named(node: ir.Node | None) -> str:
    """Names a node in a sentence; None is where there is no node, or no single one."""
    return "something else" if node is None else f"{node.op_type} '{node.name}'"


def producer(value: ir.Value, *op_types: str) -> ir.Node | None:
    """Returns the node that gives a value; None where it is none of these operators."""
    node = value.producer()
    return node if node is not None and node.op_type in op_types else None


def sole_reader(value: ir.Value) -> ir.Node | None:
    """Returns the one node that reads a value; None where several or none do."""
    readers = {node for node, _ in value.uses()}
    return readers.pop() if len(readers) == 1 else None


def constant(value: ir.Value | None) -> np.ndarray | None:
    """Returns the array that a value always is, or None."""
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def number(value: ir.Value | None) -> float | None:
    """Returns the one number that a value always is, or None."""
    array = constant(value)
    return array.item() if array is not None and array.size == 1 else None


def width(value: ir.Value, axis: int) -> int | None:
    """Returns how wide an axis always is, or None."""
    size = None if value.shape is None else value.shape[axis]
    # The inference of shapes leaves a number that it had to solve for as a symbol, "4".
    text = str(size.value) if isinstance(size, ir.SymbolicDim) else str(size)
    return int(text) if text.isdecimal() else None


def remove_idle_nodes(graph: ir.Graph) -> None:
    """Removes each Identity, and each Cast to the type that its input has; types must be known."""
    for node in list(graph):
        is_idle = node.op_type == "Identity" or (
            node.op_type == "Cast" and node.inputs[0].dtype == node.attributes.get_int("to")
        )
        if is_idle and not node.outputs[0].is_graph_output():
            replace_node(graph, node, [], node.inputs)


def read_sizes_from_inputs(graph: ir.Graph) -> None:
    """Lets batch, rows and tokens be read from input_ids and attention_mask, whichever value a tracer read them from.

    What depends on sizes alone then depends on these inputs alone, and neither on caches nor on activations. Positions that
    the graph counts itself, from the number of cached tokens on, become an input.

    Args:
        graph: Its shapes inferred, so that equal sizes have equal names; its inputs input_ids, attention_mask, and at least
            one cache of [batch, heads, past, head_size].
    """
    inputs = {value.name: value for value in graph.inputs}
    tokens, mask = inputs["input_ids"], inputs["attention_mask"]
    cache = next(value for value in graph.inputs if len(value.shape) == 4)
    write = Writer(graph)

    def size(value: ir.Value, axis: int) -> ir.Value:
        return write.op("Gather", write.op("Shape", value), write.scalar(axis, np.int64), axis=0)

    sizes = {str(value.shape[axis]): size(value, axis) for value, axis in ((tokens, 0), (tokens, 1), (mask, 1))}
    rows, total = (sizes[str(value.shape[1])] for value in (tokens, mask))
    sizes[str(cache.shape[2])] = write.op("Sub", total, rows)
    readings = [node for node in graph if node.op_type == "Gather" and producer(node.inputs[0], "Shape")]
    graph.insert_before(graph[0], write.nodes)
    for reading in readings:
        measured = reading.inputs[0].producer().inputs[0]
        axis = constant(reading.inputs[1])
        if measured in (tokens, mask, inputs.get("position_ids")) or measured.shape is None or axis is None or axis.size != 1:
            continue
        known = _size(write, measured, axis, sizes)
        if known is not None:
            ir.convenience.replace_all_uses_with(reading.outputs[0], known)
    if "position_ids" not in inputs:
        _take_positions(graph, tokens, sizes[str(cache.shape[2])])


def _size(write: Writer, value: ir.Value, axis: np.ndarray, sizes: dict[str, ir.Value]) -> ir.Value | None:
    """Returns how wide an axis is, from a constant or from `sizes`, in the shape of the constant that names the axis."""
    fixed = width(value, axis.item())
    if fixed is not None:
        return write.integers(fixed) if axis.ndim else write.scalar(fixed, np.int64)
    return None if axis.ndim else sizes.get(str(value.shape[axis.item()]))


def _take_positions(graph: ir.Graph, tokens: ir.Value, past: ir.Value) -> None:
    rows = tokens.shape[1]
    counted = [
        node
        for node in graph
        if node.op_type == "Range"
        and node.inputs[0] is past
        and number(node.inputs[2]) == 1
        and node.outputs[0].shape == (rows,)
    ]
    if not counted:
        return
    position_ids = ir.Value(name="position_ids", shape=tokens.shape, type=tokens.type)
    graph.inputs.append(position_ids)
    write = Writer(graph)
    positions = write.reshape(position_ids, -1)
    graph.insert_before(graph[0], write.nodes)
    for node in counted:
        replace_node(graph, node, [], [positions])


def fix_reshapes(graph: ir.Graph) -> None:
    """Writes constants in the place of shapes that are computed, where all they change is known beforehand."""
    for node in graph:
        if node.op_type != "Reshape" or constant(node.inputs[1]) is not None or node.attributes.get_int("allowzero", 0):
            continue
        before, after = node.inputs[0].shape, node.outputs[0].shape
        if before is None or after is None:
            continue
        shape = [
            0 if axis < len(before) and size == before[axis] else width(node.outputs[0], axis)
            for axis, size in enumerate(after)
        ]
        if None not in shape:
            node.replace_input_with(1, Writer(graph).integers(*shape))


def fuse_norms(graph: ir.Graph) -> None:
    """Puts RMSNormalization in the place of x / sqrt(mean(x ** 2) + epsilon) * weight (Zhang and Sennrich 2019).

    Raises:
        ExportError: There is a mean that is no part of such a norm.
    """
    for node in list(graph):
        if node.op_type == "ReduceMean":
            _fuse_norm(graph, node)


def _fuse_norm(graph: ir.Graph, mean: ir.Node) -> None:
    square = producer(mean.inputs[0], "Pow", "Mul")
    source = None if square is None else square.inputs[0]
    squares = square is not None and (square.inputs[1] is source if square.op_type == "Mul" else number(square.inputs[1]) == 2)
    total = sole_reader(mean.outputs[0])
    epsilon = None if total is None or total.op_type != "Add" else next(filter(None, map(number, total.inputs)), None)
    root = None if total is None else sole_reader(total.outputs[0])
    divided = None if root is None or root.op_type != "Sqrt" else _divided(root.outputs[0], source)
    if not squares or epsilon is None or divided is None or not _over_last_axis(mean):
        raise ExportError(f"{named(mean)} is no part of x / sqrt(mean(x ** 2) + epsilon).")
    scaled = sole_reader(divided.outputs[0])
    weight = None if scaled is None or scaled.op_type != "Mul" else _other(scaled, divided.outputs[0])
    if weight is None or weight.shape is None or len(weight.shape) != 1:
        scaled, weight = divided, _ones(graph, int(source.shape[-1]))
    norm = ir.node("RMSNormalization", [source, weight], attributes={"axis": -1, "epsilon": epsilon}, name=scaled.name)
    replace_node(graph, scaled, [norm], norm.outputs)


def _over_last_axis(mean: ir.Node) -> bool:
    axes = constant(mean.inputs[1]) if len(mean.inputs) > 1 else mean.attributes.get_ints("axes", ())
    return axes is not None and list(axes) == [-1] and mean.attributes.get_int("keepdims", 1) == 1


def _divided(root: ir.Value, source: ir.Value | None) -> ir.Node | None:
    """Returns the node that gives source / root, in one step or by way of 1 / root."""
    node = sole_reader(root)
    if node is None or node.op_type not in ("Div", "Reciprocal"):
        return None
    if node.op_type == "Div" and node.inputs[1] is root and node.inputs[0] is source:
        return node
    if node.op_type == "Div" and (number(node.inputs[0]) != 1 or node.inputs[1] is not root):
        return None
    product = sole_reader(node.outputs[0])
    divides = product is not None and product.op_type == "Mul" and _other(product, node.outputs[0]) is source
    return product if divides else None


def _other(node: ir.Node, value: ir.Value) -> ir.Value:
    first, second = node.inputs
    return second if first is value else first


def _ones(graph: ir.Graph, width: int) -> ir.Value:
    return add_initializer(graph, f"ones.{width}", np.ones(width, np.float32))
