"""Noise that depends on nothing but a seed, a position in the text, and a token: two models that use it choose alike.

argmax(log p + g) with g drawn from the standard Gumbel distribution for each token follows p. With g = -log e, e from the
standard exponential distribution, it is argmax(p / e), which saves a logarithm and takes probabilities of 0 as they are.
"""

import sys

import numpy as np
from numpy.typing import NDArray

from .candidates import Candidates

_WORD = 2.0**-32
# Of so many tokens alone, or fewer, the numbers are quicker found one by one.
_FEW = 2048
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
# Salmon et al. 2011, table 2: multipliers, and by how much the key grows a round; two lanes.
_MULTIPLIERS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], np.uint64)
_KEY_STEPS = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], np.uint64)
_ROUNDS = 10
# The largest float32 below 1: at 1 the exponential number would be infinite, and no weight could win against it.
_BELOW_ONE = np.float32(1 - 2.0**-24)


class ExponentialNoise:
    """Standard exponential numbers keyed by (seed, position, token), from the counter-based generator Philox 4x64-10.

    Salmon et al. 2011. The key is (seed, position), the counter runs through the vocabulary, four bytes a token; a shorter row
    is the beginning of a longer one. The random bytes are the same on every machine; the last bit of the logarithm depends on
    the processor. Numbers below 1e-10 do not occur, so tokens of a smaller probability hardly do: 2e-5 of all, at most.
    """

    def __init__(self, seed: int | None) -> None:
        """Starts with a seed; None draws one from the operating system.

        Args:
            seed: At least 0; what is above 64 bits is folded in by numpy's SeedSequence.
        """
        entropy = np.random.SeedSequence(seed)
        self._key = int(entropy.generate_state(1, np.uint64)[0])
        self._rows: dict[int, NDArray[np.float32]] = {}
        self._width = 0

    def row(self, position: int, vocab_size: int) -> NDArray[np.float32]:
        """Returns float32 [vocab_size], above 0, for the token at `position`; kept until `forget_before`."""
        # Draft and target may have other widths: as wide as the wider of them, it is made once.
        self._width = max(self._width, vocab_size)
        row = self._rows.get(position)
        if row is None or len(row) < vocab_size:
            row = self._rows[position] = self._generate(position, self._width)
        return row[:vocab_size]

    def divide(self, weights: Candidates, position: int) -> None:
        """Divides each weight by the number of its token and its row's place, the first of which is `position`; in place."""
        token_ids = weights.columns.token_ids
        if token_ids is not None and len(token_ids) <= _FEW:
            rows, columns = np.nonzero(weights.rows)
            weights.rows[rows, columns] /= self._numbers(position + rows, token_ids[columns])
            return
        for place, row in enumerate(weights.rows, start=position):
            numbers = self.row(place, weights.columns.width)
            np.divide(row, numbers if token_ids is None else numbers[token_ids], out=row)

    def forget_before(self, position: int) -> None:
        """Frees the rows of earlier positions."""
        for old in [kept for kept in self._rows if kept < position]:
            del self._rows[old]

    def _numbers(self, positions: NDArray[np.int64], token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns float32 [n], those of `row` for pairs of a position and a token."""
        keys = np.empty((2, len(positions)), np.uint64)
        keys[0], keys[1] = self._key, positions
        words = _philox(token_ids.astype(np.uint64) // 8, keys)
        chosen = words[token_ids // 2 % 4, np.arange(len(token_ids))]
        return _exponential(np.where(token_ids % 2, chosen >> _HALF, chosen & _LOW).astype(np.float32))

    def _generate(self, position: int, vocab_size: int) -> NDArray[np.float32]:
        words = np.random.Philox(key=np.array([self._key, position], np.uint64)).random_raw(-(-vocab_size // 2)).view(np.uint32)
        if sys.byteorder == "big":
            words = words.reshape(-1, 2)[:, ::-1].ravel()
        return _exponential(words[:vocab_size].astype(np.float32))


def _exponential(words: NDArray[np.float32]) -> NDArray[np.float32]:
    """Turns numbers from 0 to 2^32 into standard exponential ones, in place."""
    words += np.float32(0.5)
    words *= np.float32(_WORD)
    np.minimum(words, _BELOW_ONE, out=words)
    np.negative(words, out=words)
    np.log1p(words, out=words)
    return np.negative(words, out=words)


def _philox(blocks: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns uint64 [4, n], the words of some blocks of numpy's Philox streams, which count their blocks from 1.

    Args:
        blocks: uint64 [n].
        keys: uint64 [2, n], the key of each one's stream.
    """
    lanes, others = np.stack([blocks + np.uint64(1), np.zeros_like(blocks)]), np.zeros((2, len(blocks)), np.uint64)
    for _ in range(_ROUNDS):
        high, low = _product(lanes, _MULTIPLIERS)
        lanes, others = high[::-1] ^ others ^ keys, low[::-1]
        keys = keys + _KEY_STEPS
    return np.stack([lanes[0], others[0], lanes[1], others[1]])


def _product(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Returns the high and the low 64 bits of a * b."""
    a_high, a_low, b_high, b_low = a >> _HALF, a & _LOW, b >> _HALF, b & _LOW
    across = a_low * b_high
    middle = (a_low * b_low >> _HALF) + (across & _LOW) + a_high * b_low
    return a_high * b_high + (across >> _HALF) + (middle >> _HALF), a * b
