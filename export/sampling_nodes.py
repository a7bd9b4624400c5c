"""Sampling rules as graph nodes: what runtime.filters, runtime.sampling and runtime.verify.draw do, for a device.

Nothing here is newer than opset 18, and all of it is known to ONNX Runtime and TensorRT. Exponentials and divisions are
float32, as in the runtime. Sums are float64 there, which TensorRT takes without a word and computes in float32; here they
are sums of int64 fixed-point numbers, so exact, in whatever order a device adds. Shares of a whole (uniforms, top-p) are
int64 too: see `as_fraction`.
"""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from .graph_edit import add_initializer

OPSET = 18
MAX_VOCAB_SIZE = 1 << 18
"""Up to here the fixed-point weights of a row cannot overflow their sum."""
_FRACTION_BITS = 48
_LIMB = 1 << 16  # fractions are multiplied in three pieces, so that no product exceeds 63 bits
PROBABILITY_BITS = 46  # rows sum to less than 2, and 2 * 2**46 * _LIMB is 2**63
_WEIGHT_BITS = 44  # rows sum to MAX_VOCAB_SIZE at most
_BLOCK = 512
_LEAST_MAGNITUDE = 2.0**-63
_UNREACHABLE = 1 << 62  # no row measures as much: a bound for it keeps every token
_LAST = np.array([-1])


def as_fraction(share: float) -> int:
    """Returns a number from [0, 1] as the graphs take it: rounded down to 2**-48, and in units of that."""
    return int(share * 2**_FRACTION_BITS)


class Nodes:
    """Appends nodes to a graph. Operands that are no values of the graph become constants."""

    def __init__(self, graph: ir.Graph, prefix: str) -> None:
        """Takes the graph, and what the names of new values begin with."""
        self._graph = graph
        self._prefix = prefix
        self._count = 0

    def __call__(self, op_type: str, *operands: ir.Value | np.ndarray | float, **attributes: int) -> ir.Value:
        """Appends one node, and returns its output. An int is an int64, a float a float32."""
        values = [operand if isinstance(operand, ir.Value) else self._constant(operand) for operand in operands]
        self._count += 1
        name = f"{self._prefix}.{op_type}_{self._count}"
        node = ir.node(op_type, values, attributes=attributes or None, name=name)
        node.outputs[0].name = name
        self._graph.append(node)
        return node.outputs[0]

    def _constant(self, number: np.ndarray | float) -> ir.Value:
        array = np.float32(number) if isinstance(number, float) else np.asarray(number)
        values = "_".join(str(element) for element in array.ravel()[:4])
        name = f"{self._prefix}.{array.dtype}{list(array.shape)}.{values}"
        if array.size > 4:
            name += f".{len(self._graph.initializers)}"
        return add_initializer(self._graph, name, array)


def weights(op: Nodes, logits: ir.Value, rules: Mapping[str, ir.Value]) -> ir.Value:
    """Applies temperature and filters, in the order of runtime.sampling.

    Args:
        op: Where the nodes go.
        logits: float32 [rows, vocab_size]; -inf forbids a token, and each row has one that is not.
        rules: "temperature" (float32 [], above 0) and any of "top_k" (int64 [], 0 for none), "top_p" (int64 [], a fraction)
            and "min_p" (float32 []).

    Returns:
        float32 [rows, vocab_size], probabilities up to a factor for each row, the largest 1; 0 where a token is dropped.
    """
    shifted = op("Sub", logits, op("ReduceMax", logits, _LAST, keepdims=1))
    kept = op("Exp", op("Div", shifted, rules["temperature"]))
    if (top_k := rules.get("top_k")) is not None:
        # By the logits: two of them may differ and have the same weight.
        needed = op("Where", op("Greater", top_k, 0), top_k, _UNREACHABLE)
        kept = op("Where", op("GreaterOrEqual", logits, smallest_kept(op, logits, 1, needed)), kept, 0.0)
    if (top_p := rules.get("top_p")) is not None:
        mass = _fixed_point(op, normalised(op, kept), PROBABILITY_BITS)
        total = op("ReduceSum", mass, _LAST, keepdims=1)
        needed = op("Max", fraction_of(op, top_p, total), 1)
        needed = op("Where", op("Equal", top_p, as_fraction(1)), _UNREACHABLE, needed)
        kept = op("Where", op("GreaterOrEqual", kept, smallest_kept(op, kept, mass, needed)), kept, 0.0)
    if (min_p := rules.get("min_p")) is not None:
        kept = op("Where", op("GreaterOrEqual", kept, min_p), kept, 0.0)
    return kept


def normalised(op: Nodes, weights: ir.Value) -> ir.Value:
    """Divides rows of weights, float32 [rows, vocab_size], the largest 1, by their sums."""
    total = op("ReduceSum", _fixed_point(op, weights, _WEIGHT_BITS), _LAST, keepdims=1)
    return op("Div", weights, op("Mul", op("Cast", total, to=ir.DataType.FLOAT), 2.0**-_WEIGHT_BITS))


def smallest_kept(op: Nodes, values: ir.Value, measure: ir.Value | int, needed: ir.Value) -> ir.Value:
    """Finds, for each row, where to cut so that the values from there on up are the fewest that measure enough.

    A bisection over float32: first the sign, then the exponent, then each bit of the mantissa. It needs no order of the row
    (TensorRT sorts 3,840 values at most), takes equal values together, and has as many steps for one value as for all.

    Args:
        op: Where the nodes go.
        values: float32 [rows, n]; magnitudes below 2**-63 count as equal, and so do those from 2**65 on.
        measure: int64 [rows, n] or [], not negative.
        needed: int64 [rows, 1] or [], above 0.

    Returns:
        float32 [rows, 1], the largest bound for which the measures of all values >= bound sum to at least `needed`;
        below all finite values where there is none.
    """

    def enough(bound: ir.Value | float) -> ir.Value:
        measured = op("Where", op("GreaterOrEqual", values, bound), measure, 0)
        return op("GreaterOrEqual", op("ReduceSum", measured, _LAST, keepdims=1), needed)

    # A positive bound is the largest magnitude that leaves enough. A negative one is the next behind the largest that does not.
    negative = op("Not", enough(_LEAST_MAGNITUDE))
    sign = op("Where", negative, -1.0, 1.0)

    def raised(magnitude: ir.Value | float, candidate: ir.Value) -> ir.Value:
        return op("Where", op("Xor", enough(op("Mul", sign, candidate)), negative), candidate, magnitude)

    magnitude: ir.Value | float = _LEAST_MAGNITUDE
    for exponent in (64, 32, 16, 8, 4, 2, 1):
        magnitude = raised(magnitude, op("Mul", magnitude, 2.0**exponent))
    power = magnitude
    for bit in range(1, 24):
        magnitude = raised(magnitude, op("Add", magnitude, op("Mul", power, 2.0**-bit)))
    return op("Where", negative, op("Neg", op("Add", magnitude, op("Mul", power, 2.0**-23))), magnitude)


def as_probabilities(op: Nodes, probabilities: ir.Value) -> ir.Value:
    """Rounds probabilities, float32, to int64 fixed-point numbers, for `draw` and for exact comparisons."""
    return _fixed_point(op, probabilities, PROBABILITY_BITS)


def draw(op: Nodes, probabilities: ir.Value, uniform: ir.Value, vocab_size: int) -> ir.Value:
    """Finds the token at which the cumulative probability first exceeds `uniform`, block by block as runtime.verify does.

    Args:
        op: Where the nodes go.
        probabilities: int64 [1, vocab_size], of `as_probabilities`; their sum, above 0, stands for 1.
        uniform: int64 [], a fraction below 1.
        vocab_size: Tokens in the row.

    Returns:
        int64 [], a token whose probability is above 0.
    """
    if surplus := -vocab_size % _BLOCK:
        probabilities = op("Concat", probabilities, np.zeros((1, surplus), np.int64), axis=1)
    blocks = op("Reshape", probabilities, np.array([-1, _BLOCK]))
    sums = op("ReduceSum", blocks, np.array([1]), keepdims=0)
    ends = op("CumSum", sums, 0)
    point = fraction_of(op, uniform, op("Gather", ends, -(-vocab_size // _BLOCK) - 1, axis=0))
    block = _count_up_to(op, ends, point)
    start = op("Sub", op("Gather", ends, block, axis=0), op("Gather", sums, block, axis=0))
    inside = op("CumSum", op("Gather", blocks, block, axis=0), 0)
    token = _count_up_to(op, inside, op("Sub", point, start))
    return op("Add", op("Mul", block, _BLOCK), token)


def fraction_of(op: Nodes, fraction: ir.Value, whole: ir.Value) -> ir.Value:
    """Returns floor(fraction / 2**48 * whole), exactly; int64, `fraction` below 2**48 and `whole` below 2**47."""
    product: ir.Value | int = 0
    for _ in range(_FRACTION_BITS // 16):
        product = op("Div", op("Add", op("Mul", op("Mod", fraction, _LIMB), whole), product), _LIMB)
        fraction = op("Div", fraction, _LIMB)
    return product


def _fixed_point(op: Nodes, numbers: ir.Value, bits: int) -> ir.Value:
    return op("Cast", op("Round", op("Mul", numbers, 2.0**bits)), to=ir.DataType.INT64)


def _count_up_to(op: Nodes, ascending: ir.Value, point: ir.Value) -> ir.Value:
    """Returns int64 [], how many of the ascending numbers, int64 [n], are not above `point`."""
    return op("ReduceSum", op("Cast", op("LessOrEqual", ascending, point), to=ir.DataType.INT64), np.array([0]), keepdims=0)
