"""Reads one layer's attention in a traced graph: from the cache forward to the output, and back over the Softmax.

The forms are those that transformers' eager and sdpa attention leave in a trace. Nothing here knows an architecture; what is
not recognised is refused by name. What a mask hides and how a rotation turns is not read here: lowerings.masks and
rotation_probe compute it.
"""

from dataclasses import dataclass

import onnx_ir as ir

from .errors import ExportError
from .lowerings.writer import Writer
from .traced_graph import constant, named, number, producer, sole_reader, width

_HEADS_BEFORE_ROWS = [0, 2, 1, 3]
_REPEATS_HEADS = ("Unsqueeze", "Expand", "Reshape")


@dataclass(frozen=True)
class TracedAttention:
    """One layer's attention in small operators.

    Attributes:
        index: The layer's number from 0.
        query: float [batch, heads, rows, head_size], rotated where the model rotates.
        key: As query, of the key/value heads, as the cache gets it.
        value: As key.
        past_key: The graph input.
        past_value: The graph input.
        present_key: The Concat that gives the longer cache.
        present_value: As present_key.
        mask: What is added to the scores, or None.
        scale: What they are multiplied by before.
        output: The Reshape to [batch, rows, heads * head_size].
    """

    index: int
    query: ir.Value
    key: ir.Value
    value: ir.Value
    past_key: ir.Value
    past_value: ir.Value
    present_key: ir.Node
    present_value: ir.Node
    mask: ir.Value | None
    scale: float
    output: ir.Node


def read_attention(index: int, past_key: ir.Value, past_value: ir.Value) -> TracedAttention:
    """Reads the attention that two caches belong to.

    Args:
        index: The layer's number from 0.
        past_key: A graph input [batch, key/value heads, past, head_size].
        past_value: As past_key.

    Raises:
        ExportError: It is not in the form that this module knows; the sentence names what is in the way.
    """
    where = f"Layer {index}'s attention"
    present_value = _grown_cache(past_value, where)
    values, product = present_value.outputs[0], sole_reader(present_value.outputs[0])
    while product is not None and product.op_type in _REPEATS_HEADS:
        values, product = product.outputs[0], sole_reader(product.outputs[0])
    if product is None or product.op_type != "MatMul" or _unrepeated(values) is not present_value.outputs[0]:
        raise ExportError(f"{where} reads its values by {named(product)}.")
    softmax = _softmax(product.inputs[0])
    if softmax is None or softmax.attributes.get_int("axis", -1) not in (-1, 3):
        raise ExportError(f"{where} weighs its values by {named(product.inputs[0].producer())}, not by a plain Softmax.")
    scores, scale, mask = _scores(softmax.inputs[0], where)
    query, query_scale = _unscaled(scores.inputs[0])
    keys, key_scale = _unscaled(scores.inputs[1])
    transposed = producer(keys, "Transpose")
    present_key = _grown_cache(past_key, where)
    if (
        transposed is None
        or _order(transposed) != [0, 1, 3, 2]
        or _unrepeated(transposed.inputs[0]) is not present_key.outputs[0]
    ):
        raise ExportError(f"{where} reads its keys by {named(keys.producer())}.")
    by_rows = sole_reader(product.outputs[0])
    output = None if by_rows is None or _order(by_rows) != _HEADS_BEFORE_ROWS else sole_reader(by_rows.outputs[0])
    if output is None or output.op_type != "Reshape" or len(output.outputs[0].shape or ()) != 3:
        raise ExportError(f"{where} does not put its heads beside each other again ({named(output or by_rows)}).")
    return TracedAttention(
        index=index,
        query=query,
        key=present_key.inputs[1],
        value=present_value.inputs[1],
        past_key=past_key,
        past_value=past_value,
        present_key=present_key,
        present_value=present_value,
        mask=mask,
        scale=scale * query_scale * key_scale,
        output=output,
    )


def _grown_cache(past: ir.Value, where: str) -> ir.Node:
    """Returns the Concat of a cache and what a pass adds to it."""
    node = sole_reader(past)
    is_grown = node is not None and node.op_type == "Concat" and node.attributes.get_int("axis") in (-2, 2)
    if not is_grown or len(node.inputs) != 2 or node.inputs[0] is not past or not node.outputs[0].is_graph_output():
        raise ExportError(f"{where} does not put its new keys and values behind {past.name}, which {named(node)} reads.")
    return node


def _softmax(weights: ir.Value) -> ir.Node | None:
    """Returns the Softmax of weights, seen through a guard that turns NaN to 0: rows that see nothing, which are none here."""
    guard = producer(weights, "Where")
    if guard is not None:
        test = producer(guard.inputs[0], "IsNaN")
        if test is None or test.inputs[0] is not guard.inputs[2] or number(guard.inputs[1]) != 0:
            return None
        weights = guard.inputs[2]
    return producer(weights, "Softmax")


def _scores(value: ir.Value, where: str) -> tuple[ir.Node, float, ir.Value | None]:
    """Returns the product of query and keys, what it is multiplied by, and what is added to it then."""
    addition = producer(value, "Add")
    operands = (value,) if addition is None else addition.inputs
    for index, operand in enumerate(operands):
        product, scale = _unscaled(operand)
        if (node := producer(product, "MatMul")) is not None:
            return node, scale, operands[1 - index] if len(operands) == 2 else None
    raise ExportError(f"{where} has scores from {named(_unscaled(operands[0])[0].producer())}, not from query and keys.")


def _unscaled(value: ir.Value) -> tuple[ir.Value, float]:
    """Returns a value before it was multiplied or divided by a constant number, and that number."""
    node = producer(value, "Mul", "Div")
    if node is None:
        return value, 1.0
    first, second = node.inputs
    if (factor := number(second)) is not None:
        return first, factor if node.op_type == "Mul" else 1 / factor
    if node.op_type == "Mul" and (factor := number(first)) is not None:
        return second, factor
    return value, 1.0


def _unrepeated(value: ir.Value) -> ir.Value:
    """Returns keys or values before each head was repeated for the queries of its group; the same where none was."""
    before = value
    for op_type in reversed(_REPEATS_HEADS):
        node = producer(before, op_type)
        if node is None:
            return value
        before = node.inputs[0]
    axes = constant(node.inputs[1])
    # Behind the heads' axis: head by head. Anywhere else the heads would be repeated in another order.
    return before if axes is not None and list(axes) == [2] else value


def _order(node: ir.Node) -> list[int] | None:
    return list(node.attributes.get_ints("perm", ())) if node.op_type == "Transpose" else None


def split_heads(value: ir.Value, head_size: int, where: str) -> ir.Value:
    """Returns what a query, key or value is, rotated or not, behind its Transpose to [batch, heads, rows, head_size].

    Raises:
        ExportError: It comes from no such Transpose, or from several; `where` names what is read.
    """
    found: dict[ir.Value, None] = {}
    seen: set[ir.Value] = set()
    ahead = [value]
    while ahead:
        one = ahead.pop()
        node = one.producer()
        if one in seen or node is None:
            continue
        seen.add(one)
        if _order(node) == _HEADS_BEFORE_ROWS:
            found[one] = None
        else:
            ahead += [operand for operand in node.inputs if operand is not None]
    if len(found) != 1:
        raise ExportError(f"{where} comes from {len(found)} projections ({named(value.producer())}), not from one.")
    source = next(iter(found))
    if width(source, 1) is None or width(source, 3) != head_size:
        raise ExportError(f"{where} is not split into heads of the cache's size, {head_size}, by {named(source.producer())}.")
    return source


def side_by_side(write: Writer, source: ir.Value) -> ir.Value:
    """Returns [batch, rows, heads * head_size] of what `split_heads` returned."""
    channels = width(source, 1) * width(source, 3)
    split = source.producer().inputs[0]
    reshape = producer(split, "Reshape")
    whole = None if reshape is None else reshape.inputs[0].shape
    if whole is not None and len(whole) == 3 and whole[:2] == split.shape[:2] and width(reshape.inputs[0], 2) == channels:
        return reshape.inputs[0]
    return write.reshape(split, 0, 0, channels)
