#!/usr/bin/env python
"""Export a target and a draft model into one bundle for the runtime."""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import INTERRUPTED, new_parser, require, run

if TYPE_CHECKING:
    from tqdm import tqdm

    from runtime.contract import Bundle, DecoderSpec

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

  # in int4, rounded by what the weights do to texts that the target writes: slower to make, closer to the original
  python scripts/export.py --target ./my-model --out bundles/my-model --precision int4 --quantizer gptq

  # a graph that is there already: a folder of optimum, onnx-community or onnxruntime-genai, or one .onnx file in it
  python scripts/export.py --target ./SmolLM2-135M-ONNX/onnx/model_q4.onnx --out bundles/smollm2

  # in int4 for the CPU and for CUDA, where ONNX Runtime's attention wants float16; and later, into a bundle made for the CPU
  python scripts/export.py --target ./my-model --draft self --draft-block-size 128 --out bundles/my-model --precision int4 \\
      --lowering gqa,gqa-half
  python scripts/export.py --add-lowering gqa-half --out bundles/my-model

  # for ONNX Runtime and TensorRT, the weights stored once; and later, into the same bundle, for TensorRT 10.3
  python scripts/export.py --target ./my-model --out bundles/my-model --lowering gqa,static --precision fp16 --max-length 2048
  python scripts/export.py --add-lowering primitive --out bundles/my-model

  # in float16 for TensorRT-RTX; the cost of a pass follows the length that is asked for
  python scripts/export.py --target ./my-model --out bundles/my-model --lowering static --precision fp16 --max-length 2048
"""
SELF = "self"  # as export.bundle calls it; that is imported only once the arguments are right


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
                from tqdm import tqdm

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
        help="the model whose text is generated: hub name, folder, .gguf file, or an ONNX graph (.onnx file, its folder, or "
        "owner/name/onnx/model_q4.onnx on the hub)",
    )
    parser.add_argument(
        "--draft",
        help="the model that proposes: likewise, or 'self' (the target's own weights, rounded "
        "further); leave it out to draft by lookup in the text itself",
    )
    parser.add_argument(
        "--out", required=True, type=Path, help="the bundle's folder; must not exist, except with --add-lowering"
    )
    parser.add_argument(
        "--precision",
        default="fp32",
        choices=["fp32", "fp16", "bf16", "int8", "int4", "checkpoint"],
        help="the target's weights (default fp32); checkpoint keeps those of a GGUF file, or of a folder quantised by GPTQ or "
        "AWQ, as they are",
    )
    parser.add_argument(
        "--draft-precision",
        default="int4",
        choices=["fp32", "fp16", "bf16", "int8", "int4", "checkpoint"],
        help="the draft's (default int4)",
    )
    parser.add_argument(
        "--block-size",
        type=int,
        choices=[32, 64, 128],
        help="the most quantised weights of the target that share a scale (default 32); larger ones are faster, less exact",
    )
    parser.add_argument("--draft-block-size", type=int, choices=[32, 64, 128], help="the draft's (default 32)")
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
        "--quantizer",
        default="search",
        choices=["search", "gptq"],
        help="what decides on int8 and int4 weights: search (default) for the least error of each block of weights, gptq for "
        "a small error of what a matrix computes on a text, which takes longer and keeps more of the model",
    )
    parser.add_argument(
        "--calibration-text", type=Path, metavar="FILE", help="the text for gptq (default: texts that the target writes)"
    )
    parser.add_argument(
        "--lowering",
        default="gqa",
        metavar="LIST",
        help="the form of the graphs: gqa for ONNX Runtime (default), gqa-half for int8 or int4 weights on --device cuda, "
        "static for TensorRT 10.15 or later and TensorRT-RTX, primitive for TensorRT 10.3; or several with commas, of which "
        "each device takes its own",
    )
    parser.add_argument(
        "--add-lowering",
        metavar="LIST",
        help="add such forms to the bundle at --out, of what it was made from; --target and --draft are needed only where that "
        "is at another place now",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="longest context in tokens (default, and at most: the target's own; where more is asked for, a note says so)",
    )
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
    parsed = parser.parse_args(arguments)
    # Once more over a namespace where nothing is missing, so that no default is filled in: what was given, even if it is one.
    unset = argparse.Namespace(**dict.fromkeys(vars(parsed)))
    given = [name for name, value in vars(parser.parse_args(arguments, unset)).items() if value is not None]
    if parsed.add_lowering is None and parsed.target is None:
        parser.error("--target is required, or --add-lowering for a bundle that is there")
    if parsed.add_lowering is not None:
        kept = ("target", "draft", "out", "add_lowering", "source")
        asked = [name for name in given if name not in kept]
        if asked:
            parser.error(f"--add-lowering leaves the rest of a bundle as it is, so --{asked[0].replace('_', '-')} has no place")
        if parsed.draft == SELF:
            parser.error(
                "--draft self has no place with --add-lowering: a bundle that was made with it knows that its draft is the "
                "target's own weights; leave it out"
            )
    elif parsed.draft is None and "draft_precision" in given:
        parser.error("--draft-precision is for a draft model, and there is none: pass --draft, or leave it out")
    return parsed


def main() -> int:
    """Exports; returns the exit status."""
    arguments = parse_arguments()
    require("tqdm")
    # The new bundle replaces the folder itself, and whoever stands in the old one cannot follow a path from there any more.
    stands_inside = Path.cwd().is_relative_to(arguments.out.resolve())
    if stands_inside:
        arguments.out = arguments.out.resolve()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    progress = ProgressBar()
    bundle = None
    try:
        progress("loading torch and the graph builder", 0, 0)
        from export.memory import give_back_large_arrays, peak_bytes

        give_back_large_arrays()
        bundle = _export(arguments, progress)
        progress.close()
        _print_bundle(bundle, arguments.max_length, peak_bytes())
        if stands_inside:
            print(f"note: the folder that you are in was replaced by the new one: cd {bundle.folder}")
    except KeyboardInterrupt:
        if bundle is None:
            raise
        print(f"\ninterrupted: the bundle is written, {bundle.folder}", file=sys.stderr)
        return INTERRUPTED
    finally:
        progress.close()
    return 0


def _print_bundle(bundle: "Bundle", max_length: int | None, peak: int | None) -> None:
    for role, spec in (("target", bundle.target), ("draft", bundle.draft)):
        if spec is not None:
            _print_decoder(role, spec, bundle.folder)
    if max_length is not None and max_length > bundle.target.context_length:
        there = bundle.target.context_length
        print(f"note: --max-length is {max_length}, and the model's own context {there} tokens: the bundle's is the latter")
    if bundle.draft is not None and bundle.draft.context_length < bundle.target.context_length:
        print(f"note: the draft's context ends at {bundle.draft.context_length} tokens; behind them nothing is proposed")
    if peak is not None:
        print(f"peak memory: {peak / 1e9:.2f} GB, mapped files included")
    print(f"written: {bundle.folder}")
    options = f"{'' if bundle.tokenizer.chat_template is None else ' --chat'}{_device_options(bundle)}"
    print(f'try it:  python scripts/generate.py {bundle.folder} "Explain tides."{options}')


def _device_options(bundle: "Bundle") -> str:
    """Returns what generate.py needs to be told where the CPU, its default, cannot run a decoder."""
    from runtime.device_forms import cuda_form, runs_on_cpu, runs_on_cuda

    device = "cpu" if runs_on_cpu(bundle.target) else "cuda"
    draft_device = device
    if bundle.draft is not None and device == "cpu" and not runs_on_cpu(bundle.draft):
        draft_device = "cuda"
    elif bundle.draft is not None and device == "cuda" and not runs_on_cuda(cuda_form(bundle.draft)):
        draft_device = "cpu"
    options = "" if device == "cpu" else f" --device {device}"
    return options if draft_device == device else f"{options} --draft-device {draft_device}"


def _export(arguments: argparse.Namespace, progress: ProgressBar) -> "Bundle":
    if arguments.add_lowering is not None:
        from export.added_forms import add_lowerings

        return add_lowerings(
            arguments.out,
            arguments.add_lowering,
            target=arguments.target,
            draft=arguments.draft,
            exporter=arguments.source,
            report=progress,
        )
    from export.bundle import export_bundle

    return export_bundle(
        arguments.target,
        arguments.draft,
        arguments.out,
        precision=arguments.precision,
        draft_precision=arguments.draft_precision,
        block_size=arguments.block_size,
        draft_block_size=arguments.draft_block_size,
        draft_vocab=arguments.draft_vocab,
        draft_vocab_text=arguments.draft_vocab_text,
        quantizer=arguments.quantizer,
        calibration_text=arguments.calibration_text,
        max_length=arguments.max_length,
        lowering=arguments.lowering,
        exporter=arguments.source,
        emit_genai_config=arguments.emit_genai_config,
        overwrite=arguments.overwrite,
        report=progress,
    )


def _print_decoder(role: str, decoder: "DecoderSpec", folder: Path) -> None:
    """Says of each form what it is, what it adds to the disk, how it compares, and how fast it is on this machine."""
    from runtime.device_forms import runs_on_cpu
    from runtime.ort.backend import OrtBackend
    from runtime.pass_costs import measure_costs

    counted: set[str] = set()
    for form in decoder.forms:
        size = sum(file.size for file in form.graph if file.path not in counted) / 1e6
        facts = [form.source, form.precision, f"{size:.0f} MB", f"context {form.context_length}"]
        if decoder.other_forms:
            facts[2:3] = [f"lowering {form.lowering}", f"{size:.1f} MB more" if counted else f"{size:.1f} MB"]
        counted |= {file.path for file in form.graph}
        print(f"{role}: {', '.join(facts)}; rows are bit-equal, {form.padding}")
        if "prefill" not in form.parity:
            print("  the graph was taken as it is: there is no checkpoint to hold it against, only its own cache")
        for step, figures in form.parity.items():
            print(f"  {step}: " + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in figures.items()))
        if form.lowering in ("gqa", "growing") and runs_on_cpu(form):  # the others are for devices
            costs = measure_costs(OrtBackend().load(form, folder), None, rows=(1, 5))
            print(f"  passes here: one row {costs.target(1) * 1e3:.1f} ms, five rows {costs.target(5) * 1e3:.1f} ms")


if __name__ == "__main__":
    sys.exit(run(main, extra=".[cpu,export]", interrupted="interrupted: nothing was written"))
