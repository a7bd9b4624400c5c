#!/usr/bin/env python
"""Stream a text with speculative decoding, then decode the same text plainly and print how the two compare."""

import argparse
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import new_parser, run

if TYPE_CHECKING:
    from runtime import Generator

EXAMPLES = """examples:
  python scripts/demo.py bundles/smollm2
  python scripts/demo.py bundles/smollm2 --prompt "Write a haiku about rain." --num-draft-tokens 5
"""
PROMPTS = ("Explain how tides work.", "Write a Python function that reverses a list.", "List the days of the week.")
_REPEATS = 3


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = new_parser(__doc__, EXAMPLES)
    parser.add_argument("bundle", type=Path, help="a folder made by scripts/export.py")
    parser.add_argument("--prompt", action="append", help="a chat message (may be repeated; default: three of them)")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="default 96")
    parser.add_argument(
        "--num-draft-tokens", type=int, default=3, metavar="K", help="the most tokens proposed in a round (default 3)"
    )
    return parser.parse_args(arguments)


def main() -> int:
    """Runs the demonstration; returns the exit status, 1 when a text differs."""
    arguments = parse_arguments()

    from runtime import Generator

    generator = Generator.from_bundle(arguments.bundle, num_draft_tokens=arguments.num_draft_tokens, shared_thread_pool=True)
    for name, fact in generator.describe().items():
        print(f"{name:>18}: {fact}")
    rows = [_compare(generator, prompt, arguments.max_new_tokens) for prompt in arguments.prompt or PROMPTS]
    _print_table(rows)
    return 0 if all(row["identical"] == "yes" for row in rows) else 1


def _compare(generator: "Generator", prompt: str, max_new_tokens: int) -> dict[str, str]:
    from runtime import SamplingParams

    params = SamplingParams(max_new_tokens=max_new_tokens)
    messages = [{"role": "user", "content": prompt}]
    print(f"\n> {prompt}\n")
    for piece in generator.stream(messages, params):
        print(piece.text, end="", flush=True)
    print()
    # In turn, so that a machine whose speed drifts slows both; the ratio is taken pair by pair.
    pairs = [
        (generator.generate(messages, params, drafter="off"), generator.generate(messages, params)) for _ in range(_REPEATS)
    ]
    plain, speculative = pairs[-1]
    ratios = [two.stats.decode_tokens_per_second / max(one.stats.decode_tokens_per_second, 1e-9) for one, two in pairs]
    same = all(result.token_ids == plain.token_ids for pair in pairs for result in pair)
    return {
        "prompt": prompt[:46],
        "plain tok/s": f"{statistics.median(one.stats.decode_tokens_per_second for one, _ in pairs):.1f}",
        "speculative tok/s": f"{statistics.median(two.stats.decode_tokens_per_second for _, two in pairs):.1f}",
        "ratio": f"{statistics.median(ratios):.2f}",
        "acceptance rate": f"{speculative.stats.acceptance_rate:.0%}" if speculative.stats.proposed_tokens else "-",
        "mean acceptance length": f"{speculative.stats.mean_acceptance_length:.2f}",
        "identical": "yes" if same else "NO",
    }


def _print_table(rows: list[dict[str, str]]) -> None:
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    print("\n" + "  ".join(f"{name:<{width}}" for name, width in widths.items()))
    print("  ".join("-" * width for width in widths.values()))
    for row in rows:
        print("  ".join(f"{row[name]:<{width}}" for name, width in widths.items()))


if __name__ == "__main__":
    sys.exit(run(main, extra=".[cpu]"))
