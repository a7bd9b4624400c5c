"""Fields of a manifest that contradict each other: each contradiction is one sentence with the field and what is expected."""

from dataclasses import replace
from pathlib import Path

import pytest

from runtime.consistency import check_consistency
from runtime.contract import Bundle, DecoderSpec, FileRecord, GraphNames, TokenizerSpec
from runtime.errors import BundleError
from tests.fakes import FakeModel

FILE = FileRecord("file", 1, "")
OPEN = replace(FakeModel(context_length=64, spare_slots=1).spec, lowering="gqa")
FIXED = replace(OPEN, lowering="static", cache_capacity=80, names=GraphNames(attention_mask=None, past_length="past_length"))


def bundle_of(target: DecoderSpec, draft: DecoderSpec | None = None, eos: tuple[int, ...] = (0, 15)) -> Bundle:
    return Bundle(Path("bundle"), TokenizerSpec(FILE, None, None, None, eos, 16), target, draft, "tests")


def refused(bundle: Bundle, sentence: str) -> None:
    with pytest.raises(BundleError, match=rf"^bundle\.json: {sentence}\.$"):
        check_consistency(bundle, "bundle.json")


@pytest.mark.parametrize("spec", [OPEN, replace(OPEN, lowering="growing"), FIXED, replace(FIXED, lowering="primitive")])
def test_what_fits_passes(spec: DecoderSpec) -> None:
    check_consistency(bundle_of(spec, spec), "bundle.json")


CONTRADICTIONS = {
    "open, told a length": (
        replace(OPEN, names=GraphNames(past_length="seen")),
        "names: past_length is 'seen'; null is expected with the lowering 'gqa'",
    ),
    "open, told nothing": (
        replace(OPEN, lowering="growing", names=GraphNames(attention_mask=None)),
        "names: attention_mask is null; a name is expected with the lowering 'growing'",
    ),
    "one name for two": (
        replace(OPEN, names=GraphNames(position_ids="input_ids")),
        "names: input_ids and position_ids are both 'input_ids'; a name for each is expected",
    ),
    "one name for two caches": (
        replace(OPEN, names=GraphNames(past_key="past.{layer}", logits="past.0")),
        "names: past_key and logits are both 'past\\.0'; a name for each is expected",
    ),
    "open, of a size": (
        replace(OPEN, cache_capacity=10**9),
        "cache_capacity is 1000000000; null is expected with the lowering 'gqa'",
    ),
    "fixed, of no size": (
        replace(FIXED, cache_capacity=None),
        "cache_capacity is null; a number is expected with the lowering 'static'",
    ),
    "fixed, told nothing": (
        replace(FIXED, names=GraphNames(attention_mask=None)),
        "names: past_length is null; a name is expected with the lowering 'static'",
    ),
    "fixed, told by a mask": (
        replace(FIXED, lowering="primitive", names=replace(FIXED.names, attention_mask="mask")),
        "names: attention_mask is 'mask'; null is expected with the lowering 'primitive'",
    ),
    "too small for a pass": (
        replace(FIXED, min_rows=5, spare_slots=2, cache_capacity=69),
        "cache_capacity is 69; at least 70 is expected, for a context_length of 64 and a pass's padding",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_decoder_that_contradicts_itself_is_refused(name: str) -> None:
    spec, sentence = CONTRADICTIONS[name]
    refused(bundle_of(spec), f"target: {sentence}")
    refused(bundle_of(OPEN, spec), f"draft: {sentence}")
    refused(bundle_of(replace(OPEN, other_forms=(FIXED, spec))), f"target: {sentence}")


def test_a_cache_that_just_holds_the_context_passes() -> None:
    check_consistency(bundle_of(replace(FIXED, min_rows=5, spare_slots=2, cache_capacity=70)), "bundle.json")


def test_an_end_of_text_that_the_target_cannot_say_is_refused() -> None:
    refused(bundle_of(OPEN, eos=(3, 16)), "tokenizer: eos_token_ids holds 16; the target's ids are 0 to 15")


def test_a_vocabulary_of_no_draft_is_refused() -> None:
    bundle = replace(bundle_of(OPEN), draft_vocabulary=FILE)
    with pytest.raises(BundleError, match=r"^bundle\.json names a draft_vocabulary and no draft"):
        check_consistency(bundle, "bundle.json")
