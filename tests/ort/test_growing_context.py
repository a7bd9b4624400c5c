"""Growing graphs in ONNX Runtime, on the tiny pair: the logits, texts and rewinds of the graphs that write caches in place."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime import Generator, SamplingParams
from runtime.contract import Bundle, DecoderSpec, FileRecord, GraphNames
from runtime.decoder import Decoder
from runtime.errors import DeviceError
from runtime.manifest import load_bundle
from runtime.ort.backend import OrtBackend, OrtModel
from runtime.ort.growing_context import GrowingContext
from runtime.tokenizer import Tokenizer
from tests import growing_graphs

PROMPTS = ("1 2 3 4", "What is 3 + 4?", "name: Ada\ncity: ", "a b c a b c a b")
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
# What exporters other than mobius do differently, and the inputs that come of it.
FORMS: dict[str, tuple[Callable[..., None], dict[str, str]]] = {
    "plain": (lambda model: None, {}),
    "merged": (growing_graphs.merged, {"use_cache_branch": "use_cache_branch"}),
    "kept rows": (growing_graphs.with_kept_rows, {"num_logits_to_keep": "num_logits_to_keep"}),
}

Load = Callable[..., OrtModel]


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path) -> Bundle:
    return load_bundle(tiny_bundle)


@pytest.fixture(scope="module")
def graphs(tiny_target: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The growing graphs of target and draft."""
    pytest.importorskip("mobius", reason="exporting needs the extra 'export'")
    folder = tmp_path_factory.mktemp("growing")
    checkpoints = {"target": tiny_target, "draft": tiny_draft}
    return {role: growing_graphs.growing_folder(path, folder / role) / "model.onnx" for role, path in checkpoints.items()}


@pytest.fixture(scope="module")
def load(bundle: Bundle, graphs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A function that loads a model's growing graph, changed by `change`."""

    def load_changed(role: str = "target", change: Callable[..., None] = lambda model: None, **fields: object) -> OrtModel:
        folder = tmp_path_factory.mktemp("graph")
        for file in graphs[role].parent.glob("model.onnx*"):
            shutil.copy(file, folder)
        growing_graphs.rewrite(folder / "model.onnx", change)
        names = GraphNames(position_ids="position_ids", **fields.pop("names", {}))
        spec = dataclasses.replace(
            getattr(bundle, role),
            graph=(FileRecord("model.onnx", 0, ""),),
            lowering="growing",
            spare_slots=0,
            names=names,
            **fields,
        )
        return OrtBackend(threads=1).load(spec, folder)

    return load_changed


@pytest.fixture(scope="module")
def model(load: Load) -> OrtModel:
    """The target; its rows are bit-equal in passes of two or more."""
    return load(min_rows=2)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return np.random.default_rng(5).integers(3, 512, 60).tolist()


def whole(model: OrtModel, tokens: Sequence[int]) -> NDArray[np.float32]:
    return Decoder(model, len(tokens), num_rows=len(tokens)).forward(tokens, len(tokens))


def in_pieces(model: OrtModel, tokens: list[int], cut: list[int]) -> NDArray[np.float32]:
    decoder = Decoder(model, len(tokens), num_rows=max(cut))
    return np.concatenate([decoder.forward(tokens[decoder.past_length :][:rows], rows).copy() for rows in cut])


def generator_of(bundle: Bundle, target: OrtModel, draft: OrtModel | None) -> Generator:
    tokenizer = Tokenizer.from_spec(bundle.tokenizer, bundle.folder)
    return Generator(target, draft, tokenizer, bundle.tokenizer.eos_token_ids)


# --- the same model as in the other lowerings -------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_gqa_graph(bundle: Bundle, load: Load, tokens: list[int], form: str):
    change, names = FORMS[form]
    growing = load(change=change, names=names, min_rows=2)
    expected = whole(OrtBackend(threads=1).load(bundle.target, bundle.folder), tokens)
    for cut in ([60], [20, 7, 1, 1, 31], [1] * 60):
        np.testing.assert_allclose(in_pieces(growing, tokens, cut), expected, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_greedy_texts_are_those_of_the_gqa_bundle_with_and_without_speculation(bundle: Bundle, load: Load, form: str):
    change, names = FORMS[form]
    target, draft = (load(role, change, names=names, min_rows=2) for role in ("target", "draft"))
    growing, gqa = generator_of(bundle, target, draft), Generator.from_bundle(bundle.folder)
    refused = accepted = 0
    for prompt in PROMPTS:
        expected = gqa.generate(prompt, GREEDY, drafter="off")
        assert growing.generate(prompt, GREEDY, drafter="off").token_ids == expected.token_ids
        for drafter, num_draft_tokens in (("model", 1), ("model", 4), ("lookup", 3)):
            result = growing.generate(prompt, GREEDY, drafter=drafter, num_draft_tokens=num_draft_tokens)
            assert (result.token_ids, result.text) == (expected.token_ids, expected.text), (prompt, drafter)
            refused += result.stats.correction_tokens
            accepted += result.stats.accepted_tokens
    assert min(refused, accepted) > 10


def test_half_precision_caches_and_logits(load: Load, model: OrtModel, tokens: list[int]):
    half = load(change=growing_graphs.in_half_precision, cache_dtype="float16")
    found = in_pieces(half, tokens, [20, 7, 2, 31])
    assert found.dtype == np.float32
    assert half.spec.cache_bytes_per_token * 2 == model.spec.cache_bytes_per_token
    expected = whole(model, tokens)
    assert 1e-5 < np.abs(found - expected).max() < 0.05
    decoder = Decoder(half, 60, num_rows=60)
    decoder.forward(tokens[:20], 1)
    assert {cache.dtype for cache in decoder._context.caches()} == {np.dtype(np.float16)}


# --- caches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [[30, 30], [59, 1], [1, 59], [1] * 60, [20, 5, 5, 5, 5, 20], [33, 1, 1, 1, 7, 17]])
def test_one_piece_equals_many(model: OrtModel, tokens: list[int], cut: list[int]):
    assert np.array_equal(in_pieces(model, tokens, cut), whole(model, tokens))


@pytest.mark.parametrize("length", [0, 1, 17, 39, 40])
def test_rewind_and_feed_again_equals_fresh(model: OrtModel, tokens: list[int], length: int):
    decoder = Decoder(model, 60, num_rows=60)
    decoder.forward(tokens[:40], 1)
    decoder.rewind_to(length)
    other = tokens[::-1][: 60 - length]
    found = decoder.forward(other, len(other))
    assert np.array_equal(found, whole(model, tokens[:length] + other)[length:])


def test_what_is_cached_matters(model: OrtModel, tokens: list[int]):
    decoder = Decoder(model, 60, num_rows=60)
    decoder.forward(tokens[:20], 1)
    for cache in decoder._context.caches():
        cache[:, 19] = 0
    assert not np.array_equal(decoder.forward(tokens[20:24], 4), whole(model, tokens)[20:24])


@pytest.mark.parametrize("length", [0, 1, 23, 40])
def test_a_copy_goes_on_like_its_source_and_neither_sees_the_other(model: OrtModel, tokens: list[int], length: int):
    source = Decoder(model, 60, num_rows=60)
    source.forward(tokens[:40], 1)
    source.rewind_to(length)
    copy = source.fork()
    other = tokens[::-1][: 60 - length]
    found_other = copy.forward(other, len(other)).copy()
    found = source.forward(tokens[length:], 60 - length).copy()
    assert np.array_equal(found, whole(model, tokens)[length:])
    assert np.array_equal(found_other, whole(model, tokens[:length] + other)[length:])


def test_a_pass_behind_the_last_moves_no_cache(load: Load, tokens: list[int], monkeypatch: pytest.MonkeyPatch):
    context = load().open_context(60, 30)
    moved: list[int] = []
    keep = GrowingContext._keep
    monkeypatch.setattr(GrowingContext, "_keep", lambda self, length: (moved.append(length), keep(self, length)))
    buffers = {id(buffer) for buffer in (*context._past, *context._present)}
    for start in (0, 10, 20):
        context.run(np.array(tokens[start : start + 10]), start, 1)
    assert moved == []
    context.run(np.array(tokens[:10]), 25, 1)
    assert moved == [25]
    assert {id(buffer) for buffer in (*context._past, *context._present)} == buffers


def test_a_failing_pass_is_one_sentence_and_changes_nothing(load: Load, tokens: list[int]):
    model = load()
    context = model.open_context(60, 60)
    context.run(np.array(tokens[:20]), 0, 1)
    with pytest.raises(DeviceError, match="ONNX Runtime failed in a pass of 2 rows behind 15 cached tokens: ") as caught:
        context.run(np.array([5, 512]), 15, 1)  # a token beyond the embedding
    assert "\n" not in str(caught.value)
    assert np.array_equal(context.run(np.array(tokens[15:]), 15, 45), whole(model, tokens)[15:])


def test_only_the_rows_asked_for_are_returned_and_computed_where_the_graph_lets_us_choose(
    load: Load, model: OrtModel, tokens: list[int]
):
    change, names = FORMS["kept rows"]
    for loaded in (model, load(change=change, names=names)):
        context = loaded.open_context(60, 60)
        assert context.run(np.array(tokens[:50]), 0, 0).shape == (0, 512)
        context._buffers._logits[...] = 7
        assert np.array_equal(context.run(np.array(tokens[50:]), 50, 3), whole(model, tokens)[-3:])
    # Three of the ten rows were computed.
    assert (context._buffers._logits[3:10] == 7).all()


# --- texts that share caches ------------------------------------------------------------------------------------------


def test_sessions_and_forks_keep_what_is_cached(bundle: Bundle, load: Load):
    generator = generator_of(bundle, load("target", min_rows=2), load("draft", min_rows=2))
    first, second, other = ("a b c a b c", "a b c a b c a b", "a b d a")
    alone = {prompt: generator.generate(prompt, GREEDY).token_ids for prompt in (first, second, other)}
    session = generator.session(max_length=200)
    assert session.generate(first, GREEDY).token_ids == alone[first]
    fork = session.fork()
    assert fork.generate(other, GREEDY).token_ids == alone[other]
    assert session.generate(second, GREEDY).token_ids == alone[second]
    assert fork.generate(first, GREEDY).token_ids == alone[first]


def test_a_text_may_fill_the_context(bundle: Bundle, load: Load):
    """Padding rows stand behind the last token, so the exporter takes them off what the model has positions for."""
    target = load(min_rows=2, context_length=511)
    generator = generator_of(bundle, target, None)
    params = dataclasses.replace(GREEDY, max_new_tokens=511)
    prompt = [5] * 500
    result = generator.generate(prompt, params, drafter="lookup")
    assert len(prompt) + len(result.token_ids) == 511
    assert result.token_ids == generator.generate(prompt, params, drafter="off").token_ids


def test_memory_counts_both_buffers(bundle: Bundle):
    spec: DecoderSpec = dataclasses.replace(bundle.target, lowering="growing")
    assert spec.cache_bytes_per_token == 2 * bundle.target.cache_bytes_per_token
