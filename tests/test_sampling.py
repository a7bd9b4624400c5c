"""The sampler: all rules in their order, against a slow and plain one written after their definitions."""

import math
import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import SamplingError
from runtime.sampling import Sampler
from runtime.sampling_params import SamplingParams
from tests.fakes import ruled

INF = math.inf
Words = tuple[tuple[int, ...], ...]

# --- the reference: one row at a time, Python's floats, nothing of numpy -----------------------------------------------


def softmax(scores: Sequence[float]) -> list[float]:
    top = max(scores)
    assert top > -INF, "no token is left"
    weights = [math.exp(score - top) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def reference_scores(
    logits: Sequence[float],
    before: Sequence[int],
    params: SamplingParams,
    prompt_length: int = 0,
    ends: Sequence[int] = (),
    words: Words = (),
) -> list[float]:
    """One row as the rules that change logits leave it; `before` is all that stands before its place."""
    before, scores = tuple(before), [float(logit) for logit in logits]
    new = before[prompt_length:]
    for token in range(len(scores)):
        scores[token] += params.logit_bias.get(token, 0.0)
        if token in before:
            penalty = params.repetition_penalty
            scores[token] *= penalty if scores[token] < 0 else 1 / penalty
        if token in new:
            scores[token] -= params.presence_penalty + new.count(token) * params.frequency_penalty
        text, size = (*before, token), params.no_repeat_ngram_size
        runs = [text[start : start + size] for start in range(len(text) - size + 1)]
        if size and runs and runs[-1] in runs[:-1]:
            scores[token] = -INF
        if any(text[-len(word) :] == word for word in words):
            scores[token] = -INF
        if token in ends and len(new) < params.min_new_tokens:
            scores[token] = -INF
    return scores


def first_covering(probabilities: Sequence[float], keys: Sequence[float], mass: float) -> list[bool]:
    """Which tokens are needed, best key first, for the mass; those as good as the last one are kept with it."""
    covered, bound = 0.0, -INF
    for token in sorted(range(len(keys)), key=lambda token: keys[token]):
        if covered >= mass:
            break
        covered += probabilities[token]
        bound = keys[token]
    return [key <= bound for key in keys]


def reference_row(logits: Sequence[float], before: Sequence[int], params: SamplingParams, *rest: object) -> list[float]:
    """The distribution of one row: what a rule drops gets -inf, and the next looks at the softmax of what is left."""
    scores = [score / params.temperature for score in reference_scores(logits, before, params, *rest)]

    def keep(kept: Sequence[bool]) -> None:
        scores[:] = [score if here else -INF for score, here in zip(scores, kept, strict=True)]

    if params.top_k:
        kth = sorted(scores, reverse=True)[min(params.top_k, len(scores)) - 1]
        keep([score >= kth for score in scores])
    if params.top_p < 1:
        keep(first_covering(softmax(scores), [-score for score in scores], params.top_p))
    if params.min_p:
        probabilities = softmax(scores)
        keep([p >= params.min_p * max(probabilities) for p in probabilities])
    if params.typical_p < 1:
        probabilities = softmax(scores)
        surprisal = [-math.log(p) if p else INF for p in probabilities]
        mean = math.fsum(p * s for p, s in zip(probabilities, surprisal, strict=True) if p)
        keep(first_covering(probabilities, [abs(s - mean) for s in surprisal], params.typical_p))
    return softmax(scores)


# --- rules, alone and together ----------------------------------------------------------------------------------------

RULES: dict[str, dict[str, object]] = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 2.5},
    "bias": {"logit_bias": {2: 3.0, 5: -20.0, 99: 4.0}},
    "penalty": {"repetition_penalty": 1.7},
    "reward": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.3},
    "frequency": {"frequency_penalty": 0.7},
    "presence-frequency": {"presence_penalty": -0.8, "frequency_penalty": 1.9},
    "no-repeat-1": {"no_repeat_ngram_size": 1},
    "no-repeat-2": {"no_repeat_ngram_size": 2},
    "no-repeat-3": {"no_repeat_ngram_size": 3},
    "bad-words": {"words": ((4,), (5, 1), (1, 8, 2), (8, 0), (2, 3))},
    "min-new": {"min_new_tokens": 3, "ends": (0, 7)},
    "top-k": {"top_k": 3},
    "top-1": {"top_k": 1},
    "top-k-all": {"top_k": 11},
    "top-k-beyond": {"top_k": 100},
    "top-p": {"temperature": 1.3, "top_p": 0.8},
    "top-p-tiny": {"temperature": 1.3, "top_p": 1e-9},
    "min-p": {"temperature": 1.3, "min_p": 0.2},
    "min-p-one": {"temperature": 1.3, "min_p": 1.0},
    "typical": {"temperature": 1.3, "typical_p": 0.7},
    "typical-tiny": {"temperature": 1.3, "typical_p": 1e-9},
    "filters": {"temperature": 1.4, "top_k": 8, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.8},
    "all": {
        "temperature": 1.4, "top_k": 7, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.9, "repetition_penalty": 1.3,
        "presence_penalty": 0.4, "frequency_penalty": 0.3, "logit_bias": {0: 2.0, 1: 1.0, 2: -1.5}, "no_repeat_ngram_size": 2,
        "min_new_tokens": 3, "ends": (0,), "words": ((1, 8), (8, 6), (9,)),
    },
}  # fmt: skip


def parts_of(rule: dict[str, object]) -> tuple[SamplingParams, tuple[int, ...], Words]:
    fields = {"temperature": 1.0, **rule}
    ends, words = fields.pop("ends", ()), fields.pop("words", ())
    return SamplingParams(**fields), ends, words


def sampler_of(rule: dict[str, object], prompt_length: int = 2) -> Sampler:
    params, ends, words = parts_of(rule)
    return Sampler(params, prompt_length=prompt_length, end_token_ids=ends, bad_words=words)


def random_logits(rows: int, vocab_size: int, seed: int, scale: float = 3.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal((rows, vocab_size))).astype(np.float32)


def random_rule(random: np.random.Generator, vocab_size: int) -> dict[str, object]:
    """Any of the rules, each with even chances, at values that bite; end tokens and words never forbid everything."""
    rules: dict[str, object] = {"temperature": float(random.uniform(0.3, 2.5))}
    tokens = range(vocab_size - 1)  # the last token is never named, so that something is left
    choices = {
        "logit_bias": lambda: {int(token): float(random.normal(0, 3)) for token in random.choice(tokens, 2)},
        "repetition_penalty": lambda: float(random.uniform(0.5, 2)),
        "presence_penalty": lambda: float(random.uniform(-2, 2)),
        "frequency_penalty": lambda: float(random.uniform(-2, 2)),
        "no_repeat_ngram_size": lambda: int(random.integers(2, 4)),
        "words": lambda: tuple(tuple(random.choice(tokens, n).tolist()) for n in random.integers(1, 4, 3)),
        "top_k": lambda: int(random.integers(1, vocab_size + 2)),
        "top_p": lambda: float(random.uniform(0.2, 0.99)),
        "min_p": lambda: float(random.uniform(0.01, 0.5)),
        "typical_p": lambda: float(random.uniform(0.2, 0.99)),
    }
    for name, choose in choices.items():
        if random.random() < 0.5:
            rules[name] = choose()
    if random.random() < 0.5:
        rules |= {"min_new_tokens": int(random.integers(1, 6)), "ends": (int(random.choice(tokens)),)}
    return rules


def check_against_the_reference(rule: dict[str, object], logits: np.ndarray, history: list[int], block: list[int]) -> None:
    prompt_length = 2
    params, ends, words = parts_of(rule)
    sampler = sampler_of(rule, prompt_length)
    before = [(*history, *block[:row]) for row in range(len(logits))]
    rest = (params, prompt_length, ends, words)
    scores = [reference_scores(row, seen, *rest) for row, seen in zip(logits.tolist(), before, strict=True)]
    got = ruled(sampler.scores, logits, history, block)
    np.testing.assert_allclose(got, scores, rtol=1e-5, atol=1e-5)
    assert got.dtype == np.float32
    expected = np.array([reference_row(row, seen, *rest) for row, seen in zip(logits.tolist(), before, strict=True)])
    for rows in (
        ruled(sampler.distributions, logits, history, block),
        ruled(sampler.weights, logits, history, block),
    ):
        assert rows.dtype == np.float32
        assert np.array_equal(rows > 0, expected > 0)
        np.testing.assert_allclose(rows / rows.sum(axis=1, keepdims=True, dtype=np.float64), expected, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", RULES)
def test_a_rule_follows_its_definition(name: str, seed: int) -> None:
    check_against_the_reference(RULES[name], random_logits(4, 11, seed), [1, 5, 1], [8, 2, 5])


@pytest.mark.parametrize("seed", range(150))
def test_rules_together_follow_their_definitions_in_order(seed: int) -> None:
    random = np.random.default_rng(seed)
    vocab_size, k = int(random.integers(4, 30)), int(random.integers(0, 5))
    history, block = (random.integers(0, vocab_size, size).tolist() for size in (random.integers(2, 9), k))
    check_against_the_reference(random_rule(random, vocab_size), random_logits(k + 1, vocab_size, seed), history, block)


@pytest.mark.parametrize("name", RULES)
def test_rows_sum_to_one_and_logits_are_left_alone(name: str) -> None:
    logits, sampler = random_logits(3, 1000, 1), sampler_of(RULES[name])
    before = logits.copy()
    rows = ruled(sampler.distributions, logits, [1], [2, 3])
    np.testing.assert_allclose(rows.sum(axis=1, dtype=np.float64), 1, rtol=0, atol=1e-6)
    for array in (rows, ruled(sampler.weights, logits, [1], [2, 3])):
        assert not np.shares_memory(array, logits)
    logits.flags.writeable = False  # a view of the model's own buffer is not written to either
    ruled(sampler.scores, logits, [1], [2, 3])
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("name", ["plain", "cold", "filters"])
def test_logits_come_back_as_they_are_where_no_rule_changes_them(name: str) -> None:
    logits = random_logits(2, 8, 0)
    assert ruled(sampler_of(RULES[name]).scores, logits, [1], [2]) is logits


def test_greedy_params_change_logits_and_ignore_the_filters() -> None:
    logits = random_logits(2, 8, 0)
    greedy = Sampler(SamplingParams(temperature=0, repetition_penalty=2.0, top_k=1, top_p=0.1, min_p=0.9))
    sampled = Sampler(SamplingParams(temperature=0.5, repetition_penalty=2.0))
    assert np.array_equal(ruled(greedy.scores, logits, [1], [2]), ruled(sampled.scores, logits, [1], [2]))


# --- which tokens a row sees ------------------------------------------------------------------------------------------

numbers = st.floats(0.05, 1)
all_rules = st.fixed_dictionaries(
    {"temperature": st.floats(0.2, 3)},
    optional={
        "top_k": st.integers(1, 10),
        "top_p": numbers,
        "min_p": numbers,
        "typical_p": numbers,
        "repetition_penalty": st.floats(0.5, 2),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(st.integers(0, 9), st.floats(-5, 5), max_size=3),
        "no_repeat_ngram_size": st.integers(2, 4),
        "min_new_tokens": st.integers(0, 6),
        "ends": st.tuples(st.integers(0, 8)),
        "words": st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    },
)
tokens_of_ten = st.lists(st.integers(0, 9), min_size=1, max_size=10)


@settings(max_examples=300, deadline=None)
@given(all_rules, tokens_of_ten, st.lists(st.integers(0, 9), max_size=4), st.integers(0, 12), st.integers(0, 99))
def test_each_row_of_a_block_equals_the_row_alone(
    rule: dict, history: list, block: list, prompt_length: int, seed: int
) -> None:
    # The draft sees one row at a time, the target all of them: the same logits must give the same bits.
    logits, sampler = random_logits(len(block) + 1, 10, seed), sampler_of(rule, prompt_length)
    for name in ("scores", "weights", "distributions"):
        apply = getattr(sampler, name)
        try:
            together = ruled(apply, logits, history, block)
        except SamplingError:
            continue
        for row in range(len(logits)):
            alone = ruled(apply, logits[row : row + 1], history, block[:row])
            assert np.array_equal(alone[0], together[row])
            joined = ruled(apply, logits[row : row + 1], [*history, *block[:row]], [])
            assert np.array_equal(joined[0], together[row])


@pytest.mark.parametrize("name", RULES)
def test_wide_rows_do_not_depend_on_the_rows_they_are_computed_with(name: str) -> None:
    logits, sampler = random_logits(4, 1300, 2), sampler_of(RULES[name])
    together = ruled(sampler.distributions, logits, [3, 4], [7, 3, 9])
    for row in range(4):
        alone = ruled(sampler.distributions, logits[row : row + 1], [3, 4], [7, 3, 9][:row])
        assert np.array_equal(alone[0], together[row])


NO_REPEAT = [[-INF, 2, -2, -2, -INF], [-INF, -INF, -2, -2, -INF], [-INF, -INF, -INF, -2, -INF]]
BAD_WORDS = [[2, 2, -2, -INF, 0], [2, 2, -INF, -2, 0], [2, 2, -2, -2, -INF]]
SEEN = {
    "penalty": ({"repetition_penalty": 2.0}, [[1, 2, -2, -2, 0], [1, 1, -2, -2, 0], [1, 1, -4, -2, 0]]),
    "presence": ({"presence_penalty": 1.0}, [[1, 2, -2, -2, 0], [1, 1, -2, -2, 0], [1, 1, -3, -2, 0]]),
    "frequency": ({"frequency_penalty": 1.0}, [[1, 2, -2, -2, 0], [1, 1, -2, -2, 0], [1, 1, -3, -2, 0]]),
    "no-repeat": ({"no_repeat_ngram_size": 1}, NO_REPEAT),
    "bad-words": ({"words": ((0, 3), (4, 0, 1, 2), (1, 2, 4))}, BAD_WORDS),
    "min-new": ({"min_new_tokens": 3, "ends": (1, 9)}, [[2, -INF, -2, -2, 0], [2, -INF, -2, -2, 0], [2, 2, -2, -2, 0]]),
}


@pytest.mark.parametrize("name", SEEN)
def test_row_i_stands_behind_the_first_tokens_of_the_block(name: str) -> None:
    rule, expected = SEEN[name]
    logits = np.array([[2.0, 2.0, -2.0, -2.0, 0.0]] * 3, np.float32)
    # The prompt is one token, the new text [0], the block [1, 2]; the penalty alone sees the prompt's token, whose logit is 0.
    assert ruled(sampler_of(rule, 1).scores, logits, [4, 0], [1, 2]).tolist() == expected
    # Fewer rows than tokens: the rows end with the block.
    assert ruled(sampler_of(rule, 1).scores, logits[1:], [4, 0], [1, 2]).tolist() == expected[1:]


def test_presence_and_frequency_do_not_see_the_prompt() -> None:
    logits = np.zeros((2, 4), np.float32)
    sampler = Sampler(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), prompt_length=3)
    assert ruled(sampler.scores, logits, [1, 2, 1, 3, 1, 1], [1]).tolist() == [
        [0, -1, 0, -0.75],
        [0, -1.25, 0, -0.75],
    ]
    # A history shorter than the prompt, as a session may have: all of it is prompt.
    assert ruled(sampler.scores, logits[:1], [1, 2], []).tolist() == [[0, 0, 0, 0]]


def test_end_tokens_are_free_from_the_token_behind_min_new_tokens_on() -> None:
    sampler = Sampler(SamplingParams(min_new_tokens=2), prompt_length=3, end_token_ids=[1])
    rows = ruled(sampler.scores, np.zeros((4, 3), np.float32), [0, 1, 1], [1, 1, 1])
    assert np.isneginf(rows[:, 1]).tolist() == [True, True, False, False]


def test_a_ban_stands_above_any_bias() -> None:
    params = SamplingParams(logit_bias={0: 1e300, 1: 1e300, 2: 1e300}, no_repeat_ngram_size=1, min_new_tokens=9)
    rows = ruled(Sampler(params, end_token_ids=[1], bad_words=[(2,)]).scores, np.zeros((1, 4), np.float32), [0], [])
    assert rows.tolist() == [[-INF, -INF, -INF, 0]]


def test_bad_words_of_the_params_are_for_the_tokenizer_not_for_the_sampler() -> None:
    logits = np.zeros((1, 4), np.float32)
    assert ruled(Sampler(SamplingParams(bad_words=[[1], "word"])).scores, logits, [0], []) is logits


# --- nothing left -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "position"),
    [
        ({"words": ((0,), (1,), (2,))}, 2),
        ({"words": ((1, 0), (1, 1), (1, 2))}, 3),
        ({"no_repeat_ngram_size": 1, "words": ((0,),)}, 3),
        ({"no_repeat_ngram_size": 1, "min_new_tokens": 5, "ends": (0,), "logit_bias": {0: 100.0}}, 3),
        ({"min_new_tokens": 1, "ends": (0, 1, 2)}, 2),
    ],
)
def test_rules_that_leave_no_token_are_named_with_the_place(rule: dict[str, object], position: int) -> None:
    sampler, logits = sampler_of(rule), random_logits(3, 3, 0)
    for apply in (sampler.scores, sampler.weights, sampler.distributions):
        with pytest.raises(SamplingError, match=re.escape(f"leave no token to choose at position {position}: bad_words, ")):
            ruled(apply, logits, [2, 2], [1, 2])


def test_a_token_the_model_itself_excludes_is_not_left_either() -> None:
    logits = np.array([[-INF, -INF, 5.0]], np.float32)
    sampler = sampler_of({"words": ((2,),)})
    with pytest.raises(SamplingError):
        ruled(sampler.scores, logits, [0], [])


def test_the_last_token_that_is_left_is_enough() -> None:
    sampler = sampler_of({"words": ((0,), (1,)), "top_p": 0.1, "typical_p": 0.1})
    row = ruled(sampler.distributions, random_logits(1, 3, 0), [0], [])
    assert row.tolist() == [[0, 0, 1]]


# --- numbers at the edges ---------------------------------------------------------------------------------------------

EDGES: dict[str, dict[str, object]] = {
    "temperature-smallest": {"temperature": 5e-324},
    "temperature-1e-40": {"temperature": 1e-40},
    "temperature-1e38": {"temperature": 1e38},
    "temperature-largest": {"temperature": 1.7e308},
    "penalty-1e-30": {"repetition_penalty": 1e-30},
    "penalty-1e30": {"repetition_penalty": 1e30},
    "penalty-1e-300": {"repetition_penalty": 1e-300},
    "penalty-1e300": {"repetition_penalty": 1e300},
    "bias-1e300": {"logit_bias": {0: 1e300, 1: 1e300}},
    "bias-minus-1e300": {"logit_bias": {0: -1e300, 1: -1e300}},
    "bias-both": {"logit_bias": {0: 1e300, 1: -1e300}},
    "top-p-1e-12": {"top_p": 1e-12},
    "top-p-next-to-one": {"top_p": 1 - 2**-53},
    "min-p-1e-300": {"min_p": 1e-300},
    "typical-1e-12": {"typical_p": 1e-12},
    "typical-next-to-one": {"typical_p": 1 - 2**-53},
    "presence": {"presence_penalty": 2.0, "frequency_penalty": 2.0},
}
EDGES |= {
    f"filtered-{name}": {"top_k": 2, "top_p": 0.9, "typical_p": 0.9, "min_p": 0.1, **rule} for name, rule in EDGES.items()
}
EDGE_ROWS = [
    [3.0],
    [0.0, 0.0, 0.0],
    [3.0, -3.0, 0.0],
    [1e38, -1e38, 0.0],
    [3e38, -3e38, 0.0],
    [-INF, 2.0, 1.0],
    [-1e38, -1e38, -INF],
]


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("logits", EDGE_ROWS, ids=str)
@pytest.mark.parametrize("name", EDGES)
def test_at_the_edges_rows_are_still_distributions(name: str, logits: list[float]) -> None:
    rows = ruled(sampler_of(EDGES[name], 1).distributions, np.array([logits], np.float32), [0, 0, 1, 2, 99], [])
    assert np.isfinite(rows).all()
    assert rows.min() >= 0
    assert rows.sum() == pytest.approx(1, abs=1e-6)
    assert not rows[0][np.isneginf(logits)].any()


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-40, 1e-38, 1e-6])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    logits = np.vstack([random_logits(3, 20, 4), np.full((1, 20), -1e38), random_logits(1, 20, 5) * 1e30]).astype(np.float32)
    logits[3, 7] = 1e38
    rows = ruled(Sampler(SamplingParams(temperature=temperature)).distributions, logits, [], [0] * 4)
    assert np.array_equal(rows, np.eye(20)[logits.argmax(axis=1)])


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("temperature", [1e30, 1e38, 3e38, 1e39, 1e300])
def test_the_largest_temperatures_are_uniform(temperature: float) -> None:
    rows = ruled(Sampler(SamplingParams(temperature=temperature)).distributions, random_logits(2, 20, 4), [], [0])
    np.testing.assert_allclose(rows, 1 / 20, rtol=1e-6)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(
    "rule", [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}, {"typical_p": 0.5}, {"no_repeat_ngram_size": 2}]
)
def test_a_vocabulary_of_one_token_has_one_answer(rule: dict[str, object]) -> None:
    rows = ruled(sampler_of(rule).distributions, np.array([[-7.0], [7.0]], np.float32), [5], [6])
    assert rows.tolist() == [[1], [1]]


def test_equal_tokens_share_the_fate_of_the_last_one_kept() -> None:
    """Where transformers cuts between equal tokens by their place in its sort, all of them are kept."""
    flat = np.zeros((1, 8), np.float32)
    for rule in ({"top_k": 3}, {"top_p": 1e-12}, {"typical_p": 1e-12}, {"min_p": 1.0}):
        np.testing.assert_allclose(ruled(sampler_of(rule).distributions, flat, [0], []), [[1 / 8] * 8], rtol=1e-6)
    tied = np.array([[2, 1, 1, 0]], np.float32)
    assert (ruled(sampler_of({"top_k": 2}).distributions, tied, [0], []) > 0).tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("vocab_size", [511, 512, 513, 1100])
@pytest.mark.parametrize("top_k", [1, 2, 40, 511, 512, 513])
def test_top_k_of_wide_rows_with_many_ties(vocab_size: int, top_k: int) -> None:
    logits = np.random.default_rng(vocab_size).integers(0, 40, (2, vocab_size)).astype(np.float32)
    rows = ruled(sampler_of({"top_k": top_k}).distributions, logits, [0], [1])
    for row, scores in zip(rows, logits, strict=True):
        kth = np.sort(scores)[-min(top_k, vocab_size)]
        expected = np.where(scores >= kth, np.exp(scores.astype(np.float64)), 0)
        np.testing.assert_allclose(row, expected / expected.sum(), rtol=1e-5)
