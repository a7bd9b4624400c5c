"""Memory of an export: bounded by the checkpoint's size, and refused before the work where there is too little."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from export.errors import ExportError
from export.memory import check_memory, needed_bytes
from export.role import Role
from export.source import Source, resolve_source

# A matrix in float32 with what its rounding needs, and what the allocator and ONNX Runtime keep.
FIXED_BYTES = 60e6
# Runs in a process of its own, once on a small model, so that everything is imported. Linux resets its count of the peak where
# 5 is written into clear_refs.
PARTS = """
import gc, json, sys
from pathlib import Path
from export.memory import give_back_large_arrays
give_back_large_arrays()
import torch
torch.set_num_threads(1)
from export.base_graph import build_base_graph
from export.decoders import write_decoder
from export.parity import check_parity
from export.role import Role
from export.source import resolve_source
tiny, large, out = sys.argv[1:]
def resident(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
def work(name):
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    source = resolve_source(name)
    role = Role(Path(name).name, source, "int4", 64)
    spec = write_decoder(role, Path(out), lambda *_: None)
    gc.collect()
    written = resident("VmHWM") - before
    Path("/proc/self/clear_refs").write_text("5")
    check_parity(source, [spec], Path(out), list(range(1, 65)))
    return {"written": written, "checked": resident("VmHWM") - before}
work(tiny)
print(json.dumps(work(large)))
"""


@pytest.fixture(scope="module")
def large_checkpoint(tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """62 million random weights in bfloat16, 125 MB in three shards, most of them in the layers as in large models."""
    folder = tmp_path_factory.mktemp("checkpoints") / "large"
    config = transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        rope_theta=500000.0,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="50MB")
    shutil.copy(tiny_draft / "tokenizer.json", folder)
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of a part of a process's life")
def test_peak_is_bounded_by_the_checkpoints_size(large_checkpoint: Path, tiny_draft: Path, tmp_path: Path):
    shards = list(large_checkpoint.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in shards)
    assert len(shards) >= 3
    assert 0.7 * size > FIXED_BYTES, "or the bound would hold for a copy in float32 too"
    command = [sys.executable, "-c", PARTS, str(tiny_draft), str(large_checkpoint), str(tmp_path)]
    root = Path(__file__).parents[2]
    finished = subprocess.run(command, check=False, cwd=root, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stderr[-2000:]
    growth = json.loads(finished.stdout)
    print(f"checkpoint {size / 1e6:.0f} MB", growth)
    assert growth["written"] < 1.3 * size + FIXED_BYTES
    assert growth["checked"] < 1.3 * size + FIXED_BYTES


@pytest.fixture
def billions(target_source: Source) -> Source:
    """Seven billion weights, the largest matrix of half a billion."""
    return replace(target_source, num_parameters=7_000_000_000, largest_matrix=500_000_000)


@pytest.mark.parametrize(("precision", "gigabytes"), [("fp32", 33.2), ("int8", 11.3), ("int4", 7.8)])
def test_what_does_not_fit_is_refused_with_the_numbers(billions: Source, precision: str, gigabytes: float):
    role = Role("target", billions, precision, 512)
    assert needed_bytes(role) == pytest.approx(gigabytes * 1e9, rel=0.01)
    check_memory([role], int(needed_bytes(role)) + 1)
    check_memory([role], None)
    with pytest.raises(
        ExportError, match=rf"in {precision} needs about {gigabytes} GB of memory and 3\.0 GB are free: .*--precision"
    ):
        check_memory([role], 3_000_000_000)


def test_the_draft_is_looked_at_too(billions: Source, target_source: Source):
    roles = [Role("target", target_source, "fp32", 512), Role("draft", billions, "int8", 512)]
    with pytest.raises(ExportError, match="--draft-precision"):
        check_memory(roles, 3_000_000_000)


def test_nothing_is_written_where_memory_is_short(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from export.bundle import export_bundle

    monkeypatch.setattr("export.bundle.free_memory", lambda: 1_000_000)
    with pytest.raises(ExportError, match=r"needs about 0\.4 GB of memory and 0\.0 GB are free"):
        export_bundle(str(tiny_target), None, tmp_path / "bundle")
    assert not list(tmp_path.iterdir())


def test_sources_know_their_largest_matrix(tiny_target: Path):
    source = resolve_source(str(tiny_target))
    config = json.loads((tiny_target / "config.json").read_text(encoding="utf-8"))
    largest = max(config["vocab_size"], config["intermediate_size"]) * config["hidden_size"]
    assert source.largest_matrix == largest
