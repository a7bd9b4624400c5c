"""The largest logits of a row, in the place of all of them: what a device sends where they decide the text.

A greedy token is the largest logit's, and `top_k` leaves the k largest and those as large as the k-th; no other token is a
candidate. `top_p` and `min_p` leave some of the largest too, mostly few, and penalties lower some that are known by name.
Whether what came is enough shows when it is there. So the rules and the judge stay where they are, on the host, and only the
vocabulary stays on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from . import onnx_bytes as onnx
from .candidates import Candidates, Columns
from .filters import weights_of

# Asked for beyond those that decide, so that logits as large as the last of them are mostly there too: in float16 many are.
SPARE = 7
# What a model that does so says in its description.
TOP_NOTE = "only the largest logits come to the host where a text is greedy, or has a top_k, top_p or min_p"


@dataclass(frozen=True)
class TopLogits:
    """The largest logits of some rows; views that the next pass may overwrite.

    Attributes:
        tokens: int64 [rows, count], whose they are.
        logits: float32 [rows, count], the largest first.
        totals: float32 [rows], the sum over the whole row of exp((logit - largest) / temperature); not finite where the row
            holds NaN or +inf, or nothing but -inf.
        temperature: Of the totals.
    """

    tokens: NDArray[np.int64]
    logits: NDArray[np.float32]
    totals: NDArray[np.float32]
    temperature: float = 1.0

    @property
    def are_sound(self) -> bool:
        """Whether every row has finite logits to choose from, and neither NaN nor +inf."""
        return bool(np.isfinite(self.totals).all())

    @cached_property
    def rest(self) -> NDArray[np.float64]:
        """What the totals are more than the sum over these logits; see Candidates."""
        weights = weights_of(self.logits, self.temperature)
        rest: NDArray[np.float64] = np.maximum(self.totals - weights.sum(axis=1, dtype=np.float64), 0)
        return rest

    def first(self, rows: int) -> "TopLogits":
        """Returns the first rows."""
        return TopLogits(self.tokens[:rows], self.logits[:rows], self.totals[:rows], self.temperature)

    def candidates(self) -> Candidates:
        """Returns the rows over the tokens that any of them has, -inf where a row does not have one; memory of its own."""
        token_ids = np.unique(self.tokens)
        rows = np.full((len(self.tokens), len(token_ids)), -np.inf, np.float32)
        np.put_along_axis(rows, np.searchsorted(token_ids, self.tokens), self.logits, axis=1)
        return Candidates(rows, Columns.of(token_ids), self.rest)

    def copy(self) -> "TopLogits":
        """Returns it in memory of its own."""
        return TopLogits(self.tokens.copy(), self.logits.copy(), self.totals.copy(), self.temperature)

    @classmethod
    def joined(cls, parts: Sequence["TopLogits"]) -> "TopLogits":
        """Puts rows of several passes together, in order; of each as many logits as of the others."""
        tokens, logits, totals = (
            np.concatenate(column) for column in zip(*((part.tokens, part.logits, part.totals) for part in parts), strict=True)
        )
        return cls(tokens, logits, totals, parts[0].temperature)


class TopRule(Protocol):
    """What the rules of a text tell of the largest logits; see Sampler."""

    @property
    def num_top(self) -> int:
        """How many to look at; 0 where all are needed."""
        ...

    @property
    def top_temperature(self) -> float:
        """At which temperature to sum whole rows."""
        ...

    def decides(self, top: TopLogits, history: Sequence[int], block: NDArray[np.int64]) -> bool:
        """Tells whether these do decide, where history and block stand before the last row's place."""
        ...


def top_logits_graph(*, half: bool, rows: int | None = None, vocab_size: int | None = None, count: int | None = None) -> bytes:
    """Returns the ONNX graph that finds them: standard operators, for ONNX Runtime and TensorRT.

    Args:
        half: Whether the logits are float16 and not float32.
        rows: Their number, where it is fixed. Otherwise an input first, int64 [1], tells from which row on they are wanted.
        vocab_size: Width of a row, where it is fixed.
        count: How many to find, where it is fixed; otherwise an input, int64 [1].

    Returns:
        A model with the inputs logits [1, rows, vocab_size] and temperature, float32 [1], and the outputs tokens, int64, and
        values, float32, both [1, rows, count], and totals, float32 [1, rows]; see TopLogits.
    """
    width: int | str = vocab_size or "vocab_size"
    number: int | str = count or "count"
    height: int | str = rows or "rows"
    parts = [onnx.graph_input("logits", onnx.FLOAT16 if half else onnx.FLOAT, (1, rows or "rows of the pass", width))]
    whole = "logits"
    if rows is None:
        parts.append(onnx.graph_input("first", onnx.INT64, (1,)))
        parts.append(onnx.constant("end", np.array([np.iinfo(np.int64).max])) + onnx.constant("row_axis", np.array([1])))
        parts.append(onnx.node("Slice", (whole, "first", "end", "row_axis"), ("wanted",)))
        whole = "wanted"
    if half:
        parts.append(onnx.node("Cast", (whole,), ("widened",), to=onnx.FLOAT))
        whole = "widened"
    parts.append(onnx.graph_input("count", onnx.INT64, (1,)) if count is None else onnx.constant("count", np.array([count])))
    parts += [
        onnx.constant("largest_place", np.array([0])) + onnx.constant("vocab_axis", np.array([-1])),
        onnx.node("TopK", (whole, "count"), ("values", "tokens"), axis=-1),
        onnx.node("Gather", ("values", "largest_place"), ("largest",), axis=-1),
        onnx.node("Sub", (whole, "largest"), ("below",)),
        onnx.graph_input("temperature", onnx.FLOAT, (1,)),
        onnx.node("Div", ("below", "temperature"), ("scaled",)),
        onnx.node("Exp", ("scaled",), ("shares",)),
        onnx.node("ReduceSum", ("shares", "vocab_axis"), ("totals",), keepdims=0),
        onnx.graph_output("tokens", onnx.INT64, (1, height, number)),
        onnx.graph_output("values", onnx.FLOAT, (1, height, number)),
        onnx.graph_output("totals", onnx.FLOAT, (1, height)),
    ]
    return onnx.model("top_logits", *parts)
