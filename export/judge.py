"""The round's judge as a graph, and the draft's choice of a token: so that no logits need to leave a device.

Three forms, for the three rules of runtime.acceptance. "greedy": the largest logit. "rejection": accept with probability
min(1, target / draft), draw from what is left; the host gives uniforms. "coupled": argmax(weight / noise); the host gives the
noise, since Philox multiplies 64 bits by 64, and TensorRT has neither unsigned integers nor shifts.

A graph has a fixed number of rows, as CUDA graphs want it. `num_proposed` tells how many tokens there really are, 0 being a
plain step; the rows behind it may hold anything. Ties go to the lowest id.

| input | | form |
|---|---|---|
| target_logits | float32 [k + 1, vocab_size], penalties and bans applied, each row with a finite logit | all |
| draft_tokens | int64 [k] | all |
| num_proposed | int64 [], 0 to k | all |
| temperature | float32 [], from 1e-30 to 3e38 | rejection, coupled |
| top_k | int64 [], 0 for none | rejection, coupled |
| top_p | int64 [], of `as_fraction` | rejection, coupled |
| min_p | float32 [] | rejection, coupled |
| draft_probs | float32 [k, vocab_size], what the draft's tokens were drawn from | rejection |
| drawn | bool [k], false where a token was looked up: its row is one-hot, and its draft_probs are not read | rejection |
| uniforms | int64 [k + 1], of `as_fraction`: number i judges token i, number num_proposed draws the last | rejection |
| noise | float32 [k + 1, vocab_size], of runtime.noise, for the places of the rows | coupled |

Outputs: num_accepted and next_token, int64 [].
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import onnx_ir as ir

from .errors import ExportError
from .sampling_nodes import (
    MAX_VOCAB_SIZE,
    OPSET,
    PROBABILITY_BITS,
    Nodes,
    as_probabilities,
    draw,
    fraction_of,
    normalised,
    weights,
)

Form = Literal["greedy", "rejection", "coupled"]
FILTERS = ("top_k", "top_p", "min_p")
_IR_VERSION = 8
_INT64, _FLOAT, _BOOL = ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.BOOL
_RULES = {"temperature": _FLOAT, "top_k": _INT64, "top_p": _INT64, "min_p": _FLOAT}


def build_judge(form: Form, num_draft_tokens: int, vocab_size: int, filters: Collection[str] = FILTERS) -> ir.Model:
    """Builds the graph that judges a proposal; the module's docstring tells its inputs and outputs.

    Args:
        form: Whose rule.
        num_draft_tokens: k, the most tokens a proposal may have; 0 for plain steps only.
        vocab_size: Width of a row.
        filters: Of "top_k", "top_p" and "min_p", those that can be asked of the graph. One that is left out has no input and
            costs nothing; top_k and top_p take 31 passes over the rows each, also where their inputs say none.

    Raises:
        ExportError: An unknown form or filter, a negative k, or a vocabulary the sums cannot hold.
    """
    _check(form, vocab_size, filters)
    if num_draft_tokens < 0:
        raise ExportError(f"A judge needs the most tokens a proposal may have, 0 or more; found {num_draft_tokens}.")
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=f"judge_{form}")
    op = Nodes(graph, "judge")
    scores = _input(graph, "target_logits", _FLOAT, [num_draft_tokens + 1, vocab_size])
    proposal = _Proposal.read(graph, op, num_draft_tokens)
    if form != "greedy":
        scores = weights(op, scores, _rules(graph, filters))
    if form == "rejection":
        accepted, token = _judge_draws(graph, op, normalised(op, scores), proposal)
    else:
        if form == "coupled":
            scores = op("Div", scores, _input(graph, "noise", _FLOAT, [num_draft_tokens + 1, vocab_size]))
        chosen = op("ArgMax", scores, axis=1, keepdims=0)
        accepted = proposal.num_accepted(op, op("Equal", chosen, proposal.tokens))
        token = op("Gather", chosen, accepted, axis=0)
    _output(graph, accepted, "num_accepted", _INT64, [])
    _output(graph, token, "next_token", _INT64, [])
    return ir.Model(graph, ir_version=_IR_VERSION)


def append_choice(model: ir.Model, form: Form, vocab_size: int, filters: Collection[str] = FILTERS) -> None:
    """Lets a draft's graph choose its next token itself, from the last row of its logits.

    Adds outputs: draft_token, int64 [1, 1], ready to be the next pass's input_ids; and for "rejection" draft_probs, float32
    [1, vocab_size], what it was drawn from. Adds inputs: the judge's temperature and filters; draft_uniform, int64 [], for
    "rejection"; draft_noise, float32 [1, vocab_size], for "coupled".

    Args:
        model: A decoder with an output logits [1, rows, width]; changed in place.
        form: Whose rule.
        vocab_size: The target's row width, to which the draft's rows are cut or filled up.
        filters: As for `build_judge`.

    Raises:
        ExportError: An unknown form or filter, or a vocabulary the sums cannot hold; logits of another shape, an opset that is
            too old, or a choice that the graph has already. The graph is unchanged then.
    """
    _check(form, vocab_size, filters)
    graph = model.graph
    logits = _logits_of(model)
    op = Nodes(graph, "choice")
    row = _fit(op, op("Cast", op("Gather", logits, -1, axis=1), to=_FLOAT), logits.shape[2], vocab_size)
    if form != "greedy":
        row = weights(op, row, _rules(graph, filters))
    if form == "rejection":
        row = normalised(op, row)
        token = draw(op, as_probabilities(op, row), _input(graph, "draft_uniform", _INT64, []), vocab_size)
        _output(graph, row, "draft_probs", _FLOAT, [1, vocab_size])
    else:
        if form == "coupled":
            row = op("Div", row, _input(graph, "draft_noise", _FLOAT, [1, vocab_size]))
        token = op("ArgMax", row, axis=1, keepdims=0)
    _output(graph, op("Reshape", token, np.array([1, 1])), "draft_token", _INT64, [1, 1])


@dataclass(frozen=True)
class _Proposal:
    """A proposal, filled up to k + 1 places, so that each of the target's rows has one.

    Attributes:
        tokens: int64 [k + 1], 0 where nothing is proposed.
        proposed: bool [k + 1]; false in the last place.
        length: int64 [].
        places: 0 .. k.
    """

    tokens: ir.Value
    proposed: ir.Value
    length: ir.Value
    places: np.ndarray

    @classmethod
    def read(cls, graph: ir.Graph, op: Nodes, k: int) -> "_Proposal":
        tokens, length = _input(graph, "draft_tokens", _INT64, [k]), _input(graph, "num_proposed", _INT64, [])
        places = np.arange(k + 1)
        proposed = op("Less", places, length)
        return cls(op("Where", proposed, op("Concat", tokens, np.array([0]), axis=0), 0), proposed, length, places)

    def num_accepted(self, op: Nodes, passed: ir.Value) -> ir.Value:
        """Returns int64 [], the first place where no token is proposed, or one that did not pass; bool [k + 1]."""
        reached = op("Where", op("And", self.proposed, passed), len(self.places), self.places)
        return op("ReduceMin", reached, np.array([0]), keepdims=0)


def _judge_draws(graph: ir.Graph, op: Nodes, target: ir.Value, proposal: _Proposal) -> tuple[ir.Value, ir.Value]:
    """Accepts with probability min(1, target / draft), and draws from what is left; see runtime.verify.verify.

    Args:
        graph: Gets the inputs of this form.
        op: Where the nodes go.
        target: float32 [k + 1, vocab_size], probabilities.
        proposal: The tokens to judge.

    Returns:
        int64 [] and [], the number accepted and the token behind them.
    """
    rows, vocab_size = graph.inputs[0].shape.numpy()
    draft = op("Pad", _input(graph, "draft_probs", _FLOAT, [rows - 1, vocab_size]), np.array([0, 0, 1, 0]))
    drawn = op("Concat", _input(graph, "drawn", _BOOL, [rows - 1]), np.array([False]), axis=0)
    uniforms = _input(graph, "uniforms", _INT64, [rows])

    places = op("Unsqueeze", proposal.tokens, np.array([1]))
    target_share, draft_share = (
        op("Squeeze", as_probabilities(op, op("GatherElements", row, places, axis=1)), np.array([1])) for row in (target, draft)
    )
    draft_share = op("Where", drawn, draft_share, 1 << PROBABILITY_BITS)
    # uniform * draft < target: rounding the product down to a whole number changes nothing, as the target's is one.
    accepted = proposal.num_accepted(op, op("Less", fraction_of(op, uniforms, draft_share), target_share))

    last = op("Unsqueeze", accepted, np.array([0]))

    def at_end(value: ir.Value) -> ir.Value:
        return op("Gather", value, last, axis=0)

    one_hot = op("OneHot", at_end(proposal.tokens), vocab_size, np.array([0, 1], np.float32))
    draft_row = op("Where", at_end(drawn), at_end(draft), one_hot)
    # The bonus is drawn from the whole of the target's row.
    draft_row = op("Where", at_end(proposal.proposed), draft_row, 0.0)
    residual = as_probabilities(op, op("Max", op("Sub", at_end(target), draft_row), 0.0))
    # Where the two rows are equal only rounding refuses a token; the target's row is the limit of the rule.
    empty = op("Equal", op("ReduceSum", residual), 0)
    left = op("Where", empty, as_probabilities(op, at_end(target)), residual)
    return accepted, draw(op, left, op("Gather", uniforms, proposal.length, axis=0), vocab_size)


def _logits_of(model: ir.Model) -> ir.Value:
    logits = next((value for value in model.graph.outputs if value.name == "logits"), None)
    if logits is None or logits.shape is None or len(logits.shape) != 3 or not isinstance(logits.shape[2], int):
        found = "no such output" if logits is None else f"shape {logits.shape}"
        raise ExportError(f"A draft chooses from an output logits [1, rows, vocab_size] of known width; found {found}.")
    if any(value.name == "draft_token" for value in model.graph.outputs):
        raise ExportError("The draft's graph chooses a token already: append a choice to the graph as it was exported.")
    if (opset := model.graph.opset_imports.get("", 0)) < OPSET:
        raise ExportError(f"The draft's choice needs opset {OPSET} or newer, and its graph has {opset}: export it anew.")
    return logits


def _fit(op: Nodes, row: ir.Value, width: int, vocab_size: int) -> ir.Value:
    """Cuts or fills a row, float32 [1, width], to the target's width; a token the draft does not have is not chosen."""
    if width > vocab_size:
        return op("Slice", row, np.array([0]), np.array([vocab_size]), np.array([1]))
    if width < vocab_size:
        return op("Pad", row, np.array([0, 0, 0, vocab_size - width]), -np.inf)
    return row


def _check(form: str, vocab_size: int, filters: Collection[str]) -> None:
    if form not in get_args(Form):
        raise ExportError(f"A graph judges by one of the rules {', '.join(get_args(Form))}; found '{form}'.")
    if unknown := sorted(set(filters) - set(FILTERS)):
        raise ExportError(f"A graph can have the filters {', '.join(FILTERS)}; found {', '.join(unknown)}: judge on the host.")
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ExportError(f"A graph can judge rows of 1 to {MAX_VOCAB_SIZE:,} tokens; found {vocab_size:,}: judge on the host.")


def _rules(graph: ir.Graph, filters: Collection[str]) -> dict[str, ir.Value]:
    """Adds the inputs of the sampling rules that are asked for."""
    return {name: _input(graph, name, dtype, []) for name, dtype in _RULES.items() if name == "temperature" or name in filters}


def _input(graph: ir.Graph, name: str, dtype: ir.DataType, shape: Sequence[int]) -> ir.Value:
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
    graph.inputs.append(value)
    return value


def _output(graph: ir.Graph, value: ir.Value, name: str, dtype: ir.DataType, shape: Sequence[int]) -> None:
    value.name, value.shape, value.dtype = name, ir.Shape(shape), dtype
    graph.outputs.append(value)
