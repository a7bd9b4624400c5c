"""The check after each export: the checkpoint in torch against the exported graph in the runtime, on the same weights.

A quantised graph is held against a torch model whose weights went through the same rounding, and is computed with float
activations for this comparison, so that the tolerance stays tight enough to find a wrong nibble. How far the rounding
itself moves the text, and the rounded activations after it, is measured beside it and recorded.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from numpy.typing import NDArray

from runtime.backend import Model
from runtime.contract import DecoderSpec
from runtime.decoder import Decoder
from runtime.errors import SpecError
from runtime.ort.backend import OrtBackend

from .errors import ExportError
from .lowerings import STANDARD_FORMS
from .quantization import BITS, BLOCK_SIZE, block_size_of, dequantize_blockwise, quantize_blockwise
from .source import Source

if TYPE_CHECKING:
    import torch

# Float32 sums in another order: SmolLM2-135M differs by 1e-4 at most, in logits that span some 40.
TOLERANCE = 1e-2
TOLERANCES = {"float32": TOLERANCE, "float16": 0.25}
_PROMPT_TOKENS = 32
_BLOCK_TOKENS = 5
_REWIND = 7


@dataclass(frozen=True)
class Comparison:
    """Rows of logits of two models at the same places.

    Attributes:
        max_difference: The largest absolute difference of two logits.
        same_top_token: The share of rows whose largest logit is at the same token.
        divergence: Mean Kullback-Leibler divergence of the second's distribution from the first's, in nats.
    """

    max_difference: float
    same_top_token: float
    divergence: float

    @classmethod
    def of(cls, expected: NDArray[np.float32], found: NDArray[np.float32]) -> "Comparison":
        """Compares float32 [rows, vocab_size] arrays."""
        first, second = _log_softmax(expected), _log_softmax(found)
        return cls(
            float(np.abs(expected - found).max()),
            float((expected.argmax(axis=1) == found.argmax(axis=1)).mean()),
            float((np.exp(first) * (first - second)).sum(axis=1).mean()),
        )

    def rounded(self) -> dict[str, float]:
        """Returns the figures for the manifest."""
        return {name: float(f"{value:.3g}") for name, value in vars(self).items()}


def check_parity(
    source: Source,
    specs: Sequence[DecoderSpec],
    folder: Path,
    token_ids: list[int],
    heads: Sequence[NDArray[np.int32] | None] | None = None,
) -> list[dict[str, dict[str, float]]]:
    """Compares exported decoders with their checkpoint: prefill, one token, a block on a filled cache, after a rewind.

    Args:
        source: The checkpoint; it is loaded once for all of them.
        specs: Decoders exported from it, in one precision or another.
        folder: The bundle's folder, where their graphs lie.
        token_ids: Tokens of an ordinary text, at least 45.
        heads: For each decoder, int32 [any], the ids its head has, or None for all; None for all of all.

    Returns:
        For each decoder, figures by step for the manifest; for quantised weights also what the rounding did.

    Raises:
        ExportError: A step differs by more than TOLERANCES allow; the sentence names the step and the figures.
    """
    texts = _ProbeTexts.of(token_ids)
    reference = load_reference(source)
    try:
        original = reference_logits(reference, texts.straight)
    except Exception as error:  # whatever a config with odd values makes torch raise
        reason = str(error).partition("\n")[0][:200]
        raise ExportError(
            f"The checkpoint {source.name} does not run in torch ({type(error).__name__}: {reason}): "
            "its config and its weights do not fit."
        ) from error
    figures = []
    for spec, head in zip(specs, heads or [None] * len(specs), strict=True):
        rounded = reference
        if spec.precision in BITS:
            # The last one may keep the rounding: a second copy of a large model is a lot of memory.
            rounded = reference if spec is specs[-1] else copy.deepcopy(reference)
            rounding = round_products if spec.lowering in STANDARD_FORMS else round_weights
            rounding(rounded, BITS[spec.precision], spec.block_size or BLOCK_SIZE)
        figures.append(_compare(source, spec, folder, texts, rounded, original, head))
    return figures


@dataclass(frozen=True)
class _ProbeTexts:
    """The tokens that are fed: a prompt, the text it begins, and one that turns elsewhere before its end."""

    prompt: list[int]
    straight: list[int]
    turned: list[int]

    @classmethod
    def of(cls, token_ids: list[int]) -> "_ProbeTexts":
        straight = token_ids[: _PROMPT_TOKENS + 1 + _BLOCK_TOKENS]
        # After the rewind other tokens follow, so that stale cache entries would show.
        return cls(token_ids[:_PROMPT_TOKENS], straight, [*straight[:-_REWIND], *reversed(token_ids[-_REWIND:])])


def _compare(
    source: Source,
    spec: DecoderSpec,
    folder: Path,
    texts: _ProbeTexts,
    reference: "torch.nn.Module",
    original: NDArray[np.float32],
    head: NDArray[np.int32] | None,
) -> dict[str, dict[str, float]]:
    columns = slice(None) if head is None else head
    original = original[:, columns]
    expected = {text: reference_logits(reference, getattr(texts, text))[:, columns] for text in ("straight", "turned")}
    figures: dict[str, dict[str, float]] = {}
    with exact_activations(spec, folder) as exact_spec:
        model = OrtBackend(exact_products=True).load(exact_spec, folder)
        for step, rows, found in _steps(source, model, texts):
            comparison = Comparison.of(expected["turned" if step == "rewind" else "straight"][rows], found)
            figures[step] = comparison.rounded()
            tolerance = TOLERANCES[spec.cache_dtype]
            if not comparison.max_difference <= tolerance:
                raise ExportError(
                    f"The exported graph of {source.name} does not compute what its checkpoint does: at the step '{step}' "
                    f"logits differ by {comparison.max_difference:.3g} (at most {tolerance} is allowed) and "
                    f"{comparison.same_top_token:.0%} of the top tokens agree. Nothing was written.{_other_way(source, spec)}"
                )
    if spec.precision in BITS:
        length = len(texts.straight)
        found = Decoder(OrtBackend().load(spec, folder), length, num_rows=length).forward(texts.straight, length)
        figures["rounded_weights"] = Comparison.of(original, expected["straight"]).rounded()
        figures["rounded_weights_and_activations"] = Comparison.of(original, found).rounded()
    return figures


def _other_way(source: Source, spec: DecoderSpec) -> str:
    """What may help where what was built is another model than the checkpoint's."""
    if source.kind != "folder" or spec.lowering == "growing":
        return ""
    return f" Not all options of its config ('{spec.architecture}') may be known: try the other --source, mobius or optimum."


def _steps(source: Source, model: Model, texts: _ProbeTexts) -> Iterator[tuple[str, slice, NDArray[np.float32]]]:
    """Yields (step, the rows of the whole text it computed, their logits)."""
    straight, turned = texts.straight, texts.turned
    decoder = Decoder(model, len(straight), num_rows=len(texts.prompt))
    first, second = len(texts.prompt), len(texts.prompt) + 1
    back = len(straight) - _REWIND
    try:
        yield "prefill", slice(0, first), decoder.forward(texts.prompt, first)
        yield "one_token", slice(first, second), decoder.forward(straight[first:second], 1)
        yield "block", slice(second, len(straight)), decoder.forward(straight[second:], _BLOCK_TOKENS)
        decoder.rewind_to(back)
        yield "rewind", slice(back, len(turned)), decoder.forward(turned[back:], _REWIND)
    except SpecError as error:
        raise ExportError(f"{source.name} was not exported: {error}") from error


def load_reference(source: Source) -> "torch.nn.Module":
    """Loads a checkpoint in torch, float32, as transformers reads it.

    Raises:
        ExportError: transformers cannot load it.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        if source.kind == "gguf":
            reference = transformers.AutoModelForCausalLM.from_pretrained(
                source.path.parent, gguf_file=source.path.name, dtype=torch.float32
            )
        else:
            reference = transformers.AutoModelForCausalLM.from_pretrained(
                source.path, dtype=torch.float32, attn_implementation="eager"
            )
    except Exception as error:  # whatever transformers and its readers raise
        reason = str(error).strip().partition("\n")[0][:300]
        raise ExportError(
            f"transformers could not load {source.name} for the parity check: {type(error).__name__}: {reason}"
        ) from error
    module: torch.nn.Module = reference.eval()
    return module


def reference_logits(reference: "torch.nn.Module", token_ids: list[int]) -> NDArray[np.float32]:
    """Returns float32 [len(token_ids), vocab_size], computed in one piece without a cache."""
    import torch

    with torch.inference_mode():
        logits: NDArray[np.float32] = reference(torch.tensor([token_ids]), use_cache=False).logits[0].float().numpy()
    return logits


def round_weights(reference: "torch.nn.Module", bits: int, block_size: int = BLOCK_SIZE) -> None:
    """Sends the matrices that a quantised graph holds through the same rounding, in place; tied ones once."""
    import torch

    done: set[int] = set()
    for module in reference.modules():
        is_rounded = _multiplies(module) or module is reference.get_input_embeddings()
        if is_rounded and module.weight.data_ptr() not in done:
            done.add(module.weight.data_ptr())
            with torch.no_grad():
                module.weight.copy_(_rounded(module, bits, block_size))


def round_products(reference: "torch.nn.Module", bits: int, block_size: int = BLOCK_SIZE) -> None:
    """As round_weights, for graphs in standard operators: matrices that are multiplied by, never those looked up in."""
    import torch

    for module in reference.modules():
        if _multiplies(module):
            # A new tensor: the old one may be an embedding too.
            values = _rounded(module, bits, block_size, positive_scales=True)
            module.weight = torch.nn.Parameter(values, requires_grad=False)


def _multiplies(module: "torch.nn.Module") -> bool:
    import torch
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, torch.nn.Linear | Conv1D)


def _rounded(module: "torch.nn.Module", bits: int, block_size: int, *, positive_scales: bool = False) -> "torch.Tensor":
    """Returns a layer's weights after the rounding."""
    import torch
    from transformers.pytorch_utils import Conv1D

    weights = module.weight.detach().numpy()
    # GPT-2's layers hold [columns, rows], all others [rows, columns].
    rows = weights.T if isinstance(module, Conv1D) else weights
    size = block_size_of(rows.shape[1], block_size)
    values = dequantize_blockwise(quantize_blockwise(rows, bits, size, positive_scales=positive_scales))
    return torch.from_numpy((values.T if isinstance(module, Conv1D) else values).copy())


class exact_activations:  # noqa: N801 - reads as a statement: with exact_activations(...)
    """Lends a decoder whose quantised products keep float activations: a twin graph over the same external weights."""

    def __init__(self, spec: DecoderSpec, folder: Path) -> None:
        """Nothing is written before the block is entered."""
        self._spec = spec
        self._graph = folder / spec.graph[0].path
        self._twin = self._graph.with_name("parity.onnx")

    def __enter__(self) -> DecoderSpec:
        """Writes the twin and returns its spec."""
        model = onnx.load(self._graph, load_external_data=False)
        for node in model.graph.node:
            for attribute in node.attribute:
                if node.op_type == "MatMulNBits" and attribute.name == "accuracy_level":
                    attribute.i = 0
        onnx.save(model, self._twin)
        record = self._spec.graph[0]
        path = str(Path(record.path).with_name(self._twin.name).as_posix())
        return replace(self._spec, graph=(replace(record, path=path), *self._spec.graph[1:]))

    def __exit__(self, *exception: object) -> None:
        """Removes the twin."""
        self._twin.unlink(missing_ok=True)


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
