"""Two models speculate together as far as their tokens stand for the same bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from export.errors import ExportError
from export.pair import SharedVocabulary, compare_vocabularies
from export.source import Source, resolve_source
from export.tokenizer import TokenizerAssets, token_table, tokenizer_from_folder


@pytest.fixture(scope="module")
def assets(tiny_target: Path) -> TokenizerAssets:
    return tokenizer_from_folder(tiny_target)


@pytest.fixture(scope="module")
def sources(tiny_target: Path, tiny_draft: Path) -> tuple[Source, Source]:
    """Under short names, which the sentences must hold."""
    target, draft = resolve_source(str(tiny_target)), resolve_source(str(tiny_draft))
    return dataclasses.replace(target, name="big"), dataclasses.replace(draft, name="small")


SAMPLE = "The sea was blue and the boat was old."


def compare(
    sources: tuple[Source, Source], target: TokenizerAssets, draft: TokenizerAssets, sample: str = SAMPLE
) -> SharedVocabulary | None:
    return compare_vocabularies(sources[0], target, sources[1], draft, sample)


def assets_of(tokenizer: Tokenizer, **fields: object) -> TokenizerAssets:
    table = token_table(tokenizer.get_vocab(with_added_tokens=True))
    return TokenizerAssets(tokenizer.to_str(), table, **{"chat_template": None, "eos_token_ids": ()} | ROLELESS | fields)


ROLELESS = {"bos_token": None, "eos_token": None}


def words(*names: str, special: Sequence[str] = (), begins_with: str | None = None, **fields: object) -> TokenizerAssets:
    """A tokenizer of whole words and special tokens."""
    unknown = next(name for name in names if name.startswith("unk"))
    tokenizer = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    if begins_with is not None:
        pair = (begins_with, tokenizer.token_to_id(begins_with))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{begins_with} $A", special_tokens=[pair])
    return assets_of(tokenizer, **fields)


def named(assets: TokenizerAssets, *names: str) -> list[int]:
    return [assets.tokens.index(name) for name in names]


# --- the same vocabulary ----------------------------------------------------------------------------------------------


def test_equal_tables_share_all(sources, assets):
    assert compare(sources, assets, assets) is None


def test_other_things_than_the_table_may_differ(sources, assets):
    other = dataclasses.replace(assets, chat_template=None, eos_token_ids=(5,), tokenizer_json="{}")
    assert compare(sources, assets, other) is None


def test_padding_of_the_vocabulary_is_ignored(tiny_target, tiny_draft, copy_checkpoint, tmp_path):
    """A draft whose matrices have rows for 32 tokens that no table has."""
    import torch
    from safetensors.torch import load_file, save_file

    from export.bundle import export_bundle
    from runtime import Generator, SamplingParams

    padded = copy_checkpoint(tiny_draft, vocab_size=544)
    weights = load_file(padded / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    # The rows beyond the table are loud: whoever lets them be chosen, chooses them.
    weights["model.embed_tokens.weight"] = torch.cat([embedding, 10 * embedding[:32]])
    save_file(weights, padded / "model.safetensors", {"format": "pt"})
    out = tmp_path / "bundle"
    bundle = export_bundle(str(tiny_target), str(padded), out, draft_precision="fp32")
    assert bundle.draft is not None
    assert (bundle.target.vocab_size, bundle.draft.vocab_size, bundle.tokenizer.vocab_size) == (512, 544, 512)
    generator = Generator.from_bundle(out)
    params = SamplingParams(max_new_tokens=24)
    speculative = generator.generate("The sea", params)
    assert speculative.token_ids == generator.generate("The sea", params, drafter="off").token_ids


# --- another vocabulary -----------------------------------------------------------------------------------------------

TARGET = words("unk", "the", "sea", "was", "blue", "and", "boat", special=("<s>", "<|user|>", "<end>"))
DRAFT = words("boat", "unk", "ship", "and", "the", "was", special=("<|user|>", "<begin>"))


def test_tokens_of_the_same_text_are_shared_in_whatever_order(sources):
    shared = compare(sources, TARGET, DRAFT, "the boat was the ship and sea")
    assert shared is not None
    boat, unk, the, was, and_, user = named(TARGET, "boat", "unk", "the", "was", "and", "<|user|>")
    assert shared.to_target == (boat, unk, -1, and_, the, was, user, -1)
    assert shared.num_ordinary == 7
    assert shared.num_shared == 5
    # "ship" is unknown to the target, and unknown words are a token of both.
    assert shared.text_share == pytest.approx(6 / 7)
    assert shared.description == "5 of the target's 7 tokens, 86% of a sample text's tokens"


def test_a_token_is_read_as_its_counterpart_or_as_its_text_or_not_at_all(sources):
    shared = compare(sources, TARGET, DRAFT, "the boat was and")
    assert shared is not None
    read = dict(zip(TARGET.tokens, shared.spellings, strict=True))
    for name in ("the", "boat", "<|user|>"):
        assert read[name] == (DRAFT.tokens.index(name),)
    assert read["sea"] == (DRAFT.tokens.index("unk"),)  # as the draft encodes it
    assert read["<s>"] == read["<end>"] == ()
    assert shared.prefix == ()


def test_special_tokens_are_not_the_text_they_are_written_with(sources):
    target = words("unk", "the", "<s>", "<|user|>", special=("<end>",))
    draft = words("unk", "the", "<end>", special=("<s>", "<|user|>"))
    shared = compare(sources, target, draft, "the the")
    assert shared is not None
    assert [token for token in shared.to_target if token >= 0] == named(target, "unk", "the")


@pytest.mark.parametrize(
    ("target_roles", "draft_roles", "pairs"),
    [
        ({"bos_token": "<s>"}, {"bos_token": "<begin>"}, {"<s>": "<begin>"}),
        ({"eos_token": "<end>"}, {"eos_token": "<begin>"}, {"<end>": "<begin>"}),
        ({"bos_token": "<s>"}, {"bos_token": None}, {}),
        ({"bos_token": None}, {"bos_token": "<begin>"}, {}),
        ({"bos_token": "<s>"}, {"bos_token": "not a token"}, {}),
        # Both have it, for whatever purpose: the same text comes before the same role.
        ({"bos_token": "<s>"}, {"bos_token": "<|user|>"}, {}),
        ({"bos_token": "<|user|>"}, {"bos_token": "<begin>"}, {}),
        # One token begins and ends the draft's texts: proposing it means the end, reading it either.
        (
            {"bos_token": "<s>", "eos_token": "<end>"},
            {"bos_token": "<begin>", "eos_token": "<begin>"},
            {"<end>": "<begin>"},
        ),
    ],
)
def test_beginning_and_end_are_shared_where_they_are_written_differently(sources, target_roles, draft_roles, pairs):
    target, draft = dataclasses.replace(TARGET, **target_roles), dataclasses.replace(DRAFT, **draft_roles)
    shared = compare(sources, target, draft, "the boat was and")
    assert shared is not None
    found = {
        target.tokens[token]: draft.tokens[column]
        for column, token in enumerate(shared.to_target)
        if token >= 0 and target.tokens[token] != draft.tokens[column]
    }
    assert found == pairs
    both_read = {"<s>": "<begin>"} if len(target_roles) == 2 else {}
    for name in ("<s>", "<end>", "<|user|>"):
        other = (pairs | both_read).get(name, name)
        read = (draft.tokens.index(other),) if other in draft.tokens else ()
        assert shared.spellings[target.tokens.index(name)] == read


@pytest.mark.parametrize(
    ("target_begins", "draft_begins", "draft_bos", "prefix"),
    [
        (None, "<begin>", "<begin>", ("<begin>",)),
        ("<s>", "<begin>", "<begin>", ()),  # the target's own is read as the draft's
        ("<|user|>", "<begin>", "<begin>", ("<begin>",)),
        (None, None, "<begin>", ()),
        (None, "<begin>", None, ()),  # not known to be a beginning of text
    ],
)
def test_a_draft_reads_its_beginning_of_text_where_the_targets_texts_have_none(
    sources, target_begins, draft_begins, draft_bos, prefix
):
    names = ("unk", "the", "sea")
    bos = "<s>"
    target = words(*names, special=(bos, "<|user|>"), begins_with=target_begins, bos_token=bos)
    draft = words(*names, special=("<begin>",), begins_with=draft_begins, bos_token=draft_bos)
    shared = compare(sources, target, draft, "the sea")
    assert shared is not None
    assert shared.prefix == tuple(named(draft, *prefix))


@pytest.mark.parametrize("longer", ["target", "draft"])
def test_one_token_more_is_no_hindrance(sources, longer):
    short, long = words("unk", "the", "sea"), words("unk", "the", "sea", "more")
    target, draft = (long, short) if longer == "target" else (short, long)
    shared = compare(sources, target, draft, "the sea")
    assert shared is not None
    assert (shared.to_target, shared.text_share) == ((0, 1, 2) if longer == "target" else (0, 1, 2, -1), 1.0)


@pytest.mark.parametrize(("sample", "share"), [("the sea was blue", "25%"), ("the boat sea blue blue", "40%"), ("", "0%")])
def test_a_draft_that_has_less_than_half_of_a_text_is_refused(sources, sample, share):
    with pytest.raises(ExportError) as caught:
        compare(sources, TARGET, words("unknown", "the", "boat"), sample)
    sentence = str(caught.value)
    assert sentence.startswith(
        f"small can propose too little of what big says, 2 of the target's 7 tokens, {share} of a sample"
    )
    assert "at least 50% of these are needed" in sentence
    assert "--draft self" in sentence


def test_a_draft_that_has_half_of_a_text_is_taken(sources):
    shared = compare(sources, TARGET, words("unknown", "the", "boat"), "the boat was blue")
    assert shared is not None
    assert shared.text_share == 0.5


# --- the table for the runtime ----------------------------------------------------------------------------------------


def test_padding_stands_for_nothing_and_is_not_read(sources):
    shared = compare(sources, TARGET, DRAFT, "the boat was and")
    assert shared is not None
    vocabulary = shared.draft_vocabulary(len(TARGET.tokens) + 3, len(DRAFT.tokens) + 2)
    assert (vocabulary.target_vocab_size, vocabulary.num_input_ids) == (len(TARGET.tokens) + 3, len(DRAFT.tokens) + 2)
    assert vocabulary.to_target.tolist() == [*shared.to_target, -1, -1]
    assert vocabulary.spelling is not None
    text = [*range(len(TARGET.tokens)), len(TARGET.tokens) + 2]
    assert vocabulary.spell(text)[0].tolist() == [token for spelling in shared.spellings for token in spelling]
    assert vocabulary.spelling.prefix.dtype == vocabulary.to_target.dtype == np.int32


def test_a_tokenizer_that_reaches_beyond_the_draft_is_refused(sources):
    shared = compare(sources, TARGET, DRAFT, "the boat was and")
    assert shared is not None
    most = max(token for spelling in shared.spellings for token in spelling)
    shared.draft_vocabulary(len(TARGET.tokens), most + 1)  # a token that is neither shared nor read may lie beyond
    with pytest.raises(ExportError, match=f"has the token {most}, and the draft knows {most} tokens"):
        shared.draft_vocabulary(len(TARGET.tokens), most)
