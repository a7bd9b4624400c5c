"""ONNX Runtime's TensorRT provider: its options, its caches and what is refused; a GPU proves the rest."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from runtime.backend import open_backend
from runtime.contract import Bundle
from runtime.cuda_driver import CudaDriver, Gpu
from runtime.cuda_options import CudaOptions
from runtime.decoder import Decoder
from runtime.errors import BundleError, DeviceError
from runtime.ort import tensorrt_library
from runtime.ort.backend import OrtBackend
from runtime.ort.cuda_backend import CUDA
from runtime.ort.device_context import Memory
from runtime.ort.tensorrt_backend import (
    TENSORRT,
    OrtTensorRTBackend,
    check_graph,
    engine_folder,
    profile_shapes,
    rows_of_passes,
)
from runtime.ort.tensorrt_library import install_command, library_path, load_tensorrt, needed_major

RTX = Gpu("RTX", (8, 9), 24 << 30, integrated=False)
CPU = "CPUExecutionProvider"


@pytest.fixture(scope="module")
def bundle(tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The tiny draft alone, in the form that the provider takes."""
    pytest.importorskip("mobius", reason="exporting needs the extra 'export'")
    from export.bundle import export_bundle

    folder = tmp_path_factory.mktemp("primitive") / "bundle"
    return export_bundle(str(tiny_draft), None, folder, precision="fp32", lowering="primitive")


class CpuSession:
    """A session on the CPU that says of itself what ONNX Runtime would on a GPU."""

    def __init__(self, path: str, options: ort.SessionOptions, providers: list, enable_fallback: int) -> None:
        assert enable_fallback == 0
        self.asked = providers
        self._session = REAL_SESSION(path, options, providers=[CPU])
        if providers[0][0] == TENSORRT:  # others are made for a pass's results
            CpuSession.last = self

    def get_providers(self) -> list[str]:
        return [*(name for name, _ in self.asked), CPU]

    def get_provider_graph_assignment_info(self) -> list:
        return [dataclasses.make_dataclass("Part", ["ep_name", "get_nodes"])(TENSORRT, list)]

    def __getattr__(self, name: str) -> object:
        return getattr(self._session, name)


REAL_SESSION = ort.InferenceSession


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this process believe in a GPU on which the provider runs, its memory the machine's own."""

    def believe(trouble: str | None = None) -> None:
        def load() -> str:
            if trouble is not None:
                raise DeviceError(trouble)
            return "10.13.3"

        monkeypatch.setattr("runtime.ort.cuda_backend.ort.get_available_providers", lambda: [TENSORRT, CUDA, CPU])
        monkeypatch.setattr("runtime.ort.cuda_backend.probe_cuda_driver", lambda: CudaDriver((13, 0), (RTX, RTX), None))
        monkeypatch.setattr("runtime.ort.cuda_backend.try_provider", lambda *_: None)
        monkeypatch.setattr("runtime.ort.tensorrt_backend.try_provider", lambda *_: None)
        monkeypatch.setattr("runtime.ort.tensorrt_backend.load_tensorrt", load)
        monkeypatch.setattr("runtime.ort.tensorrt_backend.Memory", lambda kind, number: Memory("cpu", 0))
        monkeypatch.setattr("runtime.ort.tensorrt_backend.ort.InferenceSession", CpuSession)
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")

    return believe


# --- loading ---------------------------------------------------------------------------------------------------------


def test_a_model_is_loaded_with_cuda_behind_and_computes(machine, bundle: Bundle):
    tokens = np.random.default_rng(5).integers(3, 512, 40).tolist()
    expected = Decoder(OrtBackend(threads=1).load(bundle.target, bundle.folder), 40, num_rows=40).forward(tokens, 40).copy()
    machine()
    model = open_backend("ort-tensorrt:1", threads=1, shared_thread_pool=False).load(bundle.target, bundle.folder)
    assert np.array_equal(Decoder(model, 40, num_rows=40).forward(tokens, 40), expected)
    (first, options), (second, behind) = CpuSession.last.asked
    assert (first, second, behind["device_id"], behind["use_tf32"]) == (TENSORRT, CUDA, "1", "0")
    assert "TensorRT 10.13.3, 1: RTX" in model.engine
    assert options["trt_engine_cache_path"] in model.description


def test_what_the_provider_lacks_is_said_with_the_device(machine):
    machine("it is linked with TensorRT 10")
    with pytest.raises(DeviceError, match=r"^The device 'ort-tensorrt:1' is not available: it is linked with TensorRT 10\.$"):
        OrtTensorRTBackend(1)


def test_a_provider_that_takes_nothing_is_refused(machine, bundle: Bundle, monkeypatch: pytest.MonkeyPatch):
    machine()
    monkeypatch.setattr(CpuSession, "get_provider_graph_assignment_info", lambda self: [])
    with pytest.raises(DeviceError, match=r"^TensorrtExecutionProvider of ONNX Runtime \S+ took no node of "):
        OrtTensorRTBackend().load(bundle.target, bundle.folder)


def test_a_session_that_lost_a_provider_is_refused(machine, bundle: Bundle, monkeypatch: pytest.MonkeyPatch):
    machine()
    monkeypatch.setattr(CpuSession, "get_providers", lambda self: [CUDA, CPU])
    with pytest.raises(DeviceError, match=f"was loaded for {CUDA}, {CPU} and not for {TENSORRT}, {CUDA}"):
        OrtTensorRTBackend().load(bundle.target, bundle.folder)


def test_a_failing_build_is_one_sentence_with_the_remedy(machine, bundle: Bundle, monkeypatch: pytest.MonkeyPatch):
    def fail(*_args: object, **_named: object) -> None:
        raise RuntimeError("EP_FAIL : TensorRT EP could not deserialize engine from cache: x.engine\nmore")

    machine()
    monkeypatch.setattr("runtime.ort.tensorrt_backend.ort.InferenceSession", fail)
    with pytest.raises(BundleError, match=r"could not deserialize engine from cache: x\.engine\).*, remove ") as caught:
        OrtTensorRTBackend().load(bundle.target, bundle.folder)
    assert "\n" not in str(caught.value)


# --- options ---------------------------------------------------------------------------------------------------------


def test_caches_and_one_profile_of_every_input(machine, bundle: Bundle):
    machine()
    options = OrtTensorRTBackend().provider_options(bundle.target, Path("bundle/ort-tensorrt/key"))
    assert options["trt_engine_cache_path"] == "bundle/ort-tensorrt/key"
    assert options["trt_timing_cache_path"] == "bundle/ort-tensorrt"
    assert (options["trt_engine_cache_enable"], options["trt_timing_cache_enable"]) == ("1", "1")
    assert not [name for name in options if "fp16" in name or "bf16" in name]  # they would end the graph's own types
    names = {value.name for value in REAL_SESSION(bundle.folder / bundle.target.graph[0].path).get_inputs()}
    for kind in ("min", "opt", "max"):
        shapes = dict(shape.split(":") for shape in options[f"trt_profile_{kind}_shapes"].split(","))
        assert set(shapes) == names


def test_the_profile_has_room_for_every_pass(bundle: Bundle):
    least, typical, most = rows_of_passes(bundle.target)
    assert least <= typical <= most
    assert most % 16 == 0  # whatever a pass is padded to
    assert most >= 65  # the longest proposal, and one row more
    lines = {rows: dict(one.split(":") for one in profile_shapes(bundle.target, rows, 7).split(",")) for rows in (1, most)}
    assert (lines[1]["input_ids"], lines[most]["input_ids"]) == ("1x1", f"1x{most}")
    assert lines[1]["past_length"] == "7"
    spec = bundle.target
    cache = f"1x{spec.num_key_value_heads}x{spec.cache_capacity}x{spec.head_size}"
    assert lines[1]["past_key_values.0.key"] == cache


@pytest.mark.parametrize("lowering", ["gqa", "static", "growing"])
def test_other_lowerings_are_refused(bundle: Bundle, lowering: str):
    spec = dataclasses.replace(bundle.target, lowering=lowering)
    with pytest.raises(
        BundleError, match=rf"has the lowering '{lowering}', .* scripts/export\.py --add-lowering primitive, or"
    ):
        check_graph(spec, Path("model.onnx"), tf32=True)


def test_float32_is_not_rounded_unasked(bundle: Bundle, monkeypatch: pytest.MonkeyPatch):
    path, half = Path("model.onnx"), dataclasses.replace(bundle.target, cache_dtype="float16")
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    with pytest.raises(DeviceError, match=r"rounds its products to TF32: start the program with NVIDIA_TF32_OVERRIDE=0"):
        check_graph(bundle.target, path, tf32=False)
    check_graph(bundle.target, path, tf32=True)
    check_graph(half, path, tf32=False)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    with pytest.raises(DeviceError):
        check_graph(bundle.target, path, tf32=False)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    check_graph(bundle.target, path, tf32=False)


def test_engines_of_other_weights_and_other_products_are_kept_apart(machine, bundle: Bundle):
    # ONNX Runtime names an engine after the graph's names, and target and draft may have the same ones.
    machine()
    changed = dataclasses.replace(bundle.target.graph[0], sha256="0" * 64)
    other = dataclasses.replace(bundle.target, graph=(changed, *bundle.target.graph[1:]))
    folders = set()
    for options in (CudaOptions(), CudaOptions(tf32=True)):
        for spec in (bundle.target, other):
            OrtTensorRTBackend(options=options).load(spec, bundle.folder)
            folders.add(CpuSession.last.asked[0][1]["trt_engine_cache_path"])
    assert len(folders) == 4
    assert all(Path(folder).is_dir() for folder in folders)


def test_a_bundle_that_cannot_be_written_keeps_its_engines_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    writable = tmp_path / "bundle"
    writable.mkdir()
    assert engine_folder(writable, "key") == writable / "ort-tensorrt" / "key"
    no_folder = tmp_path / "file"
    no_folder.write_text("")
    assert engine_folder(no_folder, "key") == tmp_path / "cache" / "specrt" / "ort-tensorrt" / "key"
    monkeypatch.setenv("XDG_CACHE_HOME", str(no_folder))
    with pytest.raises(DeviceError, match=r"can be kept neither in .* nor in "):
        engine_folder(no_folder, "key")


# --- the library -----------------------------------------------------------------------------------------------------


def test_the_version_that_a_provider_was_linked_with_is_read_from_it(tmp_path: Path):
    assert needed_major(tmp_path) is None
    (tmp_path / "libonnxruntime_providers_tensorrt.so").write_bytes(b"\x7fELF\0libcudart.so.13\0libnvinfer.so.10\0libnv")
    assert needed_major(tmp_path) == 10


def test_a_build_without_the_provider_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tensorrt_library, "needed_major", lambda: None)
    with pytest.raises(DeviceError, match="has no TensorRT provider"):
        load_tensorrt()


def test_the_version_trap_is_a_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tensorrt_library, "needed_major", lambda: 987)
    monkeypatch.setattr(tensorrt_library, "version", lambda package: "11.4.0.106")
    with pytest.raises(DeviceError) as caught:
        load_tensorrt()
    sentence = str(caught.value)
    assert "is linked with TensorRT 987 and needs its libraries (libnvinfer.so.987: cannot open" in sentence
    assert '; the installed tensorrt 11.4.0.106 cannot serve it: pip install "tensorrt-cu12==987.*"' in sentence


def test_libraries_are_loaded_from_the_packages_folder_and_their_version_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "tensorrt_libs"
    folder.mkdir()
    for name in ("libnvinfer.so.10", "libnvonnxparser.so.10"):
        (folder / name).write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert library_path("libnvinfer.so.10") == str(folder / "libnvinfer.so.10")
    assert library_path("libnvinfer_plugin.so.10") == "libnvinfer_plugin.so.10"
    loaded = []

    class Library:
        def __init__(self, path: str) -> None:
            loaded.append(path)

        def getInferLibVersion(self) -> int:  # noqa: N802 - TensorRT's own name
            return 101303

    monkeypatch.setattr(tensorrt_library, "needed_major", lambda: 10)
    monkeypatch.setattr(ctypes, "CDLL", Library)
    assert load_tensorrt() == "10.13.3"
    assert loaded == [
        str(folder / "libnvinfer.so.10"), "libnvinfer_plugin.so.10", str(folder / "libnvonnxparser.so.10"),
    ]  # fmt: skip


@pytest.mark.parametrize(("cuda", "package"), [("13.0", "tensorrt-cu13"), ("12.8", "tensorrt-cu12"), ("", "tensorrt-cu12")])
def test_the_package_for_the_builds_cuda_is_named(cuda: str, package: str):
    assert install_command(10, cuda) == f'pip install "{package}==10.*"'
