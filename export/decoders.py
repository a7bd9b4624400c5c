"""The decoders of a bundle: each from its source to a graph in the bundle's folder, then all of them checked."""

import gc
import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from runtime.contract import DecoderSpec
from runtime.graph_metadata import CONTEXT_LENGTH
from runtime.ort.backend import OrtBackend, cpu_kernels
from runtime.row_equality import measure_row_equality

from .base_graph import build_base_graph
from .bfloat16 import computed_in_float32
from .blockwise_products import quantize_graph
from .cache_check import check_cache
from .errors import ExportError
from .existing_graph import decoder_spec, take_graph
from .graph_edit import clone_model
from .graph_files import save_graph
from .graph_head import cut_head
from .graph_interface import read_interface
from .kept_weights import KeptWeights
from .lowerings import FORMS, GQA_HALF, compute_type, graph_names, lower
from .optimum_graph import TracedGraph, choose_exporter, optimum_graph
from .parity import check_parity
from .quantization import BITS, KEPT, rounding
from .role import (
    BUILDING,
    BYTES_PER_WEIGHT,
    COMPARING,
    DEFAULT_DRAFT_PRECISION,
    DEFAULT_PRECISION,
    MEASURING,
    QUANTISING,
    WRITING,
    Report,
    Role,
)
from .source import Source


def exporter_of(source: Source, asked: str) -> str:
    """Returns what makes a source's graph: "mobius", "optimum", or "none"; see choose_exporter for what may be asked."""
    return "none" if source.kind == "graph" else choose_exporter(source, asked)


def write_decoder(
    role: Role,
    folder: Path,
    report: Report,
    *,
    head_tokens: NDArray[np.int32] | None = None,
    beside: DecoderSpec | None = None,
) -> DecoderSpec:
    """Writes a decoder's graphs into the bundle's folder; they are not checked yet, and the shape of their passes not known.

    Args:
        role: What to make.
        folder: The bundle's.
        report: Told what happens.
        head_tokens: int32 [any], the ids that get logits, ascending; None for all.
        beside: The decoder with the forms that lie there already, to which these are added.

    Returns:
        The decoder in all its forms, in the order of FORMS.

    Raises:
        ExportError: The source cannot be exported so.
    """
    if role.source.kind == "graph":
        return _take_decoder(role, folder, report)
    from .packed_checkpoint import unpacked  # needs torch, which graphs that are taken as they are do not

    if role.served_by_its_twin is not None:
        report(role.title(f"gqa and {GQA_HALF} are the same graph, which is stored once"), 0, 0)
    gc.collect()  # graphs are full of cycles: the weights of the one before go now
    report(role.title(BUILDING.format(role.source.name)), 0, 0)
    forms = [] if beside is None else list(beside.forms)
    kept = KeptWeights.of(role.source) if role.precision == KEPT else None
    with unpacked(role.source, folder) as source, base_graph_of(replace(role, source=source), folder) as base:
        if head_tokens is not None:
            cut_head(base.model, head_tokens)
        if base.unrecognised is not None:
            return _write_growing(base, role, folder, report, alone=not forms, kept=kept)
        for lowering in role.lowerings:
            # The last one may have the base graph, whose weights then go as they are rounded.
            model = base.model if lowering == role.lowerings[-1] else clone_model(base.model)
            forms.append(_write_form(model, role, lowering, folder, forms, report, kept))
    first, *others = sorted(forms, key=lambda form: FORMS.index(form.lowering))
    return replace(first, other_forms=tuple(others))


def base_graph_of(role: Role, folder: Path) -> AbstractContextManager[TracedGraph]:
    """Lends a checkpoint's base graph; `folder` takes what is written meanwhile."""
    if role.exporter == "mobius":
        return nullcontext(TracedGraph(build_base_graph(role.source), None))
    return optimum_graph(role.source, folder, role.context_length)


def _write_growing(
    traced: TracedGraph, role: Role, folder: Path, report: Report, *, alone: bool, kept: KeptWeights | None
) -> DecoderSpec:
    """Saves a graph of which too little was recognised to lower it."""
    if role.lowerings != ("gqa",) or not alone or role.precision in ("fp16", "bf16"):
        option = f"--lowering {role.lowering}" if role.lowerings != ("gqa",) or not alone else f"--precision {role.precision}"
        raise ExportError(f"{option} needs more of {role.source.name}'s graph than was recognised. {traced.unrecognised}")
    report(role.title(f"the graph keeps the slower form that optimum gave it. {traced.unrecognised}"), 0, 0)
    quantizer = rounding(BITS[role.precision], role.block_size) if role.precision in BITS else kept
    if quantizer is not None and role.calibrated is not None:
        quantizer = role.calibrated.before(quantizer)
    if quantizer is not None:
        quantize_graph(traced.model, quantizer, role.counter(QUANTISING, "gqa", report))
    _require_all_found(role, kept)
    traced.model.metadata_props[CONTEXT_LENGTH] = str(role.source.context_length)
    graph = save_graph(traced.model, folder, role.name, "model", (), role.counter(WRITING, "gqa", report))
    interface = read_interface(folder / graph[0].path)
    spec = decoder_spec(role.source, role.source.path, interface, graph, role.context_length)
    size = role.block_size if role.precision in BITS else None
    return replace(spec, block_size=size, quantizer=_quantizer_of(role), exporter=role.exporter)


def _require_all_found(role: Role, kept: KeptWeights | None) -> None:
    for weights in (kept, role.calibrated):
        if weights is not None:
            weights.require_all_found()


def _quantizer_of(role: Role) -> str | None:
    return role.quantizer if role.precision in BITS else None


def _write_form(
    model: ir.Model,
    role: Role,
    lowering: str,
    folder: Path,
    forms: Sequence[DecoderSpec],
    report: Report,
    kept: KeptWeights | None,
) -> DecoderSpec:
    """Lowers a base graph, and saves it beside the forms that are there."""
    on_weight = role.counter(QUANTISING, lowering, report)
    geometry = lower(
        model,
        lowering,
        role.precision,
        role.context_length,
        on_weight,
        block_size=role.block_size,
        kept=kept,
        calibrated=role.calibrated,
    )
    _require_all_found(role, kept)
    name = lowering if forms else "model"
    return DecoderSpec(
        source=role.source.name,
        architecture=role.source.architecture,
        graph=save_graph(model, folder, role.name, name, forms, role.counter(WRITING, lowering, report)),
        lowering=lowering,
        precision=role.precision,
        num_layers=geometry.num_layers,
        num_key_value_heads=geometry.num_key_value_heads,
        head_size=geometry.head_size,
        vocab_size=int(model.graph.outputs[0].shape[2]),
        context_length=role.context_length,
        cache_dtype=compute_type(lowering, role.precision).numpy().name,
        spare_slots=geometry.spare_slots,
        min_rows=1,
        block_size=role.block_size if role.precision in BITS else None,
        quantizer=_quantizer_of(role),
        exporter=role.exporter,
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
        members = list(group)
        names = [role.name for role in members]
        if source.kind == "graph":
            report(f"checking the cache of {source.name}", 0, 0)
            for name in names:
                spec = replace(specs[name], parity={"pieces": check_cache(specs[name], folder, probes[name])})
                checked[name] = _with_pass_shape(source, spec, folder, probes[name])
            continue
        report(COMPARING.format(source.name), 0, 0)
        forms = [(role, form) for role in members for form in specs[role.name].forms]
        heads = [head_tokens.get(role.name) for role, _ in forms]
        from .packed_checkpoint import unpacked

        with unpacked(source, folder) as plain:
            calibrated = [role.calibrated for role, _ in forms]
            parities = check_parity(plain, [form for _, form in forms], folder, probes[names[0]], heads, calibrated)
        measured: dict[str, list[DecoderSpec]] = {name: [] for name in names}
        for (role, form), parity in zip(forms, parities, strict=True):
            measured[role.name].append(_measured(role, form, parity, folder, probes[role.name], report))
        checked |= {name: replace(first, other_forms=tuple(others)) for name, (first, *others) in measured.items()}
    return checked


def _take_decoder(role: Role, folder: Path, report: Report) -> DecoderSpec:
    report(f"{role.name}: taking the graph of {role.source.name}", 0, 0)
    spec = take_graph(role.source, role.name, folder, role.context_length)
    default = DEFAULT_PRECISION if role.name == "target" else DEFAULT_DRAFT_PRECISION
    if role.precision not in (default, spec.precision):
        raise ExportError(f"{role.source.name} is in {spec.precision} and is taken as it is: ask for no other precision.")
    return spec


def _measured(
    role: Role, form: DecoderSpec, parity: Mapping[str, Any], folder: Path, probe: list[int], report: Report
) -> DecoderSpec:
    if form.parity:
        return form  # it lay in the bundle, and was compared again because all forms must be of one checkpoint
    report(role.title(MEASURING, form.lowering), 0, 0)
    if role.is_quantised:
        parity = {**parity, "size": _size(role, form)}
    return _with_pass_shape(role.source, replace(form, parity=parity), folder, probe)


def _size(role: Role, form: DecoderSpec) -> dict[str, float]:
    """Returns what quantisation saves, for the manifest: the form's own size, and its share of the checkpoint's in fp32."""
    size = sum(file.size for file in form.graph)
    share = size / (role.source.num_parameters * BYTES_PER_WEIGHT["fp32"])
    return {"megabytes": float(f"{size / 1e6:.4g}"), "share_of_fp32": float(f"{share:.3g}")}


def _with_pass_shape(source: Source, spec: DecoderSpec, folder: Path, probe: list[int]) -> DecoderSpec:
    with computed_in_float32(spec, folder) as runnable:
        shape = measure_row_equality(OrtBackend().load(runnable, folder), probe)
    if shape is None:
        raise ExportError(
            f"On this machine the graph of {source.name} gives other bits for a row when the text is cut into other "
            "passes, at any number of rows up to 16: its greedy text could depend on speculation."
        )
    spec = replace(spec, min_rows=shape.min_rows, row_multiple=shape.row_multiple, rows_measured_on=cpu_kernels())
    # Padding rows stand at the places behind the last token, where the model may have no position left.
    return replace(spec, context_length=min(spec.context_length, source.context_length - spec.most_padding))
