"""The engines that scripts/bench.py compares: ours in this process, each other one in a process of its own."""

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from bench_figures import Mode, TextRun, Work

if TYPE_CHECKING:
    from runtime import Generator
    from runtime.contract import Bundle

WORKER = Path(__file__).with_name("bench_worker.py")
GENAI_DRAFT_TOKENS = range(1, 17)


@dataclass(frozen=True)
class TextRequest:
    """What every engine is asked for in the same way.

    Attributes:
        prompt: Token ids.
        max_new_tokens: Exactly so many are made; no text ends by itself.
        temperature: 0 for greedy.
        top_k: How many tokens are drawn from, where the temperature is above 0.
        seed: Of the drawing.
        coupled: Whether ours draws with coupled acceptance.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 50
    seed: int = 1
    coupled: bool = False


class BenchEngine(Protocol):
    """Makes texts."""

    version: str

    def run(self, mode: Mode, request: TextRequest) -> TextRun:
        """Makes one text and measures it."""


class OurEngine:
    """This project's runtime."""

    def __init__(self, generator: "Generator") -> None:
        """Takes a loaded bundle."""
        import onnxruntime

        self.version = f"onnxruntime {onnxruntime.__version__}"
        self._generator = generator

    def run(self, mode: Mode, request: TextRequest) -> TextRun:
        """Makes one text; decoding it to characters is part of the time, as everywhere in this runtime."""
        from runtime import SamplingParams

        params = SamplingParams(max_new_tokens=request.max_new_tokens, ignore_eos=True)
        if request.temperature:
            acceptance = "coupled" if request.coupled else "rejection"
            sampled = {"temperature": request.temperature, "top_k": request.top_k, "seed": request.seed}
            params = replace(params, **sampled, acceptance=acceptance)  # type: ignore[arg-type]
        started = time.perf_counter()
        stream = self._generator.stream(
            list(request.prompt), params, drafter=mode.drafter, num_draft_tokens=mode.num_draft_tokens
        )
        piece = next(stream)
        first, first_tokens = time.perf_counter(), len(piece.token_ids)
        for piece in stream:  # noqa: B007
            pass
        ended = time.perf_counter()
        assert piece.result is not None, "the last piece carries the result"
        stats = piece.result.stats
        work = Work(
            stats.target_passes,
            stats.draft_passes,
            stats.rounds,
            stats.proposed_tokens,
            stats.accepted_tokens,
            stats.total_seconds - stats.target_seconds - stats.draft_seconds,
        )
        return TextRun(piece.result.token_ids, first - started, ended - started, first_tokens, work)


class WorkerEngine:
    """Another engine behind a pipe."""

    def __init__(self, name: str, process: "subprocess.Popen[str]", errors: IO[str]) -> None:
        """Waits until it has loaded; `worker` is the usual way."""
        self._name = name
        self._process = process
        self._errors = errors
        facts = self._answer()
        self.version: str = facts["version"]
        self.vocab_size: int | None = facts.get("vocab_size")

    def run(self, mode: Mode, request: TextRequest) -> TextRun:
        """Makes one text.

        Raises:
            ValueError: The engine failed, or ended a text early.
        """
        question = {"drafter": mode.drafter, "num_draft_tokens": mode.num_draft_tokens, **asdict(request)}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None
        answer = self._answer()
        if len(answer["tokens"]) < request.max_new_tokens:
            raise ValueError(
                f"{mode.name} ended a text after {len(answer['tokens'])} of {request.max_new_tokens} tokens, so speeds cannot "
                "be compared: choose another prompt."
            )
        answer |= {"tokens": tuple(answer["tokens"]), "work": Work(**answer["work"])}
        return TextRun(**answer)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        return json.loads(line)  # type: ignore[no-any-return]

    def _failure(self) -> ValueError:
        status = self._process.wait()
        self._errors.seek(0)
        lines = [line for line in self._errors.read().splitlines() if line.strip()]
        said = lines[-1][:300] if lines else "it said nothing"
        return ValueError(f"The process of {self._name} ended with status {status} ({said}): leave that engine out.")


@contextmanager
def worker(name: str, settings: dict[str, Any]) -> Iterator[WorkerEngine]:
    """Starts an engine's process, and ends it behind the block, whatever it is doing.

    Args:
        name: "genai" or "llama.cpp".
        settings: What its class in bench_worker.py loads.

    Raises:
        ValueError: It cannot load.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            [sys.executable, str(WORKER), name, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
        )
        try:
            yield WorkerEngine(name, process, errors)
        finally:
            process.kill()
            process.communicate()


def missing_packages(*, genai: bool, gguf: bool) -> dict[str, str]:
    """Returns a note for each engine that was asked for and is not installed, by its name."""
    asked = (
        ("genai", genai, "onnxruntime_genai", "pip install -e '.[oracles]' in the project's folder"),
        ("llama.cpp", gguf, "llama_cpp", "pip install llama-cpp-python"),
    )
    return {
        name: f"{name} is left out: {module} is not installed ({install})."
        for name, wanted, module, install in asked
        if wanted and importlib.util.find_spec(module) is None
    }


def genai_refusal(bundle: "Bundle", num_draft_tokens: int) -> str | None:
    """Returns why ONNX Runtime GenAI cannot run the target, or, where there are draft tokens, the pair; None if it can."""
    from export.errors import ExportError
    from export.genai_config import genai_config

    try:
        genai_config(bundle, num_draft_tokens=num_draft_tokens)
    except ExportError as error:
        return str(error)
    return None


@contextmanager
def genai_folders(bundle: "Bundle", unlikely_token: int, *, draft: bool, threads: int) -> Iterator[dict[str, str | None]]:
    """Lays out folders that ONNX Runtime GenAI loads: the target alone, and the pair; they are gone behind the block.

    Args:
        bundle: The bundle.
        unlikely_token: What ends a text there: that engine insists on such a token, and cannot be told to ignore it.
        draft: Whether the pair is wanted.
        threads: For each decoder.

    Raises:
        ExportError: That engine cannot run them (see genai_refusal), or the disk is full.
    """
    from export.genai_config import write_genai_folder

    endless = replace(bundle, tokenizer=replace(bundle.tokenizer, eos_token_ids=(unlikely_token,)))
    # Beside the bundle, its files can be linked; elsewhere they might have to be copied.
    parent = bundle.folder.resolve().parent
    place = parent if os.access(parent, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=place) as work:
        folders: dict[str, str | None] = {"plain": str(write_genai_folder(endless, Path(work) / "plain", threads=threads))}
        most = GENAI_DRAFT_TOKENS[-1]
        pair = write_genai_folder(endless, Path(work) / "pair", num_draft_tokens=most, threads=threads) if draft else None
        yield folders | {"pair": None if pair is None else str(pair)}


def unlikely_token(generator: "Generator", prompts: Collection[Sequence[int]]) -> int:
    """Returns the token whose best logit behind any beginning of the prompts is the worst."""
    import numpy as np

    from runtime.decoder import Decoder

    best = np.full(generator.target.spec.vocab_size, -math.inf, np.float32)
    for prompt in prompts:
        rows = Decoder(generator.target, len(prompt), num_rows=len(prompt)).forward(list(prompt), len(prompt))
        best = np.maximum(best, rows.max(axis=0))
    return int(best.argmin())
