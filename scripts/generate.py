#!/usr/bin/env python
"""Generate text from a bundle, speculatively, and print it as it comes."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import new_parser, run

if TYPE_CHECKING:
    from runtime import Generator, SamplingParams

EXAMPLES = """examples:
  # an answer to a chat message, greedy
  python scripts/generate.py bundles/smollm2 "Explain tides." --chat

  # sampled, repeatable, ending at the first empty line
  python scripts/generate.py bundles/smollm2 "The sea" --temperature 0.7 --top-p 0.9 --seed 7 --stop $'\\n\\n'

  # see each round: proposal, both probabilities, the number drawn, accepted or refused
  python scripts/generate.py bundles/smollm2 "Count to ten." --chat --max-new-tokens 24 --trace

  # the prompt from a file or a pipe; without a draft, to compare the text
  cat prompt.txt | python scripts/generate.py bundles/smollm2 - --drafter off
"""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = new_parser(__doc__, EXAMPLES)
    parser.add_argument("bundle", type=Path, help="a folder made by scripts/export.py")
    parser.add_argument("prompt", help="the text to continue, or the message with --chat; '-' reads it from standard input")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument("--system", help="a system message in front of it (with --chat)")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default 128")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K most probable tokens (default 0: all)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="keep the top tokens that sum to P (default 1: all)"
    )
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help="keep tokens P times as probable as the top one")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1 discourages repeating")
    parser.add_argument("--seed", type=int, help="makes sampled text repeatable")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text (may be repeated)")
    parser.add_argument("--drafter", choices=["model", "lookup", "off"], help="default: the draft model if the bundle has one")
    parser.add_argument("--num-draft-tokens", type=int, default=4, metavar="K", help="tokens proposed in a round (default 4)")
    parser.add_argument("--device", default="cpu", help="default cpu")
    parser.add_argument("--threads", type=int, metavar="N", help="default: all cores")
    parser.add_argument("--trace", action="store_true", help="tell each round instead of streaming the text")
    parser.add_argument("--stats", action="store_true", help="print what it cost, as JSON, to standard error")
    parsed = parser.parse_args(arguments)
    if parsed.system and not parsed.chat:
        parser.error("--system is a chat message: pass --chat with it")
    return parsed


def main() -> int:
    """Generates; returns the exit status."""
    arguments = parse_arguments()

    from runtime import Generator, SamplingParams

    params = SamplingParams(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        seed=arguments.seed,
        stop=arguments.stop,
    )
    # This process makes no other ONNX Runtime sessions, so it may use one thread pool for everything.
    generator = Generator.from_bundle(
        arguments.bundle,
        device=arguments.device,
        drafter=arguments.drafter,
        num_draft_tokens=arguments.num_draft_tokens,
        threads=arguments.threads,
        shared_thread_pool=True,
    )
    _print_text(generator, arguments, params)
    return 0


def _read_standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"The prompt on standard input is not UTF-8 (byte {error.start}): convert it first.") from error


def _print_text(generator: "Generator", arguments: argparse.Namespace, params: "SamplingParams") -> None:
    from runtime.trace import trace_lines

    text = _read_standard_input() if arguments.prompt == "-" else arguments.prompt
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    prompt = [*system, {"role": "user", "content": text}] if arguments.chat else text
    result = None
    for number, piece in enumerate(generator.stream(prompt, params), start=1):
        result = piece.result
        if not arguments.trace:
            print(piece.text, end="", flush=True)
        elif piece.round is not None:
            print(*trace_lines(number, piece.round, len(piece.token_ids), generator.tokenizer.token), sep="\n", flush=True)
    if arguments.trace:
        print(f"\n{result.text}", end="")
    stats = result.stats
    print(
        f"\n\n[{result.finish_reason}; {stats.new_tokens} tokens, {stats.rounds} target passes that judged, acceptance rate "
        f"{stats.acceptance_rate:.0%}, {stats.mean_acceptance_length:.2f} tokens a round, "
        f"{stats.decode_tokens_per_second:.1f} tokens per second behind the first round]",
        file=sys.stderr,
    )
    if arguments.stats:
        print(json.dumps(asdict(stats), indent=2), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run(main, extra=".[cpu]"))
