"""Decoders in bfloat16, which only devices compute: what is stored, how it is checked without one, how its caches are bound."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from export.base_graph import build_base_graph
from export.bfloat16 import computed_in_float32, round_parameters, widen
from export.bundle import export_bundle
from export.decoders import write_decoder
from export.errors import ExportError
from export.lowerings import LOWERINGS, lower
from export.parity import check_parity
from export.reference import load_reference
from export.role import Role
from export.source import Source
from runtime import Generator
from runtime.contract import DecoderSpec
from runtime.decoder import Decoder
from runtime.errors import DeviceError
from runtime.ort.backend import OrtBackend
from runtime.ort.cuda_backend import OrtCudaModel
from runtime.ort.device_context import Memory
from runtime.ort.interface import check_interface

CONTEXT = 48
# Sums in another order; `gqa` also has its rotation's cosines and sines in 8 bits.
TOLERANCES = {"gqa": 0.15, "static": 1e-4, "primitive": 1e-4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bfloat16")


@pytest.fixture(scope="module")
def specs(target_source: Source, folder: Path) -> dict[str, DecoderSpec]:
    def write(lowering: str) -> DecoderSpec:
        return write_decoder(Role(lowering, target_source, "bf16", CONTEXT, lowering=lowering), folder, lambda *_: None)

    return {lowering: write(lowering) for lowering in LOWERINGS}


@pytest.fixture(scope="module")
def expected(target_source: Source, probe: list[int]) -> NDArray[np.float32]:
    """Logits of the checkpoint in torch, its matrices rounded."""
    reference = load_reference(target_source)
    before = reference.logits([probe[:40]])[0]
    after = reference.logits([probe[:40]], round_parameters)[0]
    assert np.abs(after - before).max() > 10 * TOLERANCES["static"], "the rounding shows"
    return after


def in_pieces(model: OrtCudaModel, tokens: list[int], cut: list[int]) -> NDArray[np.float32]:
    decoder = Decoder(model, len(tokens), num_rows=max(cut))
    return np.concatenate([decoder.forward(tokens[decoder.past_length :][:rows], rows).copy() for rows in cut])


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_widened_graph_computes_what_torch_does_with_rounded_weights(
    specs: dict[str, DecoderSpec], folder: Path, expected: NDArray[np.float32], probe: list[int], lowering: str
):
    with computed_in_float32(specs[lowering], folder) as spec:
        model = OrtBackend(threads=1).load(spec, folder)
    found = in_pieces(model, probe[:40], [20, 1, 4, 15])
    assert np.abs(found - expected).max() < TOLERANCES[lowering]
    assert {path.name for path in (folder / lowering).iterdir()} == {"model.onnx", "model.onnx.data"}


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_weights_and_caches_take_two_bytes_and_logits_are_float32(
    specs: dict[str, DecoderSpec], folder: Path, target_source: Source, lowering: str
):
    spec = specs[lowering]
    assert (spec.precision, spec.cache_dtype, spec.cache_itemsize) == ("bf16", "bfloat16", 2)
    assert spec.cache_bytes_per_token == replace(spec, cache_dtype="float16").cache_bytes_per_token
    assert spec.context_bytes(10, 0) == 10 * 4 * 2 * 2 * 16 * 2  # layers, key and value, heads, width, bytes
    graph = onnx.load(folder / spec.graph[0].path, load_external_data=False).graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    caches = {name for pair in spec.names.cache_pairs(4) for name in pair}
    assert {types[name] for name in caches} == {TensorProto.BFLOAT16}
    assert types["logits"] == TensorProto.FLOAT
    matrices = [tensor for tensor in graph.initializer if len(tensor.dims) == 2 and "proj" in tensor.name]
    assert len(matrices) == 4 * 7
    matrices += [tensor for tensor in graph.initializer if "embed_tokens" in tensor.name]
    assert {tensor.data_type for tensor in matrices} == {TensorProto.BFLOAT16}
    assert spec.graph[1].size < 3 * target_source.num_parameters, "two bytes each, and tables"


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_norms_rotation_and_softmax_stay_in_float32(specs: dict[str, DecoderSpec], folder: Path, lowering: str):
    model = onnx.shape_inference.infer_shapes(onnx.load(folder / specs[lowering].graph[0].path))
    types = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
    types |= {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    # The checkpoint is float32: bfloat16 holds none of its norms' weights.
    spared = {"RMSNormalization", "RotaryEmbedding", "Softmax", "ReduceMean", "Sqrt"}
    nodes = [node for node in model.graph.node if node.op_type in spared or "LayerNormalization" in node.op_type]
    assert len(nodes) >= 9
    read = {types[name] for node in nodes for name in node.input if name in types}
    assert read - {TensorProto.INT64} == {TensorProto.FLOAT}


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_types_fit_each_other_as_onnx_runtime_reads_them(specs: dict[str, DecoderSpec], folder: Path, lowering: str):
    # It checks all types before it looks for kernels; the widened graph would hide a cast that is missing.
    with pytest.raises(Exception, match="NOT_IMPLEMENTED : Could not find an implementation for"):
        ort.InferenceSession(str(folder / specs[lowering].graph[0].path), providers=["CPUExecutionProvider"])


def test_norms_whose_weights_bfloat16_holds_compute_in_it(target_source: Source):
    model = build_base_graph(target_source)
    for value in model.graph.initializers.values():
        if "norm" in value.name:
            value.const_value = ir.tensor(value.const_value.numpy().astype(ir.DataType.BFLOAT16.numpy()).astype(np.float32))
    lower(model, "gqa", "bf16", CONTEXT, lambda *_: None)
    norms = [node for node in model.graph if "SimplifiedLayerNormalization" in node.op_type]
    assert len(norms) == 9
    assert {node.inputs[-1].dtype for node in norms} == {ir.DataType.BFLOAT16}


def test_wrong_weight_is_found(
    specs: dict[str, DecoderSpec], target_source: Source, folder: Path, probe: list[int], tmp_path: Path
):
    model = onnx.load(folder / specs["static"].graph[0].path)
    tensor = next(tensor for tensor in model.graph.initializer if "down_proj" in tensor.name)
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor)[::-1].copy(), tensor.name))
    (tmp_path / "static").mkdir()
    onnx.save(model, tmp_path / "static" / "model.onnx")
    spec = replace(specs["static"], graph=specs["static"].graph[:1])
    with pytest.raises(ExportError, match="does not compute what its checkpoint does"):
        check_parity(target_source, [spec], tmp_path, probe)
    assert [path.name for path in (tmp_path / "static").iterdir()] == ["model.onnx"]


def test_bundle_is_checked_and_the_cpu_refuses_it(tiny_target: Path, tmp_path: Path):
    bundle = export_bundle(str(tiny_target), None, tmp_path / "bundle", precision="bf16", lowering="static", max_length=64)
    assert bundle.target.cache_dtype == "bfloat16"
    assert all(step["max_difference"] < TOLERANCES["static"] for step in bundle.target.parity.values())
    assert {path.name for path in (tmp_path / "bundle" / "target").iterdir()} == {"model.onnx", "model.onnx.data"}
    with pytest.raises(DeviceError, match="bfloat16, for which ONNX Runtime has no kernels on the CPU: pass device='cuda'"):
        Generator.from_bundle(tmp_path / "bundle", device="cpu")


def between_casts(model: onnx.ModelProto, caches: list[tuple[str, str]]) -> None:
    """Computes in float32 what stands between caches of bfloat16, so that the CPU can run it."""
    widen(model)
    before, after = [], []
    for past, present in caches:
        before.append(helper.make_node("Cast", [past], [f"{past}.wide"], to=TensorProto.FLOAT))
        after.append(helper.make_node("Cast", [f"{present}.wide"], [present], to=TensorProto.BFLOAT16))
    names = {past for past, _ in caches} | {present for _, present in caches}
    for node in model.graph.node:
        for edges in (node.input, node.output):
            edges[:] = [f"{name}.wide" if name in names else name for name in edges]
    for value in (*model.graph.input, *model.graph.output):
        if value.name in names:
            value.type.tensor_type.elem_type = TensorProto.BFLOAT16
    nodes = [*before, *model.graph.node, *after]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


@pytest.mark.parametrize("lowering", ["static", "gqa"])
def test_caches_of_bfloat16_are_bound_rewound_and_copied(
    specs: dict[str, DecoderSpec], folder: Path, probe: list[int], lowering: str
):
    spec = specs[lowering]
    model = onnx.load(folder / spec.graph[0].path)
    between_casts(model, list(spec.names.cache_pairs(spec.num_layers)))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    check_interface(session, spec, folder)
    on_host = OrtCudaModel(spec, session, Memory("cpu", 0), "host")
    with computed_in_float32(spec, folder) as widened:
        expected = in_pieces(OrtBackend(threads=1).load(widened, folder), probe[:40], [40])
    found = in_pieces(on_host, probe[:40], [20, 1, 4, 15])
    assert 0 < np.abs(found - expected).max() < 1.0, "keys and values have 8 bits"
    decoder = Decoder(on_host, 40, num_rows=20)
    decoder.forward(probe[:20], 1)
    decoder.forward(probe[40:45], 1)
    decoder.rewind_to(20)
    copy = decoder.fork()
    decoder.forward(probe[45:60], 1)
    assert np.array_equal(copy.forward(probe[20:21], 1), found[20:21])
