"""What was measured of a pair on one machine, kept beside its bundle: passes' costs, acceptance, and what to do with both."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .checks import shown
from .contract import Bundle
from .errors import BundleError
from .pass_costs import PassCosts

PLAN = "plan.json"
_FORMAT_VERSION = 1
_CPU_INFORMATION = Path("/proc/cpuinfo")
# Those by which matrix products choose their kernels: processors of one name, a hypervisor's for instance, differ in them.
_INSTRUCTION_SETS = (
    *("avx", "avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx_vnni", "avx_vnni_int8", "amx_int8"),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme"),
)


@dataclass(frozen=True)
class Plan:
    """A measurement and its advice.

    Attributes:
        machine: Where it was measured; see `machine_of`.
        files: SHA-256 over the graphs' own, so that a plan of other models is not taken for this pair's.
        costs: Of the passes.
        model_prior: The acceptance rate of the draft model's first proposed token, over all prompts; None without a draft.
        advice: What to do, as a sentence.
        predictions: Tokens per second by kind of prompt, drafter and number of draft tokens.
    """

    machine: Mapping[str, str]
    files: str
    costs: PassCosts
    model_prior: float | None
    advice: str
    predictions: Mapping[str, Mapping[str, Mapping[str, float]]]

    def save(self, folder: Path) -> None:
        """Writes it beside the bundle's manifest, whole or not at all.

        Raises:
            BundleError: The folder cannot be written to.
        """
        text = json.dumps({"format_version": _FORMAT_VERSION, **asdict(self)}, indent=2) + "\n"
        try:
            partial = folder / f".{PLAN}.partial"
            partial.write_text(text, encoding="utf-8")
            partial.replace(folder / PLAN)
        except OSError as error:
            raise BundleError(f"The plan cannot be written to {folder}: {error.strerror or error}.") from error

    @classmethod
    def load(cls, folder: Path, bundle: Bundle, machine: Mapping[str, str]) -> "Plan | None":
        """Reads the plan of a bundle; None where there is none, or it is of another machine or other models.

        Raises:
            BundleError: There is one that cannot be read.
        """
        path = folder / PLAN
        if not path.is_file():
            return None
        try:
            document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if document["format_version"] != _FORMAT_VERSION:
                return None
            prior = document["model_prior"]
            plan = cls(
                dict(document["machine"]),
                str(document["files"]),
                PassCosts.from_dict(document["costs"]),
                None if prior is None else _checked_prior(prior),
                str(document["advice"]),
                dict(document["predictions"]),
            )
            _check_draft(plan)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise BundleError(f"{path} is damaged ({error}): remove it, or run scripts/plan.py again.") from error
        return plan if (plan.machine, plan.files) == (dict(machine), files_of(bundle)) else None


def machine_of(engines: Mapping[str, str]) -> dict[str, str]:
    """Returns what costs depend on, as far as it can be told.

    Args:
        engines: What runs each model; see Model.engine.
    """
    return {"processor": processor(), "cores": str(os.cpu_count()), "system": platform.machine(), **engines}


def files_of(bundle: Bundle) -> str:
    """Returns one hash over those of both models' files."""
    specs = [bundle.target, *([] if bundle.draft is None else [bundle.draft])]
    records = [record for spec in specs for record in spec.graph]
    if bundle.draft_vocabulary is not None:
        records.append(bundle.draft_vocabulary)
    return hashlib.sha256("".join(record.sha256 for record in records).encode()).hexdigest()


def processor(information: Path = _CPU_INFORMATION) -> str:
    """Returns the processor's name, or its kind where it has none, and its instruction sets, where Linux tells them.

    Args:
        information: Linux's file; other systems have none.
    """
    known: dict[str, str] = {}
    if information.is_file():
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            known.setdefault(key.strip(), value.strip())
    name = known.get("model name") or known.get("Model") or platform.processor() or platform.machine()
    there = set((known.get("flags") or known.get("Features") or "").split())
    sets = " ".join(one for one in _INSTRUCTION_SETS if one in there)
    return f"{name} ({sets})" if sets else name


def _check_draft(plan: Plan) -> None:
    if plan.costs.draft_by_rows is None and "draft" in plan.machine:
        raise ValueError("draft_by_rows is null, and a draft was measured")


def _checked_prior(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"model_prior is {shown(value)}; a number from 0 to 1 is expected")
    return float(value)
