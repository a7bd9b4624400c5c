"""Whether a bundle is taken where it is to run: it is really loaded there, alone, in a process of its own."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from .facts import Finding
from .probes import ProbeError, ask

# Loading is quick there, but for rows that are measured once. ONNX Runtime's TensorRT provider builds engines for minutes, and
# TensorRT's own engines are judged by their records (scripts/doctor_engines.py).
TRIED = ("cpu", "cuda")
_SECONDS = 900


def bundle_trials(folder: Path, asked: Collection[str], hindered: Collection[str], *, is_named: bool) -> list[Finding]:
    """Loads a bundle on each device that was asked for.

    Args:
        folder: The bundle's, whose files are whole.
        asked: The devices.
        hindered: Those that do not work by themselves, so that nothing is tried there.
        is_named: Whether the user named them, so that each must serve; otherwise one of them must.
    """
    findings = list(_trials(folder, asked, hindered))
    if is_named or all(finding.state != "works" for finding in findings):
        return findings
    return [replace(finding, state="note") if finding.state == "broken" else finding for finding in findings]


def _trials(folder: Path, asked: Collection[str], hindered: Collection[str]) -> Iterator[Finding]:
    for device in asked:
        if device in hindered:
            yield Finding("bundle", "note", f"Loading it on {device} was not tried: that does not work by itself.")
        elif device not in TRIED:
            yield Finding("bundle", "note", f"Loading it on {device} was not tried: its engines may have to be built first.")
        else:
            try:
                ask("bundle", str(folder), device, seconds=_SECONDS)
            except ProbeError as error:
                sentence = f"It does not load on {device}: {str(error).rstrip('.')}."
                yield Finding("bundle", "broken", sentence, hinders=(device,))
            else:
                yield Finding("bundle", "works", f"It loads and computes on {device}.")
