"""Rules that keep some tokens of a row and drop the rest.

`weights` are probabilities up to a factor, float32 [n], the heaviest 1: so nothing needs to be normalised between two rules,
and each looks only at what those before it have kept. Tokens that are equally good are kept, or dropped, together: which of
them stands first in the vocabulary decides nothing.
"""

import numpy as np
from numpy.typing import NDArray

Weights = NDArray[np.float32]
Kept = NDArray[np.bool_]
# Outside these float32 has no precise numbers; at them, sampling is greedy, or uniform, long since.
_TEMPERATURES = (1e-30, 3e38)
_TINY = np.finfo(np.float32).tiny
_ROUNDED_DOWN = 1 - 1e-6
_STRIPES = 512


def usable_temperature(temperature: float) -> np.float32:
    """Returns the nearest temperature that float32 can divide by."""
    return np.float32(np.clip(temperature, *_TEMPERATURES))


def weights_of(logits: NDArray[np.float32], temperature: float) -> Weights:
    """Returns exp(logits / temperature), the largest of each row scaled to 1, as a new array.

    Args:
        logits: float32 [..., n]; -inf forbids a token, and each row has one that is not.
        temperature: Above 0.
    """
    # The largest logit becomes 0 first, so that the smallest temperature overflows to -inf at most, which is weight 0.
    with np.errstate(over="ignore"):
        weights: Weights = logits - logits.max(axis=-1, keepdims=True)
        if temperature != 1:
            weights /= usable_temperature(temperature)
    return np.exp(weights, out=weights)


def top_k(logits: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """Returns the places of the k largest logits, in ascending order, and of those as large as the k-th."""
    if k >= len(logits):
        return np.arange(len(logits))
    places = None
    if k < _STRIPES <= len(logits):
        # The largest of each stripe: k of them are at least the k-th largest of these, so the others need no sorting.
        stripes = logits[: len(logits) // _STRIPES * _STRIPES].reshape(-1, _STRIPES).max(axis=0)
        places = np.flatnonzero(logits >= np.partition(stripes, -k)[-k])
        logits = logits[places]
    large = np.flatnonzero(logits >= np.partition(logits, -k)[-k])
    return large if places is None else places[large]


def top_p(weights: Weights, mass: float, rest: float = 0.0) -> Kept:
    """Tells the fewest heaviest tokens that make up at least `mass` of the row (Holtzman et al. 2020); all where none do.

    Args:
        weights: See the module.
        mass: From 0 to 1.
        rest: The weight of tokens of the row that are not among these, and lighter.
    """
    total = weights.sum(dtype=np.float64) + rest
    # All tokens lighter than this together are less than 1 - mass of the row: only the others need sorting.
    floor = 0 if rest else np.float32((1 - mass) * total / len(weights) * _ROUNDED_DOWN)
    heavy = np.sort(weights[weights >= floor])[::-1]
    kept: Kept = weights >= heavy[_first_covering(heavy, mass * total)]
    return kept


def min_p(weights: Weights, fraction: float) -> Kept:
    """Tells the tokens at least `fraction` times as heavy as the heaviest (Nguyen et al. 2024)."""
    kept: Kept = weights >= np.float32(fraction) * weights.max()
    return kept


def typical_p(weights: Weights, mass: float) -> Kept:
    """Tells the fewest tokens, those nearest to the mean surprisal first, that make up `mass` (Meister et al. 2022)."""
    total = weights.sum(dtype=np.float64)
    # A weight of 0 counts as a tiny one in the logarithm, and as nothing in the mean.
    distance = np.log(np.maximum(weights, _TINY))
    mean = np.log(total) - (distance * weights).sum(dtype=np.float64) / total
    # From here on: each token's distance of its surprisal, log(total) - log(weight), to the mean.
    np.subtract(np.float32(np.log(total) - mean), distance, out=distance)
    np.abs(distance, out=distance)
    # Looks among the nearest tokens first: sorting a whole vocabulary takes longer than all else.
    reach = max(float(mean), 0.5)
    while len(near := np.flatnonzero(distance <= reach)) < len(weights) and weights[near].sum(dtype=np.float64) < mass * total:
        reach *= 2
    near = near[np.argsort(distance[near])]
    kept: Kept = distance <= distance[near[_first_covering(weights[near], mass * total)]]
    return kept


def _first_covering(weights: Weights, mass: float) -> int:
    """Returns the first place up to which the weights sum to at least `mass`; the last one where rounding keeps them below."""
    covered = np.cumsum(weights, dtype=np.float64)
    return min(int(np.searchsorted(covered, mass)), len(weights) - 1)
