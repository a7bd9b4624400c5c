"""TensorRTBackend on fake modules that really compute: addresses, profiles, caches in place, order, rewind, forks."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from engines import backend as backend_module
from engines.backend import TensorRTBackend, TensorRTModel
from engines.profiles import Profile, plan_profiles
from engines.sidecar import EngineRecord, engine_path, engines_folder, graph_hashes
from engines.trt_module import TensorRTModule
from runtime.contract import Bundle, file_sha256
from runtime.cuda_driver import CudaDriver, Gpu
from runtime.decoder import Decoder
from runtime.errors import BundleError, DeviceError

from .exported import export_decoder
from .fake_cuda import FakeCudart
from .fake_tensorrt import CudaGraphStrategy, SpecializationStrategy, fake_module, write_engine
from .tiny_graph import CAPACITY, CONTEXT, LAYERS, VOCAB, build_tiny_graph, with_lowering, write_decoder, write_tiny_bundle

ORIN = Gpu("Orin", (8, 7), 8 << 30, integrated=True)
PROFILES = plan_profiles(fixed_rows=4, num_draft_tokens=3, max_rows=CONTEXT)
TEXT = np.random.default_rng(0).integers(0, VOCAB, CONTEXT).tolist()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="module")
def reference(bundle: Bundle) -> np.ndarray:
    """All logits of TEXT, by ONNX Runtime in one pass."""
    session = ort.InferenceSession(bundle.folder / bundle.target.graph[0].path, providers=["CPUExecutionProvider"])
    caches = {value.name: np.zeros(value.shape, np.float32) for value in session.get_inputs() if "past_key" in value.name}
    feeds = {"input_ids": np.array([TEXT]), "past_length": np.zeros(1, np.int64), "logits_rows": np.arange(CONTEXT), **caches}
    return session.run(["logits"], feeds)[0][0]


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    """Both fake modules in the place of the real ones, and a driver with one GPU."""
    cudart = FakeCudart()
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", cudart)
    monkeypatch.setitem(sys.modules, "tensorrt", fake_module(cudart))
    monkeypatch.setattr(backend_module, "probe_cuda_driver", lambda: CudaDriver((12, 6), (ORIN, ORIN), None))
    return cudart


def write_target_engine(
    bundle: Bundle, profiles: tuple[Profile, ...] = PROFILES, name: str = "tensorrt", **changes: object
) -> Path:
    """Writes an engine and its record for the target where the backend looks for it."""
    tensorrt = TensorRTModule.load(name)
    path = engine_path(engines_folder(bundle.folder, tensorrt, ORIN.compute_capability), bundle.target)
    write_engine(path, bundle.folder / bundle.target.graph[0].path, profiles)
    facts = {
        "module": name,
        "version": tensorrt.version,
        "compute_capability": "87",
        "graph": graph_hashes(bundle.target),
        "capacity": CAPACITY,
        "profiles": profiles,
        "flags": {},
        "build_seconds": 1.0,
        "peak_memory": 1,
        "size": path.stat().st_size,
        "sha256": file_sha256(path),
    }
    EngineRecord(**(facts | changes)).save(path)
    return path


def load(bundle: Bundle, device: str = "tensorrt") -> TensorRTModel:
    return TensorRTBackend(device).load(bundle.target, bundle.folder)


@pytest.fixture
def model(bundle: Bundle, cudart: FakeCudart) -> TensorRTModel:
    write_target_engine(bundle)
    return load(bundle)


def passes() -> list[tuple[int, int]]:
    return sys.modules["tensorrt"].passes


def decoder(model: TensorRTModel) -> Decoder:
    return Decoder(model, CONTEXT, num_rows=16)


def in_pieces(decoder: Decoder, cut: list[int]) -> np.ndarray:
    return np.concatenate([decoder.forward(TEXT[decoder.past_length :][:rows], rows).copy() for rows in cut])


# --- what a generation does ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cut", [[16, 16, 16], [1] * 20, [16, 1, 1, 3, 4, 2, 1, 1, 4], [5, 7, 4, 9, 1, 1, 1, 16], [5, 5, 5, 6, 16]]
)
def test_logits_are_those_of_onnx_runtime(model: TensorRTModel, reference: np.ndarray, cut: list[int]) -> None:
    found = in_pieces(decoder(model), cut)
    np.testing.assert_allclose(found, reference[: sum(cut)], atol=1e-4)


def test_steps_and_verifications_are_the_same_step(model: TensorRTModel) -> None:
    assert (model.spec.min_rows, model.spec.row_multiple) == (4, 4)
    made = decoder(model)
    made.forward(TEXT[:16], 1)
    assert passes() == [(1, 12), (0, 4)]
    in_pieces(made, [1, 2, 3, 4, 5, 13])
    assert passes()[2:] == [(0, 4)] * (4 + 2 + 4)


def test_only_rows_of_steps_reach_the_head(model: TensorRTModel) -> None:
    made = decoder(model)
    made.forward(TEXT[:16], 1)
    made.forward(TEXT[16:18], 1)
    assert passes() == [(1, 12), (0, 4), (0, 4)]
    assert sys.modules["tensorrt"].logits_rows == [1, 4, 4]


def test_a_graph_that_gives_logits_for_all_rows_is_taken_too(
    cudart: FakeCudart, tmp_path: Path, bundle: Bundle, reference: np.ndarray
) -> None:
    spec = write_decoder(tmp_path, "target", build_tiny_graph(chooses_rows=False))
    other = replace(bundle, folder=tmp_path, target=spec)
    write_target_engine(other)
    made = decoder(load(other))
    np.testing.assert_allclose(made.forward(TEXT[:16], 1)[0], reference[15], atol=1e-4)
    np.testing.assert_allclose(made.forward(TEXT[16:19], 3), reference[16:19], atol=1e-4)
    assert sys.modules["tensorrt"].logits_rows == [12, 4, 4]


def test_every_row_that_is_wanted_has_the_same_bits_however_the_text_is_cut(model: TensorRTModel) -> None:
    sys.modules["tensorrt"].rounding = 0.1
    cuts = ([1] * 30, [4] * 7 + [2], [16, 14], [15, 15], [9, 1, 5, 2, 13], [3, 1, 2, 2, 4, 11, 7])
    one_by_one, *others = (in_pieces(decoder(model), cut) for cut in cuts)
    for other in others:
        assert np.array_equal(one_by_one, other)


@pytest.mark.parametrize("prompt", [1, 4, 5, 17, 18, 20, 21, 30])
def test_a_proposal_of_any_length_changes_no_bit_even_behind_its_prompt(
    model: TensorRTModel, prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.decoder._MAX_ROWS", 8)
    sys.modules["tensorrt"].rounding = 0.1
    plain = decoder(model)
    expected = [plain.forward(TEXT[:prompt], 1).copy()]
    expected += [plain.forward([token], 1).copy() for token in TEXT[prompt : prompt + 15]]
    for proposed in range(16):
        found = decoder(model).forward(TEXT[: prompt + proposed], proposed + 1)
        assert np.array_equal(found, np.concatenate(expected[: proposed + 1]))


def test_a_pass_that_is_no_multiple_has_its_odd_rows_in_front(model: TensorRTModel, reference: np.ndarray) -> None:
    found = model.open_context(CAPACITY, CONTEXT).run(np.array(TEXT[:11]), 0, 11)
    assert passes() == [(1, 3), (0, 4), (0, 4)]
    np.testing.assert_allclose(found, reference[:11], atol=1e-4)
    # Of the odd rows, some may be wanted and others not.
    found = model.open_context(CAPACITY, CONTEXT).run(np.array(TEXT[:11]), 0, 10)
    np.testing.assert_allclose(found, reference[1:11], atol=1e-4)


def test_a_pass_over_the_whole_context_has_its_padding_behind_it(
    bundle: Bundle, cudart: FakeCudart, reference: np.ndarray
) -> None:
    write_target_engine(bundle, plan_profiles(fixed_rows=5, num_draft_tokens=4, max_rows=50))
    made = Decoder(load(bundle), CONTEXT, num_rows=16)
    np.testing.assert_allclose(made.forward(TEXT, 16), reference[-16:], atol=1e-4)
    assert passes() == [(1, 30), *[(0, 5)] * 4]
    made.rewind_to(CONTEXT - 1)
    np.testing.assert_allclose(made.forward(TEXT[-1:], 1), reference[-1:], atol=1e-4)


def test_a_draft_catches_up_and_steps(bundle: Bundle, cudart: FakeCudart, reference: np.ndarray) -> None:
    write_target_engine(bundle, plan_profiles(fixed_rows=2, num_draft_tokens=7, max_rows=CONTEXT))
    made = decoder(load(bundle))
    for begin, end in ((0, 16), (16, 17), (17, 22), (22, 24)):
        np.testing.assert_allclose(made.forward(TEXT[begin:end], 1)[0], reference[end - 1], atol=1e-4)
    assert passes() == [(2, 14), (0, 2), (0, 2), (1, 4), (0, 2), (0, 2)]


def test_a_long_proposal_that_is_refused_is_written_over(model: TensorRTModel, reference: np.ndarray) -> None:
    made = decoder(model)
    made.forward(TEXT[:16], 1)
    for length in (16, 17, 22, 30):
        made.rewind_to(length)
        made.forward([7] * 13, 13)
        made.rewind_to(length)
        np.testing.assert_allclose(made.forward(TEXT[length : length + 13], 13), reference[length : length + 13], atol=1e-4)


def test_a_rewind_goes_on_as_if_nothing_had_been_there(model: TensorRTModel, reference: np.ndarray) -> None:
    made = decoder(model)
    made.forward(TEXT[:16], 1)
    made.forward([7, 7, 7, 7], 4)
    made.rewind_to(14)
    np.testing.assert_allclose(made.forward(TEXT[14:18], 4), reference[14:18], atol=1e-4)


def test_a_fork_copies_what_is_cached_and_neither_sees_the_other(model: TensorRTModel, reference: np.ndarray) -> None:
    source = decoder(model)
    source.forward(TEXT[:16], 1)
    copy = source.fork()
    copy.forward([7, 7, 7, 7], 4)
    np.testing.assert_allclose(source.forward(TEXT[16:20], 4), reference[16:20], atol=1e-4)
    copy.rewind_to(16)
    np.testing.assert_allclose(copy.forward(TEXT[16:20], 4), reference[16:20], atol=1e-4)


def test_only_the_rows_that_are_wanted_come_back(model: TensorRTModel, reference: np.ndarray) -> None:
    context = model.open_context(CAPACITY, CONTEXT)
    assert context.run(np.array(TEXT[:16]), 0, 0).shape == (0, VOCAB)
    logits = context.run(np.array(TEXT[16:20]), 16, 2)
    np.testing.assert_allclose(logits, reference[18:20], atol=1e-4)
    assert np.isnan(context._logits[:2]).all()


def test_two_contexts_share_a_model_and_nothing_else(model: TensorRTModel, reference: np.ndarray) -> None:
    first, second = decoder(model), decoder(model)
    second.forward([9] * 16, 1)
    first.forward(TEXT[:16], 1)
    second.forward([9] * 4, 4)
    np.testing.assert_allclose(first.forward(TEXT[16:20], 4), reference[16:20], atol=1e-4)


@pytest.mark.parametrize("lowering", ["static", "primitive"])
def test_an_exported_graph_gives_what_the_onnx_runtime_backend_gives(
    tiny_target: Path, tmp_path: Path, request: pytest.FixtureRequest, lowering: str
) -> None:
    pytest.importorskip("mobius", reason="exporting needs the extra 'export'")
    from runtime.ort.backend import OrtBackend

    spec = export_decoder(tmp_path, "target", str(tiny_target), lowering, "fp32", 100)
    request.getfixturevalue("cudart")  # not before: what exports asks which packages there are
    other = Bundle(tmp_path, SimpleNamespace(), spec, None, "tests")
    write_target_engine(other, plan_profiles(4, 3, 100), capacity=spec.cache_capacity)
    text = np.random.default_rng(1).integers(3, spec.vocab_size, 100).tolist()
    expected = Decoder(OrtBackend().load(spec, tmp_path), 100, num_rows=100).forward(text, 100)
    found = Decoder(load(other), 100, num_rows=16)
    # To the last slot of the context, whose step has padding rows behind it.
    for begin, end in ((0, 60), (60, 64), (64, 65), (65, 68), (68, 84), (84, 97), (97, 100)):
        logits = found.forward(text[begin:end], min(16, end - begin))
        np.testing.assert_allclose(logits, expected[max(begin, end - 16) : end], atol=1e-3)


# --- graphs, memory, devices -----------------------------------------------------------------------------------------


def test_the_fixed_step_is_recorded_at_its_second_pass_and_launched_from_then_on(
    model: TensorRTModel, cudart: FakeCudart, reference: np.ndarray
) -> None:
    made = decoder(model)
    made.forward(TEXT[:16], 1)
    launches = []
    for start in range(16, 40, 4):
        found = made.forward(TEXT[start : start + 4], 4)
        np.testing.assert_allclose(found, reference[start : start + 4], atol=1e-4)
        launches.append(cudart.launches)
    assert launches == [1, 2, 3, 4, 5, 6]  # the prompt's last rows were the first step
    np.testing.assert_allclose(made.forward(TEXT[40:45], 5), reference[40:45], atol=1e-4)
    assert cudart.launches == 8


def test_a_step_that_cannot_be_recorded_is_said_and_enqueued(
    model: TensorRTModel, cudart: FakeCudart, reference: np.ndarray
) -> None:
    cudart.refused.add("cudaStreamEndCapture")
    made = decoder(model)
    made.forward(TEXT[:16], 1)
    with pytest.warns(RuntimeWarning, match="cannot record its steps as a CUDA graph .cudaErrorStreamCaptureUnsupported"):
        found = made.forward(TEXT[16:20], 4)
    np.testing.assert_allclose(found, reference[16:20], atol=1e-4)
    np.testing.assert_allclose(made.forward(TEXT[20:28], 8), reference[20:28], atol=1e-4)
    assert cudart.launches == 0


def test_tensorrt_rtx_compiles_at_once_and_records_for_itself(
    bundle: Bundle, cudart: FakeCudart, reference: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", fake_module(cudart, "1.7.1.116"))
    write_target_engine(bundle, name="tensorrt_rtx")
    model = load(bundle, "tensorrt-rtx")
    np.testing.assert_allclose(in_pieces(decoder(model), [16, 4, 4, 4]), reference[:28], atol=1e-4)
    assert cudart.launches == 0
    configs = model._engine.runtime_configs
    assert len(configs) == len(PROFILES)
    for config in configs:
        assert config.dynamic_shapes_kernel_specialization_strategy is SpecializationStrategy.EAGER
        assert config.cuda_graph_strategy is CudaGraphStrategy.WHOLE_GRAPH_CAPTURE


def test_everything_is_given_back(bundle: Bundle, cudart: FakeCudart) -> None:
    write_target_engine(bundle)
    model = load(bundle)
    made = decoder(model)
    made.forward(TEXT[:4], 4)
    made.forward(TEXT[4:8], 4)
    logits = made.forward(TEXT[8:12], 4)
    before = logits.copy()
    assert len(cudart._blocks) == 2 * LAYERS + 4
    del made
    assert not cudart._blocks
    assert not cudart._streams
    assert len(cudart._pinned) == 1  # the logits are still held
    assert np.array_equal(logits, before)
    del logits
    assert not cudart._pinned


def test_memory_that_cannot_be_had_is_one_sentence(model: TensorRTModel, cudart: FakeCudart) -> None:
    cudart.refused.add("cudaMalloc")
    with pytest.raises(
        DeviceError, match=r"A cache of 64 tokens, 48 rows of logits .* could not be taken on TensorRT .*, Orin"
    ):
        model.open_context(CAPACITY, CONTEXT)


def test_the_number_behind_the_colon_is_the_gpu_of_every_thread(bundle: Bundle, cudart: FakeCudart) -> None:
    write_target_engine(bundle)
    made = decoder(load(bundle, "tensorrt:1"))
    seen = []

    def generate() -> None:
        made.forward(TEXT[:4], 4)
        seen.append(cudart.device.number)

    thread = threading.Thread(target=generate)
    thread.start()
    thread.join()
    assert seen == [1]


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["tensorrt", "tensorrt-rtx", "tensorrt:1"])
def test_without_a_driver_tensorrt_is_not_even_imported(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trouble = "this machine has no NVIDIA driver"
    monkeypatch.setattr(backend_module, "probe_cuda_driver", lambda: CudaDriver(None, (), trouble))
    monkeypatch.setattr(TensorRTModule, "load", lambda name: pytest.fail("TensorRT was touched"))
    with pytest.raises(DeviceError, match=f"'{device}' .*: {trouble}"):
        TensorRTBackend(device)


@pytest.mark.parametrize(
    ("device", "sentence"), [("tensorrt:2", "driver offers 0: Orin, 1: Orin"), ("tensorrt:x", "'tensorrt:1' is expected")]
)
def test_a_gpu_that_is_not_there_is_refused(cudart: FakeCudart, device: str, sentence: str) -> None:
    with pytest.raises(DeviceError, match=sentence):
        TensorRTBackend(device)


def test_modules_that_are_missing_or_old_are_refused(cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", fake_module(cudart, "8.6.1"))
    with pytest.raises(DeviceError, match=r"TensorRT 8\.6\.1 is too old: 10\.3"):
        TensorRTBackend("tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(DeviceError, match=r"'tensorrt' cannot be imported .* pip install -e '\.\[tensorrt\]'"):
        TensorRTBackend("tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt", fake_module(cudart))
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(DeviceError, match="pip install cuda-bindings"):
        TensorRTBackend("tensorrt")


def test_a_bundle_without_engines_for_this_gpu_names_those_it_has(bundle: Bundle, cudart: FakeCudart, tmp_path: Path) -> None:
    (tmp_path / "engines" / "tensorrt-10.3.0-sm89").mkdir(parents=True)
    command = f"python scripts/build_engines.py {tmp_path} --module tensorrt"
    with pytest.raises(BundleError, match=r"capability 87 \(there are: tensorrt-10\.3\.0-sm89\): build them .*" + command):
        TensorRTBackend("tensorrt").load(bundle.target, tmp_path)


@pytest.mark.parametrize(("lowering", "version"), [("gqa", "10.16.1"), ("growing", "10.16.1"), ("static", "10.3.0")])
def test_a_lowering_it_cannot_build_is_refused_with_the_export_command(
    bundle: Bundle, cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch, lowering: str, version: str
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", fake_module(cudart, version))
    best = "primitive" if version == "10.3.0" else "static"
    remedy = rf"export\.py --add-lowering {best} --out "
    if lowering == "growing":
        remedy = f"export its checkpoint, with --lowering {best}"
    with pytest.raises(BundleError, match=remedy):
        TensorRTBackend("tensorrt").load(with_lowering(bundle, lowering).target, bundle.folder)


def test_a_stale_engine_is_refused(bundle: Bundle, cudart: FakeCudart) -> None:
    write_target_engine(bundle, version="10.3.0")
    with pytest.raises(
        BundleError, match=r"was built by tensorrt 10\.3\.0, and this is tensorrt 10\.16\.1\.11: python scripts/"
    ):
        load(bundle)


def test_an_engine_that_cannot_be_loaded_is_refused(bundle: Bundle, cudart: FakeCudart) -> None:
    path = write_target_engine(bundle)
    path.write_text("rubbish")
    record = EngineRecord.load(path, "")
    replace(record, size=path.stat().st_size, sha256=file_sha256(path)).save(path)
    with pytest.raises(BundleError, match=r"cannot load .*model\.engine \(Magic tag does not match\): python scripts/build"):
        load(bundle)


def test_more_tokens_or_rows_than_the_engine_has_are_refused(model: TensorRTModel, bundle: Bundle) -> None:
    with pytest.raises(BundleError, match=f"caches of {CAPACITY} slots, and {CAPACITY + 1} are needed"):
        model.open_context(CAPACITY + 1, CONTEXT)
    model.open_context(CAPACITY, CONTEXT + 1)  # no pass is longer than the context
    write_target_engine(bundle, plan_profiles(4, 3, 16))
    with pytest.raises(BundleError, match=r"up to 16 rows, and 17 are needed: .*build_engines\.py .* --max-rows 17"):
        load(bundle).open_context(CAPACITY, 17)


def test_logits_of_another_type_are_refused(bundle: Bundle, cudart: FakeCudart, tmp_path: Path) -> None:
    graph = build_tiny_graph()
    graph.graph.node[-1].attribute[0].i = onnx.TensorProto.FLOAT16
    graph.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    other = replace(bundle, folder=tmp_path, target=write_decoder(tmp_path, "target", graph))
    write_target_engine(other)
    with pytest.raises(BundleError, match="gives logits of float16, and float32 is expected"):
        load(other)


def test_a_failing_pass_is_one_sentence(model: TensorRTModel) -> None:
    context = model.open_context(CAPACITY, CONTEXT)
    context._executions[1]._execution._addresses.pop("logits")
    with pytest.raises(DeviceError, match=r"failed in a pass of 16 rows behind 3 cached tokens: \['logits'\] are not bound"):
        context.run(np.array(TEXT[:16]), 3, 1)


def test_the_devices_are_registered_under_their_names() -> None:
    lines = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    section = lines[lines.index('[project.entry-points."runtime.backends"]') + 1 :]
    registered = dict(line.split(" = ") for line in section[: section.index("")])
    assert registered.keys() == {"tensorrt", "tensorrt-rtx"}
    assert set(registered.values()) == {'"engines.backend:TensorRTBackend"'}
