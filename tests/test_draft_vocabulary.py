"""A draft with a vocabulary of its own: the table, its file, and the law of what is proposed through it."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.candidates import Candidates, Columns
from runtime.draft_vocabulary import DraftVocabulary, Spelling, draft_length
from runtime.errors import BundleError
from tests.fakes import FakeModel
from tests.test_acceptance import HISTORY, SMALL_RULES, World, check_law, proposals


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


# Six target tokens, five columns: columns 0, 2 and 4 stand for tokens 3, 0 and 5.
SPELLINGS = ((2,), (0, 4), (), (0,), (1, 1, 3), (4,))
VOCABULARY = DraftVocabulary(6, 5, ids(3, -1, 0, -1, 5), Spelling.of(SPELLINGS, (1,)))
CUT = DraftVocabulary(6, 6, ids(4, 0, 1))


def arrays(vocabulary: DraftVocabulary) -> list[list[int]]:
    spelling = [] if vocabulary.spelling is None else dataclasses.astuple(vocabulary.spelling)
    return [
        [vocabulary.target_vocab_size, vocabulary.num_input_ids],
        *(part.tolist() for part in (vocabulary.to_target, *spelling)),
    ]


# --- logits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocabulary", "places"), [(VOCABULARY, {3: 0, 0: 2, 5: 4}), (CUT, {4: 0, 0: 1, 1: 2})])
def test_a_logit_goes_to_the_token_its_column_stands_for(vocabulary: DraftVocabulary, places: dict[int, int]) -> None:
    logits = np.arange(10, 10 + 2 * len(vocabulary.to_target), dtype=np.float32).reshape(2, -1)
    found = vocabulary.translate(Candidates.whole(logits))
    assert found.columns.tokens(np.arange(found.columns.count)) == sorted(places)
    assert found.rows.tolist() == [[own[places[token]] for token in sorted(places)] for own in logits]
    if -1 not in vocabulary.to_target:  # only of such a draft, some columns alone
        some = vocabulary.translate(Candidates(logits[:, [0, 2]], Columns.of(np.array([0, 2]))))
        tokens = sorted(vocabulary.to_target[[0, 2]].tolist())
        assert some.columns.tokens(np.arange(2)) == tokens
        assert some.rows.tolist() == [[own[places[token]] for token in tokens] for own in logits]


class TranslatedWorld(World):
    """A draft whose rows of a few columns are drawn once for each text, and stand for some of the target's tokens."""

    def __init__(self, rule: dict[str, object], to_target: tuple[int, ...], vocab_size: int) -> None:
        super().__init__(rule, vocab_size)
        self._vocabulary = DraftVocabulary(vocab_size, len(to_target), ids(*to_target))

    def logits(self, model: str, text: tuple[int, ...]) -> np.ndarray:
        if (model, text) not in self._logits and model == "draft":
            own = 1.5 * np.random.default_rng([7, *text]).standard_normal((1, len(self._vocabulary.to_target)))
            translated = self._vocabulary.translate(Candidates.whole(own.astype(np.float32)))
            self._logits[model, text] = translated.over(Columns(self.vocab_size), -np.inf)
        return super().logits(model, text)


@pytest.mark.parametrize("to_target", [(3, 0, -1, 1), (2, -1, 0), (4, 3, 2, 1, 0)], ids=str)
@pytest.mark.parametrize("name", ["plain", "penalty", "filters", "bad-words", "presence-frequency"])
def test_the_law_is_the_targets_whatever_the_draft_has_in_common_with_it(name: str, to_target: tuple[int, ...]) -> None:
    world = TranslatedWorld(SMALL_RULES[name], to_target, 5)
    drawn = list(proposals(world, HISTORY, 2))
    check_law(world, HISTORY, 2, iter(drawn))
    assert {token for _, proposal in drawn for token in proposal.tokens} <= set(to_target)


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "read", "ends"),
    [
        ([0], [2], [1]),
        ([2], [], [0]),
        ([2, 2, 4, 2, 1], [1, 1, 3, 0, 4], [0, 0, 3, 3, 5]),
        ([5, 4, 3], [4, 1, 1, 3, 0], [1, 4, 5]),
    ],
)
def test_tokens_are_read_as_their_spellings(tokens: list[int], read: list[int], ends: list[int]) -> None:
    found, found_ends = VOCABULARY.spell(tokens)
    assert (found.tolist(), found_ends.tolist()) == (read, ends)


def test_a_draft_with_a_cut_head_reads_the_targets_tokens() -> None:
    found, ends = CUT.spell([5, 0, 5])
    assert (found.tolist(), ends.tolist()) == ([5, 0, 5], [1, 2, 3])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 8), max_size=4), min_size=1, max_size=9), st.data())
def test_any_table_reads_any_text(spellings: list[list[int]], data: st.DataObject) -> None:
    text = data.draw(st.lists(st.integers(0, len(spellings) - 1), max_size=20))
    vocabulary = DraftVocabulary(len(spellings), 9, ids(0), Spelling.of(spellings))
    found, ends = vocabulary.spell(text)
    assert found.tolist() == [token for place in text for token in spellings[place]]
    assert ends.tolist() == [sum(len(spellings[token]) for token in text[: place + 1]) for place in range(len(text))]


@pytest.mark.parametrize(
    ("spellings", "prefix", "length"),
    [
        ([(0,), (1,)], (), 100),
        ([(0,), (1,), ()], (), 100),  # never less than the text has
        ([(0, 1), (1,)], (), 150),
        ([(0, 1), (1,)], (3,), 151),
        ([(0,) * 5, (1,)], (), 200),
    ],
)
def test_room_is_kept_for_the_mean_spelling_and_two_ids_a_token_at_most(
    spellings: list[tuple[int, ...]], prefix: tuple[int, ...], length: int
) -> None:
    vocabulary = DraftVocabulary(len(spellings), 9, ids(0), Spelling.of(spellings, prefix))
    assert draft_length(100, vocabulary) == length


def test_a_draft_that_reads_the_targets_tokens_needs_their_room() -> None:
    assert draft_length(100, None) == draft_length(100, CUT) == 100


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [VOCABULARY, CUT], ids=["spelled", "cut"])
def test_a_file_holds_the_whole_table_and_nothing_of_the_day(vocabulary: DraftVocabulary, tmp_path: Path) -> None:
    vocabulary.save(tmp_path / "one.npz")
    vocabulary.save(tmp_path / "two.npz")
    assert arrays(DraftVocabulary.load(tmp_path / "one.npz")) == arrays(vocabulary)
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()


CONTRADICTIONS = {
    "no column stands for a token": ({"to_target": ids(-1, -1)}, "its columns do not stand for tokens from 0 to 5"),
    "a token beyond the target": ({"to_target": ids(0, 6)}, "its columns do not stand for tokens from 0 to 5"),
    "a token below -1": ({"to_target": ids(0, -2)}, "its columns do not stand for tokens from 0 to 5"),
    "a token twice": ({"to_target": ids(2, -1, 2)}, "two columns stand for one token"),
    "more columns than ids": ({"num_input_ids": np.int32(4), "spelling_ids": ids(2, 0, 3, 0, 1, 1, 3, 3)}, "it proposes 5"),
    "a negative number of ids": ({"num_input_ids": np.int32(-1)}, "it proposes 5 tokens and reads -1"),
    "a token without a spelling": ({"target_vocab_size": np.int32(7)}, "6 tokens are spelled where the target has 7"),
    "spellings from 1 on": ({"spelling_offsets": ids(1, 1, 3, 3, 4, 7, 8)}, "do not follow each other from 0 to 8"),
    "spellings beyond the ids": ({"spelling_offsets": ids(0, 1, 3, 3, 4, 7, 9)}, "do not follow each other from 0 to 8"),
    "spellings backwards": ({"spelling_offsets": ids(0, 3, 1, 3, 4, 7, 8)}, "do not follow each other from 0 to 8"),
    "no offsets": ({"spelling_offsets": ids()}, "-1 tokens are spelled"),
    "an id the draft does not read": ({"spelling_ids": ids(2, 0, 5, 0, 1, 1, 3, 4)}, "an id that is not from 0 to 4"),
    "an id below 0": ({"spelling_ids": ids(2, 0, 4, 0, -1, 1, 3, 4)}, "an id that is not from 0 to 4"),
    "a prefix the draft does not read": ({"spelling_prefix": ids(5)}, "an id that is not from 0 to 4"),
    "fractions": ({"to_target": np.ones(5, np.float32)}, "1 dimensions of float32 where 1 of int32"),
    "a matrix": ({"to_target": np.ones((1, 5), np.int32)}, "2 dimensions of int32 where 1 of int32"),
    "objects": ({"to_target": np.array([None, {}])}, "it is no archive of arrays"),
    "no columns": ({"to_target": None}, "to_target is not a file in the archive"),
    "half a spelling": ({"spelling_ids": None}, "spelling_ids is not a file in the archive"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_file_that_contradicts_itself_is_refused(name: str, tmp_path: Path) -> None:
    changes, problem = CONTRADICTIONS[name]
    file = tmp_path / "vocabulary.npz"
    VOCABULARY.save(file)
    with np.load(file) as saved:
        changed = {key: value for key, value in (dict(saved) | changes).items() if value is not None}
    np.savez(file, **changed)
    with pytest.raises(
        BundleError, match=r"^The draft's vocabulary in .* is damaged \(.*\): export the bundle again\.$"
    ) as caught:
        DraftVocabulary.load(file)
    assert problem in str(caught.value)


def test_a_draft_reads_what_it_proposes() -> None:
    """Columns of a cut head stand for ids of the target, which the draft is fed next."""
    assert DraftVocabulary(6, 5, ids(4, 0, 1)).largest_input_id == 4
    with pytest.raises(ValueError, match="a column stands for token 4, and ids are read to 3"):
        DraftVocabulary(6, 4, ids(4, 0, 1))


@pytest.mark.parametrize(("vocabulary", "largest"), [(VOCABULARY, 4), (CUT, 5), (DraftVocabulary(6, 9, ids(4, 0)), 5)])
def test_the_largest_id_that_is_read(vocabulary: DraftVocabulary, largest: int) -> None:
    assert vocabulary.largest_input_id == largest
    if vocabulary.spelling is not None:
        assert max(vocabulary.spell(range(6))[0]) <= largest


@pytest.mark.parametrize("contents", [b"", b"PK", b"\x80\x04.", b"not a file of numpy"], ids=["empty", "zip", "pickle", "text"])
def test_a_file_of_another_kind_is_refused(contents: bytes, tmp_path: Path) -> None:
    (tmp_path / "vocabulary.npz").write_bytes(contents)
    with pytest.raises(BundleError, match=r"is damaged .*: export the bundle again"):
        DraftVocabulary.load(tmp_path / "vocabulary.npz")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "vocabulary.npz"
    VOCABULARY.save(file)
    whole = file.read_bytes()
    for length in range(0, len(whole), 37):
        file.write_bytes(whole[:length])
        with pytest.raises(BundleError, match="is damaged"):
            DraftVocabulary.load(file)


@pytest.mark.parametrize(("target", "draft"), [(7, 5), (6, 4), (5, 6)])
def test_the_vocabulary_of_other_models_is_refused(target: int, draft: int) -> None:
    VOCABULARY.check_pair(FakeModel(6).spec, FakeModel(5).spec)
    with pytest.raises(BundleError, match=f"with 6 and 5 logits a row, and target and draft give {target} and {draft}: "):
        VOCABULARY.check_pair(FakeModel(target).spec, FakeModel(draft).spec)


def test_what_can_be_proposed_is_described() -> None:
    assert VOCABULARY.description == "3 of 6 target tokens; reads its own tokens"
    assert CUT.description == "3 of 6 target tokens; reads the target's tokens"
