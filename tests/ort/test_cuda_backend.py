"""ONNX Runtime on a GPU: what is refused and how; and the binding, proven in host memory. A GPU proves the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from runtime import Generator, SamplingParams
from runtime.backend import device_number, open_backend
from runtime.contract import Bundle
from runtime.cuda_driver import CudaDriver, Gpu, probe_cuda_driver
from runtime.cuda_options import CudaOptions
from runtime.decoder import Decoder
from runtime.device_memory import check_pair_fits, free_memory_of
from runtime.errors import BundleError, DeviceError
from runtime.manifest import load_bundle
from runtime.memory import MemoryBudget, free_memory
from runtime.ort.backend import OrtBackend
from runtime.ort.cuda_backend import CUDA, OrtCudaBackend, OrtCudaModel, check_on_device
from runtime.ort.device_context import GRAPH_ROWS, DeviceContext, Memory
from runtime.tokenizer import Tokenizer

HOST = Memory("cpu", 0)
ORIN = Gpu("Orin", (8, 7), 8 << 30, integrated=True)
RTX = Gpu("RTX", (8, 9), 24 << 30, integrated=False)


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path) -> Bundle:
    return load_bundle(tiny_bundle)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return np.random.default_rng(5).integers(3, 512, 60).tolist()


def session_of(bundle: Bundle, role: str = "target") -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    path = bundle.folder / getattr(bundle, role).graph[0].path
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def on_host(bundle: Bundle, role: str = "target", *, cuda_graphs: bool = False) -> OrtCudaModel:
    """The GPU's model, its buffers and its session in host memory."""
    return OrtCudaModel(getattr(bundle, role), session_of(bundle, role), HOST, "host", cuda_graphs=cuda_graphs)


def in_pieces(model: OrtCudaModel, tokens: list[int], cut: list[int]) -> NDArray[np.float32]:
    decoder = Decoder(model, len(tokens), num_rows=max(cut))
    return np.concatenate([decoder.forward(tokens[decoder.past_length :][:rows], rows).copy() for rows in cut])


# --- the binding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["growing mask", "mask of one length"])
@pytest.mark.parametrize("cut", [[60], [30, 30], [1] * 60, [20, 5, 5, 5, 25]], ids=lambda cut: str(cut[0]))
def test_bound_by_values_equals_bound_by_address(bundle: Bundle, tokens: list[int], cut: list[int], cuda_graphs: bool):
    for role in ("target", "draft"):
        expected = in_pieces(OrtBackend(threads=1).load(getattr(bundle, role), bundle.folder), tokens, [60])
        assert np.array_equal(in_pieces(on_host(bundle, role, cuda_graphs=cuda_graphs), tokens, cut), expected)


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_rewind_and_feed_again_equals_fresh(bundle: Bundle, tokens: list[int], cuda_graphs: bool):
    model = on_host(bundle, cuda_graphs=cuda_graphs)
    decoder = Decoder(model, 60, num_rows=60)
    decoder.forward(tokens[:40], 1)
    decoder.rewind_to(17)
    other = tokens[::-1][:43]
    assert np.array_equal(decoder.forward(other, 43), in_pieces(model, tokens[:17] + other, [60])[17:])


def test_a_copy_goes_on_like_its_source_and_neither_sees_the_other(bundle: Bundle, tokens: list[int]):
    model = on_host(bundle)
    expected = in_pieces(model, tokens, [60])
    source = Decoder(model, 60, num_rows=60)
    source.forward(tokens[:40], 1)
    copy = source.fork()
    other = tokens[::-1][:20]
    found_other = copy.forward(other, 20).copy()
    assert np.array_equal(source.forward(tokens[40:], 20), expected[40:])
    assert np.array_equal(found_other, in_pieces(model, tokens[:40] + other, [60])[40:])


@pytest.mark.parametrize("lowering", ["static", "primitive"])
def test_graphs_that_are_told_the_length_as_a_number(tiny_draft: Path, tmp_path: Path, tokens: list[int], lowering: str):
    pytest.importorskip("mobius", reason="exporting needs the extra 'export'")
    from export.bundle import export_bundle

    bundle = export_bundle(str(tiny_draft), None, tmp_path / "bundle", precision="fp32", lowering=lowering)
    assert bundle.target.names.past_length is not None
    by_address = OrtBackend(threads=1).load(bundle.target, bundle.folder)
    for cuda_graphs in (False, True):
        model = on_host(bundle, cuda_graphs=cuda_graphs)
        for cut in ([60], [20, 1, 4, 5, 30]):
            assert np.array_equal(in_pieces(model, tokens, cut), in_pieces(by_address, tokens, cut))
        decoder = Decoder(model, 60, num_rows=60)
        decoder.forward(tokens[:40], 1)
        decoder.rewind_to(10)  # what lies behind the length is not read
        assert np.array_equal(decoder.forward(tokens[10:], 50), in_pieces(by_address, tokens, [10, 50])[10:])


def test_a_copy_takes_the_cached_tokens_only(bundle: Bundle, tokens: list[int]):
    model = on_host(bundle)
    source, copy = model.open_context(48, 40), model.open_context(48, 40)
    for cache in copy.caches:
        cache.update_inplace(np.full(cache.shape(), 7, np.float32))
    source.run(np.array(tokens[:40]), 0, 1)
    copy.copy_from(source, 25)
    for mine, theirs in zip(copy.caches, source.caches, strict=True):
        assert np.array_equal(mine.numpy()[:, :, :25], theirs.numpy()[:, :, :25])
        assert (mine.numpy()[:, :, 25:] == 7).all()


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_only_the_rows_asked_for_come_back(bundle: Bundle, tokens: list[int], cuda_graphs: bool):
    whole = in_pieces(on_host(bundle), tokens, [60])
    context = on_host(bundle, cuda_graphs=cuda_graphs).open_context(61, 60)
    assert context.run(np.array(tokens[:50]), 0, 0).shape == (0, 512)
    found = context.run(np.array(tokens[50:]), 50, 3)
    assert (found.dtype, found.shape) == (np.float32, (3, 512))
    assert np.array_equal(found, whole[-3:])


def test_caches_begin_as_zeros(bundle: Bundle):
    # What attention masks out is multiplied by zero, which NaN would survive.
    assert not any(cache.numpy().any() for cache in on_host(bundle).open_context(31, 4).caches)


def test_each_context_and_number_of_rows_has_a_graph_of_its_own(bundle: Bundle, monkeypatch: pytest.MonkeyPatch):
    seen = []

    class RunOptions:
        def add_run_config_entry(self, key: str, value: str) -> None:
            seen.append((key, int(value)))

    class Session:
        def __init__(self, session: ort.InferenceSession) -> None:
            self._session = session

        def run_with_iobinding(self, binding: ort.IOBinding, options: object) -> None:
            self._session.run_with_iobinding(binding)

        def __getattr__(self, name: str) -> object:
            return getattr(self._session, name)

    monkeypatch.setattr("runtime.ort.device_context.ort.RunOptions", RunOptions)
    model = OrtCudaModel(bundle.target, Session(session_of(bundle)), HOST, "host", cuda_graphs=True)
    for context in (model.open_context(80, 40), model.open_context(80, 40)):
        for rows in (1, 2, GRAPH_ROWS, 1, GRAPH_ROWS + 1):
            context.run(np.full(rows, 5), 0, 1)
    assert {key for key, _ in seen} == {"gpu_graph_id"}
    first, second = [number for _, number in seen[:5]], [number for _, number in seen[5:]]
    assert first[0] == first[3]
    assert first[4] == second[4] == -1  # not captured
    assert len({*first, *second}) == 3 + 3 + 1


def test_a_failing_pass_is_one_sentence(bundle: Bundle):
    context = on_host(bundle).open_context(16, 4)
    with pytest.raises(DeviceError, match="ONNX Runtime failed in a pass of 2 rows behind 3 cached tokens: ") as caught:
        context.run(np.array([5, 512]), 3, 1)
    assert "\n" not in str(caught.value)


def test_a_cache_that_does_not_fit_is_one_sentence(bundle: Bundle, monkeypatch: pytest.MonkeyPatch):
    def refuse(self: Memory, array: NDArray[np.generic]) -> None:
        raise RuntimeError("Failed to allocate memory for requested buffer of size 1\nmore")

    monkeypatch.setattr(Memory, "place", refuse)
    with pytest.raises(DeviceError, match=r"A cache of 64 tokens and 8 rows of logits take 0\.00 GB, which host does not give"):
        on_host(bundle).open_context(64, 8)


def test_a_pair_generates_the_same_text(bundle: Bundle, tiny_bundle: Path):
    params = SamplingParams(max_new_tokens=24)
    tokenizer = Tokenizer.from_spec(bundle.tokenizer, bundle.folder)
    expected = Generator.from_bundle(tiny_bundle, drafter="model").generate("1 2 3", params)
    for cuda_graphs in (False, True):
        models = [on_host(bundle, role, cuda_graphs=cuda_graphs) for role in ("target", "draft")]
        generator = Generator(*models, tokenizer, bundle.tokenizer.eos_token_ids)
        found = generator.generate("1 2 3", params)
        assert found.token_ids == expected.token_ids
        assert found.stats.draft_passes > 0
        assert "host" in generator.describe()["target"]


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this process believe in an ONNX Runtime with CUDA, a driver, and whatever the provider says."""

    def believe(driver: CudaDriver, words: str | None, providers: tuple[str, ...] = (CUDA,)) -> None:
        def trial(provider: str, options: dict[str, str]) -> None:
            assert provider == CUDA
            if words is not None:
                raise DeviceError(words)

        monkeypatch.setattr("runtime.ort.cuda_backend.ort.get_available_providers", lambda: list(providers))
        monkeypatch.setattr("runtime.ort.cuda_backend.probe_cuda_driver", lambda: driver)
        monkeypatch.setattr("runtime.ort.cuda_backend.try_provider", trial)

    return believe


@pytest.mark.parametrize(
    ("device", "driver", "words", "providers", "sentence"),
    [
        ("cuda", CudaDriver((12, 6), (ORIN,), None), None, ("CPUExecutionProvider",),
         r"'cuda' is not available: the installed ONNX Runtime \(\S+ \S+\) is a build without CUDA; python scripts/doctor\.py"),
        ("cuda", CudaDriver(None, (), "this machine has no NVIDIA driver"), None, (CUDA,),
         r"'cuda' is not available: this machine has no NVIDIA driver\. Install the driver"),
        ("cuda:1", CudaDriver((12, 6), (ORIN,), None), None, (CUDA,),
         r"'cuda:1' is not available: the driver offers 0: Orin\."),
        ("cuda", CudaDriver((12, 6), (ORIN,), None), "CUDA error cudaErrorNoKernelImageForDevice: bad", (CUDA,),
         r"'cuda' is not available: ONNX Runtime \S+ was built without kernels for Orin \(sm_87\); python scripts/doctor\.py"),
        ("cuda", CudaDriver((12, 6), (ORIN,), None), "fallback has been disabled", (CUDA,),
         r"'cuda' is not available: ONNX Runtime \S+ does not compute on Orin \(fallback has been disabled\); python"),
    ],
)  # fmt: skip
def test_a_gpu_that_does_not_serve_is_named(machine, device, driver, words, providers, sentence):
    machine(driver, words, providers)
    with pytest.raises(DeviceError, match=sentence) as caught:
        open_backend(device, threads=None, shared_thread_pool=False)
    assert "\n" not in str(caught.value)


def test_options_are_frugal_and_exact_unless_asked_otherwise(machine):
    machine(CudaDriver((12, 6), (RTX, ORIN), None), None)
    assert OrtCudaBackend().options == {
        "device_id": "0",
        "arena_extend_strategy": "kSameAsRequested",
        "use_tf32": "0",
        "enable_cuda_graph": "0",
    }
    asked = OrtCudaBackend(1, options=CudaOptions(memory_limit=1 << 30, tf32=True, cuda_graphs=True))
    assert asked.gpu == ORIN
    expected = {"device_id": "1", "use_tf32": "1", "enable_cuda_graph": "1", "gpu_mem_limit": str(1 << 30)}
    assert expected.items() <= asked.options.items()


def test_a_growing_graph_is_refused(machine, bundle: Bundle):
    machine(CudaDriver((12, 6), (RTX,), None), None)
    growing = dataclasses.replace(bundle.target, lowering="growing")
    with pytest.raises(BundleError, match=r"target/model\.onnx has a growing cache, .*: export the model again for the GPU\."):
        OrtCudaBackend().load(growing, bundle.folder)


@pytest.mark.parametrize(
    ("precision", "way"),
    [
        ("int4", r"add a form in float16 with scripts/export\.py --add-lowering gqa-half --out \S+"),
        ("fp32", r"export the model with scripts/export\.py --precision fp16 \(or bf16\)"),
    ],
)
def test_attention_in_float32_is_refused_with_the_command(machine, bundle: Bundle, precision: str, way: str):
    machine(CudaDriver((12, 6), (RTX,), None), None)
    spec = dataclasses.replace(bundle.target, precision=precision)
    sentence = rf"target/model\.onnx computes in float32, .* no CUDA kernel: {way}, or pass device='cpu'\.$"
    with pytest.raises(BundleError, match=sentence) as caught:
        OrtCudaBackend().load(spec, bundle.folder)
    assert "\n" not in str(caught.value)


def test_the_form_that_cuda_runs_is_loaded(machine, bundle: Bundle, monkeypatch: pytest.MonkeyPatch):
    machine(CudaDriver((12, 6), (RTX,), None), None)
    opened: list[str] = []

    def session(path: str, *_: object, **__: object) -> None:
        opened.append(Path(path).name)
        raise RuntimeError("no GPU here")

    monkeypatch.setattr("runtime.ort.cuda_backend.ort.InferenceSession", session)
    record = dataclasses.replace(bundle.target.graph[0], path="target/gqa-half.onnx")
    half = dataclasses.replace(bundle.target, lowering="gqa-half", cache_dtype="float16", graph=(record,))
    with pytest.raises(BundleError, match="no GPU here"):
        OrtCudaBackend().load(dataclasses.replace(bundle.target, other_forms=(half,)), bundle.folder)
    assert opened == ["gqa-half.onnx"]


def test_a_session_on_the_cpu_is_never_taken_for_one_on_the_gpu(bundle: Bundle):
    session = session_of(bundle)
    with pytest.raises(DeviceError, match=r"was loaded for CPUExecutionProvider and not for CUDAExecutionProvider"):
        check_on_device(session, (CUDA,), Path("model.onnx"))
    check_on_device(session, ("CPUExecutionProvider",), Path("model.onnx"))


@pytest.mark.skipif(not hasattr(ort.InferenceSession, "get_provider_graph_assignment_info"), reason="ONNX Runtime before 1.24")
def test_heavy_nodes_on_the_cpu_are_named(bundle: Bundle):
    class Lying:  # its providers say CUDA, its nodes do not
        def __init__(self, session: ort.InferenceSession) -> None:
            self.get_provider_graph_assignment_info = session.get_provider_graph_assignment_info

        def get_providers(self) -> list[str]:
            return [CUDA, "CPUExecutionProvider"]

    with pytest.raises(
        DeviceError, match=r"has no CUDAExecutionProvider kernels for GroupQueryAttention, MatMul as model\.onnx"
    ):
        check_on_device(Lying(session_of(bundle)), (CUDA,), Path("model.onnx"))


@pytest.mark.parametrize(("device", "number"), [("cuda", 0), ("cuda:0", 0), ("cuda:12", 12)])
def test_a_device_has_a_number(device: str, number: int):
    assert device_number(device) == number


@pytest.mark.parametrize("device", ["cuda:", "cuda:x", "cuda:-1", "cuda:1:2", "cuda:²"])
def test_what_is_no_number_is_named(device: str):
    with pytest.raises(DeviceError, match="'cuda' or, for the second GPU, 'cuda:1' is expected"):
        device_number(device)


# --- memory ----------------------------------------------------------------------------------------------------------


def test_a_gpu_with_memory_of_its_own_is_asked_for_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("runtime.cuda_driver.probe_cuda_driver", lambda: CudaDriver((12, 6), (ORIN, RTX), None))
    monkeypatch.setattr("runtime.cuda_driver.free_device_memory", lambda number: 1000 + number)
    monkeypatch.setattr("runtime.device_memory.free_memory", lambda: 77)
    found = {device: free_memory_of(device) for device in ("cpu", "cuda", "cuda:1", "cuda:2", "tensorrt:1")}
    # The first GPU shares the machine's memory; the third is not there, which is somebody else's error.
    assert found == {"cpu": 77, "cuda": 77, "cuda:1": 1001, "cuda:2": 77, "tensorrt:1": 1001}


def test_each_device_must_hold_its_own_model(bundle: Bundle, monkeypatch: pytest.MonkeyPatch):
    pair = MemoryBudget.of(bundle.target, bundle.draft, 64).peak
    target, draft = (MemoryBudget.of(spec, None, 64).peak for spec in (bundle.target, bundle.draft))
    free: dict[str, int] = {}
    monkeypatch.setattr("runtime.device_memory.free_memory_of", lambda device: free[device])

    def fits(devices: tuple[str, str], **sizes: int) -> bool:
        free.update(sizes)
        try:
            check_pair_fits(bundle.target, bundle.draft, 64, devices)
        except DeviceError:
            return False
        return True

    assert fits(("cuda", "cuda"), cuda=pair)
    assert not fits(("cuda", "cuda"), cuda=pair - 1)
    assert fits(("cuda", "cpu"), cuda=target, cpu=draft)
    assert not fits(("cuda", "cpu"), cuda=target - 1, cpu=draft)
    assert not fits(("cuda", "cpu"), cuda=target, cpu=draft - 1)


def test_host_memory_is_still_what_the_cpu_is_asked_for():
    assert isinstance(free_memory_of("cpu"), int)
    assert isinstance(free_memory(), int)


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(
    not (probe_cuda_driver().gpus and CUDA in ort.get_available_providers()), reason="needs a GPU and onnxruntime-gpu"
)
@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp16", 0.1), ("int8", 0.5)])  # the CPU rounds activations of int8
def test_a_gpu_gives_the_cpus_logits(
    tiny_target: Path, tmp_path: Path, tokens: list[int], precision: str, tolerance: float, cuda_graphs: bool
):
    from export.bundle import export_bundle

    bundle = export_bundle(str(tiny_target), None, tmp_path / "bundle", precision=precision, lowering="gqa-half")
    model = OrtCudaBackend(options=CudaOptions(cuda_graphs=cuda_graphs)).load(bundle.target, bundle.folder)
    assert isinstance(model.open_context(16, 4), DeviceContext)
    expected = in_pieces(OrtBackend().load(bundle.target, bundle.folder), tokens, [60])
    for cut in ([60], [1] * 60, [20, 5, 5, 5, 25]):
        found = in_pieces(model, tokens, cut)
        np.testing.assert_allclose(found, expected, atol=tolerance)
        assert (found.argmax(axis=1) == expected.argmax(axis=1)).mean() > 0.9
