"""What an ONNX file says of itself as a decoder: its inputs and outputs, its caches, the form of its attention, its files.

Everything is read from the graph, whoever exported it; no model type is looked at, no weight is loaded, no session made.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import NodeProto, TensorProto

from runtime.contract import GraphNames

from .errors import ExportError
from .onnx_file import all_graphs, external_files, load_onnx

Types = Mapping[str, onnx.TypeProto.Tensor]

_CACHE_DTYPES = {TensorProto.FLOAT: "float32", TensorProto.FLOAT16: "float16"}
# Inputs beside the caches that the runtime can fill: their element type, and how many dimensions they have.
_REQUIRED = {"input_ids": (TensorProto.INT64, 2), "attention_mask": (TensorProto.INT64, 2)}
_OPTIONAL = {
    "position_ids": (TensorProto.INT64, 2),
    "use_cache_branch": (TensorProto.BOOL, 1),
    "num_logits_to_keep": (TensorProto.INT64, 0),
}
_INT8_OPERATORS = frozenset({"MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QLinearMatMul"})


@dataclass(frozen=True)
class GraphInterface:
    """A decoder graph as its file describes it; None where the file leaves a width open.

    Attributes:
        names: Of its inputs and outputs.
        lowering: "gqa" where every layer's cache belongs to a GroupQueryAttention node, else "growing".
        precision: Of the weights, by the operators that read them: "fp32", "fp16", "int8" or "int4".
        num_layers: Pairs of a key and a value cache.
        num_key_value_heads: Heads in a cache.
        head_size: Width of a head.
        vocab_size: Width of a logits row.
        cache_dtype: numpy name of the caches' element type.
        window: Tokens of the shortest sliding window that an attention node names; None where none does.
        data_files: Its external data, relative to its folder.
    """

    names: GraphNames
    lowering: str
    precision: str
    num_layers: int
    num_key_value_heads: int | None
    head_size: int | None
    vocab_size: int | None
    cache_dtype: str
    window: int | None
    data_files: tuple[str, ...]


def read_interface(path: Path) -> GraphInterface:
    """Reads and checks a decoder graph.

    Args:
        path: The `.onnx` file; its external data lies in the same folder.

    Raises:
        ExportError: It is no ONNX file, lacks external data, or is no decoder that the runtime could feed and rewind.
    """
    model = load_onnx(path)
    data_files = external_files(model, path)
    # Weights are no inputs, though old files list them as such; an input of ours may have a default all the same.
    weights = {tensor.name for tensor in model.graph.initializer} - _OPTIONAL.keys()
    inputs = {value.name: value.type.tensor_type for value in model.graph.input if value.name not in weights}
    outputs = {value.name: value.type.tensor_type for value in model.graph.output}
    _refuse_parts_of_models(inputs, path)
    past, present = _cache_templates(inputs, "inputs", path), _cache_templates(outputs, "outputs", path)
    names = GraphNames(
        past_key=past["key"],
        past_value=past["value"],
        present_key=present["key"],
        present_value=present["value"],
        **{name: name for name in _OPTIONAL if name in inputs},
    )
    num_layers = _count_layers(names, inputs, outputs, path)
    _check_inputs(inputs, {name for name, _ in names.cache_pairs(num_layers)}, path)
    caches = [inputs[name] for name, _ in names.cache_pairs(num_layers)]
    attentions = _attentions_on(set(inputs), model)
    return GraphInterface(
        names=names,
        lowering="gqa" if len(attentions) == num_layers else "growing",
        precision=_precision(model),
        num_layers=num_layers,
        num_key_value_heads=_common_width(caches, 1, path),
        head_size=_common_width(caches, 3, path),
        vocab_size=_logits_width(outputs, path),
        cache_dtype=_cache_dtype(caches, path),
        window=min((size for node in attentions if (size := _attribute(node, "local_window_size")) > 0), default=None),
        data_files=data_files,
    )


def _refuse_parts_of_models(inputs: Types, path: Path) -> None:
    if encoder := next((name for name in inputs if "encoder" in name), None):
        raise ExportError(
            f"{path} is the decoder of an encoder-decoder model (it reads '{encoder}'): only decoder-only models can be used."
        )
    if "input_ids" not in inputs:
        raise ExportError(
            f"{path} reads {', '.join(sorted(inputs)[:4])} and no input_ids: it is one graph of a model made of several "
            "(multimodal ones are), or no language model; only a decoder in one graph can be used."
        )


def _cache_templates(values: Types, kind: str, path: Path) -> dict[str, str]:
    """Names of the key and the value caches, with `{layer}` where the layer's number stands."""
    found: dict[str, set[str]] = {"key": set(), "value": set()}
    for name in values:
        # "past_key_values.0.value" says value: the last word counts.
        words, number = re.findall("key|value", name), re.search(r"\d+", name)
        if words and number:
            found[words[-1]].add(f"{name[: number.start()]}{{layer}}{name[number.end() :]}")
    if not any(found.values()):
        raise ExportError(
            f"{path} has no key/value caches among its {kind} ({', '.join(sorted(values)[:4])}): export it with past key "
            "values (optimum calls the task text-generation-with-past)."
        )
    if odd := [names for names in found.values() if len(names) != 1]:
        raise ExportError(
            f"{path} has caches of another form than one key and one value a layer among its {kind} "
            f"({', '.join(sorted(odd[0])) or 'keys or values only'}): it cannot be rewound by their length."
        )
    return {word: names.pop() for word, names in found.items()}


def _count_layers(names: GraphNames, inputs: Types, outputs: Types, path: Path) -> int:
    prefix, _, suffix = names.past_key.partition("{layer}")
    num_layers = sum(bool(re.fullmatch(rf"{re.escape(prefix)}\d+{re.escape(suffix)}", name)) for name in inputs)
    for past, present in names.cache_pairs(num_layers):
        for name, values, kind in ((past, inputs, "input"), (present, outputs, "output")):
            if name not in values:
                raise ExportError(
                    f"{path} has {num_layers} key caches and no {kind} '{name}': its caches are incomplete; export it again."
                )
    return num_layers


def _check_inputs(inputs: Types, caches: set[str], path: Path) -> None:
    if missing := [name for name in _REQUIRED if name not in inputs]:
        raise ExportError(f"{path} has no input {missing[0]}: the runtime tells a graph by it how much is cached.")
    known = _REQUIRED | _OPTIONAL
    if odd := sorted(set(inputs) - caches - set(known)):
        raise ExportError(f"{path} reads {', '.join(odd[:4])}, which the runtime cannot give: only plain decoders can be used.")
    for name in inputs.keys() & known.keys():
        dtype, rank = known[name]
        if (inputs[name].elem_type, len(inputs[name].shape.dim)) != (dtype, rank):
            raise ExportError(
                f"{path} wants {name} as {TensorProto.DataType.Name(inputs[name].elem_type)} of {len(inputs[name].shape.dim)} "
                f"dimensions; {TensorProto.DataType.Name(dtype)} of {rank} is expected."
            )


def _common_width(caches: Iterable[onnx.TypeProto.Tensor], axis: int, path: Path) -> int | None:
    """A dimension that all caches share; None where the graph leaves it open."""
    shapes = [[dim.dim_value or None for dim in cache.shape.dim] for cache in caches]
    if odd := [shape for shape in shapes if len(shape) != 4]:
        raise ExportError(f"{path} has a cache of {len(odd[0])} dimensions; [batch, heads, tokens, head size] is expected.")
    widths = {shape[axis] for shape in shapes}
    if len(widths) != 1:
        raise ExportError(f"{path} has caches of different shapes ({sorted(widths, key=str)}): the runtime needs them alike.")
    return widths.pop()


def _cache_dtype(caches: Iterable[onnx.TypeProto.Tensor], path: Path) -> str:
    types = {cache.elem_type for cache in caches}
    if len(types) != 1 or not types <= _CACHE_DTYPES.keys():
        found = ", ".join(TensorProto.DataType.Name(dtype) for dtype in sorted(types))
        raise ExportError(f"{path} has caches of {found}; FLOAT or FLOAT16 for all of them is expected.")
    return _CACHE_DTYPES[types.pop()]


def _logits_width(outputs: Types, path: Path) -> int | None:
    if "logits" not in outputs:
        raise ExportError(f"{path} has no output 'logits' ({', '.join(sorted(outputs)[:4])}): it is exported without its head.")
    shape = [dim.dim_value or None for dim in outputs["logits"].shape.dim]
    if outputs["logits"].elem_type not in _CACHE_DTYPES or len(shape) != 3:
        raise ExportError(f"{path} gives logits of another form than float [batch, rows, vocabulary].")
    if shape[1] == 1:
        raise ExportError(last_row_only(path))
    return shape[2]


def computes_one_row(path: Path) -> bool:
    """Whether a graph gives one row of logits by what its operators do, whatever its output's shape says."""
    inferred = onnx.shape_inference.infer_shapes(load_onnx(path))
    logits = next(value for value in inferred.graph.output if value.name == "logits")
    return logits.type.tensor_type.shape.dim[1].dim_value == 1


def last_row_only(path: Path) -> str:
    """The sentence for a graph whose head computes one row."""
    return (
        f"{path} gives logits for the last token of a pass only, so proposals cannot be verified by it: export it with logits "
        "for every row."
    )


def _attentions_on(inputs: set[str], model: onnx.ModelProto) -> list[NodeProto]:
    """The GroupQueryAttention nodes whose past is an input: bound as the present too, it is written in place."""
    nodes = (node for node in model.graph.node if node.op_type == "GroupQueryAttention")
    return [node for node in nodes if len(node.input) > 3 and node.input[3] in inputs]


def _attribute(node: NodeProto, name: str) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == name), 0)


def _precision(model: onnx.ModelProto) -> str:
    nodes = [node for graph in all_graphs(model.graph) for node in graph.node]
    types = {tensor.data_type for graph in all_graphs(model.graph) for tensor in graph.initializer if len(tensor.dims) > 1}
    bits = {_attribute(node, "bits") or 4 for node in nodes if node.op_type in ("MatMulNBits", "MatMulBnb4")}
    if min(bits, default=8) <= 4 or types & {TensorProto.INT4, TensorProto.UINT4}:
        return "int4"
    if bits or types & {TensorProto.INT8, TensorProto.UINT8} or any(node.op_type in _INT8_OPERATORS for node in nodes):
        return "int8"
    return "fp16" if types & {TensorProto.FLOAT16, TensorProto.BFLOAT16} else "fp32"
