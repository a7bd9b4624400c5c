"""The error of the export side: one sentence that says what was found and what to do."""


class ExportError(ValueError):
    """A source cannot be exported, or the result of an export did not pass its checks."""


class OtherModelError(ExportError):
    """A graph is another model than its checkpoint: what made it does not know all that the checkpoint's config says.

    Attributes:
        source: The name of the checkpoint, as the user gave it.
    """

    def __init__(self, sentence: str, source: str) -> None:
        """Takes the sentence for the user, and the source's name."""
        super().__init__(sentence)
        self.source = source
