"""Measures one bundle on one device, for scripts/device_check.py: `python device_worker.py BUNDLE DEVICE SETTINGS`.

A process of its own, so that a library that dies takes one row of the table with it. It prints one line of JSON.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import command_line  # noqa: F401 - puts the project's packages on the path
import numpy as np

from runtime import Generator, SamplingParams
from runtime.backend import Model
from runtime.device_memory import free_memory_of
from runtime.errors import SpecError
from runtime.manifest import load_bundle
from runtime.row_equality import PaddedModel, PassShape, even_cut, logits_in_passes, measure_row_equality

PROMPTS = (
    "Explain how tides work.",
    "Write a Python function that reverses a list.",
    "List the days of the week and the months of the year.",
)
FIXED_ROWS = (1, 2, 4, 8, 16)
_ROW_TOKENS = 64


def fixed_rows_agree(model: Model, rows: int, tokens: Sequence[int]) -> bool:
    """Whether passes of exactly so many rows give each row the same bits, wherever in a pass it stands.

    Args:
        model: The model.
        rows: Of each pass; where fewer tokens are fed, the rest is padding.
        tokens: A text of more than `rows` tokens.
    """
    padded = PaddedModel(model, PassShape(rows))
    cuts = {tuple(cut) for size in {1, max(1, rows // 2), rows} for cut in [even_cut(len(tokens), size)]}
    texts = [logits_in_passes(padded, tokens, cut) for cut in cuts]
    return all(np.array_equal(texts[0], text) for text in texts[1:])


def measure(folder: Path, device: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns everything about a bundle on a device.

    Args:
        folder: The bundle's.
        device: As Generator.from_bundle takes it; "cuda+cpu" has the target on the GPU and the draft on the CPU.
        settings: "max_new_tokens", "num_draft_tokens" (a list), "threads", "seconds" that may pass before no new measurement
            begins.

    Raises:
        SpecError: The bundle or the device cannot be used.
    """
    deadline = time.monotonic() + settings["seconds"]
    bundle = load_bundle(folder, hash_contents=False)
    device, _, draft_device = device.partition("+")
    free = free_memory_of(device)
    started = time.perf_counter()
    generator = Generator.from_bundle(
        folder,
        device=device,
        draft_device=None if bundle.draft is None else draft_device or None,
        drafter="lookup" if bundle.draft is None else "model",
        threads=settings["threads"],
        shared_thread_pool=True,
        verify_files=False,
    )
    result: dict[str, Any] = {
        "lowering": generator.target.spec.lowering,
        "precision": bundle.target.precision,
        "engine": generator.target.engine,
        "exactness": generator.describe()["target exactness"],
        "load_seconds": time.perf_counter() - started,
    }
    tokens = (generator.prompt_tokens(" ".join(PROMPTS)) * _ROW_TOKENS)[:_ROW_TOKENS]
    target = generator.target
    result["fixed_rows"] = {rows: fixed_rows_agree(target, rows, tokens) for rows in FIXED_ROWS if rows >= target.spec.min_rows}
    shape = measure_row_equality(target, tokens)
    result["min_rows"], result["row_multiple"] = (None, None) if shape is None else shape
    result["runs"] = list(_runs(generator, settings, deadline))
    late = time.monotonic() > deadline
    result["top_equals_whole"] = None if late else top_equals_whole(generator, settings["max_new_tokens"])
    left = free_memory_of(device)
    result["memory"] = None if free is None or left is None else max(0, free - left)
    return result


def top_equals_whole(generator: Generator, max_new_tokens: int) -> bool | None:
    """Whether texts of which only the largest logits came back are those of whole rows; None where whole rows come anyway."""
    usual = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    sampled = dataclasses.replace(usual, temperature=0.8, seed=1)
    for params in (usual, dataclasses.replace(sampled, top_k=20), dataclasses.replace(sampled, top_p=0.9)):
        top = generator.generate(PROMPTS[0], params)
        if not top.stats.top_logits:
            return None
        # Log-probabilities need whole rows, and change no text.
        if top.token_ids != generator.generate(PROMPTS[0], dataclasses.replace(params, logprobs=0)).token_ids:
            return False
    return True


def _runs(generator: Generator, settings: dict[str, Any], deadline: float) -> Iterator[dict[str, Any]]:
    """Yields texts and speeds: plain, then each drafter with each number of draft tokens."""
    params = SamplingParams(max_new_tokens=settings["max_new_tokens"], ignore_eos=True)
    chat = generator.tokenizer.has_chat_template
    prompts = [[{"role": "user", "content": prompt}] if chat else prompt for prompt in PROMPTS]
    drafters = ["lookup"] if generator.draft is None else ["model", "lookup"]
    modes = [("off", 0), *((drafter, number) for drafter in drafters for number in settings["num_draft_tokens"])]
    generator.generate(prompts[0], dataclasses.replace(params, max_new_tokens=8))  # the first passes also set things up
    for drafter, number in modes:
        if time.monotonic() > deadline and drafter != "off":
            return
        results = [generator.generate(prompt, params, drafter=drafter, num_draft_tokens=number) for prompt in prompts]
        yield {
            "drafter": drafter,
            "num_draft_tokens": number,
            "texts": [list(result.token_ids) for result in results],
            "tokens_per_second": float(np.median([result.stats.decode_tokens_per_second for result in results])),
            "acceptance_rate": float(np.mean([result.stats.acceptance_rate for result in results])),
        }


def main(folder: str, device: str, settings: str) -> None:
    """Prints one line of JSON: what was measured, or why nothing could be."""
    try:
        answer = measure(Path(folder), device, json.loads(settings))
    except SpecError as error:
        answer = {"error": str(error)}
    print("\n" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("error: device_worker.py is started by scripts/device_check.py, with what it is to measure: run that.")
    main(*sys.argv[1:])
