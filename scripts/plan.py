#!/usr/bin/env python
"""Measure a pair on this machine, and say which drafter and how many draft tokens pay, or that none do."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import check_folder_of, new_parser, read_prompts, require, run
from generation_arguments import add_device_arguments, device_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runtime import Generator
    from runtime.generator import Prompt
    from runtime.pass_costs import PassCosts
    from runtime.planner import PromptPlan

EXAMPLES = """examples:
  # measures, prints the table, and keeps the result in bundles/smollm2/plan.json, which loading the bundle then uses
  python scripts/plan.py bundles/smollm2

  # with prompts of your own, one a line, and the drawing
  python scripts/plan.py bundles/smollm2 --prompts prompts.txt --plot plan.svg

A greedy text is the same whatever proposes. So one text of each kind tells which rounds any number of draft tokens would have
made of it, and what passes cost by their number of rows says how long these would take. The best prediction of each kind is
then run and compared. Measure when nothing else runs.
"""
_FEWEST_NEW_TOKENS = 16
PROMPTS = {
    "code": "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "edit": "Add type hints to this code and return all of it:\n"
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n",
    "story": "Tell me a short story about a lighthouse keeper.",
    "list": "List the days of the week and the months of the year.",
    "explain": "Explain how tides work.",
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = new_parser(__doc__, EXAMPLES)
    parser.add_argument("bundle", type=Path, help="a folder made by scripts/export.py")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="a text file, one prompt a line (default: five kinds)")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="length of a text (default 64)")
    add_device_arguments(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the predictions (.svg, .png or .pdf)")
    parsed = parser.parse_args(arguments)
    if not parsed.max_new_tokens >= _FEWEST_NEW_TOKENS:
        parser.error(f"--max-new-tokens is {parsed.max_new_tokens}; at least {_FEWEST_NEW_TOKENS} are needed")
    if parsed.plot is not None and parsed.plot.suffix not in (".svg", ".png", ".pdf"):
        parser.error(f"--plot is {parsed.plot}; a name that ends with .svg, .png or .pdf is expected")
    return parsed


def main() -> int:
    """Plans; returns the exit status."""
    arguments = parse_arguments()

    import tqdm

    from runtime import Generator
    from runtime.manifest import load_bundle
    from runtime.plan import Plan, files_of
    from runtime.planner import advise, plan_prompts, plan_steps

    prompts = PROMPTS if arguments.prompts is None else read_prompts(arguments.prompts)
    require(*([] if arguments.plot is None else ["matplotlib"]))
    check_folder_of(arguments.plot)
    bundle = load_bundle(arguments.bundle)
    generator = Generator.from_bundle(
        arguments.bundle,
        drafter="lookup" if bundle.draft is None else "model",
        shared_thread_pool=True,
        verify_files=False,  # just done
        **device_settings(arguments),
    )
    asked: dict[str, Prompt] = {
        kind: [{"role": "user", "content": prompt}] if generator.tokenizer.has_chat_template else prompt
        for kind, prompt in prompts.items()
    }
    _check_lengths(generator, asked, are_own=arguments.prompts is None)
    with tqdm.tqdm(total=plan_steps(generator, len(asked)), desc="measuring", leave=False) as bar:
        costs, plans = plan_prompts(generator, asked, arguments.max_new_tokens, bar.update)
    _print_costs(costs)
    _print_plans(plans)
    firsts = [plan.acceptance["model"][0] for plan in plans.values() if plan.acceptance.get("model")]
    prior = sum(firsts) / len(firsts) if firsts else None
    advice = advise(plans)
    if unsteady := [kind for kind, plan in plans.items() if not plan.is_steady]:
        print(f"\nnote: plain decoding changed its speed meanwhile ({', '.join(unsteady)}): measure when nothing else runs")
    predicted = {kind: {str(setting): speed for setting, speed in plan.predicted.items()} for kind, plan in plans.items()}
    Plan(generator.machine(), files_of(bundle), costs, prior, advice, predicted).save(arguments.bundle)
    print(f"\n{advice}\nKept in {arguments.bundle / 'plan.json'}; loading the bundle on this machine uses it.")
    if arguments.plot is not None:
        _draw(plans, arguments.plot)
    return 0


def _check_lengths(generator: "Generator", prompts: "Mapping[str, Prompt]", *, are_own: bool) -> None:
    """Refuses, before anything is measured, prompts that leave no room for a text.

    Raises:
        ValueError: There is one.
    """
    holds = generator.target.spec.context_length
    lengths = {kind: len(generator.prompt_tokens(prompt)) for kind, prompt in prompts.items()}
    longest = max(lengths, key=lambda kind: lengths[kind])
    needed = lengths[longest] + _FEWEST_NEW_TOKENS
    if needed <= holds:
        return
    if are_own:
        raise ValueError(
            f"The planner's own prompts need a context of {needed} tokens, and the bundle's holds {holds}: pass shorter ones, "
            "--prompts FILE, or export with a larger --max-length."
        )
    raise ValueError(
        f"The prompt '{longest}' has {lengths[longest]} tokens; with at least {_FEWEST_NEW_TOKENS} new ones it needs a context "
        f"of {needed}, and the bundle's holds {holds}: shorten it."
    )


def _print_costs(costs: "PassCosts") -> None:
    rows = [rows for rows, _ in costs.target_by_rows]
    print("milliseconds of a pass by rows")
    print("  rows   " + "".join(f"{row:>8}" for row in rows))
    print("  target " + "".join(f"{1000 * costs.target(row):8.1f}" for row in rows))
    if costs.draft_by_rows is not None:
        print("  draft  " + "".join(f"{1000 * costs.draft(row):8.1f}" for row in rows))
    print(f"  a round takes {1000 * costs.round_seconds:.2f} beside its passes")


def _print_plans(plans: "dict[str, PromptPlan]") -> None:
    from runtime.planner import OFF, Setting

    drafters = list(dict.fromkeys(drafter for plan in plans.values() for drafter in plan.acceptance))
    numbers = range(1, 1 + max(setting.num_draft_tokens for plan in plans.values() for setting in plan.predicted))
    for drafter in drafters:
        print(f"\n{drafter}: tokens per second predicted by K, and the share of rounds in which place K is accepted")
        print(f"  {'':<10}{'off':>7}" + "".join(f"{f'K={number}':>14}" for number in numbers))
        for kind, plan in plans.items():
            cells = ""
            for number in numbers:
                speed = plan.predicted.get(Setting(drafter, number))
                share = plan.acceptance[drafter][number - 1] if number <= len(plan.acceptance[drafter]) else 0.0
                cells += f"{'':>14}" if speed is None else f"{speed:8.1f} {share:4.0%} "
            print(f"  {kind[:9]:<10}{plan.predicted[OFF]:7.1f}{cells}")
    print(f"\n  {'':<10}{'best':<16}{'predicted':>10}{'measured':>10}{'gain predicted':>16}{'measured':>10}")
    for kind, plan in plans.items():
        print(
            f"  {kind[:9]:<10}{plan.best!s:<16}{plan.predicted[plan.best]:10.1f}{plan.measured:10.1f}"
            f"{plan.predicted_gain:16.2f}{plan.measured_gain:10.2f}"
        )


def _draw(plans: "dict[str, PromptPlan]", path: Path) -> None:
    from matplotlib.figure import Figure

    from runtime.planner import OFF

    drafters = list(dict.fromkeys(drafter for plan in plans.values() for drafter in plan.acceptance))
    figure = Figure(figsize=(5 * len(drafters), 4), layout="constrained")
    for axes, drafter in zip(figure.subplots(1, len(drafters), squeeze=False)[0], drafters, strict=True):
        for kind, plan in plans.items():
            speeds = [speed for setting, speed in plan.predicted.items() if setting.drafter == drafter]
            axes.plot([plan.predicted[OFF], *speeds], marker="o", label=kind)
        axes.set_title(drafter)
        axes.set_xlabel("draft tokens a round (K)")
        axes.set_ylabel("tokens per second, predicted")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(run(main, extra=".[cpu,certify]"))
