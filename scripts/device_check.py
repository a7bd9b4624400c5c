#!/usr/bin/env python
"""Check a GPU machine in minutes: each bundle on each device, same texts, same bits by rows, speed and memory."""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from command_line import check_folder_of, new_parser, run

EXAMPLES = """examples:
  # everything this machine has, on a tiny pair that is exported first, in every lowering (needs the extra "export")
  python scripts/device_check.py --out device.json

  # bundles of your own; the same pair in several lowerings makes several
  python scripts/device_check.py bundles/smollm2 bundles/smollm2-static --device cpu --device cuda --device tensorrt

  # the target on the GPU and the draft on the CPU
  python scripts/device_check.py bundles/smollm2 --device cpu --device cuda+cpu

The first device's plain texts are what all others are compared with. Engines of TensorRT are built first where there are none.
The exit status is 0 where all agree, 1 where something differs or a named device failed, 3 where there is no GPU.
"""
_NO_GPU = 3
# The tiny pair's bundles: lowering, the target's precision, the draft's. No device computes the first as float32 but the CPU;
# its draft alone has quantised products, whose activations the CPU rounds and CUDA does not.
_TINY_BUNDLES = (("gqa-half", "fp16", "int8"), ("static", "fp32", "fp32"), ("primitive", "fp32", "fp32"))
_TINY = Path(__file__).resolve().parent.parent / "tests" / "data"
_GRACE_SECONDS = 60
_MIXED = ("cuda+cpu", "cpu+cuda")
# The tiny pair is in float32, which ONNX Runtime's TensorRT provider would round otherwise; CUDA's does not round it by itself.
_EXACT_PRODUCTS = {"NVIDIA_TF32_OVERRIDE": "0"}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = new_parser(__doc__, EXAMPLES)
    parser.add_argument("bundles", nargs="*", type=Path, help="folders made by scripts/export.py (default: tests/data's pair)")
    parser.add_argument("--device", action="append", help="may be repeated; default: all there are, and mixed pairs")
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="N", help="length of a text (default 48)")
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[1, 2, 4, 7], metavar="K", help="default 1 2 4 7")
    parser.add_argument("--threads", type=int, metavar="N", help="of the CPU (default: all cores)")
    parser.add_argument("--seconds", type=float, default=300, help="begin nothing new after so long (default 300)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write everything as JSON")
    parsed = parser.parse_args(arguments)
    if parsed.max_new_tokens < 1 or min(parsed.num_draft_tokens) < 1:
        parser.error("--max-new-tokens and --num-draft-tokens are at least 1")
    if not 0 < parsed.seconds < math.inf:
        parser.error(f"--seconds is {parsed.seconds}; a number above 0 is expected")
    known = _present_devices()
    if unknown := [part for device in parsed.device or () for part in device.split("+") if part.partition(":")[0] not in known]:
        parser.error(f"the device '{unknown[0]}' is unknown; this installation has {', '.join(known)}")
    return parsed


def main() -> int:
    """Checks; returns the exit status."""
    arguments = parse_arguments()
    check_folder_of(arguments.out)

    from runtime.cuda_driver import probe_cuda_driver

    driver = probe_cuda_driver()
    devices = list(dict.fromkeys(arguments.device or (*_present_devices(), *_MIXED)))
    if driver.trouble is not None and devices != ["cpu"]:
        print(f"nothing was checked: {driver.trouble}", file=sys.stderr)
        return _NO_GPU
    with tempfile.TemporaryDirectory() as scratch:
        bundles = arguments.bundles or export_tiny_pair(Path(scratch))
        results = []
        for result in _measure_all(bundles, devices, arguments):
            results.append(result)
            print(f"{result['bundle']} on {result['device']}: {result.get('error') or 'measured'}", file=sys.stderr)
    compare(results)
    print(table(results))
    failed = [sentence for result in results for sentence in troubles(result, named=arguments.device is not None)]
    print("\n".join(["", *(failed or ["All texts agree, and every device has a number of rows that fixes the bits."])]))
    if arguments.out is not None:
        gpus = [{"name": gpu.name, "architecture": gpu.architecture, "memory": gpu.total_memory} for gpu in driver.gpus]
        document = {"machine": platform.machine(), "cuda": driver.cuda_version, "gpus": gpus, "results": results}
        arguments.out.write_text(json.dumps({**document, "troubles": failed}, indent=2) + "\n", encoding="utf-8")
    return 1 if failed else 0


def export_tiny_pair(folder: Path) -> list[Path]:
    """Exports the tests' pair in every form that a GPU takes: small enough for any device, large enough to differ.

    Raises:
        ImportError: The extra "export" is not installed.
    """
    from export.bundle import export_bundle

    target, draft = (str(_TINY / f"tiny-{role}") for role in ("target", "draft"))
    for lowering, precision, draft_precision in _TINY_BUNDLES:
        out = folder / lowering
        export_bundle(target, draft, out, precision=precision, draft_precision=draft_precision, lowering=lowering)
    return [folder / lowering for lowering, *_ in _TINY_BUNDLES]


def compare(results: Sequence[dict[str, Any]]) -> None:
    """Counts for each run how many texts are its device's own plain ones, and how many are the first device's.

    Args:
        results: Of device_worker, each with "bundle" and "device"; "equal_plain", "equal_reference" and "first_difference" are
            added to their runs.
    """
    references: dict[str, list[list[int]]] = {}
    for result in results:
        runs = result.get("runs", [])
        if not runs:
            continue
        plain = runs[0]["texts"]
        reference = references.setdefault(result["bundle"], plain)
        for one in runs:
            one["equal_plain"] = sum(text == other for text, other in zip(one["texts"], plain, strict=True))
            places = [_first_difference(text, other) for text, other in zip(one["texts"], reference, strict=True)]
            one["equal_reference"] = sum(place is None for place in places)
            one["first_difference"] = min((place for place in places if place is not None), default=None)


def troubles(result: dict[str, Any], *, named: bool) -> list[str]:
    """Returns what is wrong with one bundle on one device, a sentence each.

    Args:
        result: After `compare`.
        named: Whether the user named the devices: only then is one that refuses a bundle a failure.
    """
    place = f"{result['bundle']} on {result['device']}"
    if "error" in result:
        return [f"{place}: {result['error']}"] if named or result["device"] == "cpu" else []
    sentences = []
    for one in result["runs"]:
        mode = f"{one['drafter']} K={one['num_draft_tokens']}"
        count = len(one["texts"])
        if one["equal_plain"] < count:
            sentences.append(f"{place}: {mode} changes {count - one['equal_plain']} of {count} texts.")
    plain = result["runs"][0]
    if plain["first_difference"] is not None:
        sentences.append(f"{place}: plain texts leave the first device's at token {plain['first_difference']}.")
    if result.get("top_equals_whole") is False:
        sentences.append(f"{place}: texts change where only the largest logits come back.")
    if not any(result["fixed_rows"].values()):
        sentences.append(f"{place}: no fixed number of rows gives a row the same bits.")
    return sentences


def table(results: Sequence[dict[str, Any]]) -> str:
    """Returns a line for each run."""
    header = (
        "bundle",
        "lowering",
        "device",
        "mode",
        "tok/s",
        "ratio",
        "accepted",
        "= plain",
        "= first",
        "rows fix",
        "min rows",
        "GB",
    )
    lines = [header]
    for result in results:
        if "error" in result:
            lines.append((result["bundle"], "", result["device"], "refused", *[""] * 8))
            continue
        plain = result["runs"][0]["tokens_per_second"]
        fixed = ",".join(str(rows) for rows, agree in result["fixed_rows"].items() if agree) or "none"
        memory = "" if result["memory"] is None else f"{result['memory'] / 1e9:.2f}"
        for one in result["runs"]:
            count, first = len(one["texts"]), one is result["runs"][0]
            mode = "plain" if first else f"{one['drafter']} K={one['num_draft_tokens']}"
            ratio = f"{one['tokens_per_second'] / plain:.2f}" if plain else ""
            accepted = "" if first else f"{one['acceptance_rate']:.0%}"
            equal = (f"{one['equal_plain']}/{count}", f"{one['equal_reference']}/{count}")
            ends = (fixed, str(result["min_rows"] or "none"), memory) if first else ("", "", "")
            place = (result["bundle"], result["lowering"], result["device"]) if first else ("", "", "")
            lines.append((*place, mode, f"{one['tokens_per_second']:.1f}", ratio, accepted, *equal, *ends))
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def _measure_all(bundles: Sequence[Path], devices: Sequence[str], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    deadline = time.monotonic() + arguments.seconds
    jobs = [(bundle, device) for bundle in bundles for device in devices]
    for number, (bundle, device) in enumerate(jobs):
        share = max(1.0, (deadline - time.monotonic()) / (len(jobs) - number))
        names = {"bundle": bundle.name, "device": device}
        for part in device.split("+"):
            if part.startswith("tensorrt") and not (bundle / "engines").is_dir():
                _build_engines(bundle, part)
        settings = {
            "max_new_tokens": arguments.max_new_tokens,
            "num_draft_tokens": arguments.num_draft_tokens,
            "threads": arguments.threads,
            "seconds": share,
        }
        yield {**names, **_worker(bundle, device, settings, share + _GRACE_SECONDS)}


def _worker(bundle: Path, device: str, settings: dict[str, Any], timeout: float) -> dict[str, Any]:
    worker = Path(__file__).with_name("device_worker.py")
    command = [sys.executable, str(worker), str(bundle), device, json.dumps(settings)]
    try:
        environment = {**os.environ, **_EXACT_PRODUCTS}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=timeout, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return {"error": f"it did not end within {timeout:.0f} seconds"}
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": f"the process ended with status {done.returncode} and no answer"}
    return answer


def _build_engines(bundle: Path, device: str) -> None:
    """Builds engines; where that fails, loading the bundle says what is missing."""
    number = device.partition(":")[2]
    script = Path(__file__).with_name("build_engines.py")
    module = "tensorrt_rtx" if device.startswith("tensorrt-rtx") else "tensorrt"
    gpu = f"cuda:{number}" if number else "cuda"
    subprocess.run([sys.executable, str(script), str(bundle), "--device", gpu, "--module", module], check=False)


def _present_devices() -> list[str]:
    from importlib.metadata import entry_points

    from runtime.backend import ENTRY_POINT_GROUP, ONNX_RUNTIME_DEVICES

    return [*ONNX_RUNTIME_DEVICES, *sorted(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))]


def _first_difference(text: Sequence[int], other: Sequence[int]) -> int | None:
    if list(text) == list(other):
        return None
    pairs = enumerate(zip(text, other, strict=False))
    return next((place for place, (one, two) in pairs if one != two), min(len(text), len(other)))


if __name__ == "__main__":
    sys.exit(run(main, extra=".[cpu,export]"))
