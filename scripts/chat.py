#!/usr/bin/env python
"""Talk with a bundle's model. What has been said stays cached, so each turn costs what is new."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import Terminated, new_parser, run
from generation_arguments import add_generator_arguments, add_sampling_arguments, load_generator, sampling_params

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runtime import Chat, Piece, SamplingParams

EXAMPLES = """examples:
  python scripts/chat.py bundles/smollm2
  python scripts/chat.py bundles/smollm2 --system "Answer in one sentence." --temperature 0.7 --top-p 0.9

at the prompt:
  /more    let the last answer go on, after it ended for its length or you pressed Ctrl-C
  /again   answer your last message again; the same answer comes where it is greedy or has a --seed
  /back    forget your last message and its answer
  /exit    leave; so does the end of input
A line that begins with "/" is a command; put a space before it to say it to the model.
"""
COMMANDS = ("/more", "/again", "/back", "/exit")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = new_parser(__doc__, EXAMPLES)
    parser.add_argument("bundle", type=Path, help="a folder made by scripts/export.py, of a model with a chat template")
    parser.add_argument("--system", help="a system message before all others")
    add_generator_arguments(parser)
    add_sampling_arguments(parser)
    return parser.parse_args(arguments)


def main() -> int:
    """Talks until the input ends; returns the exit status."""
    arguments = parse_arguments()

    from runtime.manifest import load_bundle

    params = sampling_params(arguments)
    if load_bundle(arguments.bundle, hash_contents=False).tokenizer.chat_template is None:
        raise ValueError(
            f"The bundle {arguments.bundle} has no chat template, so it holds no conversation: let it continue a text, python "
            f'scripts/generate.py {arguments.bundle} "Once upon a time".'
        )
    generator = load_generator(arguments)
    chat = generator.chat([{"role": "system", "content": arguments.system}] if arguments.system else [])
    while (line := _read_line()) is not None and line.strip() != "/exit":
        if line.strip():
            _take_turn(chat, line, params)
    return 0


def _take_turn(chat: "Chat", line: str, params: "SamplingParams") -> None:
    from runtime import PromptError, SpecError

    try:
        _print_answer(_pieces(chat, line, params))
    except (SpecError, ValueError) as error:
        hint = " Forget the last turn with /back." if isinstance(error, PromptError) and chat.messages else ""
        print(f"{error}{hint}", file=sys.stderr)


def _read_line() -> str | None:
    if sys.stdin is None:  # closed by whoever started the script
        return None
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _pieces(chat: "Chat", line: str, params: "SamplingParams") -> "Iterator[Piece]":
    """Does what a line asks for, and returns the answer that follows from it."""
    command = line.rstrip()
    if command == "/more":
        return chat.resume(params.max_new_tokens)
    if command == "/again":
        if not any(message["role"] == "user" for message in chat.messages):
            raise ValueError("There is no message to answer again.")
        chat.rewind_to(len(chat.messages) - (chat.messages[-1]["role"] == "assistant"))
        return chat.stream(None, params)
    if command == "/back":
        said = [place for place, message in enumerate(chat.messages) if message["role"] == "user"]
        chat.rewind_to(said[-1] if said else len(chat.messages))
        return iter(())
    if command.startswith("/"):
        raise ValueError(f"'{command}' is unknown; there are {', '.join(COMMANDS)}.")
    return chat.stream(line, params)


def _print_answer(pieces: "Iterator[Piece]") -> None:
    result = None
    try:
        for piece in pieces:
            print(piece.text, end="", flush=True)
            result = piece.result
    except Terminated:
        raise
    except KeyboardInterrupt:
        print("\n[stopped; /more goes on]", file=sys.stderr)
        return
    if result is not None:
        print()
        stats = result.stats
        print(
            f"[{result.finish_reason}; {stats.new_tokens} tokens, {stats.prompt_tokens - stats.cached_tokens} of "
            f"{stats.prompt_tokens} prompt tokens read anew, {stats.decode_tokens_per_second:.1f} tokens per second]",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(run(main, extra=".[cpu]"))
