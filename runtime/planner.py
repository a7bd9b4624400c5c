"""Predicts how fast a pair is with each drafter and number of draft tokens, from costs and acceptance, and checks itself."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .generator import Generator
from .pass_costs import PassCosts, measure_costs
from .sampling_params import SamplingParams
from .stats import GenerationStats

if TYPE_CHECKING:
    from .pair import Prompt

MAX_DRAFT_TOKENS = 8
WORTH = 1.05  # a smaller gain is not worth the memory
STEPS_BESIDE_DRAFTERS = 3


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
        """The same as measured."""
        return self.measured / self.measured_off


def plan_steps(generator: Generator, num_prompts: int) -> int:
    """Returns how often `plan_prompts` calls `advance`."""
    return 1 + num_prompts * (STEPS_BESIDE_DRAFTERS + len(_drafters(generator)))


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
    costs = measure_costs(generator.target, generator.draft)
    advance()

    def measure(prompt: "Prompt", setting: Setting) -> GenerationStats:
        # Caches of its own each time, so that each reads the whole prompt, as a text does that comes alone.
        stats = generator.generate(prompt, params, drafter=setting.drafter, num_draft_tokens=setting.num_draft_tokens).stats
        advance()
        return stats

    plans: dict[str, PromptPlan] = {}
    for kind, prompt in prompts.items():
        plain = measure(prompt, OFF)
        if not plans:
            costs = replace(costs, round_seconds=max(0.0, 1 / plain.decode_tokens_per_second - costs.target(1)))
        counted = {drafter: measure(prompt, Setting(drafter, MAX_DRAFT_TOKENS)) for drafter in _drafters(generator)}
        predicted = predictions(costs, counted)
        best = max(predicted, key=lambda setting: predicted[setting])
        off, fast = measure(prompt, OFF), measure(prompt, best)
        acceptance = {
            drafter: tuple(n / stats.rounds for n in stats.accepted_by_position) for drafter, stats in counted.items()
        }
        plans[kind] = PromptPlan(acceptance, predicted, best, fast.decode_tokens_per_second, off.decode_tokens_per_second)
    return costs, plans


def predictions(costs: PassCosts, counted: Mapping[str, GenerationStats]) -> dict[Setting, float]:
    """Predicts tokens per second for every setting.

    A round that proposes up to K tokens brings one token and, for each place i below K, the share of rounds in which the token
    there was accepted. It takes one target pass and, for each place, the share of rounds that proposed a token there times what
    the row adds to the pass and the token takes to draft.

    Args:
        costs: Of the passes.
        counted: By drafter, what a text with the most draft tokens gave.
    """
    plain = costs.target(1) + costs.round_seconds
    predicted = {OFF: 1 / plain}
    for drafter, stats in counted.items():
        drafting = costs.draft(1) if drafter == "model" else 0.0
        tokens, seconds = 1.0, plain
        for place in range(len(stats.proposed_by_position)):
            tokens += stats.accepted_by_position[place] / stats.rounds
            row = costs.target(place + 2) - costs.target(place + 1)
            seconds += stats.proposed_by_position[place] / stats.rounds * (row + drafting)
            predicted[Setting(drafter, place + 1)] = tokens / seconds
    return predicted


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
    by_kind = "; ".join(f"{name}: {plans[name].best} ({gains[name]:.2f} times)" for name in ranked)
    return (
        f"Speculate with drafter 'auto', which chooses by these figures as it goes. The fastest fixed settings: {by_kind}. "
        f"One for all: {best_overall(plans)}."
    )


def _drafters(generator: Generator) -> tuple[str, ...]:
    return ("lookup",) if generator.draft is None else ("model", "lookup")
