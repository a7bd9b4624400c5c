"""A torch tensor that is not computed until its values are asked for, and then anew each time.

mobius-onnx reshapes and renames weights in torch on their way into a graph. On deferred tensors its operations are noted,
not done: a graph gets its weights one by one while it is quantised or saved, and never has all of them in memory. (The
converter of llama.cpp reads checkpoints in this way too: its LazyTorchTensor.)
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_map


class DeferredTensor(torch.Tensor):
    """A tensor with a shape, a type, and a function for its values.

    Torch's operations on it give deferred tensors, so none of them reads a value; an operation whose result depends on values
    raises.

    Attributes:
        stand_in: A tensor on the meta device, of its shape, strides and type.
        compute: Returns a tensor with its values.
    """

    stand_in: torch.Tensor
    compute: Callable[[], torch.Tensor]

    @classmethod
    def like(cls, stand_in: torch.Tensor, compute: Callable[[], torch.Tensor]) -> "DeferredTensor":
        """Returns a tensor of the shape, strides and type of `stand_in` whose values `compute` returns."""
        tensor = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - torch's own way to make a tensor without storage
            cls, stand_in.shape, stand_in.stride(), stand_in.storage_offset(), dtype=stand_in.dtype
        )
        tensor.stand_in, tensor.compute = stand_in, compute
        return tensor

    @classmethod
    def of(cls, shape: Sequence[int], read: Callable[[], NDArray[np.float32]]) -> "DeferredTensor":
        """Returns a float32 tensor whose values `read` returns."""
        return cls.like(torch.empty(*shape, dtype=torch.float32, device="meta"), lambda: torch.from_numpy(read()))

    @classmethod
    def __torch_dispatch__(
        cls, function: Callable[..., Any], _types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Does an operation on shapes, and returns what will do it on values.

        Raises:
            NotImplementedError: The operation writes into a tensor.
        """
        kwargs = kwargs or {}
        if function._schema.is_mutable:  # noqa: SLF001 - there is no other place that tells it
            raise NotImplementedError(f"{function} would write into a tensor whose values are not there yet")

        def compute() -> Any:
            return function(*tree_map(_values, args), **tree_map(_values, kwargs))

        shapes = function(*tree_map(_stand_in, args), **tree_map(_stand_in, kwargs))
        if isinstance(shapes, torch.Tensor):
            return cls.like(shapes, compute)
        return [cls.like(shape, lambda index=index: compute()[index]) for index, shape in enumerate(shapes)]

    def numpy(self, *, force: bool = False) -> NDArray[Any]:
        """Computes the values; `force` is torch's, and changes nothing."""
        del force
        return self.compute().numpy()


def _stand_in(value: Any) -> Any:
    return value.stand_in if isinstance(value, DeferredTensor) else value


def _values(value: Any) -> Any:
    return value.compute() if isinstance(value, DeferredTensor) else value


def make_lazy(model: ir.Model) -> None:
    """Puts lazy tensors of onnx_ir in the place of a graph's deferred weights, in place: it saves no others without storage."""
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.Tensor) and isinstance(tensor.raw, DeferredTensor):
            weights = tensor.raw
            value.const_value = ir.LazyTensor(
                lambda weights=weights: ir.tensor(weights.numpy()), dtype=tensor.dtype, shape=tensor.shape, name=value.name
            )
