#!/usr/bin/env python
"""Generate text from a bundle, speculatively, and print it as it comes."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import new_parser, run
from generation_arguments import add_generator_arguments, add_sampling_arguments, load_generator, sampling_params

if TYPE_CHECKING:
    from runtime import Generator, SamplingParams

EXAMPLES = """examples:
  # an answer to a chat message, greedy
  python scripts/generate.py bundles/smollm2 "Explain tides." --chat

  # sampled, repeatable, ending at the first empty line
  python scripts/generate.py bundles/smollm2 "The sea" --temperature 0.7 --top-p 0.9 --seed 7 --stop $'\\n\\n'

  # one seed, one text: with any drafter, any number of draft tokens, or none
  python scripts/generate.py bundles/smollm2 "The sea" --temperature 0.7 --seed 7 --acceptance coupled

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
    add_generator_arguments(parser)
    parser.add_argument("--trace", action="store_true", help="tell each round instead of streaming the text")
    parser.add_argument("--stats", action="store_true", help="print what it cost, as JSON, to standard error")
    parser.add_argument("--logprobs", type=int, metavar="N", help="print each token's log-probability, and the N top ones")
    add_sampling_arguments(parser)
    parsed = parser.parse_args(arguments)
    if parsed.system and not parsed.chat:
        parser.error("--system is a chat message: pass --chat with it")
    return parsed


def main() -> int:
    """Generates; returns the exit status."""
    arguments = parse_arguments()

    params = sampling_params(arguments, logprobs=arguments.logprobs)
    _print_text(load_generator(arguments), arguments, params)
    return 0


def _read_standard_input() -> str:
    if sys.stdin is None:  # closed by whoever started the script
        return ""
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
    for token, entry in zip(result.token_ids, result.logprobs or (), strict=False):
        top = "  ".join(f"{generator.tokenizer.token(other)!r} {logprob:.3f}" for other, logprob in entry.top)
        print(f"\n{generator.tokenizer.token(token)!r:<16} {entry.logprob:8.3f}  {top}", end="")
    stats = result.stats
    accepted = f"acceptance rate {stats.acceptance_rate:.0%}" if stats.proposed_tokens else "nothing proposed"
    print(
        f"\n\n[{result.finish_reason}; {stats.new_tokens} tokens, {stats.rounds} target passes that judged, {accepted}, "
        f"{stats.mean_acceptance_length:.2f} tokens a round, {stats.decode_tokens_per_second:.1f} tokens per second behind the "
        "first round]",
        file=sys.stderr,
    )
    if arguments.stats:
        print(json.dumps(asdict(stats), indent=2), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run(main, extra=".[cpu]"))
