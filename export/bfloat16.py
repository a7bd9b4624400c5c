"""Graphs in bfloat16, checked where nothing computes in it: ONNX Runtime's CPU has no bfloat16 products.

The check takes the very file that is shipped, over the same weights, and widens each bfloat16 value in it to float32. So it
finds whatever is wrong in the graph or in the weights that were stored; how activations round on the device it does not say.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
from onnx import TensorProto, helper, numpy_helper

from runtime.contract import DecoderSpec
from runtime.device_forms import runs_on_cpu

if TYPE_CHECKING:
    import torch


@contextmanager
def computed_in_float32(spec: DecoderSpec, folder: Path) -> Iterator[DecoderSpec]:
    """Lends a decoder as the CPU computes it: itself, or for one in bfloat16 a widened graph over the same external weights.

    Args:
        spec: The decoder.
        folder: The bundle's; the widened graph lies there while it is lent.
    """
    if runs_on_cpu(spec):
        yield spec
        return
    record = spec.graph[0]
    twin = (folder / record.path).with_name("widened.onnx")
    try:
        model = onnx.load(folder / record.path, load_external_data=False)
        widen(model)
        onnx.save(model, twin)
        path = twin.relative_to(folder).as_posix()
        yield replace(spec, graph=(replace(record, path=path), *spec.graph[1:]), cache_dtype="float32")
    finally:
        twin.unlink(missing_ok=True)


def widen(model: onnx.ModelProto) -> None:
    """Makes every bfloat16 value of a graph float32, in place; weights stay where they are, each behind a Cast."""
    graph = model.graph
    casts = []
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.BFLOAT16:
            name, tensor.name = tensor.name, f"{tensor.name}.bfloat16"
            casts.append(helper.make_node("Cast", [tensor.name], [name], to=TensorProto.FLOAT))
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i == TensorProto.BFLOAT16:
                attribute.i = TensorProto.FLOAT
            elif attribute.t.data_type == TensorProto.BFLOAT16:
                attribute.t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(attribute.t).astype("float32")))
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    nodes = [*casts, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


def round_parameters(module: "torch.nn.Module") -> None:
    """Rounds to bfloat16, in place, what a graph in it holds rounded of a module's own parameters.

    That is matrices, and the biases of products; never the weights of norms (see half_precision).
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    for parameter in module.parameters(recurse=False):
        if parameter.dim() > 1 or isinstance(module, torch.nn.Linear | Conv1D):
            parameter.copy_(parameter.bfloat16())
