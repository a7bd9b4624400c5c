"""From a base graph to what an engine runs: one table of forms, and the precisions each of them has.

A lowering is a pass over the base graph's attention nodes; it knows no architecture. Weights are quantised first, from the
values that the checkpoint has; then what is left becomes 16 bits wide where it shall, and attention is rewritten last.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import onnx_ir as ir

from export.blockwise_dequantize import insert_dequantized_weights
from export.blockwise_products import quantize_graph
from export.graph_head import LOGITS_ROWS, NUM_LOGITS_TO_KEEP, keep_last_rows, select_rows
from export.quantization import BITS, BLOCK_SIZE, KEPT, Quantizer, rounding
from runtime.contract import GraphNames
from runtime.device_forms import STANDARD_LOWERINGS
from runtime.graph_metadata import CONTEXT_LENGTH

from .attention import AttentionGeometry
from .gqa import lower_to_group_query_attention
from .positions import PAST_LENGTH
from .primitive import lower_to_primitives
from .static import lower_to_static_cache

if TYPE_CHECKING:
    from export.calibration import CalibratedWeights

LOWERINGS = ("gqa", *STANDARD_LOWERINGS)
# Of standard operators only, on caches of a fixed size.
STANDARD_FORMS = dict(zip(STANDARD_LOWERINGS, (lower_to_static_cache, lower_to_primitives), strict=True))
# The lowering gqa in float16, whatever the weights have: ONNX Runtime's attention on CUDA has no kernels for float32.
GQA_HALF = "gqa-half"
# What may be asked for, in the order in which a bundle has them.
FORMS = ("gqa", GQA_HALF, *STANDARD_FORMS)


def compute_type(lowering: str, precision: str) -> ir.DataType:
    """Returns the element type of activations and cache: 16 bits where asked for, and in quantised graphs for GPUs."""
    if precision == "bf16":
        return ir.DataType.BFLOAT16
    is_half = precision == "fp16" or (lowering in (GQA_HALF, *STANDARD_FORMS) and precision in (*BITS, KEPT))
    return ir.DataType.FLOAT16 if is_half else ir.DataType.FLOAT


def graph_names(model: ir.Model) -> GraphNames:
    """Returns the input and output names of a lowered graph."""
    inputs = {value.name for value in model.graph.inputs}
    if PAST_LENGTH in inputs:
        chosen = LOGITS_ROWS if LOGITS_ROWS in inputs else None
        return GraphNames(attention_mask=None, past_length=PAST_LENGTH, logits_rows=chosen)
    return GraphNames(num_logits_to_keep=NUM_LOGITS_TO_KEEP if NUM_LOGITS_TO_KEEP in inputs else None)


def lower(
    model: ir.Model,
    lowering: str,
    precision: str,
    context_length: int,
    on_weight: Callable[[int, int], None],
    *,
    block_size: int = BLOCK_SIZE,
    kept: Quantizer | None = None,
    calibrated: "CalibratedWeights | None" = None,
) -> AttentionGeometry:
    """Rewrites a base graph in place to one of FORMS.

    Args:
        model: The base graph, weights applied; its inputs are input_ids, attention_mask, position_ids and the caches.
        lowering: One of FORMS.
        precision: "fp32", "fp16", "bf16", "int8", "int4", or KEPT.
        context_length: Tokens the graph must serve.
        on_weight: Called with (matrices rounded, matrices in all) after each that is quantised.
        block_size: The most quantised weights that share a scale.
        kept: What finds the checkpoint's own blocks, with the precision KEPT.
        calibrated: The matrices that were rounded by GPTQ; all others are rounded as without.

    Returns:
        The cache geometry that the manifest records.

    Raises:
        ExportError: A node of the graph has no counterpart in this lowering, or a weight none in this precision; the sentence
            names it.
    """
    # Behind it positions are cut or repeated, which is wrong without an error: the graph says so itself.
    model.metadata_props[CONTEXT_LENGTH] = str(context_length)
    element_type = compute_type(lowering, precision)
    quantizer = kept
    if precision in BITS:
        quantizer = rounding(BITS[precision], block_size, positive_scales=lowering in STANDARD_FORMS)
        quantizer = quantizer if calibrated is None else calibrated.before(quantizer)
    if lowering in STANDARD_FORMS:
        select_rows(model)
        if quantizer is not None:
            insert_dequantized_weights(model.graph, quantizer, on_weight)
        return STANDARD_FORMS[lowering](model, context_length, element_type=element_type)
    keep_last_rows(model)
    if quantizer is not None:
        quantize_graph(model, quantizer, on_weight)
    return lower_to_group_query_attention(model, context_length, element_type=element_type)
