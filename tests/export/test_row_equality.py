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

from export.decoders import write_decoder
from export.role import Role
from export.source import Source
from runtime.backend import Context, Model
from runtime.contract import DecoderSpec
from runtime.decoder import Decoder
from runtime.ort.backend import OrtBackend
from runtime.row_equality import PassShape, measure_row_equality

Damage = Callable[[DecoderSpec, Callable[[onnx.ModelProto], None]], tuple[DecoderSpec, Path]]


class SomePassesDiffer:
    """A model whose passes of some numbers of rows give other bits in the last place; nothing else is wrong."""

    def __init__(self, model: Model, differs: Callable[[int], bool], *, min_rows: int = 1, row_multiple: int = 1) -> None:
        self.spec = dataclasses.replace(model.spec, min_rows=min_rows, row_multiple=row_multiple)
        self.engine, self.description = model.engine, model.description
        self._differs = differs
        self._model = model

    def open_context(self, capacity: int, max_rows: int) -> Context:
        return _SomePassesDiffer(self._model.open_context(capacity, max_rows), self._differs)


class _SomePassesDiffer:
    def __init__(self, context: Context, differs: Callable[[int], bool]) -> None:
        self._context, self._differs = context, differs

    def run(self, token_ids: NDArray[np.int64], past_length: int, num_rows: int) -> NDArray[np.float32]:
        logits = self._context.run(token_ids, past_length, num_rows)
        return np.nextafter(logits, np.float32(np.inf)) if self._differs(len(token_ids)) else logits


def fewer_than(least: int) -> Callable[[int], bool]:
    return lambda rows: rows < least


def no_multiple_of(number: int) -> Callable[[int], bool]:
    return lambda rows: rows % number != 0


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
    assert measure_row_equality(OrtBackend().load(decoders[name], decoders_folder), probe) == PassShape(1)


def logits_in_cuts(model: Model, tokens: list[int], cut: list[int]) -> NDArray[np.float32]:
    decoder = Decoder(model, len(tokens), num_rows=max(cut))
    return np.concatenate([decoder.forward(tokens[decoder.past_length :][:rows], rows).copy() for rows in cut])


def test_graph_without_the_spare_row_is_measured_as_it_is(decoders: dict[str, DecoderSpec], damaged: Damage, probe: list[int]):
    spec, folder = damaged(decoders["int4"], without_spare_row)
    model = OrtBackend().load(spec, folder)
    whole = logits_in_cuts(model, probe, [64])
    lone_rows_equal = np.array_equal(logits_in_cuts(model, probe, [1] * 64), whole)
    shape = measure_row_equality(model, probe)
    # Whether lone rows differ is the machine's own affair; ours is that the measurement says so, and that padding helps.
    assert (shape == PassShape(1)) == lone_rows_equal
    padded = OrtBackend().load(dataclasses.replace(spec, min_rows=2), folder)
    for cut in ([1] * 64, [20, *[1, 2, 3, 1] * 6, 2]):
        assert np.array_equal(logits_in_cuts(padded, probe, cut), whole)


@pytest.mark.parametrize(
    ("differs", "measured"),
    [
        (fewer_than(1), PassShape(1)),
        (fewer_than(2), PassShape(2)),
        (fewer_than(3), PassShape(4)),
        (fewer_than(5), PassShape(8)),
        (fewer_than(16), PassShape(16)),
        (fewer_than(17), None),
        (no_multiple_of(2), PassShape(2, 2)),
        (no_multiple_of(4), PassShape(4, 4)),
    ],
)
def test_measurement_finds_the_cheapest_shape_whose_bits_agree(
    decoders: dict[str, DecoderSpec],
    decoders_folder: Path,
    probe: list[int],
    differs: Callable[[int], bool],
    measured: PassShape | None,
):
    model = OrtBackend().load(decoders["draft"], decoders_folder)
    assert measure_row_equality(SomePassesDiffer(model, differs), probe) == measured


@pytest.mark.parametrize("block_size", [64, 128])
def test_products_with_large_blocks_are_bit_equal_in_passes_of_even_rows(
    target_source: Source, tmp_path: Path, probe: list[int], block_size: int
):
    role = Role("target", target_source, "int4", 128, block_size)
    model = OrtBackend().load(write_decoder(role, tmp_path, lambda *_: None), tmp_path)
    shape = measure_row_equality(model, probe)
    # Another processor may have kernels without that path; none may need more than its padding.
    assert shape in (PassShape(1), PassShape(2), PassShape(2, 2))


def test_decoder_pads_as_the_spec_says(decoders: dict[str, DecoderSpec], decoders_folder: Path, probe: list[int]):
    model = OrtBackend().load(decoders["draft"], decoders_folder)
    whole = logits_in_cuts(model, probe, [64])
    cut = [30, 1, 1, 2, 1, 3, 25, 1]
    assert not np.array_equal(logits_in_cuts(SomePassesDiffer(model, fewer_than(2)), probe, cut), whole)
    for differs, min_rows, row_multiple in (
        (fewer_than(2), 2, 1),
        (fewer_than(4), 4, 1),
        (no_multiple_of(2), 1, 2),
        (no_multiple_of(4), 2, 4),
        (lambda rows: rows < 6 or rows % 4 != 0, 8, 4),
    ):
        padded = SomePassesDiffer(model, differs, min_rows=min_rows, row_multiple=row_multiple)
        assert np.array_equal(logits_in_cuts(padded, probe, cut), whole)
