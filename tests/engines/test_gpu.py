"""A tiny pair's engine on a real GPU: built, run, and compared with ONNX Runtime on the CPU."""

from __future__ import annotations

import threading
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from engines.backend import TensorRTBackend
from engines.build import BuildOptions
from engines.bundle import build_bundle_engines
from runtime import SamplingParams
from runtime.cuda_driver import probe_cuda_driver
from runtime.decoder import Decoder
from runtime.sampling import Sampler

from .tiny_graph import CONTEXT, VOCAB, write_tiny_bundle

pytestmark = pytest.mark.gpu
DEVICES = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt-rtx"}


@pytest.mark.parametrize("module", sorted(DEVICES))
def test_an_engine_computes_what_onnx_runtime_does(module: str, tmp_path: Path) -> None:
    if (trouble := probe_cuda_driver().trouble) is not None:
        pytest.skip(f"needs an NVIDIA GPU: {trouble}")
    if find_spec(module) is None:
        pytest.skip(f"needs {module}: pip install -e '.[{DEVICES[module]}]'")
    bundle = write_tiny_bundle(tmp_path, np.float16)
    backend = TensorRTBackend(DEVICES[module])
    build_bundle_engines(
        bundle,
        backend.tensorrt,
        backend.gpu.compute_capability,
        num_draft_tokens=3,
        options=BuildOptions(device_number=0),
        report=lambda *_: None,
        stop=threading.Event(),
    )
    text = np.random.default_rng(0).integers(0, VOCAB, CONTEXT).tolist()
    session = ort.InferenceSession(bundle.folder / bundle.target.graph[0].path, providers=["CPUExecutionProvider"])
    caches = {value.name: np.zeros(value.shape, np.float16) for value in session.get_inputs() if "past_key" in value.name}
    feeds = {"input_ids": np.array([text]), "past_length": np.zeros(1, np.int64), "logits_rows": np.arange(CONTEXT), **caches}
    expected = session.run(["logits"], feeds)[0][0]
    model = backend.load(bundle.target, bundle.folder)
    texts = []
    for cut in ([1] * 28, [16] + [4] * 3, [16, 12], [7, 9, 3, 1, 2, 2, 4]):
        decoder = Decoder(model, CONTEXT, num_rows=16)
        texts.append(np.concatenate([decoder.forward(text[decoder.past_length :][:rows], rows).copy() for rows in cut]))
        np.testing.assert_allclose(texts[-1], expected[: len(texts[-1])], atol=0.1)
    for other in texts[1:]:
        assert np.array_equal(texts[0], other)
    fork = decoder.fork()
    assert np.array_equal(fork.forward(text[28:32], 4), decoder.forward(text[28:32], 4))
    top, whole = (Decoder(model, CONTEXT, num_rows=16) for _ in range(2))
    top.begin(text, None, Sampler(SamplingParams()))
    assert top.can_chain
    for begin, end in ((0, 16), (16, 20), (20, 21)):
        rows = min(4, end - begin)
        brought, computed = top.candidates(text[begin:end], rows), whole.forward(text[begin:end], rows)
        assert brought.columns.tokens(brought.rows.argmax(axis=1)) == computed.argmax(axis=1).tolist()
        assert np.array_equal(brought.rows.max(axis=1), computed.max(axis=1))
    chosen = top.chain(text[21:22], 4)
    assert chosen == [int(whole.forward([token], 1)[0].argmax()) for token in (text[21], *chosen[:-1])]
