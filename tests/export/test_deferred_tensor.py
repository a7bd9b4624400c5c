"""A deferred tensor: every operation gives what it gives on values, and none of them reads any."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx_ir.tensor_adapters import TorchTensor

from export.deferred_tensor import DeferredTensor, make_lazy

VALUES = np.arange(48, dtype=np.float32).reshape(12, 4)
OPERATIONS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x.reshape(2, 3, 2, 4).swapaxes(1, 2).reshape(12, 4),  # llama.cpp's order of rotated channels, and back
    lambda x: x[3],
    lambda x: x[2:5, ::2],
    lambda x: x[[1, 2]],
    lambda x: x.T,
    lambda x: x.T.contiguous(),
    lambda x: x + 1,
    lambda x: torch.cat([x, 2 * x]),
    lambda x: torch.stack([x, x]),
    lambda x: x.chunk(3)[1].T,
    lambda x: torch.split(x, [4, 8])[1],
    lambda x: x.unsqueeze(0).permute(2, 0, 1),
    lambda x: x.to(torch.float16).float(),
    lambda x: x.clone().view(24, 2).flatten(),
]


class Counted:
    """A reader of VALUES that counts."""

    def __init__(self) -> None:
        self.reads = 0

    def __call__(self) -> np.ndarray:
        self.reads += 1
        return VALUES.copy()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_wait_and_then_give_the_same(operation: Callable[[torch.Tensor], torch.Tensor]):
    read, expected = Counted(), operation(torch.from_numpy(VALUES))
    found = operation(DeferredTensor.of(VALUES.shape, read))
    assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
    assert read.reads == 0
    assert np.array_equal(found.numpy(), expected.numpy())
    assert read.reads > 0


def test_what_depends_on_values_or_writes_them_raises():
    tensor = DeferredTensor.of(VALUES.shape, Counted())
    with pytest.raises(RuntimeError):
        bool((tensor > 3).all())
    with pytest.raises(NotImplementedError, match="would write"):
        tensor.add_(1)


def test_a_graph_gets_its_weights_when_it_is_written():
    read = Counted()
    deferred = TorchTensor(DeferredTensor.of(VALUES.shape, read).T, name="weights")
    value = ir.Value(name="weights", const_value=deferred, shape=deferred.shape, type=ir.TensorType(deferred.dtype))
    model = ir.Model(ir.Graph([], [], nodes=[], initializers=[value], opset_imports={"": 21}), ir_version=10)
    make_lazy(model)
    assert read.reads == 0
    (tensor,) = ir.to_proto(model).graph.initializer
    assert tensor.raw_data == np.ascontiguousarray(VALUES.T).tobytes()
    assert read.reads == 1
