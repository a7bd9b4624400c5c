"""Edits of a graph that the lowerings and the quantisations have in common."""

import copy
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

CONTRIB = "com.microsoft"


def add_initializer(graph: ir.Graph, name: str, values: np.ndarray | np.generic | ir.TensorProtocol) -> ir.Value:
    """Adds a constant to a graph, or returns the one that already has its name; a lazy tensor is not computed."""
    if (there := graph.initializers.get(name)) is not None:
        return there
    tensor = ir.tensor(values, name=name) if isinstance(values, np.ndarray | np.generic) else values
    value = ir.Value(name=name, const_value=tensor, shape=tensor.shape, type=ir.TensorType(tensor.dtype))
    graph.register_initializer(value)
    return value


def replace_node(graph: ir.Graph, old: ir.Node, nodes: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> None:
    """Puts nodes in the place of one; `outputs` take over its outputs' readers, names and types, in order."""
    graph.insert_before(old, nodes)
    for before, after in zip(old.outputs, outputs, strict=True):
        if before in graph.outputs:
            after.name, after.shape, after.type = before.name, before.shape, before.type
            graph.outputs[graph.outputs.index(before)] = after
            before.name = None
        ir.convenience.replace_all_uses_with(before, after)
    graph.remove(old, safe=True)


def clone_model(model: ir.Model) -> ir.Model:
    """Returns a copy of a graph that shares the constants' values and nothing else; onnx_ir's own would share types too."""
    clone = model.clone()
    for graph in clone.graphs():
        for value in (*graph.inputs, *graph.initializers.values(), *(output for node in graph for output in node.outputs)):
            value.type = copy.copy(value.type)
    return clone
