"""What a tokenizer's ids stand for, as bytes: the one thing that tokens of two tokenizers can be compared by.

Three ways to write bytes are known: GPT-2's alphabet of 256 characters (byte-level BPE), SentencePiece's pieces with U+2581 for
a space and <0xNN> for a lone byte, and plain text.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from .tokenizer import TokenizerAssets

_SPACE = "\u2581"


class Content(NamedTuple):
    """What a token stands for: text that a special token is written with is not the text."""

    text: bytes
    special: bool


class TokenBytes:
    """The contents of a tokenizer's ids.

    Attributes:
        contents: By id; None where an id stands for nothing that can be told.
        ids: By content; where several ids have one content, the one the tokenizer itself would rather use.
        tokenizer: The tokenizer.
    """

    def __init__(self, assets: TokenizerAssets) -> None:
        """Reads a tokenizer."""
        self.tokenizer = Tokenizer.from_str(assets.tokenizer_json)
        tokenizer = json.loads(self.tokenizer.to_str())  # the library brings older forms of the file up to date
        added = {token["id"]: Content(token["content"].encode(), token["special"]) for token in tokenizer["added_tokens"]}
        steps = [*_steps(tokenizer["normalizer"]), *_steps(tokenizer["pre_tokenizer"]), *_steps(tokenizer["decoder"])]
        bytes_of = _byte_level if any(step["type"] == "ByteLevel" for step in steps) else _sentencepiece
        self.contents: list[Content | None] = []
        for token_id, token in enumerate(assets.tokens):
            text = bytes_of(token)
            self.contents.append(added.get(token_id) or (Content(text, special=False) if text else None))
        # A byte's own piece is only the last resort of a tokenizer that has a piece for the character.
        self.ids: dict[Content, int] = {}
        for token_id in sorted(range(len(self.contents)), key=lambda token_id: _is_byte(assets.tokens[token_id])):
            if (content := self.contents[token_id]) is not None:
                self.ids.setdefault(content, token_id)
        self._inner_tokenizer = _for_the_middle_of_a_text(tokenizer)

    def spell(self, texts: Sequence[bytes]) -> list[list[int]]:
        """Returns the ids each text has in the middle of a longer one.

        That is the tokenizer's own encoding where a text is made of whole characters, and a piece for each byte where it is
        not; a byte without a piece is left out.
        """
        pieces = [self.ids.get(Content(bytes([byte]), special=False)) for byte in range(256)]
        spelled = [[piece for byte in text if (piece := pieces[byte]) is not None] for text in texts]
        whole = {place: text.decode() for place, text in enumerate(texts) if _is_text(text)}
        encodings = self._inner_tokenizer.encode_batch(list(whole.values()), add_special_tokens=False)
        for place, encoding in zip(whole, encodings, strict=True):
            spelled[place] = encoding.ids
        return spelled


def _steps(section: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yields the steps of a normalizer, pre-tokenizer or decoder, those within sequences one by one."""
    if section is None:
        return
    for name in ("normalizers", "pretokenizers", "decoders"):
        for step in section.get(name, ()):
            yield from _steps(step)
    yield section


def _for_the_middle_of_a_text(tokenizer: dict[str, Any]) -> Tokenizer:
    """Loads a tokenizer without what it does to a text's beginning and end: a space that it puts there, or takes away."""
    for step in [*_steps(tokenizer["normalizer"]), *_steps(tokenizer["pre_tokenizer"])]:
        if step["type"] == "Prepend":
            step["prepend"] = ""
        elif step["type"] == "Strip":
            step["strip_left"] = step["strip_right"] = False
        elif step["type"] == "ByteLevel":
            step["add_prefix_space"] = False
        elif step["type"] == "Metaspace":
            step["prepend_scheme"] = "never"
    changed = Tokenizer.from_str(json.dumps(tokenizer))
    changed.no_truncation()
    changed.no_padding()
    return changed


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes (bytes_to_unicode): printable ones for themselves, the others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    return bytes(_BYTE_OF[character] for character in token) if all(character in _BYTE_OF for character in token) else b""


def _sentencepiece(token: str) -> bytes:
    return bytes([int(token[3:5], 16)]) if _is_byte(token) else token.replace(_SPACE, " ").encode()


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _is_text(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
