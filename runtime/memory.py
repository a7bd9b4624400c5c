"""What a pair of models will take of this machine's memory, and what the machine has free, before anything is loaded.

The figures were measured with ONNX Runtime 1.32 on x86-64 (the process's peak resident memory, file pages included). It
packs each weight anew for its kernels and keeps pages of the file beside the packed copy, so weights take more than their
files do. This module opens no graph and no session: it knows sizes of files, and of the buffers a text is given.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .checks import checked_max_length
from .consistency import slots_needed
from .contract import DecoderSpec
from .decoder import context_size
from .draft_policy import MAX_NUM_DRAFT_TOKENS
from .draft_vocabulary import DraftVocabulary, draft_length
from .errors import BundleError, DeviceError

DEFAULT_MAX_LENGTH = 2048
# Resident bytes for each byte of a graph's files, once every row of the embedding has been read: the packed copy, the scales
# that stay mapped, and an embedding that is the output's head too and so is there twice. float16
# weights are widened for the CPU's products; bfloat16 ones are for devices, which take them as they are.
RESIDENT_SHARE = {"fp32": 1.17, "fp16": 2.6, "bf16": 1.17, "int8": 1.3, "int4": 1.3, "checkpoint": 1.3}
_TOKENIZER_BYTES = 900  # for each token of the table: strings, merges and their look-up
_PROCESS_BYTES = 64 << 20  # Python, numpy, ONNX Runtime and this package
_SESSION_BYTES = 20 << 20  # a session's graph, threads and activations
_LENGTH_STEP = 64
_ODD_CAPACITY = 2  # times what a context needs: no exporter leaves so much room


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes that generating one text at a time takes at its peak.

    Attributes:
        max_length: Tokens of prompt and text together.
        weights: Of the target, and of the draft where it is loaded.
        caches: Keys and values of `max_length` tokens and of the room for proposals behind them.
        logits: Rows of logits of one pass of each model.
        overhead: The process itself, its tokenizer and its sessions.
    """

    max_length: int
    weights: int
    caches: int
    logits: int
    overhead: int

    @classmethod
    def of(
        cls, target: DecoderSpec, draft: DecoderSpec | None, max_length: int, draft_vocabulary: DraftVocabulary | None = None
    ) -> "MemoryBudget":
        """Adds up what the models take.

        Args:
            target: The model whose text is generated.
            draft: The model that proposes, or None where none is loaded.
            max_length: Tokens of prompt and text together, at most the target's context.
            draft_vocabulary: The draft's, where it has one of its own: it may read a text in more tokens than it has.
        """
        capacity = min(target.context_length, max_length + MAX_NUM_DRAFT_TOKENS)
        sizes = [(target, *context_size(target, capacity, MAX_NUM_DRAFT_TOKENS + 1))]
        if draft is not None:
            draft_capacity = min(draft_length(capacity, draft_vocabulary), draft.context_length)
            sizes.append((draft, *context_size(draft, draft_capacity, 1)))
        return cls(
            max_length=max_length,
            weights=sum(weight_bytes(spec) for spec, _, _ in sizes),
            caches=sum(slots * spec.cache_bytes_per_token for spec, slots, _ in sizes),
            logits=sum(rows * spec.vocab_size * 4 for spec, _, rows in sizes),
            overhead=_PROCESS_BYTES + len(sizes) * _SESSION_BYTES + target.vocab_size * _TOKENIZER_BYTES,
        )

    @property
    def peak(self) -> int:
        """All of it."""
        return self.weights + self.caches + self.logits + self.overhead


def weight_bytes(spec: DecoderSpec) -> int:
    """Returns the memory a decoder's weights take when loaded, by the sizes of its files.

    An estimate from above for most models. One whose embedding is more than a fifth of its fp32 weights and is the
    output's head too may take more: up to twice its file.
    """
    return int(sum(file.size for file in spec.graph) * RESIDENT_SHARE[spec.precision])


def promised_length(max_length: int | None, context_length: int) -> int:
    """Returns the length a budget is made for; see Generator.from_bundle.

    Raises:
        ValueError: Fewer than 2 tokens, or more than the context.
    """
    if max_length is None:
        return min(DEFAULT_MAX_LENGTH, context_length)
    return checked_max_length(max_length, context_length)


def check_fits(
    target: DecoderSpec,
    draft: DecoderSpec | None,
    max_length: int,
    free: int | None,
    draft_vocabulary: DraftVocabulary | None = None,
) -> None:
    """Refuses a pair that does not fit, before it is loaded.

    Args:
        target: See MemoryBudget.of.
        draft: See MemoryBudget.of.
        max_length: See MemoryBudget.of.
        free: Bytes that are free; None where that is unknown, and nothing is refused.
        draft_vocabulary: See MemoryBudget.of.

    Raises:
        DeviceError: The peak is more than what is free; the sentence says which length would fit, or what else to do.
        BundleError: Likewise, and it is for caches that a manifest makes far larger than its own context.
    """
    budget = MemoryBudget.of(target, draft, max_length, draft_vocabulary)
    if free is None or budget.peak <= free:
        return
    for role, spec in (("target", target), ("draft", draft)):
        if spec is not None and (spec.cache_capacity or 0) > _ODD_CAPACITY * slots_needed(spec):
            raise BundleError(
                f"The manifest's cache_capacity of the {role} is {spec.cache_capacity:,}, its context_length of "
                f"{spec.context_length:,} needs {slots_needed(spec):,}, and memory is too small: export the bundle again."
            )
    raise DeviceError(
        f"A text of {max_length} tokens needs {_gigabytes(budget.peak)} of memory ({_gigabytes(budget.weights)} of weights, "
        f"{_gigabytes(budget.caches)} of caches, the rest buffers) and {_gigabytes(free)} are free: "
        f"{_advice(target, draft, max_length, free, draft_vocabulary)}."
    )


def describe_memory(
    target: DecoderSpec, draft: DecoderSpec | None, free: int | None, draft_vocabulary: DraftVocabulary | None = None
) -> dict[str, str]:
    """Returns what the loaded models take, for people; `free` is what was free when they were loaded, if known."""
    budget = MemoryBudget.of(target, draft, target.context_length, draft_vocabulary)
    return {
        "weights in memory": _gigabytes(budget.weights),
        "caches at the full context": f"{_gigabytes(budget.caches)} for {budget.max_length} tokens",
        "free memory when loaded": "unknown" if free is None else _gigabytes(free),
    }


def _advice(
    target: DecoderSpec, draft: DecoderSpec | None, max_length: int, free: int, draft_vocabulary: DraftVocabulary | None
) -> str:
    lengths = range(_LENGTH_STEP, max_length, _LENGTH_STEP)
    fitting = bisect_right(lengths, free, key=lambda length: MemoryBudget.of(target, draft, length, draft_vocabulary).peak)
    if fitting:
        return f"{lengths[fitting - 1]} tokens would fit, pass them as max_length"
    remedies = []
    if any(spec.cache_capacity is not None for spec in (target, draft) if spec is not None):
        remedies.append("export it with a lower --max-length (it fixes the size of the caches)")
    if any(spec.precision != "int4" for spec in (target, draft) if spec is not None):
        remedies.append("export it in int4")
    if draft is not None:
        remedies.append("load it without its draft (drafter='lookup')")
    return f"it does not fit even without a context, {' or '.join(remedies) or 'take a smaller model'}"


def free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Returns the bytes this process may still take without swapping, or None where that cannot be told (not on Linux).

    The machine's available memory, or less where a control group (a container's limit) leaves less. A GPU that shares the
    machine's memory, as a Jetson's does, draws on the same number.

    Args:
        proc: Where the kernel's process files are.
        cgroups: Where the control groups are.
    """
    available = _fields(proc / "meminfo").get("MemAvailable:")
    if available is None:
        return None
    return max(0, min([available * 1024, *_group_rooms(proc, cgroups)]))


def _group_rooms(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yields what each limit on the process's path of control groups leaves, versions 1 and 2."""
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, limit, usage, prefix = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        elif not controllers:
            root, limit, usage, prefix = cgroups, "memory.max", "memory.current", ""
        else:
            continue
        # In a container the path may be the host's, and only the root is there to be read.
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            most, used = _read(folder / limit).strip(), _read(folder / usage).strip()
            if most.isdigit() and used.isdigit():
                # Pages of files are given up when memory is asked for; those of the bundle's own files, hashed a moment
                # ago, among them.
                stat = _fields(folder / "memory.stat")
                yield int(most) - int(used) + stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)


def _fields(file: Path) -> dict[str, int]:
    """Returns the lines of a kernel's table, name and number."""
    lines = (line.split() for line in _read(file).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
