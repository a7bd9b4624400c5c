"""What a bundle needs to know of a tokenizer, and how it is read from a Hugging Face folder.

This module knows no model type: it copies tokenizer.json, and reads the files next to it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from .errors import ExportError

if TYPE_CHECKING:
    from pathlib import Path

# The files that transformers builds a tokenizer from where there is no tokenizer.json.
_SOURCES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "tekken.json")


@dataclass(frozen=True)
class TokenizerAssets:
    """A tokenizer as a bundle stores it.

    Attributes:
        tokenizer_json: Text of a tokenizers-library tokenizer.json; its post-processor adds BOS where the model wants it.
        tokens: Token table by id, added tokens included, "" for unused ids; to compare two models' tables.
        chat_template: Jinja2 source, or None where the model has none.
        bos_token: Text of the beginning-of-sequence token, or None.
        eos_token: Text of the end-of-sequence token, or None.
        eos_token_ids: Every id that ends a text, without repeats, the tokenizer's sources in order.
    """

    tokenizer_json: str
    tokens: tuple[str, ...]
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: tuple[int, ...]


def tokenizer_from_folder(folder: Path) -> TokenizerAssets:
    """Read the tokenizer of a Hugging Face checkpoint folder.

    Args:
        folder: The folder with tokenizer.json, or with the files that transformers converts to one.

    Returns:
        The assets; tokenizer.json is copied as it is.

    Raises:
        ExportError: No tokenizer files, files that do not load, or a chat template or EOS that cannot be understood.
    """
    source = folder / "tokenizer.json"
    text = _read_text(source) if source.is_file() else _converted(folder)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as exc:  # noqa: BLE001 - the tokenizers library raises bare Exception
        raise ExportError(f"{source} is not a tokenizer that the tokenizers library can load: {exc}") from None
    config = _read_object(folder / "tokenizer_config.json")
    # Older checkpoints name their special tokens only in special_tokens_map.json.
    named = {**_read_object(folder / "special_tokens_map.json"), **{key: value for key, value in config.items() if value}}
    bos_token, eos_token = (_content(folder, name, named.get(name)) for name in ("bos_token", "eos_token"))
    return TokenizerAssets(
        tokenizer_json=text,
        tokens=token_table(tokenizer.get_vocab(with_added_tokens=True)),
        chat_template=_chat_template(folder, config),
        bos_token=bos_token,
        eos_token=eos_token,
        eos_token_ids=_eos_token_ids(folder, None if eos_token is None else tokenizer.token_to_id(eos_token)),
    )


def token_table(vocabulary: dict[str, int]) -> tuple[str, ...]:
    """Turn a token-to-id map into a table by id, with "" at ids that no token has.

    Args:
        vocabulary: Token text to id.

    Returns:
        One text per id, from 0 to the largest id.
    """
    table = [""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        table[token_id] = token
    return tuple(table)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ExportError(f"{path} is not UTF-8 text: fetch the file again") from None


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON file's object; {} where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (json.JSONDecodeError, RecursionError) as exc:
        raise ExportError(f"{path} is not JSON ({exc}): fetch the file again") from None
    if not isinstance(value, dict):
        raise ExportError(f"{path} holds a JSON {type(value).__name__} where an object is expected: fetch the file again")
    return value


def _converted(folder: Path) -> str:
    """The text of a tokenizer.json that transformers makes of the folder's older files."""
    if not any((folder / name).is_file() for name in _SOURCES):
        raise ExportError(f"{folder} holds no tokenizer: expected tokenizer.json, or one of {', '.join(_SOURCES)}")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), use_fast=True, local_files_only=True)
    except Exception as exc:  # noqa: BLE001 - converters raise whatever their format's library raises
        raise ExportError(
            f"{folder} has no tokenizer.json and transformers cannot make one of its files ({_first_line(exc)}): "
            "add the model's tokenizer.json"
        ) from None
    if not tokenizer.is_fast:
        raise ExportError(
            f"{folder} has no tokenizer.json and transformers has no fast form of {type(tokenizer).__name__}: "
            "add the model's tokenizer.json"
        )
    converted: str = tokenizer.backend_tokenizer.to_str()
    return converted


def _first_line(exc: Exception) -> str:
    lines = str(exc).strip().splitlines()
    return lines[0] if lines else type(exc).__name__


def _content(folder: Path, name: str, token: object) -> str | None:
    """The text of a special token, which is stored as a string or as an AddedToken's fields."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str | None):
        raise ExportError(f"{folder} gives {token!r:.80} as {name}: expected a token's text")
    return text or None


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    # Newer transformers write the file and leave the field out; where both are there, the file wins there too.
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _read_text(file)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        if "default" not in named:
            raise ExportError(
                f"{folder / 'tokenizer_config.json'} has chat templates {sorted(map(str, named))} and none is named 'default': "
                "rename the one to use"
            )
        template = named["default"]
    if not isinstance(template, str | None):
        raise ExportError(f"{folder / 'tokenizer_config.json'} has the chat template {template!r:.80}: expected Jinja source")
    return template or None


def _eos_token_ids(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """All ids that end a text: instruct models end a turn with a token that only generation_config.json knows."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _read_object(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if not all(token_id is None or (type(token_id) is int and token_id >= 0) for token_id in ids):
            raise ExportError(f"{folder / name} has eos_token_id {value!r}: expected a token id or a list of token ids")
        found += [token_id for token_id in ids if token_id is not None]
    if tokenizer_eos is not None:
        found.append(tokenizer_eos)
    return tuple(dict.fromkeys(found))
