"""Graphs of a few nodes that look tokens up in constant matrices and multiply by them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper


def matrix_graph(nodes: list[onnx.NodeProto], matrices: dict[str, np.ndarray], *, tokens: str = "input_ids") -> ir.Model:
    """Returns the graph from the input `tokens`, int64 [1, any], through the nodes to "result", float32 [1, any, any]."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(tokens, TensorProto.INT64, [1, None])],
        [helper.make_tensor_value_info("result", TensorProto.FLOAT, [1, None, None])],
        [numpy_helper.from_array(values, name) for name, values in matrices.items()],
    )
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
