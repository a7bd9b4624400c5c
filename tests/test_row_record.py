"""Rows on a machine the exporter did not measure on: measured once, kept, used; and passes in steps of fixed size."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime import Generator, SamplingParams
from runtime.backend import Model
from runtime.contract import DecoderSpec
from runtime.decoder import Decoder
from runtime.errors import BundleError
from runtime.manifest import load_bundle
from runtime.ort.backend import OrtBackend, cpu_kernels
from runtime.plan import processor
from runtime.row_equality import PassShape, measure_fixed_rows
from runtime.row_record import EXACT, ROWS, RowMeasurement, load_measured
from runtime.steps import SteppedModel, with_pass_shape

TOKENS = np.random.default_rng(3).integers(3, 512, 64).tolist()


class OddDevice:
    """A backend whose logits depend on how many rows a pass has, and on where in it a row stands, as `shift` says."""

    def __init__(self, shift: Callable[[int, NDArray[np.int64]], NDArray[np.float32] | float]) -> None:
        self.loads: list[DecoderSpec] = []
        self.runs = 0
        self._shift = shift

    def load(self, spec: DecoderSpec, folder: Path) -> Model:
        self.loads.append(spec)
        model = OrtBackend(threads=1).load(spec, folder)
        model.engine = model.description = "odd device"
        opened = model.open_context

        def open_context(capacity: int, max_rows: int) -> object:
            context = opened(capacity, max_rows)
            run = context.run

            def shifted(token_ids: NDArray[np.int64], past_length: int, num_rows: int) -> NDArray[np.float32]:
                self.runs += 1
                logits = run(token_ids, past_length, num_rows).copy()
                places = np.arange(len(token_ids) - num_rows, len(token_ids))[:, None]
                return (logits + np.float32(1e-3) * self._shift(len(token_ids), places)).astype(np.float32)

            context.run = shifted
            return context

        model.open_context = open_context
        return model


EQUAL = OddDevice(lambda rows, places: 0.0)
BELOW_TWO = OddDevice(lambda rows, places: float(rows < 2))
BY_ROWS = OddDevice(lambda rows, places: float(rows))
BY_PLACES = OddDevice(lambda rows, places: places)


@pytest.fixture
def copied(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def measured(device: OddDevice, folder: Path) -> tuple[Model, str]:
    device.loads, device.runs = [], 0
    return load_measured(device, load_bundle(folder).target, folder, None, TOKENS)


def in_pieces(model: Model, cut: list[int]) -> NDArray[np.float32]:
    decoder = Decoder(model, sum(cut), num_rows=max(cut))
    return np.concatenate([decoder.forward(TOKENS[decoder.past_length :][:rows], rows).copy() for rows in cut])


# --- measuring once --------------------------------------------------------------------------------------------------


def test_a_device_with_equal_rows_needs_no_padding(copied: Path):
    model, sentence = measured(EQUAL, copied)
    assert (model.spec.min_rows, len(EQUAL.loads)) == (1, 1)
    assert sentence == f"{EXACT} (measured on odd device)"


def test_a_device_whose_lone_rows_differ_is_fed_two(copied: Path):
    model, sentence = measured(BELOW_TWO, copied)
    assert (model.spec.min_rows, model.spec.row_multiple, len(BELOW_TWO.loads)) == (2, 1, 1)
    assert sentence.startswith(EXACT)
    assert np.array_equal(in_pieces(model, [1] * 20), in_pieces(model, [20]))


def test_a_device_that_depends_on_the_number_of_rows_is_fed_steps(copied: Path):
    model, sentence = measured(BY_ROWS, copied)
    assert (model.spec.min_rows, model.spec.row_multiple) == (8, 8)
    assert sentence == "every row has the same bits, computed in steps of 8 (measured on odd device)"
    assert "steps of 8" in model.engine
    for cut in ([1] * 20, [3, 17], [9, 1, 1, 9]):
        assert np.array_equal(in_pieces(model, cut), in_pieces(model, [20]))


def test_a_device_that_nothing_helps_loads_and_says_so(copied: Path):
    model, sentence = measured(BY_PLACES, copied)
    assert model.spec.min_rows == load_bundle(copied).target.min_rows
    assert "a text may depend on what is proposed (measured on odd device)" in sentence


@pytest.mark.parametrize("device", [EQUAL, BELOW_TWO, BY_ROWS, BY_PLACES], ids=["equal", "below two", "rows", "places"])
def test_what_was_measured_is_kept(copied: Path, device: OddDevice):
    first, sentence = measured(device, copied)
    assert device.runs > 0
    again, said = measured(device, copied)
    assert (device.runs, said, again.spec) == (0, sentence, first.spec)
    load_measured(device, load_bundle(copied).draft, copied, None, TOKENS)
    assert device.runs > 0  # of another graph nothing is known


def test_a_folder_that_cannot_be_written_is_measured_each_time(copied: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_args: object, **_named: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", refuse)
    assert measured(BELOW_TWO, copied)[0].spec.min_rows == 2
    assert not (copied / ROWS).exists()
    assert measured(BELOW_TWO, copied)[0].spec.min_rows == 2
    assert BELOW_TWO.runs > 0


@pytest.mark.parametrize(
    "text",
    ["{", "[" * 100_000, "[]", '{"format_version": 1}', '{"format_version": 1, "measured": {"odd device": 3}}'],
    ids=["cut", "deep", "list", "empty", "number"],
)
def test_a_damaged_file_is_named(copied: Path, text: str):
    (copied / ROWS).write_text(text)
    with pytest.raises(BundleError, match=r"rows\.json is damaged \(.*\): remove it, and the rows are measured again\.$"):
        measured(EQUAL, copied)


SHAPES = ([2, "x"], [1, 0], [0, 1], [-1, -1], "12", [1.9, 1], [True, 1], [5000, 1], [1, 2, 3], [])


@pytest.mark.parametrize(
    "entry",
    [*({"shape": shape} for shape in SHAPES), *({"shape": None, "fixed_rows": rows} for rows in (0, -3, 65, 8.0, "8"))],
    ids=str,
)
def test_an_entry_that_no_measurement_gives_is_named(copied: Path, entry: dict):
    graph = load_bundle(copied).target.graph[0].sha256
    kept = {"odd device": {graph: {"fixed_rows": None, **entry}}}
    (copied / ROWS).write_text(json.dumps({"format_version": 1, "measured": kept}))
    with pytest.raises(BundleError, match=r"rows\.json is damaged \(.*\): remove it, and the rows are measured again\.$"):
        measured(EQUAL, copied)


# --- the CPU ---------------------------------------------------------------------------------------------------------


def test_the_exporters_own_processor_is_not_measured_again(copied: Path):
    assert load_bundle(copied).target.rows_measured_on == cpu_kernels()
    generator = Generator.from_bundle(copied, drafter="model")
    assert not (copied / ROWS).exists()
    assert generator.describe()["target exactness"] == f"{EXACT}; passes need no padding"


def test_another_processor_is_measured_and_described(copied: Path):
    manifest = json.loads((copied / "bundle.json").read_text())
    manifest["target"]["rows_measured_on"] = "another processor"
    (copied / "bundle.json").write_text(json.dumps(manifest))
    generator = Generator.from_bundle(copied, drafter="model")
    assert generator.describe()["target exactness"].startswith(f"{EXACT} (measured on {cpu_kernels()}); ")
    assert list(json.loads((copied / ROWS).read_text())["measured"]) == [cpu_kernels()]


X86 = "processor\t: 0\nmodel name\t: Xeon\nflags\t\t: fpu avx2 hypervisor avx512_vnni avx\n\nmodel name\t: other\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\n\nModel\t\t: Raspberry Pi 5\n"


@pytest.mark.parametrize(
    ("information", "told"),
    [
        (X86, "Xeon (avx avx2 avx512_vnni)"),
        (ARM, "Raspberry Pi 5 (asimd asimddp i8mm)"),
        ("model name : plain\n", "plain"),
    ],
    ids=["x86", "arm", "plain"],
)
def test_processors_of_one_name_are_told_apart_by_their_instruction_sets(tmp_path: Path, information: str, told: str):
    (tmp_path / "cpuinfo").write_text(information)
    assert processor(tmp_path / "cpuinfo") == told
    assert processor(tmp_path / "none")
    assert processor() in cpu_kernels()


# --- steps -----------------------------------------------------------------------------------------------------------


def test_steps_compute_what_whole_passes_do(tiny_bundle: Path):
    target = load_bundle(tiny_bundle).target
    model = OrtBackend(threads=1).load(target, tiny_bundle)
    stepped = SteppedModel(model, 4)
    for cut in ([64], [1] * 64, [30, 1, 5, 9, 19]):
        assert np.array_equal(in_pieces(stepped, cut), in_pieces(model, [64]))
    source = Decoder(stepped, 64, num_rows=8)
    source.forward(TOKENS[:30], 1)
    copy = source.fork()
    assert np.array_equal(copy.forward(TOKENS[30:35], 5), source.forward(TOKENS[30:35], 5))


def test_a_long_proposal_is_several_steps(tiny_bundle: Path):
    model = OrtBackend(threads=1).load(load_bundle(tiny_bundle).target, tiny_bundle)
    context = SteppedModel(model, 4).open_context(80, 32)
    rows = []
    run = context.whole.run
    context.whole.run = lambda ids, past, wanted: rows.append((len(ids), past, wanted)) or run(ids, past, wanted)
    assert context.run(np.array(TOKENS[:20]), 3, 6).shape == (6, 512)
    assert rows == [(12, 3, 0), (4, 15, 2), (4, 19, 4)]
    rows.clear()
    assert context.run(np.array(TOKENS[:20]), 3, 0).shape == (0, 512)
    assert rows == [(20, 3, 0)]


def test_texts_do_not_depend_on_what_is_proposed_where_rows_do(copied: Path):
    bundle = load_bundle(copied)
    tokenizer = Generator.from_bundle(copied, drafter="off").tokenizer
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    target, _ = measured(BY_ROWS, copied)
    draft = OrtBackend(threads=1).load(bundle.draft, copied)
    generator = Generator(target, draft, tokenizer, bundle.tokenizer.eos_token_ids)
    plain = generator.generate("1 2 3", params, drafter="off")
    for number in (1, 3, 8, 12):
        assert generator.generate("1 2 3", params, num_draft_tokens=number).token_ids == plain.token_ids


def test_padding_that_the_context_has_no_room_for_shortens_it(tiny_bundle: Path):
    target = load_bundle(tiny_bundle).target
    assert with_pass_shape(target, 8, 8).context_length == target.context_length - 7
    fixed = dataclasses.replace(target, cache_capacity=target.context_length + 15)
    assert with_pass_shape(fixed, 8, 8).context_length == target.context_length


def test_the_fewest_rows_that_serve_are_measured(tiny_bundle: Path):
    target = load_bundle(tiny_bundle).target
    assert measure_fixed_rows(BY_ROWS.load(target, tiny_bundle), TOKENS) == 8
    assert measure_fixed_rows(BY_PLACES.load(target, tiny_bundle), TOKENS) is None
    assert RowMeasurement.of(EQUAL.load(target, tiny_bundle), TOKENS) == RowMeasurement(PassShape(1))
