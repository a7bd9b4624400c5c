"""The end of a decoder's graph: which rows reach the head, and which tokens it has a column for.

A token that a draft's head lacks has draft probability 0, so it is never proposed, and the target says it where it belongs
(FR-Spec: Zhao et al. 2025): a smaller product at each drafted token, and nothing lost in the text.
"""

from collections import Counter
from collections.abc import Collection, Iterable

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from .errors import ExportError
from .graph_edit import add_initializer

NUM_LOGITS_TO_KEEP = "num_logits_to_keep"
LOGITS_ROWS = "logits_rows"
_SCALES_LOGITS = frozenset({"Cast", "Identity", "Mul", "Div", "Tanh"})


def keep_last_rows(model: ir.Model) -> bool:
    """Lets an input choose how many rows of logits are computed, in place: the last ones, all where it is 0 or not given.

    A prefill needs one row, and the head is a good part of a small model. The input has a default, so that programs that do not
    know it run the graph as before. For ONNX Runtime, which computes shapes from numbers; see select_rows for engines.

    Returns:
        Whether that was done; not where the logits come from something else than a product with a constant matrix, and a bias.
    """
    graph = model.graph
    product = _head_of(graph.outputs[0])
    if product is None:
        return False
    count = add_initializer(graph, NUM_LOGITS_TO_KEEP, np.array(0, np.int64))
    graph.inputs.append(count)
    vector = add_initializer(graph, "head.vector", np.array([1], np.int64))
    end = add_initializer(graph, "head.end", np.array([np.iinfo(np.int64).max], np.int64))
    negative = ir.node("Neg", [count])
    begin = ir.node("Reshape", [negative.outputs[0], vector])
    rows = ir.node("Slice", [product.inputs[0], begin.outputs[0], end, vector])
    rows.outputs[0].name = "head.rows"
    graph.insert_before(product, [negative, begin, rows])
    product.replace_input_with(0, rows.outputs[0])
    logits = graph.outputs[0]
    logits.shape = None if logits.shape is None else ir.Shape([logits.shape[0], "logits_rows", logits.shape[2]])
    return True


def select_rows(model: ir.Model) -> bool:
    """Lets an input name the rows of a pass that reach the head, in place: int64 [logits_rows], any of them in any order.

    What TensorRT takes: the number of rows is the input's own size, which a profile bounds, and no shape depends on what is in
    a tensor. So passes can be enqueued ahead of each other.

    Returns:
        Whether that was done; see keep_last_rows.
    """
    graph = model.graph
    product = _head_of(graph.outputs[0])
    if product is None:
        return False
    hidden = product.inputs[0]
    chosen = ir.Value(name=LOGITS_ROWS, shape=ir.Shape([LOGITS_ROWS]), type=ir.TensorType(ir.DataType.INT64))
    graph.inputs.append(chosen)
    gather = ir.node("Gather", [hidden, chosen], attributes={"axis": 1})
    rows = gather.outputs[0]
    rows.name = "head.rows"
    if hidden.dtype is not None:
        rows.type = ir.TensorType(hidden.dtype)  # not hidden.type, which would change with it
    graph.insert_before(product, gather)
    product.replace_input_with(0, rows)
    logits = graph.outputs[0]
    logits.shape = None if logits.shape is None else ir.Shape([logits.shape[0], LOGITS_ROWS, logits.shape[2]])
    return True


def cut_head(model: ir.Model, kept: NDArray[np.int32]) -> None:
    """Leaves of a graph's logits the columns of `kept`, in place; before quantisation.

    Args:
        model: A graph whose logits come from a product with a constant matrix, its own or the embedding's.
        kept: int32 [any], token ids, ascending.

    Raises:
        ExportError: The logits come from something else.
    """
    graph = model.graph
    logits = graph.outputs[0]
    product = _head_of(logits)
    if product is None:
        raise ExportError(
            "The draft's logits do not come from a product with a constant matrix, so its vocabulary cannot be cut: leave "
            "--draft-vocab out."
        )
    matrix = product.inputs[1]
    transpose = matrix.producer()
    values = _head_matrix(product).const_value.numpy()
    columns = values[:, kept] if transpose is None else values[kept].T
    _cut_biases(graph, product, kept)
    product.replace_input_with(1, add_initializer(graph, "head.kept", np.ascontiguousarray(columns)))
    if transpose is not None and not matrix.uses():
        graph.remove(transpose, safe=True)
    elif not matrix.uses():
        del graph.initializers[matrix.name]
    logits.shape = None if logits.shape is None else ir.Shape([*logits.shape[:2], len(kept)])


def most_frequent_tokens(
    token_ids: Iterable[int], num_tokens: int, *, vocab_size: int, always: Collection[int] = ()
) -> NDArray[np.int32]:
    """Chooses the tokens a draft's head keeps.

    Args:
        token_ids: A text such as people will ask for, in tokens.
        num_tokens: How many to keep.
        vocab_size: Tokens there are; ids beyond are not counted.
        always: Kept before all others: what ends a text.

    Returns:
        int32 [min(num_tokens, vocab_size)], ascending: the most frequent of the text, then the lowest ids, which are the most
        frequent of what the tokenizer was trained on where it was made by merging pairs.
    """
    counts = Counter(token for token in token_ids if token < vocab_size)
    ranked = dict.fromkeys([*always, *(token for token, _ in counts.most_common())])
    for token in range(vocab_size):
        if len(ranked) >= num_tokens:
            break
        ranked.setdefault(token)
    return np.sort(np.fromiter(list(ranked)[:num_tokens], np.int32))


def head_matrix(model: ir.Model) -> ir.Value | None:
    """Returns the constant matrix whose product gives the logits; None where they come from something else."""
    product = _head_of(model.graph.outputs[0])
    return None if product is None else _head_matrix(product)


def _head_of(logits: ir.Value) -> ir.Node | None:
    """Returns the product with a constant matrix that gives the logits, seen through what only scales them or adds a bias."""
    node = logits.producer()
    while node is not None and (source := _scaled_or_biased(node)) is not None:
        node = source.producer()
    is_head = node is not None and node.op_type == "MatMul" and _head_matrix(node).const_value is not None
    return node if is_head else None


def _scaled_or_biased(node: ir.Node) -> ir.Value | None:
    """Returns what a node scales or adds a bias to, column by column; None where it does something else."""
    if node.op_type in _SCALES_LOGITS:
        return node.inputs[0]
    place = _place_of_bias(node)
    return None if place is None else node.inputs[1 - place]


def _place_of_bias(node: ir.Node) -> int | None:
    """Returns which input of an Add is a constant of one dimension at most; None for none, or another node."""
    constants = [value.const_value for value in node.inputs] if node.op_type == "Add" else []
    return next((place for place, value in enumerate(constants) if value is not None and len(value.shape) <= 1), None)


def _cut_biases(graph: ir.Graph, product: ir.Node, kept: NDArray[np.int32]) -> None:
    """Leaves of the biases between the head's product and the logits the columns of `kept`."""
    node = graph.outputs[0].producer()
    while node is not product:
        if (place := _place_of_bias(node)) is not None and (bias := node.inputs[place]).const_value.size > 1:
            cut = np.ascontiguousarray(bias.const_value.numpy()[kept])
            node.replace_input_with(place, add_initializer(graph, f"{bias.name}.kept", cut))
            if not bias.uses():
                del graph.initializers[bias.name]
        node = _scaled_or_biased(node).producer()


def _head_matrix(product: ir.Node) -> ir.Value:
    """Returns the head's matrix, seen through the transposition of an embedding that it is shared with."""
    matrix: ir.Value = product.inputs[1]
    producer = matrix.producer()
    if producer is not None and producer.op_type == "Transpose":
        transposed: ir.Value = producer.inputs[0]
        return transposed
    return matrix
