"""Tokens of three kinds of tokenizers, as the bytes they stand for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from export.token_bytes import Content, TokenBytes
from export.tokenizer import TokenizerAssets, token_table

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
NON_ASCII = ["é".encode(), "猫".encode(), "🐱".encode(), b" the", b"\n\n", b"a b"]


def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    table = token_table(tokenizer.get_vocab(with_added_tokens=True))
    return TokenBytes(TokenizerAssets(tokenizer.to_str(), table, None, None, None, ()))


def byte_level(*merged: tuple[str, str], add_prefix_space: bool = False) -> Tokenizer:
    """GPT-2's kind: a token for each byte, and merges."""
    vocabulary = {token: place for place, token in enumerate([*ALPHABET, *map("".join, merged)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merged)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def sentencepiece(style: str, *, byte_fallback: bool = True) -> Tokenizer:
    """Llama's and Mistral's kind, in the forms they are written in."""
    unknown = "<unk>"
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256) if byte_fallback]
    pieces = [unknown, *byte_pieces, *("▁", "t", "h", "e", "a", "é", "▁t", "he", "▁the")]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, byte_fallback=byte_fallback, fuse_unk=True))
    if style == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
        tokenizer.decoder = decoders.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=style, split=False)
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=style, split=False)])
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


def spelled(tokens: TokenBytes, texts: Sequence[bytes]) -> list[bytes]:
    return [b"".join(tokens.contents[token].text for token in ids) for ids in tokens.spell(texts)]


styles = pytest.mark.parametrize("style", ["normalizer", "always", "first", "never"])


def test_the_alphabet_of_byte_level_tokens_is_that_of_the_tokenizers_library() -> None:
    tokenizer = byte_level()
    tokens = token_bytes(tokenizer)
    assert {tokens.contents[token].text for token in range(256)} == {bytes([byte]) for byte in range(256)}
    for character in map(chr, [*range(0x20, 0x7F), 0xA0, 0xAD, 0xE9, 0x140, 0x732B]):
        ids = tokenizer.encode(character, add_special_tokens=False).ids
        if len(ids) == len(character.encode()):
            assert b"".join(tokens.contents[token].text for token in ids) == character.encode()


def test_byte_level_tokens_stand_for_bytes_and_added_ones_for_their_text() -> None:
    tokenizer = byte_level(("\u0120", "t"), ("\u00c3", "\u00a9"))
    tokens = token_bytes(tokenizer)
    place = tokenizer.token_to_id
    assert tokens.contents[place("\u0120t")] == Content(b" t", special=False)
    assert tokens.contents[place("\u00c3\u00a9")] == Content("é".encode(), special=False)
    assert tokens.contents[place("<think>")] == Content(b"<think>", special=False)
    assert tokens.contents[place("<|end|>")] == Content(b"<|end|>", special=True)
    assert tokens.ids[Content(b"<|end|>", special=True)] == place("<|end|>")


def test_a_token_outside_the_alphabet_stands_for_nothing_that_can_be_told() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "猫": 1, "b": 3}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    assert token_bytes(tokenizer).contents == [Content(b"a", special=False), None, None, Content(b"b", special=False)]


@styles
def test_sentencepiece_pieces_stand_for_their_text_and_a_byte_piece_for_its_byte(style: str) -> None:
    tokenizer = sentencepiece(style)
    tokens = token_bytes(tokenizer)
    assert tokens.contents[tokenizer.token_to_id("▁the")] == Content(b" the", special=False)
    assert tokens.contents[tokenizer.token_to_id("<0xE7>")] == Content(b"\xe7", special=False)
    assert tokens.contents[tokenizer.token_to_id("</s>")] == Content(b"</s>", special=True)
    # "a" has a piece, and its byte another one, with a lower id.
    assert tokens.ids[Content(b"a", special=False)] == tokenizer.token_to_id("a")
    assert tokens.ids[Content(b"b", special=False)] == tokenizer.token_to_id("<0x62>")


@styles
def test_sentencepiece_spells_as_in_the_middle_of_a_text(style: str) -> None:
    tokenizer = sentencepiece(style)
    tokens = token_bytes(tokenizer)
    texts = [*NON_ASCII, b"the", b" t", b"t", "猫".encode()[:2], b"\x80", b""]
    assert spelled(tokens, texts) == texts
    names = [[tokenizer.id_to_token(token) for token in ids] for ids in tokens.spell([b" the", b"the", "é".encode()])]
    assert names == [["▁the"], ["t", "he"], ["é"]]
    assert [tokenizer.id_to_token(token) for token in tokens.spell(["猫".encode()[1:]])[0]] == ["<0x8C>", "<0xAB>"]


def test_what_a_tokenizer_does_to_whole_texts_is_not_lost_to_it() -> None:
    """The tokenizer itself keeps its prefix: it also encodes sample texts."""
    tokens = token_bytes(sentencepiece("normalizer"))
    assert tokens.tokenizer.encode("the", add_special_tokens=False).tokens == ["▁the"]


@pytest.mark.parametrize("add_prefix_space", [False, True])
def test_byte_level_spells_as_in_the_middle_of_a_text(add_prefix_space: bool) -> None:
    tokenizer = byte_level(("t", "h"), ("th", "e"), ("\u0120", "the"), add_prefix_space=add_prefix_space)
    tokens = token_bytes(tokenizer)
    texts = [*NON_ASCII, b"the", "猫".encode()[1:], b"\xff", b""]
    assert spelled(tokens, texts) == texts
    assert [len(ids) for ids in tokens.spell([b"the", b" the", "猫".encode()[1:]])] == [1, 1, 2]


def test_a_byte_without_a_piece_is_left_out() -> None:
    tokens = token_bytes(sentencepiece("never", byte_fallback=False))
    assert tokens.spell([b"\x80", b"a\x80"]) == [[], tokens.spell([b"a"])[0]]


def test_truncation_and_stripping_do_not_shorten_a_spelling() -> None:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Strip()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    assert spelled(token_bytes(tokenizer), [b" a b ", b"abcdef"]) == [b" a b ", b"abcdef"]


def test_plain_words_stand_for_themselves() -> None:
    unknown = "<unk>"
    tokenizer = Tokenizer(models.WordLevel({unknown: 0, "sea": 1, "see": 2}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s"), "removed")
    tokens = token_bytes(tokenizer)
    assert tokens.contents[1] == Content(b"sea", special=False)
    assert tokens.spell([b"sea", b"sea see", b"other"]) == [[1], [1, 2], [0]]
