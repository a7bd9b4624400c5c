#!/usr/bin/env python
"""Build TensorRT engines of a bundle: for the GPU of this machine, or, with TensorRT-RTX, for one that is not here."""

import argparse
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import new_parser, require, run

if TYPE_CHECKING:
    from typing_extensions import Self

    from engines.sidecar import EngineRecord
    from engines.trt_module import TensorRTModule

EXAMPLES = """examples:
  # on the device that will generate, once; minutes, and again after an update of TensorRT
  python scripts/build_engines.py bundles/smollm2
  python scripts/generate.py bundles/smollm2 "Explain tides." --device tensorrt

  # on any machine, no GPU needed: TensorRT-RTX engines for an RTX 3060 (86), 4070 (89) and 5090 (120)
  pip install -e ".[tensorrt-rtx]"
  python scripts/build_engines.py bundles/smollm2 --compile-only --compute-capability 86,89,120

  # a Jetson short of memory: kernels with at most 0.5 GB of scratch memory; a second build that times nothing anew
  python scripts/build_engines.py bundles/smollm2 --workspace-gb 0.5 --timing-cache timings.bin

The bundle's graphs must be of the lowering "static" (TensorRT 10.15 and later, TensorRT-RTX) or "primitive" (10.3 and later).
Each decoder gets an engine and a record in BUNDLE/engines/MODULE-VERSION-smCAPABILITY, whole or not at all. Loading the bundle
refuses an engine that no longer fits, and never builds one itself.
"""
_MOST_DRAFT_TOKENS = 15


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = new_parser(__doc__, EXAMPLES)
    parser.add_argument("bundle", type=Path, help="a folder made by scripts/export.py")
    parser.add_argument("--device", help="the GPU to build for and on: cuda (default), cuda:1 for the second")
    parser.add_argument("--compile-only", action="store_true", help="build for GPUs that need not be here; tensorrt_rtx only")
    parser.add_argument("--compute-capability", metavar="LIST", help="which GPUs, with --compile-only: 86,89,120 for instance")
    parser.add_argument(
        "--module",
        default="auto",
        choices=["auto", "tensorrt", "tensorrt_rtx"],
        help="what builds; auto (default) takes tensorrt where it is installed, and tensorrt_rtx with --compile-only",
    )
    parser.add_argument(
        "--num-draft-tokens",
        type=int,
        default=7,
        metavar="K",
        help="up to K proposed tokens, a round costs the target one and the same step of K + 1 rows, and so does a plain one: "
        "that keeps the text the same with and without a draft; longer proposals take several steps "
        f"(default 7, at most {_MOST_DRAFT_TOKENS})",
    )
    parser.add_argument("--max-rows", type=int, metavar="N", help="most rows of a pass (default: what the runtime asks for)")
    parser.add_argument("--workspace-gb", type=float, metavar="GB", help="most scratch memory of a kernel (default: no bound)")
    parser.add_argument("--timing-cache", type=Path, metavar="FILE", help="keep kernel timings here for the next build")
    parsed = parser.parse_args(arguments)
    if parsed.compile_only != (parsed.compute_capability is not None):
        parser.error("--compile-only and --compute-capability go together: one says how to build, the other for which GPUs")
    if parsed.compile_only and parsed.device is not None:
        parser.error(
            f"--device {parsed.device} is the GPU to build on, and --compile-only builds on none: leave one of them out"
        )
    parsed.device = parsed.device or "cuda"
    if not re.fullmatch(r"cuda(:[0-9]+)?", parsed.device):
        parser.error(f"--device is '{parsed.device}'; cuda, or cuda:1 for the second GPU, is expected")
    if parsed.compile_only and parsed.module == "tensorrt":
        parser.error("--compile-only needs --module tensorrt_rtx: tensorrt builds on the GPU it builds for")
    if parsed.compute_capability is not None and not re.fullmatch(r"\d{2,3}(,\d{2,3})*", parsed.compute_capability):
        parser.error(f"--compute-capability is '{parsed.compute_capability}'; numbers such as 86,89,120 are expected")
    if not 1 <= parsed.num_draft_tokens <= _MOST_DRAFT_TOKENS:
        parser.error(f"--num-draft-tokens is {parsed.num_draft_tokens}; 1 to {_MOST_DRAFT_TOKENS} are expected")
    if parsed.workspace_gb is not None and not 0 < parsed.workspace_gb < math.inf:
        parser.error(f"--workspace-gb is {parsed.workspace_gb}; a number above 0 is expected")
    if parsed.max_rows is not None and parsed.max_rows <= (least := parsed.num_draft_tokens):
        parser.error(
            f"--max-rows is {parsed.max_rows}; at least {least + 1} are expected, one more than --num-draft-tokens, so that a "
            "pass holds the rows that verify a proposal"
        )
    return parsed


def main() -> int:
    """Builds; returns the exit status."""
    arguments = parse_arguments()
    require("tqdm")

    from engines.build import BuildOptions, call_interruptibly
    from engines.bundle import build_bundle_engines
    from engines.sidecar import engines_folder
    from runtime.manifest import load_bundle

    tensorrt, capabilities, number = _choose_builder(arguments)
    bundle = load_bundle(arguments.bundle)
    workspace = None if arguments.workspace_gb is None else int(arguments.workspace_gb * 1e9)
    options = BuildOptions(workspace, arguments.timing_cache, number)
    for capability in capabilities:
        folder = engines_folder(bundle.folder, tensorrt, capability)
        print(f"{tensorrt.title}, compute capability {capability[0]}.{capability[1]}: {folder}", flush=True)
        with _Bars() as bars:
            records = call_interruptibly(
                lambda stop, capability=capability: build_bundle_engines(
                    bundle,
                    tensorrt,
                    capability,
                    num_draft_tokens=arguments.num_draft_tokens,
                    max_rows=arguments.max_rows,
                    options=options,
                    report=bars.report,
                    stop=stop,
                )
            )
        for name, record in records.items():
            _print_record(name, record)
    where, device = "there" if number is None else "here", tensorrt.name.replace("_", "-")
    print(f'try it {where}:  python scripts/generate.py {bundle.folder} "Explain tides." --device {device}')
    return 0


def _choose_builder(arguments: argparse.Namespace) -> "tuple[TensorRTModule, list[tuple[int, int]], int | None]":
    """Returns the module, the compute capabilities, and the number of the GPU to build on (None for none)."""
    import importlib.util

    from engines.trt_module import TensorRTModule
    from runtime.backend import device_number
    from runtime.cuda_driver import checked_gpu, probe_cuda_driver

    if arguments.compile_only:
        numbers = dict.fromkeys(arguments.compute_capability.split(","))
        return TensorRTModule.load("tensorrt_rtx"), [(int(text[:-1]), int(text[-1])) for text in numbers], None
    number = device_number(arguments.device)
    elsewhere = "build for a GPU that is not here: --compile-only --compute-capability 86 (TensorRT-RTX)"
    gpu = checked_gpu(arguments.device, number, probe_cuda_driver(), instead=elsewhere)
    name = arguments.module
    if name == "auto":
        name = "tensorrt" if importlib.util.find_spec("tensorrt") is not None else "tensorrt_rtx"
    return TensorRTModule.load(name), [gpu.compute_capability], number


class _Bars:
    """One bar for each decoder, in per cent."""

    def __init__(self) -> None:
        self._bars: dict = {}

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        for bar in self._bars.values():
            bar.close()

    def report(self, name: str, fraction: float, part: str) -> None:
        """Takes one report of the build."""
        from tqdm import tqdm

        if name not in self._bars:
            shape = "{desc}: {percentage:3.0f}%|{bar}| {elapsed} {postfix}"
            self._bars[name] = tqdm(total=100, desc=f"  {name}", bar_format=shape)
        bar = self._bars[name]
        bar.set_postfix_str(part[:40], refresh=False)
        bar.update(int(100 * fraction) - bar.n)


def _print_record(name: str, record: "EngineRecord") -> None:
    rows = ", ".join(str(profile) for profile in record.profiles)
    print(
        f"  {name}: {record.size / 1e6:.0f} MB in {record.build_seconds:.0f} s, {record.peak_memory / 1e9:.1f} GB of memory at "
        f"its peak; caches of {record.capacity} tokens, passes of {rows} rows"
    )


if __name__ == "__main__":
    sys.exit(run(main, extra=".[cpu,tensorrt-rtx]", interrupted="interrupted: what was not finished is gone"))
