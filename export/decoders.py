"""The decoders of a bundle: each from its source to a graph in the bundle's folder, then all of them checked."""

import gc
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from runtime.contract import DecoderSpec, FileRecord
from runtime.ort.backend import OrtBackend

from .base_graph import build_base_graph
from .cache_check import check_cache
from .errors import ExportError
from .existing_graph import decoder_spec, take_graph
from .graph_head import cut_head
from .graph_interface import read_interface
from .lowerings import LOWERINGS, computes_in_half_precision, graph_names, lower
from .optimum_graph import choose_exporter, optimum_graph
from .parity import check_parity
from .quantization import BITS, BLOCK_SIZE, BLOCK_SIZES, quantize_graph
from .row_equality import measure_row_equality
from .source import Source

BYTES_PER_WEIGHT = {"fp32": 4.0, "fp16": 2.0, "int8": 1.125, "int4": 0.625}
PRECISIONS = tuple(BYTES_PER_WEIGHT)
DEFAULT_PRECISION = "fp32"
DEFAULT_DRAFT_PRECISION = "int4"
# What happens, how much of it is done, and how much there is (0 where that cannot be told).
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Role:
    """One decoder to be made.

    Attributes:
        name: "target" or "draft", and the folder of its graph.
        source: Where it comes from.
        precision: One of PRECISIONS.
        context_length: Tokens it must serve.
        block_size: The most quantised weights that share a scale.
        exporter: What makes its graph: "mobius", "optimum", or "none" where there is a graph.
        lowering: The form of its graph.
    """

    name: str
    source: Source
    precision: str
    context_length: int
    block_size: int = BLOCK_SIZE
    exporter: str = "mobius"
    lowering: str = "gqa"

    def __post_init__(self) -> None:
        """Refuses what cannot be made, before any work.

        Raises:
            ExportError: An unknown option, or one that does not go with another.
        """
        if self.precision not in PRECISIONS:
            raise ExportError(f"The {self.name}'s precision '{self.precision}' is unknown; there are {', '.join(PRECISIONS)}.")
        if self.block_size not in BLOCK_SIZES:
            sizes = ", ".join(map(str, BLOCK_SIZES))
            raise ExportError(f"The {self.name}'s block size {self.block_size} is unknown; there are {sizes}.")
        if self.lowering not in LOWERINGS:
            raise ExportError(f"The lowering '{self.lowering}' is unknown; there are {', '.join(LOWERINGS)}.")
        if self.exporter == "none" and self.lowering != "gqa":
            raise ExportError(
                f"The {self.lowering} lowering rewrites what is built from a checkpoint, and {self.source.name} is a graph "
                "that is taken as it is: leave --lowering out."
            )


def exporter_of(source: Source, asked: str) -> str:
    """Returns what makes a source's graph: "mobius", "optimum", or "none"; see choose_exporter for what may be asked."""
    return "none" if source.kind == "graph" else choose_exporter(source, asked)


def write_decoder(role: Role, folder: Path, report: Report, *, head_tokens: NDArray[np.int32] | None = None) -> DecoderSpec:
    """Writes a decoder's graph into the bundle's folder; it is not checked yet, and the shape of its passes not known.

    Args:
        role: What to make.
        folder: The bundle's.
        report: Told what happens.
        head_tokens: int32 [any], the ids that get logits, ascending; None for all.

    Raises:
        ExportError: The source cannot be exported so.
    """
    if role.source.kind == "graph":
        return _take_decoder(role, folder, report)
    label = f"{role.name} ({role.precision})"
    report(f"{label}: building the graph from {role.source.name}", 0, 0)

    def quantising(done: int, total: int) -> None:
        report(f"{label}: quantising the weights", done, total)

    def save(model: ir.Model) -> tuple[FileRecord, ...]:
        return _save_graph(model, folder, role.name, lambda done, total: report(f"{label}: writing the weights", done, total))

    if role.exporter == "mobius":
        return _write_lowered(build_base_graph(role.source), role, head_tokens, quantising, save)
    with optimum_graph(role.source, folder, role.context_length) as traced:
        if traced.unrecognised is None:
            return _write_lowered(traced.model, role, head_tokens, quantising, save)
        report(f"{label}: the graph keeps the slower form that optimum gave it. {traced.unrecognised}", 0, 0)
        if role.lowering != "gqa" or role.precision == "fp16":
            option = "--precision fp16" if role.precision == "fp16" else f"--lowering {role.lowering}"
            raise ExportError(f"{option} needs more of {role.source.name}'s graph than was recognised. {traced.unrecognised}")
        if head_tokens is not None:
            cut_head(traced.model, head_tokens)
        if role.precision in BITS:
            quantize_graph(traced.model, role.precision, quantising, block_size=role.block_size)
        graph = save(traced.model)
    interface = read_interface(folder / graph[0].path)
    spec = decoder_spec(role.source, role.source.path, interface, graph, role.context_length)
    return replace(spec, block_size=role.block_size if role.precision in BITS else None)


def _write_lowered(
    model: ir.Model,
    role: Role,
    head_tokens: NDArray[np.int32] | None,
    on_weight: Callable[[int, int], None],
    save: Callable[[ir.Model], tuple[FileRecord, ...]],
) -> DecoderSpec:
    """Lowers a base graph, and saves it."""
    if head_tokens is not None:
        cut_head(model, head_tokens)
    geometry = lower(model, role.lowering, role.precision, role.context_length, on_weight, block_size=role.block_size)
    return DecoderSpec(
        source=role.source.name,
        architecture=role.source.architecture,
        graph=save(model),
        lowering=role.lowering,
        precision=role.precision,
        num_layers=geometry.num_layers,
        num_key_value_heads=geometry.num_key_value_heads,
        head_size=geometry.head_size,
        vocab_size=int(model.graph.outputs[0].shape[2]),
        context_length=role.context_length,
        cache_dtype="float16" if computes_in_half_precision(role.lowering, role.precision) else "float32",
        spare_slots=geometry.spare_slots,
        min_rows=1,
        block_size=role.block_size if role.precision in BITS else None,
        cache_capacity=geometry.cache_capacity,
        names=graph_names(model),
    )


def check_decoders(
    roles: Sequence[Role],
    specs: Mapping[str, DecoderSpec],
    folder: Path,
    probes: Mapping[str, list[int]],
    head_tokens: Mapping[str, NDArray[np.int32]],
    report: Report,
) -> dict[str, DecoderSpec]:
    """Compares written decoders with their checkpoints, and measures from how many rows on their passes agree.

    A graph that was taken as it is has no checkpoint; its passes are held against each other.

    Args:
        roles: What was made, decoders of one source behind each other: its checkpoint is loaded once.
        specs: What `write_decoder` returned, by the roles' names.
        folder: The bundle's.
        probes: Tokens of an ordinary text, at least 64, by name.
        head_tokens: Ids that have logits, by name; all where a name is absent.
        report: Told what happens.

    Returns:
        The specs with parity, min_rows and row_multiple.

    Raises:
        ExportError: A graph does not compute what its checkpoint does, or its rows depend on the pass they stand in.
    """
    gc.collect()
    checked = dict(specs)
    for source, group in itertools.groupby(roles, key=lambda role: role.source):
        names = [role.name for role in group]
        if source.kind == "graph":
            report(f"checking the cache of {source.name}", 0, 0)
            for name in names:
                checked[name] = replace(specs[name], parity={"pieces": check_cache(specs[name], folder, probes[name])})
        else:
            report(f"comparing with {source.name} in torch", 0, 0)
            heads = [head_tokens.get(name) for name in names]
            parities = check_parity(source, [specs[name] for name in names], folder, probes[names[0]], heads)
            checked |= {name: replace(specs[name], parity=parity) for name, parity in zip(names, parities, strict=True)}
        for name in names:
            report(f"{name}: measuring row equality", 0, 0)
            checked[name] = _with_pass_shape(source, checked[name], folder, probes[name])
    return checked


def _take_decoder(role: Role, folder: Path, report: Report) -> DecoderSpec:
    report(f"{role.name}: taking the graph of {role.source.name}", 0, 0)
    spec = take_graph(role.source, role.name, folder, role.context_length)
    default = DEFAULT_PRECISION if role.name == "target" else DEFAULT_DRAFT_PRECISION
    if role.precision not in (default, spec.precision):
        raise ExportError(f"{role.source.name} is in {spec.precision} and is taken as it is: ask for no other precision.")
    return spec


def _with_pass_shape(source: Source, spec: DecoderSpec, folder: Path, probe: list[int]) -> DecoderSpec:
    shape = measure_row_equality(OrtBackend().load(spec, folder), probe)
    if shape is None:
        raise ExportError(
            f"On this machine the graph of {source.name} gives other bits for a row when the text is cut into other "
            "passes, at any number of rows up to 16: its greedy text could depend on speculation."
        )
    spec = replace(spec, min_rows=shape.min_rows, row_multiple=shape.row_multiple)
    # Padding rows stand at the places behind the last token, where the model may have no position left.
    return replace(spec, context_length=min(spec.context_length, source.context_length - spec.most_padding))


def _save_graph(model: ir.Model, folder: Path, name: str, on_tensor: Callable[[int, int], None]) -> tuple[FileRecord, ...]:
    (folder / name).mkdir()
    path, data = folder / name / "model.onnx", "model.onnx.data"
    ir.save(model, path, external_data=data, callback=lambda _tensor, state: on_tensor(state.index + 1, state.total))
    written = [path.name, data] if path.with_name(data).exists() else [path.name]
    return tuple(FileRecord.of(folder, f"{name}/{file}") for file in written)
