"""The codes of a form that lies in a bundle, for further forms of it: what GPTQ has rounded on a text is not rounded anew.

Matrices are found by the names that they have in the base graph, which the same exporter gives them each time.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import numpy_helper
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from runtime.contract import DecoderSpec

from .blockwise_products import matrices_of, rows_of
from .calibration import CalibratedWeights
from .errors import ExportError
from .graph_head import head_matrix
from .kept_weights import row_hashes
from .quantization import BlockwiseWeights


def stored_weights(spec: DecoderSpec, folder: Path, base: ir.Model) -> CalibratedWeights:
    """Reads the matrices of a decoder's first form, without embedding and head, which are not calibrated.

    Args:
        spec: The decoder, in int8 or int4.
        folder: The bundle's.
        base: The checkpoint's base graph.

    Raises:
        ExportError: The form does not have the base graph's matrices.
    """
    path = folder / spec.forms[0].graph[0].path
    stored = dict(_blocks_in(path))
    head = head_matrix(base)
    names, hashes, weights = [], [], []
    for matrix, readers in matrices_of(base.graph).items():
        if matrix is head or any(node.op_type == "Gather" for node in readers):
            continue
        rows = rows_of(matrix, readers)
        blocks = stored.get(matrix.name)
        if blocks is None or (len(blocks.packed), blocks.columns) != rows.shape:
            raise ExportError(
                f"{path} does not hold the matrix '{matrix.name}' of {spec.source} as it is built here, so its codes cannot be "
                "used again: export the bundle anew with all its lowerings."
            )
        names.append(matrix.name)
        hashes.append(row_hashes(rows))
        weights.append(blocks)
    return CalibratedWeights(names, hashes, weights)


def _blocks_in(path: Path) -> Iterator[tuple[str, BlockwiseWeights]]:
    """Yields each quantised matrix by the name it had before: see blockwise_products and blockwise_dequantize."""
    graph = onnx.load(path, load_external_data=False).graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        attributes = {attribute.name: attribute.i for attribute in node.attribute}
        if node.op_type == "MatMulNBits":
            packed, scales = (_values(constants[name], path.parent) for name in node.input[1:3])
            form = attributes["bits"], attributes["K"], attributes["block_size"]
            yield node.input[1].removesuffix(".packed"), BlockwiseWeights(packed, scales.astype(np.float32), *form)
        elif node.op_type == "DequantizeLinear":
            codes, scales = (_values(constants[name], path.parent).T for name in node.input[:2])
            bits = 4 if constants[node.input[0]].data_type == onnx.TensorProto.INT4 else 8
            shifted = (codes.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)
            by_block = shifted.reshape(*scales.shape, attributes["block_size"])
            blocks = BlockwiseWeights.of_codes(by_block, scales.astype(np.float32), bits, codes.shape[1])
            yield node.input[0].removesuffix(".codes"), blocks


def _values(tensor: onnx.TensorProto, folder: Path) -> NDArray[np.generic]:
    """Reads a constant; onnx itself reads no file that has two names, as those of a bundle have while forms are added."""
    values = onnx.TensorProto()
    values.CopyFrom(tensor)
    if uses_external_data(tensor):
        info = ExternalDataInfo(tensor)
        with (folder / info.location).open("rb") as stream:
            stream.seek(info.offset or 0)
            values.raw_data = stream.read(info.length)
        values.data_location = onnx.TensorProto.DEFAULT
    return numpy_helper.to_array(values)
