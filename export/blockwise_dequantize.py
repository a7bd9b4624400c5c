"""Weight-only quantisation in standard operators: matrices as INT4 or INT8 blocks behind DequantizeLinear.

For the lowerings that use no contrib operators. TensorRT wants scales above zero and blocks that divide a matrix. Embeddings
are looked up in the type of the activations: TensorRT gathers no packed codes.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from .errors import ExportError
from .graph_edit import add_initializer
from .quantization import BlockwiseWeights, Quantizer

# Scales may be rounded to float16 later, and must not become zero there.
_SMALLEST_SCALE = np.float32(2.0**-23)
_CODE_TYPES = {4: ml_dtypes.int4, 8: np.int8}


def insert_dequantized_weights(graph: ir.Graph, quantizer: Quantizer, on_weight: Callable[[int, int], None]) -> None:
    """Replaces the constant matrices that the MatMuls of a base graph read by codes, scales and a DequantizeLinear.

    Args:
        graph: A graph with float32 weights; changed in place.
        quantizer: Given each matrix as float32 [rows, columns], whatever its layout in the graph.
        on_weight: Called with (matrices done, matrices in all) after each.

    Raises:
        ExportError: There is no constant matrix, one does not divide into blocks, or is quantised in a way that these
            operators cannot say.
    """
    products = [node for node in graph if node.op_type == "MatMul" and _matrix_of(node) is not None]
    if not products:
        raise ExportError("The graph has no constant weight matrices to quantise.")
    for done, node in enumerate(products, start=1):
        _dequantize_operand(graph, node, quantizer)
        on_weight(done, len(products))


def _matrix_of(node: ir.Node) -> ir.Value | None:
    """The constant matrix a MatMul reads, or the one it reads transposed, or None."""
    value = node.inputs[1]
    producer = value.producer()
    if producer is not None and producer.op_type == "Transpose":
        value = producer.inputs[0]
    constant = value.const_value
    return value if constant is not None and len(constant.shape) == 2 and constant.dtype == ir.DataType.FLOAT else None


def _dequantize_operand(graph: ir.Graph, node: ir.Node, quantizer: Quantizer) -> None:
    matrix, operand = _matrix_of(node), node.inputs[1]
    transposed = operand is not matrix
    # Rounded as [rows, columns], with the blocks along the columns; MatMul reads [columns, rows].
    weights = quantizer(matrix.const_value.numpy() if transposed else matrix.const_value.numpy().T)
    if weights is None:
        return
    if weights.columns % weights.block_size:
        raise ExportError(
            f"The matrix '{matrix.name}' reads {weights.columns} channels, which blocks of {weights.block_size} do not divide: "
            "export this model in fp32 or fp16."
        )
    codes, scales = _symmetric(weights, matrix.name)
    inputs = [
        add_initializer(graph, f"{matrix.name}.codes", np.ascontiguousarray(codes.T)),
        add_initializer(graph, f"{matrix.name}.scales", np.ascontiguousarray(scales.T)),
    ]
    dequantize = ir.node("DequantizeLinear", inputs, attributes={"axis": 0, "block_size": weights.block_size})
    output = dequantize.outputs[0]
    output.type, output.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(codes.T.shape)
    graph.insert_before(node, dequantize)
    node.replace_input_with(1, output)
    if transposed and not operand.uses():
        graph.remove(operand.producer(), safe=True)
    if not matrix.uses():
        del graph.initializers[matrix.name]


def _symmetric(weights: BlockwiseWeights, name: str) -> tuple[NDArray[np.generic], NDArray[np.float32]]:
    """Returns signed codes [rows, columns] and scales above zero [rows, blocks] of the same weights, in 4 bits where they fit.

    Raises:
        ExportError: Blocks have offsets, or codes that 8 bits do not hold.
    """
    # Where a scale is negative the codes change their signs; where it is zero they are zero.
    codes = weights.signed_codes * np.sign(weights.scales).astype(np.int16)[:, :, None]
    bits = next(
        (bits for bits in (weights.bits, 8) if -(2 ** (bits - 1)) <= codes.min() and codes.max() < 2 ** (bits - 1)), None
    )
    if weights.offsets is not None or bits is None:
        raise ExportError(
            f"The checkpoint's blocks of '{name}' have minimums, or zero points too far from the middle, which the lowerings "
            "static and primitive cannot say: choose the lowering gqa, or the precision int8 or int4."
        )
    scales = np.maximum(np.abs(weights.scales), _SMALLEST_SCALE)
    return codes.reshape(len(codes), -1).astype(_CODE_TYPES[bits]), scales
