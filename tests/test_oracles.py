"""Our texts, logits and acceptance rate against engines that are not ours: transformers, and ONNX Runtime GenAI.

transformers computes the same checkpoint in torch; ONNX Runtime GenAI runs the very graphs of our bundle with its own loop,
its own caches, its own acceptance rule.
"""

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime import Generator, SamplingParams
from runtime.backend import Model
from runtime.contract import Bundle
from runtime.decoder import Decoder
from runtime.manifest import load_bundle
from runtime.ort.backend import OrtBackend
from runtime.tokenizer import Tokenizer

from .test_real_weights import PROMPTS

if TYPE_CHECKING:
    from export.reference import Reference

WORKER = Path(__file__).with_name("oracle_genai.py")
INSTALL = "pip install onnxruntime-genai==0.18.0"
NEW_TOKENS = 24
THREADS = 2
NUM_DRAFT_TOKENS = 4
# Two logits of transformers nearer than this may change places in another engine's float32 sums.
TIE = 2e-3
END = -1

# Of the tests of acceptance: the probability that one fails though both engines do as they should.
FALSE_ALARM = 1e-6
TEMPERATURE = 0.7
TOP_K = 50

# New tokens, and for each round how many proposed tokens were accepted.
Run = tuple[list[int], list[int]]
RunGenai = Callable[..., list[Run]]


@dataclass(frozen=True)
class Pair:
    """A bundle with its models loaded."""

    bundle: Bundle
    target: Model
    draft: Model
    tokenizer: Tokenizer
    threads: int

    @classmethod
    def load(cls, folder: Path, threads: int) -> "Pair":
        bundle = load_bundle(folder)
        assert bundle.draft is not None
        backend = OrtBackend(threads=threads)
        target, draft = (backend.load(spec, folder) for spec in (bundle.target, bundle.draft))
        return cls(bundle, target, draft, Tokenizer.from_spec(bundle.tokenizer, folder), threads)

    def generator(self, target: str = "target") -> Generator:
        models = (self.target, self.draft) if target == "target" else (self.draft, self.target)
        return Generator(*models, self.tokenizer, self.bundle.tokenizer.eos_token_ids)


@pytest.fixture(scope="module")
def smollm2(smollm2_bundles: Path) -> Pair:
    """In fp32, with its own weights in int4 as the draft."""
    return Pair.load(smollm2_bundles / "pair", THREADS)


@pytest.fixture(scope="module")
def prompts(smollm2: Pair) -> list[list[int]]:
    """PROMPTS in token ids; two of three as chat messages."""
    tokenizer = smollm2.tokenizer
    return [
        tokenizer.encode_chat([{"role": "user", "content": prompt}]) if index % 3 else tokenizer.encode(prompt)
        for index, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path) -> "Reference":
    """The same file as transformers reads it, in float32."""
    from export.reference import load_reference
    from export.source import resolve_source

    return load_reference(resolve_source(str(smollm2_gguf)))


@pytest.fixture(scope="module")
def texts(smollm2: Pair, prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    """Our greedy texts: fp32 with the int4 draft, and int4 alone."""
    params = SamplingParams(max_new_tokens=NEW_TOKENS)
    speculative, int4 = smollm2.generator(), smollm2.generator("draft")
    results = {
        "fp32": [speculative.generate(prompt, params, num_draft_tokens=NUM_DRAFT_TOKENS) for prompt in prompts],
        "int4": [int4.generate(prompt, params, drafter="off") for prompt in prompts],
    }
    refused = sum(result.stats.correction_tokens for result in results["fp32"])
    assert refused > 50, "the draft must be refused often, or equality would be no wonder"
    return {name: [list(result.token_ids) for result in results[name]] for name in results}


@pytest.fixture(scope="module")
def run_genai(tmp_path_factory: pytest.TempPathFactory) -> RunGenai:
    """A function that generates with ONNX Runtime GenAI, in a process of its own, from a decoder of a bundle."""
    if importlib.util.find_spec("onnxruntime_genai") is None:
        pytest.skip(f"needs ONNX Runtime GenAI: {INSTALL}")
    from export.genai_config import write_genai_folder

    def run(bundle: Bundle, prompts: Sequence[Sequence[int]], role: str = "target", **options: Any) -> list[Run]:
        work = tmp_path_factory.mktemp("genai")
        num_draft_tokens = options.pop("num_draft_tokens", 0)
        threads = options.pop("threads", THREADS)
        folder = write_genai_folder(bundle, work / "model", role, num_draft_tokens=num_draft_tokens, threads=threads)
        job = {"folder": str(folder), "prompts": prompts, "max_new_tokens": NEW_TOKENS, "rounds": None, "seeds": [0]}
        job |= {"search_options": {}, "draft_options": {"max_draft_tokens": num_draft_tokens} if num_draft_tokens else {}}
        (work / "job.json").write_text(json.dumps(job | options))
        command = [sys.executable, str(WORKER), str(work / "job.json"), str(work / "result.json")]
        finished = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
        assert finished.returncode == 0, finished.stderr[-2000:]
        return [(tokens, accepted) for tokens, accepted in json.loads((work / "result.json").read_text())]

    return run


@pytest.fixture(scope="module")
def genai_texts(run_genai: RunGenai, smollm2: Pair, prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    """Plain greedy texts of ONNX Runtime GenAI on our graphs."""
    roles = {"fp32": "target", "int4": "draft"}
    return {name: genai_closed(run_genai(smollm2.bundle, prompts, role)) for name, role in roles.items()}


def closed(texts: list[list[int]], eos_token_ids: Sequence[int]) -> list[list[int]]:
    """One mark for whatever ended a text: ONNX Runtime GenAI does not say which token did."""
    return [[*tokens[:-1], END if tokens[-1] in eos_token_ids else tokens[-1]] for tokens in texts]


def genai_closed(runs: list[Run]) -> list[list[int]]:
    return [tokens if len(tokens) == NEW_TOKENS else [*tokens, END] for tokens, _ in runs]


@pytest.mark.real_weights
def test_greedy_text_is_that_of_transformers(
    reference: "Reference", prompts: list[list[int]], texts: dict[str, list[list[int]]]
) -> None:
    """None of the 20 texts parts where this was written; the nearest two logits on the way are 0.011 apart.

    Behind each beginning of our text, transformers' most likely token must be our next: by induction, the text is its own.
    """
    parted = []
    for prompt, text in zip(prompts, texts["fp32"], strict=True):
        rows = reference.logits([[*prompt, *text[:-1]]])[0, len(prompt) - 1 :]
        differing = np.flatnonzero(rows.argmax(axis=1) != text)
        if len(differing):
            second, first = np.sort(rows[differing[0]])[-2:]
            assert first - second < TIE, (prompt, text, differing[0], float(first - second))
            parted.append(prompt)
    print("texts that part at a tie:", len(parted))


@pytest.mark.real_weights
def test_logits_are_those_of_transformers(smollm2: Pair, reference: "Reference") -> None:
    tokens = smollm2.tokenizer.encode(" ".join(PROMPTS))[:200]
    ours = Decoder(smollm2.target, len(tokens), num_rows=len(tokens)).forward(tokens, len(tokens))
    assert np.abs(ours - reference.logits([tokens])[0]).max() < 1e-3


@pytest.mark.real_weights
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_greedy_text_is_that_of_genai(
    smollm2: Pair, texts: dict[str, list[list[int]]], genai_texts: dict[str, list[list[int]]], precision: str
) -> None:
    """The spare row is part of the graph, so rows have the same bits in both engines, and no tie excuses a difference."""
    assert genai_texts[precision] == closed(texts[precision], smollm2.bundle.tokenizer.eos_token_ids)


@pytest.mark.real_weights
def test_the_spare_row_makes_genai_exact_too(
    run_genai: RunGenai, smollm2: Pair, prompts: list[list[int]], genai_texts: dict[str, list[list[int]]]
) -> None:
    """Its speculative texts are its plain ones: fp32 with the int4 draft, int4 with what its n-gram lookup proposes."""
    speculative = run_genai(smollm2.bundle, prompts, num_draft_tokens=NUM_DRAFT_TOKENS)
    assert sum(sum(accepted) for _, accepted in speculative) > 100
    assert genai_closed(speculative) == genai_texts["fp32"]
    lookup = {"max_draft_tokens": NUM_DRAFT_TOKENS, "ngram_size": 2}
    looked_up = run_genai(smollm2.bundle, prompts, "draft", draft_options=lookup)
    assert sum(sum(accepted) for _, accepted in looked_up) > 20
    assert genai_closed(looked_up) == genai_texts["int4"]


def our_run(generator: Generator, prompt: list[int], seed: int, num_rounds: int) -> Run:
    params = SamplingParams(
        max_new_tokens=(num_rounds + 1) * (NUM_DRAFT_TOKENS + 1),
        temperature=TEMPERATURE,
        top_k=TOP_K,
        seed=seed,
        ignore_eos=True,
    )
    tokens: list[int] = []
    accepted: list[int] = []
    stream = generator.stream(prompt, params, drafter="model", num_draft_tokens=NUM_DRAFT_TOKENS)
    for piece, _ in zip(stream, range(num_rounds), strict=False):
        tokens += piece.round.tokens
        accepted.append(piece.round.verification.num_accepted)
    return tokens, accepted


def endless(pair: Pair, prompts: list[list[int]]) -> Bundle:
    """The bundle, texts ending at the target's least likely token: ONNX Runtime GenAI wants one, and cannot ignore it."""
    rows = [
        Decoder(pair.target, len(prompt), num_rows=len(prompt)).forward(prompt, len(prompt)).max(axis=0) for prompt in prompts
    ]
    return replace(pair.bundle, tokenizer=replace(pair.bundle.tokenizer, eos_token_ids=(int(np.max(rows, axis=0).argmin()),)))


def genai_runs(run_genai: RunGenai, pair: Pair, prompts: list[list[int]], seeds: list[int], num_rounds: int) -> list[Run]:
    """Runs that end after so many rounds and not before."""
    runs = run_genai(
        endless(pair, prompts[:4]),
        prompts,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        threads=pair.threads,
        seeds=seeds,
        rounds=num_rounds,
        max_new_tokens=(num_rounds + 1) * (NUM_DRAFT_TOKENS + 1),
        search_options={"do_sample": True, "temperature": TEMPERATURE, "top_k": TOP_K, "top_p": 1.0},
    )
    return [(tokens, accepted[:num_rounds]) for tokens, accepted in runs]


@dataclass(frozen=True)
class Sample:
    """What an engine sampled, with what the two models say of it.

    Attributes:
        outcomes: 1 for each accepted token, 0 for each refused one; tokens behind a refused one are not judged.
        probabilities: What each outcome's probability of acceptance was.
        accepted: Accepted tokens of each run.
        surprisals: Mean surprisal of each run's tokens under the target, in nats.
    """

    outcomes: NDArray[np.float64]
    probabilities: NDArray[np.float64]
    accepted: NDArray[np.float64]
    surprisals: NDArray[np.float64]

    @classmethod
    def of(cls, pair: Pair, prompts: list[list[int]], runs: list[Run]) -> "Sample":
        outcomes, probabilities, surprisals = [], [], []
        for prompt, (tokens, accepted) in zip(prompts, runs, strict=True):
            target, draft = (distributions(model, prompt, tokens) for model in (pair.target, pair.draft))
            # The sum of the lesser probabilities (Leviathan et al. 2023, theorem 3.5).
            expected = np.minimum(target, draft).sum(axis=1)
            for place, outcome in judged_places(accepted):
                outcomes.append(outcome)
                probabilities.append(expected[place])
            chosen = target[np.arange(len(tokens)), tokens]
            surprisals.append(-np.log(np.maximum(chosen, 1e-9)).mean())
        counts = [sum(accepted) for _, accepted in runs]
        return cls(np.array(outcomes, float), np.array(probabilities), np.array(counts, float), np.array(surprisals))


def distributions(model: Model, prompt: list[int], tokens: list[int]) -> NDArray[np.float64]:
    """[len(tokens), vocab_size]: what each token was drawn from, were it the model's, computed without the sampling code."""
    sequence = [*prompt, *tokens[:-1]]
    logits = Decoder(model, len(sequence), num_rows=len(tokens)).forward(sequence, len(tokens)).astype(np.float64)
    weights = np.exp((logits - logits.max(axis=1, keepdims=True)) / TEMPERATURE)
    weights[weights < np.partition(weights, -TOP_K, axis=1)[:, -TOP_K, None]] = 0
    return weights / weights.sum(axis=1, keepdims=True)


def judged_places(accepted: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """The places in a text whose proposed token was judged, and whether it was accepted."""
    start = 0
    for count in accepted:
        yield from ((start + place, place < count) for place in range(min(count + 1, NUM_DRAFT_TOKENS)))
        start += count + 1


def check_acceptance(sample: Sample, most: int) -> None:
    """Holds what was accepted against what the two models' distributions say.

    A token is judged only where all before it in its round were accepted, so what stands before it is in the text, and its
    probability of acceptance is known. A gambler who bets on each outcome at these odds, always the same way, has an expected
    wealth of 1 at the end, whatever the texts are; so it passes 2 / FALSE_ALARM with probability FALSE_ALARM / 2 at most
    (Markov). One bets on more accepted tokens, one on fewer. The stake must not depend on the outcomes; this one, of `most`,
    the tokens that can be judged in all rounds, finds small differences in so many.
    """
    stake = math.sqrt(8 * math.log(2 / FALSE_ALARM) / most)
    for bet in (stake, -stake):
        log_wealth = (bet * sample.outcomes - np.log1p(sample.probabilities * math.expm1(bet))).sum()
        assert log_wealth < math.log(2 / FALSE_ALARM), (sample.outcomes.mean(), sample.probabilities.mean())


def check_same_law(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> None:
    """Compares a figure of each run, prompt by prompt and seed by seed.

    If both engines follow one law, each difference is as likely to have the other sign, so their sum passes
    sqrt(2 * ln(2 / FALSE_ALARM)) times the root of the sum of their squares with probability FALSE_ALARM at most
    (Hoeffding's inequality for random signs, given the sizes).
    """
    differences = ours - theirs
    allowed = math.sqrt(2 * math.log(2 / FALSE_ALARM) * (differences**2).sum())
    assert abs(differences.sum()) <= allowed, (ours.mean(), theirs.mean(), allowed / len(ours))


@pytest.mark.parametrize(
    ("size", "num_seeds", "num_rounds"),
    [pytest.param("smollm2", 1, 6, marks=pytest.mark.real_weights), ("tiny", 12, 10)],
)
def test_sampled_texts_and_acceptance_follow_the_law_of_genai(
    run_genai: RunGenai,
    request: pytest.FixtureRequest,
    size: str,
    num_seeds: int,
    num_rounds: int,
) -> None:
    """Sampled at temperature 0.7; the tiny pair makes up in numbers what it lacks in size."""
    if size == "smollm2":
        pair, prompts = request.getfixturevalue("smollm2"), request.getfixturevalue("prompts")[::2]
    else:
        pair = Pair.load(request.getfixturevalue("tiny_bundle"), threads=1)
        prompts = [pair.tokenizer.encode(prompt) for prompt in PROMPTS]
    seeds = list(range(1, num_seeds + 1))
    asked = [prompt for prompt in prompts for _ in seeds]
    theirs = genai_runs(run_genai, pair, prompts, seeds, num_rounds)
    generator = pair.generator()
    ours = [our_run(generator, prompt, seed, num_rounds) for prompt in prompts for seed in seeds]
    assert {len(accepted) for _, accepted in (*ours, *theirs)} == {num_rounds}
    samples = [Sample.of(pair, asked, runs) for runs in (ours, theirs)]
    print("acceptance rates, ours and theirs:", *(sample.outcomes.mean() for sample in samples))
    for sample in samples:
        check_acceptance(sample, len(asked) * num_rounds * NUM_DRAFT_TOKENS)
    check_same_law(samples[0].accepted, samples[1].accepted)
    check_same_law(samples[0].surprisals, samples[1].surprisals)


def test_a_speculative_text_fills_the_context_but_for_a_round(run_genai: RunGenai, tiny_bundle: Path) -> None:
    """As export.genai_config says: behind that the spare row has no slot in that engine's cache."""
    bundle = endless(Pair.load(tiny_bundle, threads=1), [[5, 6, 7]])
    room = bundle.target.context_length - NUM_DRAFT_TOKENS - 1 - 3
    ((tokens, accepted),) = run_genai(bundle, [[5, 6, 7]], num_draft_tokens=NUM_DRAFT_TOKENS, max_new_tokens=room)
    assert len(tokens) == room
    assert accepted
    ((plain, _),) = run_genai(bundle, [[5, 6, 7]], max_new_tokens=room)
    assert plain == tokens
