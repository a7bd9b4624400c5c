"""What a check of the certificate found."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Advance = Callable[[], None]


@dataclass(frozen=True)
class Verdict:
    """One claim about a pair, and whether it was found to hold.

    Attributes:
        claim: What was tested, as a sentence that is true if it passed.
        passed: Whether it was found so.
        found: What was counted or measured, or what went wrong.
        false_alarm: The probability that a pair for which the claim is true fails it; 0 where nothing is left to chance.
        figures: Numbers and lists behind it, for the report.
    """

    claim: str
    passed: bool
    found: str
    false_alarm: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)


class Check(Protocol):
    """A part of the certificate."""

    @property
    def title(self) -> str:
        """What it is about, in a few words."""
        ...

    @property
    def steps(self) -> int:
        """How often `run` calls `advance`."""
        ...

    def run(self, advance: Advance) -> list[Verdict]:
        """Runs it; calls `advance` after each step."""
        ...
