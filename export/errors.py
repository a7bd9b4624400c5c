"""The error of the export side: one sentence that says what was found and what to do."""


class ExportError(ValueError):
    """A source cannot be exported, or the result of an export did not pass its checks."""
