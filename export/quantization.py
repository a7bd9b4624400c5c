"""Weight-only quantisation in blocks: the arithmetic, and the pass that puts it into a lowered graph.

Round to nearest, symmetric, one float32 scale for every 32 weights of an output row; in the layout of ONNX Runtime's
MatMulNBits (projections and head) and GatherBlockQuantized (embedding), which share one tensor where the model ties them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from .errors import ExportError
from .graph_edit import add_initializer, replace_node
from .lowering import CONTRIB

BLOCK_SIZE = 32
# Activations are rounded to int8 blockwise, row by row: the fastest kernel, and the one whose rows do not depend on how
# many rows a pass has.
ACCURACY_LEVEL = 4
BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class BlockwiseWeights:
    """A weight matrix in blocks along its input dimension.

    Attributes:
        packed: uint8 [rows, blocks, BLOCK_SIZE * bits / 8]; with 4 bits the even weight stands in the low half of a byte.
        scales: float32 [rows, blocks]; weight = (code - 2**(bits - 1)) * scale.
        bits: 4 or 8.
        columns: The matrix's input dimension, before it was padded to whole blocks.
    """

    packed: NDArray[np.uint8]
    scales: NDArray[np.float32]
    bits: int
    columns: int


def quantize_blockwise(weights: NDArray[np.float32], bits: int) -> BlockwiseWeights:
    """Rounds a matrix to `bits` bits, each block scaled so that its largest weight lands on the end of the range.

    The scale carries the sign of that weight, so that the range's longer side (-8 of -8..7) is used, as GGML's Q4_0 does.

    Args:
        weights: float32 [rows, columns].
        bits: 4 or 8.

    Returns:
        The packed matrix; `dequantize_blockwise` gives its values back.
    """
    rows, columns = weights.shape
    blocks = -(-columns // BLOCK_SIZE)
    padded = np.zeros((rows, blocks * BLOCK_SIZE), np.float32)
    padded[:, :columns] = weights
    grouped = padded.reshape(rows, blocks, BLOCK_SIZE)
    largest = np.take_along_axis(grouped, np.abs(grouped).argmax(axis=2, keepdims=True), axis=2)
    half = 2 ** (bits - 1)
    scales = largest / np.float32(-half)
    with np.errstate(invalid="ignore"):  # NaN weights are refused where the graph is checked
        steps = np.divide(grouped, scales, out=np.zeros_like(grouped), where=scales != 0)
        codes = np.clip(np.rint(steps) + half, 0, 2 * half - 1).astype(np.uint8)
    if bits == 4:
        codes = codes[:, :, 0::2] | (codes[:, :, 1::2] << 4)
    return BlockwiseWeights(np.ascontiguousarray(codes), np.ascontiguousarray(scales[:, :, 0]), bits, columns)


def dequantize_blockwise(weights: BlockwiseWeights) -> NDArray[np.float32]:
    """Returns the float32 [rows, columns] matrix that the packed one stands for."""
    codes = weights.packed
    if weights.bits == 4:
        codes = np.stack([codes & 0x0F, codes >> 4], axis=-1).reshape(*codes.shape[:2], BLOCK_SIZE)
    values = (codes.astype(np.float32) - np.float32(2 ** (weights.bits - 1))) * weights.scales[:, :, None]
    return values.reshape(len(values), -1)[:, : weights.columns]


def quantize_graph(model: ir.Model, precision: str, on_weight: Callable[[int, int], None]) -> None:
    """Replaces every constant matrix of a lowered graph, embedding and head included, by its quantised form.

    Args:
        model: A lowered graph with its weights; changed in place.
        precision: "int8" or "int4".
        on_weight: Called with (matrices done, matrices in all) after each.

    Raises:
        ExportError: The graph holds no constant matrix, so quantisation would change nothing.
    """
    graph = model.graph
    readers: dict[ir.Value, list[ir.Node]] = {}
    for node in list(graph):
        if (matrix := _matrix_read_by(node)) is not None:
            readers.setdefault(matrix, []).append(node)
    if not readers:
        raise ExportError(f"The graph has no constant weight matrices to quantise to {precision}.")
    for done, (matrix, nodes) in enumerate(readers.items(), start=1):
        _quantize_matrix(graph, matrix, nodes, BITS[precision])
        on_weight(done, len(readers))


def _matrix_read_by(node: ir.Node) -> ir.Value | None:
    """The constant matrix a node multiplies by or looks rows up in, or None."""
    if node.domain != "" or node.op_type not in {"MatMul", "Gather"}:
        return None
    value = node.inputs[1] if node.op_type == "MatMul" else node.inputs[0]
    producer = value.producer()
    if node.op_type == "MatMul" and producer is not None and producer.op_type == "Transpose":
        value = producer.inputs[0]
    constant = value.const_value
    if constant is None or len(constant.shape) != 2 or constant.dtype != ir.DataType.FLOAT:
        return None
    return value


def _quantize_matrix(graph: ir.Graph, matrix: ir.Value, readers: list[ir.Node], bits: int) -> None:
    values = matrix.const_value.numpy()
    # MatMul's own layout is [columns, rows]; a transposed operand and an embedding are [rows, columns] already.
    layouts = {node.op_type == "MatMul" and node.inputs[1] is matrix for node in readers}
    if len(layouts) > 1:
        raise ExportError(f"The matrix '{matrix.name}' is read in one layout here and in the other there: cannot quantise it.")
    if layouts.pop():
        values = values.T
    weights = quantize_blockwise(values, bits)
    packed = add_initializer(graph, f"{matrix.name}.packed", weights.packed)
    scales = add_initializer(graph, f"{matrix.name}.scales", weights.scales)
    for node in readers:
        if node.op_type == "MatMul":
            _replace_product(graph, node, packed, scales, weights)
        else:
            _replace_lookup(graph, node, packed, scales, weights)
    if not matrix.uses():
        del graph.initializers[matrix.name]


def _replace_product(graph: ir.Graph, node: ir.Node, packed: ir.Value, scales: ir.Value, weights: BlockwiseWeights) -> None:
    transpose = node.inputs[1].producer()
    product = ir.node(
        "MatMulNBits",
        [node.inputs[0], packed, scales],
        attributes={
            "K": weights.columns,
            "N": len(weights.packed),
            "bits": weights.bits,
            "block_size": BLOCK_SIZE,
            "accuracy_level": ACCURACY_LEVEL,
        },
        domain=CONTRIB,
    )
    replace_node(graph, node, [product], product.outputs)
    if transpose is not None and not transpose.outputs[0].uses():
        graph.remove(transpose, safe=True)


def _replace_lookup(graph: ir.Graph, node: ir.Node, packed: ir.Value, scales: ir.Value, weights: BlockwiseWeights) -> None:
    # Looked up as [rows, blocks, BLOCK_SIZE], so that the head's packed tensor serves as it is; then the blocks are joined.
    last_axis = add_initializer(graph, "quantization.last_axis", np.array([2], np.int64))
    joined_shape = add_initializer(graph, f"{packed.name}.joined_shape", np.array([0, 0, -1], np.int64))
    column = ir.node("Unsqueeze", [scales, last_axis])
    lookup = ir.node(
        "GatherBlockQuantized",
        [packed, node.inputs[1], column.outputs[0]],
        attributes={"bits": weights.bits, "block_size": BLOCK_SIZE, "gather_axis": 0, "quantize_axis": 2},
        domain=CONTRIB,
    )
    join = ir.node("Reshape", [lookup.outputs[0], joined_shape])
    nodes = [column, lookup, join]
    if weights.columns % BLOCK_SIZE:
        names = {"start": [0], "stop": [weights.columns], "axis": [2]}
        bounds = [add_initializer(graph, f"{packed.name}.{name}", np.array(value, np.int64)) for name, value in names.items()]
        nodes.append(ir.node("Slice", [join.outputs[0], *bounds]))
    replace_node(graph, node, nodes, nodes[-1].outputs)
