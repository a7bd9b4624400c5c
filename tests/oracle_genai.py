"""Runs ONNX Runtime GenAI on a folder of export/genai_config.py: `python oracle_genai.py JOB.json RESULT.json`.

A process of its own, so that two engines never share one, and so that another Python than the tests' may run it. It imports
nothing of this project.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime_genai as genai


def run_text(model, job, prompt, seed):
    """Returns the new tokens, and for each round how many proposed tokens were accepted."""
    draft_options = job["draft_options"]
    room = draft_options.get("max_draft_tokens", 0) + 1
    params = genai.GeneratorParams(model)
    params.set_search_options(max_length=len(prompt) + job["max_new_tokens"] + room, random_seed=seed, **job["search_options"])
    if draft_options:
        params.set_speculative_options(**draft_options)
    generator = genai.Generator(model, params)
    generator.append_tokens(np.array([prompt], np.int32))
    accepted, before = [], 0
    while not generator.is_done() and not is_enough(job, generator.token_count() - len(prompt), accepted):
        generator.generate_next_token()
        if draft_options:
            # A round is counted as soon as it is computed; its tokens come out one by one after that.
            stats = generator.get_speculative_stats()
            if stats["rounds"] > len(accepted):
                accepted.append(stats["draft_tokens_accepted"] - before)
                before = stats["draft_tokens_accepted"]
    tokens = [int(token) for token in generator.get_sequence(0)][len(prompt) :]
    return tokens[: job["max_new_tokens"]], accepted


def is_enough(job, new_tokens, accepted):
    rounds = job["rounds"]
    if rounds is not None:
        return len(accepted) >= rounds and new_tokens >= sum(accepted[:rounds]) + rounds
    return new_tokens >= job["max_new_tokens"]


def main():
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    model = genai.Model(job["folder"])
    results = [run_text(model, job, prompt, seed) for prompt in job["prompts"] for seed in job["seeds"]]
    Path(sys.argv[2]).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
