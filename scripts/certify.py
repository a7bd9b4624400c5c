#!/usr/bin/env python
"""Certify a pair: test that speculation changes nothing in what its target says, on this machine, and write a report."""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import new_parser, read_prompts, require, run
from generation_arguments import add_device_arguments, device_settings

if TYPE_CHECKING:
    from runtime import Generator
    from runtime.certificate.report import CheckReport

EXAMPLES = """examples:
  # the report goes to bundles/smollm2/certificate: certificate.json, and certificate.html for people
  python scripts/certify.py bundles/smollm2

  # with prompts of your own, one a line, put into the chat template
  python scripts/certify.py bundles/smollm2 --prompts prompts.txt --chat

  # a quick look: fewer tokens, fewer K, fewer samples
  python scripts/certify.py bundles/smollm2 --max-new-tokens 16 --max-draft-tokens 4 --samples 500

The exit status is 0 when every claim holds, 1 when one fails. Statistical claims state the probability that a pair without
fault fails them, 1e-6 each.
"""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = new_parser(__doc__, EXAMPLES)
    parser.add_argument("bundle", type=Path, help="a folder made by scripts/export.py")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="a text file, one prompt a line (default: six of ours)")
    parser.add_argument("--chat", action="store_true", help="put the prompts into the model's chat template")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the report goes (default BUNDLE/certificate)")
    parser.add_argument("--max-new-tokens", type=int, default=32, metavar="N", help="length of a text (default 32)")
    parser.add_argument("--max-draft-tokens", type=int, default=16, metavar="K", help="every K up to this (default 16)")
    parser.add_argument("--samples", type=int, default=4000, metavar="N", help="texts sampled for each law (default 4000)")
    add_device_arguments(parser)
    parsed = parser.parse_args(arguments)
    for name, low, high in (("max_new_tokens", 4, 4096), ("max_draft_tokens", 1, 64), ("samples", 100, 10**7)):
        if not low <= getattr(parsed, name) <= high:
            parser.error(f"--{name.replace('_', '-')} is {getattr(parsed, name)}; a number from {low} to {high} is expected")
    return parsed


def main() -> int:
    """Certifies; returns the exit status."""
    arguments = parse_arguments()

    require("matplotlib", "scipy", "tqdm")

    from runtime import Generator
    from runtime.certificate.plan import DEFAULT_PROMPTS
    from runtime.certificate.report import Certificate, check_writable
    from runtime.manifest import load_bundle

    folder = arguments.out or arguments.bundle / "certificate"
    prompts = DEFAULT_PROMPTS if arguments.prompts is None else tuple(read_prompts(arguments.prompts).values())
    bundle = load_bundle(arguments.bundle)
    generator = Generator.from_bundle(
        arguments.bundle,
        drafter="lookup" if bundle.draft is None else "model",  # each check names its own; "auto" would measure costs
        shared_thread_pool=True,
        verify_files=False,  # just done
        **device_settings(arguments),
    )
    check_writable(folder)
    started = time.perf_counter()
    reports = _run_checks(generator, arguments, prompts)
    seconds = time.perf_counter() - started
    settings = {
        "prompts": list(prompts),
        "chat template": arguments.chat,
        "new tokens": arguments.max_new_tokens,
        "draft tokens": arguments.max_draft_tokens,
        "samples": arguments.samples,
    }
    certificate = Certificate.of(bundle, str(arguments.bundle), generator, seconds, settings, reports)
    certificate.write(folder)
    holds = [verdict.passed for report in reports for verdict in report.verdicts]
    print(
        f"\n{'Passed' if certificate.passed else 'FAILED'}: {sum(holds)} of {len(holds)} claims hold; a pair without fault "
        f"fails with a probability of about {certificate.false_alarm:.1g}. Report: {folder}"
    )
    return 0 if certificate.passed else 1


def _run_checks(generator: "Generator", arguments: argparse.Namespace, prompts: "tuple[str, ...]") -> "list[CheckReport]":
    from tqdm import tqdm

    from runtime.certificate.plan import certificate_checks
    from runtime.certificate.report import run_check

    checks = certificate_checks(
        generator,
        prompts,
        max_new_tokens=arguments.max_new_tokens,
        max_num_draft_tokens=arguments.max_draft_tokens,
        samples=arguments.samples,
        chat=arguments.chat,
    )
    reports = []
    for number, check in enumerate(checks, start=1):
        with tqdm(total=check.steps, desc=f"{number}/{len(checks)} {check.title}", leave=False) as bar:
            reports.append(run_check(check, bar.update))
        for verdict in reports[-1].verdicts:
            print(f"{'holds' if verdict.passed else 'FAILS'}  {verdict.claim}\n       {verdict.found}", flush=True)
    return reports


if __name__ == "__main__":
    sys.exit(run(main, extra=".[cpu,certify]"))
