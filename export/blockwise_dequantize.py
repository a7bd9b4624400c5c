"""Weight-only quantisation in standard operators: matrices as INT4 or INT8 blocks behind DequantizeLinear.

For the lowerings that use no contrib operators. TensorRT wants scales above zero and blocks that divide a matrix. Embeddings
are looked up in the type of the activations: TensorRT gathers no packed codes.
"""

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx_ir as ir

from .errors import ExportError
from .graph_edit import add_initializer
from .quantization import BLOCK_SIZE, block_size_of, dequantize_blockwise, quantize_blockwise

# Scales may be rounded to float16 later, and must not become zero there.
_SMALLEST_SCALE = np.float32(2.0**-23)
_CODE_TYPES = {4: ml_dtypes.int4, 8: np.int8}


def insert_dequantized_weights(
    graph: ir.Graph, bits: int, on_weight: Callable[[int, int], None], *, block_size: int = BLOCK_SIZE
) -> None:
    """Replaces every constant matrix that a MatMul of a base graph reads by its codes, scales and a DequantizeLinear.

    Args:
        graph: A graph with float32 weights; changed in place.
        bits: 4 or 8.
        on_weight: Called with (matrices done, matrices in all) after each.
        block_size: The most weights that share a scale; matrices that it does not divide get smaller blocks.

    Raises:
        ExportError: There is no constant matrix, or one does not divide into blocks.
    """
    products = [node for node in graph if node.op_type == "MatMul" and _matrix_of(node) is not None]
    if not products:
        raise ExportError(f"The graph has no constant weight matrices to quantise to {bits} bits.")
    for done, node in enumerate(products, start=1):
        _dequantize_operand(graph, node, bits, block_size)
        on_weight(done, len(products))


def _matrix_of(node: ir.Node) -> ir.Value | None:
    """The constant matrix a MatMul reads, or the one it reads transposed, or None."""
    value = node.inputs[1]
    producer = value.producer()
    if producer is not None and producer.op_type == "Transpose":
        value = producer.inputs[0]
    constant = value.const_value
    return value if constant is not None and len(constant.shape) == 2 and constant.dtype == ir.DataType.FLOAT else None


def _dequantize_operand(graph: ir.Graph, node: ir.Node, bits: int, largest_block: int) -> None:
    matrix, operand = _matrix_of(node), node.inputs[1]
    transposed = operand is not matrix
    # Rounded as [rows, columns], with the blocks along the columns; MatMul reads [columns, rows].
    weights = matrix.const_value.numpy() if transposed else matrix.const_value.numpy().T
    columns = weights.shape[1]
    block_size = block_size_of(columns, largest_block)
    if columns % block_size:
        raise ExportError(
            f"The matrix '{matrix.name}' reads {columns} channels, which blocks of {block_size} do not divide: export this "
            "model in fp32 or fp16."
        )
    packed = quantize_blockwise(weights, bits, block_size, positive_scales=True)
    codes = dequantize_blockwise(replace(packed, scales=np.ones_like(packed.scales))).T
    scales = np.maximum(packed.scales.T, _SMALLEST_SCALE)
    inputs = [
        add_initializer(graph, f"{matrix.name}.codes", np.ascontiguousarray(codes).astype(_CODE_TYPES[bits])),
        add_initializer(graph, f"{matrix.name}.scales", np.ascontiguousarray(scales)),
    ]
    dequantize = ir.node("DequantizeLinear", inputs, attributes={"axis": 0, "block_size": block_size})
    output = dequantize.outputs[0]
    output.type, output.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(codes.shape)
    graph.insert_before(node, dequantize)
    node.replace_input_with(1, output)
    if transposed and not operand.uses():
        graph.remove(operand.producer(), safe=True)
    if not matrix.uses():
        del graph.initializers[matrix.name]
