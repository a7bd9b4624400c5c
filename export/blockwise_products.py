"""Quantised matrices in contrib operators: MatMulNBits for projections and head, GatherBlockQuantized for the embedding.

The two share one packed tensor where the model ties them.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from .errors import ExportError
from .graph_edit import CONTRIB, add_initializer, replace_node
from .quantization import BlockwiseWeights, Quantizer

# Activations are rounded to int8 blockwise, row by row: the fastest kernel, and the one whose rows do not depend on how
# many rows a pass has.
ACCURACY_LEVEL = 4


def quantize_graph(model: ir.Model, quantizer: Quantizer, on_weight: Callable[[int, int], None]) -> None:
    """Replaces the constant matrices of a graph, embedding and head included, by their quantised form.

    Args:
        model: A graph with float32 weights; changed in place.
        quantizer: Given each matrix as float32 [rows, columns], whatever its layout in the graph.
        on_weight: Called with (matrices done, matrices in all) after each.

    Raises:
        ExportError: The graph holds no constant matrix, so quantisation would change nothing.
    """
    graph = model.graph
    readers = matrices_of(graph)
    if not readers:
        raise ExportError("The graph has no constant weight matrices to quantise.")
    sums: dict[tuple[ir.Value, int], ir.Value] = {}
    for done, (matrix, nodes) in enumerate(readers.items(), start=1):
        weights = quantizer(rows_of(matrix, nodes))
        if weights is not None:
            _place(graph, matrix, nodes, weights, sums)
        on_weight(done, len(readers))


def matrices_of(graph: ir.Graph) -> dict[ir.Value, list[ir.Node]]:
    """Returns a graph's constant matrices, each with the nodes that multiply by it or look tokens up in it."""
    readers: dict[ir.Value, list[ir.Node]] = {}
    for node in graph:
        if (matrix := _matrix_read_by(node)) is not None:
            readers.setdefault(matrix, []).append(node)
    return readers


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


def rows_of(matrix: ir.Value, readers: list[ir.Node]) -> NDArray[np.float32]:
    """Returns a matrix as [rows, columns], the blocks along the columns."""
    values: NDArray[np.float32] = matrix.const_value.numpy()
    # MatMul's own layout is [columns, rows]; a transposed operand and an embedding are [rows, columns] already.
    layouts = {node.op_type == "MatMul" and node.inputs[1] is matrix for node in readers}
    if len(layouts) > 1:
        raise ExportError(f"The matrix '{matrix.name}' is read in one layout here and in the other there: cannot quantise it.")
    return values.T if layouts.pop() else values


def _place(
    graph: ir.Graph,
    matrix: ir.Value,
    readers: list[ir.Node],
    weights: BlockwiseWeights,
    sums: dict[tuple[ir.Value, int], ir.Value],
) -> None:
    """Lets the nodes that read a matrix read its quantised form."""
    packed = add_initializer(graph, f"{matrix.name}.packed", weights.packed)
    scales = add_initializer(graph, f"{matrix.name}.scales", weights.scales)
    for node in readers:
        if node.op_type == "MatMul":
            _replace_product(graph, node, packed, scales, weights, sums)
        else:
            _replace_lookup(graph, node, packed, scales, weights)
    if not matrix.uses():
        del graph.initializers[matrix.name]


def _replace_product(
    graph: ir.Graph,
    node: ir.Node,
    packed: ir.Value,
    scales: ir.Value,
    weights: BlockwiseWeights,
    sums: dict[tuple[ir.Value, int], ir.Value],
) -> None:
    activations, transpose = node.inputs[0], node.inputs[1].producer()
    inputs = [activations, packed, scales]
    if weights.offsets is None and weights.zero_points is not None:
        inputs.append(add_initializer(graph, f"{packed.name}.zero_points", _packed_zero_points(weights)))
    attributes = {
        "K": weights.columns,
        "N": len(weights.packed),
        "bits": weights.bits,
        "block_size": weights.block_size,
        "accuracy_level": ACCURACY_LEVEL,
    }
    nodes = [ir.node("MatMulNBits", inputs, attributes=attributes, domain=CONTRIB)]
    if weights.offsets is not None:
        # The kernel takes offsets as zero points in float32 too, and is then a hundred times slower: what a block's offset
        # adds is the offset times the sum of the block's activations, which all products of these activations share.
        if (activations, weights.block_size) not in sums:
            sums[activations, weights.block_size] = _block_sums(graph, activations, weights)
        offsets = add_initializer(graph, f"{packed.name}.offsets", np.ascontiguousarray(_offsets(weights).T))
        share = ir.node("MatMul", [sums[activations, weights.block_size], offsets])
        nodes += [share, ir.node("Add", [nodes[0].outputs[0], share.outputs[0]])]
    _put_in_place(graph, node, nodes)
    if transpose is not None and not transpose.outputs[0].uses():
        graph.remove(transpose, safe=True)


def _middle_zero_points(graph: ir.Graph, packed: ir.Value, weights: BlockwiseWeights) -> ir.Node:
    """Returns what makes a lookup's zero points, 2**(bits - 1) for each block, when the graph is loaded.

    Without them ONNX Runtime's CPU kernel takes the middle, and its CUDA kernel took zero until late in 2026: other embeddings,
    and no error.
    """
    both_halves = 0x88 if weights.bits == 4 else 0x80
    value = add_initializer(graph, f"quantization.middle_of_{weights.bits}_bits", np.array([both_halves], np.uint8))
    shape = np.array([*weights.scales.shape, 1], np.int64)
    return ir.node("Expand", [value, add_initializer(graph, f"{packed.name}.zero_points_shape", shape)])


def _packed_zero_points(weights: BlockwiseWeights) -> NDArray[np.uint8]:
    """Returns the zero points as MatMulNBits wants them: with 4 bits two blocks in a byte, the even one in its low half."""
    zero_points = weights.zero_points
    assert zero_points is not None
    if weights.bits == 8:
        return zero_points
    padded = np.pad(zero_points, ((0, 0), (0, zero_points.shape[1] % 2)))
    return padded[:, 0::2] | (padded[:, 1::2] << 4)


def _offsets(weights: BlockwiseWeights) -> NDArray[np.float32]:
    """Returns float32 [rows, blocks], what is left to add to (code - 2**(bits - 1)) * scale.

    Zero points in the middle keep the products' weights small, and with them what rounding the activations costs.
    """
    assert weights.offsets is not None
    if weights.zero_points is None:
        return weights.offsets
    return weights.offsets + (np.float32(2 ** (weights.bits - 1)) - weights.zero_points) * weights.scales


def _block_sums(graph: ir.Graph, activations: ir.Value, weights: BlockwiseWeights) -> ir.Value:
    """Adds the sums of [1, rows, columns] activations over each block: [1, rows, blocks]."""
    blocks, size = weights.scales.shape[1], weights.block_size
    assert blocks * size == weights.columns, "formats with offsets have whole blocks"
    shape = add_initializer(graph, f"quantization.{blocks}_blocks_of_{size}", np.array([0, 0, blocks, size], np.int64))
    last_axis = add_initializer(graph, "quantization.last_axis_of_blocks", np.array([3], np.int64))
    cut = ir.node("Reshape", [activations, shape])
    total = ir.node("ReduceSum", [cut.outputs[0], last_axis], attributes={"keepdims": 0})
    graph.insert_after(activations.producer(), [cut, total])
    return total.outputs[0]


def _replace_lookup(graph: ir.Graph, node: ir.Node, packed: ir.Value, scales: ir.Value, weights: BlockwiseWeights) -> None:
    # Looked up as [rows, blocks, block_size], so that the head's packed tensor serves as it is; then the blocks are joined.
    tokens = node.inputs[1]
    last_axis = add_initializer(graph, "quantization.last_axis", np.array([2], np.int64))
    joined_shape = add_initializer(graph, f"{packed.name}.joined_shape", np.array([0, 0, -1], np.int64))
    column = ir.node("Unsqueeze", [scales, last_axis])
    middle = _middle_zero_points(graph, packed, weights)
    lookup = ir.node(
        "GatherBlockQuantized",
        [packed, tokens, column.outputs[0], middle.outputs[0]],
        attributes={"bits": weights.bits, "block_size": weights.block_size, "gather_axis": 0, "quantize_axis": 2},
        domain=CONTRIB,
    )
    nodes = [column, middle, lookup]
    if weights.zero_points is not None or weights.offsets is not None:
        shifted = weights if weights.offsets is not None else replace(weights, offsets=np.zeros_like(weights.scales))
        offsets = add_initializer(graph, f"{packed.name}.looked_up_offsets", _offsets(shifted)[:, :, None])
        share = ir.node("Gather", [offsets, tokens])
        nodes += [share, ir.node("Add", [lookup.outputs[0], share.outputs[0]])]
    nodes.append(ir.node("Reshape", [nodes[-1].outputs[0], joined_shape]))
    if weights.columns % weights.block_size:
        names = {"start": [0], "stop": [weights.columns], "axis": [2]}
        bounds = [add_initializer(graph, f"{packed.name}.{name}", np.array(value, np.int64)) for name, value in names.items()]
        nodes.append(ir.node("Slice", [nodes[-1].outputs[0], *bounds]))
    _put_in_place(graph, node, nodes)


def _put_in_place(graph: ir.Graph, node: ir.Node, nodes: list[ir.Node]) -> None:
    # Lowerings behind this go by types and shapes.
    nodes[-1].outputs[0].type, nodes[-1].outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), node.outputs[0].shape
    replace_node(graph, node, nodes, nodes[-1].outputs)
