r"""The tokenizer of a GGUF file as a tokenizers-library tokenizer.json whose ids are llama.cpp's.

A GGUF file stores tokens and merges, but of the pre-tokenizer only a name: the split expressions behind the name are
code in llama.cpp (src/llama-vocab.cpp) and are repeated in the table here. The tokenizers library reads the same
expressions: a Split with the behaviour "isolated" per expression does what llama.cpp's unicode_regex_split does. Only
code points that one library's Unicode tables know and the other's do not can still be split differently.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from .errors import ExportError
from .tokenizer import TokenizerAssets

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from .gguf_file import GGUFFile


@dataclass(frozen=True)
class PreTokenizer:
    """What the name in tokenizer.ggml.pre stands for.

    Attributes:
        splits: Expressions, applied one after another; each cuts the pieces that the one before it left.
        ignore_merges: A piece that is a token as a whole is taken as it is, without its merges.
        add_bos: Whether a text begins with BOS where the file does not say.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Spelled out, since (?i:'s) would also take the long s (U+017F), which llama.cpp does not.
_CONTRACTION = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The CJK range spans U+2000 to U+3000, whose spaces llama.cpp does not count in: it turns every space to U+000B first.
_DEEPSEEK_CJK = r"(?:(?!\s)[\x{0800}-\x{9FA5}\x{AC00}-\x{D7FF}])+"
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛ"
    "ὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"  # noqa: RUF001
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3001}\x{3002}]+",
    r"\s+$",
    _DEEPSEEK_CJK,
    r"\p{N}+",
)
# Upper-case and lower-case are told apart in ASCII alone, which differs from the models' own tokenizer.json for text like
# "ÉCOLEéa": the ids here are llama.cpp's.
_NOT_LOWER, _NOT_UPPER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
_TEKKEN, _GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_NOT_LOWER}*{_NOT_UPPER}+{suffix}|[^\r\n\p{{L}}\p{{N}}]?{_NOT_LOWER}+{_NOT_UPPER}*{suffix}"
    rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for suffix, digits in (("", r"\p{N}"), (rf"(?:{_CONTRACTION})?", r"\p{N}{1,3}"))
)

# The names of one line are one and the same pre-tokenizer in llama.cpp.
PRE_TOKENIZERS = {
    name: pre_tokenizer
    for names, pre_tokenizer in (
        ("default", PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
        ("gpt-2 phi-2 mpt olmo exaone4", PreTokenizer((_GPT2,))),
        ("smollm starcoder refact command-r codeshell exaone minerva-7b", PreTokenizer((r"\p{N}", _GPT2))),
        ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
        ("llama-bpe llama3 llama-v3 falcon3 lfm2", PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)),
        ("dbrx smaug-bpe", PreTokenizer((_LLAMA3,))),
        ("qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan", PreTokenizer((_QWEN2,))),
        ("qwen35", PreTokenizer((_QWEN35,))),
        ("tekken", PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)),
        ("gpt-4o llama4", PreTokenizer((_GPT4O,))),
        ("deepseek-llm", PreTokenizer(_DEEPSEEK_LLM)),
        ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}"))),
        ("deepseek-v3", PreTokenizer((r"\p{N}{1,3}", r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+", _DEEPSEEK3))),
    )
    for name in names.split()
}

# gguf.TokenType, the types that the tokenizer looks for in the raw text before it splits.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

# llama.cpp ends a text at these whatever the metadata says, and takes them for control tokens. A file has one EOS id,
# so without them an instruct model's file would know the end of a turn or the end of a document, not both. Two things
# it does are not repeated: "</s>" is an ordinary token of Qwen's vocabulary (and HTML), and the fill-in-the-middle
# tokens (<|file_sep|> and the like) divide a text.
_END_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "<|end_of_text|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)


def tokenizer_from_gguf(file: GGUFFile) -> TokenizerAssets:
    """Makes the tokenizer that a GGUF file describes.

    Args:
        file: The opened file.

    Returns:
        The assets. Ids equal those of llama.cpp; bytes that the vocabulary cannot write are left out, as it does.

    Raises:
        ExportError: A tokenizer kind or pre-tokenizer without support, or a damaged vocabulary.
    """
    path, metadata = file.path, file.metadata
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        kind = "SentencePiece" if model == "llama" else "not byte-level BPE"
        raise ExportError(
            f"{path} has tokenizer.ggml.model {model!r} ({kind}), and only 'gpt2' (byte-level BPE) is converted: "
            "export the model from its Hugging Face folder"
        )
    pre_tokenizer = _pre_tokenizer(path, metadata.get("tokenizer.ggml.pre"))
    tokens, types = _vocabulary(path, metadata)
    end_ids = _eos_token_ids(metadata, tokens)
    types = [_CONTROL if token in _END_TEXTS else kind for token, kind in zip(tokens, types, strict=True)]
    tokenizer = _byte_level_bpe(path, pre_tokenizer, tokens, types, metadata.get("tokenizer.ggml.merges"))
    bos_id = _token_id(metadata, "bos", tokens)
    # add_eos_token is not looked at: embedding models have it, and a prompt that ends in EOS cannot be continued.
    if metadata.get("tokenizer.ggml.add_bos_token", pre_tokenizer.add_bos):
        if bos_id is None:
            raise ExportError(f"{path} asks for a BOS token and has no valid tokenizer.ggml.bos_token_id: convert it again")
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, bos_id)]
        )
    eos_id = _token_id(metadata, "eos", tokens)
    return TokenizerAssets(
        tokenizer_json=tokenizer.to_str(),
        tokens=tuple(tokens),
        chat_template=metadata.get("tokenizer.chat_template") or None,
        bos_token=None if bos_id is None else tokens[bos_id],
        eos_token=None if eos_id is None else tokens[eos_id],
        eos_token_ids=end_ids,
    )


def _pre_tokenizer(path: Path, name: str | None) -> PreTokenizer:
    if name not in PRE_TOKENIZERS:
        # llama.cpp falls back to "default" where there is no name, and warns that the text suffers; we do not guess.
        raise ExportError(
            f"{path} has tokenizer.ggml.pre {name!r}, whose splits are not known here (known: {', '.join(PRE_TOKENIZERS)}): "
            "export the model from its Hugging Face folder"
        )
    return PRE_TOKENIZERS[name]


def _vocabulary(path: Path, metadata: dict[str, Any]) -> tuple[list[str], list[int]]:
    """Token texts and token types by id."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ExportError(f"{path} has no tokenizer.ggml.tokens: convert the model again, with its vocabulary")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) < len(tokens):
        raise ExportError(f"{path} has {len(tokens)} tokens and {len(types)} token types: convert it again")
    used = [token for token in tokens if token]
    if len(set(used)) < len(used):
        twice = next(token for index, token in enumerate(used) if token in used[:index])
        raise ExportError(f"{path} has the token {twice!r} under two ids: convert it again")
    return tokens, types[: len(tokens)]


def _token_id(metadata: dict[str, Any], role: str, tokens: list[str]) -> int | None:
    """The id of a special token; None where there is none or, as in llama.cpp, where it lies outside the vocabulary."""
    token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
    return token_id if token_id is not None and token_id < len(tokens) else None


def _eos_token_ids(metadata: dict[str, Any], tokens: list[str]) -> tuple[int, ...]:
    """The ids that end a text: those the metadata names, then those llama.cpp knows by their text."""
    named = [_token_id(metadata, role, tokens) for role in ("eos", "eot", "eom")]
    by_text = {token: token_id for token_id, token in enumerate(tokens) if token in _END_TEXTS}
    # Harmony's vocabulary ends a turn with <|return|> or <|call|>; its <|end|> only ends one of the turn's messages.
    if "<|return|>" in by_text and "<|call|>" in by_text:
        by_text.pop("<|end|>", None)
    return tuple(dict.fromkeys([token_id for token_id in named if token_id is not None] + list(by_text.values())))


def _byte_level_bpe(
    path: Path, pre_tokenizer: PreTokenizer, tokens: list[str], types: list[int], merges: list[str] | None
) -> Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens) if token}
    if not merges:
        raise ExportError(f"{path} has no tokenizer.ggml.merges, which byte-level BPE needs: convert it again")
    # A merge is "left right"; neither side holds a space, since byte-level BPE writes it as another character.
    pairs = [tuple(merge.split(" ")) for merge in merges]
    for merge, pair in zip(merges, pairs, strict=True):
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
            raise ExportError(
                f"{path} has the merge {merge!r}, which is not a pair of its tokens that makes a token: convert it again"
            )
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=pre_tokenizer.ignore_merges))
    # No normalizer, not even the NFC of Qwen2's tokenizer.json: GGUF has no field for one and llama.cpp applies none, and
    # text that is not in NFC would otherwise get other ids than there, and come back changed.
    steps = [pre_tokenizers.Split(Regex(split), "isolated") for split in pre_tokenizer.splits]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    missing = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - vocabulary.keys())
    if missing:
        # Both libraries drop a byte that has no token (SmolLM2 lacks 21). In llama.cpp its neighbours stay apart; the
        # tokenizers library would merge them over the gap, so the byte is cut out before merging.
        steps.append(pre_tokenizers.Split(Regex(f"[{re.escape(''.join(missing))}]"), "removed"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if token and kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    return tokenizer
