"""Rows of logits on demand in graphs of fixed caches: the rows that are asked for, the same bits, and no others computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from export.decoders import write_decoder
from export.lowerings import STANDARD_FORMS
from export.role import Role
from export.source import Source
from runtime.contract import DecoderSpec
from runtime.ort.backend import OrtBackend
from runtime.ort.cuda_backend import OrtCudaModel
from runtime.ort.device_context import Memory

FORMS = [(lowering, precision) for lowering in STANDARD_FORMS for precision in ("fp32", "fp16", "int4")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module")
def specs(target_source: Source, folder: Path) -> dict[tuple[str, str], DecoderSpec]:
    def write(lowering: str, precision: str) -> DecoderSpec:
        role = Role(f"{lowering}-{precision}", target_source, precision, 64, lowering=lowering)
        return write_decoder(role, folder, lambda *_: None)

    return {form: write(*form) for form in FORMS}


def session_of(spec: DecoderSpec, folder: Path) -> ort.InferenceSession:
    return ort.InferenceSession(str(folder / spec.graph[0].path), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "as on a device"])
@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_few_rows_are_the_same_as_among_all(
    specs: dict[tuple[str, str], DecoderSpec], folder: Path, probe: list[int], form: tuple[str, str], on_device: bool
):
    spec = specs[form]
    model = OrtBackend(threads=1).load(spec, folder)
    if on_device:
        model = OrtCudaModel(spec, session_of(spec, folder), Memory("cpu", 0), "host")
    context = model.open_context(64, 24)
    tokens = np.array(probe[:24])
    whole = context.run(tokens, 0, 24).copy()
    for num_rows in (1, 2, 5, 23):
        assert np.array_equal(context.run(tokens, 0, num_rows), whole[-num_rows:]), num_rows
    assert context.run(tokens, 0, 0).shape == (0, 512)


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_the_graph_computes_no_other_rows(specs: dict[tuple[str, str], DecoderSpec], folder: Path, form: tuple[str, str]):
    spec = specs[form]
    session = session_of(spec, folder)
    types = {"tensor(int64)": np.int64, "tensor(float)": np.float32, "tensor(float16)": np.float16}

    def logits(rows: list[int]) -> NDArray[np.float32]:
        feeds = {"input_ids": np.array([[5, 9, 77, 3]]), "past_length": np.array([0]), "logits_rows": np.array(rows)}
        caches = (value for value in session.get_inputs() if value.name not in feeds)
        return session.run(["logits"], feeds | {value.name: np.zeros(value.shape, types[value.type]) for value in caches})[0][0]

    whole = logits([0, 1, 2, 3])
    assert np.array_equal(logits([2]), whole[[2]])
    assert np.array_equal(logits([3, 1]), whole[[3, 1]])


def test_the_head_of_every_form_can_be_asked_for_few_rows(specs: dict[tuple[str, str], DecoderSpec]):
    assert {spec.names.logits_rows for spec in specs.values()} == {"logits_rows"}
    assert {spec.names.num_logits_to_keep for spec in specs.values()} == {None}
