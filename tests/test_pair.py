"""What the texts of a generator share: which tokens a prompt is, what ends a text, how its tokens are chosen."""

from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from runtime.acceptance import CoupledRule, GreedyRule, Proposal, RejectionRule
from runtime.candidates import Candidates
from runtime.errors import PromptError
from runtime.noise import ExponentialNoise
from runtime.pair import DRAFTERS, MAX_NUM_DRAFT_TOKENS, DecoderPair
from runtime.sampling_params import SamplingParams
from runtime.tokenizer import Tokenizer
from tests.fakes import CHAT_TEMPLATE, FakeModel, fake_tokenizer


def pair(
    vocab_size: int = 62, *, draft: bool = True, drafter: str = "off", num_draft_tokens: int = 4, eos: tuple[int, ...] = (5,)
) -> DecoderPair:
    tokenizer = fake_tokenizer(vocab_size, chat_template=CHAT_TEMPLATE)
    draft_model = FakeModel(vocab_size, seed=2) if draft else None
    return DecoderPair(FakeModel(vocab_size, seed=1), draft_model, tokenizer, frozenset(eos), drafter, num_draft_tokens)


# --- drafting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("number", [0, 1, MAX_NUM_DRAFT_TOKENS, np.int32(3)])
def test_every_way_to_draft_is_taken(drafter: str, number: int) -> None:
    pair(drafter=drafter, num_draft_tokens=number)
    pair().check_drafting(drafter, number)


@pytest.mark.parametrize(
    ("drafter", "number", "sentence"),
    [
        ("Model", 4, "The drafter 'Model' is unknown; there are auto, hybrid, model, lookup, off"),
        (None, 4, "The drafter None is unknown"),
        (["off"], 4, "is unknown"),
        ("model", 4, "needs a draft model, and this generator was loaded without one"),
        ("off", -1, "num_draft_tokens is -1; a whole number from 0 to 64"),
        ("off", 65, "num_draft_tokens is 65"),
        ("lookup", 2.0, "num_draft_tokens is 2.0"),
        ("lookup", True, "num_draft_tokens is True"),
        ("lookup", "4", "num_draft_tokens is '4'"),
        ("hybrid", 4, "The drafter 'hybrid' needs a draft model"),
    ],
)
def test_what_cannot_propose_is_refused(drafter: object, number: object, sentence: str) -> None:
    for call in (
        lambda: pair(draft=False, drafter=drafter, num_draft_tokens=number),
        lambda: pair(draft=False).check_drafting(drafter, number),
    ):
        with pytest.raises(ValueError, match=sentence) as caught:
            call()
        assert "\n" not in str(caught.value)


# --- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, lambda ids: np.array(ids, np.uint16), lambda ids: [np.int64(i) for i in ids]]
)
def test_ids_are_taken_as_they_are(kind: Callable[[list[int]], object]) -> None:
    found = pair().prompt_tokens(kind([0, 61, 3]))
    assert found == [0, 61, 3]
    assert {type(token) for token in found} == {int}


def test_strings_and_messages_are_tokenised() -> None:
    assert pair().prompt_tokens("ab") == [0, 1]
    assert pair().prompt_tokens([{"role": "user", "content": "a"}]) == [60, 0, 61]
    assert pair().prompt_tokens(({"role": "user", "content": "a"},)) == [60, 0, 61]


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("", "The prompt is empty"),
        ([], "The prompt is empty"),
        (np.array([], np.int64), "The prompt is empty"),
        ([62], "The prompt holds 62; token ids from 0 to 61 are expected"),
        ([1, -1], "The prompt holds -1"),
        ([1, True], "The prompt holds True"),
        ([1.0], r"The prompt holds 1\.0"),
        ([1, "a"], "The prompt holds 'a'"),
        (np.array([0.5]), r"The prompt holds .*0\.5"),
        (np.ones((1, 2), np.int64), "The prompt is array"),
        (np.array(3), r"The prompt is array\(3\)"),
        (b"ab", "The prompt is b'ab'; a string, a list of messages or a list of token ids is expected"),
        (bytearray(b"ab"), "The prompt is bytearray"),
        (5, "The prompt is 5"),
        (None, "The prompt is None"),
        ({"role": "user", "content": "a"}, "The prompt is {"),
        pytest.param(iter([1, 2]), "The prompt is <", id="iterator"),
        ({1, 2}, "The prompt is {1, 2}"),
        ([{"role": "user"}], "Message 0 has no 'content'"),
        ([{"role": "user", "content": "a"}, 5], "Message 1 is a int"),
        ([{"role": "user", "content": "!"}], "no exclamations"),
        ("a\ud800", "half of a surrogate pair"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_is_no_prompt_is_refused(prompt: object, sentence: str) -> None:
    with pytest.raises(PromptError, match=sentence) as caught:
        pair().prompt_tokens(prompt)
    assert "\n" not in str(caught.value)


# --- what ends a text -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "eos", "stop"),
    [
        (SamplingParams(), {5, 6}, set()),
        (SamplingParams(stop_token_ids=[7, 5]), {5, 6}, {5, 7}),
        (SamplingParams(ignore_eos=True), set(), set()),
        (SamplingParams(ignore_eos=True, stop_token_ids=[6]), set(), {6}),
    ],
)
def test_tokens_that_end_a_text(params: SamplingParams, eos: set[int], stop: set[int]) -> None:
    assert pair(eos=(5, 6)).end_token_ids(params) == (eos, stop)


def test_before_the_fewest_tokens_nothing_ends_a_text() -> None:
    params = SamplingParams(min_new_tokens=2, stop_token_ids=[7])
    logits = np.zeros((1, 62), np.float32)
    logits[0, [5, 7, 9]] = 3, 2, 1
    rule = pair().acceptance_rule(params, prompt_length=3)
    for new, best in ((0, 9), (1, 9), (2, 5)):
        assert rule.judge(Proposal(), Candidates.whole(logits), [1, 2, 3, 4, 4][: 3 + new]).next_token == best
    ignoring = pair().acceptance_rule(SamplingParams(min_new_tokens=2, ignore_eos=True), prompt_length=3)
    assert ignoring.judge(Proposal(), Candidates.whole(logits), [1, 2, 3]).next_token == 5


# --- how tokens are chosen --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        (SamplingParams(), GreedyRule),
        (SamplingParams(acceptance="coupled"), GreedyRule),
        (SamplingParams(temperature=0.5), RejectionRule),
        (SamplingParams(temperature=0.5, acceptance="coupled"), CoupledRule),
    ],
)
def test_the_rule_of_a_text(params: SamplingParams, kind: type) -> None:
    rule = pair().acceptance_rule(params, 3)
    assert type(rule) is kind
    # Only where draws are used up, a round's place in the text matters.
    assert rule.depends_on_rounds == (kind is RejectionRule)


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_a_seed_repeats_the_draws_and_none_is_fresh(acceptance: str) -> None:
    def tokens(seed: int | None) -> list[int]:
        rule = pair().acceptance_rule(SamplingParams(temperature=3.0, seed=seed, acceptance=acceptance), 1)
        return [
            rule.judge(Proposal(), Candidates.whole(np.zeros((1, 62), np.float32)), [0] * place).next_token
            for place in range(1, 9)
        ]

    assert tokens(3) == tokens(3)
    assert len({tuple(tokens(seed)) for seed in (3, 4, None, None)}) == 4


def test_the_noise_is_that_of_the_seed_and_the_place() -> None:
    rule = pair().acceptance_rule(SamplingParams(temperature=1.0, seed=8, acceptance="coupled"), 3)
    found = rule.judge(Proposal(), Candidates.whole(np.zeros((1, 62), np.float32)), [0] * 7).next_token
    assert found == ExponentialNoise(8).row(7, 62).argmin()


@pytest.mark.parametrize(
    ("params", "behind_c", "behind_spaced_c"),
    [
        (SamplingParams(bad_words=["a"]), {0, 10}, {0, 10}),
        (SamplingParams(bad_words=[" a"]), {10}, {10}),
        (SamplingParams(bad_words=[[3], [14]]), {3, 14}, {3, 14}),
        (SamplingParams(bad_words=["ba"]), set(), set()),
        (SamplingParams(bad_words=["ca"]), {0}, {0}),
        (SamplingParams(bad_words=[" ca"]), set(), {0}),
        (SamplingParams(bad_words=["c a", [2, 9]]), {9, 10}, {10}),
    ],
)
def test_bad_words_are_runs_of_tokens(params: SamplingParams, behind_c: set[int], behind_spaced_c: set[int]) -> None:
    # Tokens 0 to 9 are letters, 10 to 19 the same behind a space.
    names = [*"abcdefghij", *(f" {letter}" for letter in "abcdefghij")]
    raw = RawTokenizer(models.WordLevel({name: token for token, name in enumerate(names)}))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(" ?."), "isolated")
    letters = DecoderPair(FakeModel(20), None, Tokenizer(raw.to_str()), frozenset(), "off", 0)
    rule = letters.acceptance_rule(params, 1)
    for before, forbidden in ((2, behind_c), (12, behind_spaced_c)):
        for token in range(20):
            logits = np.eye(20, dtype=np.float32)[token : token + 1]
            chosen = rule.judge(Proposal(), Candidates.whole(logits), [before]).next_token
            assert (chosen == token) == (token not in forbidden)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(logit_bias={62: 1}), SamplingParams(stop_token_ids=[3, 62]), SamplingParams(bad_words=[[1, 62, 1]])],
    ids=["logit_bias", "stop_token_ids", "bad_words"],
)
def test_tokens_that_the_target_does_not_have_are_named(params: SamplingParams) -> None:
    with pytest.raises(ValueError, match=r"\(logit_bias, stop_token_ids, bad_words\) name token 62; the target's are 0 to 61"):
        pair().acceptance_rule(params, 1)


def test_a_bad_word_of_white_space_does_not_forbid_the_space() -> None:
    raw = RawTokenizer(models.WordLevel({name: token for token, name in enumerate(["a", "\n", " ", "b"])}))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    letters = DecoderPair(FakeModel(4), None, Tokenizer(raw.to_str()), frozenset(), "off", 0)
    rule = letters.acceptance_rule(SamplingParams(bad_words=["\n"]), 1)
    for token, said in enumerate((0, 0, 2, 3)):
        assert rule.judge(Proposal(), Candidates.whole(np.eye(4, dtype=np.float32)[token : token + 1]), [0]).next_token == said
