"""Normalisations in the forms the lowerings need: contrib nodes split, RMSNormalization written out."""

import numpy as np
import onnx_ir as ir

from export.graph_edit import replace_node

from .writer import Writer

# What a contrib node with a skip input stands for behind its Add.
_SKIP_NORMS = {"SkipSimplifiedLayerNormalization": "RMSNormalization", "SkipLayerNormalization": "LayerNormalization"}


def split_skip_norms(graph: ir.Graph) -> None:
    """Turns each contrib norm with a skip input into the Add and the standard norm it stands for."""
    for node in list(graph):
        if node.op_type not in _SKIP_NORMS:
            continue
        source, skip, *weights = node.inputs
        write = Writer(graph)
        total = write.op("Add", source, skip)
        epsilon = node.attributes.get_float("epsilon", 1e-5)
        norm = write.op(_SKIP_NORMS[node.op_type], total, *weights, axis=-1, epsilon=epsilon)
        for value in (total, norm):
            value.type, value.shape = ir.TensorType(source.dtype), source.shape
        _, mean, deviation, _ = node.outputs
        assert not mean.uses()
        assert not deviation.uses()
        replace_node(graph, node, write.nodes, [norm, mean, deviation, total])


def write_out_norms(graph: ir.Graph) -> None:
    """Replaces RMSNormalization by x / sqrt(mean(x**2) + epsilon) * weight, in float32, which its input must be."""
    for node in list(graph):
        if node.op_type != "RMSNormalization" or node.domain != "":
            continue
        source, weight = node.inputs
        assert node.attributes.get_int("axis", -1) in (-1, 2)
        write = Writer(graph)
        mean = write.op("ReduceMean", write.op("Mul", source, source), write.integers(-1))
        epsilon = write.scalar(node.attributes.get_float("epsilon", 1e-5), np.float32)
        root = write.op("Sqrt", write.op("Add", mean, epsilon))
        result = write.op("Mul", write.op("Div", source, root), weight)
        replace_node(graph, node, write.nodes, [result])
