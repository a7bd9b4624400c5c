"""Weight-only quantisation in blocks: the arithmetic, and the pass that puts it into a lowered graph.

Symmetric, one float32 scale for every block of an output row; in the layout of ONNX Runtime's MatMulNBits (projections and
head) and GatherBlockQuantized (embedding), which share one tensor where the model ties them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from .errors import ExportError
from .graph_edit import CONTRIB, add_initializer, replace_node

BLOCK_SIZES = (32, 64, 128)
BLOCK_SIZE = 32
# Activations are rounded to int8 blockwise, row by row: the fastest kernel, and the one whose rows do not depend on how
# many rows a pass has.
ACCURACY_LEVEL = 4
BITS = {"int8": 8, "int4": 4}
# Scales tried for a block of 4-bit weights, relative to the one that spares its largest weight. They save a tenth of the
# squared error of normal weights, and up to a third for matrices of Qwen2.5; more candidates save no more.
_SCALE_FACTORS = (0.95, 0.9, 0.84, 0.78, 0.72, 0.65)
_CHUNK = 1 << 18  # weights rounded at once: what fits a core's cache


@dataclass(frozen=True)
class BlockwiseWeights:
    """A weight matrix in blocks along its input dimension.

    Attributes:
        packed: uint8 [rows, blocks, block_size * bits / 8]; with 4 bits the even weight stands in the low half of a byte.
        scales: float32 [rows, blocks]; weight = (code - 2**(bits - 1)) * scale.
        bits: 4 or 8.
        columns: The matrix's input dimension, before it was padded to whole blocks.
        block_size: Weights that share a scale.
    """

    packed: NDArray[np.uint8]
    scales: NDArray[np.float32]
    bits: int
    columns: int
    block_size: int


def quantize_blockwise(
    weights: NDArray[np.float32], bits: int, block_size: int = BLOCK_SIZE, *, positive_scales: bool = False
) -> BlockwiseWeights:
    """Rounds a matrix to `bits` bits, each block with a scale of its own.

    With 8 bits a block's largest weight lands on the end of the range. The scale carries that weight's sign, so that the
    range's longer side (-8 of -8..7) is used, as GGML's Q4_0 does. With 4 bits smaller scales are tried too, which clip the
    largest weights and serve all others better; each is fitted to its codes by least squares, and the least squared error wins.

    Args:
        weights: float32 [rows, columns].
        bits: 4 or 8.
        block_size: Weights that share a scale.
        positive_scales: Never let a scale carry a sign, as TensorRT wants it: where the largest weight is positive, the
            range's shorter side is used.

    Returns:
        The packed matrix; `dequantize_blockwise` gives its values back.
    """
    rows, columns = weights.shape
    blocks = -(-columns // block_size)
    half = 2 ** (bits - 1)
    codes = np.empty((rows, blocks, block_size), np.uint8)
    scales = np.empty((rows, blocks), np.float32)
    step = max(1, _CHUNK // (blocks * block_size))
    for begin in range(0, rows, step):
        chunk = weights[begin : begin + step]
        padded = np.zeros((len(chunk), blocks * block_size), np.float32)
        padded[:, :columns] = chunk
        factors = _SCALE_FACTORS if bits == 4 else ()
        rounded, fitted = _round_blocks(padded.reshape(-1, block_size), half, factors, positive_scales=positive_scales)
        with np.errstate(invalid="ignore"):  # NaN weights are refused where the graph is checked
            codes[begin : begin + step] = (rounded + half).reshape(-1, blocks, block_size)
        scales[begin : begin + step] = fitted.reshape(-1, blocks)
    if bits == 4:
        codes = codes[:, :, 0::2] | (codes[:, :, 1::2] << 4)
    return BlockwiseWeights(codes, scales, bits, columns, block_size)


def _round_blocks(
    blocks: NDArray[np.float32], half: int, factors: tuple[float, ...], *, positive_scales: bool
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Rounds blocks of weights.

    Args:
        blocks: float32 [blocks, block_size].
        half: Codes are -half to half - 1.
        factors: Scales to try beside the one that puts the largest weight on the end of the range, relative to it.
        positive_scales: See quantize_blockwise.

    Returns:
        float32 [blocks, block_size] whole codes, and float32 [blocks] scales.
    """
    if positive_scales:
        above, below = blocks.max(axis=1, keepdims=True), blocks.min(axis=1, keepdims=True)
        widest = np.maximum(above / np.float32(half - 1), below / np.float32(-half))
    else:
        widest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1) / np.float32(-half)
    codes, scales = _codes(blocks, widest, half), widest
    with np.errstate(over="ignore", invalid="ignore"):  # squares beyond float32 compare as equal: the widest scale stays
        error = _squared_error(codes, scales, blocks)
        for factor in factors:
            tried = _codes(blocks, widest * np.float32(factor), half)
            norm = np.einsum("ij,ij->i", tried, tried)[:, None]
            fitted = np.divide(np.einsum("ij,ij->i", tried, blocks)[:, None], norm, out=np.zeros_like(norm), where=norm > 0)
            tried_error = _squared_error(tried, fitted, blocks)
            better = tried_error < error
            codes[better], scales[better], error[better] = tried[better], fitted[better], tried_error[better]
    return codes, scales[:, 0]


def _squared_error(codes: NDArray[np.float32], scales: NDArray[np.float32], blocks: NDArray[np.float32]) -> NDArray[np.float32]:
    difference = codes * scales - blocks
    squared: NDArray[np.float32] = np.einsum("ij,ij->i", difference, difference)
    return squared


def _codes(blocks: NDArray[np.float32], scales: NDArray[np.float32], half: int) -> NDArray[np.float32]:
    with np.errstate(invalid="ignore"):  # NaN weights are refused where the graph is checked
        steps = np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales != 0)
    np.rint(steps, out=steps)
    return np.clip(steps, -half, half - 1, out=steps)


def dequantize_blockwise(weights: BlockwiseWeights) -> NDArray[np.float32]:
    """Returns the float32 [rows, columns] matrix that the packed one stands for."""
    codes = weights.packed
    if weights.bits == 4:
        codes = np.stack([codes & 0x0F, codes >> 4], axis=-1).reshape(*codes.shape[:2], weights.block_size)
    values = (codes.astype(np.float32) - np.float32(2 ** (weights.bits - 1))) * weights.scales[:, :, None]
    return values.reshape(len(values), -1)[:, : weights.columns]


def block_size_of(columns: int, largest: int) -> int:
    """Returns the largest block size up to `largest` that cuts so many columns without waste; else the smallest."""
    return next((size for size in sorted(BLOCK_SIZES, reverse=True) if size <= largest and columns % size == 0), BLOCK_SIZES[0])


def quantize_graph(
    model: ir.Model, precision: str, on_weight: Callable[[int, int], None], *, block_size: int = BLOCK_SIZE
) -> None:
    """Replaces every constant matrix of a lowered graph, embedding and head included, by its quantised form.

    Args:
        model: A lowered graph with its weights; changed in place.
        precision: "int8" or "int4".
        on_weight: Called with (matrices done, matrices in all) after each.
        block_size: The most weights that share a scale; matrices that it does not divide get smaller blocks.

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
        _quantize_matrix(graph, matrix, nodes, BITS[precision], block_size)
        on_weight(done, len(readers))


def _matrix_read_by(node: ir.Node) -> ir.Value | None:
    """The constant matrix a node multiplies by or looks tokens up in, or None."""
    if node.domain != "" or node.op_type not in {"MatMul", "Gather"}:
        return None
    value = node.inputs[1] if node.op_type == "MatMul" else node.inputs[0]
    producer = value.producer()
    if node.op_type == "MatMul" and producer is not None and producer.op_type == "Transpose":
        value = producer.inputs[0]
    if node.op_type == "Gather" and not _holds_tokens(node.inputs[1]):
        return None  # a table of positions or rotations: small, and blocks of it would be rounded much
    constant = value.const_value
    if constant is None or len(constant.shape) != 2 or constant.dtype != ir.DataType.FLOAT:
        return None
    return value


def _holds_tokens(indices: ir.Value) -> bool:
    while (producer := indices.producer()) is not None and producer.op_type in {"Cast", "Identity", "Reshape", "Unsqueeze"}:
        indices = producer.inputs[0]
    return indices.name == "input_ids"


def _quantize_matrix(graph: ir.Graph, matrix: ir.Value, readers: list[ir.Node], bits: int, block_size: int) -> None:
    values = matrix.const_value.numpy()
    # MatMul's own layout is [columns, rows]; a transposed operand and an embedding are [rows, columns] already.
    layouts = {node.op_type == "MatMul" and node.inputs[1] is matrix for node in readers}
    if len(layouts) > 1:
        raise ExportError(f"The matrix '{matrix.name}' is read in one layout here and in the other there: cannot quantise it.")
    if layouts.pop():
        values = values.T
    weights = quantize_blockwise(values, bits, block_size_of(values.shape[1], block_size))
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
            "block_size": weights.block_size,
            "accuracy_level": ACCURACY_LEVEL,
        },
        domain=CONTRIB,
    )
    replace_node(graph, node, [product], product.outputs)
    if transpose is not None and not transpose.outputs[0].uses():
        graph.remove(transpose, safe=True)


def _replace_lookup(graph: ir.Graph, node: ir.Node, packed: ir.Value, scales: ir.Value, weights: BlockwiseWeights) -> None:
    # Looked up as [rows, blocks, block_size], so that the head's packed tensor serves as it is; then the blocks are joined.
    last_axis = add_initializer(graph, "quantization.last_axis", np.array([2], np.int64))
    joined_shape = add_initializer(graph, f"{packed.name}.joined_shape", np.array([0, 0, -1], np.int64))
    column = ir.node("Unsqueeze", [scales, last_axis])
    lookup = ir.node(
        "GatherBlockQuantized",
        [packed, node.inputs[1], column.outputs[0]],
        attributes={"bits": weights.bits, "block_size": weights.block_size, "gather_axis": 0, "quantize_axis": 2},
        domain=CONTRIB,
    )
    join = ir.node("Reshape", [lookup.outputs[0], joined_shape])
    nodes = [column, lookup, join]
    if weights.columns % weights.block_size:
        names = {"start": [0], "stop": [weights.columns], "axis": [2]}
        bounds = [add_initializer(graph, f"{packed.name}.{name}", np.array(value, np.int64)) for name, value in names.items()]
        nodes.append(ir.node("Slice", [join.outputs[0], *bounds]))
    replace_node(graph, node, nodes, nodes[-1].outputs)
