"""Conversations: an answer is what a fresh generator would give to the same messages, and costs only what is new."""

import itertools
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from runtime.chat import Chat, Message
from runtime.errors import LogitsError, PromptError
from runtime.generation import GenerationResult
from runtime.generator import Generator
from runtime.sampling_params import SamplingParams
from tests.fakes import CHAT_TEMPLATE, FakeModel, fake_generator

RULES = {
    "greedy": {},
    "rejection": {"temperature": 0.9, "seed": 6},
    "coupled": {"temperature": 0.9, "seed": 6, "acceptance": "coupled"},
}
SYSTEM = [{"role": "system", "content": "be0"}]
EOS = [5]
every_rule = pytest.mark.parametrize("rule", RULES)
every_drafter = pytest.mark.parametrize("drafter", ["model", "lookup", "off"])


def fakes(**settings: object) -> Generator:
    target = FakeModel(62, seed=1, period=8, sharpness=1.5, **settings)
    draft = FakeModel(62, seed=1, period=8, sharpness=1.5, noise=2.0, **settings)
    return fake_generator(target, draft, eos=EOS, chat_template=CHAT_TEMPLATE)


def rules(rule: str = "greedy", **changes: object) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 12, "logprobs": 0, **RULES[rule], **changes})


def facts(result: GenerationResult) -> tuple[object, ...]:
    return result.token_ids, result.text, result.finish_reason, result.logprobs


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def prompt_length(generator: Generator, messages: Sequence[Message]) -> int:
    return len(generator.tokenizer.encode_chat(messages))


def shared(generator: Generator, cached: Sequence[int], messages: Sequence[Message]) -> int:
    """How much of the messages' prompt is the beginning of what is cached; its last token is fed all the same."""
    prompt = generator.tokenizer.encode_chat(messages)
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(cached, prompt[:-1], strict=False))
    return sum(1 for _ in pairs)


# --- turns ------------------------------------------------------------------------------------------------------------


@every_rule
@every_drafter
def test_answers_are_those_of_a_fresh_generator(rule: str, drafter: str) -> None:
    generator = fakes()
    chat, messages = generator.chat(SYSTEM), list(SYSTEM)
    for number, text in enumerate(["hi", "and", "now", "x", "y7"]):
        params = rules(rule, seed=number)
        result = chat.send(text, params, drafter=drafter)
        messages.append(user(text))
        assert facts(result) == facts(generator.generate(messages, params, drafter=drafter))
        messages.append(assistant(result.text))
        assert list(chat.messages) == messages


@every_drafter
def test_only_what_is_new_is_fed(drafter: str) -> None:
    generator = fakes()
    chat = generator.chat(SYSTEM)
    for text in ("hi", "and", "now"):
        before = list(chat._session._target.tokens)
        generator.target.calls.clear()
        result = chat.send(text, rules(), drafter=drafter)
        length = prompt_length(generator, chat.messages[:-1])
        past, rows, num_rows = generator.target.calls[0]
        # All that was cached is kept: the last answer's last token never was.
        assert past == result.stats.cached_tokens == len(before)
        assert past + rows == length + num_rows - 1
        assert all(past >= length and rows <= 5 for past, rows, _ in generator.target.calls[1:])


def test_the_end_of_text_token_is_no_part_of_the_conversation() -> None:
    generator = fakes()
    first = generator.generate([user("hi")], rules(ignore_eos=True)).token_ids
    generator._pair.__dict__["eos_token_ids"] = frozenset(first[3:4])
    chat = generator.chat()
    result = chat.send("hi", rules())
    assert (result.finish_reason, len(result.token_ids)) == ("eos", 4)
    assert chat.messages[-1] == assistant(result.text)
    assert len(result.text) == 3
    again = chat.send("and", rules())
    assert again.stats.cached_tokens == prompt_length(generator, [user("hi")]) + 3
    assert facts(again) == facts(generator.generate([user("hi"), assistant(result.text), user("and")], rules()))


def test_a_stop_string_is_no_part_of_the_conversation_unless_asked_for() -> None:
    generator = fakes()
    text = generator.generate([user("hi")], rules()).text
    for include_stop in (False, True):
        chat = generator.chat()
        result = chat.send("hi", rules(stop=text[4:6], include_stop=include_stop))
        cached = list(chat._session._target.tokens)
        assert result.finish_reason == "stop"
        assert chat.messages[-1]["content"] == result.text == text[: 6 if include_stop else 4]
        again = chat.send("and", rules())
        assert again.stats.cached_tokens == shared(generator, cached, chat.messages[:-1])
        assert again.stats.cached_tokens >= prompt_length(generator, [user("hi")]) + (5 if include_stop else 4)
        assert facts(again) == facts(generator.generate(chat.messages[:-1], rules()))


def test_messages_are_copies() -> None:
    given = [dict(SYSTEM[0])]
    chat = fakes().chat(given)
    given[0]["content"] = "z"
    chat.messages[0]["content"] = "z"
    assert list(chat.messages) == SYSTEM


def test_further_keys_of_a_message_reach_the_template() -> None:
    template = "{% for message in messages %}{{ message.name or 'Q' }}{{ message.content }}{% endfor %}Z"
    generator = fake_generator(FakeModel(62, seed=1), chat_template=template)
    given = [{"role": "user", "content": "a", "name": "B"}]
    chat = generator.chat(given)
    assert facts(chat.send(None, rules())) == facts(generator.generate(given, rules()))
    chat.edit(0, "c")
    assert chat.messages == ({"role": "user", "content": "c", "name": "B"},)


# --- streams ----------------------------------------------------------------------------------------------------------


@every_rule
@every_drafter
def test_the_answer_stands_in_the_messages_as_it_grows(rule: str, drafter: str) -> None:
    chat = fakes().chat(SYSTEM)
    text = ""
    stream = chat.stream("hi", rules(rule), drafter=drafter)
    assert list(chat.messages) == [*SYSTEM, user("hi"), assistant("")]
    for piece in stream:
        text += piece.text
        assert list(chat.messages) == [*SYSTEM, user("hi"), assistant(text)]
    assert len(text) > 5


@pytest.mark.parametrize("taken", range(4))
def test_a_closed_stream_leaves_the_answer_as_far_as_it_got(taken: int) -> None:
    generator = fakes()
    chat = generator.chat(SYSTEM)
    stream = chat.stream("hi", rules())
    text = "".join(piece.text for piece in itertools.islice(stream, taken))
    stream.close()
    assert list(chat.messages) == [*SYSTEM, user("hi"), assistant(text)]
    result = chat.send("and", rules())
    messages = [*SYSTEM, user("hi"), assistant(text), user("and")]
    assert facts(result) == facts(generator.generate(messages, rules()))
    assert list(chat.messages) == [*messages, assistant(result.text)]


def test_a_cancelled_answer_stays_as_far_as_it_got() -> None:
    chat, cancel = fakes().chat(), threading.Event()
    for piece in chat.stream("hi", rules(), cancel=cancel):
        cancel.set()
        last = piece
    assert last.result.finish_reason == "cancelled"
    assert chat.messages == (user("hi"), assistant(last.result.text))
    assert last.result.text


@pytest.mark.parametrize("taken", range(3))
def test_a_stale_stream_says_so_and_leaves_the_messages(taken: int) -> None:
    generator = fakes()
    chat = generator.chat()
    stale = chat.stream("hi", rules())
    list(itertools.islice(stale, taken))
    chat.send("and", rules())
    before = chat.messages
    with pytest.raises(RuntimeError, match="its session has begun another text"):
        next(stale)
    assert chat.messages == before
    assert facts(chat.send("x", rules())) == facts(generator.generate([*before, user("x")], rules()))


@pytest.mark.parametrize("taken", range(3))
@pytest.mark.parametrize(
    "change", [lambda chat: chat.edit(0, "bye"), lambda chat: chat.rewind_to(1), lambda chat: chat.rewind_to(0)]
)
def test_an_open_stream_does_not_write_into_messages_that_were_changed(taken: int, change: Callable[[Chat], None]) -> None:
    chat = fakes().chat()
    stream = chat.stream("hi", rules())
    list(itertools.islice(stream, taken))
    change(chat)
    before = chat.messages
    try:
        next(stream)
    except RuntimeError as error:
        assert "cannot go on" in str(error)  # noqa: PT017 - whether it raises is not what is tested here
    assert chat.messages == before


# --- going back -------------------------------------------------------------------------------------------------------


@every_rule
@pytest.mark.parametrize("index", range(5))
def test_an_edited_message_gets_the_answer_of_a_fresh_generator(rule: str, index: int) -> None:
    generator = fakes()
    chat = generator.chat(SYSTEM)
    chat.send("hi", rules(rule))
    chat.send("and", rules(rule))
    cached, messages = list(chat._session._target.tokens), list(chat.messages)
    new = messages[index]["content"][:1] + "7"
    chat.edit(index, new)
    messages = [*messages[:index], {"role": messages[index]["role"], "content": new}]
    assert list(chat.messages) == messages
    result = chat.send(None if messages[-1]["role"] == "user" else "x", rules(rule))
    messages += [] if messages[-1]["role"] == "user" else [user("x")]
    assert result.stats.cached_tokens == shared(generator, cached, messages) > 1
    assert facts(result) == facts(generator.generate(messages, rules(rule)))
    assert list(chat.messages) == [*messages, assistant(result.text)]


@pytest.mark.parametrize("num_messages", range(7))
def test_a_rewound_chat_goes_on_from_there(num_messages: int) -> None:
    generator = fakes()
    chat = generator.chat(SYSTEM)
    chat.send("hi", rules())
    chat.send("and", rules())
    cached, messages = list(chat._session._target.tokens), list(chat.messages)[:num_messages]
    chat.rewind_to(num_messages)
    assert list(chat.messages) == messages
    result = chat.send("now", rules())
    assert result.stats.cached_tokens == shared(generator, cached, [*messages, user("now")])
    assert facts(result) == facts(generator.generate([*messages, user("now")], rules()))


def test_the_same_question_again_costs_one_row() -> None:
    generator = fakes()
    chat = generator.chat(SYSTEM)
    first = chat.send("hi", rules())
    chat.rewind_to(2)
    generator.target.calls.clear()
    again = chat.send(None, rules(), drafter="off")
    length = prompt_length(generator, [*SYSTEM, user("hi")])
    assert generator.target.calls[0] == (length - 1, 1, 1)
    assert facts(again) == facts(first)


@every_rule
@pytest.mark.parametrize("taken", range(4))
def test_forks_go_separate_ways_in_the_middle_of_an_answer_too(rule: str, taken: int) -> None:
    generator = fakes()
    chat = generator.chat(SYSTEM)
    stream = chat.stream("hi", rules(rule))
    list(itertools.islice(stream, taken))
    fork, before = chat.fork(), list(chat.messages)
    assert list(fork.messages) == before
    theirs = fork.stream("b", rules(rule))
    *_, (mine, other) = itertools.zip_longest(stream, theirs)
    assert list(chat.messages)[:2] == before[:2]
    assert chat.messages[2]["content"] == generator.generate(before[:2], rules(rule)).text
    assert fork.messages[-1]["content"] == generator.generate([*before, user("b")], rules(rule)).text
    assert len(chat.messages) == 3
    assert list(fork.messages)[:-1] == [*before, user("b")]
    assert mine or other
    with pytest.raises(ValueError, match="There is no answer to go on with"):
        chat.fork().resume(5)
    for one in (chat, fork):
        messages = [*one.messages, user("c")]
        assert facts(one.send("c", rules(rule))) == facts(generator.generate(messages, rules(rule)))


def test_a_fork_has_the_cache_of_its_origin() -> None:
    generator = fakes()
    chat = generator.chat(SYSTEM)
    chat.send("hi", rules())
    cached = len(chat._session._target.tokens)
    fork = chat.fork()
    chat.rewind_to(0)
    chat.send("other", rules())
    assert fork.send("and", rules()).stats.cached_tokens == cached


# --- going on ---------------------------------------------------------------------------------------------------------


@every_rule
@pytest.mark.parametrize("cut", range(1, 12))
def test_an_answer_that_was_cut_off_goes_on_as_if_it_had_not(rule: str, cut: int) -> None:
    generator = fakes()
    whole = generator.generate([*SYSTEM, user("hi")], rules(rule))
    chat = generator.chat(SYSTEM)
    text = chat.send("hi", rules(rule, max_new_tokens=cut)).text
    for piece in chat.resume(12 - cut):
        text += piece.text
        assert list(chat.messages) == [*SYSTEM, user("hi"), assistant(text)]
    assert facts(piece.result) == facts(whole)
    assert text == whole.text


def test_an_answer_that_was_left_goes_on() -> None:
    generator = fakes()
    chat = generator.chat()
    stream = chat.stream("hi", rules())
    next(stream)
    stream.close()
    *_, last = chat.resume(30)
    assert chat.messages == (user("hi"), assistant(last.result.text))
    assert generator.generate([user("hi")], rules(max_new_tokens=50)).text.startswith(last.result.text)
    assert chat.send("and", rules()).text == generator.generate(chat.messages[:-1], rules()).text


def test_what_cannot_go_on_says_so() -> None:
    chat = fakes().chat([user("hi"), assistant("so")])
    with pytest.raises(ValueError, match="There is no answer to go on with"):
        chat.resume(5)
    chat.send("and", rules(max_new_tokens=3))
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        chat.resume(0)
    before = chat.messages
    assert chat.resume(1) is not None
    assert chat.messages == before
    chat.rewind_to(9)  # changes nothing
    assert chat.resume(1) is not None
    chat.rewind_to(3)
    with pytest.raises(ValueError, match="There is no answer to go on with"):
        chat.resume(5)
    chat.send(None, rules(stop_token_ids=range(62)))
    with pytest.raises(ValueError, match=r"ended with '(stop|eos)'"):
        chat.resume(5)
    chat.edit(3, "so")
    with pytest.raises(ValueError, match="There is no answer to go on with"):
        chat.resume(5)


# --- what is refused, and what fails ----------------------------------------------------------------------------------

REFUSED = [
    ("!", {}, PromptError, "roles: system, user, assistant, user.*no exclamations"),
    ("a" * 150, {}, PromptError, r"has 1\d\d tokens and the context holds 128"),
    (5, {}, PromptError, "Message 3 has a int as 'content'"),
    (b"hi", {}, PromptError, "Message 3 has a bytes as 'content'"),
    ("x", {"params": 5}, ValueError, "params is 5"),
    ("x", {"drafter": "none"}, ValueError, "The drafter 'none' is unknown"),
    ("x", {"num_draft_tokens": -1}, ValueError, "num_draft_tokens is -1"),
    ("x", {"cancel": "yes"}, ValueError, "cancel is 'yes'"),
    ("x", {"params": SamplingParams(logit_bias={62: 1.0})}, ValueError, "name token 62"),
]


@pytest.mark.parametrize(("text", "arguments", "error", "sentence"), REFUSED, ids=lambda value: str(value)[:20])
def test_what_is_refused_leaves_the_chat_as_it_was(
    text: object, arguments: dict[str, object], error: type[Exception], sentence: str
) -> None:
    generator = fakes()
    chat = generator.chat(SYSTEM)
    chat.send("hi", rules(max_new_tokens=6))
    before = chat.messages
    for call in (chat.send, chat.stream):
        with pytest.raises(error, match=sentence) as caught:
            call(text, **arguments)
        assert "\n" not in str(caught.value)
        assert chat.messages == before
    *_, last = chat.resume(6)  # the answer before is still the one in hand
    assert facts(last.result) == facts(generator.generate([*SYSTEM, user("hi")], rules()))
    assert facts(chat.send("and", rules())) == facts(generator.generate(chat.messages[:-1], rules()))


@every_rule
@pytest.mark.parametrize("broken", ["target", "draft"])
@pytest.mark.parametrize("num_passes", range(1, 4))
def test_an_answer_that_fails_leaves_the_messages_as_they_were(rule: str, broken: str, num_passes: int) -> None:
    generator = fakes()
    chat, model = generator.chat(SYSTEM), getattr(generator, broken)
    chat.send("hi", rules(rule, max_new_tokens=5))
    before = chat.messages
    model.calls.clear()
    whole = generator.generate([*before, user("and")], rules(rule))
    past, rows, _ = model.calls[num_passes - 1]
    model.broken_at, model.broken_value = past + rows - 1, np.nan
    with pytest.raises(LogitsError):
        chat.send("and", rules(rule))
    assert chat.messages == before
    with pytest.raises(ValueError, match="There is no answer to go on with"):
        chat.resume(5)
    model.broken_at = None
    assert facts(chat.send("and", rules(rule))) == facts(whole)


def test_an_answer_that_fails_while_it_goes_on_stays_as_far_as_it_got() -> None:
    generator = fakes()
    whole = generator.generate([user("hi")], rules())
    chat = generator.chat()
    chat.send("hi", rules(max_new_tokens=5))
    generator.target.broken_at = prompt_length(generator, [user("hi")]) + 8
    with pytest.raises(LogitsError):
        list(chat.resume(7))
    text = chat.messages[-1]["content"]
    assert len(text) >= 5
    assert whole.text.startswith(text)
    generator.target.broken_at = None
    *_, last = chat.resume(12 - len(text))
    assert facts(last.result) == facts(whole)


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ("hi", "The messages are a str"),
        (None, "The messages are a NoneType"),
        ([5], "Message 0 is a int"),
        ([{"role": "user"}], "Message 0 has no 'content'"),
        ([{"role": 1, "content": "a"}], "Message 0 has a int as 'role'"),
    ],
)
def test_messages_of_another_form_are_refused_at_the_beginning(messages: object, sentence: str) -> None:
    with pytest.raises(PromptError, match=sentence):
        fakes().chat(messages)


def test_without_messages_there_is_nothing_to_answer() -> None:
    chat = fakes().chat()
    with pytest.raises(PromptError, match="The prompt is empty"):
        chat.send()
    assert chat.messages == ()
    assert chat.send("hi", rules()).text


def test_without_a_template_there_is_no_chat() -> None:
    generator = fake_generator(FakeModel(62))
    with pytest.raises(PromptError, match="no chat template, so it holds no conversation: use `session` with strings"):
        generator.chat()


@pytest.mark.parametrize("index", [-1, 2, 9, "0", 1.0, None, True], ids=repr)
def test_a_message_that_is_not_there_cannot_be_edited(index: object) -> None:
    chat = fakes().chat([user("hi"), assistant("so")])
    with pytest.raises(PromptError, match=r"There is no message .*: the chat has 2, counted from 0"):
        chat.edit(index, "x")
    assert chat.messages == (user("hi"), assistant("so"))


@pytest.mark.parametrize("content", [5, None, b"x", ["x"]], ids=repr)
def test_a_message_is_edited_to_a_string(content: object) -> None:
    chat = fakes().chat([user("hi"), assistant("so")])
    with pytest.raises(PromptError, match=r"a .* as 'content'|string"):
        chat.edit(0, content)
    assert chat.messages == (user("hi"), assistant("so"))


@pytest.mark.parametrize("number", [-1, "1", 1.0, None, True], ids=repr)
def test_a_number_of_messages_is_a_whole_one(number: object) -> None:
    chat = fakes().chat([user("hi"), assistant("so")])
    with pytest.raises(ValueError, match=r"num_messages is .*; a .*number of at least 0 is expected"):
        chat.rewind_to(number)
    assert chat.messages == (user("hi"), assistant("so"))
