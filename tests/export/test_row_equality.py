"""Which rows give the same bits: measured on the tiny graphs, on one without its spare row, and on models that lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from export.row_equality import measure_min_rows
from runtime.backend import Context, Model
from runtime.contract import DecoderSpec
from runtime.decoder import Decoder
from runtime.ort_backend import OrtBackend

Damage = Callable[[DecoderSpec, Callable[[onnx.ModelProto], None]], tuple[DecoderSpec, Path]]


class FewRowsDiffer:
    """A model whose passes of fewer than `rows` rows give other bits in the last place; nothing else is wrong."""

    def __init__(self, model: Model, rows: int, *, min_rows: int = 1) -> None:
        self.spec = dataclasses.replace(model.spec, min_rows=min_rows)
        self.engine, self.description = model.engine, model.description
        self.rows = rows
        self._model = model

    def open_context(self, capacity: int, max_rows: int) -> Context:
        return _FewRowsDiffer(self._model.open_context(capacity, max_rows), self.rows)


class _FewRowsDiffer:
    def __init__(self, context: Context, rows: int) -> None:
        self._context, self._rows = context, rows

    def run(self, token_ids: NDArray[np.int64], past_length: int, num_rows: int) -> NDArray[np.float32]:
        logits = self._context.run(token_ids, past_length, num_rows)
        return np.nextafter(logits, np.float32(np.inf)) if len(token_ids) < self._rows else logits


def without_spare_row(model: onnx.ModelProto) -> None:
    """Undoes what the lowering adds: attention sees the rows of the pass, and no row is sliced off."""
    attentions = {node.output[0]: node for node in model.graph.node if node.op_type == "GroupQueryAttention"}
    gathered = {node.output[0]: node.input[0] for node in model.graph.node if "rows_and_spare" in node.input}
    renamed = {
        node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Slice" and node.input[0] in attentions
    }
    assert len(gathered) == 3 * len(attentions) == 3 * len(renamed)
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1], np.int32), "minus_one"))
    model.graph.initializer.append(numpy_helper.from_array(np.array(-1, np.int32), "minus_one_scalar"))
    first = next(index for index, node in enumerate(model.graph.node) if node.op_type == "GroupQueryAttention")
    model.graph.node.insert(first, onnx.helper.make_node("Add", ["cached_tokens", "minus_one"], ["cached_before"]))
    model.graph.node.insert(first, onnx.helper.make_node("Add", ["total_tokens", "minus_one_scalar"], ["total_before"]))
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            node.input[:3] = [gathered[name] for name in node.input[:3]]
            node.input[5:7] = ["cached_before", "total_before"]
        else:
            node.input[:] = [renamed.get(name, name) for name in node.input]


@pytest.mark.parametrize("name", ["fp32", "int8", "int4", "draft"])
def test_exported_graphs_need_no_padding(decoders: dict[str, DecoderSpec], decoders_folder: Path, probe: list[int], name: str):
    assert measure_min_rows(OrtBackend().load(decoders[name], decoders_folder), probe) == 1


def logits_in_cuts(model: Model, tokens: list[int], cut: list[int]) -> NDArray[np.float32]:
    decoder = Decoder(model, len(tokens), num_rows=max(cut))
    return np.concatenate([decoder.forward(tokens[decoder.past_length :][:rows], rows).copy() for rows in cut])


def test_graph_without_the_spare_row_is_measured_as_it_is(decoders: dict[str, DecoderSpec], damaged: Damage, probe: list[int]):
    spec, folder = damaged(decoders["int4"], without_spare_row)
    model = OrtBackend().load(spec, folder)
    whole = logits_in_cuts(model, probe, [64])
    lone_rows_equal = np.array_equal(logits_in_cuts(model, probe, [1] * 64), whole)
    min_rows = measure_min_rows(model, probe)
    # Whether lone rows differ is the machine's own affair; ours is that the measurement says so, and that padding helps.
    assert (min_rows == 1) == lone_rows_equal
    padded = OrtBackend().load(dataclasses.replace(spec, min_rows=2), folder)
    for cut in ([1] * 64, [20, *[1, 2, 3, 1] * 6, 2]):
        assert np.array_equal(logits_in_cuts(padded, probe, cut), whole)


@pytest.mark.parametrize(("rows", "measured"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (16, 16), (17, None)])
def test_measurement_finds_from_how_many_rows_on_bits_agree(
    decoders: dict[str, DecoderSpec], decoders_folder: Path, probe: list[int], rows: int, measured: int | None
):
    model = OrtBackend().load(decoders["draft"], decoders_folder)
    assert measure_min_rows(FewRowsDiffer(model, rows), probe) == measured


def test_decoder_pads_to_min_rows(decoders: dict[str, DecoderSpec], decoders_folder: Path, probe: list[int]):
    model = OrtBackend().load(decoders["draft"], decoders_folder)
    whole = logits_in_cuts(model, probe, [64])
    cut = [30, 1, 1, 2, 1, 3, 25, 1]
    assert not np.array_equal(logits_in_cuts(FewRowsDiffer(model, 2), probe, cut), whole)
    assert np.array_equal(logits_in_cuts(FewRowsDiffer(model, 2, min_rows=2), probe, cut), whole)
    assert np.array_equal(logits_in_cuts(FewRowsDiffer(model, 4, min_rows=4), probe, cut), whole)
