"""Choosing and judging by one set of rules: the law of a round's tokens, exactly, and texts that no proposal can change.

Target and draft are random functions of the whole text, so that a rule that looks at the wrong tokens shows. The law is that of
the plain reference in test_sampling.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from scipy import stats

from runtime.acceptance import AcceptanceRule, CoupledRule, GreedyRule, Proposal, RejectionRule
from runtime.candidates import Candidates
from runtime.errors import SamplingError
from runtime.noise import ExponentialNoise
from runtime.sampling import Sampler
from runtime.sampling_params import SamplingParams
from runtime.verify import Verification
from tests.test_sampling import RULES, parts_of, random_rule, reference_row, reference_scores, sampler_of

PROMPT = (1, 3)
HISTORY = (*PROMPT, 1)
FALSE_ALARM = 1e-6
LARGEST_UNIFORM = 1 - 2.0**-53
STEP = 2e-6  # wider than the rounding of float32 probabilities
Text = tuple[int, ...]


class Scripted:
    """A generator of random numbers that gives those it was told, and no others."""

    def __init__(self, *uniforms: float) -> None:
        self._uniforms = list(uniforms)

    def random(self, size: int | None = None) -> float | np.ndarray:
        taken, self._uniforms = self._uniforms[: size or 1], self._uniforms[size or 1 :]
        assert len(taken) == (size or 1), "more random numbers than a round needs"
        return taken[0] if size is None else np.array(taken)


class World:
    """A target and a draft over few tokens, and what the sampling rules make of them by the reference."""

    def __init__(self, rule: dict[str, object], vocab_size: int, seed: int = 0, unlikeness: float = 1.0) -> None:
        self.vocab_size = vocab_size
        self.sampler = sampler_of(rule, len(PROMPT))
        self._parts = parts_of(rule)
        self._seed = seed
        self._unlikeness = unlikeness
        self._logits: dict[tuple[str, Text], np.ndarray] = {}
        self._laws: dict[tuple[str, Text], list[float]] = {}

    def logits(self, model: str, text: Text) -> np.ndarray:
        """float32 [1, vocab_size], drawn once for each text."""
        if (model, text) not in self._logits:
            row = 1.5 * np.random.default_rng([self._seed, *text]).standard_normal(self.vocab_size)
            if model == "draft":
                row += self._unlikeness * np.random.default_rng([self._seed, 99, *text]).standard_normal(self.vocab_size)
            self._logits[model, text] = row[None].astype(np.float32)
        return self._logits[model, text]

    def rows(self, history: Text, block: Text) -> np.ndarray:
        """The target's k + 1 rows."""
        return np.concatenate([self.logits("target", (*history, *block[:i])) for i in range(len(block) + 1)])

    def law(self, model: str, text: Text) -> list[float]:
        if (model, text) not in self._laws:
            params, ends, words = self._parts
            self._laws[model, text] = reference_row(self.logits(model, text)[0], text, params, len(PROMPT), ends, words)
        return self._laws[model, text]

    def greedy_choice(self, text: Text) -> int:
        params, ends, words = self._parts
        scores = reference_scores(self.logits("target", text)[0], text, params, len(PROMPT), ends, words)
        return scores.index(max(scores))

    def joint_law(self, history: Text, length: int) -> dict[Text, float]:
        laws = {(): 1.0}
        for _ in range(length):
            laws = {
                (*text, token): before * probability
                for text, before in laws.items()
                for token, probability in enumerate(self.law("target", (*history, *text)))
                if probability
            }
        return laws


# --- the law of a round, exactly --------------------------------------------------------------------------------------


def pieces(row: Sequence[float]) -> Iterator[tuple[float, tuple[float, float]]]:
    """Yields the intervals of a uniform that give one token each: their lengths, and a uniform near either end."""
    begin = 0.0
    for probability in row:
        margin = min(STEP, probability / 3)
        if probability > 1e-7:
            yield probability, (begin + margin, min(begin + probability - margin, LARGEST_UNIFORM))
        begin += probability


def proposals(world: World, history: Text, k: int) -> Iterator[tuple[float, Proposal]]:
    """Yields every proposal of k tokens that RejectionRule draws from the draft, with its probability."""
    drawn: list[tuple[float, Text, list[Candidates]]] = [(1.0, (), [])]
    for _ in range(k):
        longer = []
        for before, block, rows in drawn:
            text = (*history, *block)
            for length, ends in pieces(world.law("draft", text)):
                made = [
                    RejectionRule(world.sampler, Scripted(uniform)).propose(
                        Candidates.whole(world.logits("draft", text)), history, block
                    )
                    for uniform in ends
                ]
                assert made[0][0] == made[1][0], "a step inside an interval"
                assert made[0][1] is not None
                longer.append((before * length, (*block, made[0][0]), [*rows, made[0][1]]))
        drawn = longer
    for probability, block, rows in drawn:
        yield probability, Proposal.of(block, rows)


def judgements(world: World, history: Text, proposal: Proposal) -> Iterator[tuple[float, Text]]:
    """Yields every block of tokens that RejectionRule makes of a proposal, with the measure of the uniforms that lead to it.

    The result is a step function of each uniform, whose steps can only be at the acceptance probabilities and at the cumulative
    sums of the row the last token is drawn from. It is looked at near both ends of each interval.
    """
    tokens, k = proposal.tokens, len(proposal.tokens)
    texts = [(*history, *tokens[:i]) for i in range(k + 1)]
    targets = [world.law("target", text) for text in texts]
    one_hot = [[float(other == token) for other in range(world.vocab_size)] for token in tokens]
    drafts = one_hot if proposal.probs is None else [world.law("draft", text) for text in texts[:k]]
    accepted = [min(1.0, targets[i][token] / drafts[i][token]) for i, token in enumerate(tokens)]
    rows = Candidates.whole(world.rows(history, tokens))
    for j in range(k + 1):
        weight = math.prod(accepted[:j]) * (1 - accepted[j] if j < k else 1)
        if weight < 1e-8:
            continue
        last = targets[k]
        if j < k:
            residual = [max(0.0, t - d) for t, d in zip(targets[j], drafts[j], strict=True)]
            last = [p / math.fsum(residual) for p in residual]
        below = [max(0.0, p - STEP) if p < 1 else LARGEST_UNIFORM for p in accepted[:j]]
        above = [min(p + min(STEP, (1 - p) / 3), LARGEST_UNIFORM) for p in accepted[j : j + 1]]
        for length, (low, high) in pieces(last):
            near = [0.0] * j + [LARGEST_UNIFORM] * len(above) + [0.3] * (k - j - len(above)) + [low]
            far = below + above + [LARGEST_UNIFORM] * (k - j - len(above)) + [high]
            blocks = set()
            for uniforms in (near, far):
                done = RejectionRule(world.sampler, Scripted(*uniforms)).judge(proposal, rows, history)
                blocks.add((*tokens[: done.num_accepted], done.next_token))
            assert len(blocks) == 1, f"a step inside an interval: {blocks}"
            yield weight * length, blocks.pop()


def check_law(world: World, history: Text, k: int, drawn: Iterator[tuple[float, Proposal]]) -> None:
    """A round's tokens, followed by the target's own where the block is shorter, follow the target's law of k + 1 tokens."""
    law: dict[Text, float] = defaultdict(float)
    for probability, proposal in drawn:
        for weight, block in judgements(world, history, proposal):
            for rest, behind in world.joint_law((*history, *block), k + 1 - len(block)).items():
                law[(*block, *rest)] += probability * weight * behind
    expected = world.joint_law(history, k + 1)
    assert math.fsum(law.values()) == pytest.approx(1, abs=1e-5)
    for text in law.keys() | expected.keys():
        assert law[text] == pytest.approx(expected.get(text, 0.0), abs=1e-5), text


SMALL_RULES = RULES | {
    "bad-words": {"words": ((4,), (3, 1), (1, 2), (2, 2, 0), (1, 0, 3))},
    "bias": {"logit_bias": {2: 1.5, 0: -2.0}},
    "min-new": {"min_new_tokens": 3, "ends": (0, 2)},
    "all": RULES["all"] | {"top_k": 4, "ends": (0,), "words": ((1, 0), (3, 4))},
}


@pytest.mark.parametrize("name", SMALL_RULES)
def test_two_drawn_tokens_and_one_more_follow_the_targets_law(name: str) -> None:
    world = World(SMALL_RULES[name], 5)
    check_law(world, HISTORY, 2, proposals(world, HISTORY, 2))


@pytest.mark.parametrize("seed", range(24))
def test_rules_together_leave_the_law_the_targets_own(seed: int) -> None:
    random = np.random.default_rng(seed)
    vocab_size = int(random.integers(4, 7))
    world = World(random_rule(random, vocab_size), vocab_size, seed)
    check_law(world, HISTORY, 2, proposals(world, HISTORY, 2))


@pytest.mark.parametrize(
    ("name", "vocab_size"),
    [("plain", 4), ("penalty", 4), ("presence-frequency", 4), ("no-repeat-2", 4), ("typical", 4), ("filters", 5), ("all", 5)],
)
def test_three_drawn_tokens_and_one_more_follow_the_targets_law(name: str, vocab_size: int) -> None:
    world = World(SMALL_RULES[name], vocab_size, 5)
    check_law(world, HISTORY, 3, proposals(world, HISTORY, 3))


@pytest.mark.parametrize("tokens", [(), (2,), (4, 1), (0, 0, 3)], ids=str)
@pytest.mark.parametrize("name", ["plain", "penalty", "frequency", "no-repeat-3", "bad-words", "min-new", "filters", "all"])
def test_tokens_that_were_looked_up_leave_the_law_the_targets_own(name: str, tokens: Text) -> None:
    world = World(SMALL_RULES[name], 5, 3)
    check_law(world, HISTORY, len(tokens), iter([(1.0, Proposal(tokens))]))


def test_the_enumeration_sees_tokens_refused_and_accepted() -> None:
    """Proof that the tests above have something to judge: every number of accepted tokens has a share of the law."""
    world, shares = World(SMALL_RULES["all"], 5), defaultdict(float)
    for probability, proposal in proposals(world, HISTORY, 2):
        for weight, block in judgements(world, HISTORY, proposal):
            shares[len(block)] += probability * weight
    assert min(shares[1], shares[2], shares[3]) > 0.05


def test_a_draft_token_comes_with_the_row_it_was_drawn_from() -> None:
    world = World(SMALL_RULES["all"], 5)
    logits = Candidates.whole(world.logits("draft", (*HISTORY, 2)))
    token, drawn_from = RejectionRule(world.sampler, Scripted(0.6)).propose(logits, HISTORY, [2])
    assert drawn_from is not None
    row = drawn_from.rows[0]
    np.testing.assert_allclose(row, world.law("draft", (*HISTORY, 2)), rtol=1e-5, atol=1e-9)
    assert np.searchsorted(np.cumsum(row), 0.6, side="right") == token


def test_all_draws_come_from_the_one_generator() -> None:
    world = World({}, 5)

    def tokens(seed: int) -> list[int]:
        rule = RejectionRule(world.sampler, np.random.Generator(np.random.Philox(seed)))
        return write(rule, world, 20, drafting(rule, world))

    assert tokens(1) == tokens(1)
    assert len({tuple(tokens(seed)) for seed in range(5)}) == 5


# --- one seed, one text: coupled and greedy ----------------------------------------------------------------------------

Proposer = Callable[[Text], Proposal]


def write(rule: AcceptanceRule, world: World, length: int, propose: Proposer) -> list[int]:
    """Returns `length` tokens, made by rounds."""
    text = HISTORY
    while len(text) < len(HISTORY) + length:
        proposal = propose(text)
        done = rule.judge(proposal, Candidates.whole(world.rows(text, proposal.tokens)), text)
        text = (*text, *proposal.tokens[: done.num_accepted], done.next_token)
    return list(text[len(HISTORY) : len(HISTORY) + length])


def drafting(rule: AcceptanceRule, world: World, k: int = 3) -> Proposer:
    def propose(text: Text) -> Proposal:
        block: Text = ()
        rows = []
        for _ in range(k):
            token, row = rule.propose(Candidates.whole(world.logits("draft", (*text, *block))), text, block)
            block = (*block, token)
            rows.append(row)
        return Proposal.of(block, rows)

    return propose


def guessing(seed: int, vocab_size: int) -> Proposer:
    """Proposes anything, of any length, as a lookup may."""
    random = np.random.default_rng(seed)
    return lambda text: Proposal(tuple(random.integers(0, vocab_size, random.integers(0, 5)).tolist()))


def copying(tokens: Sequence[int], shift: int) -> Proposer:
    """Proposes three tokens of a text that is known; shifted, every one of them is wrong."""

    def propose(text: Text) -> Proposal:
        begin = len(text) - len(HISTORY)
        return Proposal(tuple((token + shift) % 8 for token in tokens[begin : begin + 3]))

    return propose


ONE_TEXT = ["plain", "cold", "penalty", "frequency", "no-repeat-3", "top-p", "typical", "bad-words", "min-new", "all"]


@pytest.mark.parametrize("kind", ["coupled", "greedy"])
@pytest.mark.parametrize("name", ONE_TEXT)
def test_no_proposal_changes_the_text(name: str, kind: str) -> None:
    # Six tokens of rule-bound text over eight tokens: something is always left.
    world = World(SMALL_RULES[name], 8)
    for seed in range(4):

        def rule(seed: int = seed) -> AcceptanceRule:
            return GreedyRule(world.sampler) if kind == "greedy" else CoupledRule(world.sampler, ExponentialNoise(seed))

        alone = write(rule(), world, 8, lambda text: Proposal())
        for k in (1, 2, 3, 6):
            drafted = rule()
            assert write(drafted, world, 8, drafting(drafted, world, k)) == alone
        for guess in range(3):
            assert write(rule(), world, 8, guessing(guess, 8)) == alone
        for shift in (0, 1):
            assert write(rule(), world, 8, copying(alone, shift)) == alone


@pytest.mark.parametrize("name", ONE_TEXT)
def test_greedy_text_is_the_largest_score_of_the_reference(name: str) -> None:
    world, text = World(SMALL_RULES[name], 8), HISTORY
    for _ in range(8):
        text = (*text, world.greedy_choice(text))
    rule = GreedyRule(world.sampler)
    assert write(rule, world, 8, drafting(rule, world)) == list(text[len(HISTORY) :])


def test_greedy_takes_the_first_of_equal_scores() -> None:
    rule = GreedyRule(Sampler(SamplingParams()))
    logits = np.array([[0, 3, 3, 1], [2, 2, 2, 2]], np.float32)
    assert rule.propose(Candidates.whole(logits[:1]), [0], []) == (1, None)
    assert rule.judge(Proposal((1,)), Candidates.whole(logits), [0]) == Verification(1, 0, None)
    assert rule.judge(Proposal((2,)), Candidates.whole(logits), [0]) == Verification(0, 1, None)


@pytest.mark.parametrize("name", ONE_TEXT)
def test_what_a_model_proposes_to_itself_is_accepted_whole(name: str) -> None:
    world = World(SMALL_RULES[name], 8, unlikeness=0)
    for seed in range(10):
        for rule in (GreedyRule(world.sampler), CoupledRule(world.sampler, ExponentialNoise(seed))):
            proposal = drafting(rule, world, 4)(HISTORY)
            assert proposal.probs is None
            done = rule.judge(proposal, Candidates.whole(world.rows(HISTORY, proposal.tokens)), HISTORY)
            assert (done.num_accepted, done.drawing) == (4, None)


def test_only_the_rejection_rule_depends_on_where_rounds_begin() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0))
    assert RejectionRule(sampler, np.random.default_rng(0)).depends_on_rounds
    assert not CoupledRule(sampler, ExponentialNoise(0)).depends_on_rounds
    assert not GreedyRule(sampler).depends_on_rounds


# --- the coupled law: statistics of fixed seeds, each of a false alarm of one in a million -----------------------------


def pooled_chi_square(counts: dict[Text, int], law: dict[Text, float]) -> float:
    """The p-value; texts expected fewer than five times are one cell."""
    total = sum(counts.values())
    assert counts.keys() <= law.keys(), "a text of probability 0"
    often = [text for text in law if law[text] * total >= 5]
    observed, expected = [counts.get(text, 0) for text in often], [law[text] * total for text in often]
    if (rest := total - math.fsum(expected)) > 1e-6 * total:
        observed, expected = [*observed, total - sum(observed)], [*expected, rest]
    return float(stats.chi2.sf(sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True)), len(observed) - 1))


@pytest.mark.parametrize(("name", "num_seeds"), [("plain", 3000), ("penalty", 1500), ("all", 1500)])
@pytest.mark.parametrize("proposer", ["model", "nothing"])
def test_coupled_texts_follow_the_targets_joint_law(name: str, num_seeds: int, proposer: str) -> None:
    world, counts = World(SMALL_RULES[name], 4, 5), defaultdict(int)
    for seed in range(num_seeds):
        rule = CoupledRule(world.sampler, ExponentialNoise(seed))
        propose = drafting(rule, world, 2) if proposer == "model" else (lambda text: Proposal())
        counts[tuple(write(rule, world, 3, propose))] += 1
    assert pooled_chi_square(counts, world.joint_law(HISTORY, 3)) > FALSE_ALARM


def test_coupled_tokens_along_one_text_follow_the_targets_law() -> None:
    """One seed, many positions: the same noise at two positions would repeat itself."""
    sampler, logits = Sampler(SamplingParams(temperature=1.0)), np.log(np.array([[0.5, 0.3, 0.2]], np.float32))
    rule, text = CoupledRule(sampler, ExponentialNoise(11)), [0]
    for _ in range(6000):
        text.append(rule.judge(Proposal(), Candidates.whole(logits), text).next_token)
    law = {pair: float(np.prod([[0.5, 0.3, 0.2][token] for token in pair])) for pair in itertools.product(range(3), repeat=2)}
    counts: dict[Text, int] = defaultdict(int)
    for pair in zip(text[1::2], text[2::2], strict=True):
        counts[pair] += 1
    assert pooled_chi_square(counts, law) > FALSE_ALARM


@pytest.mark.parametrize("unlikeness", [0.2, 1.0, 3.0])
def test_coupled_choices_agree_as_often_as_the_theory_says(unlikeness: float) -> None:
    """The chance is sum_i 1 / sum_j max(t_j / t_i, d_j / d_i), which lies between (1 - d) / (1 + d) and 1 - d."""
    world, num_seeds = World({"temperature": 0.8}, 6, 2, unlikeness), 3000
    target, draft = world.law("target", HISTORY), world.law("draft", HISTORY)
    distance = math.fsum(abs(t - d) for t, d in zip(target, draft, strict=True)) / 2
    chance = math.fsum(1 / math.fsum(max(target[j] / target[i], draft[j] / draft[i]) for j in range(6)) for i in range(6))
    agreed = 0
    for seed in range(num_seeds):
        rule = CoupledRule(world.sampler, ExponentialNoise(seed))
        proposal = drafting(rule, world, 1)(HISTORY)
        agreed += rule.judge(proposal, Candidates.whole(world.rows(HISTORY, proposal.tokens)), HISTORY).num_accepted
    assert stats.binomtest(agreed, num_seeds, chance).pvalue > FALSE_ALARM
    slack = stats.norm.isf(FALSE_ALARM) * math.sqrt(0.25 / num_seeds)
    assert (1 - distance) / (1 + distance) - slack <= agreed / num_seeds <= 1 - distance + slack


def test_rejection_accepts_as_often_as_the_rows_overlap() -> None:
    world = World({"temperature": 0.8}, 6, 2)
    target, draft = world.law("target", HISTORY), world.law("draft", HISTORY)
    accepted = math.fsum(
        probability * weight
        for probability, proposal in proposals(world, HISTORY, 1)
        for weight, block in judgements(world, HISTORY, proposal)
        if len(block) == 2
    )
    assert accepted == pytest.approx(math.fsum(map(min, target, draft)), abs=1e-5)


def test_the_noise_of_decided_positions_is_forgotten() -> None:
    noise = ExponentialNoise(3)
    world = World({}, 5)
    rule = CoupledRule(world.sampler, noise)
    write(rule, world, 40, drafting(rule, world, 3))
    assert len(noise._rows) <= 5


@pytest.mark.parametrize("rows", ["rejection", "coupled", "greedy"])
def test_logits_are_left_alone(rows: str) -> None:
    world = World(SMALL_RULES["plain"], 5)
    noise = ExponentialNoise(1)
    rules = {"rejection": RejectionRule(world.sampler, np.random.default_rng(0)), "coupled": CoupledRule(world.sampler, noise)}
    rule = rules.get(rows, GreedyRule(world.sampler))
    logits = world.rows(HISTORY, (2, 4))
    logits.flags.writeable = False
    rule.propose(Candidates.whole(logits[:1]), HISTORY, ())
    noise_before = {position: row.copy() for position, row in noise._rows.items()}
    rule.judge(Proposal((2, 4)), Candidates.whole(logits), HISTORY)
    assert all(np.array_equal(noise._rows[position], row) for position, row in noise_before.items())


# --- nothing left -----------------------------------------------------------------------------------------------------


def rules_over(sampler: Sampler) -> list[AcceptanceRule]:
    return [
        RejectionRule(sampler, np.random.default_rng(0)),
        CoupledRule(sampler, ExponentialNoise(0)),
        GreedyRule(sampler),
    ]


@pytest.mark.parametrize("kind", range(3), ids=["rejection", "coupled", "greedy"])
def test_no_token_left_is_an_error_of_draft_and_target(kind: int) -> None:
    rule = rules_over(sampler_of({"words": ((0,), (1,), (2,))}))[kind]
    with pytest.raises(SamplingError):
        rule.propose(Candidates.whole(np.zeros((1, 3), np.float32)), HISTORY, ())
    with pytest.raises(SamplingError):
        rule.judge(Proposal(), Candidates.whole(np.zeros((1, 3), np.float32)), HISTORY)


@pytest.mark.parametrize("kind", range(3), ids=["rejection", "coupled", "greedy"])
def test_no_token_left_behind_a_token_that_is_refused_is_no_error(kind: int) -> None:
    """Nothing may follow token 0, and the target never says it: alone it would write on, so it must with any proposal."""
    rule = rules_over(sampler_of({"words": ((0, 0), (0, 1), (0, 2))}))[kind]
    logits = np.array([[-math.inf, 5, -math.inf], [1, 2, 3]], np.float32)
    done = rule.judge(Proposal((0,)), Candidates.whole(logits), HISTORY)
    assert (done.num_accepted, done.next_token) == (0, 1)


@pytest.mark.parametrize("kind", range(3), ids=["rejection", "coupled", "greedy"])
def test_no_token_left_behind_a_token_that_is_accepted_is_an_error_of_the_next_round(kind: int) -> None:
    rule = rules_over(sampler_of({"words": ((1, 0), (1, 1), (1, 2))}))[kind]
    logits = np.array([[-math.inf, 5, -math.inf], [1, 2, 3]], np.float32)
    done = rule.judge(Proposal((1,)), Candidates.whole(logits), (0, 0))
    assert (done.num_accepted, done.next_token) == (1, None)
    with pytest.raises(SamplingError):
        rule.judge(Proposal(), Candidates.whole(logits[1:]), (0, 0, 1))
