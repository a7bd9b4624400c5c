#!/usr/bin/env python
"""Time what Python takes of a round: all of it but ONNX Runtime's passes, for each drafter, and where it goes."""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from command_line import new_parser, read_prompts, run
from generation_arguments import add_device_arguments, chosen_drafters, device_settings, drafter_names

if TYPE_CHECKING:
    from runtime import Generator, SamplingParams
    from runtime.generator import Prompt

EXAMPLES = """examples:
  # every drafter, greedy
  python scripts/bench_round.py bundles/smollm2

  # one drafter, sampled, with prompts of your own, one a line
  python scripts/bench_round.py bundles/smollm2 --drafters auto --temperature 0.7 --prompts prompts.txt

Medians over the rounds of all texts but the first round of each, which reads the prompt; "share" is Python's of the round. Each
text is written twice: once with a clock around the passes only, for "python" and "share", and once with one around every part,
which takes a little itself: propose (what the drafter does), feed (inputs bound, logits checked, of both models), judge, text
(ids to text, stop strings) and rest. Measure when nothing else runs. A pass leaves none of Python in the processor's caches, so
a larger model makes the same round take longer.
"""
_FEWEST_NEW_TOKENS = 18  # one more than the longest first round, which is not measured, can give
DRAFTERS = ("off", "lookup", "model", "hybrid", "auto")
PASSES, REST = "passes", "rest"
PROMPTS = {
    "function": "Write a Python function that checks whether a number is prime.",
    "story": "Tell me a story about a fox.",
}
Lap = dict[str, float]


class PartClock:
    """Seconds in each part of the work, without those in other parts that are called from it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Starts in no part, which is the rest."""
        self._clock = clock
        self._part, self._since = REST, clock()
        self._seconds: Lap = {}

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that does the same, as a part."""

        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            before = self._enter(part)
            try:
                return function(*arguments, **named)
            finally:
                self._enter(before)

        return call

    def lap(self) -> Lap:
        """Returns the seconds of each part since the last call; called in no part."""
        self._enter(REST)
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _enter(self, part: str) -> str:
        now, before = self._clock(), self._part
        self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
        self._part, self._since = part, now
        return before


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = new_parser(__doc__, EXAMPLES)
    parser.add_argument("bundle", type=Path, help="a folder made by scripts/export.py")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="a text file, one prompt a line (default: two kinds)")
    parser.add_argument(
        "--drafters", type=drafter_names, metavar="A,B", help=f"default {','.join(DRAFTERS)}, as far as there is a draft"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=128,
        metavar="N",
        help=f"length of a text (default 128, at least {_FEWEST_NEW_TOKENS})",
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0, which is greedy")
    add_device_arguments(parser)
    parsed = parser.parse_args(arguments)
    if parsed.max_new_tokens < _FEWEST_NEW_TOKENS:
        parser.error(
            f"--max-new-tokens is {parsed.max_new_tokens}; at least {_FEWEST_NEW_TOKENS} are needed, since the first round, "
            f"which may give {_FEWEST_NEW_TOKENS - 1}, is not measured"
        )
    return parsed


def main() -> int:
    """Prints a line for each drafter; returns the exit status."""
    arguments = parse_arguments()

    from runtime import Generator, SamplingParams
    from runtime.manifest import load_bundle

    has_draft = load_bundle(arguments.bundle).draft is not None
    names = chosen_drafters(arguments.drafters, DRAFTERS, has_draft=has_draft)
    params = SamplingParams(max_new_tokens=arguments.max_new_tokens, temperature=arguments.temperature, seed=1)
    generator = Generator.from_bundle(
        arguments.bundle,
        shared_thread_pool=True,
        verify_files=False,  # just done
        **device_settings(arguments),
    )
    texts = (PROMPTS if arguments.prompts is None else read_prompts(arguments.prompts)).values()
    chat = generator.tokenizer.has_chat_template
    prompts: list[Prompt] = [[{"role": "user", "content": text}] if chat else text for text in texts]
    parts = _parts()
    columns = [part for part in (*parts, REST) if part != PASSES]
    heads = ("rounds", "passes", "python", "share", *columns)
    print("milliseconds a round, medians")
    print(f"{'drafter':<8}" + "".join(f"{head:>9}" for head in heads))
    for name in names:
        whole = list(_laps(generator, name, prompts, params, {PASSES: parts[PASSES]}))
        split = list(_laps(generator, name, prompts, params, parts))
        if not whole:
            raise ValueError("Every text ended in its first round, which is not measured: pass --prompts with longer answers.")
        if not any(PASSES in lap for lap in whole):
            raise ValueError("No pass of ONNX Runtime was seen: take the device cpu, cuda or ort-tensorrt.")
        share = statistics.median(lap[REST] / sum(lap.values()) for lap in whole)
        figures = [_median_ms(whole, PASSES), _median_ms(whole, REST), *(_median_ms(split, part) for part in columns)]
        passes, python, *where = (f"{milliseconds:9.3f}" for milliseconds in figures)
        print(f"{name:<8}{len(whole):>9}{passes}{python}{share:>9.1%}{''.join(where)}", flush=True)
    return 0


def _parts() -> dict[str, list[tuple[type, str]]]:
    """Returns the methods that are each part."""
    import onnxruntime as ort

    from runtime import drafters
    from runtime.acceptance import CoupledRule, GreedyRule, RejectionRule
    from runtime.decoder import Decoder
    from runtime.output_text import OutputText

    proposing = (drafters.LookupDrafter, drafters.ModelDrafter, drafters.HybridDrafter, drafters.AdaptiveDrafter)
    return {
        PASSES: [(ort.InferenceSession, "run_with_iobinding")],
        "propose": [(drafter, "propose") for drafter in proposing],
        "feed": [(Decoder, name) for name in ("forward", "candidates", "chain")],
        "judge": [(rule, "judge") for rule in (GreedyRule, RejectionRule, CoupledRule)],
        "text": [(OutputText, name) for name in ("append", "take", "flush")],
    }


def _laps(
    generator: "Generator",
    drafter: str,
    prompts: "Sequence[Prompt]",
    params: "SamplingParams",
    parts: dict[str, list[tuple[type, str]]],
) -> Iterator[Lap]:
    """Yields the seconds of each round but those that read a prompt, by part."""
    from unittest.mock import patch  # takes a while, in which an interrupt at the top of the script would find no handler

    clock = PartClock()
    with ExitStack() as stack:
        for part, methods in parts.items():
            for owner, name in methods:
                stack.enter_context(patch.object(owner, name, clock.timed(part, getattr(owner, name))))
        for prompt in prompts:
            laps = [clock.lap() for _ in generator.stream(prompt, params, drafter=drafter)]
            yield from laps[1:]


def _median_ms(laps: Sequence[Lap], part: str) -> float:
    return 1000 * statistics.median(lap.get(part, 0.0) for lap in laps)


if __name__ == "__main__":
    sys.exit(run(main, extra=".[cpu]"))
