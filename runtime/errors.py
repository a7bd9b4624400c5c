"""The errors a user of the runtime can meet; each carries one sentence that says what was found and what to do."""


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


def first_line(error: Exception) -> str:
    """Returns the first line of what another library raised, short enough for a sentence."""
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
