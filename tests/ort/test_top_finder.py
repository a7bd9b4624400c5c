"""A pass whose logits stay on the device: a few numbers come back, and the text is that of the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from runtime import Generator, SamplingParams, sampling
from runtime.contract import Bundle
from runtime.cuda_driver import probe_cuda_driver
from runtime.decoder import Decoder
from runtime.errors import DeviceError, LogitsError
from runtime.filters import weights_of
from runtime.manifest import load_bundle
from runtime.ort.cuda_backend import CUDA, OrtCudaBackend, OrtCudaModel
from runtime.ort.device_context import Memory
from runtime.ort.top_finder import TopFinder
from runtime.sampling import Sampler
from runtime.tokenizer import Tokenizer
from runtime.top_logits import SPARE, top_logits_graph

VOCAB = 512
GREEDY = SamplingParams(max_new_tokens=24)
COUPLED = SamplingParams(max_new_tokens=24, temperature=0.8, top_k=20, seed=3, acceptance="coupled")
REJECTION = SamplingParams(max_new_tokens=24, temperature=0.8, top_k=20, top_p=0.9, seed=3)


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path) -> Bundle:
    return load_bundle(tiny_bundle)


@pytest.fixture(scope="module")
def by_cpu(tiny_bundle: Path) -> Generator:
    return Generator.from_bundle(tiny_bundle, drafter="model", threads=1)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each copy to the host."""
    sizes: list[int] = []
    read, read_all = ort.OrtValue.numpy, ort.IOBinding.copy_outputs_to_cpu

    def numpy(value: ort.OrtValue) -> np.ndarray:
        sizes.append(read(value).nbytes)
        return read(value)

    def copy_outputs_to_cpu(binding: ort.IOBinding) -> list[np.ndarray]:
        outputs = read_all(binding)
        sizes.append(sum(output.nbytes for output in outputs))
        return outputs

    monkeypatch.setattr(ort.OrtValue, "numpy", numpy)
    monkeypatch.setattr(ort.IOBinding, "copy_outputs_to_cpu", copy_outputs_to_cpu)
    return sizes


def device_model(bundle: Bundle, role: str, *, cuda_graphs: bool = False) -> OrtCudaModel:
    """The GPU's model, its buffers and its sessions in host memory."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    spec = getattr(bundle, role)
    session = ort.InferenceSession(bundle.folder / spec.graph[0].path, options, providers=["CPUExecutionProvider"])
    return OrtCudaModel(spec, session, Memory("cpu", 0), "host", cuda_graphs=cuda_graphs)


def on_device(bundle: Bundle, *, cuda_graphs: bool = False) -> Generator:
    tokenizer = Tokenizer.from_spec(bundle.tokenizer, bundle.folder)
    models = [device_model(bundle, role, cuda_graphs=cuda_graphs) for role in ("target", "draft")]
    return Generator(*models, tokenizer, bundle.tokenizer.eos_token_ids)


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("params", [GREEDY, COUPLED, REJECTION], ids=["greedy", "coupled", "rejection"])
def test_the_text_is_that_of_the_cpu_and_a_few_numbers_come_back(
    bundle: Bundle, by_cpu: Generator, copied: list[int], params: SamplingParams, cuda_graphs: bool
) -> None:
    expected = by_cpu.generate("1 2 3", params)
    generator = on_device(bundle, cuda_graphs=cuda_graphs)
    found = generator.generate("1 2 3", params)
    assert found.token_ids == expected.token_ids
    assert found.stats.accepted_by_position == expected.stats.accepted_by_position
    assert len(copied) == found.stats.target_passes + found.stats.draft_passes
    count = SPARE + (params.top_k or 1)
    row = count * (8 + 4) + 4
    assert set(copied) <= {row * rows for rows in range(1, 6)}
    assert sum(copied) == row * (found.stats.proposed_tokens + found.stats.rounds + found.stats.draft_passes)
    assert found.stats.top_logits == (params.top_k or 1)


@pytest.mark.parametrize("rules", [{"acceptance": "coupled"}, {}, {"min_p": 0.1, "temperature": 0.5}], ids=str)
def test_what_top_p_leaves_is_found_with_the_sum_of_the_device(
    bundle: Bundle, by_cpu: Generator, monkeypatch: pytest.MonkeyPatch, rules: dict[str, object]
) -> None:
    monkeypatch.setattr(sampling, "_NUCLEUS", 20)
    params = SamplingParams(**{"max_new_tokens": 24, "temperature": 0.9, "top_p": 0.8, "seed": 3, **rules})
    expected = by_cpu.generate("1 2 3", params)
    found = on_device(bundle).generate("1 2 3", params)
    assert found.token_ids == expected.token_ids
    assert found.stats.top_logits == 20
    assert found.stats.repeated_passes < found.stats.rounds / 2


def test_rules_that_need_whole_rows_copy_them(bundle: Bundle, by_cpu: Generator, copied: list[int]) -> None:
    params = SamplingParams(max_new_tokens=24, logprobs=2)
    expected = by_cpu.generate("1 2 3", params)
    found = on_device(bundle).generate("1 2 3", params)
    assert (found.token_ids, found.logprobs, found.stats.top_logits) == (expected.token_ids, expected.logprobs, 0)
    assert all(size % (4 * VOCAB) == 0 for size in copied)


@pytest.mark.parametrize("temperature", [1.0, 0.3, 1.7, 1e-30])
@pytest.mark.parametrize("element", [np.float32, np.float16])
def test_the_largest_of_each_row_wanted_are_found(element: type[np.floating], temperature: float) -> None:
    logits = np.random.default_rng(0).normal(0, 3, (1, 9, 300)).astype(element)
    finder = TopFinder("cpu", 0, element, ort.SessionOptions())
    top = finder.find(logits.ctypes.data, 9, 300, 4, 11, temperature)
    rows = logits[0, 4:].astype(np.float32)
    assert np.array_equal(top.logits, -np.sort(-rows, axis=1)[:, :11])
    assert np.array_equal(np.take_along_axis(rows, top.tokens, axis=1), top.logits)
    assert (top.tokens.dtype, top.logits.dtype, top.totals.dtype) == (np.int64, np.float32, np.float32)
    np.testing.assert_allclose(top.totals, weights_of(rows, temperature).sum(axis=1), rtol=1e-5)
    assert top.temperature == temperature


@pytest.mark.parametrize("element", [np.float32, np.float16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_holds_what_is_no_logit_tells(element: type[np.floating], value: float) -> None:
    for place in range(0, 300, 37):
        logits = np.random.default_rng(place).normal(size=(1, 3, 300)).astype(element)
        if value == -np.inf:
            logits[0, 1] = value
            logits[0, 2, place] = value  # one alone forbids a token, and no more
        else:
            logits[0, 1, place] = value
        top = TopFinder("cpu", 0, element, ort.SessionOptions()).find(logits.ctypes.data, 3, 300, 0, 8, 1.0)
        assert np.isfinite(top.totals).tolist() == [True, False, True]
        assert not top.are_sound


def test_broken_logits_of_a_device_are_refused(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(device_model(bundle, "target"), 20, num_rows=4)
    decoder.begin([5], None, Sampler(SamplingParams()))
    decoder.candidates([5, 6], 1)
    for cache in decoder._context.caches:
        cache.update_inplace(np.full(cache.shape(), np.nan, np.float32))
    with pytest.raises(LogitsError, match="returned NaN or infinite logits at position 3"):
        decoder.forward([7], 1)


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_provider_that_does_not_serve_is_named() -> None:
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this ONNX Runtime has CUDA")
    # ONNX Runtime's own sentence, or ours where it goes on without the provider.
    with pytest.raises(DeviceError, match=r"CUDAExecutionProvider|fallback"):
        TopFinder("cuda", 0, np.float32, ort.SessionOptions())


def test_where_it_cannot_be_found_whole_rows_come_and_the_model_says_why(
    bundle: Bundle, by_cpu: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "only the largest logits come to the host where" in device_model(bundle, "target").description

    def refuse(*_: object) -> None:
        raise DeviceError("no kernel for TopK")

    monkeypatch.setattr("runtime.ort.cuda_backend.TopFinder", refuse)
    generator = on_device(bundle)
    assert "whole rows of logits come to the host (no kernel for TopK)" in generator.describe()["target"]
    found = generator.generate("1 2 3", GREEDY)
    assert (found.token_ids, found.stats.top_logits) == (by_cpu.generate("1 2 3", GREEDY).token_ids, 0)


def check_passes(model: OrtCudaModel) -> None:
    assert "only the largest logits come to the host" in model.description
    rule = Sampler(SamplingParams(temperature=1.0, top_k=20))
    top, whole = (Decoder(model, 40, num_rows=8) for _ in range(2))
    top.begin([5], None, rule)
    assert top.top_rule is rule
    for tokens in ([5, 6, 7, 8, 9, 10, 11, 12], [13], [14, 15, 16]):
        brought, computed = top.candidates(tokens, len(tokens)), whole.forward(tokens, len(tokens))
        assert brought.rows.shape[1] < VOCAB
        for few, row in zip(brought.rows, computed, strict=True):
            there = np.flatnonzero(few > -np.inf)
            assert len(there) >= 20
            assert np.array_equal(few[there], row[brought.columns.tokens(there)])
            assert brought.columns.token(int(few.argmax())) == row.argmax()


def test_passes_bring_the_largest_of_what_they_compute(bundle: Bundle) -> None:
    check_passes(device_model(bundle, "target"))


@pytest.mark.gpu
@pytest.mark.skipif(
    not (probe_cuda_driver().gpus and CUDA in ort.get_available_providers()), reason="needs a GPU and onnxruntime-gpu"
)
def test_a_gpu_finds_what_lies_in_its_memory(tiny_target: Path, tmp_path: Path) -> None:
    from export.bundle import export_bundle

    bundle = export_bundle(str(tiny_target), None, tmp_path / "bundle", precision="fp16")
    check_passes(OrtCudaBackend().load(bundle.target, bundle.folder))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"rows": 5, "vocab_size": 151936, "count": 71}], ids=["open", "fixed"])
def test_the_graph_is_onnx_of_the_shapes_it_says(half: bool, sizes: dict[str, int]) -> None:
    onnx = pytest.importorskip("onnx")
    model = onnx.load_from_string(top_logits_graph(half=half, **sizes))
    onnx.checker.check_model(model, full_check=True)
    shapes = [
        tuple(size.dim_value or size.dim_param for size in value.type.tensor_type.shape.dim)
        for value in (*model.graph.input, *model.graph.output)
    ]
    rows = [(1, 5, 71), (1, 5, 71), (1, 5)] if sizes else [(1, "rows", "count"), (1, "rows", "count"), (1, "rows")]
    inputs = [(1, 5, 151936)] if sizes else [(1, "rows of the pass", "vocab_size"), (1,), (1,)]
    assert shapes == [*inputs, (1,), *rows]
    assert model.graph.input[0].type.tensor_type.elem_type == (10 if half else 1)
