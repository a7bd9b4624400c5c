"""The checkpoint in torch that exported graphs are held against: computed in float32, its weights read as they are needed.

A layer's weights are read when the pass comes to the layer, and dropped behind it. So a pass takes the memory of the largest
matrix, whatever the model's size; beside it stand at most the checkpoint's own pages, which are mapped, not copied.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .errors import ExportError
from .gguf_file import GGUFFile, dequantize_tensor
from .source import Source

# Changes the parameters that a module itself holds, in place.
Rounding = Callable[[torch.nn.Module], None]
_STORED_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Reference:
    """A module whose parameters are on the meta device, and a mapping that has their values.

    Attributes:
        module: The model, float32, in evaluation mode.
    """

    def __init__(self, module: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
        """Finds the values of all parameters; of tied ones it suffices that one name is there.

        Args:
            module: The model; its buffers hold values, and get those of `weights` where there are any.
            weights: Tensors by the names of the module's parameters, of any floating point type; may read them when asked.

        Raises:
            ExportError: A parameter has no value.
        """
        self.module = module.eval()
        self._weights = weights
        self._names: dict[torch.nn.Parameter, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if name in weights:
                self._names.setdefault(parameter, name)
        if absent := [name for name, parameter in module.named_parameters() if parameter not in self._names]:
            raise ExportError(f"The checkpoint has no weights for {len(absent)} tensors of its model, {absent[0]} first.")
        for name, buffer in module.named_buffers():
            if name in weights:
                buffer.copy_(weights[name])

    def logits(self, texts: Sequence[list[int]], rounding: Rounding | None = None) -> NDArray[np.float32]:
        """Computes texts in one piece, without a cache.

        Args:
            texts: Token ids, texts of one length.
            rounding: Applied to the parameters of each module before it computes; None leaves them.

        Returns:
            float32 [texts, tokens, vocab_size].
        """
        with self.lent(rounding, as_copies=rounding is not None):
            logits: NDArray[np.float32] = self.module(torch.tensor(texts), use_cache=False).logits.float().numpy()
        return logits

    @contextmanager
    def lent(self, rounding: Rounding | None = None, *, as_copies: bool) -> Iterator[None]:
        """Lets each module have its parameters' values whenever it computes, as long as the block lasts.

        Args:
            rounding: Applied to the parameters of each module before it computes; None leaves them.
            as_copies: Whether the values may be changed in place; else they may be the checkpoint's own pages.
        """
        hooks = [hook for module in self.module.modules() for hook in self._lend(module, rounding, as_copies=as_copies)]
        try:
            with torch.inference_mode():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _lend(self, module: torch.nn.Module, rounding: Rounding | None, *, as_copies: bool) -> Iterator[Any]:
        """Lets a module have its parameters while it computes, and yields the hooks that see to it."""
        held = dict(module.named_parameters(recurse=False))
        if not held:
            return

        def load(module: torch.nn.Module, _arguments: object) -> None:
            for name, parameter in held.items():
                values = self._weights[self._names[parameter]].to(torch.float32, copy=as_copies)
                setattr(module, name, torch.nn.Parameter(values, requires_grad=False))
            if rounding is not None:
                rounding(module)

        def drop(module: torch.nn.Module, *_: object) -> None:
            for name, parameter in held.items():
                setattr(module, name, parameter)

        yield module.register_forward_pre_hook(load)
        yield module.register_forward_hook(drop, always_call=True)


def is_matrix(module: torch.nn.Module) -> bool:
    """Whether a module multiplies by a matrix."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, torch.nn.Linear | Conv1D)


def matrix_rows(module: torch.nn.Module) -> NDArray[np.float32]:
    """Returns a module's matrix or table as float32 [rows, columns], a view: columns are what it multiplies by."""
    from transformers.pytorch_utils import Conv1D

    values: NDArray[np.float32] = module.weight.detach().numpy()
    return values.T if isinstance(module, Conv1D) else values  # GPT-2's layers hold [columns, rows], all others [rows, columns]


def load_reference(source: Source) -> Reference:
    """Opens a checkpoint in torch, as transformers reads it.

    Raises:
        ExportError: transformers cannot load it.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        return _folder_reference(source) if source.gguf is None else _gguf_reference(source.gguf, source.architecture)
    except ExportError:
        raise
    except Exception as error:  # whatever transformers and its readers raise
        reason = str(error).strip().partition("\n")[0][:300]
        raise ExportError(
            f"transformers could not load {source.name} for the parity check: {type(error).__name__}: {reason}"
        ) from error


def _folder_reference(source: Source) -> Reference:
    import transformers

    # In the files' own type nothing is cast, so the parameters are the mapped files.
    stored, loading = transformers.AutoModelForCausalLM.from_pretrained(
        source.path, dtype=_stored_type(source), attn_implementation="eager", output_loading_info=True
    )
    if absent := sorted(loading["missing_keys"]):  # transformers would make them up
        raise ExportError(f"The checkpoint has no weights for {len(absent)} tensors of its model, {absent[0]} first.")
    config = copy.deepcopy(stored.config)
    config.dtype = torch.float32
    return Reference(_without_weights(partial(type(stored), config)), stored.state_dict())


def _stored_type(source: Source) -> torch.dtype:
    """The one type of a folder's floating point weights; float32 where there are several, or one that torch must convert."""
    from safetensors import safe_open

    names = set()
    for file in source.path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names |= {tensors.get_slice(key).get_dtype() for key in tensors.keys()}  # noqa: SIM118 - no dict
    floating = {name for name in names if "F" in name}
    return _STORED_TYPES.get(floating.pop(), torch.float32) if len(floating) == 1 else torch.float32


def _gguf_reference(file: GGUFFile, architecture: str) -> Reference:
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # As AutoConfig.from_pretrained has it, and read once: it takes seconds for a large vocabulary.
    values = load_gguf_checkpoint(str(file.path))["config"]
    config = transformers.AutoConfig.for_model(**values)
    make = partial(transformers.AutoModelForCausalLM.from_config, config, dtype=torch.float32, attn_implementation="eager")
    module = _without_weights(make)
    return Reference(module, _GGUFWeights(file, architecture, values, module))


def _without_weights(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Makes a model with its buffers, and without the values of its parameters."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        module = make()
    module.tie_weights()
    return module


class _GGUFWeights(Mapping[str, torch.Tensor]):
    """What transformers makes of the tensors of a GGUF file, each read when it is asked for.

    The steps are those of its load_gguf_checkpoint, which reads all tensors at once.
    """

    def __init__(self, file: GGUFFile, architecture: str, config: Mapping[str, Any], module: torch.nn.Module) -> None:
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        self._path = file.path
        self._names = get_gguf_hf_weights_map(module)
        self._processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config)
        # Which names a tensor goes by is found with a stand-in of its shape that takes no memory.
        self._tensors = {}
        for tensor in file.tensors:
            stand_in = np.broadcast_to(np.float32(-1), tuple(reversed(tensor.shape.tolist())))
            names = list(self._process(tensor.name, stand_in))
            self._tensors.update(dict.fromkeys(names, (tensor, len(names) > 1)))
        # A layer's experts lie in three tensors, and are asked for one by one.
        self._read_stack = lru_cache(maxsize=3)(self._read)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor, is_stack = self._tensors[name]
        values = (self._read_stack if is_stack else self._read)(tensor)[name]
        return torch.as_tensor(np.ascontiguousarray(values))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _read(self, tensor: Any) -> dict[str, Any]:
        return self._process(tensor.name, dequantize_tensor(self._path, tensor))

    def _process(self, name: str, values: NDArray[np.float32]) -> dict[str, Any]:
        """Returns what becomes of a tensor, by the names of the module's parameters: nothing, one, or each expert's part."""
        parts: dict[str, Any] = {}
        result = self._processor.process(
            weights=values, name=name, tensor_key_mapping=self._names, parsed_parameters={"tensors": parts}
        )
        if result.name in self._names:
            parts[self._names[result.name]] = result.weights
        return parts
