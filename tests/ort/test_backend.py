"""ONNX Runtime sessions on the tiny pair: what is refused, caches that do not meet, thread pools, exact passes."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from runtime.contract import Bundle, DecoderSpec
from runtime.decoder import Decoder
from runtime.errors import BundleError, DeviceError
from runtime.manifest import load_bundle
from runtime.ort.backend import OrtBackend, OrtModel

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path) -> Bundle:
    return load_bundle(tiny_bundle)


@pytest.fixture(scope="module")
def model(bundle: Bundle) -> OrtModel:
    return OrtBackend().load(bundle.target, bundle.folder)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return np.random.default_rng(5).integers(3, 512, 60).tolist()


def in_pieces(model: OrtModel, tokens: list[int], cut: list[int]) -> NDArray[np.float32]:
    """All logits of a text, fed in passes of the sizes in `cut`."""
    decoder = Decoder(model, len(tokens), num_rows=max(cut))
    return np.concatenate([decoder.forward(tokens[decoder.past_length :][:rows], rows).copy() for rows in cut])


def run_python(code: str, *arguments: str | Path) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


# --- loading ---------------------------------------------------------------------------------------------------------


def with_names(**names: str) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: dataclasses.replace(spec, names=dataclasses.replace(spec.names, **names))


def with_fields(**changes: object) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: dataclasses.replace(spec, **changes)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (with_names(input_ids="tokens"), r"inputs its manifest names \(differing: input_ids, tokens\)"),
        (with_names(past_key="old.{layer}.key"), r"inputs its manifest names \(differing: old.0.key"),
        (with_names(logits="scores"), r"outputs its manifest names \(differing: logits, scores\)"),
        (with_names(present_value="new.{layer}"), r"outputs its manifest names \(differing: new.0"),
        (with_fields(num_layers=3), r"inputs its manifest names \(differing: past_key_values.3.key, past_key_values.3.value\)"),
        (with_fields(num_layers=5), "inputs its manifest names .*past_key_values.4.key"),
        (with_fields(vocab_size=511), r"has the output 'logits' as \[.*, 512\], and the manifest's vocab_size is 511"),
        (with_fields(num_key_value_heads=4), r"'past_key_values.0.key' as \[.*\], and the manifest's num_key_value_heads is 4"),
        (with_fields(head_size=32), r"has the input 'past_key.* as \[batch, 2, .*, 16\], and the manifest's head_size is 32"),
        (with_fields(cache_dtype="float16"), r"of tensor\(float\), and the manifest's cache_dtype is tensor\(float16\)"),
    ],
)
def test_graph_that_is_not_the_manifests_is_refused(
    bundle: Bundle, change: Callable[[DecoderSpec], DecoderSpec], sentence: str
):
    with pytest.raises(BundleError, match=sentence) as caught:
        OrtBackend().load(change(bundle.target), bundle.folder)
    assert "target/model.onnx" in str(caught.value)
    assert str(caught.value).endswith("export it again.")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("contents", [b"", b"garbage that is no protobuf", b"\x08\x0a"])
def test_file_that_is_no_graph_is_refused(tiny_bundle: Path, bundle: Bundle, tmp_path: Path, contents: bytes):
    folder = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    (folder / "target" / "model.onnx").write_bytes(contents)
    with pytest.raises(BundleError, match=r"ONNX Runtime \S+ cannot load .*target/model\.onnx: ") as caught:
        OrtBackend().load(bundle.target, folder)
    assert "\n" not in str(caught.value)


def test_graph_without_its_weights_is_refused(tiny_bundle: Path, bundle: Bundle, tmp_path: Path):
    folder = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    (folder / "target" / "model.onnx.data").unlink()
    with pytest.raises(BundleError, match=r"(?i)cannot load .*target/model\.onnx: .*external data"):
        OrtBackend().load(bundle.target, folder)


@pytest.mark.parametrize("threads", [0, -1])
def test_fewer_than_one_thread_is_refused(threads: int):
    with pytest.raises(ValueError, match=f"threads is {threads}; a number from 1 to .* is expected"):
        OrtBackend(threads=threads)


def test_description_tells_engine_device_and_threads(bundle: Bundle):
    described = OrtBackend(threads=3).load(bundle.draft, bundle.folder).description
    assert described == f"ONNX Runtime {ort.__version__}, CPU, 3 threads from a pool of its own"


def test_a_failing_pass_is_one_sentence(model: OrtModel):
    context = model.open_context(16, 4)
    with pytest.raises(DeviceError, match="ONNX Runtime failed in a pass of 2 rows behind 3 cached tokens: ") as caught:
        context.run(np.array([5, 512]), 3, 1)  # a token beyond the embedding
    assert "\n" not in str(caught.value)


# --- caches ----------------------------------------------------------------------------------------------------------

CUTS = [[30, 30], [59, 1], [1, 59], [1] * 60, [20, 5, 5, 5, 5, 5, 5, 5, 5], [2, 58], [33, 1, 1, 1, 7, 17]]


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: "-".join(map(str, cut[:6])))
@pytest.mark.parametrize("threads", [1, 2])
def test_one_piece_equals_many(bundle: Bundle, tokens: list[int], cut: list[int], threads: int):
    for spec in (bundle.target, bundle.draft):
        model = OrtBackend(threads=threads).load(spec, bundle.folder)
        assert np.array_equal(in_pieces(model, tokens, cut), in_pieces(model, tokens, [60]))


@pytest.mark.parametrize("length", [0, 1, 17, 39, 40])
def test_rewind_and_feed_again_equals_fresh(model: OrtModel, tokens: list[int], length: int):
    decoder = Decoder(model, 60, num_rows=60)
    decoder.forward(tokens[:40], 1)
    decoder.rewind_to(length)
    other = tokens[::-1][: 60 - length]
    found = decoder.forward(other, len(other))
    fresh = Decoder(model, 60, num_rows=60).forward(tokens[:length] + other, 60)
    assert np.array_equal(found, fresh[length:])


def test_garbage_beyond_the_length_changes_nothing(model: OrtModel, tokens: list[int]):
    decoder = Decoder(model, 60, num_rows=60)
    expected = in_pieces(model, tokens, [60])
    for size in (20, 1, 4, 1, 34):
        start = decoder.past_length
        for cache in decoder._context.caches:
            cache[:, :, start:] = np.nan
        found = decoder.forward(tokens[start : start + size], size)
        assert np.array_equal(found, expected[start : start + size])


def test_what_is_cached_matters(model: OrtModel, tokens: list[int]):
    # The counterpart of the test above: the buffers it spoils are the ones that are read.
    decoder = Decoder(model, 60, num_rows=60)
    decoder.forward(tokens[:20], 1)
    for cache in decoder._context.caches:
        cache[:, :, 19] = 0
    assert not np.array_equal(decoder.forward(tokens[20:24], 4), in_pieces(model, tokens, [60])[20:24])


def test_contexts_of_one_model_do_not_meet(model: OrtModel, tokens: list[int]):
    first, second = Decoder(model, 60, num_rows=10), Decoder(model, 60, num_rows=10)
    other = tokens[::-1]
    expected, expected_other = in_pieces(model, tokens, [60]), in_pieces(model, other, [60])
    for start in range(0, 60, 10):
        found = first.forward(tokens[start : start + 10], 10)
        found_other = second.forward(other[start : start + 10], 10)
        # Both looked at now: the second pass must not have written into the first one's logits either.
        assert np.array_equal(found, expected[start : start + 10])
        assert np.array_equal(found_other, expected_other[start : start + 10])


@pytest.mark.parametrize("length", [0, 1, 23, 40])
def test_a_copy_goes_on_like_its_source_and_neither_sees_the_other(model: OrtModel, tokens: list[int], length: int):
    source = Decoder(model, 60, num_rows=60)
    source.forward(tokens[:40], 1)
    source.rewind_to(length)
    expected = in_pieces(model, tokens, [60])
    copy = source.fork()
    other = tokens[::-1][: 60 - length]
    found_other = copy.forward(other, len(other)).copy()
    found = source.forward(tokens[length:], 60 - length).copy()
    assert np.array_equal(found, expected[length:])
    assert np.array_equal(found_other, Decoder(model, 60, num_rows=60).forward(tokens[:length] + other, 60)[length:])


def test_a_copy_takes_the_cached_tokens_and_no_memory(model: OrtModel, tokens: list[int]):
    source, copy = model.open_context(48, 40), model.open_context(48, 40)
    for cache in copy.caches:
        cache[...] = 7
    source.run(np.array(tokens[:40]), 0, 1)
    copy.copy_from(source, 25)
    for mine, theirs in zip(copy.caches, source.caches, strict=True):
        assert np.array_equal(mine[:, :, :25], theirs[:, :, :25])
        assert theirs[:, :, :25].any()
        assert (mine[:, :, 25:] == 7).all()
        assert not np.shares_memory(mine, theirs)


def test_capacity_does_not_change_bits(model: OrtModel, tokens: list[int]):
    large = Decoder(model, 512, num_rows=60).forward(tokens, 60)
    assert np.array_equal(large, in_pieces(model, tokens, [60]))


def test_only_the_rows_asked_for_are_returned(model: OrtModel, tokens: list[int]):
    whole = in_pieces(model, tokens, [60])
    context = model.open_context(61, 60)
    assert context.run(np.array(tokens[:50]), 0, 0).shape == (0, 512)
    found = context.run(np.array(tokens[50:]), 50, 3)
    assert found.dtype == np.float32
    assert np.array_equal(found, whole[-3:])


def test_buffers_are_aligned_and_of_the_capacity(model: OrtModel):
    context = model.open_context(37, 4)
    assert [cache.shape for cache in context.caches] == [(1, 2, 37, 16)] * 8
    assert all(cache.ctypes.data % 64 == 0 for cache in context.caches)
    assert len({cache.ctypes.data for cache in context.caches}) == 8


# --- thread pools ----------------------------------------------------------------------------------------------------

SHARED = """
import sys
import numpy as np
from runtime.decoder import Decoder
from runtime.manifest import load_bundle
from runtime.ort.backend import OrtBackend
bundle = load_bundle(sys.argv[1])
tokens = list(range(20, 50))
results = []
for pool in ("2 threads from the process's shared pool", "the process's shared pool, which was there already"):
    backend = OrtBackend(threads=2, shared_thread_pool=True)
    for spec in (bundle.target, bundle.draft):
        model = backend.load(spec, bundle.folder)
        assert model.description.endswith(pool), model.description
        results.append(Decoder(model, 30, num_rows=30).forward(tokens, 30).copy())
assert np.array_equal(results[0], results[2]) and np.array_equal(results[1], results[3])
np.savez(sys.argv[2], target=results[0], draft=results[1])
"""


def test_shared_thread_pool_serves_two_backends(tiny_bundle: Path, bundle: Bundle, tmp_path: Path):
    # In a process of its own: the pool is there for good, and later sessions with private threads would be refused.
    run_python(SHARED, tiny_bundle, tmp_path / "logits.npz")
    found = np.load(tmp_path / "logits.npz")
    for name, spec in (("target", bundle.target), ("draft", bundle.draft)):
        private = OrtBackend(threads=2).load(spec, bundle.folder)
        np.testing.assert_allclose(found[name], in_pieces(private, list(range(20, 50)), [30]), atol=1e-4)


SERVICE = """
import sys
import numpy as np
import onnxruntime as ort
from runtime import Generator, SamplingParams
def own_session():
    return ort.InferenceSession(sys.argv[2], providers=["CPUExecutionProvider"])
def check(session):
    assert session.run(None, {"x": np.arange(3, dtype=np.float32)})[0].tolist() == [0.0, 2.0, 4.0]
before = own_session()
check(before)
generator = Generator.from_bundle(sys.argv[1])
params = SamplingParams(max_new_tokens=12)
first = generator.generate("The sea", params)
after = own_session()
check(after)
second = Generator.from_bundle(sys.argv[1]).generate("The sea", params)
check(before)
assert len(first.token_ids) > 0
assert first.token_ids == second.token_ids == generator.generate("The sea", params).token_ids
print("fine")
"""


def test_process_with_sessions_of_its_own_is_not_disturbed(tiny_bundle: Path, tmp_path: Path):
    onnx = pytest.importorskip("onnx")
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [3]) for name in ("x", "y")]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Add", ["x", "x"], ["y"])], "double", values[:1], values[1:])
    opsets = [onnx.helper.make_opsetid("", 21)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "double.onnx")
    assert run_python(SERVICE, tiny_bundle, tmp_path / "double.onnx") == "fine\n"
