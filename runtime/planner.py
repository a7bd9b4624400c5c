"""Predicts how fast a pair is with each drafter and number of draft tokens, and checks itself.

Greedy texts are the same whatever proposes. So one text tells, for every number of draft tokens, which rounds it would have
been made of: they are played again on paper, and passes' measured costs are added up.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .drafters import LookupDrafter
from .generation import GenerationResult
from .generator import Generator
from .pass_costs import PassCosts, measure_costs
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .pair import Prompt

MAX_DRAFT_TOKENS = 8
WORTH = 1.05  # a smaller gain is not worth the memory
_STEPS_A_PROMPT = 3  # plain, the best setting, and plain again
_ROWS = range(1, MAX_DRAFT_TOKENS + 2)
_REPETITIONS = 5
_STEADY = 0.2  # of a logarithm


@dataclass(frozen=True)
class Setting:
    """A drafter, and how many tokens it proposes a round."""

    drafter: str
    num_draft_tokens: int

    def __str__(self) -> str:
        """As people read it."""
        return self.drafter if self == OFF else f"{self.drafter}, K = {self.num_draft_tokens}"


OFF = Setting("off", 0)


@dataclass(frozen=True)
class PromptPlan:
    """What was found for one kind of prompt.

    Attributes:
        acceptance: By drafter, the share of rounds in which the token at each place of a proposal was accepted.
        predicted: Tokens per second behind the first token, by setting.
        best: The fastest setting, by prediction.
        measured: Tokens per second of the best setting, run.
        measured_off: The same without speculation, in turn with it.
    """

    acceptance: Mapping[str, tuple[float, ...]]
    predicted: Mapping[Setting, float]
    best: Setting
    measured: float
    measured_off: float

    @property
    def predicted_gain(self) -> float:
        """The best setting's speed over that without speculation, by prediction."""
        return self.predicted[self.best] / self.predicted[OFF]

    @property
    def measured_gain(self) -> float:
        """The same as measured; plain decoding gains nothing over itself, whatever else the machine did meanwhile."""
        return 1.0 if self.best == OFF else self.measured / self.measured_off

    @property
    def is_steady(self) -> bool:
        """Whether plain decoding took about as long at the end as at the beginning, so that figures can be believed."""
        return abs(math.log(self.measured_off / self.predicted[OFF])) < _STEADY


def plan_steps(generator: Generator, num_prompts: int) -> int:
    """Returns how often `plan_prompts` calls `advance`."""
    return 1 + num_prompts * (_STEPS_A_PROMPT + (generator.draft is not None))


def plan_prompts(
    generator: Generator, prompts: "Mapping[str, Prompt]", max_new_tokens: int, advance: Callable[[], None]
) -> tuple[PassCosts, dict[str, PromptPlan]]:
    """Measures costs, then acceptance and speed for each kind of prompt, with greedy texts that go on past their ends.

    Args:
        generator: The pair.
        prompts: By kind, at least one.
        max_new_tokens: Length of the texts.
        advance: Called after each step; see `plan_steps`.

    Returns:
        The costs, what a round takes beside its passes among them; and what was found for each kind.
    """
    params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    costs = measure_costs(generator.target, generator.draft, rows=_ROWS, repetitions=_REPETITIONS)
    advance()

    def run(prompt: "Prompt", setting: Setting) -> tuple[GenerationResult, list[PlayedRound]]:
        # Caches of its own each time, so that each reads the whole prompt, as a text does that comes alone.
        played = []
        for piece in generator.stream(prompt, params, drafter=setting.drafter, num_draft_tokens=setting.num_draft_tokens):
            if piece.round is not None:
                played.append(PlayedRound(len(piece.round.proposal.tokens), piece.round.verification.num_accepted))
        advance()
        assert piece.result is not None, "the last piece carries the result"
        return piece.result, played

    plans: dict[str, PromptPlan] = {}
    for kind, prompt in prompts.items():
        plain, _ = run(prompt, OFF)
        if not plans:
            costs = replace(costs, round_seconds=max(0.0, _beside_passes(plain) / plain.stats.rounds))
        rounds = lookup_rounds(generator.prompt_tokens(prompt), plain.token_ids)
        if generator.draft is not None:
            drafted, played = run(prompt, Setting("model", MAX_DRAFT_TOKENS))
            rounds |= model_rounds(chosen_alike(played), len(drafted.token_ids))
        # The plain text was just run: what slows it beside its passes' least cost slows the others as much.
        plain_seconds = costs.target(1) + costs.round_seconds
        slowdown = plain.stats.decode_tokens_per_second * plain_seconds or 1.0
        predicted = {OFF: slowdown / plain_seconds}
        for setting, played in rounds.items():
            if (speed := predicted_speed(costs, setting, played)) is not None:
                predicted[setting] = slowdown * speed
        best = max(predicted, key=lambda setting: predicted[setting])
        fast, off = run(prompt, best)[0], run(prompt, OFF)[0]
        acceptance = {
            setting.drafter: acceptance_by_place(played)
            for setting, played in rounds.items()
            if setting.num_draft_tokens == MAX_DRAFT_TOKENS
        }
        plans[kind] = PromptPlan(
            acceptance, predicted, best, fast.stats.decode_tokens_per_second, off.stats.decode_tokens_per_second
        )
    return costs, plans


@dataclass(frozen=True)
class PlayedRound:
    """One round: how many tokens it proposed, and how many of them were accepted."""

    proposed: int
    accepted: int


def chosen_alike(played: Sequence[PlayedRound]) -> list[bool]:
    """Returns for each place of a text whether the draft chose what the target did, as far as rounds told it.

    Behind a proposal that was accepted as a whole stands the bonus, which the draft was not asked about; it counts as chosen.
    """
    alike: list[bool] = []
    for one in played:
        alike += [True] * one.accepted + [one.accepted == one.proposed]
    return alike


def model_rounds(alike: Sequence[bool], num_tokens: int) -> dict[Setting, list[PlayedRound]]:
    """Plays a text again with a draft model.

    Args:
        alike: For each place of the text, whether the draft chooses what the target does where all before is the target's.
        num_tokens: Tokens of the text; the last round proposes no more than it can still take.

    Returns:
        The rounds by setting, 1 to MAX_DRAFT_TOKENS draft tokens.
    """

    def proposal(place: int, most: int) -> tuple[int, int]:
        run = next((length for length in range(most) if not alike[place + length]), most)
        return most, run

    return {Setting("model", most): list(_play(proposal, most, num_tokens)) for most in range(1, MAX_DRAFT_TOKENS + 1)}


def lookup_rounds(prompt: Sequence[int], text: Sequence[int]) -> dict[Setting, list[PlayedRound]]:
    """Plays a text again with lookup; arguments are token ids, and the result is that of `model_rounds`."""
    played = {}
    for most in range(1, MAX_DRAFT_TOKENS + 1):
        drafter = LookupDrafter()

        def proposal(place: int, most: int, drafter: LookupDrafter = drafter) -> tuple[int, int]:
            tokens = drafter.propose([*prompt, *text[:place]], most).tokens
            pairs = enumerate(zip(tokens, text[place:], strict=False))
            return len(tokens), next((length for length, (one, other) in pairs if one != other), len(tokens))

        played[Setting("lookup", most)] = list(_play(proposal, most, len(text)))
    return played


def _play(proposal: Callable[[int, int], tuple[int, int]], most: int, num_tokens: int) -> Iterator[PlayedRound]:
    """Yields a text's rounds.

    Args:
        proposal: Takes a place and the most tokens to propose there; returns how many are, and how many of them are right.
        most: Of any round.
        num_tokens: Of the text.
    """
    place = 0
    while place < num_tokens:
        budget = min(most, num_tokens - place - 1)
        played = PlayedRound(*proposal(place, budget)) if budget else PlayedRound(0, 0)
        yield played
        place += played.accepted + 1


def predicted_speed(costs: PassCosts, setting: Setting, played: Sequence[PlayedRound]) -> float | None:
    """Returns tokens per second behind the first round; None where there is nothing behind it."""
    tokens, seconds = 0, 0.0
    for before, this in itertools.pairwise(played):
        tokens += this.accepted + 1
        seconds += costs.target(this.proposed + 1) + costs.round_seconds
        if setting.drafter == "model" and this.proposed:
            # The last proposed token was never fed back: it is read now, if it was accepted.
            unread = 2 if before.accepted == before.proposed else 1
            seconds += costs.draft(unread) + (this.proposed - 1) * costs.draft(1)
    return tokens / seconds if tokens else None


def acceptance_by_place(played: Sequence[PlayedRound]) -> tuple[float, ...]:
    """Returns for each place of a proposal the share of rounds in which the token there was accepted."""
    longest = max((one.proposed for one in played), default=0)
    return tuple(sum(one.accepted > place for one in played) / len(played) for place in range(longest))


def _beside_passes(result: GenerationResult) -> float:
    stats = result.stats
    return stats.total_seconds - stats.target_seconds - stats.draft_seconds


def best_overall(plans: Mapping[str, PromptPlan]) -> Setting:
    """Returns the setting with the largest geometric mean of predicted gains; a kind that lacks it counts as no gain."""
    settings = dict.fromkeys(setting for plan in plans.values() for setting in plan.predicted)

    def mean(setting: Setting) -> float:
        return sum(math.log(plan.predicted.get(setting, plan.predicted[OFF]) / plan.predicted[OFF]) for plan in plans.values())

    return max(settings, key=mean)


def advise(plans: Mapping[str, PromptPlan]) -> str:
    """Says what to do, as a sentence."""
    gains = {kind: plan.measured_gain for kind, plan in plans.items()}
    kind = max(gains, key=lambda name: gains[name])
    if gains[kind] < WORTH:
        return (
            f"Do not speculate: the best setting of any kind of prompt is {gains[kind]:.2f} times as fast as the target alone "
            f"({plans[kind].best}, {kind}). A cheaper or a better draft could change that."
        )
    ranked = sorted(gains, key=lambda name: -gains[name])
    by_kind = "; ".join(f"{name}: {plans[name].best} ({gains[name]:.2f} times)" for name in ranked if gains[name] >= 1)
    if losing := ", ".join(name for name in ranked if gains[name] < 1):
        by_kind += f"; nothing gains for {losing}"
    return (
        f"Speculate with drafter 'auto', which chooses by these figures as it goes. The fastest fixed settings: {by_kind}. "
        f"One for all: {best_overall(plans)}."
    )
