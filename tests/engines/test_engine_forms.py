"""Which of a bundle's forms an engine is built from, and how a build is given up; TensorRT itself is not needed."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import engines.bundle
from engines.build import BuildOptions, BuiltEngine, call_interruptibly
from engines.profiles import choose_form
from engines.sidecar import engine_path, engines_folder
from engines.trt_module import TensorRTModule
from export.errors import ExportError
from export.staging import staged
from runtime.contract import Bundle, DecoderSpec
from runtime.errors import BundleError
from runtime.manifest import load_bundle, save_bundle

from .tiny_graph import build_tiny_graph, write_decoder, write_tiny_bundle

NEW = TensorRTModule("tensorrt", SimpleNamespace(__version__="10.16.1"))
OLD = TensorRTModule("tensorrt", SimpleNamespace(__version__="10.3.0"))


def two_forms(folder: Path, name: str, static: DecoderSpec, other: str) -> DecoderSpec:
    """A decoder as ONNX Runtime has it, with a form for TensorRT behind it."""
    written = write_decoder(folder / other, name, build_tiny_graph(np.float32, seed=2))
    path = f"{other}/{written.graph[0].path}"
    gqa = replace(
        static,
        graph=(replace(written.graph[0], path=path),),
        lowering="gqa",
        cache_capacity=None,
        names=replace(static.names, past_length=None, attention_mask="attention_mask"),
    )
    return replace(gqa, other_forms=(static,))


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """Both decoders as gqa and static."""
    plain = write_tiny_bundle(tmp_path)
    assert plain.draft is not None
    target, draft = (two_forms(tmp_path, spec.source.partition("/")[2], spec, "ort") for spec in (plain.target, plain.draft))
    both = replace(plain, target=target, draft=draft)
    save_bundle(both)
    return load_bundle(tmp_path)


def test_engines_are_built_from_the_form_that_tensorrt_takes(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[str, Path]] = []

    def build(_module: object, spec: DecoderSpec, graph: Path, *_: object) -> BuiltEngine:
        built.append((spec.lowering, graph))
        return BuiltEngine(b"plan", {}, 1.0, 1)

    monkeypatch.setattr(engines.bundle, "build_engine", build)
    monkeypatch.setattr(engines.bundle, "build_top_engine", lambda *_: b"plan", raising=False)
    records = engines.bundle.build_bundle_engines(
        bundle,
        NEW,
        (8, 7),
        num_draft_tokens=3,
        options=BuildOptions(),
        report=lambda *_: None,
        stop=threading.Event(),
    )
    assert built == [("static", bundle.folder / "target/model.onnx"), ("static", bundle.folder / "draft/model.onnx")]
    static = bundle.target.forms[1]
    assert records["target"].graph == {static.graph[0].path: static.graph[0].sha256}
    assert engine_path(engines_folder(bundle.folder, NEW, (8, 7)), static).read_bytes() == b"plan"


def test_a_build_has_the_bundle_to_itself(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export puts another folder in this one's place, and would take what is built meanwhile with it."""
    refused: list[str] = []
    arguments = {"num_draft_tokens": 3, "options": BuildOptions(), "report": lambda *_: None, "stop": threading.Event()}

    def build(*_: object) -> BuiltEngine:
        with pytest.raises(BundleError) as another_build:
            engines.bundle.build_bundle_engines(bundle, NEW, (8, 9), **arguments)
        with pytest.raises(ExportError) as export, staged(tmp_path):
            pytest.fail("an export began")
        refused.extend(str(caught.value) for caught in (another_build, export))
        return BuiltEngine(b"plan", {}, 1.0, 1)

    monkeypatch.setattr(engines.bundle, "build_engine", build)
    monkeypatch.setattr(engines.bundle, "build_top_engine", lambda *_: b"plan")
    engines.bundle.build_bundle_engines(bundle, NEW, (8, 7), **arguments)
    build_refused, export_refused, *_ = refused
    assert build_refused == (
        f"An export to {tmp_path}, or another build of its engines, is under way: wait until it is done, and begin anew."
    )
    assert export_refused.startswith(f"Another export to {tmp_path}, or a build of its engines, is under way: wait until")
    assert [folder.name for folder in (tmp_path / "engines").iterdir()] == [engines_folder(tmp_path, NEW, (8, 7)).name]
    assert not tmp_path.with_name(f".{tmp_path.name}.partial").exists()
    with staged(tmp_path), pytest.raises(BundleError, match="An export to"):
        engines.bundle.build_bundle_engines(bundle, NEW, (8, 9), **arguments)


@pytest.mark.parametrize("name", ["target", "draft"])
def test_a_missing_form_is_named_with_the_command_that_adds_it(bundle: Bundle, name: str) -> None:
    decoder = getattr(bundle, name)
    assert choose_form(decoder, NEW.lowerings, NEW.title, bundle.folder) == decoder.forms[1]
    with pytest.raises(BundleError) as caught:
        choose_form(decoder, OLD.lowerings, OLD.title, bundle.folder)
    assert str(caught.value) == (
        f"The graph of some/{name} has the lowering 'gqa' and 'static', and TensorRT 10.3.0 takes primitive: add that form, "
        f"python scripts/export.py --add-lowering primitive --out {bundle.folder}"
    )


def test_a_checkpoint_s_own_blocks_may_have_no_such_form(bundle: Bundle) -> None:
    kept = replace(bundle.target, precision="checkpoint")
    with pytest.raises(BundleError, match=r"where the checkpoint's blocks have offsets, export it anew in int8 or int4$"):
        choose_form(kept, OLD.lowerings, OLD.title, bundle.folder)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
def test_bf16_needs_a_gpu_that_has_it(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    def build(*_: object) -> BuiltEngine:
        raise BundleError("building")

    monkeypatch.setattr(engines.bundle, "build_engine", build)
    static = replace(bundle.target.forms[1], precision="bf16", cache_dtype="bfloat16")
    sentence = "The target is in bf16, which needs compute capability 8.0 or more, and this GPU has 7.5: export it in fp16"
    with pytest.raises(BundleError, match=re.escape(sentence if capability < (8, 0) else "building")):
        engines.bundle.build_bundle_engines(
            replace(bundle, target=static),
            NEW,
            capability,
            num_draft_tokens=3,
            options=BuildOptions(),
            report=lambda *_: None,
            stop=threading.Event(),
        )


def test_a_second_ctrl_c_waits_for_what_was_half_done() -> None:
    cleared: list[bool] = []

    def build(stop: threading.Event) -> None:
        time.sleep(0.1)  # until it is waited for
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(30)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)  # long enough for the second one to be heard
        cleared.append(True)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            call_interruptibly(build)
    finally:
        signal.signal(signal.SIGINT, before)
    assert cleared == [True]
