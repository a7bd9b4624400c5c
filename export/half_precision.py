"""A base graph in float16 or bfloat16: weights, activations and cache, while chosen operators keep computing in float32.

Logits come out in float32. Nothing here knows an architecture: a value is rounded because of its type, and stays as it is
because of who reads it.
"""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from .errors import ExportError
from .graph_edit import add_initializer

_FLOAT = ir.DataType.FLOAT
_SMALL_BYTES = 1 << 16
# In bfloat16 a norm whose weights its 8 bits do not hold stays float32: they would be rounded by up to 0.4 %, and 1 + w, which
# some models multiply by, holds no more than two digits of w.
_NORMS = frozenset({"RMSNormalization", "SkipSimplifiedLayerNormalization", "SkipLayerNormalization"})


def to_half_precision(graph: ir.Graph, float32_operators: Collection[str], half: ir.DataType = ir.DataType.FLOAT16) -> None:
    """Rewrites a base graph in place so that it computes in 16 bits.

    Args:
        graph: A graph whose floating point values are all float32.
        float32_operators: Operators that keep float32; what is cast stands around them, and tables that only they read
            (by way of a Gather) stay float32 too.
        half: FLOAT16 or BFLOAT16.

    Raises:
        ExportError: A weight is beyond the range of the type; the sentence names it.
    """
    kept = _kept_nodes(graph, float32_operators, half)
    for value in graph.inputs:
        if value.dtype == _FLOAT:
            value.dtype = half
    rounded: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        if node in kept:
            _keep(graph, node, kept, half)
        else:
            _round(graph, node, rounded, half)
    for index, value in enumerate(graph.outputs):
        if value.name == "logits":
            _widen_output(graph, index, value)


def _kept_nodes(graph: ir.Graph, operators: Collection[str], half: ir.DataType) -> set[ir.Node]:
    """Nodes that compute in float32: those of the operators, and lookups of constants that only these read."""
    kept: set[ir.Node] = set()
    for node in reversed(list(graph)):
        readers = [reader for output in node.outputs for reader, _ in output.uses()]
        inexact_norm = half == ir.DataType.BFLOAT16 and node.op_type in _NORMS and not _holds_weights(node, half)
        kept_lookup = _looks_up_positions(node) and readers and all(reader in kept for reader in readers)
        if node.op_type in operators or inexact_norm or kept_lookup:
            kept.add(node)
    return kept


def _looks_up_positions(node: ir.Node) -> bool:
    """Whether a node reads rows of a constant table, and not of the embedding, which is large."""
    is_lookup = node.op_type == "Gather" and node.inputs[0].is_initializer() and node.outputs[0].dtype == _FLOAT
    return is_lookup and node.inputs[1].name != "input_ids"


def _holds_weights(node: ir.Node, half: ir.DataType) -> bool:
    """Whether a type holds all of a node's constants without rounding; what is computed from constants counts as not held."""
    weights = [value for value in node.inputs[1:] if value is not None and value.dtype == _FLOAT and len(value.shape) == 1]
    arrays = [value.const_value.numpy() for value in weights if value.const_value is not None]
    return len(arrays) == len(weights) and all(np.array_equal(array, array.astype(half.numpy())) for array in arrays)


def _keep(graph: ir.Graph, node: ir.Node, kept: set[ir.Node], half: ir.DataType) -> None:
    """Casts what a node reads to float32 and what it gives to 16 bits."""
    for index, value in enumerate(node.inputs):
        if value is not None and value.dtype == half:
            cast = ir.node("Cast", [value], attributes={"to": _FLOAT})
            cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(_FLOAT), value.shape
            graph.insert_before(node, cast)
            node.replace_input_with(index, cast.outputs[0])
    for output in node.outputs:
        readers = [(reader, index) for reader, index in output.uses() if reader not in kept]
        if output.dtype == _FLOAT and readers:
            cast = ir.node("Cast", [output], attributes={"to": half})
            cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(half), output.shape
            graph.insert_after(node, cast)
            for reader, index in readers:
                reader.replace_input_with(index, cast.outputs[0])


def _round(graph: ir.Graph, node: ir.Node, rounded: dict[ir.Value, ir.Value], half: ir.DataType) -> None:
    """Gives a node constants and outputs of 16 bits."""
    for index, value in enumerate(node.inputs):
        if value is not None and value.is_initializer() and value.dtype == _FLOAT:
            if value not in rounded:
                rounded[value] = _half_constant(graph, value, half)
            node.replace_input_with(index, rounded[value])
            if not value.uses():
                del graph.initializers[value.name]
    for attribute in list(node.attributes.values()):
        _round_attribute(node, attribute, half)
    for output in node.outputs:
        if output.dtype == _FLOAT:
            output.dtype = half


def _round_attribute(node: ir.Node, attribute: ir.Attr, half: ir.DataType) -> None:
    """Rounds what an attribute holds or names: a Constant's value, a ConstantOfShape's, the type a Cast casts to."""
    name = attribute.name
    if node.op_type == "Constant" and attribute.type in (ir.AttributeType.FLOAT, ir.AttributeType.FLOATS):
        del node.attributes[name]
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.array(attribute.value, half.numpy())))
    elif attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype == _FLOAT:
        node.attributes[name] = ir.AttrTensor(name, ir.tensor(attribute.value.numpy().astype(half.numpy())))
    elif node.op_type == "Cast" and name == "to" and attribute.value == _FLOAT:
        node.attributes[name] = ir.AttrInt64(name, half)


def _half_constant(graph: ir.Graph, value: ir.Value, half: ir.DataType) -> ir.Value:
    """Adds what a constant is in 16 bits: a small one as it is, a large one to be rounded when it is written."""
    tensor, name = value.const_value, f"{value.name}.half"

    def narrow() -> ir.Tensor:
        with np.errstate(over="ignore"):
            return ir.tensor(tensor.numpy().astype(half.numpy()), name=name)

    rounded = narrow()
    if not np.isfinite(rounded.numpy()).all():
        raise ExportError(
            f"The weight '{value.name}' reaches {np.abs(tensor.numpy()).max():.3g}, beyond the range of {half.name.lower()}: "
            "export in another precision."
        )
    if rounded.nbytes > _SMALL_BYTES:
        rounded = ir.LazyTensor(narrow, dtype=half, shape=rounded.shape, name=name)
    return add_initializer(graph, name, rounded)


def _widen_output(graph: ir.Graph, index: int, value: ir.Value) -> None:
    cast = ir.node("Cast", [value], attributes={"to": _FLOAT})
    output = cast.outputs[0]
    output.name, output.shape, output.type = value.name, value.shape, ir.TensorType(_FLOAT)
    value.name = f"{value.name}.half"
    graph.append(cast)
    graph.outputs[index] = output
