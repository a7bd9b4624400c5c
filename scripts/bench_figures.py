"""Figures of a comparison, from measured texts: pure functions, which know neither engine nor clock."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Engine = Literal["ours", "genai", "llama.cpp"]


@dataclass(frozen=True)
class Mode:
    """One way to make a text.

    Attributes:
        engine: Who makes it.
        drafter: As the runtime calls it; "off" is plain decoding.
        num_draft_tokens: The most tokens a round proposes; None for the engine's own number.
    """

    engine: Engine
    drafter: str
    num_draft_tokens: int | None = None

    @property
    def name(self) -> str:
        """What the tables call it."""
        limit = "" if self.num_draft_tokens is None else f" K={self.num_draft_tokens}"
        if self.engine == "ours":
            return f"{self.drafter}{limit}"
        drafter = {"off": "plain", "model": "draft"}.get(self.drafter, self.drafter)
        return f"{self.engine} {drafter}{limit}"


OURS_PLAIN = Mode("ours", "off")
GENAI_PLAIN = Mode("genai", "off")
LLAMA_PLAIN = Mode("llama.cpp", "off")
BASELINES = (OURS_PLAIN, GENAI_PLAIN, LLAMA_PLAIN)


@dataclass(frozen=True)
class Work:
    """What a text took, by count.

    Attributes:
        target_passes: Passes of the target, prefill included.
        draft_passes: Passes of the draft model.
        rounds: Rounds, plain steps included.
        proposed: Tokens proposed.
        accepted: Tokens accepted.
        python_seconds: Time beside the passes; None where nobody measures it.
    """

    target_passes: int
    draft_passes: int
    rounds: int
    proposed: int
    accepted: int
    python_seconds: float | None = None


@dataclass(frozen=True)
class TextRun:
    """One text, measured.

    Attributes:
        tokens: The new tokens.
        first_seconds: Until the first of them was there.
        whole_seconds: Until the last.
        first_tokens: How many were there at once with the first.
        work: What it took.
    """

    tokens: tuple[int, ...]
    first_seconds: float
    whole_seconds: float
    first_tokens: int
    work: Work

    @property
    def decode_seconds(self) -> float:
        """Seconds a token behind the first round, so without the prefill."""
        return (self.whole_seconds - self.first_seconds) / (len(self.tokens) - self.first_tokens)


@dataclass(frozen=True)
class Spread:
    """The middle of several measurements, the least and the greatest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Ratios:
    """How many times as fast as a baseline, repetition by repetition: behind the first token, and in all."""

    decode: Spread
    whole: Spread

    @classmethod
    def of(cls, baseline: Sequence[TextRun], runs: Sequence[TextRun]) -> "Ratios":
        """Holds each text against the baseline's of the same repetition; both are as many."""
        pairs = list(zip(baseline, runs, strict=True))
        return cls(
            Spread.of([one.decode_seconds / other.decode_seconds for one, other in pairs]),
            Spread.of([one.whole_seconds / other.whole_seconds for one, other in pairs]),
        )


@dataclass(frozen=True)
class ModeFigures:
    """What one mode did with one prompt.

    Attributes:
        mode: Which.
        tokens_per_second: Median behind the first token.
        seconds: Median of the whole text, prefill included.
        ratios: By the name of the baseline; that of a baseline with itself is left out.
        target_passes: Mean.
        draft_passes: Mean.
        tokens_per_round: Over all texts.
        acceptance_rate: Over all texts; None where nothing was proposed.
        python_milliseconds_per_round: Time beside the passes; None where nobody measures it.
        text: "identical", "parts at token N" (counted from 1), or None where texts need not agree.
        runs: The texts, a repetition each.
    """

    mode: Mode
    tokens_per_second: float
    seconds: float
    ratios: Mapping[str, Ratios]
    target_passes: float
    draft_passes: float
    tokens_per_round: float
    acceptance_rate: float | None
    python_milliseconds_per_round: float | None
    text: str | None
    runs: tuple[TextRun, ...]


def mode_figures(runs: Mapping[Mode, Sequence[TextRun]], *, same_text: frozenset[Engine]) -> list[ModeFigures]:
    """Returns the figures of all modes that have as many texts as any; a repetition that was broken off does not count.

    Args:
        runs: The texts of each mode, in the order of repetitions.
        same_text: Engines whose texts must not depend on the drafter. What ONNX Runtime GenAI says plainly is then held
            against our own plain text, as it runs the same graph.
    """
    complete = min(map(len, runs.values()), default=0)
    if not complete:
        return []
    cut = {mode: tuple(texts[:complete]) for mode, texts in runs.items()}
    return [_figures_of(mode, cut, same_text) for mode in cut]


def _figures_of(mode: Mode, runs: Mapping[Mode, tuple[TextRun, ...]], same_text: frozenset[Engine]) -> ModeFigures:
    texts = runs[mode]
    work = [text.work for text in texts]
    rounds, proposed = sum(one.rounds for one in work), sum(one.proposed for one in work)
    beside = [one.python_seconds for one in work if one.python_seconds is not None]
    return ModeFigures(
        mode=mode,
        tokens_per_second=1 / statistics.median(text.decode_seconds for text in texts),
        seconds=statistics.median(text.whole_seconds for text in texts),
        ratios={other.name: Ratios.of(runs[other], texts) for other in BASELINES if other in runs and other != mode},
        target_passes=statistics.mean(one.target_passes for one in work),
        draft_passes=statistics.mean(one.draft_passes for one in work),
        tokens_per_round=sum(len(text.tokens) for text in texts) / rounds,
        acceptance_rate=sum(one.accepted for one in work) / proposed if proposed else None,
        python_milliseconds_per_round=1000 * sum(beside) / rounds if len(beside) == len(work) else None,
        text=_agreement(mode, runs, same_text),
        runs=texts,
    )


def _agreement(mode: Mode, runs: Mapping[Mode, tuple[TextRun, ...]], same_text: frozenset[Engine]) -> str | None:
    if mode.engine not in same_text or mode == OURS_PLAIN:
        return None
    other = OURS_PLAIN if mode in (GENAI_PLAIN, LLAMA_PLAIN) else Mode(mode.engine, "off")
    places = [parting(one.tokens, text.tokens) for one, text in zip(runs[other], runs[mode], strict=True)]
    parted = [place for place in places if place is not None]
    return f"parts at token {min(parted) + 1}" if parted else "identical"


def parting(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Returns the first place at which two texts differ, the end of the shorter one counting; None where none does."""
    if list(one) == list(other):
        return None
    shared = min(len(one), len(other))
    return next((place for place in range(shared) if one[place] != other[place]), shared)


def overall(ratios: Iterable[float]) -> Spread:
    """Returns the geometric mean of ratios over prompts, with the worst and the best; at least one."""
    values = list(ratios)
    return Spread(math.exp(statistics.mean(map(math.log, values))), min(values), max(values))
