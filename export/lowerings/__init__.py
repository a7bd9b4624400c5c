"""From a base graph to what an engine runs: one table of forms, and the precisions each of them has.

A lowering is a pass over the base graph's attention nodes; it knows no architecture. Weights are quantised first where that is
done in standard operators, and last where contrib operators do it; values become float16 before attention is rewritten.
"""

from collections.abc import Callable

import onnx_ir as ir

from export.blockwise_dequantize import insert_dequantized_weights
from export.graph_head import NUM_LOGITS_TO_KEEP, select_rows
from export.quantization import BITS, BLOCK_SIZE, quantize_graph
from runtime.contract import GraphNames

from .attention import AttentionGeometry
from .gqa import lower_to_group_query_attention
from .positions import PAST_LENGTH
from .primitive import lower_to_primitives
from .static import lower_to_static_cache

LOWERINGS = ("gqa", "static", "primitive")
# Of standard operators only, on caches of a fixed size.
STANDARD_FORMS = {"static": lower_to_static_cache, "primitive": lower_to_primitives}


def computes_in_half_precision(lowering: str, precision: str) -> bool:
    """Tells whether activations and cache are float16: where asked for, and in quantised graphs for TensorRT."""
    return precision == "fp16" or (lowering in STANDARD_FORMS and precision in BITS)


def graph_names(model: ir.Model) -> GraphNames:
    """Returns the input and output names of a lowered graph."""
    inputs = {value.name for value in model.graph.inputs}
    if PAST_LENGTH in inputs:
        return GraphNames(attention_mask=None, past_length=PAST_LENGTH)
    return GraphNames(num_logits_to_keep=NUM_LOGITS_TO_KEEP if NUM_LOGITS_TO_KEEP in inputs else None)


def lower(
    model: ir.Model,
    lowering: str,
    precision: str,
    context_length: int,
    on_weight: Callable[[int, int], None],
    *,
    block_size: int = BLOCK_SIZE,
) -> AttentionGeometry:
    """Rewrites a base graph in place to one of LOWERINGS.

    Args:
        model: The base graph, weights applied; its inputs are input_ids, attention_mask, position_ids and the caches.
        lowering: One of LOWERINGS.
        precision: "fp32", "fp16", "int8" or "int4".
        context_length: Tokens the graph must serve.
        on_weight: Called with (matrices rounded, matrices in all) after each that is quantised.
        block_size: The most quantised weights that share a scale.

    Returns:
        The cache geometry that the manifest records.

    Raises:
        ExportError: A node of the graph has no counterpart in this lowering, or a weight none in this precision; the sentence
            names it.
    """
    half_precision = computes_in_half_precision(lowering, precision)
    if lowering in STANDARD_FORMS:
        if precision in BITS:
            insert_dequantized_weights(model.graph, BITS[precision], on_weight, block_size=block_size)
        return STANDARD_FORMS[lowering](model, context_length, half_precision=half_precision)
    select_rows(model)
    geometry = lower_to_group_query_attention(model, context_length, half_precision=half_precision)
    if precision in BITS:
        quantize_graph(model, precision, on_weight, block_size=block_size)
    return geometry
