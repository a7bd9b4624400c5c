"""Logits that stay on the GPU, on fake modules that really compute: what comes back, what is queued, and the same text."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from engines import backend as backend_module
from engines.backend import TensorRTBackend, TensorRTModel
from engines.bundle import TOP_COUNTS
from engines.profiles import plan_profiles
from engines.sidecar import EngineRecord, engine_path, engines_folder, graph_hashes, top_engine_path
from engines.trt_module import TensorRTModule
from runtime import SamplingParams, sampling
from runtime.contract import Bundle, DecoderSpec, file_sha256
from runtime.cuda_driver import CudaDriver, Gpu
from runtime.decoder import Decoder
from runtime.errors import BundleError, DeviceError, LogitsError
from runtime.generation import GenerationResult
from runtime.pair import DecoderPair
from runtime.sampling import Sampler
from runtime.session import Session
from runtime.top_logits import SPARE, top_logits_graph
from tests.fakes import fake_tokenizer

from .fake_cuda import FakeCudart, MemcpyKind
from .fake_tensorrt import fake_module, write_engine
from .tiny_graph import CAPACITY, CONTEXT, VOCAB, write_tiny_bundle

ORIN = Gpu("Orin", (8, 7), 8 << 30, integrated=True)
STEPS = {"target": 5, "draft": 2}
PROMPT = [1, 2, 3, 4, 5, 6, 7]
RULES = {
    "greedy": SamplingParams(max_new_tokens=24),
    "coupled": SamplingParams(max_new_tokens=24, temperature=0.8, top_k=20, seed=2, acceptance="coupled"),
    "rejection": SamplingParams(max_new_tokens=24, temperature=0.8, top_k=20, top_p=0.9, seed=2),
}


class SpyingCudart(FakeCudart):
    """Counts the bytes that go each way, and how often anyone waits."""

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def forget(self) -> None:
        self.copies: dict[MemcpyKind, list[int]] = {kind: [] for kind in MemcpyKind}
        self.waits = 0

    def cudaMemcpyAsync(self, target, source, size, kind, stream):  # noqa: N802
        self.copies[kind].append(size)
        return super().cudaMemcpyAsync(target, source, size, kind, stream)

    def cudaStreamSynchronize(self, stream):  # noqa: N802
        self.waits += 1
        return super().cudaStreamSynchronize(stream)


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> SpyingCudart:
    cudart = SpyingCudart()
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", cudart)
    monkeypatch.setitem(sys.modules, "tensorrt", fake_module(cudart))
    monkeypatch.setattr(backend_module, "probe_cuda_driver", lambda: CudaDriver((12, 6), (ORIN,), None))
    return cudart


def write_engines(spec: DecoderSpec, folder: Path, fixed_rows: int, counts: tuple[int, ...]) -> Path:
    """Writes a decoder's engine, those that find its largest logits, and the record."""
    tensorrt = TensorRTModule.load("tensorrt")
    path = engine_path(engines_folder(folder, tensorrt, ORIN.compute_capability), spec)
    profiles = plan_profiles(fixed_rows, 4, -(-CONTEXT // fixed_rows) * fixed_rows)
    write_engine(path, folder / spec.graph[0].path, profiles)
    for count in counts:
        graph = path.with_name(f"top-{count}.onnx")
        graph.write_bytes(top_logits_graph(half=False, rows=fixed_rows, vocab_size=VOCAB, count=count))
        write_engine(top_engine_path(path, count), graph, profiles[:1])
    top = {str(count): file_sha256(top_engine_path(path, count)) for count in counts}
    sizes = {"size": path.stat().st_size, "sha256": file_sha256(path)}
    facts = {"module": "tensorrt", "version": tensorrt.version, "compute_capability": "87", "graph": graph_hashes(spec)}
    built = {"capacity": CAPACITY, "profiles": profiles, "flags": {}, "build_seconds": 1.0, "peak_memory": 1}
    EngineRecord(**facts, **built, **sizes, top=top).save(path)
    return path


@pytest.fixture
def bundle(tmp_path: Path, cudart: SpyingCudart) -> Bundle:
    return write_tiny_bundle(tmp_path)


def load(bundle: Bundle, role: str = "target", counts: tuple[int, ...] = (8, 27)) -> TensorRTModel:
    spec = getattr(bundle, role)
    write_engines(spec, bundle.folder, STEPS[role], counts)
    return TensorRTBackend("tensorrt").load(spec, bundle.folder)


def generate(bundle: Bundle, params: SamplingParams, counts: tuple[int, ...] = (8, 27)) -> GenerationResult:
    models = [load(bundle, role, counts) for role in ("target", "draft")]
    pair = DecoderPair(*models, fake_tokenizer(VOCAB), frozenset(), "model", 4)
    session = Session(pair, CONTEXT)
    session._draft_decoder()
    sys.modules["cuda.bindings.runtime"].forget()
    return session.generate(PROMPT, params)


@pytest.mark.parametrize("rule", RULES)
def test_the_text_is_that_of_whole_rows_and_a_few_numbers_come_back(bundle: Bundle, cudart: SpyingCudart, rule: str) -> None:
    params = RULES[rule]
    expected = generate(bundle, params, counts=())
    whole = sum(cudart.copies[MemcpyKind.cudaMemcpyDeviceToHost])
    assert whole >= 4 * VOCAB * (expected.stats.rounds + expected.stats.draft_passes)
    found = generate(bundle, params)
    assert found.token_ids == expected.token_ids
    assert found.stats.accepted_by_position == expected.stats.accepted_by_position
    assert (found.stats.top_logits, expected.stats.top_logits) == (params.top_k or 1, 0)
    assert found.stats.repeated_passes == 0
    row = (8 + 4) * ((params.top_k or 1) + SPARE) + 4
    rows = found.stats.proposed_tokens + found.stats.rounds + found.stats.draft_passes
    padding = STEPS["target"] * found.stats.rounds + STEPS["draft"] * found.stats.draft_passes
    assert row * rows <= sum(cudart.copies[MemcpyKind.cudaMemcpyDeviceToHost]) <= row * (rows + padding)


def test_what_top_p_leaves_is_found_with_the_sum_of_the_device(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_NUCLEUS", 20)
    for temperature in (0.9, 0.6):  # another one in the same context
        params = SamplingParams(max_new_tokens=24, temperature=temperature, top_p=0.5, seed=2, acceptance="coupled")
        expected, found = generate(bundle, params, counts=()), generate(bundle, params)
        assert found.token_ids == expected.token_ids
        assert (found.stats.top_logits, expected.stats.top_logits) == (20, 0)
        assert found.stats.repeated_passes < found.stats.rounds / 2


def test_a_greedy_proposal_is_queued_whole_and_waited_for_once(bundle: Bundle, cudart: SpyingCudart) -> None:
    found = generate(bundle, RULES["greedy"])
    assert found.stats.draft_passes > found.stats.rounds
    proposing = found.stats.proposed_by_position[0]  # rounds with a proposal
    assert cudart.waits == found.stats.rounds + proposing
    # Between two passes of a chain, a token goes from one to the other, and from the host only where its slot is.
    assert cudart.copies[MemcpyKind.cudaMemcpyDeviceToDevice] == [8] * (found.stats.draft_passes - proposing)


@pytest.mark.parametrize("unread", [1, 2, 3, 4, 5])
def test_a_chain_equals_one_pass_after_the_other(bundle: Bundle, unread: int) -> None:
    model = load(bundle, "draft")
    one_by_one, queued = (Decoder(model, CONTEXT, num_rows=1) for _ in range(2))
    for decoder in (one_by_one, queued):
        decoder.begin(PROMPT, None, Sampler(SamplingParams()))
    for text in (PROMPT, [9, 8, 7, 6, 5][:unread]):
        expected = []
        for _ in range(5):
            feed = expected[-1:] or text
            expected.append(int(one_by_one.forward(feed, 1)[0].argmax()))
        assert queued.chain(text, 5) == expected
        assert queued.tokens == one_by_one.tokens
    # What the chain has cached is what passes from the host cache.
    assert np.array_equal(one_by_one.forward([3], 1), queued.forward([3], 1))


def test_nan_in_a_chain_is_refused(bundle: Bundle) -> None:
    model = load(bundle, "draft")
    decoder = Decoder(model, CONTEXT, num_rows=1)
    decoder.begin(PROMPT, None, Sampler(SamplingParams()))
    decoder.chain(PROMPT, 3)
    for cache in decoder._context.caches:
        sys.modules["cuda.bindings.runtime"].device_bytes(cache.address, cache.size)[:] = 0xFF
    with pytest.raises(LogitsError, match="returned NaN or infinite logits"):
        decoder.chain([4], 3)
    assert decoder.past_length == len(PROMPT) + 2


def test_a_failing_chain_is_one_sentence(bundle: Bundle) -> None:
    context = load(bundle, "draft").open_context(CAPACITY, 4)
    context._tops[0]._execution._addresses.pop("logits")
    with pytest.raises(DeviceError, match=r"failed in a pass of 2 rows behind 3 cached tokens: \['logits'\] are not bound"):
        context.run_chain(np.array([1, 1]), 3, 0, 2)


def test_host_memory_for_whole_rows_is_taken_when_they_are_first_asked_for(bundle: Bundle, cudart: SpyingCudart) -> None:
    decoder = Decoder(load(bundle), CONTEXT, num_rows=5)
    decoder.begin(PROMPT, None, Sampler(SamplingParams()))
    taken = sum(block.size for block in cudart._pinned.values())
    decoder.candidates(PROMPT, 2)
    assert sum(block.size for block in cudart._pinned.values()) == taken
    decoder.begin(PROMPT, None)
    decoder.forward(PROMPT[-1:], 1)
    assert sum(block.size for block in cudart._pinned.values()) == taken + decoder._max_rows * VOCAB * 4


def test_engines_of_an_older_build_give_whole_rows_and_say_so(bundle: Bundle) -> None:
    old = load(bundle, counts=())
    assert "whole rows of logits come to the host: these engines are of an older build" in old.description
    assert old.open_context(CAPACITY, 10).max_top == 0
    new = load(bundle)
    assert "only the largest logits come to the host where a text is greedy, or has a top_k, top_p or min_p" in new.description
    assert new.open_context(CAPACITY, 10).max_top == 27


def test_a_top_k_beyond_the_engines_takes_whole_rows(bundle: Bundle) -> None:
    params = replace(RULES["coupled"], top_k=21)
    found = generate(bundle, params)
    assert (found.stats.top_logits, found.token_ids) == (0, generate(bundle, params, counts=()).token_ids)


@pytest.mark.parametrize("change", ["missing", "changed"])
def test_an_engine_that_is_missing_or_changed_is_refused(bundle: Bundle, change: str) -> None:
    path = top_engine_path(write_engines(bundle.target, bundle.folder, 5, (8, 27)), 27)
    path.unlink() if change == "missing" else path.write_text("{}")
    sentence = (
        r"model\.engine lacks an engine that finds the largest logits, or that was changed .*: python scripts/build_engines"
    )
    with pytest.raises(BundleError, match=sentence):
        TensorRTBackend("tensorrt").load(bundle.target, bundle.folder)


def test_the_counts_are_those_a_decoder_asks_for() -> None:
    assert TOP_COUNTS == (1 + SPARE, 64 + SPARE)
