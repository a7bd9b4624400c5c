"""Text and chat messages to ids and back.

It knows the tokenizer's file and its chat template, and no model: which ids end a text, how many fit into the context and how
ids become a stream of text is decided elsewhere.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import tokenizers

from .contract import TokenizerSpec
from .errors import BundleError, PromptError

if TYPE_CHECKING:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

_REPLACEMENT = "\ufffd"


class _TokenTexts(dict[int, str]):
    """The text of each token alone, of those that were asked for: cold behind a pass, `tokenizers` takes ten times as long."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = str(self._tokenizer.decode([token_id], skip_special_tokens=True))
        return text


class Tokenizer:
    """A `tokenizers` tokenizer and the chat template that belongs to it.

    Attributes:
        vocab_size: Highest id + 1, added tokens included. A model's rows of logits may be longer.
    """

    def __init__(
        self,
        tokenizer_json: str,
        *,
        chat_template: str | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
    ) -> None:
        """Loads the tokenizer; the template is compiled when it is first used.

        Args:
            tokenizer_json: The text of a `tokenizer.json`. Truncation and padding set in it are switched off.
            chat_template: Jinja source, in the dialect of transformers.
            bos_token: Given to the template; where it is None the template finds it undefined.
            eos_token: Likewise.

        Raises:
            BundleError: `tokenizer_json` is not a tokenizer that the installed `tokenizers` can read.
        """
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the library raises nothing narrower
            raise BundleError(
                f"The tokenizer cannot be read by tokenizers {tokenizers.__version__} ({error}): export the bundle again, or "
                "install a newer tokenizers."
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Of byte-level tokens the bytes are put together; others change with what stands around them.
        self._texts = (
            _TokenTexts(self._tokenizer) if isinstance(self._tokenizer.decoder, tokenizers.decoders.ByteLevel) else None
        )
        self._chat_template = chat_template
        self._special_tokens = {
            name: token for name, token in (("bos_token", bos_token), ("eos_token", eos_token)) if token is not None
        }
        self.vocab_size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @classmethod
    def from_spec(cls, spec: TokenizerSpec, folder: Path) -> "Tokenizer":
        """Loads the tokenizer of the bundle in `folder`.

        Raises:
            BundleError: As in `__init__`; or a file is not UTF-8.
        """
        template = spec.chat_template
        return cls(
            _read(folder / spec.file.path),
            chat_template=None if template is None else _read(folder / template.path),
            bos_token=spec.bos_token,
            eos_token=spec.eos_token,
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be rendered."""
        return self._chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of `text`, all of them.

        Args:
            text: Special tokens written out in it become their ids.
            add_special_tokens: Whether the tokenizer's post-processor adds what it does, BOS for instance.

        Raises:
            PromptError: `text` is no string, or holds half of a surrogate pair, which UTF-8 cannot write.
        """
        if not isinstance(text, str):
            raise PromptError(f"The prompt's text is a {type(text).__name__}; a string is expected.")
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except TypeError as error:
            position = next((index for index, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
            raise PromptError(
                f"The prompt's text holds half of a surrogate pair at character {position}, not a character: remove it."
            ) from error
        return list(encoding.ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Returns the ids of the rendered messages; special tokens are those that the template wrote, none is added.

        Raises:
            BundleError: As in `render_chat`.
            PromptError: As in `render_chat` and `encode`.
        """
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Renders the chat template up to where the model's answer begins.

        Args:
            messages: Each with the strings "role" and "content"; the template sees further keys as they are.

        Raises:
            BundleError: The template is not valid Jinja.
            PromptError: There is no template, the messages are not of this form, or the template refuses them.
        """
        if self._chat_template is None:
            raise PromptError("The bundle has no chat template, so it takes no messages: give the prompt as a string.")
        check_messages(messages)
        template = self._template
        try:
            return template.render(
                messages=[dict(message) for message in messages],
                tools=None,  # templates ask whether these two are none, which what is undefined is not
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except Exception as error:  # a template can raise whatever its expressions do
            roles = ", ".join(message["role"] for message in messages)
            raise PromptError(
                f"The chat template fails on these messages (roles: {roles}) with {type(error).__name__}: {error}"
            ) from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of `token_ids`, without special tokens and unknown ids; bytes that are not UTF-8 read U+FFFD."""
        if self._texts is not None:
            text = "".join(map(self._texts.__getitem__, token_ids))
            if _REPLACEMENT not in text:  # every token is whole characters
                return text
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def token(self, token_id: int) -> str:
        """Returns one token in readable form, for traces: its text, or the vocabulary's entry where that is not whole UTF-8.

        Special tokens read as they are written; an id that is not in the vocabulary reads `<id 49152>`.
        """
        raw = self._tokenizer.id_to_token(token_id)
        if raw is None:
            return f"<id {token_id}>"
        # Decoded twice over, because SentencePiece decoders strip the space of the first token.
        once, twice = (self._tokenizer.decode([token_id] * count, skip_special_tokens=False) for count in (1, 2))
        return str(raw if "\ufffd" in twice else twice[len(once) :])

    @cached_property
    def _template(self) -> "jinja2.Template":
        import jinja2  # 40 ms, so only where a chat is rendered

        try:
            return _environment().from_string(self._chat_template or "")
        except jinja2.TemplateSyntaxError as error:
            raise BundleError(
                f"The chat template is not valid Jinja ({error.message}, line {error.lineno}): export with another one."
            ) from error


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BundleError(f"{file} is not UTF-8 (byte {error.start}): export the bundle again.") from error


def check_messages(messages: Sequence[Mapping[str, str]], *, at_least: int = 1) -> None:
    """Raises PromptError unless these are messages, each with the strings "role" and "content", and enough of them."""
    form = 'a list of {"role": string, "content": string} is expected.'
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise PromptError(f"The messages are a {type(messages).__name__}; {form}")
    if len(messages) < at_least:
        raise PromptError(f"There are no messages; {form}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise PromptError(f"Message {index} is a {type(message).__name__}; {form}")
        for key in ("role", "content"):
            if key not in message:
                raise PromptError(f"Message {index} has no {key!r}, only {sorted(map(str, message))}; {form}")
            if not isinstance(message[key], str):
                raise PromptError(f"Message {index} has a {type(message[key]).__name__} as {key!r}; {form}")


def _environment() -> "ImmutableSandboxedEnvironment":
    """Returns the Jinja environment that transformers renders chat templates in: templates are written and tested for it."""
    import jinja2
    from jinja2 import ext, nodes, parser, sandbox

    class Generation(ext.Extension):
        """`{% generation %}` marks the assistant's words for training; here its body is rendered and nothing else."""

        tags = {"generation"}  # noqa: RUF012 so declared by its base

        def parse(self, parser: parser.Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    # Jinja's own tojson escapes for HTML, which a model has not seen.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
