"""The runtime's sampling rules against the code that defines them: transformers' own processors, in its own order.

What transformers has no rule for (presence and frequency penalties) is in tests/test_sampling.py. Where the two differ on
purpose, a test here says so.
"""

import math

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.utils import GenerationMixin

from runtime.sampling import Sampler
from runtime.sampling_params import SamplingParams
from tests.fakes import ruled

PROMPT_LENGTH = 4
END = 3

RULES: dict[str, dict[str, object]] = {
    "plain": {},
    "temperature-low": {"temperature": 0.4},
    "temperature-high": {"temperature": 1.9},
    "top-k": {"top_k": 5},
    "top-k-all": {"top_k": 100},
    "top-k-beyond": {"top_k": 1000},
    "top-p": {"top_p": 0.9},
    "top-p-small": {"top_p": 0.1},
    "min-p": {"min_p": 0.05},
    "typical-p": {"typical_p": 0.9},
    "typical-p-small": {"typical_p": 0.2},
    "penalty": {"repetition_penalty": 1.4},
    "reward": {"repetition_penalty": 0.7},
    "no-repeat-1": {"no_repeat_ngram_size": 1},
    "no-repeat-2": {"no_repeat_ngram_size": 2},
    "no-repeat-3": {"no_repeat_ngram_size": 3},
    "bad-words": {"bad_words": [[5], [7, 1], [2, 2, 9], [1, 0], [0, 1, 6, 8]]},
    "min-new": {"min_new_tokens": 6},
    "bias": {"logit_bias": {0: 4.0, 7: -3.5, 60: 100.0}},
    "bias-penalty": {"logit_bias": {1: 4.0, 2: -3.5}, "repetition_penalty": 1.5},
    "filters": {"temperature": 1.5, "top_p": 0.8, "top_k": 30, "min_p": 0.02, "typical_p": 0.8},
}


def oracle(logits: np.ndarray, before: list[int], params: SamplingParams) -> np.ndarray:
    """One row of scores as `generate` makes them, by the list of processors it makes itself."""
    config = GenerationConfig(
        do_sample=not params.greedy,
        temperature=params.temperature or None,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p or None,
        typical_p=params.typical_p,
        repetition_penalty=params.repetition_penalty,
        no_repeat_ngram_size=params.no_repeat_ngram_size,
        min_new_tokens=params.min_new_tokens,
        bad_words_ids=[list(word) for word in params.bad_words] or None,
        sequence_bias={(token,): bias for token, bias in params.logit_bias.items()} or None,
    )
    config._eos_token_tensor = torch.tensor([END])
    processors = GenerationMixin()._get_logits_processor(
        config, PROMPT_LENGTH, device="cpu", logits_processor=LogitsProcessorList()
    )
    return processors(torch.tensor([before]), torch.from_numpy(logits[None].copy()))[0].numpy()


def check(params: SamplingParams, vocab_size: int, seed: int, k: int = 3) -> None:
    random = np.random.default_rng(seed)
    logits = (3 * random.standard_normal((k + 1, vocab_size))).astype(np.float32)
    # Few tokens in the text, so that runs of them repeat.
    history, block = random.integers(0, 10, random.integers(4, 30)).tolist(), random.integers(0, 10, k).tolist()
    sampler = Sampler(params, prompt_length=PROMPT_LENGTH, end_token_ids=[END], bad_words=params.bad_words)
    expected = np.stack([oracle(logits[row], history + block[:row], params) for row in range(k + 1)])
    if params.greedy:
        np.testing.assert_allclose(ruled(sampler.scores, logits, history, block), expected, rtol=1e-6, atol=1e-6)
        return
    got, probabilities = (
        ruled(sampler.distributions, logits, history, block),
        torch.softmax(torch.from_numpy(expected), dim=-1).numpy(),
    )
    assert np.array_equal(got > 0, probabilities > 0)
    np.testing.assert_allclose(got, probabilities, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.3])
@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_that_of_transformers(name: str, temperature: float, seed: int) -> None:
    check(SamplingParams(**{"temperature": temperature, **RULES[name]}), 100, seed)


def random_params(random: np.random.Generator) -> SamplingParams:
    choices = {
        "temperature": lambda: float(random.uniform(0.3, 2.5)),
        "top_k": lambda: int(random.integers(1, 60)),
        "top_p": lambda: float(random.uniform(0.2, 0.99)),
        "min_p": lambda: float(random.uniform(0.001, 0.3)),
        "typical_p": lambda: float(random.uniform(0.2, 0.99)),
        "repetition_penalty": lambda: float(random.uniform(0.5, 2)),
        "no_repeat_ngram_size": lambda: int(random.integers(1, 4)),
        "bad_words": lambda: [random.integers(4, 10, size).tolist() for size in random.integers(1, 4, 5)],
        "min_new_tokens": lambda: int(random.integers(1, 30)),
        "logit_bias": lambda: {int(token): float(random.normal(0, 5)) for token in random.integers(0, 12, 4)},
    }
    return SamplingParams(
        **{"temperature": 1.0} | {name: choose() for name, choose in choices.items() if random.random() < 0.5}
    )


@pytest.mark.parametrize("seed", range(150))
def test_rules_together_are_those_of_transformers_in_its_order(seed: int) -> None:
    random = np.random.default_rng(1000 + seed)
    check(random_params(random), int(random.choice([20, 100, 511, 512, 513, 2000])), seed)


# --- where they differ on purpose -------------------------------------------------------------------------------------


def run(processor: object, before: list[int], logits: np.ndarray) -> list[float]:
    return processor(torch.tensor([before]), torch.from_numpy(logits[None].copy()))[0].tolist()


def kept(scores: list[float]) -> set[int]:
    return {token for token, score in enumerate(scores) if score > -math.inf}


def ours(params: SamplingParams, logits: np.ndarray, **rules: object) -> set[int]:
    return set(np.flatnonzero(ruled(Sampler(params, **rules).distributions, logits[None], [0], [])[0]).tolist())


def test_top_p_keeps_equal_tokens_together_where_transformers_cuts_by_place() -> None:
    logits = np.array([0, 1, 0, 0, -1], np.float32)
    theirs = kept(run(TopPLogitsWarper(0.5), [0], logits))
    assert ours(SamplingParams(temperature=1.0, top_p=0.5), logits) == {0, 1, 2, 3}
    assert theirs < {0, 1, 2, 3}
    assert len(theirs) == 2


def test_top_k_keeps_equal_tokens_together_as_transformers_does() -> None:
    logits = np.array([0, 1, 0, 0, -1], np.float32)
    assert ours(SamplingParams(temperature=1.0, top_k=2), logits) == kept(run(TopKLogitsWarper(2), [0], logits)) == {0, 1, 2, 3}


def test_a_banned_end_token_is_banned_where_transformers_ignores_it() -> None:
    logits = np.zeros(5, np.float32)
    assert kept(run(NoBadWordsLogitsProcessor([[END], [4]], torch.tensor([END])), [0], logits)) == {0, 1, 2, 3}
    assert ours(SamplingParams(temperature=1.0), logits, bad_words=((END,), (4,))) == {0, 1, 2}


def test_a_word_that_takes_the_whole_text_is_banned_where_transformers_passes_over_it() -> None:
    logits = np.zeros(5, np.float32)
    assert kept(run(NoBadWordsLogitsProcessor([[0, 4]], torch.tensor([END])), [0], logits)) == {0, 1, 2, 3, 4}
    assert ours(SamplingParams(temperature=1.0), logits, bad_words=((0, 4),)) == {0, 1, 2, 3}
    assert kept(run(NoBadWordsLogitsProcessor([[0, 4]], torch.tensor([END])), [1, 0], logits)) == {0, 1, 2, 3}


def test_stop_tokens_wait_for_min_new_tokens_as_end_tokens_do() -> None:
    """The sampler takes both kinds as end tokens; transformers knows the model's own alone."""
    logits = np.zeros(5, np.float32)
    processor = MinNewTokensLengthLogitsProcessor(1, 2, torch.tensor([END, 4]), device="cpu")
    assert ours(SamplingParams(temperature=1.0, min_new_tokens=2), logits, prompt_length=1, end_token_ids=(END, 4)) == {0, 1, 2}
    assert kept(run(processor, [0], logits)) == {0, 1, 2}
