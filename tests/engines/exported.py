"""A decoder as the exporter makes it, for tests of engines."""

from pathlib import Path

from runtime.contract import DecoderSpec, FileRecord


def export_decoder(folder: Path, name: str, source: str, lowering: str, precision: str, context_length: int) -> DecoderSpec:
    """Exports a decoder as export_bundle does, without its checks against torch: they are minutes, and have their own tests."""
    import onnx_ir as ir

    from export.base_graph import build_base_graph
    from export.lowerings import compute_type, graph_names, lower
    from export.source import resolve_source

    resolved = resolve_source(source)
    model = build_base_graph(resolved)
    geometry = lower(model, lowering, precision, context_length, lambda *_: None)
    (folder / name).mkdir()
    ir.save(model, folder / name / "model.onnx", external_data="model.onnx.data")
    files = sorted(str(path.relative_to(folder)) for path in (folder / name).iterdir())
    return DecoderSpec(
        source=resolved.name,
        architecture=resolved.architecture,
        graph=tuple(FileRecord.of(folder, file) for file in files),
        lowering=lowering,
        precision=precision,
        num_layers=geometry.num_layers,
        num_key_value_heads=geometry.num_key_value_heads,
        head_size=geometry.head_size,
        vocab_size=int(model.graph.outputs[0].shape[2]),
        context_length=context_length,
        cache_dtype=compute_type(lowering, precision).numpy().name,
        spare_slots=geometry.spare_slots,
        min_rows=1,
        cache_capacity=geometry.cache_capacity,
        names=graph_names(model),
    )
