"""From what the user of scripts/bench.py asks for to loaded engines, modes and prompts; what cannot be had becomes a note."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_engines import (
    GENAI_DRAFT_TOKENS,
    BenchEngine,
    OurEngine,
    TextRequest,
    WorkerEngine,
    genai_folders,
    genai_refusal,
    missing_packages,
    unlikely_token,
    worker,
)
from bench_figures import Engine, Mode
from bench_report import load_average, machine
from bench_run import CHAT_PROMPTS, TEXT_PROMPTS, Case, modes_of
from generation_arguments import chosen_drafters

if TYPE_CHECKING:
    from generation_arguments import DeviceSettings

    from runtime import Generator

_QUIET = 0.5  # of the cores
# What the longest round may write behind the last token.
_ROOM = 65


@dataclass(frozen=True)
class Question:
    """What is to be compared.

    Attributes:
        bundle: A bundle's folder.
        prompts: By name; None for ours.
        chat: Whether they are put into the chat template, where the bundle has one.
        drafters: Of ours; None for all that the bundle can.
        num_draft_tokens: Each is tried with each drafter; None for each drafter's own.
        max_new_tokens: Length of each text.
        temperatures: 0 for greedy.
        top_k: Where the temperature is above 0.
        coupled: Whether ours draws with coupled acceptance.
        max_slowdown: Of our drafter "auto"; see Generator.from_bundle.
        devices: Where ours runs, and with how many threads.
        genai: Whether ONNX Runtime GenAI takes part.
        gguf: What llama.cpp loads; None without it.
    """

    bundle: Path
    prompts: Mapping[str, str] | None
    chat: bool
    drafters: tuple[str, ...] | None
    num_draft_tokens: tuple[int, ...] | None
    max_new_tokens: int
    temperatures: tuple[float, ...]
    top_k: int
    coupled: bool
    max_slowdown: float
    devices: "DeviceSettings"
    genai: bool
    gguf: Path | None


@dataclass(frozen=True)
class Comparison:
    """Everything loaded.

    Attributes:
        engines: Those that take part, by name.
        modes: In the order in which they take turns.
        cases: Prompts and temperatures.
        pair: What runs where, for people.
        notes: What is left out and why, and what may spoil the figures.
        facts: For the JSON file.
    """

    engines: Mapping[Engine, BenchEngine]
    modes: tuple[Mode, ...]
    cases: tuple[Case, ...]
    pair: Mapping[str, str]
    notes: tuple[str, ...]
    facts: Mapping[str, Any]


def prepare(question: Question, stack: ExitStack) -> Comparison:
    """Loads everything.

    Args:
        question: What is asked for.
        stack: Ends the other engines' processes when it is closed.

    Raises:
        BundleError: The bundle is damaged.
        ValueError: Something asked for cannot be done.
    """
    from runtime import Generator
    from runtime.manifest import load_bundle
    from runtime.ort.backend import available_cores

    bundle = load_bundle(question.bundle)
    threads = question.devices["threads"] or available_cores()
    drafters = chosen_drafters(question.drafters, ("auto", "model", "hybrid", "lookup"), has_draft=bundle.draft is not None)
    # Before the other engines: "auto" measures what passes cost.
    generator = Generator.from_bundle(
        question.bundle,
        drafter=_drafter_to_load(drafters),
        max_slowdown=question.max_slowdown,
        verify_files=False,
        **question.devices,
    )
    cases = _cases(question, generator)
    missing = missing_packages(genai=question.genai, gguf=question.gguf is not None)
    notes = [*missing.values(), *_load_note()]
    engines: dict[Engine, BenchEngine] = {"ours": OurEngine(generator)}
    genai_draft = False
    if question.genai and "genai" not in missing:
        refusal = genai_refusal(bundle, 0)
        pair_refusal = genai_refusal(bundle, GENAI_DRAFT_TOKENS[-1]) if bundle.draft is not None else None
        notes += [f"genai is left out: {refusal}"] if refusal else []
        notes += [f"genai does not draft: {pair_refusal}"] if pair_refusal and not refusal else []
        genai_draft = bundle.draft is not None and pair_refusal is None
        if refusal is None:
            prompts = {case.request.prompt for case in cases}
            folders = genai_folders(bundle, unlikely_token(generator, prompts), draft=genai_draft, threads=threads)
            engines["genai"] = stack.enter_context(worker("genai", stack.enter_context(folders)))
    if question.gguf is not None and "llama.cpp" not in missing:
        engines["llama.cpp"] = _llama(question.gguf, cases, generator, threads, stack)
    modes = modes_of(
        drafters,
        question.num_draft_tokens,
        genai="genai" in engines,
        genai_draft=genai_draft,
        gguf="llama.cpp" in engines,
    )
    facts = {
        "bundle": str(question.bundle),
        "pair": generator.describe(),
        "machine": machine(),
        "threads": threads,
        "versions": {name: engine.version for name, engine in engines.items()},
        "settings": {**asdict(question), "bundle": str(question.bundle), "gguf": question.gguf and str(question.gguf)},
        "notes": notes,
    }
    return Comparison(engines, tuple(modes), tuple(cases), generator.describe(), tuple(notes), facts)


def _drafter_to_load(drafters: Sequence[str]) -> str:
    """Returns one that needs as much as all of them."""
    return next((name for name in ("auto", "hybrid", "model") if name in drafters), "lookup")


def _cases(question: Question, generator: "Generator") -> list[Case]:
    chat = question.chat and generator.tokenizer.has_chat_template
    texts = {**CHAT_PROMPTS, **TEXT_PROMPTS} if question.prompts is None else question.prompts
    longest = generator.target.spec.context_length - question.max_new_tokens - _ROOM
    cases = []
    for name, text in texts.items():
        as_text = not chat or (question.prompts is None and name in TEXT_PROMPTS)
        tokens = generator.prompt_tokens(text if as_text else [{"role": "user", "content": text}])
        if len(tokens) > longest:
            raise ValueError(
                f"The prompt '{name}' has {len(tokens)} tokens; with {question.max_new_tokens} new ones and a long proposal, "
                f"at most {longest} fit into the context: shorten it, or pass --prompts."
            )
        rules = {"top_k": question.top_k, "coupled": question.coupled}
        requests = [TextRequest(tuple(tokens), question.max_new_tokens, heat, **rules) for heat in question.temperatures]
        cases += [Case(name, request) for request in requests]
    return cases


def _llama(file: Path, cases: Sequence[Case], generator: "Generator", threads: int, stack: ExitStack) -> WorkerEngine:
    longest = max(len(case.request.prompt) + case.request.max_new_tokens for case in cases)
    engine = stack.enter_context(worker("llama.cpp", {"file": str(file), "threads": threads, "max_length": longest + 1}))
    if engine.vocab_size is not None and engine.vocab_size < generator.tokenizer.vocab_size:
        raise ValueError(
            f"{file} has {engine.vocab_size} tokens and the bundle's tokenizer {generator.tokenizer.vocab_size}: it is another "
            "model, pass the one the bundle was made of."
        )
    return engine


def _load_note() -> list[str]:
    from runtime.ort.backend import available_cores

    load, cores = load_average(), available_cores()
    if load is None or load < _QUIET * cores:
        return []
    return [f"The load average is {load} on {cores} cores: something else is running, so ratios will scatter."]
