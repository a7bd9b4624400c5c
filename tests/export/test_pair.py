"""Two models speculate together when the same text stands behind the same id."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from export.errors import ExportError
from export.pair import check_pair
from export.source import Source, resolve_source
from export.tokenizer import TokenizerAssets, tokenizer_from_folder


@pytest.fixture(scope="module")
def assets(tiny_target: Path) -> TokenizerAssets:
    return tokenizer_from_folder(tiny_target)


@pytest.fixture(scope="module")
def sources(tiny_target: Path, tiny_draft: Path) -> tuple[Source, Source]:
    """Under short names, which the sentences must hold."""
    target, draft = resolve_source(str(tiny_target)), resolve_source(str(tiny_draft))
    return dataclasses.replace(target, name="big"), dataclasses.replace(draft, name="small")


def check(sources: tuple[Source, Source], target: TokenizerAssets, draft: TokenizerAssets) -> None:
    check_pair(sources[0], target, sources[1], draft)


def with_tokens(assets: TokenizerAssets, tokens: tuple[str, ...]) -> TokenizerAssets:
    return dataclasses.replace(assets, tokens=tokens)


def test_equal_tables_are_taken(sources, assets):
    check(sources, assets, assets)


def test_other_things_than_the_table_may_differ(sources, assets):
    check(sources, assets, dataclasses.replace(assets, chat_template=None, eos_token_ids=(5,), tokenizer_json="{}"))


def test_first_id_that_differs_is_named(sources, assets):
    tokens = list(assets.tokens)
    tokens[300], tokens[301] = tokens[301], tokens[300]
    tokens[400] = "other"
    with pytest.raises(ExportError) as caught:
        check(sources, assets, with_tokens(assets, tuple(tokens)))
    sentence = str(caught.value)
    assert "big and small do not share a vocabulary" in sentence
    assert f"token 300 is {assets.tokens[300]!r} in the target and {assets.tokens[301]!r} in the draft" in sentence
    assert "--draft self" in sentence


@pytest.mark.parametrize("longer", ["target", "draft"])
def test_other_length_is_refused(sources, assets, longer):
    more = with_tokens(assets, (*assets.tokens, "<one more>"))
    tables = (more, assets) if longer == "target" else (assets, more)
    lengths = "513 tokens and the draft 512" if longer == "target" else "512 tokens and the draft 513"
    with pytest.raises(ExportError, match=f"the target has {lengths}"):
        check(sources, *tables)


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
