"""What scripts/bench.py measures, and in which order."""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bench_engines import GENAI_DRAFT_TOKENS, BenchEngine, TextRequest
from bench_figures import GENAI_PLAIN, LLAMA_PLAIN, OURS_PLAIN, Engine, Mode, ModeFigures, TextRun, mode_figures

DEFAULT_NUM_DRAFT_TOKENS = 4
CODE = """def add(a, b):
    return a + b

def subtract(a, b):
    return a - b

def multiply(a, b):
    return a * b
"""
# As long as what people have edited, for an answer that copies most of it.
FILE = '''class Basket:
    """What somebody is about to buy."""

    def __init__(self, currency: str) -> None:
        self.currency = currency
        self.items: dict[str, tuple[int, float]] = {}

    def add(self, name: str, price: float, count: int = 1) -> None:
        if price < 0 or count < 1:
            raise ValueError(f"{count} of {name} at {price} cannot be bought")
        known, _ = self.items.get(name, (0, price))
        self.items[name] = (known + count, price)

    def remove(self, name: str) -> None:
        if name not in self.items:
            raise KeyError(f"{name} is not in the basket")
        del self.items[name]

    def total(self) -> float:
        result = 0.0
        for count, price in self.items.values():
            result += count * price
        return round(result, 2)

    def describe(self) -> str:
        lines = [f"{count} x {name}: {count * price:.2f}" for name, (count, price) in self.items.items()]
        lines.append(f"total: {self.total():.2f} {self.currency}")
        return "\\n".join(lines)
'''
CHAT_PROMPTS = {
    "function": "Write a Python function that checks whether a number is prime.",
    "edit given code": f"Add type hints to all functions. Answer with the whole code only.\n\n{CODE}",
    "edit a file": f"Rename the method total to sum_of_prices everywhere. Answer with the whole code only.\n\n{FILE}",
    "story": "Tell me a short story about a lighthouse keeper.",
    "list": "List the months of the year with their number of days.",
    "explain": "Explain how tides work.",
}
# Goes on from where it ends, so no chat template.
TEXT_PROMPTS = {
    "complete code": f"{CODE}\ndef divide(a, b):\n    if b == 0:\n",
}
_WARM_UP_TOKENS = 24
# Threads that still spin, waiting for more work, have given up by then.
_PAUSE_SECONDS = 0.05


@dataclass(frozen=True)
class Case:
    """A prompt and how it is continued.

    Attributes:
        prompt: Its name.
        request: What every mode is asked for; the seed is the repetition's own.
    """

    prompt: str
    request: TextRequest

    @property
    def title(self) -> str:
        """For people."""
        rules = f"temperature {self.request.temperature:g}" if self.request.temperature else "greedy"
        return f"{self.prompt}, {rules}, {len(self.request.prompt)} prompt tokens"

    @property
    def same_text(self) -> frozenset[Engine]:
        """Engines whose text must not depend on the drafter."""
        if not self.request.temperature:
            return frozenset({"ours", "genai"})
        return frozenset({"ours"}) if self.request.coupled else frozenset()


def modes_of(
    drafters: Sequence[str], numbers: Sequence[int] | None, *, genai: bool, genai_draft: bool, gguf: bool
) -> list[Mode]:
    """Returns what is compared, each engine's plain decoding first.

    Args:
        drafters: Ours; "off" is among the modes in any case.
        numbers: Draft tokens to try with each; None for each drafter's own number, and 4 for ONNX Runtime GenAI.
        genai: Whether ONNX Runtime GenAI takes part.
        genai_draft: Whether it can draft with the bundle's draft model.
        gguf: Whether llama.cpp takes part.
    """
    drafting = dict.fromkeys(name for name in drafters if name != "off")
    modes = [OURS_PLAIN, *(Mode("ours", name, number) for name in drafting for number in numbers or (None,))]
    if genai:
        able = [number for number in numbers or (DEFAULT_NUM_DRAFT_TOKENS,) if number in GENAI_DRAFT_TOKENS]
        names = ("model", "lookup") if genai_draft else ("lookup",)
        modes += [GENAI_PLAIN, *(Mode("genai", name, number) for name in names for number in able)]
    return [*modes, LLAMA_PLAIN] if gguf else modes


def measure(
    engines: Mapping[Engine, BenchEngine],
    modes: Sequence[Mode],
    cases: Sequence[Case],
    repeat: int,
    advance: Callable[[str], object],
) -> Iterator[tuple[Case, list[ModeFigures]]]:
    """Yields the figures of each case as soon as it is done; on Ctrl-C, of the repetitions that are.

    All modes take turns within a repetition, so that a machine whose speed drifts slows them alike. A short text of each mode
    goes before: then memory is allocated and kernels are chosen.

    Args:
        engines: Those that take part.
        modes: In which order they take turns.
        cases: At least one.
        repeat: Repetitions that count.
        advance: Called with what comes next, before each text that counts.
    """
    warm_up = cases[0].request
    for mode in modes:
        engines[mode.engine].run(mode, replace(warm_up, max_new_tokens=min(_WARM_UP_TOKENS, warm_up.max_new_tokens)))
    for case in cases:
        runs: dict[Mode, list[TextRun]] = {mode: [] for mode in modes}
        try:
            for seed, mode in itertools.product(range(1, repeat + 1), modes):
                advance(f"{case.prompt}: {mode.name}")
                time.sleep(_PAUSE_SECONDS)
                runs[mode].append(engines[mode.engine].run(mode, replace(case.request, seed=seed)))
        except KeyboardInterrupt:
            if figures := mode_figures(runs, same_text=case.same_text):
                yield case, figures
            raise
        yield case, mode_figures(runs, same_text=case.same_text)
