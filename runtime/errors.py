"""The errors a user of the runtime can meet; each carries one sentence that says what was found and what to do."""

import re

_MOST_CHARACTERS = 240
# What ONNX Runtime puts in front of its reasons: its own class and number, and where in its sources it was, file and function.
_PREFIX = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")
_SOURCE = re.compile(
    r"\S+\.(?:h|hpp|cc|cpp|cu):\d+ (?:[\w:<>,*& ]*::[~\w]+\((?:[^()]|\([^()]*\))*\)(?: const)?(?: \[with [^\]]*\])? )?"
)


class SpecError(Exception):
    """Base of all errors raised by the runtime."""


class BundleError(SpecError, ValueError):
    """A bundle is missing, damaged, changed since its export, or written for another version of the runtime."""


class PromptError(SpecError, ValueError):
    """A prompt cannot be used: empty, too long for the context, or not made of known tokens."""


class DeviceError(SpecError, RuntimeError):
    """A device was asked for that this machine, or the installed ONNX Runtime, does not give."""


class LogitsError(SpecError, ArithmeticError):
    """A model returned NaN or infinite logits, so no token can be drawn from them."""


class SamplingError(SpecError, ValueError):
    """The sampling rules forbid every token at some place of a text.

    Attributes:
        row: Which of the rows that were asked for has no token left, the first such one.
    """

    def __init__(self, sentence: str, row: int) -> None:
        """Keeps the row."""
        super().__init__(sentence)
        self.row = row

    def __reduce__(self) -> tuple[type["SamplingError"], tuple[str, int]]:
        """Pickles it with its row, so that it comes back from another process."""
        return SamplingError, (str(self), self.row)


def first_line(error: Exception) -> str:
    """Returns the first line of what another library raised, without its source's places, short enough for a sentence."""
    line = str(error).strip().partition("\n")[0]
    words = _SOURCE.sub("", _PREFIX.sub("", line)).strip()
    if len(words) > _MOST_CHARACTERS:
        kept = words[:_MOST_CHARACTERS]
        words = f"{kept.rpartition(' ')[0] or kept}…"
    return words or type(error).__name__
