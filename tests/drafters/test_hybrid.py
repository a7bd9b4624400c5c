"""Lookup and model chained: each place by who knows it, and the law of a text that both have proposed, exactly.

What the tests of the adaptive drafter share with these stands here: the enumeration of all that a drafter can draw.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from runtime.acceptance import AcceptanceRule, GreedyRule, Proposal, RejectionRule
from runtime.candidates import Candidates
from runtime.decoder import Decoder
from runtime.drafters import Drafter, HybridDrafter, LookupDrafter, ModelDrafter
from runtime.generator import Generator
from runtime.pass_costs import PassCosts
from runtime.sampling import Sampler
from runtime.sampling_params import SamplingParams
from tests.fakes import FakeModel, fake_generator, greedy_text
from tests.plain_decoding import plain_lookup
from tests.test_acceptance import SMALL_RULES, Text, World, check_law, pieces
from tests.test_generation import chi_square_p, joint_law

FALSE_ALARM = 1e-6
HISTORY = (1, 3, 2, 0, 3, 1, 0, 3)  # (0, 3) is known; behind 1 or 2 the text goes on, behind others nothing is known
UNKNOWN = (1, 3, 1, 2, 0, 3, 0, 0)  # nothing is known behind (0, 0); behind some of the tokens that may come, it is

MakeDrafter = Callable[[LookupDrafter, ModelDrafter], Drafter]


def hybrid(lookup: LookupDrafter, model: ModelDrafter) -> HybridDrafter:
    return HybridDrafter(lookup, model)


# --- the law, exactly -------------------------------------------------------------------------------------------------


class Asked(Exception):  # noqa: N818 - a signal, not an error
    """One more random number is wanted, for the place behind this block."""


class Branching(RejectionRule):
    """Draws with the numbers it was given, and then asks for another."""

    def __init__(self, sampler: Sampler, uniforms: Sequence[float]) -> None:
        self.sampler = sampler
        self._left = list(uniforms)
        self._random = self

    def random(self) -> float:
        return self._left.pop(0)

    def propose(self, logits: Candidates, history: Sequence[int], block: Sequence[int]) -> tuple[int, Candidates | None]:
        if not self._left:
            raise Asked(tuple(block))
        return super().propose(logits, history, block)


class MixedWorld(World):
    """A world whose draft says for certain what was looked up."""

    def __init__(self, rule: dict[str, object], vocab_size: int, seed: int = 0) -> None:
        super().__init__(rule, vocab_size, seed)
        self.looked_up: dict[Text, int] = {}

    def law(self, model: str, text: Text) -> list[float]:
        if model == "draft" and text in self.looked_up:
            return [float(token == self.looked_up[text]) for token in range(self.vocab_size)]
        return super().law(model, text)

    def draft(self) -> FakeModel:
        model = FakeModel(self.vocab_size)
        model.logits = lambda prefix: self.logits("draft", tuple(np.asarray(prefix).tolist()))[0]
        return model


def all_proposals(world: MixedWorld, history: Text, k: int, make: MakeDrafter) -> Iterator[tuple[float, Proposal]]:
    """Yields every proposal that a real drafter makes, with its probability, by branching wherever it draws."""
    branches: list[tuple[float, tuple[float, ...]]] = [(1.0, ())]
    model = world.draft()
    while branches:
        probability, uniforms = branches.pop()
        rule = Branching(world.sampler, uniforms)
        decoder = Decoder(model, 64, num_rows=1)
        drafter = make(
            LookupDrafter(),
            ModelDrafter(decoder, rule, target_vocab_size=world.vocab_size, end_token_ids=frozenset()),
        )
        try:
            proposal = drafter.propose(history, k)
        except Asked as asked:
            law = World.law(world, "draft", (*history, *asked.args[0]))
            branches += [(probability * length, (*uniforms, ends[0])) for length, ends in pieces(law)]
            continue
        for place in range(len(proposal.tokens)):
            if proposal.probs is None or proposal.probs[place] is None:
                world.looked_up[(*history, *proposal.tokens[:place])] = proposal.tokens[place]
        yield probability, proposal


def patterns(drawn: Iterator[tuple[float, Proposal]]) -> Counter[str]:
    """How the proposals are made, L for looked up and D for drawn, each with its probability."""
    found: Counter[str] = Counter()
    for probability, proposal in drawn:
        rows = [None] * len(proposal.tokens) if proposal.probs is None else proposal.probs
        found["".join("L" if row is None else "D" for row in rows)] += probability
    return found


@pytest.mark.parametrize("history", [HISTORY, UNKNOWN], ids=["known", "unknown"])
@pytest.mark.parametrize("name", ["plain", "penalty", "filters", "no-repeat-3", "presence-frequency"])
def test_a_chain_of_lookups_and_draws_leaves_the_law_the_targets_own(name: str, history: Text) -> None:
    world = MixedWorld(SMALL_RULES[name], 4, 9)
    check_law(world, history, 3, all_proposals(world, history, 3, hybrid))


def test_the_enumeration_sees_chains_of_both_kinds() -> None:
    found = patterns(all_proposals(MixedWorld({}, 4, 9), UNKNOWN, 3, hybrid))
    assert found.total() == pytest.approx(1)
    assert found.keys() == {"DDD", "DLL", "DDL"}
    assert min(found.values()) > 0.2
    assert patterns(all_proposals(MixedWorld({}, 4, 9), HISTORY, 3, hybrid)).keys() == {"LLL"}


# --- the law through the real round -----------------------------------------------------------------------------------

LOOPED = [0, 1, 2, 3, 0, 1, 2, 0, 2]
FREE = PassCosts(((1, 1.0),), ((1, 1e-6),))  # rows cost nothing, so all that can be proposed is


def with_costs(generator: Generator, costs: PassCosts, max_slowdown: float = 0.03) -> Generator:
    """The generator with costs that are known, so that none are measured."""
    generator._pair = dataclasses.replace(generator._pair, known_costs=costs, max_slowdown=max_slowdown)
    return generator


def chi_square(
    drafter: str, rules: dict[str, float], num_texts: int = 900, costs: PassCosts = FREE, num_draft_tokens: int = 2
) -> tuple[float, dict[str, float]]:
    """Texts of two rounds and more: the p-value of their first three tokens, and what was proposed and accepted."""
    target, draft = FakeModel(4, seed=11, sharpness=2.0), FakeModel(4, seed=11, sharpness=2.0, noise=2.0)
    generator = with_costs(fake_generator(target, draft), costs)
    observed, counted = Counter(), defaultdict(float)
    for seed in range(num_texts):
        params = SamplingParams(max_new_tokens=4, seed=seed, **rules)
        result = generator.generate(LOOPED, params, drafter=drafter, num_draft_tokens=num_draft_tokens)
        observed[result.token_ids[:3]] += 1
        counted["proposed"] += result.stats.proposed_tokens / num_texts
        counted["accepted"] += result.stats.accepted_tokens / num_texts
        counted["drafted"] += result.stats.draft_passes / num_texts
    return chi_square_p(observed, joint_law(target, LOOPED, SamplingParams(**rules))), counted


@pytest.mark.parametrize("rules", [{"temperature": 1.0}, {"temperature": 1.6, "top_k": 3, "repetition_penalty": 1.5}], ids=str)
def test_sampled_text_follows_the_targets_joint_law(rules: dict[str, float]) -> None:
    p, counted = chi_square("hybrid", rules)
    assert p > FALSE_ALARM
    assert 0.3 < counted["accepted"] / counted["proposed"] < 0.95
    assert 0.3 < counted["drafted"] < counted["proposed"] - 0.3  # the rest was looked up


# --- who proposes what ------------------------------------------------------------------------------------------------


def hybrid_drafter(model: FakeModel, rule: AcceptanceRule | None = None, ends: Sequence[int] = ()) -> HybridDrafter:
    decoder = Decoder(model, 64, num_rows=1)
    rule = rule or GreedyRule(Sampler(SamplingParams()))
    return HybridDrafter(LookupDrafter(), ModelDrafter(decoder, rule, target_vocab_size=16, end_token_ids=frozenset(ends)))


def slow_hybrid(model: FakeModel, sequence: Sequence[int], num_tokens: int) -> tuple[list[int], int]:
    """Place by place: the search, or else the model behind the whole text; and how many tokens are the model's."""
    block: list[int] = []
    drafted = 0
    for _ in range(num_tokens):
        # A search that goes on behind a block must not learn from it: it looks behind the text as it was.
        found = plain_lookup(sequence, len(block) + 1) if not drafted else looked_up_behind(sequence, block)
        if len(found) > len(block):
            block.append(found[len(block)])
        else:
            block.append(greedy_text(model, [*sequence, *block], 1)[0])
            drafted += 1
    return block, drafted


def looked_up_behind(sequence: Sequence[int], block: Sequence[int]) -> list[int]:
    ending = [*sequence, *block]
    for size in range(8, 1, -1):
        places = [end for end in range(size, len(sequence)) if list(sequence[end - size : end]) == ending[len(ending) - size :]]
        if places and size <= len(ending):
            followers = [sequence[place] for place in places]
            most = max(map(followers.count, followers))
            frequent = [token for token in followers if followers.count(token) == most]
            return [*block, followers[-1] if followers[-1] in frequent else frequent[0]]
    return list(block)


@pytest.mark.parametrize("vocab_size", [4, 8, 16])
def test_each_place_is_looked_up_first(vocab_size: int) -> None:
    model, random, drafted_in_all = FakeModel(vocab_size, seed=3), np.random.default_rng(vocab_size), 0
    for _ in range(60):
        sequence = random.integers(0, vocab_size, random.integers(1, 20)).tolist()
        drafter = hybrid_drafter(model)
        expected, drafted = slow_hybrid(model, sequence, 5)
        assert drafter.propose(sequence, 5) == Proposal(tuple(expected))
        assert drafter.passes == drafted
        drafted_in_all += drafted
        drafter.rewind_to(len(sequence) - 1)
        again = [*sequence, 1]
        assert drafter.propose(again, 5).tokens == tuple(slow_hybrid(model, again, 5)[0])
    assert 0 < drafted_in_all < 300


def test_the_model_reads_what_was_looked_up_in_the_same_pass() -> None:
    model = FakeModel(seed=3)
    drafter = hybrid_drafter(model)
    first = drafter.propose([1, 2, 3], 2)
    assert model.calls == [(0, 3, 1), (3, 1, 1)]
    drafter.rewind_to(2)
    text = [1, 2, 3, 4, 1, 2]
    drafter._lookup.next_token = lambda sequence, block: (3 + len(block), 2) if len(block) < 2 else None
    proposal = drafter.propose(text, 3)
    assert proposal.tokens == (3, 4, *greedy_text(model, [*text, 3, 4], 1))
    assert model.calls[2:] == [(2, 6, 1)]
    assert len(first.tokens) == 2
    assert (drafter.name, drafter.passes) == ("hybrid", 3)
    assert drafter.seconds > 0


def test_an_end_of_text_token_of_the_model_ends_the_proposal() -> None:
    model = FakeModel(seed=3)
    text = greedy_text(model, [1, 2, 3], 5)
    assert hybrid_drafter(model, ends=[text[2]]).propose([1, 2, 3], 5).tokens == tuple(text[: text.index(text[2]) + 1])


def test_where_the_model_has_nothing_the_lookups_stand() -> None:
    model = FakeModel(12, seed=3)
    drafter = hybrid_drafter(model)
    drafter._lookup.next_token = lambda sequence, block: (5, 2) if len(block) < 2 else None
    assert drafter.propose([15, 1, 2], 4) == Proposal((5, 5), None)
    assert model.calls == []
