"""Checks of values that users give: Python's numbers and numpy's are welcome, truth values and durations are not."""

import math
from collections.abc import Callable
from typing import TypeGuard

import numpy as np


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value counts as a whole number where one is asked for: Python's or numpy's, no truth value, no duration."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool | np.timedelta64)


def shown(value: object) -> str:
    """Returns a value as a sentence can hold it: its repr, cut; its type where a number is too long for one."""
    try:
        return f"{value!r:.80}"
    except ValueError:
        return f"a {type(value).__name__} too long to write"


def check_whole(name: str, value: object, low: int) -> None:
    """Raises ValueError, naming the value, unless it is a whole number of at least `low`."""
    if not is_whole(value) or value < low:
        raise ValueError(f"{name} is {shown(value)}; a whole number of at least {low} is expected.")


def checked_max_length(value: object, context_length: int) -> int:
    """Returns the most tokens of prompt and text; raises ValueError unless they are from 2 to the context's."""
    if not is_whole(value) or not 2 <= value <= context_length:
        raise ValueError(f"max_length is {shown(value)}; a number from 2 to the context's {context_length} is expected.")
    return int(value)


def check_number(name: str, value: object, expected: str, fits: Callable[[float], bool]) -> None:
    """Raises ValueError, naming the value and what is expected, unless it is a finite number that fits."""
    if isinstance(value, bool | np.timedelta64 | np.complexfloating) or not isinstance(value, int | float | np.number):
        raise ValueError(f"{name} is {shown(value)}; {expected} is expected.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not fits(number):
        raise ValueError(f"{name} is {shown(value)}; {expected} is expected.")
