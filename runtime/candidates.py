"""Rows with a column for each token that is a candidate, all others being out of the question.

A target on the CPU has its whole vocabulary for candidates; a draft with a vocabulary of its own, the tokens it can say; and a
model on a device, those whose logits came from there. Whatever the rules do with such a row, they would do the same with one as
wide as the vocabulary that is -inf in all other places, and they do it on few columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Columns:
    """What the columns of rows stand for.

    Attributes:
        width: One more than the largest token.
        token_ids: int64 [columns], each column's token, in ascending order; None where column i stands for token i.
    """

    width: int
    token_ids: TokenIds | None = None

    @classmethod
    def of(cls, token_ids: TokenIds) -> "Columns":
        """Returns a column for each of some tokens, in ascending order."""
        return cls(int(token_ids[-1]) + 1, token_ids)

    @classmethod
    def joined(cls, parts: "Sequence[Columns]", tokens: Sequence[int]) -> "Columns":
        """Returns columns for all tokens that have one in a part, and for some besides."""
        if any(part.token_ids is None for part in parts):
            return cls(max([part.width for part in parts] + [token + 1 for token in tokens]))
        known = [part.token_ids for part in parts if part.token_ids is not None]
        return cls.of(np.unique(np.concatenate([*known, np.array(tokens, np.int64)])))

    @property
    def count(self) -> int:
        """How many there are."""
        return self.width if self.token_ids is None else len(self.token_ids)

    def token(self, column: int) -> int:
        """Returns what a column stands for."""
        return column if self.token_ids is None else int(self.token_ids[column])

    def tokens(self, columns: NDArray[np.intp]) -> list[int]:
        """Returns what some columns stand for."""
        tokens: list[int] = (columns if self.token_ids is None else self.token_ids[columns]).tolist()
        return tokens

    def find(self, tokens: TokenIds) -> tuple[TokenIds, NDArray[np.bool_]]:
        """Returns the columns of those tokens that have one, and which of the tokens they are."""
        if self.token_ids is None:
            here = tokens < self.width
            return tokens[here], here
        places = np.searchsorted(self.token_ids, tokens)
        here = self.token_ids.take(places, mode="clip") == tokens
        return places[here], here

    def places(self, tokens: Sequence[int] | TokenIds) -> TokenIds:
        """Returns the columns of tokens that have one."""
        return np.asarray(tokens, np.int64) if self.token_ids is None else np.searchsorted(self.token_ids, tokens)


@dataclass(frozen=True, eq=False)
class Candidates:
    """Rows of one number a candidate: logits, or what the sampling rules make of them.

    Attributes:
        rows: float32 [rows, columns].
        columns: What they stand for.
        rest: float64 [rows], of rows of logits what the softmax's sum at the text's temperature is more than the sum of these
            columns, the largest logit's share being 1; None for nothing.
    """

    rows: NDArray[np.float32]
    columns: Columns
    rest: NDArray[np.float64] | None = None

    @classmethod
    def whole(cls, rows: NDArray[np.float32]) -> "Candidates":
        """Takes rows in which column i stands for token i."""
        return cls(rows, Columns(rows.shape[1]))

    @cached_property
    def largest(self) -> NDArray[np.intp]:
        """The column of each row's largest number, the first of equal ones; of a NaN where the row holds one."""
        largest: NDArray[np.intp] = self.rows.argmax(axis=1)
        return largest

    def first(self, count: int) -> "Candidates":
        """Returns the first rows."""
        return Candidates(self.rows[:count], self.columns, None if self.rest is None else self.rest[:count])

    def below(self, vocab_size: int) -> "Candidates":
        """Leaves out the candidates from `vocab_size` on."""
        if self.columns.width <= vocab_size:
            return self
        if self.columns.token_ids is None:
            return Candidates.whole(self.rows[:, :vocab_size])
        count = int(np.searchsorted(self.columns.token_ids, vocab_size))
        return Candidates(self.rows[:, :count], Columns.of(self.columns.token_ids[:count]))

    def number(self, row: int, token: int) -> float:
        """Returns what stands in a row for one of the candidates."""
        return float(self.rows[row, self.columns.places([token])[0]])

    def over(self, columns: Columns, missing: float) -> NDArray[np.float32]:
        """Returns the rows over columns that have all candidates among them, and `missing` in the other places.

        Returns:
            float32 [rows, columns.count]; the rows themselves where they have these columns already.
        """
        mine = self.columns
        if columns is mine or (mine.token_ids is None and columns.width == mine.width):
            return self.rows
        spread = np.full((len(self.rows), columns.count), missing, np.float32)
        places = slice(mine.width) if mine.token_ids is None else columns.places(mine.token_ids)
        spread[:, places] = self.rows
        return spread
