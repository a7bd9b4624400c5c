#!/usr/bin/env python
"""Measure how fast a bundle is, as ratios in one run: against its own plain decoding, and against other engines."""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import new_parser, read_prompts, require, run
from generation_arguments import (
    add_device_arguments,
    add_max_slowdown_argument,
    device_settings,
    drafter_names,
    max_slowdown,
)

if TYPE_CHECKING:
    from bench_report import Result
    from bench_setup import Comparison, Question

EXAMPLES = """examples:
  # our drafters against plain decoding, on seven kinds of prompts
  python scripts/bench.py bundles/smollm2

  # with other engines: ONNX Runtime GenAI on the bundle's own graphs, llama.cpp on the GGUF file they came from
  python scripts/bench.py bundles/smollm2 --genai --gguf smollm2.gguf --json bench.json --plot bench.svg

  # which K is best for one drafter, greedy and sampled
  python scripts/bench.py bundles/smollm2 --drafters model --num-draft-tokens 1 2 4 8 --temperature 0 0.7

All modes make the same number of tokens from the same ids with the same number of threads, and take turns within each
repetition; a ratio is taken within a repetition. A short text of each mode warms up first. Measure when nothing else runs.
Ctrl-C ends it; what is finished by then is printed and written.
"""
_LONGEST_PROPOSAL = 16  # of "auto", unless it is told otherwise
_LONGEST_TEXT = 100_000


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = new_parser(__doc__, EXAMPLES)
    parser.add_argument("bundle", type=Path, help="a folder made by scripts/export.py")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="a text file, one prompt a line (default: seven kinds)")
    parser.add_argument("--raw", action="store_true", help="do not put the file's prompts into the model's chat template")
    parser.add_argument(
        "--drafters", type=drafter_names, metavar="A,B", help="default auto,model,hybrid,lookup; without a draft auto,lookup"
    )
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", metavar="K", help="default: each drafter's own; genai 4")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=96,
        metavar="N",
        help=f"length of a text (default 96; at least 2 more than a round proposes: {_LONGEST_PROPOSAL + 2}, or K + 2)",
    )
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0], metavar="T", help="default 0, which is greedy")
    parser.add_argument("--top-k", type=int, default=50, metavar="N", help="above temperature 0, of all engines (default 50)")
    parser.add_argument("--acceptance", choices=["rejection", "coupled"], default="rejection", help="default rejection")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="repetitions that count (default 3)")
    add_max_slowdown_argument(parser)
    add_device_arguments(parser)
    parser.add_argument("--genai", action="store_true", help="compare with onnxruntime-genai 0.18 on the same graphs")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="compare with llama.cpp on this file, plain")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything for programs")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the ratios")
    parsed = parser.parse_args(arguments)
    numbers = parsed.num_draft_tokens or [_LONGEST_PROPOSAL]
    checks = [("num-draft-tokens", number, 1, 64) for number in numbers] + [("repeat", parsed.repeat, 1, 1000)]
    checks += [("top-k", parsed.top_k, 1, 10_000)]
    checks += [("temperature", temperature, 0, 100) for temperature in parsed.temperature]
    for name, value, low, high in checks:
        if not low <= value <= high:
            parser.error(f"--{name} is {value:g}; a number from {low} to {high} is expected")
    least = max(numbers) + 2
    if not least <= parsed.max_new_tokens <= _LONGEST_TEXT:
        parser.error(
            f"--max-new-tokens is {parsed.max_new_tokens}; a number from {least} to {_LONGEST_TEXT} is expected, since speed "
            f"is measured behind the first round, which may give {least - 1} tokens"
        )
    if {parsed.device, parsed.draft_device or "cpu"} != {"cpu"} and (parsed.genai or parsed.gguf):
        parser.error("--genai and --gguf run on the CPU only: leave them out, or --device and --draft-device")
    if parsed.plot is not None and parsed.plot.suffix != ".svg":
        parser.error(f"--plot is {parsed.plot}; a name that ends with .svg is expected")
    if parsed.gguf is not None and not parsed.gguf.is_file():
        parser.error(f"--gguf is {parsed.gguf}, which is no file; a GGUF file is expected")
    return parsed


def main() -> int:
    """Measures; returns the exit status, 1 when one of our texts differs from the plain one."""
    arguments = parse_arguments()
    require("tqdm", *([] if arguments.plot is None else ["matplotlib"]))

    from bench_report import check_writable, document, draw, load_average, summary, write_json
    from bench_setup import prepare

    for path in (arguments.json, arguments.plot):
        if path is not None:
            check_writable(path)
    results: list[Result] = []
    with ExitStack() as stack:
        comparison = prepare(_question(arguments), stack)
        facts = {**comparison.facts, "load_average": [load_average()]}
        complete = False
        try:
            _measure(comparison, arguments.repeat, results)
            complete = True
        finally:
            facts["load_average"].append(load_average())
            if results:
                print(f"\nover all prompts: geometric mean of the medians (worst-best)\n\n{summary(results)}")
                print(f"\nload average, before and behind: {facts['load_average']}", flush=True)
                if arguments.plot is not None:
                    draw(arguments.plot, results)
            if arguments.json is not None:
                write_json(arguments.json, document(results, facts, complete=complete))
    ours = [one for _, figures in results for one in figures if one.mode.engine == "ours"]
    return 0 if all(one.text in (None, "identical") for one in ours) else 1


def _question(arguments: argparse.Namespace) -> "Question":
    from bench_setup import Question

    return Question(
        bundle=arguments.bundle,
        prompts=None if arguments.prompts is None else read_prompts(arguments.prompts),
        chat=not arguments.raw,
        drafters=arguments.drafters,
        num_draft_tokens=None if arguments.num_draft_tokens is None else tuple(arguments.num_draft_tokens),
        max_new_tokens=arguments.max_new_tokens,
        temperatures=tuple(dict.fromkeys(arguments.temperature)),
        top_k=arguments.top_k,
        coupled=arguments.acceptance == "coupled",
        max_slowdown=max_slowdown(arguments),
        devices=device_settings(arguments),
        genai=arguments.genai,
        gguf=arguments.gguf,
    )


def _measure(comparison: "Comparison", repeat: int, results: "list[Result]") -> None:
    """Prints each case when it is done, and appends it to `results`."""
    from bench_report import legend, table
    from bench_run import measure
    from tqdm import tqdm

    for name, fact in comparison.pair.items():
        print(f"{name:>18}: {fact}")
    for note in comparison.notes:
        print(note)
    print(f"columns:\n{legend(comparison.modes)}", flush=True)
    texts = len(comparison.cases) * len(comparison.modes) * repeat
    with tqdm(total=texts, unit="text", leave=False) as bar:

        def advance(title: str) -> None:
            bar.set_description(title, refresh=False)
            bar.update()

        for case, figures in measure(comparison.engines, comparison.modes, comparison.cases, repeat, advance):
            results.append((case, figures))
            tqdm.write(f"\n{case.title}\n\n{table(figures)}")
            sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(run(main, extra=".[cpu,certify]"))
