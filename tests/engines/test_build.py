"""Engines of a tiny graph by the real TensorRT-RTX, which compiles without a GPU and without a driver."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from engines.build import BuildOptions, build_engine, build_top_engine, call_interruptibly
from engines.bundle import TOP_COUNTS, build_bundle_engines
from engines.profiles import plan_profiles
from engines.sidecar import EngineRecord, engine_path, engines_folder
from engines.trt_module import TensorRTModule
from runtime.contract import Bundle, DecoderSpec
from runtime.errors import BundleError, DeviceError

from .tiny_graph import CAPACITY, CONTEXT, build_tiny_graph, with_lowering, write_decoder, write_tiny_bundle

pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install -e '.[tensorrt-rtx]'")

RTX = TensorRTModule.load("tensorrt_rtx")
AMPERE = (8, 6)


def ignore(*_: object) -> None:
    """Takes no report."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle of tiny graphs in float16: TensorRT has no fused attention in float32."""
    return write_tiny_bundle(tmp_path_factory.mktemp("bundle"), np.float16)


def build(folder: Path, model: onnx.ModelProto, **changes: object) -> bytes:
    spec = replace(write_decoder(folder, "target", model, np.float16), **changes)
    return build_spec(folder, spec)


def build_spec(folder: Path, spec: DecoderSpec, **arguments: object) -> bytes:
    defaults = {"profiles": plan_profiles(4, 3, CONTEXT)}
    arguments = (
        defaults | {"report": ignore, "stop": threading.Event(), "capability": AMPERE, "options": BuildOptions()} | arguments
    )
    return build_engine(
        RTX,
        spec,
        folder / spec.graph[0].path,
        arguments["capability"],
        arguments["profiles"],
        arguments["options"],
        arguments["report"],
        arguments["stop"],
    ).plan


# --- what TensorRT takes ---------------------------------------------------------------------------------------------


def build_all(bundle: Bundle, num_draft_tokens: int = 3, max_rows: int | None = None) -> list[EngineRecord]:
    """Builds a bundle's engines."""
    records = build_bundle_engines(
        bundle,
        RTX,
        AMPERE,
        num_draft_tokens=num_draft_tokens,
        max_rows=max_rows,
        options=BuildOptions(),
        report=ignore,
        stop=threading.Event(),
    )
    return list(records.values())


def test_a_bundles_engines_fit_their_records_and_nothing_else_is_left(bundle: Bundle) -> None:
    folder = engines_folder(bundle.folder, RTX, AMPERE)
    build_all(bundle)
    for spec, record in zip((bundle.target, bundle.draft), build_all(bundle), strict=True):  # the second replaces the first
        engine = engine_path(folder, spec)
        record.check(engine, spec, RTX, AMPERE, "")
        assert EngineRecord.load(engine, "") == record
        assert record.capacity == CAPACITY
        assert record.max_rows == CONTEXT
        assert record.fixed_rows == (4 if spec is bundle.target else 2)
        assert record.peak_memory > 50e6
        assert record.flags == {"strongly_typed": True, "tf32": False, "workspace_bytes": None}
        assert list(record.top) == ["8"]  # of 48 logits, the 71 largest are all of them
    assert sum(path.is_file() for path in folder.rglob("*")) == 6
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize(("max_rows", "longest"), [(None, 50), (16, 20)])
def test_the_longest_pass_is_a_multiple_of_a_step(tmp_path: Path, max_rows: int | None, longest: int) -> None:
    bundle = write_tiny_bundle(tmp_path, np.float16, with_draft=False)
    (record,) = build_all(bundle, num_draft_tokens=4, max_rows=max_rows)
    assert (record.fixed_rows, record.max_rows) == (5, longest)
    record.check(engine_path(engines_folder(tmp_path, RTX, AMPERE), bundle.target), bundle.target, RTX, AMPERE, "")


def test_two_builds_differ_at_most_in_the_order_of_their_outputs(bundle: Bundle) -> None:
    # TensorRT lists outputs by where they lie in memory: a few thousand bytes may change places, and none its value.
    first, second = (np.frombuffer(build_spec(bundle.folder, bundle.target), np.uint8) for _ in range(2))
    assert len(first) == len(second)
    assert np.array_equal(np.bincount(first), np.bincount(second))
    assert np.count_nonzero(first != second) < len(first) // 100


@pytest.mark.parametrize("count", TOP_COUNTS)
@pytest.mark.parametrize(("vocab_size", "fixed_rows"), [(49152, 1), (151936, 8), (262144, 16)])
def test_what_finds_the_largest_logits_is_built_for_any_vocabulary(
    bundle: Bundle, vocab_size: int, fixed_rows: int, count: int
) -> None:
    spec = replace(bundle.target, vocab_size=vocab_size)
    plans = [build_top_engine(RTX, spec, fixed_rows, count, AMPERE, BuildOptions()) for _ in range(2)]
    assert 100_000 < len(plans[0]) == len(plans[1]) < 4_000_000


def test_what_finds_more_logits_than_there_are_is_refused_in_tensorrts_words(bundle: Bundle) -> None:
    with pytest.raises(DeviceError, match=r"could not build what finds the 71 largest of 48 logits: \S+"):
        build_top_engine(RTX, bundle.target, 4, 71, AMPERE, BuildOptions())


def test_progress_grows_to_the_end(bundle: Bundle) -> None:
    reports: list[float] = []
    build_spec(bundle.folder, bundle.target, report=lambda fraction, part: reports.append(fraction))
    assert len(reports) > 20
    assert reports == sorted(reports)
    assert 0 <= reports[0] < 0.5 < reports[-1] <= 1


def test_attention_in_float32_and_of_one_row_is_built_from_several_kernels(tmp_path: Path) -> None:
    spec = write_decoder(tmp_path, "target", build_tiny_graph(np.float32))
    assert build_spec(tmp_path, spec, profiles=plan_profiles(1, 3, CONTEXT))


def test_a_workspace_limit_is_taken(bundle: Bundle) -> None:
    assert build_spec(bundle.folder, bundle.target, options=BuildOptions(workspace_bytes=1 << 26))


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", ["NonZero", "GroupQueryAttention"])
def test_an_operator_it_does_not_know_is_named_with_its_node(tmp_path: Path, operator: str) -> None:
    model = build_tiny_graph(np.float16, extra_operator=operator)
    node = next(node.name for node in model.graph.node if node.op_type == operator)
    with pytest.raises(
        BundleError, match=rf"TensorRT-RTX \S+ does not take .*its operator {operator} \(node '{node}'\)"
    ) as caught:
        build(tmp_path, model)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_graph_is_one_sentence(tmp_path: Path, bundle: Bundle) -> None:
    spec = write_decoder(tmp_path, "target", build_tiny_graph(np.float16), np.float16)
    (tmp_path / "target" / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(BundleError, match=r"does not take .*model\.onnx: ") as caught:
        build_spec(tmp_path, spec)
    assert "\n" not in str(caught.value)


def test_caches_of_open_size_are_refused_at_their_first_write(tmp_path: Path) -> None:
    model = build_tiny_graph(np.float16, capacity="capacity")
    with pytest.raises(BundleError, match=r"operator TensorScatter .*KV cache tensor must have a static sequence length"):
        build(tmp_path, model)


def test_a_build_that_fails_is_told_in_tensorrts_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorRTModule, "allow_decomposition", lambda *_: None)
    spec = write_decoder(tmp_path, "target", build_tiny_graph(np.float32))
    with pytest.raises(DeviceError, match=r"could not build .*Attention operation was not supported by a dedicated kernel"):
        build_spec(tmp_path, spec)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"head_size": 32}, r"'past_key_values\.0\.key' as \(1, 2, 64, 16\) where the manifest says \(1, 2, 64, 32\)"),
        ({"num_layers": 3}, r"'past_key_values\.2\.key' as nothing where the manifest says"),
        ({"num_layers": 1}, r"'past_key_values\.1\.key' as .* where the manifest says nothing"),
    ],
)
def test_a_graph_that_is_not_the_manifests_is_refused(tmp_path: Path, changes: dict[str, int], sentence: str) -> None:
    with pytest.raises(BundleError, match=sentence):
        build(tmp_path, build_tiny_graph(np.float16), **changes)


def test_a_graph_that_computes_shapes_from_the_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="computes shapes from the numbers in 'past_length'"):
        build(tmp_path, build_tiny_graph(np.float16, shapes_from_past=True))


def test_a_gpu_it_does_not_build_for_is_refused(bundle: Bundle) -> None:
    with pytest.raises(DeviceError, match=r"does not build for compute capability 87: it knows 75, 80, 86, .*module tensorrt"):
        build_spec(bundle.folder, bundle.target, capability=(8, 7))


def test_a_timing_cache_is_refused_where_nothing_is_timed(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="times nothing when it builds"):
        build_spec(bundle.folder, bundle.target, options=BuildOptions(timing_cache=tmp_path / "timings.bin"))


def test_another_lowering_is_refused_before_anything_is_written(bundle: Bundle, tmp_path: Path) -> None:
    other = replace(with_lowering(bundle, "gqa"), folder=tmp_path)
    sentence = r"has the lowering .gqa., and TensorRT-RTX .* takes static or primitive: add that form"
    with pytest.raises(BundleError, match=sentence):
        build_all(other)
    assert not list(tmp_path.iterdir())


def test_steps_that_the_caches_have_no_room_for_are_refused_before_anything_is_written(bundle: Bundle, tmp_path: Path) -> None:
    other = replace(bundle, folder=tmp_path)
    with pytest.raises(
        BundleError, match=r"caches of 64 slots, and a context of 48 tokens in steps of 18 rows needs 65: build"
    ):
        build_all(other, num_draft_tokens=17)
    assert not list(tmp_path.iterdir())


# --- interruption ----------------------------------------------------------------------------------------------------


def test_an_interrupted_build_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path, np.float16)
    folder = engines_folder(bundle.folder, RTX, AMPERE)
    folder.mkdir(parents=True)
    (folder / "old").write_text("the engines of last week")

    def interrupted(stop: threading.Event) -> object:
        def report(name: str, fraction: float, part: str) -> None:
            if name == "draft" and fraction > 0.1:  # the target's engine is written
                stop.set()

        return build_bundle_engines(bundle, RTX, AMPERE, num_draft_tokens=3, options=BuildOptions(), report=report, stop=stop)

    with pytest.raises(DeviceError, match=r"draft/model\.onnx was stopped"):
        call_interruptibly(interrupted)
    assert [path.name for path in folder.iterdir()] == ["old"]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_ctrl_c_stops_the_build_and_is_passed_on() -> None:
    seen = []

    def wait(stop: threading.Event) -> None:
        time.sleep(0.1)  # until the main thread waits
        os.kill(os.getpid(), signal.SIGINT)
        seen.append(stop.wait(10))

    with pytest.raises(KeyboardInterrupt):
        call_interruptibly(wait)
    assert seen == [True]
