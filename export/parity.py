"""The check after each export: the checkpoint in torch against the exported graph in the runtime, on the same weights.

A quantised graph is held against a torch model whose weights went through the same rounding, and is computed with float
activations for this comparison, so that the tolerance stays tight enough to find a wrong nibble. How far the rounding
itself moves the text, and the rounded activations after it, is measured beside it and recorded.
"""

import functools
import gc
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

from .bfloat16 import computed_in_float32, round_parameters
from .errors import ExportError, OtherModelError
from .lowerings import STANDARD_FORMS
from .quantization import BITS, BLOCK_SIZE, KEPT, Quantizer, dequantize_blockwise, rounding
from .source import Source

if TYPE_CHECKING:
    import torch

    from .calibration import CalibratedWeights
    from .reference import Reference, Rounding

# Float32 sums in another order: SmolLM2-135M differs by 1e-4 at most, in logits that span some 40.
TOLERANCE = 1e-2
TOLERANCES = {"float32": TOLERANCE, "float16": 0.25, "bfloat16": 0.25}
_PROMPT_TOKENS = 32
_BLOCK_TOKENS = 5
_REWIND = 7
_ROWS = 1 << 10  # of a matrix, rounded at once


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
    calibrated: "Sequence[CalibratedWeights | None] | None" = None,
) -> list[dict[str, dict[str, float]]]:
    """Compares exported decoders with their checkpoint: prefill, one token, a block on a filled cache, after a rewind.

    Args:
        source: The checkpoint; it is loaded once for all of them.
        specs: Decoders exported from it, in one precision or another.
        folder: The bundle's folder, where their graphs lie.
        token_ids: Tokens of an ordinary text, at least 45.
        heads: For each decoder, int32 [any], the ids its head has, or None for all; None for all of all.
        calibrated: For each decoder, what was rounded by GPTQ, or None; None where nothing was.

    Returns:
        For each decoder, figures by step for the manifest; for quantised weights also what the rounding did.

    Raises:
        ExportError: A step differs by more than TOLERANCES allow; the sentence names the step and the figures.
    """
    texts = _ProbeTexts.of(token_ids)
    original, expected = _reference_logits(source, specs, texts, calibrated or [None] * len(specs))
    gc.collect()  # the checkpoint's pages go before ONNX Runtime takes memory
    given = zip(specs, expected, heads or [None] * len(specs), strict=True)
    return [_compare(source, spec, folder, texts, logits, original, head) for spec, logits, head in given]


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

    @property
    def both(self) -> list[list[int]]:
        """The two whole texts, which are of one length."""
        return [self.straight, self.turned]


def _reference_logits(
    source: Source, specs: Sequence[DecoderSpec], texts: _ProbeTexts, calibrated: "Sequence[CalibratedWeights | None]"
) -> tuple[NDArray[np.float32], list[NDArray[np.float32]]]:
    """Computes the texts in torch.

    Returns:
        float32 [tokens, vocab_size] of the straight text as the checkpoint has it; and for each decoder float32 [2, tokens,
        vocab_size] of both texts, from weights that were rounded as its own.
    """
    from .reference import load_reference

    reference = load_reference(source)
    try:
        original = reference.logits(texts.both)
    except Exception as error:  # whatever a config with odd values makes torch raise
        reason = str(error).partition("\n")[0][:200]
        raise ExportError(
            f"The checkpoint {source.name} does not run in torch ({type(error).__name__}: {reason}): "
            "its config and its weights do not fit."
        ) from error
    roundings = [rounding_of(spec, reference, weights) for spec, weights in zip(specs, calibrated, strict=True)]
    expected = [original if rounding is None else reference.logits(texts.both, rounding) for rounding in roundings]
    return original[0], expected


def _compare(
    source: Source,
    spec: DecoderSpec,
    folder: Path,
    texts: _ProbeTexts,
    logits: NDArray[np.float32],
    original: NDArray[np.float32],
    head: NDArray[np.int32] | None,
) -> dict[str, dict[str, float]]:
    columns = slice(None) if head is None else head
    original = original[:, columns]
    expected = dict(zip(("straight", "turned"), logits[:, :, columns], strict=True))
    figures: dict[str, dict[str, float]] = {}
    with computed_in_float32(spec, folder) as runnable, exact_activations(runnable, folder) as exact_spec:
        model = OrtBackend(exact_products=True).load(exact_spec, folder)
        for step, rows, found in _steps(source, model, texts):
            comparison = Comparison.of(expected["turned" if step == "rewind" else "straight"][rows], found)
            figures[step] = comparison.rounded()
            tolerance = TOLERANCES[spec.cache_dtype]
            if not comparison.max_difference <= tolerance:
                raise OtherModelError(
                    f"The exported graph of {source.name} ('{spec.architecture}') does not compute what its checkpoint does: "
                    f"at the step '{step}' logits differ by {comparison.max_difference:.3g} (at most {tolerance} is allowed) "
                    f"and {comparison.same_top_token:.0%} of the top tokens agree{_other_way(source, spec)}.",
                    source.name,
                )
    if spec.precision in BITS or (spec.precision == KEPT and spec.lowering not in STANDARD_FORMS):
        length = len(texts.straight)
        found = Decoder(OrtBackend().load(spec, folder), length, num_rows=length).forward(texts.straight, length)
        if spec.precision == KEPT:
            figures["rounded_activations"] = Comparison.of(original, found).rounded()
        else:
            figures["rounded_weights"] = Comparison.of(original, expected["straight"]).rounded()
            figures["rounded_weights_and_activations"] = Comparison.of(original, found).rounded()
    return figures


def _other_way(source: Source, spec: DecoderSpec) -> str:
    """What may help where what was built is another model than the checkpoint's."""
    if source.kind != "folder" or spec.lowering == "growing":
        return ""
    return "; what built it may not know all options of its config: try the other --source, mobius or optimum"


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


def rounding_of(spec: DecoderSpec, reference: "Reference", calibrated: "CalibratedWeights | None" = None) -> "Rounding | None":
    """Returns what a decoder's precision and lowering did to the weights of its checkpoint; None where that is nothing."""
    if spec.precision == "bf16":
        return round_parameters
    if spec.precision not in BITS:
        return None
    # Graphs in standard operators hold codes of matrices that are multiplied by, never of those looked up in.
    is_standard = spec.lowering in STANDARD_FORMS
    embedding = None if is_standard else reference.module.get_input_embeddings()
    quantizer = rounding(BITS[spec.precision], spec.block_size or BLOCK_SIZE, positive_scales=is_standard)
    return functools.partial(
        _round_matrix, embedding=embedding, quantizer=quantizer if calibrated is None else calibrated.before(quantizer)
    )


def _round_matrix(module: "torch.nn.Module", *, embedding: "torch.nn.Module | None", quantizer: Quantizer) -> None:
    """Sends a module's matrix through the rounding of a quantised graph, in place."""
    from .reference import is_matrix, matrix_rows

    if not is_matrix(module) and module is not embedding:
        return
    rows = matrix_rows(module)
    for begin in range(0, len(rows), _ROWS):
        chunk = quantizer(rows[begin : begin + _ROWS])
        assert chunk is not None, "whatever rounds, rounds all matrices"
        rows[begin : begin + _ROWS] = dequantize_blockwise(chunk)


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
