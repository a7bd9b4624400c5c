"""The public face on ONNX Runtime, with the tiny trained pair: the same promises as on the fakes, through real sessions."""

import itertools
import json
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from runtime import BundleError, DeviceError, Generator, PromptError, SamplingParams
from runtime.manifest import load_bundle
from runtime.memory import MemoryBudget
from runtime.tokenizer import Tokenizer

PROMPTS = ("1 2 3 4", "What is 3 + 4?", "name: Ada\ncity: ", "def add(a, b):", "café 日本 😀", "a b c a b c a b")
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 + 4?"}]


@pytest.fixture(scope="module")
def generator(tiny_bundle: Path) -> Generator:
    return Generator.from_bundle(tiny_bundle)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_the_targets_alone(generator: Generator, prompt: str) -> None:
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    plain = generator.generate(prompt, params, drafter="off")
    assert plain.stats.target_passes == plain.stats.new_tokens == 40
    for drafter, num_draft_tokens in itertools.product(("model", "lookup"), (0, 1, 2, 5, 16)):
        result = generator.generate(prompt, params, drafter=drafter, num_draft_tokens=num_draft_tokens)
        assert (result.token_ids, result.text) == (plain.token_ids, plain.text), (drafter, num_draft_tokens)


def test_the_draft_is_worth_its_passes(generator: Generator) -> None:
    """The pair was trained to agree often and not always; both are needed for the test above to mean anything."""
    stats = [
        generator.generate(prompt, SamplingParams(max_new_tokens=40, ignore_eos=True), drafter="model").stats
        for prompt in PROMPTS
    ]
    accepted, proposed = sum(one.accepted_tokens for one in stats), sum(one.proposed_tokens for one in stats)
    assert 0.2 < accepted / proposed < 0.9
    assert sum(one.target_passes for one in stats) < sum(one.new_tokens for one in stats)


@pytest.mark.parametrize("params", [SamplingParams(max_new_tokens=30), SamplingParams(30, temperature=0.9, seed=5)])
def test_streams_and_threads_do_not_meet(generator: Generator, params: SamplingParams) -> None:
    alone = [generator.generate(prompt, params).token_ids for prompt in PROMPTS]
    interleaved: list[list[int]] = [[] for _ in PROMPTS]
    for pieces in itertools.zip_longest(*(generator.stream(prompt, params) for prompt in PROMPTS)):
        for tokens, piece in zip(interleaved, pieces, strict=True):
            tokens.extend(piece.token_ids if piece else ())
    assert [tuple(tokens) for tokens in interleaved] == alone
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda prompt: generator.generate(prompt, params).token_ids, PROMPTS * 3)) == alone * 3


def test_a_closed_stream_and_a_cancelled_one_leave_the_generator_usable(generator: Generator) -> None:
    params, cancel = SamplingParams(max_new_tokens=60, ignore_eos=True), threading.Event()
    whole = generator.generate(CHAT, params)
    stream = generator.stream(CHAT, params)
    next(stream)
    stream.close()
    pieces = []
    for piece in generator.stream(CHAT, params, cancel=cancel):
        pieces.append(piece)
        cancel.set()
    assert pieces[-1].result is not None
    assert pieces[-1].result.finish_reason == "cancelled"
    assert pieces[-1].result.token_ids == whole.token_ids[: len(pieces[-1].result.token_ids)]
    assert generator.generate(CHAT, params).token_ids == whole.token_ids


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(30),
        SamplingParams(30, temperature=0.9, seed=5),
        SamplingParams(30, temperature=0.9, seed=5, acceptance="coupled"),
    ],
    ids=["greedy", "rejection", "coupled"],
)
def test_a_sessions_texts_are_those_of_fresh_caches(generator: Generator, params: SamplingParams) -> None:
    session = generator.session()
    first = session.generate(PROMPTS[0], params)
    assert first.token_ids == generator.generate(PROMPTS[0], params).token_ids
    longer = [*generator.tokenizer.encode(PROMPTS[0]), *first.token_ids, *generator.tokenizer.encode(PROMPTS[1])]
    fork = session.fork()
    for one, prompt in ((session, longer), (fork, longer[:-3]), (session, longer[:9]), (fork, longer)):
        result = one.generate(prompt, params)
        assert result.stats.cached_tokens >= min(len(prompt) - 1, 8)
        assert result.token_ids == generator.generate(prompt, params).token_ids


@pytest.mark.parametrize(
    "params", [SamplingParams(30, ignore_eos=True), SamplingParams(30, temperature=0.9, seed=5, ignore_eos=True)]
)
def test_a_text_that_was_cut_off_goes_on_as_if_it_had_not(generator: Generator, params: SamplingParams) -> None:
    whole = generator.generate(CHAT, params)
    for cut in (1, 4, 11):
        session = generator.session()
        session.generate(CHAT, replace(params, max_new_tokens=cut))
        *_, last = session.resume(30 - cut)
        assert last.result is not None
        assert (last.result.token_ids, last.result.text) == (whole.token_ids, whole.text)


def test_a_chat_computes_only_what_is_new(generator: Generator) -> None:
    chat = generator.chat(CHAT[:1])
    messages = CHAT[:1]
    for number, text in enumerate(("What is 3 + 4?", "And 5 + 1?", "name: Ada")):
        result = chat.send(text, SamplingParams(max_new_tokens=12))
        messages = [*messages, {"role": "user", "content": text}]
        assert result.token_ids == generator.generate(messages, SamplingParams(max_new_tokens=12)).token_ids
        messages = [*messages, {"role": "assistant", "content": result.text}]
        assert (result.stats.cached_tokens > 0) == (number > 0)
        assert list(chat.messages) == messages


def test_coupled_text_is_one_for_a_seed(generator: Generator) -> None:
    params = SamplingParams(max_new_tokens=30, temperature=0.9, seed=4, acceptance="coupled", ignore_eos=True)
    for prompt in PROMPTS[:3]:
        plain = generator.generate(prompt, params, drafter="off")
        for drafter, num_draft_tokens in itertools.product(("model", "lookup"), (1, 3, 16)):
            result = generator.generate(prompt, params, drafter=drafter, num_draft_tokens=num_draft_tokens)
            assert result.token_ids == plain.token_ids


def test_the_context_may_be_filled_to_its_end(generator: Generator) -> None:
    context = generator.target.spec.context_length
    prompt = (generator.tokenizer.encode("1 2 3 4 5 6 7 8 ") * context)[: context - 10]
    for drafter in ("model", "lookup", "off"):
        result = generator.generate(prompt, SamplingParams(max_new_tokens=100, ignore_eos=True), drafter=drafter)
        assert (len(result.token_ids), result.finish_reason) == (10, "length")
    with pytest.raises(PromptError, match=rf"has {context} tokens and the context holds {context}"):
        generator.generate((prompt * 2)[:context])


def test_another_device_is_an_error_and_no_silent_cpu_run(tiny_bundle: Path) -> None:
    for device in ("cuda", "cuda:1", "tensorrt", "CPU"):
        with pytest.raises(DeviceError, match=f"The device '{device}' is not available"):
            Generator.from_bundle(tiny_bundle, device=device)


def test_a_bundle_without_a_draft_looks_up(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, folder)
    manifest = json.loads((folder / "bundle.json").read_text())
    manifest["draft"] = None
    (folder / "bundle.json").write_text(json.dumps(manifest))
    generator = Generator.from_bundle(folder)
    assert generator.describe()["drafter"] == "auto"
    params = SamplingParams(max_new_tokens=20)
    assert generator.generate("a b c a b c a b", params, drafter="lookup").stats.proposed_tokens > 0
    assert generator.generate("a b c a b c a b", params).stats.draft_passes == 0
    with pytest.raises(ValueError, match="needs a draft model"):
        generator.generate("a", drafter="model")


def test_a_tokenizer_of_another_model_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    from runtime.contract import FileRecord
    from runtime.manifest import load_bundle, save_bundle

    folder = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 512, "content": "<|one too many|>"})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(BundleError, match=r"tokenizer\.json"):
        load_bundle(folder)
    bundle = load_bundle(tiny_bundle)
    spec = replace(bundle.tokenizer, file=FileRecord.of(folder, "tokenizer.json"))
    save_bundle(replace(bundle, folder=folder, tokenizer=spec))
    with pytest.raises(BundleError, match="it does not belong to this model"):
        Generator.from_bundle(folder)


def test_it_describes_itself(generator: Generator) -> None:
    described = generator.describe()
    assert (described["drafter"], described["num_draft_tokens"]) == ("auto", "16")
    assert "fp32" in described["target"]
    assert "ONNX Runtime" in described["draft"]
    assert "threads from a pool of its own" in described["target"]
    assert described["weights in memory"] == "0.00 GB"
    assert described["caches at the full context"].endswith(f" for {generator.target.spec.context_length} tokens")
    assert re.fullmatch(r"\d+\.\d\d GB|unknown", described["free memory when loaded"])


def test_what_does_not_fit_is_refused_before_anything_is_loaded(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = load_bundle(tiny_bundle)
    assert bundle.draft is not None
    alone, pair = (MemoryBudget.of(bundle.target, draft, 128).peak for draft in (None, bundle.draft))
    monkeypatch.setattr("runtime.device_memory.free_memory", lambda: alone)
    with monkeypatch.context() as patch:
        patch.setattr("runtime.loading.open_backend", lambda *_, **__: pytest.fail("a backend was opened"))
        patch.setattr(Tokenizer, "from_spec", lambda *_: pytest.fail("a tokenizer was loaded"))
        for drafter in (None, "auto", "model", "hybrid"):
            with pytest.raises(DeviceError, match="without its draft"):
                Generator.from_bundle(tiny_bundle, drafter=drafter, max_length=128)
        with pytest.raises(DeviceError, match="128 tokens would fit, pass them as max_length"):
            Generator.from_bundle(tiny_bundle, drafter="lookup", max_length=256)
        for check_memory in (True, False):
            with pytest.raises(ValueError, match="max_length is 1; "):
                Generator.from_bundle(tiny_bundle, max_length=1, check_memory=check_memory)
    assert Generator.from_bundle(tiny_bundle, drafter="off", max_length=128).draft is None
    assert Generator.from_bundle(tiny_bundle, drafter="model", max_length=128, check_memory=False).draft is not None
    monkeypatch.setattr("runtime.device_memory.free_memory", lambda: pair)
    assert Generator.from_bundle(tiny_bundle, drafter="model", max_length=128).draft is not None
