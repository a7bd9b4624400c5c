#!/usr/bin/env python
"""Say what is installed on this machine, what of it works, and which command mends what does not."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import new_parser, run
from doctor_engines import engine_findings

if TYPE_CHECKING:
    from runtime.doctor.facts import Finding

EXAMPLES = """examples:
  # this machine: packages, providers, driver, libraries, memory
  python scripts/doctor.py

  # and a bundle: whether its files are whole, whether it loads and computes there, whether its engines still serve
  python scripts/doctor.py bundles/smollm2 --device cuda

  # for a program
  python scripts/doctor.py --json

Providers are not believed: each runs a tiny graph alone, in a process of its own. The exit status is 1 where something that was
asked for does not work: the named --device, or, without one, the CPU and whatever was installed for a GPU; and the bundle.
"""
_MARKS = {"works": "ok  ", "broken": "FAIL", "note": "note"}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = new_parser(__doc__, EXAMPLES)
    parser.add_argument("bundle", nargs="?", type=Path, help="a folder made by scripts/export.py")
    parser.add_argument(
        "--device",
        action="append",
        choices=["cpu", "cuda", "ort-tensorrt", "tensorrt", "tensorrt-rtx"],
        help="what must work; may be repeated (default: whatever is installed)",
    )
    parser.add_argument("--json", action="store_true", help="print facts and findings as one JSON object")
    return parser.parse_args(arguments)


def main() -> int:
    """Examines; returns the exit status."""
    arguments = parse_arguments()

    from runtime.doctor.bundle_trials import bundle_trials
    from runtime.doctor.checks import devices_asked_for, examine, failures
    from runtime.doctor.gather import gather_facts

    facts = gather_facts(arguments.bundle)
    findings = [*examine(facts), *(engine_findings(arguments.bundle, facts) if arguments.bundle is not None else ())]
    named = tuple(dict.fromkeys(device.removesuffix("-rtx") for device in arguments.device or ()))
    asked = named or devices_asked_for(facts)
    failed = failures(findings, facts, named)
    if facts.bundle is not None and facts.bundle.trouble is None:
        hindered = {device for finding in failed for device in finding.hinders}
        findings += bundle_trials(arguments.bundle, asked, hindered, is_named=bool(named))
        failed = failures(findings, facts, named)
    if arguments.json:
        document = {"asked": asked, "failed": len(failed), "findings": [asdict(finding) for finding in findings]}
        print(json.dumps({**document, "facts": asdict(facts)}, indent=2))
    else:
        _print_findings(findings, failed)
        print(f"\n{_verdict(asked, failed)}")
    return 1 if failed else 0


def _print_findings(findings: "list[Finding]", failed: "list[Finding]") -> None:
    for finding in findings:
        mark = _MARKS["broken" if finding in failed else finding.state if finding.state != "broken" else "note"]
        print(f"{mark}  {finding.subject}: {finding.sentence}")
        if finding.remedy:
            print(f"      $ {finding.remedy}")


def _verdict(asked: tuple[str, ...], failed: "list[Finding]") -> str:
    wanted = ", ".join(asked)
    if not failed:
        return f"All that was asked for works: {wanted}."
    return f"{len(failed)} of these must be mended before all that was asked for ({wanted}) works."


if __name__ == "__main__":
    sys.exit(run(main, extra=".[cpu]"))
