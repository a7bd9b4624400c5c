"""The runtime's sampling rules against the code that defines them: transformers' own logits processors."""

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from runtime.sampling import SamplingParams, token_distributions

RULES = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.4),
    SamplingParams(temperature=1.0, repetition_penalty=1.4),
    SamplingParams(temperature=1.0, repetition_penalty=0.7),
    SamplingParams(temperature=1.2, top_k=5),
    SamplingParams(temperature=1.2, top_p=0.9),
    SamplingParams(temperature=1.2, top_p=0.1),
    SamplingParams(temperature=1.2, min_p=0.05),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=40, min_p=0.02, repetition_penalty=1.1),
    SamplingParams(temperature=1.5, top_p=0.7, top_k=12, min_p=0.2, repetition_penalty=1.3),
]


def oracle(logits: np.ndarray, before: list[int], params: SamplingParams) -> np.ndarray:
    """One row as `generate` computes it, in the order it adds its processors."""
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    scores = processors(torch.tensor([before]), torch.from_numpy(logits[None].copy()))
    return torch.softmax(scores, dim=-1)[0].numpy()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("params", RULES, ids=str)
def test_rows_are_those_of_transformers(params: SamplingParams, seed: int) -> None:
    random = np.random.default_rng(seed)
    logits = (3 * random.standard_normal((4, 100))).astype(np.float32)
    history, block = random.integers(0, 100, 9).tolist(), random.integers(0, 100, 3).tolist()
    got = token_distributions(logits, history, block, params)
    expected = np.stack([oracle(logits[row], history + block[:row], params) for row in range(4)])
    assert np.array_equal(got > 0, expected > 0)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-8)
