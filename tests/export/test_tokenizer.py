"""The tokenizer a bundle gets: from a Hugging Face folder, and from a GGUF file with llama.cpp's ids."""

from __future__ import annotations

import functools
import json
import shutil
from typing import TYPE_CHECKING, Any

import jinja2
import pytest
from gguf import GGUFWriter
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from export.errors import ExportError
from export.gguf_file import read_gguf
from export.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_from_gguf
from export.tokenizer import TokenizerAssets, token_table, tokenizer_from_folder

if TYPE_CHECKING:
    from pathlib import Path

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4

# --- SmolLM2 ---------------------------------------------------------------------------------------------------------

# The ids are those of llama.cpp's own tokenizer on the same file: llama-cpp-python 0.3.36,
# Llama(path, vocab_only=True).tokenize(text.encode(), add_bos=False, special=True).
SMOLLM2_IDS = [
    ("", []),
    ("Hello, world!", [19556, 28, 905, 17]),
    ("1234567890 and 3.14", [33, 34, 35, 36, 37, 38, 39, 40, 41, 32, 284, 216, 35, 30, 33, 36]),
    (
        "pi  =   3\n\n14,  15",
        [9020, 216, 446, 333, 35, 1116, 33, 36, 28, 256, 33, 37],
    ),  # spaces before a digit: a piece of their own, since digits are split off first
    ("a  b   c    d", [81, 216, 278, 256, 265, 333, 287]),
    ("\tif x:\n\t\treturn  y\n\n\n", [197, 342, 1792, 42, 3354, 197, 5406, 216, 329, 16506]),
    ("  \r\n x \xa0y\u2003z  ", [256, 2738, 1792, 216, 15442, 105, 321, 221, 106, 256]),
    ("caf\xe9 na\xefve \xdcber", [83, 1939, 2756, 15486, 46494, 5549, 246, 593]),
    ("e\u0301 o\u0308 n\u0303", [85, 151, 219, 263, 151, 226, 304, 151, 221]),
    (
        "\u65e5\u672c\u8a9e\u3068\u4e2d\u6587\u3002",
        [23274, 115, 40993, 179, 120, 248, 7365, 118, 28589, 29184, 19076],
    ),
    ("\ud55c\uad6d\uc5b4", [33085, 246, 181, 130, 251, 183, 240, 129]),
    (
        "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd",
        [10813, 235, 118, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117, 15107, 235, 231, 10813, 233, 138],
    ),
    (
        "for (int i = 0; i < 10; ++i) {",
        [1710, 365, 591, 2056, 446, 216, 32, 43, 2056, 2067, 216, 33, 32, 43, 1232, 27, 89, 25, 1662],
    ),
    ("It's we're I'LL don't", [1589, 506, 392, 2316, 339, 23, 16421, 1326, 982]),
    ("\xbd\xb2\u2167\u0663", [16738, 19133, 173, 223, 117, 164, 113]),
    ("<|im_start|>user\nHi<|im_end|>\n", [1, 4093, 198, 26843, 2, 198]),
    ("no<|im_end|>space <file_sep>", [4607, 2, 11602, 216, 5]),
]


@functools.cache
def smollm2(path: Path) -> tuple[TokenizerAssets, Tokenizer]:
    assets = tokenizer_from_gguf(read_gguf(path))
    return assets, Tokenizer.from_str(assets.tokenizer_json)


@pytest.mark.real_weights
@pytest.mark.parametrize(("text", "ids"), SMOLLM2_IDS)
def test_smollm2_gives_llama_cpp_ids_and_the_text_comes_back(smollm2_gguf: Path, text: str, ids: list[int]) -> None:
    _, tokenizer = smollm2(smollm2_gguf)
    assert tokenizer.encode(text).ids == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.real_weights
def test_smollm2_bytes_without_a_token_are_dropped_without_joining_their_neighbours(smollm2_gguf: Path) -> None:
    _, tokenizer = smollm2(smollm2_gguf)
    exclamation_mark = 17
    assert tokenizer.encode("!!").ids != [exclamation_mark] * 2
    assert tokenizer.encode("!\x13!").ids == [exclamation_mark] * 2  # as llama.cpp


@pytest.mark.real_weights
def test_smollm2_assets(smollm2_gguf: Path) -> None:
    assets, tokenizer = smollm2(smollm2_gguf)
    assert (assets.bos_token, assets.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert assets.eos_token_ids == (2, 0)
    assert len(assets.tokens) == 49152
    assert assets.tokens[19556] == "Hello"
    assert tokenizer.get_vocab_size() == 49152
    assert all(tokenizer.get_added_tokens_decoder()[token_id].special for token_id in range(17))


@pytest.mark.real_weights
def test_smollm2_chat_gives_llama_cpp_ids(smollm2_gguf: Path) -> None:
    assets, tokenizer = smollm2(smollm2_gguf)
    assert assets.chat_template is not None
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 12 + 30?"}]
    prompt = jinja2.Environment().from_string(assets.chat_template).render(messages=chat, add_generation_prompt=True)  # noqa: S701
    # llama.cpp: llama_chat_apply_template, then its tokenizer.
    ids = [1, 9690, 198, 6077, 5453, 30, 2, 198, 1, 4093, 198, 1780, 314, 216, 33, 34, 1232, 216, 35, 32, 47, 2, 198]
    assert tokenizer.encode(prompt, add_special_tokens=False).ids == [*ids, 1, 520, 9531, 198]
    assert tokenizer.decode(tokenizer.encode(prompt).ids) == "system\nBe brief.\nuser\nWhat is 12 + 30?\nassistant\n"


# --- GGUF, without weights -------------------------------------------------------------------------------------------

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
DEFAULTS: dict[str, Any] = {
    "model": "gpt2",
    "pre": "smollm",
    "tokens": [*ALPHABET, "12", "ab", "<s>", "<|im_end|>", "[tool]", "e\u0301"],
    "token_type": [NORMAL] * 258 + [CONTROL, CONTROL, USER_DEFINED, NORMAL],
    "merges": ["1 2", "a b"],
    "bos_token_id": 258,
    "eos_token_id": 259,
}


def write_gguf(path: Path, template: str | None = None, **changes: Any) -> Path:
    """Write a GGUF file of a tokenizer alone: DEFAULTS with changes; a value of None leaves the field out."""
    writer = GGUFWriter(path, "llama")
    for name, value in {**DEFAULTS, **changes}.items():
        if value is None:
            continue
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}[type(value)]
        add(f"tokenizer.ggml.{name}", value)
    if template is not None:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def gguf_tokenizer(tmp_path: Path, **changes: Any) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_from_gguf(read_gguf(write_gguf(tmp_path / "model.gguf", **changes))).tokenizer_json)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text, add_special_tokens=False).tokens


SPLIT_TEXT = "It'S we're 12345  caf\xe9 e\u0301x=`b`;\r\n\n \u65e5\u672c\u3002 \u2028AbC's"

# What llama.cpp makes of SPLIT_TEXT under each name, found with a vocabulary in which every substring of the text is a
# token and every pair of its parts a merge: each piece then becomes one token, and the tokens show the pieces.
SPLITS = {
    "default": "It|'|S| we|'|re| |123|45| | caf\xe9| e|\u0301|x|=|`|b|`|;|\r\n\n| \u65e5\u672c|\u3002| |\u2028|AbC|'|s",
    "gpt-2": "It|'|S| we|'re| 12345| | caf\xe9| e|\u0301|x|=`|b|`;|\r\n\n| \u65e5\u672c|\u3002| |\u2028|AbC|'s",
    "smollm": "It|'|S| we|'re| |1|2|3|4|5| | caf\xe9| e|\u0301|x|=`|b|`;|\r\n\n| \u65e5\u672c|\u3002| |\u2028|AbC|'s",
    "falcon": "It|'|S| we|'|re| |123|45| | caf\xe9| e|\u0301|x|=`|b|`;|\r\n\n| \u65e5\u672c|\u3002| |\u2028|AbC|'|s",
    "llama-bpe": "It|'S| we|'re| |123|45| | caf\xe9| e|\u0301x|=`|b|`;\r\n\n| \u65e5\u672c|\u3002| |\u2028AbC|'s",
    "qwen2": "It|'S| we|'re| |1|2|3|4|5| | caf\xe9| e|\u0301x|=`|b|`;\r\n\n| \u65e5\u672c|\u3002| |\u2028AbC|'s",
    "qwen35": "It|'S| we|'re| |1|2|3|4|5| | caf\xe9| e\u0301x|=`|b|`;\r\n\n| \u65e5\u672c|\u3002| |\u2028AbC|'s",
    "tekken": "It|'S| we|'re| |1|2|3|4|5| | caf\xe9| e|\u0301x|=`|b|`;\r\n\n| \u65e5\u672c|\u3002| |\u2028Ab|C|'s",
    "gpt-4o": "It'S| we're| |123|45| | caf\xe9| e|\u0301x|=`|b|`;\r\n\n| \u65e5\u672c|\u3002| |\u2028Ab|C's",
    "deepseek-llm": "It|'|S| we|'|re| |12345| | caf|\xe9| e|\u0301|x|=`|b|`;|\r|\n|\n| |\u65e5\u672c|\u3002| |\u2028AbC|'|s",
    "deepseek-coder": "It|'|S| we|'|re| |1|2|3|4|5| | caf\xe9| e|\u0301|x|=`|b|`|;|"
    "\r|\n|\n| |\u65e5\u672c|\u3002| |\u2028AbC|'|s",
    "deepseek-v3": "It|'S| we|'re| |123|45| | caf\xe9| e\u0301x|=`|b|`;\r\n\n| |\u65e5\u672c|\u3002| |\u2028AbC|'s",
}
SAME_SPLITS = {
    "gpt-2": ("phi-2", "mpt", "olmo", "exaone4"),
    "smollm": ("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    "llama-bpe": ("llama3", "llama-v3", "falcon3", "lfm2", "dbrx", "smaug-bpe"),
    "qwen2": ("deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"),
    "gpt-4o": ("llama4",),
}


@pytest.mark.parametrize("name", SPLITS)
def test_pre_tokenizer_splits_as_llama_cpp(tmp_path: Path, name: str) -> None:
    tokenizer = gguf_tokenizer(tmp_path, pre=name)
    parts = tokenizer.pre_tokenizer.pre_tokenize_str(SPLIT_TEXT)
    assert "|".join(SPLIT_TEXT[start:end] for _, (start, end) in parts) == SPLITS[name]
    assert tokenizer.decode(tokenizer.encode(SPLIT_TEXT).ids) == SPLIT_TEXT


def test_every_pre_tokenizer_is_tested() -> None:
    known = {*SPLITS, *(name for names in SAME_SPLITS.values() for name in names)}
    assert known == set(PRE_TOKENIZERS)
    for name, others in SAME_SPLITS.items():
        assert all(PRE_TOKENIZERS[other].splits == PRE_TOKENIZERS[name].splits for other in others)


def test_digits_merge_where_the_pre_tokenizer_allows_it(tmp_path: Path) -> None:
    assert pieces(gguf_tokenizer(tmp_path, pre="smollm"), "12") == ["1", "2"]
    assert pieces(gguf_tokenizer(tmp_path, pre="gpt-2"), "12") == ["12"]


def test_control_tokens_are_special_and_user_defined_ones_are_text(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(tmp_path)
    encoded = tokenizer.encode("x<s>ab[tool] <|im_end|>")
    assert encoded.tokens == ["x", "<s>", "ab", "[tool]", "\u0120", "<|im_end|>"]
    assert tokenizer.decode(encoded.ids) == "xab[tool] "
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == "x<s>ab[tool] <|im_end|>"


def test_text_is_not_normalised(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(tmp_path, pre="qwen2")
    assert tokenizer.encode("e\u0301").ids != tokenizer.encode("\xe9").ids
    assert tokenizer.decode(tokenizer.encode("e\u0301").ids) == "e\u0301"


@pytest.mark.parametrize(
    ("pre", "add_bos_token", "expected"),
    [
        ("smollm", None, ["ab"]),
        ("smollm", False, ["ab"]),
        ("smollm", True, ["<s>", "ab"]),
        ("llama-bpe", None, ["<s>", "ab"]),
        ("llama-bpe", False, ["ab"]),
        ("tekken", None, ["<s>", "ab"]),
        ("dbrx", None, ["ab"]),
    ],
)
def test_bos_is_added_where_the_file_or_the_pre_tokenizer_says(
    tmp_path: Path, pre: str, add_bos_token: bool | None, expected: list[str]
) -> None:
    tokenizer = gguf_tokenizer(tmp_path, pre=pre, add_bos_token=add_bos_token)
    assert tokenizer.encode("ab").tokens == expected
    assert tokenizer.encode("ab", add_special_tokens=False).tokens == ["ab"]


def test_whole_pieces_are_taken_as_tokens_where_merges_are_ignored(tmp_path: Path) -> None:
    tokens, types = [*DEFAULTS["tokens"], "abc"], [*DEFAULTS["token_type"], NORMAL]
    assert pieces(gguf_tokenizer(tmp_path, pre="llama-bpe", tokens=tokens, token_type=types), "abc") == ["abc"]
    assert pieces(gguf_tokenizer(tmp_path, pre="qwen2", tokens=tokens, token_type=types), "abc") == ["ab", "c"]


def test_a_byte_without_a_token_is_dropped_and_its_neighbours_stay_apart(tmp_path: Path) -> None:
    tokens = ["" if text == "x" else text for text in DEFAULTS["tokens"]]
    path = write_gguf(tmp_path / "model.gguf", tokens=tokens)
    assets = tokenizer_from_gguf(read_gguf(path))
    assert assets.tokens == tuple(tokens)
    assert pieces(Tokenizer.from_str(assets.tokenizer_json), "axbab") == ["a", "b", "ab"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (259,)),
        ({"eos_token_id": 258}, (258, 259)),  # "<|im_end|>" ends a turn, named or not
        ({"eot_token_id": 261}, (259, 261)),
        ({"eos_token_id": None}, (259,)),
        ({"eos_token_id": 5000}, (259,)),
        ({"tokens": [*DEFAULTS["tokens"][:258], "<|return|>", "<|call|>", "<|end|>", "zz"]}, (259, 258)),
        ({"tokens": [*DEFAULTS["tokens"][:258], "<|return|>", "zz", "<|end|>", "yy"]}, (259, 258, 260)),
    ],
    ids=["eos", "by text", "eot", "no eos", "outside the vocabulary", "harmony", "end"],
)
def test_gguf_eos_token_ids(tmp_path: Path, changes: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert tokenizer_from_gguf(read_gguf(write_gguf(tmp_path / "model.gguf", **changes))).eos_token_ids == expected


def test_gguf_names_and_template(tmp_path: Path) -> None:
    assets = tokenizer_from_gguf(read_gguf(write_gguf(tmp_path / "model.gguf", template="{{ messages }}")))
    assert (assets.bos_token, assets.eos_token, assets.chat_template) == ("<s>", "<|im_end|>", "{{ messages }}")
    bare = tokenizer_from_gguf(read_gguf(write_gguf(tmp_path / "bare.gguf", bos_token_id=None, eos_token_id=None)))
    assert (bare.bos_token, bare.eos_token, bare.chat_template) == (None, None, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, r"tokenizer\.ggml\.model 'llama' \(SentencePiece\)"),
        ({"model": "bert"}, r"'bert' \(not byte-level BPE\)"),
        (
            {"pre": "unheard-of"},
            r"tokenizer\.ggml\.pre 'unheard-of', whose splits are not known here \(known: default, .*smollm",
        ),
        ({"pre": None}, r"tokenizer\.ggml\.pre None"),
        ({"tokens": None}, r"no tokenizer\.ggml\.tokens"),
        ({"tokens": [*DEFAULTS["tokens"][:-1], "ab"]}, r"token 'ab' under two ids"),
        ({"token_type": [NORMAL]}, "262 tokens and 1 token types"),
        ({"merges": None}, r"no tokenizer\.ggml\.merges"),
        ({"merges": ["a c"]}, "merge 'a c'"),
        ({"merges": ["ab"]}, "merge 'ab'"),
        ({"add_bos_token": True, "bos_token_id": None}, "asks for a BOS token"),
    ],
)
def test_gguf_vocabularies_that_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        tokenizer_from_gguf(read_gguf(write_gguf(tmp_path / "model.gguf", **changes)))


def test_gguf_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "model.gguf", template="{{ messages }}").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(4, 80, 5), *range(100, len(whole) - 20, 1009), *range(len(whole) - 20, len(whole))]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ExportError, match=rf"cut\.gguf is cut short or damaged \({size:,} bytes\)"):
            tokenizer_from_gguf(read_gguf(cut))


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 not a model"])
def test_not_a_gguf_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ExportError, match="is not a GGUF file: it begins with b"):
        tokenizer_from_gguf(read_gguf(path))


def test_no_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"absent\.gguf cannot be read: No such file"):
        tokenizer_from_gguf(read_gguf(tmp_path / "absent.gguf"))


# --- Hugging Face folder ---------------------------------------------------------------------------------------------


def write_folder(folder: Path, **files: Any) -> Path:
    """Write a folder with a tokenizer of a, b, ab (ids 0, 1, 2), added <s> (3) and </s> (4); files: name to content."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer.add_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    folder.joinpath("tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    for name, content in files.items():
        folder.joinpath(f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_folder_tokenizer_json_is_kept_as_it_is(tmp_path: Path) -> None:
    assets = tokenizer_from_folder(write_folder(tmp_path))
    assert assets.tokenizer_json == (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    assert assets.tokens == ("a", "b", "ab", "<s>", "</s>")
    assert (assets.chat_template, assets.bos_token, assets.eos_token, assets.eos_token_ids) == (None, None, None, ())


def test_token_table_leaves_unused_ids_empty() -> None:
    assert token_table({"c": 3, "a": 0, "b": 1}) == ("a", "b", "", "c")
    assert token_table({}) == ()


@pytest.mark.parametrize("eos", ["</s>", {"__type": "AddedToken", "content": "</s>", "lstrip": False}])
@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
def test_folder_special_tokens(tmp_path: Path, file: str, eos: str | dict[str, Any]) -> None:
    assets = tokenizer_from_folder(write_folder(tmp_path, **{file: {"bos_token": "<s>", "eos_token": eos}}))
    assert (assets.bos_token, assets.eos_token) == ("<s>", "</s>")
    assert assets.eos_token_ids == (4,)


def test_folder_special_tokens_map_fills_what_the_config_leaves_out(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path,
        tokenizer_config={"bos_token": "<s>", "eos_token": None},
        special_tokens_map={"bos_token": "a", "eos_token": "</s>"},
    )
    assets = tokenizer_from_folder(folder)
    assert (assets.bos_token, assets.eos_token) == ("<s>", "</s>")


def test_folder_without_special_tokens_says_none(tmp_path: Path) -> None:
    assets = tokenizer_from_folder(write_folder(tmp_path, tokenizer_config={"bos_token": None, "eos_token": None}))
    assert (assets.bos_token, assets.eos_token) == (None, None)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [2, 4]}, {"eos_token_id": 1}, (2, 4, 1)),
        ({"eos_token_id": 2}, {"eos_token_id": 2}, (2, 4)),
        ({"eos_token_id": 0}, {"eos_token_id": None}, (0, 4)),
        ({}, {"eos_token_id": [1, 0]}, (1, 0, 4)),
    ],
)
def test_folder_eos_token_ids(tmp_path: Path, generation: Any, config: Any, expected: tuple[int, ...]) -> None:
    files = {"generation_config": generation, "config": config, "tokenizer_config": {"eos_token": "</s>"}}
    assert tokenizer_from_folder(write_folder(tmp_path, **files)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("plain", "plain"),
        ([{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "chat"}], "chat"),
        (None, None),
    ],
)
def test_folder_chat_template(tmp_path: Path, template: Any, expected: str | None) -> None:
    write_folder(tmp_path, tokenizer_config={"chat_template": template})
    assert tokenizer_from_folder(tmp_path).chat_template == expected
    (tmp_path / "chat_template.jinja").write_text("from the file", encoding="utf-8")
    assert tokenizer_from_folder(tmp_path).chat_template == "from the file"


def test_folder_of_older_files_is_converted(tmp_path: Path) -> None:
    vocabulary = {token: token_id for token_id, token in enumerate([*ALPHABET, "ab", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n", encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}), encoding="utf-8")
    assets = tokenizer_from_folder(tmp_path)
    assert Tokenizer.from_str(assets.tokenizer_json).encode("ab c").tokens == ["ab", "\u0120", "c"]
    assert assets.tokens == tuple(vocabulary)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config": {}, "tokenizer": {"version": "1.0"}}, r"tokenizer\.json is not a tokenizer"),
        ({"config": {"eos_token_id": "2"}}, r"config\.json has eos_token_id '2'"),
        (
            {"generation_config": {"eos_token_id": [1, None, 2.5]}},
            r"generation_config\.json has eos_token_id \[1, None, 2\.5\]",
        ),
        ({"tokenizer_config": []}, "holds a JSON list where an object is expected"),
        (
            {"tokenizer_config": {"chat_template": [{"name": "rag", "template": "x"}]}},
            r"chat templates \['rag'\] and none is named 'default'",
        ),
    ],
)
def test_folders_that_are_refused(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        tokenizer_from_folder(write_folder(tmp_path, **files))


def test_folder_with_broken_json(tmp_path: Path) -> None:
    (write_folder(tmp_path) / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ExportError, match=r"config\.json is not JSON"):
        tokenizer_from_folder(tmp_path)


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"holds no tokenizer: expected tokenizer\.json"):
        tokenizer_from_folder(tmp_path)


def test_folder_that_transformers_cannot_convert(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ExportError, match=r"no tokenizer\.json and transformers cannot make one of its files"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("chat_template", 5, "expected Jinja source"),
        ("chat_template", [{"name": "default", "template": 5}], "expected Jinja source"),
        ("chat_template", [5, {}], "none is named 'default'"),
        ("eos_token", True, "as eos_token: expected a token's text"),
        ("bos_token", {"content": ["a"]}, "as bos_token: expected a token's text"),
    ],
)
def test_folder_with_values_of_other_kinds_is_refused(
    tiny_target: Path, tmp_path: Path, field: str, value: Any, message: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_target, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(ExportError, match=message):
        tokenizer_from_folder(folder)
