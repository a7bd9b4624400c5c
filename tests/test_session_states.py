"""Random scripts of a session's and a chat's steps, against texts made the slow way; both caches are checked after each."""

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.chat import Chat
from runtime.errors import LogitsError, PromptError
from runtime.generation import GenerationResult, Piece
from runtime.sampling_params import SamplingParams
from runtime.session import Session
from tests.fakes import CHAT_TEMPLATE, FakeModel, fake_generator
from tests.plain_decoding import plain_text

MOST_LINES = 4
CONTEXT_LENGTH = 70
NUM_TOKENS = 10  # in random prompts and messages: few, so that texts meet again


@dataclass
class Text:
    """A text in hand: what was asked for, and what has been seen of it."""

    prompt: list[int]
    params: SamplingParams
    drafter: str
    num_draft_tokens: int
    exact: bool = True  # False once draws of a proposal are lost
    tokens: list[int] = field(default_factory=list)
    pieces: str = ""
    result: GenerationResult | None = None
    whole_rounds: bool = False  # no token stands in it that was left over from a round before


@dataclass
class Line:
    """A session, a chat's perhaps, with its text in hand and its open stream."""

    session: Session
    chat: Chat | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    before: list[dict[str, str]] | None = None  # the messages that a failure goes back to
    text: Text | None = None
    stream: Iterator[Piece] | None = None
    cancel: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Request:
    """What a text is asked for with, and how many of its pieces are read at once."""

    choice: dict[str, object]
    ends: dict[str, object]
    length: int
    drafter: str
    num_draft_tokens: int
    taken: int


sampled = {"temperature": st.just(0.9), "seed": st.integers(0, 3), "acceptance": st.sampled_from(["rejection", "coupled"])}
ends = {
    "stop": st.lists(st.text("abcdefghij", min_size=1, max_size=2), max_size=2),
    "stop_token_ids": st.lists(st.integers(0, 61), max_size=2),
    "include_stop": st.booleans(),
    "ignore_eos": st.booleans(),
}
lines, lengths = st.integers(0, MOST_LINES - 1), st.integers(1, 12)
requests = st.builds(
    Request,
    choice=st.just({}) | st.fixed_dictionaries(sampled) | st.fixed_dictionaries(sampled),
    ends=st.fixed_dictionaries(ends),
    length=lengths,
    drafter=st.sampled_from(["model", "model", "lookup", "off"]),
    num_draft_tokens=st.sampled_from([4, 3, 1, 6, 0]),
    taken=st.sampled_from([1, 0, 2, 99]),
)
new_tokens = st.lists(st.integers(0, NUM_TOKENS - 1), max_size=4)


class Sessions(RuleBasedStateMachine):
    """The machine; its rules are the steps."""

    @initialize(min_rows=st.sampled_from([1, 1, 3]), noise=st.sampled_from([0.0, 1.0, 3.0]), period=st.sampled_from([0, 6]))
    def load(self, min_rows: int, noise: float, period: int) -> None:
        models = [
            FakeModel(62, seed=1, sharpness=1.5, noise=one, period=period, context_length=CONTEXT_LENGTH, min_rows=min_rows)
            for one in (0.0, noise)
        ]
        self.generator = fake_generator(*models, eos=[8, 20, 33], chat_template=CHAT_TEMPLATE)
        chat = self.generator.chat()
        self.lines = [Line(self.generator.session()), Line(chat._session, chat)]

    def line(self, index: int) -> Line:
        return self.lines[index % len(self.lines)]

    def open_lines(self) -> list[Line]:
        """Those whose stream has more to give."""
        return [line for line in self.lines if line.stream is not None and line.text is not None and line.text.result is None]

    def cut_lines(self) -> list[Line]:
        """Those whose text is cut off, cancelled or left."""
        texts = [line.text for line in self.lines]
        return [
            line
            for line, text in zip(self.lines, texts, strict=True)
            if text is not None and (text.result is None or text.result.finish_reason in ("length", "cancelled"))
        ]

    # --- steps ---

    @rule(index=lines, kept=st.sampled_from([0, 3, 9, 99, 99]), new=new_tokens, request=requests)
    def begin_text(self, index: int, kept: int, new: list[int], request: Request) -> None:
        """Begins a text behind what is cached, or a part of it, and reads it, or a part of it."""
        sessions = [line for line in self.lines if line.chat is None]
        line = sessions[index % len(sessions)]
        prompt = [*line.session._target.tokens[:kept], *new] or [0]
        if len(prompt) < CONTEXT_LENGTH - 5:
            self.begin(line, prompt, prompt, request)

    @rule(index=lines, new=new_tokens, request=requests)
    def begin_answer(self, index: int, new: list[int], request: Request) -> None:
        """Says something in a chat, and reads the answer, or a part of it."""
        chats = [line for line in self.lines if line.chat is not None]
        line, content = chats[index % len(chats)], "".join("abcdefghij"[token] for token in new)
        asked = [*line.messages, {"role": "user", "content": content}]
        prompt = self.generator.tokenizer.encode_chat(asked)
        if len(prompt) < CONTEXT_LENGTH - 5:
            line.before, line.messages = line.messages, [*asked, {"role": "assistant", "content": ""}]
            self.begin(line, content, prompt, request)

    def begin(self, line: Line, asked: str | list[int], prompt: list[int], request: Request) -> None:
        params = SamplingParams(max_new_tokens=request.length, logprobs=1, **request.choice, **request.ends)
        cached, stale = list(line.session._target.tokens), line.stream if line in self.open_lines() else None
        line.cancel = threading.Event()
        stream = line.session.stream if line.chat is None else line.chat.stream
        line.stream = stream(
            asked, params, drafter=request.drafter, num_draft_tokens=request.num_draft_tokens, cancel=line.cancel
        )
        line.text = Text(prompt, params, request.drafter, request.num_draft_tokens)
        pairs = zip(cached, prompt[:-1], strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        assert line.session._current.stats.cached_tokens == shared == len(line.session._target.tokens)
        if stale is not None:
            with pytest.raises(RuntimeError, match="has begun another text"):
                next(stale)
        calls = len(self.generator.target.calls)
        self.take(line, request.taken)
        assert all(past >= shared for past, _, _ in self.generator.target.calls[calls:])

    @precondition(lambda self: self.open_lines())
    @rule(index=lines, taken=st.sampled_from([1, 2, 99]))
    def read_on(self, index: int, taken: int) -> None:
        opened = self.open_lines()
        self.take(opened[index % len(opened)], taken)

    @precondition(lambda self: self.open_lines())
    @rule(index=lines)
    def close(self, index: int) -> None:
        opened = self.open_lines()
        line = opened[index % len(opened)]
        line.stream.close()
        line.stream = None

    @precondition(lambda self: self.open_lines())
    @rule(index=lines, num_passes=st.integers(0, 6))
    def cancel(self, index: int, num_passes: int) -> None:
        """Sets the event in a pass of either model, so before the next one: perhaps in the middle of a round."""
        opened = self.open_lines()
        line, left = opened[index % len(opened)], itertools.count(num_passes - 1, -1)

        def run_down() -> None:
            if next(left) <= 0:
                line.cancel.set()

        if num_passes == 0:
            line.cancel.set()
        self.generator.target.on_pass = self.generator.draft.on_pass = run_down
        self.take(line, 99)
        self.generator.target.on_pass = self.generator.draft.on_pass = lambda: None

    @precondition(lambda self: self.cut_lines())
    @rule(index=lines, length=lengths, taken=st.sampled_from([0, 1, 99]))
    def resume(self, index: int, length: int, taken: int) -> None:
        cut = self.cut_lines()
        line = cut[index % len(cut)]
        text, resume = line.text, line.session.resume if line.chat is None else line.chat.resume
        line.cancel = threading.Event()
        if len(text.prompt) + len(text.tokens) == CONTEXT_LENGTH:
            with pytest.raises(ValueError, match="is full"):
                resume(length)
            return
        line.stream = resume(length, cancel=line.cancel)
        line.before = None
        line.text = replace(text, params=replace(text.params, max_new_tokens=len(text.tokens) + length), result=None)
        self.take(line, taken)

    @precondition(lambda self: len(self.lines) < MOST_LINES)
    @rule(index=lines)
    def fork(self, index: int) -> None:
        line = self.line(index)
        if line.chat is None:
            self.lines.append(Line(line.session.fork()))
        else:
            chat = line.chat.fork()
            self.lines.append(Line(chat._session, chat, [dict(message) for message in line.messages]))
        assert self.lines[-1].session._target.tokens == line.session._target.tokens

    @rule(index=lines, num_messages=st.integers(0, 6), content=st.one_of(st.none(), st.text("abcdefghij", max_size=3)))
    def rewind_or_edit(self, index: int, num_messages: int, content: str | None) -> None:
        line = self.line(index)
        if line.chat is None:
            return
        if content is None:
            line.chat.rewind_to(num_messages)
            changed = num_messages < len(line.messages)
            line.messages = line.messages[:num_messages]
        elif num_messages < len(line.messages):
            line.chat.edit(num_messages, content)
            changed = True
            role = line.messages[num_messages]["role"]
            line.messages = [*line.messages[:num_messages], {"role": role, "content": content}]
        else:
            with pytest.raises(PromptError, match="There is no message"):
                line.chat.edit(num_messages, content)
            changed = False
        if changed:
            line.text = line.stream = None

    @precondition(lambda self: self.open_lines())
    @rule(index=lines, model=st.sampled_from(["target", "draft"]), ahead=st.integers(0, 8))
    def fail(self, index: int, model: str, ahead: int) -> None:
        """Breaks the logits of a place, and reads on."""
        opened, broken = self.open_lines(), getattr(self.generator, model)
        line = opened[index % len(opened)]
        broken.broken_at, broken.broken_value = len(line.text.prompt) + len(line.text.tokens) - 1 + ahead, np.nan
        try:
            self.take(line, 99)
        except LogitsError:
            line.text.exact = line.text.exact and not self.draws(line.text)
            line.stream = None
            if line.chat is not None and line.before is not None:
                line.messages, line.text = line.before, None
        broken.broken_at = None

    @rule(index=lines, wrong=st.sampled_from(["params", "drafter", "num_draft_tokens", "cancel", "prompt", "long"]))
    def refuse(self, index: int, wrong: str) -> None:
        """Asks for what cannot be; the invariants say that nothing has changed."""
        line = self.line(index)
        if line not in self.cut_lines():
            with pytest.raises(ValueError, match=r"There is no|only one that was cut off or cancelled can go on"):
                (line.session if line.chat is None else line.chat).resume(5)
        arguments = {} if wrong in ("prompt", "long") else {wrong: "wrong"}
        begin = line.session.stream if line.chat is None else line.chat.stream
        prompts = (
            {"prompt": [99], "long": [1] * CONTEXT_LENGTH}
            if line.chat is None
            else {"prompt": "!", "long": "a" * CONTEXT_LENGTH}
        )
        with pytest.raises(ValueError, match=r"."):
            begin(prompts.get(wrong, [1] if line.chat is None else "a"), **arguments)

    # --- what must hold ---

    @staticmethod
    def draws(text: Text) -> bool:
        return not text.params.greedy and text.params.acceptance == "rejection"

    def take(self, line: Line, count: int) -> None:
        """Reads pieces of the open stream, and compares what has been read so far with the slow way."""
        text = line.text
        if line.stream is None or text is None or text.result is not None:
            return
        for piece in itertools.islice(line.stream, count):
            text.tokens += piece.token_ids
            text.pieces += piece.text
            text.whole_rounds = piece.round is not None
            text.result = piece.result
            if line.chat is not None:
                line.messages[-1] = {"role": "assistant", "content": line.session._current.text}
            self.check_caches()
        self.check_text(text)

    def check_text(self, text: Text) -> None:
        result = text.result
        plain = plain_text(self.generator, text.prompt, text.params, text.drafter, text.num_draft_tokens)
        if text.exact:
            assert text.tokens == plain.token_ids[: len(text.tokens)]
        if result is None:
            return
        assert list(result.token_ids) == text.tokens
        # More than the text was handed out only where a stop string began in what had been its end.
        surplus = text.pieces[len(result.text) :]
        assert text.pieces[: len(result.text)] == result.text
        assert any(stop.startswith(surplus) for stop in ("", *text.params.stop)) and len(surplus) < 2  # noqa: PT018
        if result.finish_reason == "cancelled":
            text.exact = text.exact and not self.draws(text)
        elif text.exact:
            assert (text.tokens, result.text, result.finish_reason) == (plain.token_ids, plain.text, plain.finish_reason)
            assert [entry.logprob for entry in result.logprobs] == pytest.approx(plain.logprobs, abs=1e-6)
            if self.draws(text):
                stats = result.stats
                assert (stats.proposed_by_position, stats.accepted_by_position) == (plain.proposed, plain.accepted)
                assert (stats.rounds, stats.correction_tokens, stats.bonus_tokens) == (
                    plain.rounds,
                    plain.corrections,
                    plain.bonuses,
                )

    @invariant()
    def check_caches(self) -> None:
        for line in self.lines if hasattr(self, "lines") else []:
            for decoder in (line.session._target, line.session._draft):
                if decoder is not None:
                    assert decoder._context._cache[: decoder.past_length].tolist() == decoder.tokens
            if line.text is not None:
                sequence = [*line.text.prompt, *line.text.tokens]
                assert line.session._current.sequence == sequence
                self.check_beginnings(line, sequence)

    @staticmethod
    def check_beginnings(line: Line, sequence: Sequence[int]) -> None:
        used = [line.session._target] + [line.session._draft] * (line.text.drafter == "model")
        for decoder in used:
            assert decoder.past_length < len(sequence)
            assert decoder.tokens == sequence[: decoder.past_length]
        if line.text.whole_rounds:
            assert line.session._target.tokens == sequence[:-1]

    @invariant()
    def check_messages(self) -> None:
        for line in self.lines if hasattr(self, "lines") else []:
            if line.chat is not None:
                assert list(line.chat.messages) == line.messages


TestSessions = Sessions.TestCase
TestSessions.settings = settings(
    max_examples=120,
    stateful_step_count=25,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
