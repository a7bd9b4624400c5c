"""A draft whose vocabulary is not the target's: which tokens its logits stand for, and how it reads the target's.

Two cases, one table. A head that was cut to the most frequent tokens reads the target's ids and gives fewer columns. A model
with another tokenizer may propose the tokens that both spell alike, the rest having probability 0, and reads each target token
as the tokens of its own that spell it (token-level intersection: Timor et al. 2025, "Accelerating LLM Inference with Lossless
Speculative Decoding Algorithms for Heterogeneous Vocabularies"). Only the target decides, and the row a token was drawn from
goes to the acceptance rule as it is; so the table decides how much is accepted, and never what is said.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .candidates import Candidates, Columns
from .contract import Bundle, DecoderSpec
from .errors import BundleError

DRAFT_VOCABULARY = "draft/vocabulary.npz"
Ids = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Spelling:
    """The draft's tokens that each token of the target is read as.

    Attributes:
        offsets: int32 [target_vocab_size + 1]; token t is read as ids[offsets[t] : offsets[t + 1]], possibly none.
        ids: int32 [offsets[-1]], ids of the draft.
        prefix: int32 [any], ids the draft reads before every text: its own beginning-of-text where the target has none.
    """

    offsets: Ids
    ids: Ids
    prefix: Ids

    @classmethod
    def of(cls, spellings: Iterable[Sequence[int]], prefix: Sequence[int] = ()) -> "Spelling":
        """Packs one run of draft ids for each target token, in order."""
        runs = list(spellings)
        offsets = np.cumsum([0, *map(len, runs)], dtype=np.int32)
        return cls(offsets, np.array([token for run in runs for token in run], np.int32), np.array(prefix, np.int32))


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """The translation between a target's tokens and its draft's.

    Attributes:
        target_vocab_size: Width of the target's rows of logits.
        num_input_ids: The draft reads ids from 0 to this, exclusive.
        to_target: int32 [draft's columns], the target token that a column stands for, -1 for none. No token comes twice.
        spelling: How target tokens are read; None where the draft reads the target's own ids.

    Raises:
        ValueError: These do not fit each other.
    """

    target_vocab_size: int
    num_input_ids: int
    to_target: Ids
    spelling: Spelling | None = None

    def __post_init__(self) -> None:
        """Refuses what contradicts itself."""
        if problem := self._contradiction():
            raise ValueError(problem)

    @classmethod
    def of_bundle(cls, bundle: Bundle) -> "DraftVocabulary | None":
        """Reads the vocabulary that belongs to a bundle's draft; None where that has the target's ids.

        Raises:
            BundleError: It is damaged, or that of another pair.
        """
        if bundle.draft_vocabulary is None or bundle.draft is None:
            return None
        vocabulary = cls.load(bundle.folder / bundle.draft_vocabulary.path)
        vocabulary.check_pair(bundle.target, bundle.draft)
        return vocabulary

    @classmethod
    def load(cls, file: Path) -> "DraftVocabulary":
        """Reads a file that `save` wrote.

        Raises:
            BundleError: It cannot be read, or contradicts itself.
        """
        try:
            with np.load(file, allow_pickle=False) as arrays:
                sizes = [int(_integers(arrays[name], 0)) for name in ("target_vocab_size", "num_input_ids")]
                spelling = None
                if "spelling_offsets" in arrays:
                    names = ("spelling_offsets", "spelling_ids", "spelling_prefix")
                    spelling = Spelling(*(_integers(arrays[name], 1) for name in names))
                return cls(sizes[0], sizes[1], _integers(arrays["to_target"], 1), spelling)
        except Exception as error:  # numpy, zipfile and zlib raise a dozen classes for damaged files
            reason = "it is no archive of arrays" if "pickle" in str(error) else error  # numpy's advice would be to trust it
            raise BundleError(f"The draft's vocabulary in {file} is damaged ({reason}): export the bundle again.") from error

    def save(self, file: Path) -> None:
        """Writes it as arrays of numpy without pickles, the same bytes for the same table."""
        arrays = {
            "target_vocab_size": np.int32(self.target_vocab_size),
            "num_input_ids": np.int32(self.num_input_ids),
            "to_target": self.to_target,
        }
        if self.spelling is not None:
            arrays["spelling_offsets"] = self.spelling.offsets
            arrays["spelling_ids"] = self.spelling.ids
            arrays["spelling_prefix"] = self.spelling.prefix
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # numpy's stubs take the names for options

    @property
    def description(self) -> str:
        """What the draft can propose, and how it reads, for people."""
        reading = "its own tokens" if self.spelling is not None else "the target's tokens"
        return f"{int((self.to_target != -1).sum())} of {self.target_vocab_size} target tokens; reads {reading}"

    @property
    def largest_input_id(self) -> int:
        """The largest id that the draft is ever fed."""
        if self.spelling is None:
            return min(self.num_input_ids, self.target_vocab_size) - 1
        return int(max(self.spelling.ids.max(initial=0), self.spelling.prefix.max(initial=0)))

    @property
    def is_proposed_whole(self) -> bool:
        """Whether each of the draft's logits stands for a token of the target."""
        return bool((self.to_target != -1).all())

    def check_pair(self, target: DecoderSpec, draft: DecoderSpec) -> None:
        """Raises BundleError where it is the vocabulary of other models than these."""
        widths = (self.target_vocab_size, len(self.to_target))
        if widths != (target.vocab_size, draft.vocab_size):
            raise BundleError(
                f"The draft's vocabulary is that of a pair with {widths[0]} and {widths[1]} logits a row, and target and draft "
                f"give {target.vocab_size} and {draft.vocab_size}: it belongs to other models, export the bundle again."
            )

    def spell(self, token_ids: Sequence[int]) -> tuple[Ids, NDArray[np.int64]]:
        """Translates target tokens to what the draft reads, `prefix` left out.

        Returns:
            int32 [n], ids of the draft; and int64 [len(token_ids)], how many of them stand before the end of each token.
        """
        tokens = np.asarray(token_ids, np.int32)
        if self.spelling is None:
            return tokens, np.arange(1, len(tokens) + 1)
        begins = self.spelling.offsets[tokens]
        lengths = self.spelling.offsets[tokens + 1] - begins
        ends = np.cumsum(lengths, dtype=np.int64)
        # The n-th id of the result is as far behind its token's first id in the table as it is here.
        places = np.arange(lengths.sum()) + np.repeat(begins - (ends - lengths), lengths)
        return self.spelling.ids[places], ends

    def translate(self, logits: Candidates) -> Candidates:
        """Returns the draft's logits with the target's tokens for columns; those that stand for none are left out."""
        own = logits.columns.token_ids
        if own is None:
            return Candidates(logits.rows[:, self._shared], self._columns)
        token_ids = self.to_target[own]
        order = _in_order(token_ids)
        return Candidates(logits.rows[:, order], Columns.of(token_ids[order].astype(np.int64)))

    @cached_property
    def _shared(self) -> NDArray[np.intp] | slice:
        """The draft's columns that stand for a token, in the order of these."""
        order = _in_order(self.to_target)
        return slice(len(order)) if np.array_equal(order, np.arange(len(order))) else order

    @cached_property
    def _columns(self) -> Columns:
        """What they stand for."""
        return Columns.of(self.to_target[self._shared].astype(np.int64))

    def _contradiction(self) -> str:
        """Returns what does not fit together, "" for nothing."""
        shared = self.to_target[self.to_target != -1]
        if not len(shared) or not _within(shared, self.target_vocab_size):
            return f"its columns do not stand for tokens from 0 to {self.target_vocab_size - 1}"
        if len(np.unique(shared)) < len(shared):
            return "two columns stand for one token"
        if len(self.to_target) > self.num_input_ids:
            return f"it proposes {len(self.to_target)} tokens and reads {self.num_input_ids}"
        if self.spelling is None:
            # What it proposes, it reads next.
            readable = _within(shared, self.num_input_ids)
            return "" if readable else f"a column stands for token {shared.max()}, and ids are read to {self.num_input_ids - 1}"
        offsets, ids, prefix = self.spelling.offsets, self.spelling.ids, self.spelling.prefix
        if len(offsets) != self.target_vocab_size + 1:
            return f"{len(offsets) - 1} tokens are spelled where the target has {self.target_vocab_size}"
        if offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
            return f"the spellings do not follow each other from 0 to {len(ids)}"
        if not _within(ids, self.num_input_ids) or not _within(prefix, self.num_input_ids):
            return f"a token is spelled with an id that is not from 0 to {self.num_input_ids - 1}"
        return ""


def draft_length(num_tokens: int, vocabulary: DraftVocabulary | None) -> int:
    """Returns how many ids of the draft to keep room for where a text has up to `num_tokens` tokens.

    All tokens of the table count alike, which is more than a text takes: its frequent tokens are those spelled shortest. More
    than two ids a token are not kept room for: where a text takes these, the draft has so few of its tokens that it is of no
    use, and its context ends before the text does.

    Args:
        num_tokens: Tokens of the target.
        vocabulary: The draft's; None where it is the target's.
    """
    spelling = None if vocabulary is None else vocabulary.spelling
    if spelling is None:
        return num_tokens
    mean = len(spelling.ids) / (len(spelling.offsets) - 1)
    return len(spelling.prefix) + ceil(num_tokens * min(max(mean, 1.0), 2.0))


def _in_order(to_target: Ids) -> NDArray[np.intp]:
    """Returns the columns that stand for a token, in the order of these."""
    return to_target.argsort()[np.count_nonzero(to_target == -1) :]


def _integers(array: NDArray[np.generic], dimensions: int) -> Ids:
    if array.ndim != dimensions or array.dtype != np.int32:
        raise ValueError(f"{array.ndim} dimensions of {array.dtype} where {dimensions} of int32 are expected")
    return array  # type: ignore[return-value]  # just checked


def _within(ids: Ids, end: int) -> bool:
    return not len(ids) or bool(ids.min() >= 0 and ids.max() < end)
