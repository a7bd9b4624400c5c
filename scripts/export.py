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

  # a draft that proposes the 32768 most frequent tokens only, its weights in larger blocks: a third cheaper
  python scripts/export.py --target qwen2.5-coder-1.5b.gguf --draft qwen2.5-coder-0.5b.gguf --out bundles/qwen \\
      --precision int4 --draft-vocab 32768 --draft-block-size 128

  # a graph that is there already: a folder of optimum, onnx-community or onnxruntime-genai, or one .onnx file in it
  python scripts/export.py --target ./SmolLM2-135M-ONNX/onnx/model_q4.onnx --out bundles/smollm2

  # in float16 for TensorRT-RTX; the cost of a pass follows the length that is asked for
  python scripts/export.py --target ./my-model --out bundles/my-model --lowering static --precision fp16 --max-length 2048
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
    parser.add_argument(
        "--target",
        required=True,
        help="the model whose text is generated: hub name, folder, .gguf file, or an ONNX graph (.onnx file, or its folder)",
    )
    parser.add_argument(
        "--draft",
        help="the model that proposes: likewise, or 'self' (the target's own weights, rounded "
        "further); leave it out to draft by lookup in the text itself",
    )
    parser.add_argument("--out", required=True, type=Path, help="the bundle's folder; must not exist")
    parser.add_argument(
        "--precision", default="fp32", choices=["fp32", "fp16", "int8", "int4"], help="the target's weights (default fp32)"
    )
    parser.add_argument(
        "--draft-precision", default="int4", choices=["fp32", "fp16", "int8", "int4"], help="the draft's (default int4)"
    )
    parser.add_argument(
        "--block-size",
        type=int,
        default=32,
        choices=[32, 64, 128],
        help="the most quantised weights of the target that share a scale (default 32); larger ones are faster, less exact",
    )
    parser.add_argument("--draft-block-size", type=int, default=32, choices=[32, 64, 128], help="the draft's (default 32)")
    parser.add_argument(
        "--draft-vocab",
        type=int,
        metavar="N",
        help="let the draft propose the N most frequent tokens only: a cheaper draft, and the same text",
    )
    parser.add_argument(
        "--draft-vocab-text",
        type=Path,
        metavar="FILE",
        help="count them in this text (default: in texts of the target)",
    )
    parser.add_argument(
        "--lowering",
        default="gqa",
        choices=["gqa", "static", "primitive"],
        help="the form of the graphs: gqa for ONNX Runtime (default), static for TensorRT 10.15 or later and TensorRT-RTX, "
        "primitive for TensorRT 10.3",
    )
    parser.add_argument("--max-length", type=int, metavar="N", help="longest context in tokens (default: the target's own)")
    parser.add_argument(
        "--source",
        default="auto",
        choices=["auto", "mobius", "optimum"],
        help="what makes a checkpoint's graph: mobius, or optimum for models that mobius does not know (install the extra "
        "'optimum'; the export says where its graph stays slow); auto (default) takes optimum only where it must",
    )
    parser.add_argument(
        "--emit-genai-config", action="store_true", help="also write what ONNX Runtime GenAI needs to run the bundle's folder"
    )
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
            block_size=arguments.block_size,
            draft_block_size=arguments.draft_block_size,
            draft_vocab=arguments.draft_vocab,
            draft_vocab_text=arguments.draft_vocab_text,
            max_length=arguments.max_length,
            lowering=arguments.lowering,
            exporter=arguments.source,
            emit_genai_config=arguments.emit_genai_config,
            overwrite=arguments.overwrite,
            report=progress,
        )
    finally:
        progress.close()
    for role, spec in (("target", bundle.target), ("draft", bundle.draft)):
        if spec is not None:
            size = sum(file.size for file in spec.graph)
            facts = (spec.source, spec.precision, f"{size / 1e6:.0f} MB", f"context {spec.context_length}")
            print(f"{role}: {', '.join(facts)}; rows are bit-equal, {spec.padding}")
            if "prefill" not in spec.parity:
                print("  the graph was taken as it is: there is no checkpoint to hold it against, only its own cache")
            for step, figures in spec.parity.items():
                print(f"  {step}: " + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in figures.items()))
    if bundle.draft is not None and bundle.draft.context_length < bundle.target.context_length:
        print(f"note: the draft's context ends at {bundle.draft.context_length} tokens; behind them nothing is proposed")
    print(f'written: {bundle.folder}\ntry it:  python scripts/generate.py {bundle.folder} "Explain tides." --chat')
    return 0


if __name__ == "__main__":
    sys.exit(run(main, extra=".[cpu,export]", interrupted="interrupted: nothing was written"))
