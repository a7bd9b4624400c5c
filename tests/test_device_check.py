"""scripts/device_check.py with the CPU in the device's place: what it measures, compares, and calls a trouble."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtime import SamplingParams
from runtime.contract import Bundle
from runtime.cuda_driver import CudaDriver, Gpu, probe_cuda_driver
from runtime.manifest import load_bundle
from runtime.ort.backend import OrtBackend, OrtModel
from runtime.row_equality import PassShape
from runtime.row_record import RowMeasurement

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
without_gpu = pytest.mark.skipif(bool(probe_cuda_driver().gpus), reason="this machine has a GPU")


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """The scripts as modules, imported as the scripts do it."""
    sys.path.append(str(SCRIPTS))
    try:
        yield {name: importlib.import_module(name) for name in ("device_check", "device_worker")}
    finally:
        sys.path.remove(str(SCRIPTS))
        for name in ("device_check", "device_worker"):
            sys.modules.pop(name, None)


@pytest.fixture
def check(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["device_check"]


@pytest.fixture
def worker(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["device_worker"]


def call(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "device_check.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)


def run_of(texts: list[list[int]], drafter: str = "off", number: int = 0) -> dict[str, Any]:
    figures = {"tokens_per_second": 10.0 if drafter == "off" else 15.0, "acceptance_rate": 0.5}
    return {"drafter": drafter, "num_draft_tokens": number, "texts": texts, **figures}


def result_of(device: str, *runs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    facts = {"lowering": "gqa", "precision": "fp32", "engine": "x", "fixed_rows": {"1": True}, "min_rows": 1, "memory": 10**9}
    return {"bundle": "pair", "device": device, "runs": list(runs), **facts, **changes}


# --- comparing -------------------------------------------------------------------------------------------------------


def test_texts_that_agree_are_no_trouble(check: ModuleType):
    texts = [[1, 2, 3], [4, 5]]
    results = [result_of("cpu", run_of(texts), run_of(texts, "model", 2)), result_of("cuda", run_of(texts))]
    check.compare(results)
    assert [check.troubles(result, named=True) for result in results] == [[], []]
    assert "model K=2  15.0   1.50   50%       2/2" in check.table(results)


def test_a_draft_that_changes_a_text_is_named(check: ModuleType):
    result = result_of("cuda", run_of([[1, 2, 3], [4, 5]]), run_of([[1, 2, 9], [4, 5]], "model", 2))
    check.compare([result])
    assert check.troubles(result, named=False) == ["pair on cuda: model K=2 changes 1 of 2 texts."]


@pytest.mark.parametrize(("text", "place"), [([1, 2, 9], 2), ([1, 2], 2), ([9, 2, 3], 0)])
def test_a_device_that_leaves_the_first_ones_text_is_named_with_the_place(check: ModuleType, text: list[int], place: int):
    results = [result_of("cpu", run_of([[1, 2, 3]])), result_of("cuda", run_of([text]))]
    check.compare(results)
    assert check.troubles(results[0], named=True) == []
    assert check.troubles(results[1], named=True) == [f"pair on cuda: plain texts leave the first device's at token {place}."]


def test_bundles_are_compared_each_with_itself(check: ModuleType):
    results = [result_of("cpu", run_of([[1]])), result_of("cpu", run_of([[2]]), bundle="other")]
    check.compare(results)
    assert [check.troubles(result, named=True) for result in results] == [[], []]


def test_rows_that_no_number_fixes_are_named(check: ModuleType):
    result = result_of("cuda", run_of([[1]]), fixed_rows={"1": False, "2": False}, min_rows=None, memory=None)
    check.compare([result])
    assert check.troubles(result, named=True) == ["pair on cuda: no fixed number of rows gives a row the same bits."]
    assert "none" in check.table([result])


@pytest.mark.parametrize(("equal", "count"), [(None, 0), (True, 0), (False, 1)])
def test_largest_logits_that_make_another_text_are_named(check: ModuleType, equal: bool | None, count: int):
    result = result_of("cuda", run_of([[1]]), top_equals_whole=equal)
    check.compare([result])
    assert check.troubles(result, named=True) == ["pair on cuda: texts change where only the largest logits come back."][:count]


@pytest.mark.parametrize(("top_logits", "whole", "expected"), [(1, [5, 6], True), (1, [5, 7], False), (0, [5, 6], None)])
def test_texts_of_the_largest_logits_are_compared_with_those_of_whole_rows(
    worker: ModuleType, top_logits: int, whole: list[int], expected: bool | None
):
    class Device:
        def generate(self, prompt: str, params: SamplingParams) -> SimpleNamespace:
            tokens = [5, 6] if params.logprobs is None or params.greedy else whole
            return SimpleNamespace(token_ids=tokens, stats=SimpleNamespace(top_logits=top_logits))

    assert worker.top_equals_whole(Device(), 4) is expected


def test_a_device_that_refuses_fails_only_where_it_was_named(check: ModuleType):
    refused = {"bundle": "pair", "device": "tensorrt", "error": "no engine"}
    check.compare([refused])
    assert check.troubles(refused, named=False) == []
    assert check.troubles(refused, named=True) == ["pair on tensorrt: no engine"]
    assert check.troubles({**refused, "device": "cpu"}, named=False)  # the CPU is everywhere
    assert "refused" in check.table([refused])


# --- measuring -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path) -> Bundle:
    return load_bundle(tiny_bundle)


class RowDependent:
    """A model whose logits depend on how many rows a pass has, or on where in it a row stands."""

    def __init__(self, model: OrtModel, kind: str) -> None:
        self._model, self._kind = model, kind
        self.spec, self.engine, self.description = model.spec, model.engine, model.description

    def open_context(self, capacity: int, max_rows: int) -> Any:
        context = self._model.open_context(capacity, max_rows)
        run = context.run

        def shifted(token_ids: Any, past_length: int, num_rows: int) -> Any:
            logits = run(token_ids, past_length, num_rows).copy()
            places = np.arange(len(token_ids), dtype=np.float32)[len(token_ids) - num_rows :, None]
            return logits + np.float32(0.01) * (len(token_ids) if self._kind == "rows" else places)

        context.run = shifted
        return context


def test_fixed_rows_hold_for_a_model_that_depends_on_their_number_only(worker: ModuleType, bundle: Bundle):
    model = OrtBackend(threads=1).load(bundle.target, bundle.folder)
    tokens = np.random.default_rng(3).integers(3, 512, 40).tolist()
    for rows in (1, 4, 8):
        assert worker.fixed_rows_agree(model, rows, tokens)
        assert worker.fixed_rows_agree(RowDependent(model, "rows"), rows, tokens)
    assert not worker.fixed_rows_agree(RowDependent(model, "places"), 4, tokens)
    # The counterpart: rows of every number together do not agree there.
    assert worker.measure_row_equality(model, tokens * 2) == (1, 1)
    assert worker.measure_row_equality(RowDependent(model, "rows"), tokens * 2) is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--device", "foo"), "the device 'foo' is unknown; this installation has cpu, cuda, ort-tensorrt"),
        (("--device", "cuda+foo"), "the device 'foo' is unknown; this installation has cpu, cuda, ort-tensorrt"),
        (("--seconds", "nan"), "--seconds is nan; a number above 0 is expected"),
        (("--num-draft-tokens", 0), "--max-new-tokens and --num-draft-tokens are at least 1"),
        (
            ("--device", "cpu", "--out", "no-such-folder/x.json"),
            "no-such-folder/x.json cannot be written: there is no no-such-folder",
        ),
    ],
)
def test_odd_options_are_refused_before_the_work(arguments: tuple[object, ...], sentence: str):
    done = call(*arguments)
    assert done.returncode in (1, 2)
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_help_teaches_by_example():
    done = call("--help")
    assert done.returncode == 0
    assert "examples:" in done.stdout
    assert "python scripts/device_check.py" in done.stdout


def test_the_cpu_in_a_devices_place(tiny_bundle: Path, tmp_path: Path):
    out = tmp_path / "device.json"
    options = ("--threads", 1, "--max-new-tokens", 12, "--num-draft-tokens", 1, 3, "--out", out)
    done = call(tiny_bundle, "--device", "cpu", *options)
    assert done.returncode == 0, done.stderr
    assert "All texts agree" in done.stdout
    document = json.loads(out.read_text())
    (result,) = document["results"]
    modes = [(one["drafter"], one["num_draft_tokens"]) for one in result["runs"]]
    assert modes == [("off", 0), ("model", 1), ("model", 3), ("lookup", 1), ("lookup", 3)]
    assert all(one["equal_reference"] == len(one["texts"]) == 3 for one in result["runs"])
    assert all(len(text) == 12 for one in result["runs"] for text in one["texts"])
    assert (result["min_rows"], document["troubles"]) == (1, [])
    assert all(result["fixed_rows"].values())


def test_target_and_draft_may_be_apart(worker: ModuleType, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch):
    opened = []

    def open_backend(device: str, **named: Any) -> OrtBackend:
        opened.append(device)
        return OrtBackend(threads=named["threads"])

    monkeypatch.setattr("runtime.loading.open_backend", open_backend)
    monkeypatch.setattr("runtime.row_record.RowMeasurement.of", lambda *_: RowMeasurement(PassShape(1)))
    settings = {"max_new_tokens": 4, "num_draft_tokens": [2], "threads": 1, "seconds": 30}
    folder = Path(shutil.copytree(tiny_bundle, tiny_bundle.with_name("apart")))
    result = worker.measure(folder, "cuda+cpu", settings)
    assert opened == ["cuda", "cpu"]
    assert [one["drafter"] for one in result["runs"]] == ["off", "model", "lookup"]
    assert result["exactness"].startswith("every row has the same bits")


def test_mixed_pairs_and_every_device_are_tried_unless_told_otherwise(check: ModuleType, monkeypatch: pytest.MonkeyPatch):
    tried = []
    driver = CudaDriver((13, 0), (Gpu("RTX", (8, 9), 1 << 30, integrated=False),), None)
    monkeypatch.setattr("runtime.cuda_driver.probe_cuda_driver", lambda: driver)
    monkeypatch.setattr(check, "export_tiny_pair", lambda folder: [folder])
    monkeypatch.setattr(check, "_build_engines", lambda *_: None)
    monkeypatch.setattr(check, "_worker", lambda _bundle, device, *_: tried.append(device) or {"error": "no"})
    monkeypatch.setattr(sys, "argv", ["device_check.py"])
    check.main()
    assert {"cpu", "cuda", "ort-tensorrt", "tensorrt", "tensorrt-rtx", "cuda+cpu", "cpu+cuda"} == set(tried)


def test_when_time_is_up_nothing_new_begins(worker: ModuleType, tiny_bundle: Path):
    settings = {"max_new_tokens": 4, "num_draft_tokens": [1, 2], "threads": 1, "seconds": 0}
    command = [sys.executable, str(SCRIPTS / "device_worker.py"), str(tiny_bundle), "cpu", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert [one["drafter"] for one in json.loads(done.stdout.splitlines()[-1])["runs"]] == ["off"]


def test_a_folder_that_is_no_bundle_is_a_failure(tmp_path: Path):
    done = call(tmp_path, "--device", "cpu")
    assert done.returncode == 1
    assert f"{tmp_path.name} on cpu: {tmp_path}" in done.stdout
    assert "Traceback" not in done.stderr


@without_gpu
@pytest.mark.parametrize("devices", [(), ("--device", "cuda"), ("--device", "cpu", "--device", "cuda")])
def test_a_machine_without_a_gpu_says_so(tiny_bundle: Path, devices: tuple[str, ...]):
    done = call(tiny_bundle, *devices)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("nothing was checked: ")
    assert done.stderr.count("\n") == 1
