import datetime as dt
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RawTokenizer

from runtime.contract import FileRecord, TokenizerSpec
from runtime.errors import BundleError, PromptError
from runtime.tokenizer import Tokenizer, check_messages

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are terse.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ALTERNATING = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {{- '[' + message['role'] + ']' + message['content'] }}
{%- endfor %}
"""
USER = [{"role": "user", "content": "Why?"}]


@cache
def byte_level_json() -> str:
    """A byte-level BPE that adds <s> in front, and whose file asks for truncation and padding."""
    tokenizer = RawTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(["the end of the world, assistant user system, naïve"] * 9, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    return tokenizer.to_str()


def word_level_json(vocab: Mapping[str, int], decoder: decoders.Decoder | None = None) -> str:
    tokenizer = RawTokenizer(models.WordLevel(dict(vocab)))
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer.to_str()


def with_template(template: str | None, **special_tokens: str) -> Tokenizer:
    return Tokenizer(byte_level_json(), chat_template=template, **special_tokens)


@pytest.mark.parametrize("text", ["", "{}", "[]", "not json", '{"version": "1.0", "model": {"type": "BPE"}}'])
def test_a_file_that_is_no_tokenizer_is_refused(text: str) -> None:
    with pytest.raises(BundleError, match="The tokenizer cannot be read by tokenizers"):
        Tokenizer(text)


def test_vocab_size_counts_holes_and_added_tokens() -> None:
    assert Tokenizer(word_level_json({"a": 0, "b": 7})).vocab_size == 8
    raw = RawTokenizer.from_str(byte_level_json())
    size = Tokenizer(raw.to_str()).vocab_size
    raw.add_tokens(["<tool>"])
    assert Tokenizer(raw.to_str()).vocab_size == size + 1 == raw.token_to_id("<tool>") + 1


def test_encode_adds_bos_and_finds_special_tokens_and_keeps_all() -> None:
    tokenizer = Tokenizer(byte_level_json())
    ids = tokenizer.encode("<|im_start|>naïve, the end of the world<|im_end|>")
    assert [ids[0], ids[1], ids[-1]] == [0, 1, 2]
    assert tokenizer.decode(ids) == "naïve, the end of the world"
    assert tokenizer.encode("") == [0]


def test_encode_adds_nothing_where_the_file_has_no_post_processor() -> None:
    assert Tokenizer(word_level_json({"a": 5})).encode("a") == [5]


@pytest.mark.parametrize(
    ("text", "message"),
    [("ab\ud83d", "surrogate pair at character 2"), (b"ab", "text is a bytes"), (None, "text is a NoneType")],
)
def test_text_that_cannot_be_encoded_is_refused(text: str, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        Tokenizer(byte_level_json()).encode(text)


def test_decode_leaves_out_special_and_unknown_tokens_and_marks_wrong_bytes() -> None:
    tokenizer = Tokenizer(byte_level_json())
    raw = RawTokenizer.from_str(byte_level_json())
    lead = raw.token_to_id("Ã")  # the byte 0xC3
    assert tokenizer.decode([0, *tokenizer.encode("end")[1:], 2, 10**6, lead]) == "end\ufffd"


def test_tokens_put_together_read_as_decoded_at_once() -> None:
    """Of each token alone the text is remembered; bytes of one character lie in several."""
    raw = RawTokenizer.from_str(byte_level_json())
    raw.add_tokens([AddedToken("<tool>", special=False), AddedToken(" naïve\ufffd", special=False)])
    tokenizer = Tokenizer(raw.to_str())
    size = raw.get_vocab_size()
    random = np.random.default_rng(0)
    for text in ("naïve 世界 café", "the end<tool>of"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    for length in (1, 2, 3, 5, 9):
        for ids in random.integers(0, size + 3, (2000, length)).tolist():
            assert tokenizer.decode(ids) == raw.decode(ids, skip_special_tokens=True), ids


def test_one_token_for_traces() -> None:
    tokenizer = Tokenizer(byte_level_json())
    raw = RawTokenizer.from_str(byte_level_json())
    assert tokenizer.token(raw.token_to_id("Ġthe")) == " the"
    assert tokenizer.token(raw.token_to_id("Ã")) == "Ã"
    assert tokenizer.token(raw.token_to_id("Ċ")) == "\n"
    assert tokenizer.token(2) == "<|im_end|>"
    assert tokenizer.token(99999) == "<id 99999>"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    ],
)
def test_one_token_of_sentencepiece_keeps_its_space(decoder: decoders.Decoder) -> None:
    tokenizer = Tokenizer(word_level_json({"▁the": 0, "s": 1, "▁": 2, "<0xE2>": 3, "<0x0A>": 4}, decoder))
    assert [tokenizer.token(token) for token in range(5)] == [" the", "s", " ", "<0xE2>", "\n"]


def test_chatml_is_rendered_up_to_the_answer() -> None:
    assert with_template(CHATML).render_chat(USER) == (
        "<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_chat_ids_have_special_tokens_once() -> None:
    tokenizer = with_template("{{ bos_token }}" + CHATML, bos_token="<s>")  # noqa: S106 a word of the template
    ids = tokenizer.encode_chat(USER)
    assert [token for token in ids if token < 3] == [0, 1, 2, 1, 2, 1]
    assert ids == tokenizer.encode(tokenizer.render_chat(USER))[1:]
    assert [token for token in with_template(CHATML).encode_chat(USER) if token < 3] == [1, 2, 1, 2, 1]


def test_what_the_template_raises_is_told() -> None:
    tokenizer = with_template(ALTERNATING, bos_token="<s>")  # noqa: S106 a word of the template
    assert tokenizer.render_chat([*USER, {"role": "assistant", "content": "So."}]) == "<s>[user]Why?[assistant]So."
    with pytest.raises(PromptError, match=r"roles: user, user\).*roles must alternate"):
        tokenizer.render_chat(USER * 2)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "<é> & \'"}]'),
        ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "user",\n "content": "<é> & \'"\n}'),
        ("{% set n = namespace(x=0) %}{% for m in messages * 3 %}{% set n.x = n.x + 1 %}{% endfor %}{{ n.x }}", "3"),
        (
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "023",
        ),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("{% generation %}\n  {%- for m in messages %}{{ m.role }}{% endfor %}\n{% endgeneration %}\n!", "user!"),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{% endgeneration %}{{ x }}", "1"),
        ("{{ bos_token }}|{{ bos_token is defined }}|{{ eos_token }}", "|False|</s>"),
        ("{{ tools is none and documents is none and not tools }}", "True"),
        ("{{ add_generation_prompt }}", "True"),
    ],
)
def test_the_dialect_is_that_of_transformers(template: str, text: str) -> None:
    messages = [{"role": "user", "content": "<é> & '"}]
    assert with_template(template, eos_token="</s>").render_chat(messages) == text  # noqa: S106 a word of the template


def test_the_date_is_todays() -> None:
    before = dt.datetime.now().strftime("%d %b %Y")
    rendered = with_template("{{ strftime_now('%d %b %Y') }}").render_chat(USER)
    assert rendered in (before, dt.datetime.now().strftime("%d %b %Y"))


def test_further_keys_reach_the_template() -> None:
    messages = [{"role": "user", "content": "Why?", "name": "Ada"}]
    assert with_template("{{ messages[0].name }}").render_chat(messages) == "Ada"


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages.__class__.__mro__[1] }}", "SecurityError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ nothing.at.all }}", "UndefinedError"),
    ],
)
def test_a_template_that_goes_wrong_is_told(template: str, error: str) -> None:
    with pytest.raises(PromptError, match=rf"\(roles: user\) with {error}"):
        with_template(template).render_chat(USER)


def test_a_template_that_is_not_jinja_is_the_bundles_fault() -> None:
    with pytest.raises(BundleError, match=r"not valid Jinja .*line 2"):
        with_template("\n{% if %}").render_chat(USER)


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ("Why?", "The messages are a str"),
        ({"role": "user", "content": "Why?"}, "The messages are a dict"),
        (None, "The messages are a NoneType"),
        ([], "There are no messages"),
        ([*USER, "Why?"], "Message 1 is a str"),
        ([{"role": "user", "text": "Why?"}], r"Message 0 has no 'content', only \['role', 'text'\]"),
        ([*USER, {"content": "Why?"}], r"Message 1 has no 'role', only \['content'\]"),
        ([{"role": "user", "content": ["Why?"]}], "Message 0 has a list as 'content'"),
        ([{"role": None, "content": "Why?"}], "Message 0 has a NoneType as 'role'"),
    ],
)
def test_messages_of_another_form_are_refused(messages: Sequence[Mapping[str, str]], error: str) -> None:
    with pytest.raises(PromptError, match=error):
        with_template(CHATML).render_chat(messages)


@pytest.mark.parametrize(("messages", "at_least"), [([], 0), ((), 0), (USER, 0), (USER, 1), (tuple(USER * 2), 2)])
def test_messages_may_be_any_sequence_of_enough(messages: Sequence[Mapping[str, str]], at_least: int) -> None:
    check_messages(messages, at_least=at_least)
    with pytest.raises(PromptError, match="There are no messages"):
        check_messages(messages, at_least=len(messages) + 1)


def test_without_a_template_there_is_no_chat() -> None:
    with pytest.raises(PromptError, match="no chat template"):
        with_template(None).encode_chat(USER)


def test_a_bundles_tokenizer_is_loaded(tmp_path: Path) -> None:
    def record(name: str, text: str) -> FileRecord:
        data = text.encode()
        (tmp_path / name).write_bytes(data)
        return FileRecord(name, len(data), hashlib.sha256(data).hexdigest())

    file, template = record("tokenizer.json", byte_level_json()), record("chat.jinja", "{{ bos_token }}é{{ eos_token }}")
    spec = TokenizerSpec(file, template, "<s>", "</s>", (2,), 300)
    assert Tokenizer.from_spec(spec, tmp_path).render_chat(USER) == "<s>é</s>"
    with pytest.raises(PromptError, match="no chat template"):
        Tokenizer.from_spec(TokenizerSpec(file, None, None, None, (2,), 300), tmp_path).render_chat(USER)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat.jinja"])
def test_a_file_that_is_not_utf8_is_named(tmp_path: Path, name: str) -> None:
    contents = {"tokenizer.json": byte_level_json().encode(), "chat.jinja": b"{{ bos_token }}"}
    for file, text in (contents | {name: b"ab\xff"}).items():
        (tmp_path / file).write_bytes(text)
    tokenizer, template = (FileRecord(file, 0, "") for file in contents)
    with pytest.raises(BundleError, match=rf"{name} is not UTF-8 \(byte 2\): export the bundle again\.$"):
        Tokenizer.from_spec(TokenizerSpec(tokenizer, template, None, None, (2,), 300), tmp_path)


def test_jinja_is_imported_when_a_chat_is_rendered() -> None:
    program = (
        "import sys\n"
        "from runtime.tokenizer import Tokenizer\n"
        "tokenizer = Tokenizer(sys.stdin.read(), chat_template='{{ messages[0].content }}')\n"
        "tokenizer.decode(tokenizer.encode('the end'))\n"
        "before = 'jinja2' in sys.modules\n"
        "tokenizer.render_chat([{'role': 'user', 'content': 'x'}])\n"
        "print(before, 'jinja2' in sys.modules)\n"
    )
    root = Path(__file__).parents[1]
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=byte_level_json(), capture_output=True, text=True, cwd=root, check=False)
    assert done.stdout == "False True\n", done.stderr


def test_added_tokens_that_are_not_special_stay_in_the_text() -> None:
    raw = RawTokenizer.from_str(byte_level_json())
    raw.add_tokens([AddedToken("<tool>", special=False)])
    tokenizer = Tokenizer(raw.to_str())
    assert tokenizer.decode(tokenizer.encode("a<tool>b")) == "a<tool>b"
    assert json.loads(raw.to_str())["truncation"] is not None  # encode kept all of it although the file asks for four tokens
