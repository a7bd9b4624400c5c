"""Noise that depends on nothing but a seed, a position in the text, and a token: two models that use it choose alike.

argmax(log p + g) with g drawn from the standard Gumbel distribution for each token follows p. With g = -log e, e from the
standard exponential distribution, it is argmax(p / e), which saves a logarithm and takes probabilities of 0 as they are.
"""

import sys

import numpy as np
from numpy.typing import NDArray

_WORD = 2.0**-32
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

    def row(self, position: int, vocab_size: int) -> NDArray[np.float32]:
        """Returns float32 [vocab_size], above 0, for the token at `position`; kept until `forget_before`."""
        row = self._rows.get(position)
        if row is None or len(row) < vocab_size:
            row = self._rows[position] = self._generate(position, vocab_size)
        return row[:vocab_size]

    def forget_before(self, position: int) -> None:
        """Frees the rows of earlier positions."""
        for old in [kept for kept in self._rows if kept < position]:
            del self._rows[old]

    def _generate(self, position: int, vocab_size: int) -> NDArray[np.float32]:
        words = np.random.Philox(key=np.array([self._key, position], np.uint64)).random_raw(-(-vocab_size // 2)).view(np.uint32)
        if sys.byteorder == "big":
            words = words.reshape(-1, 2)[:, ::-1].ravel()
        uniforms = words[:vocab_size].astype(np.float32)
        uniforms += np.float32(0.5)
        uniforms *= np.float32(_WORD)
        np.minimum(uniforms, _BELOW_ONE, out=uniforms)
        np.negative(uniforms, out=uniforms)
        np.log1p(uniforms, out=uniforms)
        return np.negative(uniforms, out=uniforms)
