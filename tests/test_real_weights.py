"""SmolLM2-135M-Instruct, exported by the project's own script functions: speculation changes no token and no bit."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from runtime import Generator, SamplingParams
from runtime.backend import Model
from runtime.contract import Bundle
from runtime.decoder import Decoder
from runtime.manifest import load_bundle
from runtime.ort.backend import OrtBackend
from runtime.tokenizer import Tokenizer

pytestmark = pytest.mark.real_weights

ROOT = Path(__file__).resolve().parent.parent
NEW_TOKENS = 24
PROMPTS = (
    "Explain how tides work.",
    "Write a Python function that adds two numbers.",
    "List ten animals.",
    "Count from 1 to 20.",
    "Tell me a short story about a lighthouse keeper.",
    "What is 17 + 25?",
    "Translate 'good morning' into French, Spanish and German.",
    "Write a haiku about rain.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Repeat after me: one two three one two three one two three",
    "The capital of France is",
    "Rewrite this in capitals: the quick brown fox jumps over the lazy dog",
    "Summarise: Water boils at 100 degrees Celsius at sea level, and at lower temperatures in the mountains.",
    '{"name": "Ada", "born": 1815}\n{"name": "Alan", "born":',
    "Why is the sky blue?",
    "Give three tips for sleeping well.",
    "café, naïve, façade — explain these words.",
    "日本の首都はどこですか。",
    "😀 What does this emoji mean?",
    "SELECT name FROM users WHERE",
)


@pytest.fixture(scope="module")
def bundles(smollm2_bundles: Path) -> dict[str, Bundle]:
    """One bundle of fp32 with its int4 self as the draft, one of int8 for lookup."""
    return {"fp32": load_bundle(smollm2_bundles / "pair"), "int8": load_bundle(smollm2_bundles / "int8")}


@pytest.fixture(scope="module")
def models(bundles: dict[str, Bundle]) -> dict[str, Model]:
    fp32, int8 = bundles["fp32"], bundles["int8"]
    backend = OrtBackend()
    assert fp32.draft is not None
    return {
        "fp32": backend.load(fp32.target, fp32.folder),
        "int8": backend.load(int8.target, int8.folder),
        "int4": backend.load(fp32.draft, fp32.folder),
    }


@pytest.fixture(scope="module")
def tokenizer(bundles: dict[str, Bundle]) -> Tokenizer:
    return Tokenizer.from_spec(bundles["fp32"].tokenizer, bundles["fp32"].folder)


def new_generator(models: dict[str, Model], target: str, draft: str, tokenizer: Tokenizer) -> Generator:
    return Generator(models[target], models[draft], tokenizer, (0, 2))


@pytest.mark.parametrize(("target", "draft"), [("fp32", "int4"), ("int8", "int4"), ("int4", "int8")])
def test_greedy_text_is_the_targets_alone(models: dict[str, Model], tokenizer: Tokenizer, target: str, draft: str) -> None:
    """Every K from 1 to 16 comes up, with both drafters; a prompt's texts are compared with its own plain text."""
    generator = new_generator(models, target, draft, tokenizer)
    params = SamplingParams(max_new_tokens=NEW_TOKENS)
    sizes = itertools.cycle(range(1, 17))
    accepted = refused = 0
    for index, prompt in enumerate(PROMPTS):
        asked = [{"role": "user", "content": prompt}] if index % 3 else prompt
        plain = generator.generate(asked, params, drafter="off")
        for drafter in ("model", "lookup"):
            num_draft_tokens = next(sizes)
            result = generator.generate(asked, params, drafter=drafter, num_draft_tokens=num_draft_tokens)
            assert result.token_ids == plain.token_ids, (prompt, drafter, num_draft_tokens)
            assert (result.text, result.finish_reason) == (plain.text, plain.finish_reason)
            accepted += result.stats.accepted_tokens
            refused += result.stats.correction_tokens
    assert accepted > 100, "the drafts must be accepted often"
    assert refused > 100, "and refused often, or equality would be no wonder"


def cuts(length: int) -> Iterator[list[int]]:
    """Ways to cut a text into passes: lone rows, small blocks, one piece, and mixtures."""
    for rows in (1, 2, 3, 5, 17, 64):
        yield [min(rows, length - start) for start in range(0, length, rows)]
    random = np.random.default_rng(7)
    for _ in range(3):
        cut: list[int] = []
        while sum(cut) < length:
            cut.append(int(min(random.integers(1, 18), length - sum(cut))))
        yield cut


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_logits_are_bit_equal_however_the_text_is_cut(models: dict[str, Model], tokenizer: Tokenizer, precision: str) -> None:
    tokens = tokenizer.encode(" ".join(PROMPTS))[:120]
    model = models[precision]
    whole = Decoder(model, len(tokens), num_rows=len(tokens)).forward(tokens, len(tokens)).copy()
    for cut in cuts(len(tokens)):
        decoder = Decoder(model, len(tokens), num_rows=max(cut))
        for rows in cut:
            start = decoder.past_length
            logits = decoder.forward(tokens[start : start + rows], rows)
            assert np.array_equal(logits, whole[start : start + rows]), (rows, start)


def test_the_bundle_records_what_was_measured(bundles: dict[str, Bundle]) -> None:
    for spec in (bundles["fp32"].target, bundles["fp32"].draft, bundles["int8"].target):
        assert spec is not None
        assert spec.min_rows == 1
        for step in ("prefill", "one_token", "block", "rewind"):
            assert spec.parity[step]["max_difference"] < 1e-2
            assert spec.parity[step]["same_top_token"] == 1.0


def test_sampled_text_is_repeatable_and_ends_alike(models: dict[str, Model], tokenizer: Tokenizer) -> None:
    generator = new_generator(models, "fp32", "int4", tokenizer)
    params = SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.9, seed=11)
    asked = [{"role": "user", "content": PROMPTS[4]}]
    one, two = (generator.generate(asked, params) for _ in range(2))
    assert one.token_ids == two.token_ids
    assert one.token_ids != generator.generate(asked, replace(params, seed=12)).token_ids


def test_a_long_prompt_is_prefilled_in_bounded_passes(models: dict[str, Model], tokenizer: Tokenizer) -> None:
    """1,000 tokens of prompt never make 1,000 rows of logits; the text is that of a prompt fed in one piece."""
    generator = new_generator(models, "int4", "int8", tokenizer)
    prompt = (tokenizer.encode(" ".join(PROMPTS)) * 10)[:1000]
    result = generator.generate(prompt, SamplingParams(max_new_tokens=8), drafter="lookup")
    rows_a_pass = (32 << 20) // (4 * 49152)
    assert result.stats.target_passes >= len(prompt) // rows_a_pass + 1
    decoder = Decoder(models["int4"], 1008, num_rows=len(prompt))
    assert int(decoder.forward(prompt, 1)[0].argmax()) == result.token_ids[0]


def test_generate_script_streams_and_traces(bundles: dict[str, Bundle]) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "generate.py"), str(bundles["fp32"].folder), "Count to five.", "--chat"]
    text, trace = (
        subprocess.run([*command, "--max-new-tokens", "16", *more], capture_output=True, text=True, check=True).stdout
        for more in ([], ["--trace", "--drafter", "model"])
    )
    assert trace.startswith("round 1: proposed ")
    assert trace.rstrip().endswith(text.strip())
    for words in ("the target's choice too  -> accepted", "not the target's choice  -> refused", "target's choice '"):
        assert words in trace
    sampled = subprocess.run(
        [*command, "--max-new-tokens", "24", "--temperature", "1", "--seed", "1", "--trace", "--drafter", "model"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for word in ("target ", "draft ", "acceptance ", "drawn ", "-> accepted", "-> refused", "residual ["):
        assert word in sampled
