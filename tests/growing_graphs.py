"""Graphs as other exporters leave them, made of the tiny pair's checkpoints: past in, a longer present out.

The base graph that mobius builds is one, saved as it is. The rest are the variations met in the wild, each by a few nodes.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
from onnx import TensorProto, helper

CONFIGURATION = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def growing_folder(checkpoint: Path, folder: Path) -> Path:
    """Writes a folder as optimum would: the graph, its weights beside it, the checkpoint's configuration and tokenizer."""
    import onnx_ir as ir

    from export.base_graph import build_base_graph
    from export.source import resolve_source

    folder.mkdir(parents=True)
    ir.save(build_base_graph(resolve_source(str(checkpoint))), folder / "model.onnx", external_data="model.onnx_data")
    for name in CONFIGURATION:
        shutil.copy(checkpoint / name, folder / name)
    return folder


def in_half_precision(model: onnx.ModelProto) -> None:
    """Caches and logits become float16, as in a file named model_fp16.onnx; most of what is between stays float32."""
    graph = model.graph
    for node in [node for node in graph.node if node.op_type == "Attention"]:
        # New keys and values are rounded before they are used, as they are where all of a graph is float16.
        place = list(graph.node).index(node)
        for index in (1, 2):
            name = node.input[index]
            node.input[index] = f"{name}.rounded"
            graph.node.insert(place, helper.make_node("Cast", [f"{name}.half"], [f"{name}.rounded"], to=TensorProto.FLOAT))
            graph.node.insert(place, helper.make_node("Cast", [name], [f"{name}.half"], to=TensorProto.FLOAT16))
    for value in graph.input:
        if value.name.startswith("past_key_values"):
            _rename_reads(graph, value.name, f"{value.name}.float")
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
            graph.node.insert(0, helper.make_node("Cast", [value.name], [f"{value.name}.float"], to=TensorProto.FLOAT))
    for value in graph.output:
        _rename_writes(graph, value.name, f"{value.name}.float")
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
        graph.node.append(helper.make_node("Cast", [f"{value.name}.float"], [value.name], to=TensorProto.FLOAT16))


def merged(model: onnx.ModelProto) -> None:
    """A decoder with and without past in one file, as older versions of optimum wrote: an If on `use_cache_branch`."""
    graph = model.graph
    pasts = [value.name for value in graph.input if value.name.startswith("past_key_values")]
    for name, value in (("no_past.zero", 0), ("no_past.axis", 2)):
        graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [1], [value]))
    branches = []
    for name in ("then_branch", "else_branch"):
        branch = onnx.GraphProto(name=name, node=graph.node)
        if name == "else_branch":
            # It does not look at what is cached.
            for past in pasts:
                _rename_reads(branch, past, f"no_past.{past}")
                operands = [past, "no_past.zero", "no_past.zero", "no_past.axis"]
                branch.node.insert(0, helper.make_node("Slice", operands, [f"no_past.{past}"]))
        for value in graph.output:
            _rename_writes(branch, value.name, f"{name}.{value.name}")
            branch.output.add().CopyFrom(value)
            branch.output[-1].name = f"{name}.{value.name}"
        branches.append(helper.make_attribute(name, branch))
    node = helper.make_node("If", ["use_cache_branch"], [value.name for value in graph.output])
    node.attribute.extend(branches)
    del graph.node[:]
    graph.node.append(node)
    graph.input.append(helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1]))


def with_kept_rows(model: onnx.ModelProto) -> None:
    """Logits of the last `num_logits_to_keep` rows only, as in newer graphs of onnx-community."""
    graph = model.graph
    _rename_writes(graph, "logits", "logits.all")
    for name, values in (("kept.shape", [1]), ("kept.end", [2**62])):
        graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [1], values))
    graph.input.append(helper.make_tensor_value_info("num_logits_to_keep", TensorProto.INT64, []))
    graph.node.extend(
        [
            helper.make_node("Neg", ["num_logits_to_keep"], ["kept.negative"]),
            helper.make_node("Reshape", ["kept.negative", "kept.shape"], ["kept.start"]),
            helper.make_node("Slice", ["logits.all", "kept.start", "kept.end", "kept.shape"], ["logits"]),
        ]
    )


def last_row_only(model: onnx.ModelProto) -> None:
    """A head that computes one row, without saying so in the output's shape."""
    _rename_writes(model.graph, "logits", "logits.all")
    model.graph.initializer.append(helper.make_tensor("last", TensorProto.INT64, [1], [-1]))
    model.graph.node.append(helper.make_node("Gather", ["logits.all", "last"], ["logits"], axis=1))


def rewrite(graph: Path, *changes: Callable[[onnx.ModelProto], None], to: Path | None = None) -> Path:
    """Applies changes to a graph file, in its place or into another file of its folder."""
    model = onnx.load(graph, load_external_data=False)
    for change in changes:
        change(model)
    goal = to or graph
    goal.unlink(missing_ok=True)  # a new file: the old one may be linked elsewhere
    onnx.save(model, goal)
    return goal


def _rename_reads(graph: onnx.GraphProto, name: str, new_name: str) -> None:
    for node in graph.node:
        for index, read in enumerate(node.input):
            if read == name:
                node.input[index] = new_name


def _rename_writes(graph: onnx.GraphProto, name: str, new_name: str) -> None:
    _rename_reads(graph, name, new_name)
    for node in graph.node:
        for index, written in enumerate(node.output):
            if written == name:
                node.output[index] = new_name
