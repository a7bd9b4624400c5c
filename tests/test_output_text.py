"""Streamed text against the plain way: decode everything, search from the start, after every token."""

import re
from collections.abc import Callable, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from runtime.output_text import OutputText

Decode = Callable[[Sequence[int]], str]
REPLACEMENT = "\ufffd"
CORPUS = ["the end of the world\n\nUser: naïve café", "世界你好,世界你好", "😀😃😄😁👩‍👩‍👧 €€€"] * 20
LETTERS = ["▁", "▁▁", "▁the", "▁end", "a", "b", "ab", "END", "é", "▁世界", "好", "\n", ".", "▁\ufffd"]
STRAY = "\ue000"  # stands in for a byte that belongs to no character, so that it leaves the bytes around it alone


@cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    # Without the regular expression merges cross characters: tokens begin and end in the middle of one.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=450, initial_alphabet=alphabet, special_tokens=["<|im_end|>", "<pad>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


@cache
def sentencepiece_like(kind: str) -> Tokenizer:
    entries = ["<pad>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS, STRAY]
    tokenizer = Tokenizer(models.WordLevel({entry: index for index, entry in enumerate(entries)}))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace()]
        if kind == "metaspace"
        else [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def byte_ids(data: bytes) -> list[int]:
    """Ids of byte tokens in the SentencePiece-like vocabularies."""
    return [2 + byte for byte in data]


def byte_fallback_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """What byte fallback should say: characters where bytes form one, U+FFFD for each byte that belongs to none."""
    stray = tokenizer.token_to_id(STRAY)
    kept = [token for token in ids if token != tokenizer.token_to_id("<s>")]
    data = [bytes([token - 2]) if 2 <= token < 258 else b" " for token in kept]
    is_byte = [2 <= token < 258 for token in kept]
    position, replaced = 0, []
    while position < len(kept):
        length = 1
        if is_byte[position]:
            length = next((n for n in (1, 2, 3, 4) if is_character(data[position : position + n], n)), 0)
        replaced += kept[position : position + length] or [stray]
        position += max(length, 1)
    return tokenizer.decode(replaced).replace(STRAY, REPLACEMENT)


def is_character(data: list[bytes], length: int) -> bool:
    try:
        return len(data) == length and len(b"".join(data).decode()) == 1
    except UnicodeDecodeError:
        return False


def pieces(*tokens: str | bytes) -> tuple[Decode, range]:
    """A byte-level decoder whose token i is the i-th of `tokens`, and the ids of one pass through them."""
    raw = [token.encode() if isinstance(token, str) else token for token in tokens]
    return lambda ids: b"".join(raw[i] for i in ids).decode(errors="replace"), range(len(raw))


def stream(output: OutputText, ids: Sequence[int]) -> tuple[str, int | None]:
    """Appends ids until a stop string is complete; returns what was handed out and the index of the last id if it stopped."""
    handed_out = ""
    for index, token in enumerate(ids):
        stopped = output.append(token)
        handed_out += output.take()
        if stopped:
            return handed_out + output.flush(), index
    return handed_out + output.flush(), None


def plain_search(
    decode: Decode, ids: Sequence[int], stop: Sequence[str], *, include_stop: bool = False
) -> tuple[str, int | None]:
    """The slow reference of `stream`: after each token all is decoded again and read from the start, character by character."""
    for index in range(len(ids)):
        text = decode(ids[: index + 1])
        for end in range(len(text) + 1):
            if complete := [string for string in stop if text[:end].endswith(string)]:
                return text[: end if include_stop else end - max(map(len, complete))], index
    return decode(ids), None


def longest_beginning(text: str, stop: Sequence[str]) -> int:
    return max((n for string in stop for n in range(len(string)) if text.endswith(string[:n])), default=0)


def without_byte_spaces_in_the_first_run(groups: list[list[int]]) -> list[int]:
    """Joins `groups`, without a corner left open: before any character, stray bytes and then a space as a byte."""
    ids = [token for group in groups for token in group]
    run = next((index for index, token in enumerate(ids) if 258 <= token < 258 + len(LETTERS) - 1), len(ids))
    return ids[:1] + [token for token in ids[1:run] if token != 2 + ord(" ")] + ids[max(run, 1) :]


byte_level_ids = st.lists(st.integers(0, byte_level().get_vocab_size() - 1), max_size=40)
fallback_ids = st.lists(
    st.one_of(
        st.sampled_from([1, *range(258, 258 + len(LETTERS))]).map(lambda token: [token]),
        st.sampled_from(["é", "€", "😀", "\n", " ", "好好"]).map(lambda text: byte_ids(text.encode())),
        st.sampled_from([b"\xff", b"\xf0\x9f", b"\xe2", b"\xe2\x82", b"\x80", b"\xac"]).map(byte_ids),
        st.integers(2, 257).map(lambda token: [token]),
    ),
    max_size=15,
).map(without_byte_spaces_in_the_first_run)
whole_ids = st.lists(
    st.one_of(
        st.sampled_from([1, *range(258, 258 + len(LETTERS))]).map(lambda token: [token]),
        st.sampled_from(["é", "€", "😀", "\n", " ", "好好"]).map(lambda text: byte_ids(text.encode())),
    ),
    max_size=15,
).map(lambda groups: [token for group in groups for token in group])
fallback_kinds = pytest.mark.parametrize("kind", ["metaspace", "strip"])


def test_the_trained_tokens_cross_characters() -> None:
    decode = byte_level().decode
    texts = [decode([token]) for token in range(byte_level().get_vocab_size())]
    assert any(re.fullmatch("[^\ufffd]+\ufffd", text) for text in texts)
    assert any(re.fullmatch("\ufffd+[^\ufffd]+", text) for text in texts)


def check_every_step(decode: Decode, reference: Decode, ids: Sequence[int], context: Sequence[int] = ()) -> None:
    """Streams `ids` without stop strings, and compares after each id with `reference` on all of them."""
    output = OutputText(decode, context=context)
    before = reference(context)
    final = reference([*context, *ids])
    assert final.startswith(before)
    handed_out = ""
    for count, token in enumerate(ids, start=1):
        assert output.append(token) is False
        handed_out += output.take()
        so_far = reference([*context, *ids[:count]])[len(before) :]
        assert output.text == so_far
        assert final[len(before) :].startswith(handed_out)
        assert so_far[len(handed_out) :] in ("", REPLACEMENT, REPLACEMENT * 2, REPLACEMENT * 3)
    assert handed_out + output.flush() == final[len(before) :] == output.text


@settings(max_examples=400, deadline=None)
@given(ids=byte_level_ids)
def test_byte_level_text_equals_decoding_at_once(ids: list[int]) -> None:
    check_every_step(byte_level().decode, byte_level().decode, ids)


@settings(max_examples=200, deadline=None)
@given(context=byte_level_ids, ids=byte_level_ids)
def test_byte_level_text_behind_a_prompt(context: list[int], ids: list[int]) -> None:
    decode = byte_level().decode
    while decode(context).endswith(REPLACEMENT):
        context.pop()
    check_every_step(decode, decode, ids, context)


@fallback_kinds
@settings(max_examples=400, deadline=None)
@given(ids=fallback_ids)
def test_byte_fallback_text_equals_characters_and_stray_bytes(kind: str, ids: list[int]) -> None:
    tokenizer = sentencepiece_like(kind)
    check_every_step(tokenizer.decode, lambda ids: byte_fallback_text(tokenizer, ids), ids)


@fallback_kinds
@settings(max_examples=200, deadline=None)
@given(context=whole_ids, ids=whole_ids)
def test_byte_fallback_text_equals_decoding_at_once_where_all_is_whole(kind: str, context: list[int], ids: list[int]) -> None:
    decode = sentencepiece_like(kind).decode
    output = OutputText(decode, context=context)
    assert stream(output, ids) == (decode([*context, *ids])[len(decode(context)) :], None)


@fallback_kinds
def test_the_first_token_keeps_its_space_behind_a_prompt_only(kind: str) -> None:
    tokenizer = sentencepiece_like(kind)
    the, end, special = (tokenizer.token_to_id(token) for token in ("▁the", "▁end", "<s>"))
    assert stream(OutputText(tokenizer.decode), [the, end]) == ("the end", None)
    assert stream(OutputText(tokenizer.decode, context=[the]), [the, end]) == (" the end", None)
    assert stream(OutputText(tokenizer.decode, context=[the] * 500), [special, special, the]) == (" the", None)


@fallback_kinds
@pytest.mark.parametrize("length", [1, 9, 10, 11, 12, 40])
def test_a_prompt_of_byte_tokens_may_be_longer_than_what_is_looked_at(kind: str, length: int) -> None:
    context, ids = byte_ids("世".encode() * length), byte_ids("界".encode())
    assert stream(OutputText(sentencepiece_like(kind).decode, context=context), ids) == ("界", None)


@st.composite
def ids_and_stop_strings(draw: st.DrawFn, ids: st.SearchStrategy[list[int]], reference: Decode) -> tuple[list[int], list[str]]:
    """Random ids with stop strings of which most occur in their text, wherever tokens begin and end."""
    drawn = draw(ids)
    text = reference(drawn)
    stop = draw(st.lists(st.text("abE \né世", min_size=1, max_size=3), max_size=2))
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(text)))
        string = text[start : start + draw(st.integers(1, 6))]
        stop.append(string + draw(st.sampled_from(["", "", "a", "世"])))
    return drawn, [string for string in stop if string and REPLACEMENT not in string]


def check_stop(decode: Decode, reference: Decode, ids: Sequence[int], stop: Sequence[str], *, include_stop: bool) -> None:
    text, stopped_at = plain_search(reference, ids, stop, include_stop=include_stop)
    output = OutputText(decode, stop, include_stop=include_stop)
    handed_out = ""
    for index, token in enumerate(ids if stopped_at is None else ids[: stopped_at + 1]):
        assert output.append(token) is (index == stopped_at)
        handed_out += output.take()
        if index != stopped_at:
            so_far = reference(ids[: index + 1])
            certain = so_far[: len(so_far) - min(3, len(so_far) - len(so_far.rstrip(REPLACEMENT)))]
            assert len(handed_out) == len(certain) - longest_beginning(certain, stop)
            assert output.text == so_far
    assert handed_out + output.flush() == text == output.text


@settings(max_examples=500, deadline=None)
@given(case=ids_and_stop_strings(byte_level_ids, byte_level().decode), include_stop=st.booleans())
def test_byte_level_stop_strings_equal_a_plain_search(case: tuple[list[int], list[str]], include_stop: bool) -> None:
    check_stop(byte_level().decode, byte_level().decode, *case, include_stop=include_stop)


@fallback_kinds
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_byte_fallback_stop_strings_equal_a_plain_search(kind: str, data: st.DataObject) -> None:
    tokenizer = sentencepiece_like(kind)

    def reference(ids: Sequence[int]) -> str:
        return byte_fallback_text(tokenizer, ids)

    case = data.draw(ids_and_stop_strings(fallback_ids, reference))
    check_stop(tokenizer.decode, reference, *case, include_stop=data.draw(st.booleans()))


@pytest.mark.parametrize(
    ("tokens", "stop", "text", "stopped_at"),
    [
        (["one", " two", "\n", "\nthree"], ["\n\n"], "one two", 3),
        (["aXY", "ZbX", "YZ"], ["XYZ"], "a", 1),
        (["a", "XY", "b", "X"], ["XYZ"], "aXYbX", None),
        (["aaab"], ["aab"], "a", 0),
        (["a", "a", "a", "b"], ["aab"], "a", 3),
        (["x<", "/s", ">y"], ["</s>", "</"], "x", 1),
        (["x</s>y"], ["</s>", "</"], "x", 0),
        (["abc"], ["abc", "b"], "a", 0),
        (["a", "b", "c"], ["abc", "b"], "a", 1),
        (["xyz!"], ["z", "yz", "!"], "x", 0),
        ([b"a\xe4\xb8", b"\x96\xe7", b"\x95\x8cb"], ["世界"], "a", 2),
        ([b"a\xe4\xb8", b"\x96\xe7", b"\x95\x8cb"], ["世"], "a", 1),
        ([b"a\xe4\xb8", b"\x97\xe7", b"\x95\x8cb"], ["世界"], "a丗界b", None),
        ([b"a\xff", b"b"], ["a", "b"], "", 0),
        ([b"E\xff", b"ND"], ["END"], "E\ufffdND", None),
        (["END"], ["END"], "", 0),
        ([], ["END"], "", None),
    ],
)
def test_stop_string(tokens: list[str | bytes], stop: list[str], text: str, stopped_at: int | None) -> None:
    decode, ids = pieces(*tokens)
    for order in (stop, stop[::-1]):
        output = OutputText(decode, order)
        assert stream(output, ids) == (text, stopped_at)
        assert output.text == text
        including = OutputText(decode, order, include_stop=True)
        with_stop = plain_search(decode, ids, stop, include_stop=True)
        assert stream(including, ids) == with_stop
        assert including.text == with_stop[0]
        assert (with_stop[0] in [text + string for string in stop]) == (stopped_at is not None)


def test_text_is_held_while_it_could_be_a_stop_string_and_then_released() -> None:
    decode, ids = pieces("one E", "N", "D", "E", "N", "N", b"E\xe2", b"\x82\xac")
    output = OutputText(decode, ["ENDEND"])
    taken = []
    for token in ids:
        output.append(token)
        taken.append(output.take())
    assert taken == ["one ", "", "", "", "", "ENDENN", "", "E€"]
    assert output.flush() == ""


def test_what_is_held_comes_at_the_end() -> None:
    decode, ids = pieces("so E", b"N\xe2\x82")
    output = OutputText(decode, ["END"])
    assert stream(output, ids) == ("so EN\ufffd", None)
    assert output.flush() == ""
    assert output.text == "so EN\ufffd"


def test_wrong_bytes_do_not_block_the_stream() -> None:
    decode, ids = pieces(b"\xff", b"\xff", b"\xff", b"\xff", b"\xf0\x9f", "a")
    output = OutputText(decode)
    taken = []
    for token in ids:
        output.append(token)
        taken.append(output.take())
    assert taken == ["", "", "", REPLACEMENT, REPLACEMENT, REPLACEMENT * 3 + "a"]


@pytest.mark.parametrize("num_context_ids", [0, 1000])
@pytest.mark.parametrize(
    "tokens",
    [
        ["a"],
        [b"\xff"],
        [b"\xac", b"\xe2\x82"],
        [b"\x98\x80\xf0\x9f"],
        [""],
        [b"\xe2\x82", b""],
        ["a", ""],
        [b"\xff\xf0\x9f\x98"],
    ],
)
def test_the_work_for_a_token_does_not_grow(tokens: list[str | bytes], num_context_ids: int) -> None:
    """Also where no token ends with a whole character, and where tokens have no text."""
    decode_pieces, ids = pieces("abc", *tokens)
    decoded = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(token_ids)
        return decode_pieces(token_ids)

    output = OutputText(decode, context=[0] * num_context_ids)
    repeated = list(ids[1:]) * 500
    num_handed_out = 0
    for count, token in enumerate(repeated, start=1):
        decoded = 0
        output.append(token)
        assert decoded < 500
        num_handed_out += len(output.take())
        assert len(decode_pieces(repeated[:count])) - num_handed_out <= 3
    assert output.text == decode_pieces(repeated)


def test_nothing_comes_after_the_end() -> None:
    decode, ids = pieces("ab", "c")
    output = OutputText(decode, ["b"])
    assert output.append(ids[0])
    with pytest.raises(RuntimeError, match="Token 1 comes after the end"):
        output.append(ids[1])


# --- texts that go on behind a flush ----------------------------------------------------------------------------------


def stream_with_flushes(output: OutputText, ids: Sequence[int], flushes: set[int]) -> tuple[str, list[tuple[int, str]]]:
    """Streams ids and flushes behind some; returns what was handed out, and the characters that were unfinished at a flush.

    The latter as (place in the text, what was handed out for it).
    """
    handed_out, spoiled = "", []
    for index, token in enumerate(ids):
        stopped = output.append(token)
        handed_out += output.take()
        if index in flushes and not stopped:
            so_far = output.text
            handed_out += output.flush()
            whole = len(so_far.rstrip(REPLACEMENT))
            if whole < len(so_far):
                spoiled.append((whole, so_far[whole:]))
        if stopped:
            break
    return handed_out + output.flush(), spoiled


@settings(max_examples=300, deadline=None)
@given(case=ids_and_stop_strings(byte_level_ids, byte_level().decode), flushes=st.sets(st.integers(0, 39)))
def test_a_flush_changes_nothing_in_the_text(case: tuple[list[int], list[str]], flushes: set[int]) -> None:
    ids, stop = case
    flushed, whole = OutputText(byte_level().decode, stop), OutputText(byte_level().decode, stop)
    stream_with_flushes(flushed, ids, flushes)
    stream(whole, ids)
    assert flushed.text == whole.text


@fallback_kinds
@settings(max_examples=200, deadline=None)
@given(ids=whole_ids, flushes=st.sets(st.integers(0, 39)), stop=st.lists(st.text("abEND ", min_size=1, max_size=5), max_size=2))
def test_text_behind_a_flush_is_handed_out_once(kind: str, ids: list[int], flushes: set[int], stop: list[str]) -> None:
    """Of a character that was unfinished at a flush U+FFFD is in the stream, perhaps itself too; nothing else may be lost."""
    output = OutputText(sentencepiece_like(kind).decode, stop)
    handed_out, spoiled = stream_with_flushes(output, ids, flushes)
    text, pattern = output.text, ""
    for place, character in enumerate(text):
        marks = sum(len(given) for at, given in spoiled if at == place)
        pattern += f"\ufffd{{1,{marks}}}{re.escape(character)}?" if marks else re.escape(character)
    found = re.match(pattern, handed_out)
    assert found is not None, (text, handed_out)
    # Only a stop string that turned out to begin in what a flush had handed out leaves something more.
    assert any(string.startswith(handed_out[found.end() :]) for string in ["", *stop])


def test_held_text_is_handed_out_by_a_flush_and_not_again() -> None:
    decode, ids = pieces("so E", "N", "x", "E", "N", "D")
    output = OutputText(decode, ["END"])
    handed_out = []
    for token in ids:
        output.append(token)
        handed_out.append((output.take(), output.flush()))
    assert handed_out == [("so ", "E"), ("", "N"), ("x", ""), ("", "E"), ("", "N"), ("", "")]
    assert output.text == "so ENx"


@fallback_kinds
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_a_flush_inside_a_character_of_byte_tokens_loses_nothing_behind_it(kind: str, num_bytes: int) -> None:
    tokenizer = sentencepiece_like(kind)
    ids = byte_ids("😀".encode())
    output = OutputText(tokenizer.decode)
    for token in ids[:num_bytes]:
        output.append(token)
    assert output.flush() == REPLACEMENT * num_bytes
    handed_out = ""
    for token in [*ids[num_bytes:], tokenizer.token_to_id("a"), tokenizer.token_to_id("b")]:
        output.append(token)
        handed_out += output.take()
    assert output.text == "😀ab"
    assert handed_out.lstrip("😀") == "ab"
