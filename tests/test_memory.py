"""The budget against what decoders really allocate and a process really takes; the refusal; the kernel's files."""

import re
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from runtime.contract import DecoderSpec, FileRecord
from runtime.decoder import Decoder, context_size
from runtime.errors import BundleError, DeviceError
from runtime.memory import (
    MemoryBudget,
    check_fits,
    describe_memory,
    free_memory,
    promised_length,
    weight_bytes,
)
from runtime.pair import MAX_NUM_DRAFT_TOKENS
from runtime.session import Session
from tests.fakes import FakeContext, FakeModel, fake_generator

GB = 10**9


def spec_of(size: int = GB, precision: str = "fp32", **changes: object) -> DecoderSpec:
    """A decoder of the shape of a 1B model; one token's cache is 64 KiB."""
    spec = replace(
        FakeModel().spec,
        graph=(FileRecord("model.onnx", size // 4, ""), FileRecord("model.onnx.data", size - size // 4, "")),
        precision=precision,
        num_layers=16,
        num_key_value_heads=8,
        head_size=64,
        vocab_size=128_000,
        context_length=8192,
    )
    return replace(spec, **changes)


class RecordingModel(FakeModel):
    """A fake that keeps what contexts it was asked for."""

    def __init__(self, **arguments: int) -> None:
        super().__init__(**arguments)
        self.opened: list[tuple[int, int]] = []

    def open_context(self, capacity: int, max_rows: int) -> FakeContext:
        self.opened.append((capacity, max_rows))
        return super().open_context(capacity, max_rows)


@pytest.mark.parametrize(
    ("vocab_size", "min_rows", "spare_slots", "max_length", "num_rows"),
    list(product((16, 200_000), (1, 5, 300), (0, 3), (2, 100, 1000), (1, 65))),
)
def test_a_contexts_size_is_what_a_decoder_allocates(
    vocab_size: int, min_rows: int, spare_slots: int, max_length: int, num_rows: int
) -> None:
    model = RecordingModel(vocab_size=vocab_size, min_rows=min_rows, spare_slots=spare_slots, context_length=5000)
    Decoder(model, max_length, num_rows=num_rows)
    assert model.opened == [context_size(model.spec, max_length, num_rows)]


@pytest.mark.parametrize("max_length", [10, 300, 470, 512])
@pytest.mark.parametrize("draft_context", [200, 512, 4096])
@pytest.mark.parametrize("vocab_size", [16, 200_000])  # wide rows: the most proposals decide how many there are
def test_caches_and_logits_are_what_a_session_allocates(max_length: int, draft_context: int, vocab_size: int) -> None:
    target = RecordingModel(context_length=512, spare_slots=2)
    draft = RecordingModel(vocab_size=8, context_length=draft_context, min_rows=4)
    pair = fake_generator(target, draft, drafter="model")._pair
    target.spec = replace(target.spec, vocab_size=vocab_size)
    Session(pair, max_length).start([1])
    opened = [(model.spec, *sizes) for model in (target, draft) for sizes in model.opened]
    assert len(opened) == 2
    budget = MemoryBudget.of(target.spec, draft.spec, max_length)
    assert budget.caches == sum(slots * spec.cache_bytes_per_token for spec, slots, _ in opened)
    assert budget.logits == sum(4 * rows * spec.vocab_size for spec, _, rows in opened)


def test_weights_are_more_than_their_files_and_the_peak_is_the_sum() -> None:
    sizes = {precision: weight_bytes(spec_of(GB, precision)) for precision in ("fp32", "int8", "int4")}
    assert sizes == {"fp32": 1.17 * GB, "int8": 1.3 * GB, "int4": 1.3 * GB}
    target, draft = spec_of(), spec_of(GB // 2, "int4", vocab_size=1000)
    alone, pair = MemoryBudget.of(target, None, 512), MemoryBudget.of(target, draft, 512)
    assert pair.weights == weight_bytes(target) + weight_bytes(draft)
    assert alone.weights == weight_bytes(target)
    for budget in (alone, pair):
        assert budget.peak == budget.weights + budget.caches + budget.logits + budget.overhead
    assert alone.caches == (512 + MAX_NUM_DRAFT_TOKENS + target.spare_slots) * 65_536
    assert pair.caches == 2 * alone.caches
    assert 0 < alone.overhead < pair.overhead


@pytest.mark.parametrize("draft", [None, spec_of(GB // 4, "int4")], ids=["alone", "pair"])
def test_the_last_byte_decides_and_an_unknown_machine_refuses_nothing(draft: DecoderSpec | None) -> None:
    peak = MemoryBudget.of(spec_of(), draft, 2048).peak
    check_fits(spec_of(), draft, 2048, peak)
    check_fits(spec_of(), draft, 2048, None)
    with pytest.raises(DeviceError, match="of memory"):
        check_fits(spec_of(), draft, 2048, peak - 1)


def test_the_sentence_has_the_numbers() -> None:
    budget = MemoryBudget.of(spec_of(), None, 4096)
    with pytest.raises(DeviceError) as caught:
        check_fits(spec_of(), None, 4096, int(1.62 * GB))
    numbers = [budget.peak, budget.weights, budget.caches, 1.62 * GB]
    assert re.findall(r"\d+\.\d\d GB", str(caught.value)) == [f"{number / GB:.2f} GB" for number in numbers]
    assert str(caught.value).startswith("A text of 4096 tokens needs ")
    assert str(caught.value).count(". ") == 0, "one sentence"


@pytest.mark.parametrize("draft", [None, spec_of(GB // 4, "int4", context_length=1024)], ids=["alone", "pair"])
@pytest.mark.parametrize("wanted", [64, 128, 1024, 4032])
def test_the_length_it_names_is_the_largest_that_fits(draft: DecoderSpec | None, wanted: int) -> None:
    target = spec_of()
    for free in (MemoryBudget.of(target, draft, wanted).peak, MemoryBudget.of(target, draft, wanted + 64).peak - 1):
        with pytest.raises(DeviceError, match=f": {wanted} tokens would fit, pass them as max_length.$"):
            check_fits(target, draft, 4096, free)


@pytest.mark.parametrize(
    ("target", "draft", "advice"),
    [
        (spec_of(), None, "export it in int4"),
        (spec_of(), spec_of(), "export it in int4 or load it without its draft (drafter='lookup')"),
        (spec_of(precision="int4"), spec_of(precision="int8"), "export it in int4 or load it without its draft"),
        (spec_of(precision="int4"), spec_of(precision="int4"), "load it without its draft (drafter='lookup')"),
        (spec_of(precision="int4"), None, "take a smaller model"),
        (
            spec_of(precision="int4", cache_capacity=8256),
            None,
            "export it with a lower --max-length (it fixes the size of the caches).",
        ),
        (
            spec_of(precision="int4"),
            spec_of(precision="int4", cache_capacity=8256),
            "export it with a lower --max-length (it fixes the size of the caches) or load it without its draft",
        ),
    ],
)
def test_what_fits_at_no_length_gets_another_advice(target: DecoderSpec, draft: DecoderSpec | None, advice: str) -> None:
    free = MemoryBudget.of(target, draft, 64).peak - 1
    with pytest.raises(DeviceError) as caught:
        check_fits(target, draft, 2048, free)
    assert f"it does not fit even without a context, {advice}" in str(caught.value)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_caches_far_larger_than_the_context_are_the_manifests_fault(role: str) -> None:
    needed = 8192 + 1
    odd = spec_of(cache_capacity=2 * needed + 1)
    pair = (odd, None) if role == "target" else (spec_of(), odd)
    free = MemoryBudget.of(*pair, 2048).peak
    check_fits(*pair, 2048, free)  # where there is memory for them, they are only a waste
    with pytest.raises(BundleError, match=f"cache_capacity of the {role} is 16,387, its context_length of 8,192 needs 8,193"):
        check_fits(*pair, 2048, free - 1)
    usual = spec_of(cache_capacity=2 * needed)
    with pytest.raises(DeviceError, match="of memory"):
        check_fits(usual, None, 2048, 0)


@pytest.mark.parametrize(("context_length", "promised"), [(8192, 2048), (2049, 2048), (512, 512)])
def test_without_a_promise_an_ordinary_text_is_budgeted(context_length: int, promised: int) -> None:
    assert promised_length(None, context_length) == promised
    assert promised_length(context_length, context_length) == context_length
    assert promised_length(2, context_length) == 2
    for wrong in (1, context_length + 1, 2.0, True, "512"):
        with pytest.raises(ValueError, match=f"^max_length is {wrong!r}; a number from 2 to the context's {context_length}"):
            promised_length(wrong, context_length)  # type: ignore[arg-type]


def test_the_description_is_of_the_full_context() -> None:
    target, draft = spec_of(), spec_of(GB // 2, "int4")
    budget = MemoryBudget.of(target, draft, 8192)
    assert describe_memory(target, draft, 1_234_567_890) == {
        "weights in memory": "1.82 GB",
        "caches at the full context": f"{budget.caches / GB:.2f} GB for 8192 tokens",
        "free memory when loaded": "1.23 GB",
    }
    assert describe_memory(target, None, None)["weights in memory"] == "1.17 GB"
    assert describe_memory(target, None, None)["free memory when loaded"] == "unknown"


def machine(folder: Path, files: dict[str, str]) -> int | None:
    """Free memory by files of a kernel, given by their paths."""
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return free_memory(folder / "proc", folder / "cgroup")


MEMINFO = {
    "proc/meminfo": "MemTotal:       16000 kB\nMemFree:          500 kB\nMemAvailable:    8000 kB\nHugePages_Total:  0\n"
}
HYBRID = {"proc/self/cgroup": "5:devices:/\n4:cpu,memory:/jobs/one\n1:name=systemd:/jobs/two\n0::/jobs/two\n"}
UNIFIED = {"proc/self/cgroup": "0::/a.slice/b.scope\n"}


@pytest.mark.parametrize(
    ("files", "kilobytes"),
    [
        ({}, 8000),
        # version 2: the limit of the group itself, of one above it, of the root (a container sees its own there), and none
        (UNIFIED | {"cgroup/a.slice/b.scope/memory.max": "3072000", "cgroup/a.slice/b.scope/memory.current": "1024000"}, 2000),
        (UNIFIED | {"cgroup/a.slice/memory.max": "3072000", "cgroup/a.slice/memory.current": "1024000"}, 2000),
        (UNIFIED | {"cgroup/memory.max": "3072000", "cgroup/memory.current": "1024000"}, 2000),
        (UNIFIED | {"cgroup/memory.max": "max", "cgroup/memory.current": "1024000"}, 8000),
        (UNIFIED | {"cgroup/memory.max": "1024000", "cgroup/memory.current": "3072000"}, 0),
        # the smallest of several counts, and pages of files can be had
        (
            UNIFIED
            | {"cgroup/a.slice/memory.max": "5120000", "cgroup/a.slice/memory.current": "1024000"}
            | {"cgroup/a.slice/b.scope/memory.max": "3072000", "cgroup/a.slice/b.scope/memory.current": "2048000"}
            | {"cgroup/a.slice/b.scope/memory.stat": "anon 9\nfile 1000000\ninactive_file 512000\nactive_file 102400\n"},
            1600,
        ),
        # version 1: its own tree, totals of the groups below; the unified hierarchy beside it has no memory controller
        (
            HYBRID
            | {"cgroup/memory/jobs/one/memory.limit_in_bytes": "3072000\n"}
            | {"cgroup/memory/jobs/one/memory.usage_in_bytes": "2048000\n"}
            | {"cgroup/memory/jobs/one/memory.stat": "inactive_file 1\ntotal_inactive_file 512000\ntotal_active_file 0\n"},
            1500,
        ),
        (
            HYBRID
            | {"cgroup/memory/memory.limit_in_bytes": "3072000", "cgroup/memory/memory.usage_in_bytes": "1024000"}
            | {"cgroup/memory/jobs/two/memory.limit_in_bytes": "1", "cgroup/memory/jobs/two/memory.usage_in_bytes": "1"},
            2000,
        ),
        (
            HYBRID
            | {"cgroup/memory/jobs/one/memory.limit_in_bytes": "9223372036854771712"}
            | {"cgroup/memory/jobs/one/memory.usage_in_bytes": "2048000"},
            8000,
        ),
    ],
)
def test_free_memory_is_the_least_of_the_machine_and_its_groups(tmp_path: Path, files: dict[str, str], kilobytes: int) -> None:
    assert machine(tmp_path, MEMINFO | files) == kilobytes * 1024


@pytest.mark.parametrize("files", [{}, {"proc/meminfo": "MemTotal:  16000 kB\nMemFree:  500 kB\n"}, UNIFIED])
def test_free_memory_of_other_systems_is_unknown(tmp_path: Path, files: dict[str, str]) -> None:
    assert machine(tmp_path, files) is None


def test_free_memory_of_this_machine() -> None:
    free = free_memory()
    if not Path("/proc/meminfo").is_file():
        assert free is None
        return
    total = re.search(r"MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert total is not None
    assert 0 <= free < int(total[1]) * 1024


# A process of its own: one text as long as promised, with everything proposed by the draft model where there is one.
MEASURE = """
import sys
from pathlib import Path
from runtime import Generator, SamplingParams
from runtime.memory import MemoryBudget
folder, drafter, length = sys.argv[1], sys.argv[2], int(sys.argv[3])
generator = Generator.from_bundle(folder, drafter=drafter, threads=2)
spec = generator.target.spec
prompt = [token * 7919 % (spec.vocab_size - 60) + 50 for token in range(length - 16)]
generator.generate(prompt, SamplingParams(max_new_tokens=16, ignore_eos=True))
lines = Path("/proc/self/status").read_text().splitlines()
print(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")))
print(MemoryBudget.of(spec, generator.draft and generator.draft.spec, length).peak)
"""


def peak_and_estimate(folder: Path, drafter: str, length: int) -> tuple[int, int]:
    command = [sys.executable, "-c", MEASURE, str(folder), drafter, str(length)]
    root = Path(__file__).resolve().parent.parent
    measured, estimate = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split()
    return int(measured), int(estimate)


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="only Linux tells a process its peak")
@pytest.mark.parametrize("drafter", ["off", "model"])
def test_the_estimate_holds_for_a_process_without_weights_to_speak_of(tiny_bundle: Path, drafter: str) -> None:
    """All overhead, which another build of Python or ONNX Runtime may change: so the bounds are wide."""
    measured, estimate = peak_and_estimate(tiny_bundle, drafter, 128)
    assert 0.8 * measured <= estimate <= 1.6 * measured


@pytest.mark.real_weights
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="only Linux tells a process its peak")
def test_the_estimate_holds_for_real_weights(smollm2_bundles: Path) -> None:
    for name, drafter, length in (("pair", "model", 256), ("pair", "model", 1024), ("pair", "off", 256), ("int8", "off", 1024)):
        measured, estimate = peak_and_estimate(smollm2_bundles / name, drafter, length)
        assert 0.95 * measured <= estimate <= 1.15 * measured, (name, drafter, length, measured, estimate)
