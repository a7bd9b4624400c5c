#!/usr/bin/env python
"""Time sampling and verification alone: all of a round's work but the models' passes."""

import argparse
import statistics
import sys
import time
from typing import TYPE_CHECKING

from command_line import new_parser, run

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from runtime import SamplingParams
    from runtime.candidates import Candidates
    from runtime.sampling import Sampler

EXAMPLES = """examples:
  # the vocabulary of Qwen2.5, four draft tokens
  python scripts/bench_sampling.py

  # a smaller one
  python scripts/bench_sampling.py --vocab-size 49152 --num-draft-tokens 8

Logits fall with the logarithm of their rank, as a language model's do; target and draft differ by noise. Each line is the
judgement of one proposal: the target's rows through the sampling rules, acceptance, residual, correction or bonus. For the
coupled rule, the noise of the proposed tokens is there already, as it is when a draft has proposed them. The columns with *
are the same with what a device sends of both models' rows, only the largest logits, where the rules let it ("-" where not).
"""
RULES: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature 0.7": {"temperature": 0.7},
    "top-k 50": {"temperature": 0.7, "top_k": 50},
    "top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "min-p 0.05": {"temperature": 0.7, "min_p": 0.05},
    "typical-p 0.9": {"temperature": 0.7, "typical_p": 0.9},
    "top-k, top-p, min-p": {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.05},
    "penalties, no-repeat": {
        "temperature": 0.7,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "no_repeat_ngram_size": 3,
    },
}
# The fewest tokens leave some to choose whatever no_repeat_ngram_size forbids behind a random history; the most draft tokens
# are the runtime's own.
RANGES = {"vocab_size": (1000, 1_000_000), "num_draft_tokens": (1, 64), "history": (1, 1_000_000), "repeat": (1, 10_000)}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = new_parser(__doc__, EXAMPLES)
    parser.add_argument("--vocab-size", type=int, default=151_936, metavar="N", help="1000 to 1000000 (default 151936)")
    parser.add_argument("--num-draft-tokens", type=int, default=4, metavar="K", help="1 to 64 (default 4, so 5 rows)")
    parser.add_argument(
        "--history", type=int, default=2000, metavar="N", help="tokens of prompt and text, 1 to 1000000 (default 2000)"
    )
    parser.add_argument("--repeat", type=int, default=30, metavar="N", help="times each is run, for the median (default 30)")
    parsed = parser.parse_args(arguments)
    for name, (least, most) in RANGES.items():
        if not least <= getattr(parsed, name) <= most:
            parser.error(f"--{name.replace('_', '-')} is {getattr(parsed, name)}; a number from {least} to {most} is expected")
    return parsed


def main() -> int:
    """Prints the table; returns the exit status."""
    arguments = parse_arguments()

    import numpy as np

    from runtime import SamplingParams
    from runtime.candidates import Candidates
    from runtime.sampling import Sampler

    random = np.random.default_rng(0)
    ranks = random.permuted(np.tile(np.arange(1, arguments.vocab_size + 1), (arguments.num_draft_tokens + 1, 1)), axis=1)
    target = (-2.0 * np.log(ranks) + random.normal(0, 0.5, ranks.shape)).astype(np.float32)
    draft = (target + random.normal(0, 0.5, ranks.shape)).astype(np.float32)
    history = random.integers(0, arguments.vocab_size, arguments.history).tolist()
    print(f"milliseconds; vocabulary {arguments.vocab_size:,}, {len(target)} rows")
    print(f"{'rules':<22}" + "".join(f"{head:>12}" for head in ("rejection", "coupled", "rejection*", "coupled*")))
    for name, values in RULES.items():
        line = f"{name:<22}"
        for only_largest in (False, True):
            for acceptance in ("rejection", "coupled"):
                params = SamplingParams(**values, seed=1, acceptance=acceptance)  # type: ignore[arg-type]
                sampler = Sampler(params, prompt_length=len(history) // 2)
                if (params.greedy and acceptance == "coupled") or (only_largest and not sampler.num_top):
                    line += f"{'-':>12}"
                    continue
                judged, *proposed = (
                    _largest(rows, sampler) if only_largest else Candidates.whole(rows)
                    for rows in (target, *(row[None] for row in draft[:-1]))
                )
                milliseconds = [_time_judgement(params, sampler, judged, proposed, history) for _ in range(arguments.repeat)]
                line += f"{statistics.median(milliseconds):12.2f}"
        print(line, flush=True)
    return 0


def _largest(logits: "NDArray[np.float32]", sampler: "Sampler") -> "Candidates":
    """Returns what a device would send of rows."""
    import numpy as np

    from runtime.filters import weights_of
    from runtime.top_logits import SPARE, TopLogits

    tokens = np.argsort(-logits, axis=1)[:, : sampler.num_top + SPARE]
    totals = weights_of(logits, sampler.top_temperature).sum(axis=1)
    return TopLogits(tokens, np.take_along_axis(logits, tokens, axis=1), totals, sampler.top_temperature).candidates()


def _time_judgement(
    params: "SamplingParams", sampler: "Sampler", target: "Candidates", draft: list["Candidates"], history: list[int]
) -> float:
    """Lets the draft propose, and returns how many milliseconds the judgement takes."""
    import numpy as np

    from runtime.acceptance import AcceptanceRule, CoupledRule, GreedyRule, Proposal, RejectionRule
    from runtime.noise import ExponentialNoise

    rule: AcceptanceRule = GreedyRule(sampler)
    if not params.greedy and params.acceptance == "coupled":
        rule = CoupledRule(sampler, ExponentialNoise(params.seed))
    elif not params.greedy:
        rule = RejectionRule(sampler, np.random.default_rng(params.seed))
    tokens: list[int] = []
    rows = []
    for logits in draft:
        token, row = rule.propose(logits, history, tokens)
        tokens.append(token)
        rows.append(row)
    proposal = Proposal.of(tokens, rows)
    started = time.perf_counter()
    rule.judge(proposal, target, history)
    return 1000 * (time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(run(main, extra=".[cpu]"))
