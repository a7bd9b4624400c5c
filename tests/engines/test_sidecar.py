"""An engine's record: what it says, and every way in which an engine may no longer fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from engines.profiles import plan_profiles
from engines.sidecar import EngineRecord, engine_path, engines_folder, graph_hashes, rebuild_command, sidecar_of
from engines.trt_module import TensorRTModule
from runtime.contract import Bundle, file_sha256
from runtime.errors import BundleError

from .tiny_graph import CAPACITY, CONTEXT, write_tiny_bundle

TENSORRT = TensorRTModule("tensorrt", SimpleNamespace(__version__="10.16.1.11"))
ORIN = (8, 7)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return write_tiny_bundle(tmp_path, with_draft=False)


@pytest.fixture
def engine(bundle: Bundle) -> Path:
    """An engine and its record, as they are built."""
    path = engine_path(engines_folder(bundle.folder, TENSORRT, ORIN), bundle.target)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"a plan of TensorRT")
    record = EngineRecord(
        module="tensorrt",
        version="10.16.1.11",
        compute_capability="87",
        graph=graph_hashes(bundle.target),
        capacity=CAPACITY,
        profiles=plan_profiles(8, 7, CONTEXT),
        flags={"strongly_typed": True, "tf32": False, "workspace_bytes": None},
        build_seconds=12.5,
        peak_memory=1 << 30,
        size=path.stat().st_size,
        sha256=file_sha256(path),
    )
    record.save(path)
    return path


def check(engine: Path, bundle: Bundle, tensorrt: TensorRTModule = TENSORRT, gpu: tuple[int, int] = ORIN) -> None:
    command = rebuild_command(bundle.folder, tensorrt)
    EngineRecord.load(engine, command).check(engine, bundle.target, tensorrt, gpu, command)


def test_the_engine_lies_as_its_graph_does(engine: Path, bundle: Bundle) -> None:
    assert engine == bundle.folder / "engines" / "tensorrt-10.16.1.11-sm87" / "target" / "model.engine"
    assert sidecar_of(engine).name == "model.engine.json"


def test_a_fresh_engine_fits_and_its_record_reads_as_it_was_written(engine: Path, bundle: Bundle) -> None:
    check(engine, bundle)
    record = EngineRecord.load(engine, "")
    record.save(engine)
    assert EngineRecord.load(engine, "") == record
    assert (record.fixed_rows, record.max_rows) == (8, CONTEXT)
    assert json.loads(sidecar_of(engine).read_text())["profiles"][0] == {
        "name": "fixed",
        "min_rows": 8,
        "opt_rows": 8,
        "max_rows": 8,
    }


def test_another_version_or_module_is_refused(engine: Path, bundle: Bundle) -> None:
    newer = TensorRTModule("tensorrt", SimpleNamespace(__version__="11.4.0"))
    with pytest.raises(BundleError, match=r"was built by tensorrt 10\.16\.1\.11, and this is tensorrt 11\.4\.0: python"):
        check(engine, bundle, newer)
    other = TensorRTModule("tensorrt_rtx", SimpleNamespace(__version__="10.16.1.11"))
    with pytest.raises(BundleError, match=r"and this is tensorrt_rtx .* --module tensorrt_rtx$"):
        check(engine, bundle, other)


def test_another_gpu_is_refused(engine: Path, bundle: Bundle) -> None:
    with pytest.raises(BundleError, match="for compute capability 87, and this GPU has 110"):
        check(engine, bundle, gpu=(11, 0))


def test_another_graph_is_refused(engine: Path, bundle: Bundle) -> None:
    changed = replace(bundle.target.graph[0], sha256="0" * 64)
    with pytest.raises(BundleError, match="was built from another graph than the bundle has now"):
        check(engine, replace(bundle, target=replace(bundle.target, graph=(changed,))))


@pytest.mark.parametrize("min_rows", [1, 10])
def test_caches_too_small_for_the_context_and_its_padding_are_refused(engine: Path, bundle: Bundle, min_rows: int) -> None:
    """What the manifest says of padding was measured elsewhere, and does not count."""
    largest = replace(bundle.target, context_length=CAPACITY - 7, min_rows=min_rows)
    check(engine, replace(bundle, target=largest))
    with pytest.raises(BundleError, match=f"has caches of 64 slots, and a context of {CAPACITY - 6} tokens needs 65"):
        check(engine, replace(bundle, target=replace(largest, context_length=CAPACITY - 6)))


def test_passes_of_more_rows_than_its_profiles_are_refused(engine: Path) -> None:
    record = EngineRecord.load(engine, "")
    record.check_rows(CONTEXT, engine, "build")
    with pytest.raises(BundleError, match=f"passes of up to 48 rows, and 49 are needed: build --max-rows {CONTEXT + 1}"):
        record.check_rows(CONTEXT + 1, engine, "build")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda engine: engine.write_bytes(engine.read_bytes()[:-1]), "has 17 bytes where its record says 18"),
        (lambda engine: engine.write_bytes(b"A" + engine.read_bytes()[1:]), "was changed after it was built"),
        (lambda engine: engine.unlink(), "is not there, though its record is"),
        (lambda engine: sidecar_of(engine).unlink(), r"has no record \(model\.engine\.json"),
        (lambda engine: sidecar_of(engine).write_text("{"), "is damaged"),
        (lambda engine: sidecar_of(engine).write_text("[]"), "is damaged"),
        (lambda engine: sidecar_of(engine).write_text('{"profiles": []}'), "is damaged"),
    ],
)
def test_damage_is_named_with_the_command_that_mends_it(
    engine: Path, bundle: Bundle, damage: Callable[[Path], object], sentence: str
) -> None:
    damage(engine)
    with pytest.raises(BundleError, match=sentence) as caught:
        check(engine, bundle)
    assert str(caught.value).endswith(f": python scripts/build_engines.py {bundle.folder} --module tensorrt")
    assert "\n" not in str(caught.value)
