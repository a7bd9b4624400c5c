"""The caches of a `growing` graph: past in, a longer present out, as optimum and the hub's onnx-community export them.

Such a graph writes the past once more into each present, so every cache has two buffers of the full capacity, which take
turns: what was the present of one pass is the past of the next. Both are bound by address, so a pass allocates and copies
nothing beside the graph's own work. A rewind copies, since the heads of a shorter past lie nearer together.
"""

from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from runtime.contract import DecoderSpec

from .pass_buffers import PassBuffers


class GrowingContext:
    """One generation's caches on a growing graph, in host memory; see Context.

    Attributes:
        length: Tokens in the past buffers, those rewound over included.
    """

    def __init__(self, spec: DecoderSpec, session: ort.InferenceSession, capacity: int, max_rows: int) -> None:
        """Allocates two buffers of `capacity` tokens for each cache, and `max_rows` rows of logits."""
        self.length = 0
        self._buffers = PassBuffers(spec, session, capacity, max_rows)
        self._pairs = list(spec.names.cache_pairs(spec.num_layers))
        self._heads, self._head_size = spec.num_key_value_heads, spec.head_size
        size, dtype = self._heads * capacity * self._head_size, np.dtype(spec.cache_dtype)
        self._past = [np.zeros(size, dtype) for _ in self._pairs]
        self._present = [np.zeros(size, dtype) for _ in self._pairs]

    def run(self, token_ids: NDArray[np.int64], past_length: int, num_rows: int) -> NDArray[np.float32]:
        """Runs the session once; see Context.run."""
        if past_length < self.length:
            self._keep(past_length)
        length = past_length + len(token_ids)
        for (past_name, present_name), past, present in zip(self._pairs, self._past, self._present, strict=True):
            self._buffers.bind_input(past_name, past, (1, self._heads, past_length, self._head_size))
            self._buffers.bind_output(present_name, present, (1, self._heads, length, self._head_size))
        logits = self._buffers.run(token_ids, past_length, num_rows)
        self._past, self._present = self._present, self._past
        self.length = length
        return logits

    def copy_from(self, source: "GrowingContext", length: int) -> None:
        """Copies cached tokens; see Context.copy_from."""
        for mine, theirs in zip(self._past, source.caches(), strict=True):
            self._tokens(mine, length)[...] = theirs[:, :length]
        self.length = length

    def caches(self) -> list[NDArray[Any]]:
        """Returns the cached keys and values, [key_value_heads, length, head_size] each, layer by layer; no copies."""
        return [self._tokens(past, self.length) for past in self._past]

    def _keep(self, length: int) -> None:
        """Moves the first `length` tokens together, into the other buffers."""
        for kept, cached in zip(self._present, self.caches(), strict=True):
            self._tokens(kept, length)[...] = cached[:, :length]
        self._past, self._present = self._present, self._past
        self.length = length

    def _tokens(self, buffer: NDArray[Any], length: int) -> NDArray[Any]:
        return buffer[: self._heads * length * self._head_size].reshape(self._heads, length, self._head_size)
