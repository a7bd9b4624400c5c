"""Passes in steps of one fixed number of rows, for devices whose kernels are chosen by that number.

A plain step and the verification of a proposal then are the same step, or several of them where the proposal is long, padded
where it is short, so that a row whose logits are asked for is computed alike whatever is proposed beside it. What stands before
those rows, a prompt but for its end, goes in long passes; where that ends depends on the prompt alone.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from .backend import Context, Model, TopLogitsContext
from .contract import DecoderSpec
from .top_logits import TopLogits


def with_pass_shape(spec: DecoderSpec, min_rows: int, row_multiple: int) -> DecoderSpec:
    """Returns a decoder whose passes are padded to another shape than the manifest says.

    A cache of fixed size has room for the padding; elsewhere the context is cut by it, since a model may have no place behind
    its last one.

    Args:
        spec: The decoder.
        min_rows: See DecoderSpec.
        row_multiple: See DecoderSpec.
    """
    shaped = dataclasses.replace(spec, min_rows=min_rows, row_multiple=row_multiple)
    lost = 0 if spec.cache_capacity is not None else max(0, shaped.most_padding - spec.most_padding)
    return dataclasses.replace(shaped, context_length=spec.context_length - lost)


def in_steps(spec: DecoderSpec, fixed_rows: int) -> DecoderSpec:
    """Returns a decoder that is computed in such steps: what the manifest says of rows was measured elsewhere."""
    return with_pass_shape(spec, fixed_rows, fixed_rows)


def cut_pass(rows: int, num_rows: int, fixed_rows: int) -> Iterator[tuple[int, int]]:
    """Cuts a pass so that the rows whose logits are wanted are computed in steps.

    Where the pass is a multiple of a step, as `in_steps` has it padded, all of them are. Otherwise the odd rows stand in front.

    Args:
        rows: Of the pass.
        num_rows: How many logits are wanted, those of the last rows.
        fixed_rows: Of a step.

    Yields:
        (begin, end) of each piece, in order: what stands before the steps, if anything, and each step.
    """
    steps = min(-(-num_rows // fixed_rows), rows // fixed_rows)
    begin = rows - steps * fixed_rows
    if begin:
        yield 0, begin
    yield from itertools.pairwise(range(begin, rows + 1, fixed_rows))


class SteppedModel:
    """A model of any backend, in steps; see Model."""

    def __init__(self, model: Model, fixed_rows: int) -> None:
        """Takes a loaded model.

        Args:
            model: The model.
            fixed_rows: Rows of a step.
        """
        self._model, self._fixed_rows = model, fixed_rows
        self.spec = in_steps(model.spec, fixed_rows)
        self.engine = f"{model.engine}, steps of {fixed_rows} rows"
        self.description = f"{model.description}, steps of {fixed_rows} rows"

    def open_context(self, capacity: int, max_rows: int) -> "SteppedContext":
        """See Model.open_context."""
        return SteppedContext(self._model.open_context(capacity, max_rows), self._fixed_rows)


class SteppedContext:
    """One generation's caches, written in steps; see Context.

    Attributes:
        whole: The model's own context.
    """

    def __init__(self, whole: Context, fixed_rows: int) -> None:
        """Takes the model's own context; used by SteppedModel."""
        self.whole, self._fixed_rows = whole, fixed_rows

    def run(self, token_ids: NDArray[np.int64], past_length: int, num_rows: int) -> NDArray[np.float32]:
        """Runs a pass piece by piece; see Context.run."""
        rows = len(token_ids)
        pieces = []
        for begin, end in cut_pass(rows, num_rows, self._fixed_rows):
            wanted = min(end - begin, max(0, end - (rows - num_rows)))
            logits = self.whole.run(token_ids[begin:end], past_length + begin, wanted)
            pieces.append(logits if end == rows else logits.copy())  # the next run overwrites it
        return np.concatenate(pieces)

    @property
    def max_top(self) -> int:
        """See TopLogitsContext; 0 where the model's own context is none."""
        return self.whole.max_top if isinstance(self.whole, TopLogitsContext) else 0

    def run_top(
        self, token_ids: NDArray[np.int64], past_length: int, num_rows: int, count: int, temperature: float
    ) -> TopLogits:
        """Runs a pass piece by piece; see TopLogitsContext."""
        assert isinstance(self.whole, TopLogitsContext), "max_top tells"
        rows = len(token_ids)
        pieces = []
        for begin, end in cut_pass(rows, num_rows, self._fixed_rows):
            piece, past = token_ids[begin:end], past_length + begin
            if wanted := min(end - begin, max(0, end - (rows - num_rows))):
                top = self.whole.run_top(piece, past, wanted, count, temperature)
                pieces.append(top.copy())  # the next run overwrites it
            else:
                self.whole.run(piece, past, 0)
        return TopLogits.joined(pieces)

    def copy_from(self, source: "SteppedContext", length: int) -> None:
        """Copies cached tokens; see Context.copy_from."""
        self.whole.copy_from(source.whole, length)
