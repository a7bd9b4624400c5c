"""What the forms of standard operators, `static` and `primitive`, begin with."""

import onnx_ir as ir

from export.half_precision import to_half_precision

from .attention import AttentionLayer, read_attention_layers
from .masks import drop_causal_masks
from .norms import split_skip_norms

# Sums of squares, exponentials and rotations lose too much in 16 bits, or overflow.
_FLOAT32_OPERATORS = frozenset({"RMSNormalization", "LayerNormalization", "RotaryEmbedding", "Softmax"})


def read_for_standard_operators(
    graph: ir.Graph, context_length: int, lowering: str, element_type: ir.DataType
) -> list[AttentionLayer]:
    """Prepares a base graph for a form without contrib operators, and reads its layers; arguments as the lowerings have.

    Raises:
        ExportError: See drop_causal_masks and read_attention_layers.
    """
    drop_causal_masks(graph, context_length, lowering)
    split_skip_norms(graph)
    if element_type != ir.DataType.FLOAT:
        to_half_precision(graph, _FLOAT32_OPERATORS, element_type)
    return read_attention_layers(graph, lowering)
