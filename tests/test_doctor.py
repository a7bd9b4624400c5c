"""The doctor: what it says of machines we do not have, told by hand, and of this one, by asking it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.cuda_driver import CudaDriver, Gpu, checked_gpu, free_device_memory, probe_cuda_driver
from runtime.doctor import probes
from runtime.doctor.bundle_trials import bundle_trials
from runtime.doctor.checks import devices_asked_for, examine, failures
from runtime.doctor.facts import BundleFacts, Finding, JetsonFacts, MachineFacts, OnnxRuntimeFacts
from runtime.doctor.gather import bundle_facts, gather_facts, jetson_facts
from runtime.errors import DeviceError
from runtime.ort.provider_trial import try_provider

ROOT = Path(__file__).parents[1]
NEEDS = {"numpy": "2.3.0", "tokenizers": "0.22.0", "jinja2": "3.1.6"}
CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
RTX = Gpu("NVIDIA GeForce RTX 4090", (8, 9), 24 << 30, integrated=False)
ORIN = Gpu("Orin", (8, 7), 8 << 30, integrated=True)
THOR = Gpu("NVIDIA Thor", (11, 0), 128 << 30, integrated=True)
NO_DRIVER = CudaDriver(None, (), "this machine has no NVIDIA driver (libcuda.so.1 is not there)")
NO_CUBLAS = "libcublasLt.so.13: cannot open shared object file: No such file or directory"
NO_KERNELS = "CUDA error cudaErrorNoKernelImageForDevice:no kernel image is available for execution on the device"


CPU_ONLY = MachineFacts(
    system="Linux",
    machine="x86_64",
    python="3.11.4",
    packages={**NEEDS, "onnxruntime": "1.32.0"},
    onnxruntime_wheels=("onnxruntime",),
    pypi_wheels=("onnxruntime",),
    onnxruntime=OnnxRuntimeFacts("1.32.0", "onnxruntime", None, ("AzureExecutionProvider", CPU)),
    driver=NO_DRIVER,
    trials={CPU: None},
    free_memory=16_000_000_000,
)
DESKTOP = replace(
    CPU_ONLY,
    packages={**NEEDS, "onnxruntime-gpu": "1.31.1"},
    onnxruntime_wheels=("onnxruntime-gpu",),
    pypi_wheels=("onnxruntime-gpu",),
    onnxruntime=OnnxRuntimeFacts("1.31.1", "onnxruntime-gpu", (13, 0), (TENSORRT, CUDA, CPU), tensorrt_major=10),
    trials={CPU: None, CUDA: None, TENSORRT: "libnvinfer.so.10: cannot open shared object file"},
    driver=CudaDriver((13, 1), (RTX,), None),
    libraries={"libcudart.so.13": "13.0", "libcudnn.so.9": "9.14.0"},
    free_device_memory=20_000_000_000,
)
BOTH_WHEELS = replace(
    DESKTOP,
    packages={**NEEDS, "onnxruntime": "1.32.0", "onnxruntime-gpu": "1.31.1"},
    onnxruntime_wheels=("onnxruntime", "onnxruntime-gpu"),
    onnxruntime=CPU_ONLY.onnxruntime,
    trials={CPU: None},
)
ORIN_JETPACK_6 = replace(
    DESKTOP,
    machine="aarch64",
    python="3.10.12",
    packages={**NEEDS, "onnxruntime-gpu": "1.23.0", "tensorrt": "10.3.0"},
    pypi_wheels=(),
    onnxruntime=OnnxRuntimeFacts("1.23.0", "onnxruntime-gpu", (12, 6), (TENSORRT, CUDA, CPU), tensorrt_major=10),
    trials={CPU: None, CUDA: None, TENSORRT: None},
    driver=CudaDriver((12, 6), (ORIN,), None),
    libraries={"libcudart.so.12": "12.6", "libcudnn.so.9": "9.3.0", "libnvinfer.so.10": "10.3.0"},
    jetson=JetsonFacts("NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super", (36, 4, 7)),
    free_device_memory=5_000_000_000,
)
ORIN_WITH_PYPI_WHEEL = replace(
    ORIN_JETPACK_6,
    pypi_wheels=("onnxruntime-gpu",),
    trials={CPU: None, CUDA: NO_KERNELS, TENSORRT: None},
)
THOR_JETPACK_7 = replace(
    ORIN_JETPACK_6,
    python="3.12.3",
    packages={**NEEDS, "onnxruntime-gpu": "1.32.0", "tensorrt": "10.16.2.10"},
    onnxruntime=OnnxRuntimeFacts("1.32.0", "onnxruntime-gpu", (13, 2), (TENSORRT, CUDA, CPU)),
    driver=CudaDriver((13, 2), (THOR,), None),
    libraries={"libcudart.so.13": "13.2", "libcudnn.so.9": "9.20.0", "libnvinfer.so.10": "10.16.2"},
    jetson=JetsonFacts("NVIDIA Jetson AGX Thor Developer Kit", (39, 2, 0)),
)


def finding(facts: MachineFacts, subject: str) -> Finding:
    found = [one for one in examine(facts) if one.subject == subject]
    assert len(found) == 1, found
    return found[0]


def failed(facts: MachineFacts, *asked: str) -> list[str]:
    return [one.subject for one in failures(examine(facts), facts, asked)]


# --- machines that are well ------------------------------------------------------------------------------------------


def test_a_machine_without_a_gpu_is_well_unless_one_is_asked_for():
    assert devices_asked_for(CPU_ONLY) == ("cpu",)
    assert failed(CPU_ONLY) == []
    assert failed(CPU_ONLY, "cuda") == ["CUDA"]
    assert failed(CPU_ONLY, "tensorrt") == ["TensorRT"]


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        (DESKTOP, "computes on NVIDIA GeForce RTX 4090 (sm_89, driver for CUDA 13.1)"),
        (ORIN_JETPACK_6, "computes on Orin (sm_87, driver for CUDA 12.6)"),
        (THOR_JETPACK_7, "computes on NVIDIA Thor (sm_110, driver for CUDA 13.2)"),
    ],
)
def test_a_gpu_that_computed_is_well(facts: MachineFacts, sentence: str):
    assert "cuda" in devices_asked_for(facts)
    assert failed(facts) == []
    assert sentence in finding(facts, "CUDA").sentence


@pytest.mark.parametrize(
    ("facts", "jetpack", "lowering"),
    [
        (ORIN_JETPACK_6, "JetPack 6.1 or 6.2 (Jetson Linux 36.4.7): Python 3.10, CUDA 12.6, TensorRT 10.3", "primitive"),
        (THOR_JETPACK_7, "JetPack 7.2 (Jetson Linux 39.2.0): Python 3.12, CUDA 13.2, TensorRT 10.16", "static"),
    ],
)
def test_a_jetson_is_told_by_its_jetpack(facts: MachineFacts, jetpack: str, lowering: str):
    assert jetpack in finding(facts, "Jetson").sentence
    assert finding(facts, "TensorRT").sentence.endswith(f"it takes the {lowering} lowering.")
    assert finding(facts, "TensorRT provider").state == "works"


# --- machines that are not -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "sentence", "remedy"),
    [
        (
            replace(DESKTOP, driver=NO_DRIVER, trials={CPU: None, CUDA: "fallback has been disabled"}),
            "lists CUDA, but this machine has no NVIDIA driver (libcuda.so.1 is not there)",
            "sudo ubuntu-drivers install",
        ),
        (
            replace(DESKTOP, driver=CudaDriver((12, 4), (RTX,), None), trials={CPU: None, CUDA: "CUDA failure 35"}),
            "is built for CUDA 13 and the driver serves CUDA 12.4",
            'pip install "onnxruntime-gpu[cuda,cudnn]==1.26.0"',
        ),
        (
            replace(DESKTOP, trials={CPU: None, CUDA: NO_CUBLAS}),
            "needs CUDA 13 and cuDNN 9, and the loader says: libcublasLt.so.13",
            'pip install "onnxruntime-gpu[cuda,cudnn]==1.31.1"',
        ),
        (
            replace(DESKTOP, driver=CudaDriver((13, 1), (replace(RTX, compute_capability=(6, 1)),), None),
                    trials={CPU: None, CUDA: NO_KERNELS}),
            "has no kernels for NVIDIA GeForce RTX 4090 (sm_61): take a build that has them",
            "onnxruntime-gpu",
        ),
        (
            replace(CPU_ONLY, driver=DESKTOP.driver),
            "is a build without CUDA, and this machine has an NVIDIA GeForce RTX 4090",
            'pip uninstall -y onnxruntime && pip install "onnxruntime-gpu[cuda,cudnn]"',
        ),
        (ORIN_WITH_PYPI_WHEEL, "no kernels for Orin (sm_87): PyPI's wheels have none", "jp6/cu126"),
        (
            replace(ORIN_WITH_PYPI_WHEEL, trials={CPU: None, CUDA: NO_CUBLAS}),  # installing these would not be enough
            "no kernels for Orin (sm_87)",
            "jp6/cu126",
        ),
        (
            replace(THOR_JETPACK_7, trials={CPU: None, CUDA: NO_KERNELS}),
            "no kernels for NVIDIA Thor (sm_110)",
            "docker build -f docker/jetpack7.Dockerfile",
        ),
        (
            replace(ORIN_JETPACK_6, trials={CPU: None, CUDA: "libcudnn.so.9: cannot open shared object file"}),
            "needs CUDA 12 and cuDNN 9, and the loader says: libcudnn.so.9",
            "sudo apt install nvidia-jetpack",
        ),
        (replace(DESKTOP, trials={CPU: None, CUDA: "out of memory"}), "does not compute on NVIDIA GeForce RTX 4090: out", ""),
    ],
)  # fmt: skip
def test_what_stands_in_the_way_of_cuda_is_named_with_what_mends_it(facts: MachineFacts, sentence: str, remedy: str):
    found = finding(facts, "CUDA")
    assert sentence in found.sentence
    assert found.state == "broken"
    assert remedy in found.remedy
    assert "CUDA" in failed(facts, "cuda")
    assert failed(facts, "cpu") == []


def test_remedies_name_files_that_are_there():
    machines = [BOTH_WHEELS, ORIN_WITH_PYPI_WHEEL, replace(THOR_JETPACK_7, trials={CPU: None, CUDA: NO_KERNELS})]
    damaged = [replace(CPU_ONLY, bundle=BundleFacts("b", "damaged"))]
    remedies = " ".join(one.remedy for facts in machines + damaged for one in examine(facts))
    named = re.findall(r"\b(?:docker|scripts)/\S+", remedies)
    assert {"docker/jetpack7.Dockerfile", "scripts/export.py"} <= set(named)
    assert all((ROOT / name).is_file() for name in named)


def test_two_wheels_in_one_folder():
    found = finding(BOTH_WHEELS, "ONNX Runtime")
    assert "onnxruntime 1.32.0 and onnxruntime-gpu 1.31.1 share one folder" in found.sentence
    assert "what imports is onnxruntime 1.32.0, which has no CUDA" in found.sentence
    assert found.remedy == ('pip uninstall -y onnxruntime onnxruntime-gpu && pip install "onnxruntime-gpu[cuda,cudnn]==1.31.1"')
    assert "ONNX Runtime" in failed(BOTH_WHEELS)  # somebody installed onnxruntime-gpu, so CUDA is asked for
    assert failed(BOTH_WHEELS, "cpu") == []


def test_two_wheels_of_which_the_right_one_won_are_a_note():
    lucky = replace(BOTH_WHEELS, onnxruntime=DESKTOP.onnxruntime, trials=DESKTOP.trials)
    assert finding(lucky, "ONNX Runtime").state == "note"
    assert failed(lucky) == []


def test_onnxruntime_that_does_not_import_hinders_everything():
    broken = replace(CPU_ONLY, onnxruntime=None, onnxruntime_trouble="No module named 'onnxruntime.capi'", trials={})
    assert "does not import: No module named 'onnxruntime.capi'" in finding(broken, "ONNX Runtime").sentence
    missing = replace(broken, onnxruntime_wheels=())
    assert finding(missing, "ONNX Runtime").sentence == "ONNX Runtime is not installed."
    assert finding(missing, "ONNX Runtime").remedy == "pip install onnxruntime"
    for facts in (broken, missing):
        assert failed(facts) == ["ONNX Runtime"]


def test_a_cpu_that_does_not_compute():
    assert failed(replace(CPU_ONLY, trials={CPU: "the process died of SIGILL"})) == ["CPU"]


def test_a_missing_package_is_named():
    facts = replace(CPU_ONLY, packages={"onnxruntime": "1.32.0", "numpy": "2.3.0"})
    assert finding(facts, "packages").remedy == "pip install tokenizers jinja2"
    assert failed(facts) == ["packages"]


def test_pips_tensorrt_cannot_serve_onnxruntimes_provider():
    facts = replace(DESKTOP, packages={**DESKTOP.packages, "tensorrt": "11.2.0"}, libraries={"libnvinfer.so.11": "11.2.0"})
    found = finding(facts, "TensorRT provider")
    wrong = "is linked with TensorRT 10, and there is tensorrt 11.2.0, libnvinfer.so.11, which cannot serve it"
    assert wrong in found.sentence
    assert found.remedy == 'pip install "tensorrt-cu13==10.*"'
    assert finding(facts, "TensorRT").state == "works"  # by itself it serves
    assert failed(facts, "cuda", "tensorrt") == []
    assert failed(facts, "ort-tensorrt") == ["TensorRT provider"]
    nothing = replace(DESKTOP, packages={**DESKTOP.packages, "tensorrt-rtx": "1.7.1.116"})  # another product
    assert "and there is no TensorRT; device='tensorrt'" in finding(nothing, "TensorRT provider").sentence


def test_the_provider_is_judged_by_its_trial_where_its_tensorrt_is_there():
    assert finding(ORIN_JETPACK_6, "TensorRT provider").sentence == "ONNX Runtime's provider runs TensorRT 10.3.0."
    assert failed(ORIN_JETPACK_6, "ort-tensorrt") == []
    facts = replace(ORIN_JETPACK_6, trials={CPU: None, CUDA: None, TENSORRT: "it died"})
    assert finding(facts, "TensorRT provider").sentence.endswith("(device='ort-tensorrt') does not run: it died.")
    assert failed(facts) == []
    assert failed(facts, "ort-tensorrt") == ["TensorRT provider"]
    without = replace(DESKTOP, onnxruntime=OnnxRuntimeFacts("1.31.1", "onnxruntime-gpu", (13, 0), (CUDA, CPU)))
    assert failed(without) == []
    assert failed(without, "ort-tensorrt") == ["TensorRT provider"]
    # Where there is no CUDA, that is the reason.
    assert failed(CPU_ONLY, "ort-tensorrt") == ["CUDA"]


def test_tensorrt_without_a_driver():
    facts = replace(CPU_ONLY, packages={**CPU_ONLY.packages, "tensorrt": "10.16.1"})
    assert "no NVIDIA driver" in finding(facts, "TensorRT").sentence
    assert failed(facts) == ["TensorRT"]


def test_tensorrt_rtx_without_a_driver_compiles_for_others():
    facts = replace(CPU_ONLY, packages={**CPU_ONLY.packages, "tensorrt-rtx": "1.7.1.116", "tensorrt-rtx-cu13": "1.7.1.116"})
    found = finding(facts, "TensorRT")
    assert found.state == "note"
    assert "it compiles engines for other machines (build_engines.py --compile-only), and runs none here" in found.sentence
    assert failed(facts) == []
    assert failed(facts, "tensorrt") == ["TensorRT"]
    with_driver = replace(facts, driver=DESKTOP.driver)
    assert "TensorRT-RTX 1.7.1.116 is installed" in finding(with_driver, "TensorRT").sentence
    assert "tensorrt" in devices_asked_for(with_driver)


def test_unknown_and_old_jetsons_and_another_python():
    container = replace(ORIN_JETPACK_6, jetson=JetsonFacts("NVIDIA Jetson Orin Nano", None))
    assert "its JetPack is unknown" in finding(container, "Jetson").sentence
    old = replace(ORIN_JETPACK_6, jetson=JetsonFacts("NVIDIA Jetson Xavier NX", (35, 4, 1)))
    assert "Jetson Linux 35.4.1: JetPack 6.1, 6.2 and 7 are supported" in finding(old, "Jetson").sentence
    other = [one.sentence for one in examine(replace(ORIN_JETPACK_6, python="3.12.1")) if one.state == "note"]
    assert other == ["This is Python 3.12.1; what JetPack 6.1 or 6.2 brings is built for Python 3.10."]


def test_a_bundle_that_is_damaged_or_too_large():
    damaged = replace(CPU_ONLY, bundle=BundleFacts("b", "b/target/model.onnx has changed."))
    assert failed(damaged) == ["bundle"]
    large = replace(CPU_ONLY, bundle=BundleFacts("b", None, "target x", 17_000_000_000))
    assert failed(large) == ["bundle"]
    assert failed(replace(large, free_memory=18_000_000_000)) == []


# --- the driver ------------------------------------------------------------------------------------------------------


class FakeDriver:
    """libcuda as ctypes sees it: two GPUs, unless told that one of its calls fails."""

    def __init__(self, **statuses: int) -> None:
        self.statuses = statuses
        self.contexts = 0

    def __getattr__(self, name: str):
        return lambda *arguments: self.statuses.get(name, 0) or self.answer(name, *arguments)

    def answer(self, name: str, *arguments) -> int:
        if name == "cuGetErrorName":
            arguments[1]._obj.value = {100: b"CUDA_ERROR_NO_DEVICE", 2: b"CUDA_ERROR_OUT_OF_MEMORY"}[arguments[0]]
        elif name == "cuDriverGetVersion":
            arguments[0]._obj.value = 12060
        elif name == "cuDeviceGetCount":
            arguments[0]._obj.value = 2
        elif name == "cuDeviceGetName":
            arguments[0].value = b"Orin" if arguments[2] == 0 else b"Other"
        elif name == "cuDeviceTotalMem_v2":
            arguments[0]._obj.value = 8 << 30
        elif name == "cuDeviceGetAttribute":
            arguments[0]._obj.value = {75: 8, 76: 7, 18: 1 - arguments[2]}[arguments[1]]
        elif name == "cuMemGetInfo_v2":
            arguments[0]._obj.value = 5 << 30
        elif name == "cuDevicePrimaryCtxRetain":
            self.contexts += 1
        elif name == "cuDevicePrimaryCtxRelease_v2":
            self.contexts -= 1
        return 0


def test_the_driver_tells_its_version_and_gpus():
    driver = probe_cuda_driver(FakeDriver())
    assert (driver.cuda_version, driver.trouble) == ((12, 6), None)
    assert driver.gpus == (ORIN, replace(ORIN, name="Other", integrated=False))
    assert checked_gpu("cuda:1", 1, driver).name == "Other"
    with pytest.raises(DeviceError, match=r"'cuda:2' is not available: the driver offers 0: Orin, 1: Other\."):
        checked_gpu("cuda:2", 2, driver)


def test_a_driver_without_a_gpu_says_so():
    driver = probe_cuda_driver(FakeDriver(cuInit=100))
    assert (driver.cuda_version, driver.gpus) == ((12, 6), ())
    with pytest.raises(DeviceError, match=r"'cuda' is not available: .* offers no GPU \(CUDA_ERROR_NO_DEVICE\)\. "):
        checked_gpu("cuda", 0, driver)


def test_free_device_memory_leaves_no_context_behind():
    library = FakeDriver()
    assert free_device_memory(0, library) == 5 << 30
    assert library.contexts == 0
    for call in ("cuMemGetInfo_v2", "cuCtxPushCurrent_v2"):
        library = FakeDriver(**{call: 2})
        assert free_device_memory(0, library) is None
        assert library.contexts == 0


@pytest.mark.skipif(probe_cuda_driver().cuda_version is not None, reason="this machine has an NVIDIA driver")
def test_a_machine_without_a_driver():
    assert "no NVIDIA driver" in str(probe_cuda_driver().trouble)
    assert free_device_memory(0) is None


# --- asking ----------------------------------------------------------------------------------------------------------


def test_the_tiny_graph_runs_here_and_only_where_it_is_said_to():
    try_provider(CPU)
    with pytest.raises(DeviceError, match=r"has no NoSuchExecutionProvider, only .*CPUExecutionProvider"):
        try_provider("NoSuchExecutionProvider")


def test_the_tiny_graph_is_an_onnx_model():
    onnx = pytest.importorskip("onnx")
    from runtime.ort.provider_trial import _tiny_graph

    model = onnx.load_from_string(_tiny_graph())
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node] == ["Add", "MatMul"]


def test_a_question_that_raises_dies_or_says_nothing_is_one_line(monkeypatch: pytest.MonkeyPatch):
    assert probes.ask("provider", CPU) == {}
    with pytest.raises(probes.ProbeError, match="has no NoSuch, only"):
        probes.ask("provider", "NoSuch")

    def starting(code: str) -> None:
        def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
            return real([sys.executable, "-c", code], **options)

        monkeypatch.setattr(probes.subprocess, "run", run)

    real = subprocess.run
    for code, sentence in (
        (f"import os; os.kill(os.getpid(), {signal.SIGSEGV:d})", "the process died of SIGSEGV"),
        ("raise SystemExit(3)", "ended with status 3 and no answer"),
        ("import time; time.sleep(60)", "did not answer within 1 seconds"),
        (
            "import sys; print('x with error: libfoo.so.3: gone', file=sys.stderr); print('{\"error\": \"vague\"}')",
            "^libfoo.so.3: gone$",
        ),
    ):
        monkeypatch.setattr(probes, "_SECONDS", 1 if "sleep" in code else 60)
        starting(code)
        with pytest.raises(probes.ProbeError, match=sentence):
            probes.ask("driver")


@pytest.mark.parametrize(
    ("library", "number", "text"),
    [
        ("libcudart", 12060, "12.6"),
        ("libcudnn", 90300, "9.3.0"),
        ("libnvinfer", 101602, "10.16.2"),
        ("libnvinfer", 8601, "8.6.1"),
    ],
)
def test_library_versions_are_read(library: str, number: int, text: str):
    assert probes.version_text(library, number) == text


def test_a_jetsons_files_are_read(tmp_path: Path):
    assert jetson_facts(tmp_path) is None
    (tmp_path / "proc/device-tree").mkdir(parents=True)
    (tmp_path / "proc/device-tree/model").write_text("Raspberry Pi 5 Model B\0")
    assert jetson_facts(tmp_path) is None
    (tmp_path / "proc/device-tree/model").write_text("NVIDIA Jetson AGX Orin Developer Kit\0")
    assert jetson_facts(tmp_path) == JetsonFacts("NVIDIA Jetson AGX Orin Developer Kit", None)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nv_tegra_release").write_text("# R36 (release), REVISION: 4.7, GCID: 1, BOARD: generic, EABI: aarch64\n")
    assert jetson_facts(tmp_path).linux_version == (36, 4, 7)


def test_this_machine(tiny_bundle: Path):
    facts = gather_facts(tiny_bundle)
    assert facts.packages["numpy"]
    assert facts.onnxruntime is not None
    assert set(facts.onnxruntime_wheels) & {"onnxruntime", "onnxruntime-gpu"}
    assert facts.trials[CPU] is None
    assert failures(examine(facts), facts, ["cpu"]) == []
    assert "gqa lowering" in finding(facts, "bundle").sentence
    assert json.loads(json.dumps(facts.trials)) == facts.trials


def test_a_damaged_bundle_is_named(tiny_bundle: Path, tmp_path: Path):
    folder = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    with (folder / "target" / "model.onnx").open("r+b") as file:
        file.write(b"!")
    assert "target/model.onnx" in str(bundle_facts(folder).trouble)
    assert bundle_facts(tmp_path).trouble is not None


# --- engines ---------------------------------------------------------------------------------------------------------


def test_engines_are_held_against_this_machine(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from doctor_engines import engine_findings

    from engines.profiles import Profile
    from engines.sidecar import EngineRecord, engine_path, graph_hashes
    from runtime.contract import file_sha256
    from runtime.manifest import load_bundle

    folder = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    facts = replace(THOR_JETPACK_7, bundle=BundleFacts(str(folder), None))

    def said(facts: MachineFacts) -> list[tuple[str, str]]:
        return [(one.state, one.sentence) for one in engine_findings(folder, facts)]

    assert said(facts) == [("note", f"{folder} has no engines for tensorrt-10.16.2.10-sm110.")]
    assert said(CPU_ONLY) == said(replace(facts, driver=NO_DRIVER)) == []
    bundle = load_bundle(folder)
    here = folder / "engines" / "tensorrt-10.16.2.10-sm110"
    for spec in (bundle.target, bundle.draft):
        engine = engine_path(here, spec)
        engine.parent.mkdir(parents=True)
        engine.write_bytes(b"engine")
        EngineRecord(
            "tensorrt",
            "10.16.2.10",
            "110",
            graph_hashes(spec),
            4096,
            (Profile("fixed", 8, 8, 8),),
            {},
            1.0,
            1,
            6,
            file_sha256(engine),
        ).save(engine)
    assert [state for state, _ in said(facts)] == ["works", "works"]
    updated = replace(facts, packages={**facts.packages, "tensorrt": "10.17.0"})
    assert said(updated) == [
        ("broken", f"{folder} has no engines for tensorrt-10.17.0-sm110, only for tensorrt-10.16.2.10-sm110.")
    ]
    engine_path(here, bundle.draft).write_bytes(b"enginE")
    (_, draft) = said(facts)
    assert draft[0] == "broken"
    assert draft[1].endswith("draft/model.engine was changed after it was built: build it again.")


# --- the script ------------------------------------------------------------------------------------------------------


def call(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "doctor.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, **environment})


def test_help_teaches_by_example():
    done = call("--help")
    assert done.returncode == 0
    assert "examples:" in done.stdout
    assert "python scripts/doctor.py" in done.stdout


def test_the_script_is_content_with_this_machine_and_a_whole_bundle(tiny_bundle: Path):
    done = call(tiny_bundle, "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    assert "ok    CPU: " in done.stdout
    assert "ok    bundle: It loads and computes on cpu." in done.stdout
    assert done.stdout.endswith("\nAll that was asked for works: cpu.\n")


def test_a_whole_bundle_that_does_not_load_is_no_success(tiny_bundle: Path, tmp_path: Path):
    folder = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    manifest = json.loads((folder / "bundle.json").read_text())
    manifest["target"]["rows_measured_on"] = "another processor"
    (folder / "bundle.json").write_text(json.dumps(manifest))
    (folder / "rows.json").write_text("{")
    done = call(folder, "--device", "cpu")
    assert (done.returncode, done.stderr) == (1, "")
    assert re.search(r"FAIL  bundle: It does not load on cpu: .*rows\.json is damaged .*: remove it", done.stdout)
    assert "All that was asked for works" not in done.stdout


def test_where_a_bundle_is_tried_and_where_not(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def ask(question: str, folder: str, device: str, *, seconds: int) -> dict:
        asked.append((question, folder, device))
        if device == "cpu":
            raise probes.ProbeError("it computes in bfloat16.")
        return {}

    monkeypatch.setattr("runtime.doctor.bundle_trials.ask", ask)

    def said(devices: list[str], hindered: set[str], *, is_named: bool) -> list[tuple[str, tuple[str, ...]]]:
        return [(one.state, one.hinders) for one in bundle_trials(Path("b"), devices, hindered, is_named=is_named)]

    assert said(["cpu", "cuda", "tensorrt"], set(), is_named=False) == [("note", ("cpu",)), ("works", ()), ("note", ())]
    assert asked == [("bundle", "b", "cpu"), ("bundle", "b", "cuda")]
    assert said(["cpu", "cuda"], set(), is_named=True) == [("broken", ("cpu",)), ("works", ())]
    assert said(["cpu", "cuda"], {"cuda"}, is_named=False) == [("broken", ("cpu",)), ("note", ())]
    assert len(asked) == 5


def test_the_script_fails_where_what_was_asked_for_does_not_work(tmp_path: Path):
    # Without a visible GPU CUDA works nowhere, whatever is installed.
    done = call(tmp_path, "--device", "cuda", "--json", CUDA_VISIBLE_DEVICES="")
    document = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (1, "")
    assert document["failed"] == 2
    broken = {one["subject"] for one in document["findings"] if {"cuda", "bundle"} & set(one["hinders"])}
    assert broken == {"CUDA", "bundle"}
