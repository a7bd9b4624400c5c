"""A model that computes each row of logits once: thousands of samples then cost what their few distinct texts cost.

It keeps the tokens that its cache slots hold, and a row depends on these alone: whoever reads a slot that he should have
overwritten gets the row of a text he did not mean, as on the model itself. That the model's rows do depend on the tokens alone,
to the last bit, is a check of its own.
"""

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runtime.backend import Model
from runtime.decoder import Decoder

if TYPE_CHECKING:
    from runtime.contract import DecoderSpec

_UNWRITTEN = -1
_MEMORY_BYTES = 256 << 20


class ReplayedModel:
    """A model with a memory for rows of logits; see backend.Model."""

    def __init__(self, model: Model, max_length: int, max_rows: int) -> None:
        """Opens one context on the model.

        Args:
            model: What computes rows.
            max_length: The most tokens of a text.
            max_rows: The most rows asked for in a pass.
        """
        self.spec: DecoderSpec = model.spec
        self.engine = model.engine
        self.description = f"{model.description}, each row computed once"
        self._decoder = Decoder(model, max_length, num_rows=max_rows)
        self._rows: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()
        self._most = max(2 * max_rows, _MEMORY_BYTES // (4 * model.spec.vocab_size))

    def open_context(self, capacity: int, max_rows: int) -> "ReplayedContext":
        """Opens a context that computes nothing itself; see backend.Model."""
        return ReplayedContext(self, capacity, max_rows)

    def rows(self, tokens: NDArray[np.int64], num_rows: int) -> list[NDArray[np.float32]]:
        """Returns the last rows behind a text, each float32 [vocab_size]."""
        keys = [tokens[: len(tokens) - num_rows + 1 + row].tobytes() for row in range(num_rows)]
        if not all(key in self._rows for key in keys):
            text = tokens.tolist()
            self._decoder.begin(text, None)
            self._decoder.rewind_to(len(text) - num_rows)
            computed = self._decoder.forward(text[self._decoder.past_length :], num_rows)
            self._rows.update((key, row.copy()) for key, row in zip(keys, computed, strict=True))
        for key in keys:
            self._rows.move_to_end(key)
        found = [self._rows[key] for key in keys]
        while len(self._rows) > self._most:
            self._rows.popitem(last=False)
        return found


class ReplayedContext:
    """The tokens of one text's cache slots; see backend.Context."""

    def __init__(self, model: ReplayedModel, capacity: int, max_rows: int) -> None:
        """Starts with nothing cached."""
        self.slots = np.full(capacity, _UNWRITTEN, np.int64)
        self._model = model
        self._logits = np.empty((max_rows, model.spec.vocab_size), np.float32)

    def run(self, token_ids: NDArray[np.int64], past_length: int, num_rows: int) -> NDArray[np.float32]:
        """Looks the rows up; see backend.Context."""
        end = past_length + len(token_ids)
        self.slots[past_length:end] = token_ids
        logits = self._logits[:num_rows]
        if num_rows:
            for row, found in zip(logits, self._model.rows(self.slots[:end], num_rows), strict=True):
                row[:] = found
        return logits

    def copy_from(self, source: "ReplayedContext", length: int) -> None:
        """Takes over cached tokens; see backend.Context."""
        self.slots[:length] = source.slots[:length]
