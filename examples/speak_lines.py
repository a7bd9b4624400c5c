#!/usr/bin/env python
"""A device that answers lines: reads one, prints the answer as it comes, and remembers the conversation over a restart.

What an embedded program needs, in one file to copy from: memory that is taken once and never grows, a conversation that forgets
its oldest turns instead of running out of room, a state file that is whole whenever the power fails, and an end by SIGTERM.

    python examples/speak_lines.py bundles/smollm2 --state speaker.json --memory-gb 1.5 < lines.txt

It needs the runtime alone: pip install -e ".[cpu]".
"""

import argparse
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

from runtime import Generator, PromptError, SamplingParams, SpecError
from runtime.manifest import load_bundle
from runtime.memory import check_fits

Message = dict[str, str]


class Conversation:
    """Messages in a file: written before an answer begins and after it ended, so that a restart answers what is open."""

    def __init__(self, path: Path) -> None:
        """Reads the file, where there is one.

        Args:
            path: The state file.

        Raises:
            ValueError: It is not one of ours.
        """
        self.messages: list[Message] = []
        self._path = path
        if path.exists():
            try:
                self.messages = [
                    {"role": str(message["role"]), "content": str(message["content"])}
                    for message in json.loads(path.read_text(encoding="utf-8"))
                ]
            except (OSError, ValueError, TypeError, KeyError) as error:
                raise ValueError(f"The state file {path} cannot be read ({error}): remove it to begin anew.") from error

    @property
    def is_open(self) -> bool:
        """Whether a line waits for its answer."""
        return bool(self.messages) and self.messages[-1]["role"] == "user"

    def add(self, role: str, content: str) -> None:
        """Adds a message and writes the file."""
        self.messages.append({"role": role, "content": content})
        self.save()

    def save(self) -> None:
        """Writes the file, whole or not at all, and waits until it is on the disk."""
        partial = self._path.with_name(f".{self._path.name}.partial")
        with partial.open("w", encoding="utf-8") as file:
            json.dump(self.messages, file, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._path)


class Speaker:
    """Answers lines, with the caches of one session for as long as it lives."""

    def __init__(self, generator: Generator, conversation: Conversation, max_length: int, params: SamplingParams) -> None:
        """Takes the caches.

        Args:
            generator: A loaded bundle with a chat template.
            conversation: What was said before.
            max_length: Tokens the caches hold.
            params: How to answer.
        """
        self._stopped = threading.Event()
        self._answering = False
        self._generator, self._conversation = generator, conversation
        self._session = generator.session(max_length=max_length)
        self._room = max_length - params.max_new_tokens
        self._params = params

    def speak(self, lines: Iterable[str]) -> None:
        """Answers the line that a restart left open, and then each line until there are no more."""
        if self._conversation.is_open:
            self._take_turn(None)
        for line in lines:
            if line.strip():
                self._take_turn(line.strip())
            if self._stopped.is_set():
                return

    def stop(self, _signal: int = 0, _frame: object = None) -> None:
        """Ends `speak`, as a signal's handler: an answer before its next pass, the waiting for a line at once."""
        self._stopped.set()
        if not self._answering:
            raise KeyboardInterrupt

    def _take_turn(self, line: str | None) -> None:
        self._answering = True
        try:
            if line is not None:
                self._conversation.add("user", line)
            self._answer()
        finally:
            self._answering = False

    def _answer(self) -> None:
        conversation, recent = self._conversation, self._recent_messages()
        try:
            for piece in self._session.stream(recent, self._params, cancel=self._stopped):
                print(piece.text, end="", flush=True)
        except PromptError as error:  # one line is too long for this device: say so, and listen on
            del conversation.messages[-1]
            conversation.save()
            print(error, file=sys.stderr)
            return
        print(flush=True)
        # An answer that was stopped is not one: the line stays open, and the next start answers it.
        if piece.result is not None and piece.result.finish_reason != "cancelled":
            conversation.messages = recent
            conversation.add("assistant", piece.result.text)

    def _recent_messages(self) -> list[Message]:
        """As many of the last turns as leave room for an answer, the open line always."""
        messages = self._conversation.messages
        while len(messages) > 2 and len(self._generator.prompt_tokens(messages)) > self._room:
            messages = messages[2:]
        return messages


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, help="a folder made by scripts/export.py")
    parser.add_argument("--state", type=Path, default=Path("speaker.json"), help="default speaker.json")
    parser.add_argument("--device", default="cpu", help="default cpu")
    parser.add_argument("--max-length", type=int, default=1024, metavar="N", help="tokens of the conversation (default 1024)")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="of an answer (default 128)")
    parser.add_argument(
        "--memory-gb", type=float, metavar="GB", help="refuse to start where more would be taken (default: what is free)"
    )
    parsed = parser.parse_args(arguments)
    if parsed.memory_gb is not None and not 0 < parsed.memory_gb < math.inf:
        parser.error(f"--memory-gb is {parsed.memory_gb}; a number above 0 is expected")
    if not parsed.state.parent.is_dir():
        parser.error(f"--state {parsed.state} cannot be written: there is no folder {parsed.state.parent}")
    return parsed


def main() -> int:
    """Speaks until the input ends or SIGTERM comes; returns the exit status."""
    arguments = parse_arguments()
    try:
        bundle = load_bundle(arguments.bundle, hash_contents=False)
        max_length = min(arguments.max_length, bundle.target.context_length)
        if arguments.memory_gb is not None:
            check_fits(bundle.target, bundle.draft, max_length, int(arguments.memory_gb * 1e9))
        conversation = Conversation(arguments.state)
        generator = Generator.from_bundle(arguments.bundle, device=arguments.device, max_length=max_length)
        params = SamplingParams(max_new_tokens=min(arguments.max_new_tokens, max_length // 2))
        speaker = Speaker(generator, conversation, max_length, params)
        signal.signal(signal.SIGTERM, speaker.stop)
        signal.signal(signal.SIGINT, speaker.stop)
        sys.stdin.reconfigure(errors="replace")  # what is no UTF-8 must not end the program
        speaker.speak(sys.stdin)
    except (SpecError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass  # told to stop while it waited; what was said is in the state file
    return 0


if __name__ == "__main__":
    sys.exit(main())
