"""One generation's caches in an ONNX Runtime session, where each cache is one buffer that a pass writes in place.

That is so in the lowerings `gqa`, `static` and `primitive`: a buffer is bound as a past and as its present. They differ in
how a pass is told what is cached: by the length of an attention mask, or by a number.
"""

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from runtime.contract import DecoderSpec

from .pass_buffers import PassBuffers

_ALIGNMENT = 64


class InPlaceContext:
    """Buffers bound to the session by address: only the small inputs are bound again at a pass; see Context."""

    def __init__(self, spec: DecoderSpec, session: ort.InferenceSession, capacity: int, max_rows: int) -> None:
        """Allocates buffers of `capacity` tokens for each layer, or of the graph's own size, and `max_rows` rows of logits."""
        slots = spec.cache_capacity or capacity
        assert capacity <= slots, (capacity, slots)
        self._buffers = PassBuffers(spec, session, capacity, max_rows)
        shape = (1, spec.num_key_value_heads, slots, spec.head_size)
        self.caches = []
        for past_name, present_name in spec.names.cache_pairs(spec.num_layers):
            cache = _aligned_zeros(shape, np.dtype(spec.cache_dtype))
            self.caches.append(cache)
            self._buffers.bind_input(past_name, cache, shape)
            self._buffers.bind_output(present_name, cache, shape)

    def run(self, token_ids: NDArray[np.int64], past_length: int, num_rows: int) -> NDArray[np.float32]:
        """Runs the session once; see Context.run."""
        return self._buffers.run(token_ids, past_length, num_rows)

    def copy_from(self, source: "InPlaceContext", length: int) -> None:
        """Copies cached tokens; see Context.copy_from."""
        for mine, theirs in zip(self.caches, source.caches, strict=True):
            mine[:, :, :length] = theirs[:, :, :length]


def _aligned_zeros(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    """Zeros at an address that vector instructions like, as ONNX Runtime's own allocator gives them."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
