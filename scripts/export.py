#!/usr/bin/env python
"""Export a target and a draft model into one bundle for the runtime."""

import argparse
import os
import sys
import time
from pathlib import Path

from command_line import new_parser, run
from tqdm import tqdm

EXAMPLES = """examples:
  # two models of one family from the hub, the draft in int4
  python scripts/export.py --target HuggingFaceTB/SmolLM2-1.7B-Instruct --draft HuggingFaceTB/SmolLM2-135M-Instruct \\
      --out bundles/smollm2

  # one GGUF file, its own weights in int4 as the draft
  python scripts/export.py --target SmolLM2-135M-Instruct.Q4_1.gguf --draft self --out bundles/smollm2

  # a local folder in int4 for a small device, drafting by lookup in the text itself, contexts up to 2048 tokens
  python scripts/export.py --target ./my-model --out bundles/my-model --precision int4 --max-length 2048
"""


class ProgressBar:
    """Shows what the export tells: a bar where the amount is known, a line with the time it took where it is not."""

    def __init__(self) -> None:
        """Shows nothing yet."""
        self._title = ""
        self._bar: tqdm | None = None
        self._started = time.perf_counter()

    def __call__(self, title: str, done: int, total: int) -> None:
        """Takes one report of the export."""
        if title != self._title:
            self.close()
            self._title, self._started = title, time.perf_counter()
            if not total:
                print(f"  {title} ...", flush=True, file=sys.stderr)
        if total:
            if self._bar is None:
                self._bar = tqdm(total=total, desc=f"  {title}", leave=True, mininterval=0.2)
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Finishes what is shown."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        elif self._title:
            print(f"    {time.perf_counter() - self._started:.1f} s", file=sys.stderr)
        self._title = ""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = new_parser(__doc__, EXAMPLES)
    parser.add_argument("--target", required=True, help="the model whose text is generated: hub name, folder or .gguf file")
    parser.add_argument(
        "--draft",
        help="the model that proposes: hub name, folder, .gguf file, or 'self' (the target's own weights, rounded "
        "further); leave it out to draft by lookup in the text itself",
    )
    parser.add_argument("--out", required=True, type=Path, help="the bundle's folder; must not exist")
    parser.add_argument(
        "--precision", default="fp32", choices=["fp32", "int8", "int4"], help="the target's weights (default fp32)"
    )
    parser.add_argument(
        "--draft-precision", default="int4", choices=["fp32", "int8", "int4"], help="the draft's (default int4)"
    )
    parser.add_argument("--max-length", type=int, metavar="N", help="longest context in tokens (default: the target's own)")
    parser.add_argument("--overwrite", action="store_true", help="replace the bundle at --out once the new one is complete")
    return parser.parse_args(arguments)


def main() -> int:
    """Exports; returns the exit status."""
    arguments = parse_arguments()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    progress = ProgressBar()
    try:
        progress("loading torch and the graph builder", 0, 0)
        from export.bundle import export_bundle

        bundle = export_bundle(
            arguments.target,
            arguments.draft,
            arguments.out,
            precision=arguments.precision,
            draft_precision=arguments.draft_precision,
            max_length=arguments.max_length,
            overwrite=arguments.overwrite,
            report=progress,
        )
    finally:
        progress.close()
    for role, spec in (("target", bundle.target), ("draft", bundle.draft)):
        if spec is not None:
            size = sum(file.size for file in spec.graph)
            facts = (spec.source, spec.precision, f"{size / 1e6:.0f} MB", f"context {spec.context_length}")
            print(f"{role}: {', '.join(facts)}, rows bit-equal in passes of {spec.min_rows} or more")
            for step, figures in spec.parity.items():
                print(f"  {step}: " + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in figures.items()))
    if bundle.draft is not None and bundle.draft.context_length < bundle.target.context_length:
        print(f"note: the draft's context ends at {bundle.draft.context_length} tokens; behind them nothing is proposed")
    print(f'written: {bundle.folder}\ntry it:  python scripts/generate.py {bundle.folder} "Explain tides." --chat')
    return 0


if __name__ == "__main__":
    sys.exit(run(main, extra=".[cpu,export]", interrupted="interrupted: nothing was written"))
