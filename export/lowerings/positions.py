"""Where the rows of a pass stand in the text, made in the graph from the number of cached tokens alone.

Shared by the lowerings whose cache has a fixed number of slots: `past_length` takes the place of the base graph's
attention_mask and position_ids.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from export.errors import ExportError
from export.graph_edit import add_initializer

from .writer import Writer

PAST_LENGTH = "past_length"
# Rows the runtime may put behind the last token of a full context, so that a pass never has fewer than min_rows (at most 16).
PADDING_ROWS = 15
_CAPACITY_MULTIPLE = 16


@dataclass(frozen=True)
class Positions:
    """What every layer's attention reads, made once in front of the graph.

    Attributes:
        past_length: The graph input, int64 [1]: cached tokens, so the slot of the first row.
        slots: int64 [rows]: the slot of each row.
        mask: float [1, 1, rows, capacity], added to the scores: 0 where a row may look, the most negative number elsewhere.
        capacity: Slots of the cache.
    """

    past_length: ir.Value
    slots: ir.Value
    mask: ir.Value
    capacity: int


def cache_capacity(context_length: int) -> int:
    """Returns how many slots a cache of fixed size gets: the context, and room for padding rows behind it."""
    return -(-(context_length + PADDING_ROWS) // _CAPACITY_MULTIPLE) * _CAPACITY_MULTIPLE


def insert_positions(graph: ir.Graph, context_length: int, mask_type: ir.DataType) -> Positions:
    """Replaces the base graph's position_ids by what past_length and the number of rows say.

    The additive mask holds finite numbers: a fused kernel that sees a whole tile of -inf would make NaN of it.

    Args:
        graph: The base graph, its attention nodes still in place; changed.
        context_length: Tokens the graph must serve.
        mask_type: Element type of the mask.

    Raises:
        ExportError: A table that is read by position is shorter than the context.
    """
    past_length = ir.Value(name=PAST_LENGTH, shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT64))
    graph.inputs.append(past_length)
    write = Writer(graph)
    slots = place_rows(graph, write, past_length, context_length)
    capacity = cache_capacity(context_length)
    slot_numbers = np.arange(capacity, dtype=np.int64).reshape(1, 1, 1, -1)
    cache_slots = add_initializer(graph, "positions.cache_slots", slot_numbers)
    visible = write.op("LessOrEqual", cache_slots, write.op("Unsqueeze", slots, write.integers(0, 1, 3)))
    shown, hidden = (write.scalar(value, mask_type.numpy()) for value in (0, mask_type.min))
    mask = write.op("Where", visible, shown, hidden)
    mask.name = "causal_mask"
    graph.insert_before(graph[0], write.nodes)
    return Positions(past_length, slots, mask, capacity)


def place_rows(graph: ir.Graph, write: Writer, past_length: ir.Value, context_length: int) -> ir.Value:
    """Makes what reads the graph's position_ids read positions that are made in the graph.

    Args:
        graph: With the inputs input_ids and position_ids; tables that are read by position are cut to the context.
        write: Takes the nodes; they are in no graph yet, and belong in front of all that reads positions.
        past_length: int64 [1]: the place of the first row.
        context_length: Tokens the graph must serve.

    Returns:
        int64 [rows]: the place of each row.

    Raises:
        ExportError: A table that is read by position is shorter than the context.
    """
    inputs = {value.name: value for value in graph.inputs}
    _cut_tables(graph, inputs["position_ids"], context_length)
    rows = write.op("Squeeze", write.op("Shape", inputs["input_ids"], start=1, end=2), write.integers(0))
    slots = write.op("Add", write.op("Range", write.scalar(0, np.int64), rows, write.scalar(1, np.int64)), past_length)
    # Padding rows behind the last token have no position of their own; what they compute is never read.
    last = write.scalar(context_length - 1, np.int64)
    positions = write.op("Unsqueeze", write.op("Min", slots, last), write.integers(0))
    slots.name, positions.name = "slots", "positions"
    ir.convenience.replace_all_uses_with(inputs["position_ids"], positions)
    return slots


def require_positions(table: ir.Value, context_length: int) -> None:
    """Refuses a context that a constant table [positions, any] does not reach.

    Raises:
        ExportError: It is shorter.
    """
    positions = int(table.shape[0])
    if context_length > positions:
        raise ExportError(
            f"The model's table '{table.name}' has {positions} positions, and {context_length} were asked for: "
            f"pass --max-length {positions} or less."
        )


def _cut_tables(graph: ir.Graph, position_ids: ir.Value, context_length: int) -> None:
    """Cuts every constant table that is read by position to the context."""
    lookups = {node for node, index in position_ids.uses() if node.op_type == "Gather" and index == 1}
    for table in dict.fromkeys(node.inputs[0] for node in lookups):
        if table.const_value is None or not {node for node, _ in table.uses()} <= lookups:
            continue
        require_positions(table, context_length)
        values = table.const_value.numpy()
        cut = add_initializer(graph, f"{table.name}.cut", np.ascontiguousarray(values[:context_length]))
        ir.convenience.replace_all_uses_with(table, cut)
