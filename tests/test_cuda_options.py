"""What may be asked of a GPU, and of which devices."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from runtime import CudaOptions, Generator

PAIRS = [("cpu", "cpu"), ("tensorrt", "tensorrt"), ("cpu", "tensorrt-rtx:1")]


@pytest.mark.parametrize("devices", [*PAIRS, ("cuda", "cuda"), ("ort-tensorrt", "cpu")])
def test_defaults_go_with_any_device(devices: tuple[str, str]):
    CudaOptions().check_devices(devices)


@pytest.mark.parametrize("option", [{"memory_limit": 1}, {"tf32": True}, {"cuda_graphs": True}])
def test_an_option_that_no_device_of_the_pair_has_is_refused(option: dict):
    (name,) = option
    for devices in PAIRS:
        with pytest.raises(ValueError, match=rf"^{name} \(--[a-z0-9-]*\) is an option of the device 'cuda'.*: leave it out\.$"):
            CudaOptions(**option).check_devices(devices)
    for devices in (("cuda:1", "cpu"), ("cpu", "cuda"), ("ort-tensorrt", "cuda")):
        CudaOptions(**option).check_devices(devices)


def test_the_tensorrt_provider_has_tf32_and_nothing_else():
    CudaOptions(tf32=True).check_devices(["ort-tensorrt:1"])
    for option in (CudaOptions(memory_limit=1), CudaOptions(cuda_graphs=True)):
        with pytest.raises(ValueError, match="this is 'ort-tensorrt': leave it out"):
            option.check_devices(["ort-tensorrt"])


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ({"memory_limit": 0}, "memory_limit is 0; a whole number of at least 1 is expected"),
        ({"memory_limit": 1.5}, "memory_limit is 1.5; a whole number"),
        ({"tf32": 1}, "tf32 is 1; True or False is expected"),
        ({"cuda_graphs": "yes"}, "cuda_graphs is 'yes'; True or False is expected"),
    ],
)
def test_values_out_of_range_are_named(option: dict, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        CudaOptions(**option)


def test_they_are_refused_where_the_bundle_is_loaded(tiny_bundle: Path):
    with pytest.raises(ValueError, match=r"an option of the device 'cuda' and 'ort-tensorrt'; this is 'cpu'"):
        Generator.from_bundle(tiny_bundle, cuda_options=CudaOptions(tf32=True))


def test_a_draft_that_is_not_loaded_has_no_device(tiny_bundle: Path):
    with pytest.raises(ValueError, match="is an option"):
        Generator.from_bundle(tiny_bundle, draft_device="cuda", drafter="lookup", cuda_options=CudaOptions(tf32=True))


def test_a_bundle_without_a_draft_has_no_device_for_one(tiny_bundle: Path, tmp_path: Path):
    folder = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    manifest = json.loads((folder / "bundle.json").read_text())
    (folder / "bundle.json").write_text(json.dumps({**manifest, "draft": None}))
    with pytest.raises(ValueError, match=r"^draft_device \(--draft-device\) is 'cpu', and .* has no draft: leave it out\.$"):
        Generator.from_bundle(folder, draft_device="cpu")
    assert Generator.from_bundle(folder, drafter="lookup").draft is None


def test_they_reach_the_backend(monkeypatch: pytest.MonkeyPatch):
    from runtime.backend import open_backend

    seen = []
    monkeypatch.setattr("runtime.ort.cuda_backend.OrtCudaBackend", lambda number, **named: seen.append((number, named)))
    monkeypatch.setattr("runtime.ort.tensorrt_backend.OrtTensorRTBackend", lambda number, **named: seen.append((number, named)))
    options = CudaOptions(tf32=True)
    for device in ("cuda", "ort-tensorrt:2"):
        open_backend(device, threads=3, shared_thread_pool=True, cuda_options=options)
    named = {"threads": 3, "shared_thread_pool": True, "options": options}
    assert seen == [(0, named), (2, named)]
