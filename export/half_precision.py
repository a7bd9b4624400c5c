"""A base graph in float16: weights, activations and cache, while chosen operators keep computing in float32.

Logits come out in float32. Nothing here knows an architecture: a value is rounded because of its type, and stays as it is
because of who reads it.
"""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from .errors import ExportError
from .graph_edit import add_initializer

_FLOAT, _HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16


def to_half_precision(graph: ir.Graph, float32_operators: Collection[str]) -> None:
    """Rewrites a base graph in place so that it computes in float16.

    Args:
        graph: A graph whose floating point values are all float32.
        float32_operators: Operators that keep float32; what is cast stands around them, and tables that only they read
            (by way of a Gather) stay float32 too.

    Raises:
        ExportError: A weight is beyond the range of float16; the sentence names it.
    """
    kept = _kept_nodes(graph, float32_operators)
    for value in graph.inputs:
        if value.dtype == _FLOAT:
            value.dtype = _HALF
    lowered: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        if node in kept:
            _keep(graph, node, kept)
        else:
            _round(graph, node, lowered)
    for index, value in enumerate(graph.outputs):
        if value.name == "logits":
            _widen_output(graph, index, value)


def _kept_nodes(graph: ir.Graph, operators: Collection[str]) -> set[ir.Node]:
    """Nodes that compute in float32: those of the operators, and lookups of constants that only these read."""
    kept: set[ir.Node] = set()
    for node in reversed(list(graph)):
        readers = [reader for output in node.outputs for reader, _ in output.uses()]
        lookup = node.op_type == "Gather" and node.inputs[0].is_initializer() and node.outputs[0].dtype == _FLOAT
        if node.op_type in operators or (lookup and readers and all(reader in kept for reader in readers)):
            kept.add(node)
    return kept


def _keep(graph: ir.Graph, node: ir.Node, kept: set[ir.Node]) -> None:
    """Casts what a node reads to float32 and what it gives to float16."""
    for index, value in enumerate(node.inputs):
        if value is not None and value.dtype == _HALF:
            cast = ir.node("Cast", [value], attributes={"to": _FLOAT})
            cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(_FLOAT), value.shape
            graph.insert_before(node, cast)
            node.replace_input_with(index, cast.outputs[0])
    for output in node.outputs:
        readers = [(reader, index) for reader, index in output.uses() if reader not in kept]
        if output.dtype == _FLOAT and readers:
            cast = ir.node("Cast", [output], attributes={"to": _HALF})
            cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(_HALF), output.shape
            graph.insert_after(node, cast)
            for reader, index in readers:
                reader.replace_input_with(index, cast.outputs[0])


def _round(graph: ir.Graph, node: ir.Node, rounded: dict[ir.Value, ir.Value]) -> None:
    """Gives a node float16 constants and outputs."""
    for index, value in enumerate(node.inputs):
        if value is not None and value.is_initializer() and value.dtype == _FLOAT:
            if value not in rounded:
                rounded[value] = _half_constant(graph, value)
            node.replace_input_with(index, rounded[value])
            if not value.uses():
                del graph.initializers[value.name]
    for attribute in list(node.attributes.values()):
        _round_attribute(node, attribute)
    for output in node.outputs:
        if output.dtype == _FLOAT:
            output.dtype = _HALF


def _round_attribute(node: ir.Node, attribute: ir.Attr) -> None:
    """Rounds what an attribute holds or names: a Constant's value, a ConstantOfShape's, the type a Cast casts to."""
    name = attribute.name
    if node.op_type == "Constant" and attribute.type in (ir.AttributeType.FLOAT, ir.AttributeType.FLOATS):
        del node.attributes[name]
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.array(attribute.value, np.float16)))
    elif attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype == _FLOAT:
        node.attributes[name] = ir.AttrTensor(name, ir.tensor(attribute.value.numpy().astype(np.float16)))
    elif node.op_type == "Cast" and name == "to" and attribute.value == _FLOAT:
        node.attributes[name] = ir.AttrInt64(name, _HALF)


def _half_constant(graph: ir.Graph, value: ir.Value) -> ir.Value:
    weights = value.const_value.numpy()
    with np.errstate(over="ignore"):
        half = weights.astype(np.float16)
    if not np.isfinite(half).all():
        raise ExportError(
            f"The weight '{value.name}' reaches {np.abs(weights).max():.3g}, beyond the range of float16: export in another "
            "precision."
        )
    return add_initializer(graph, f"{value.name}.half", half)


def _widen_output(graph: ir.Graph, index: int, value: ir.Value) -> None:
    cast = ir.node("Cast", [value], attributes={"to": _FLOAT})
    output = cast.outputs[0]
    output.name, output.shape, output.type = value.name, value.shape, ir.TensorType(_FLOAT)
    value.name = f"{value.name}.half"
    graph.append(cast)
    graph.outputs[index] = output
