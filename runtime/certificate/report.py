"""The certificate as a document: JSON for programs, one page for people."""

import io
import json
import os
import platform
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from runtime.contract import Bundle
from runtime.errors import SpecError
from runtime.generator import Generator
from runtime.plan import processor

from .verdict import Advance, Check, Verdict

JSON_NAME = "certificate.json"
PAGE_NAME = "certificate.html"
_FORMAT_VERSION = "1.0"


@dataclass(frozen=True)
class CheckReport:
    """What one check found.

    Attributes:
        title: The check's.
        verdicts: At least one.
    """

    title: str
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True)
class Certificate:
    """All that was checked, on what and where.

    Attributes:
        bundle: The bundle's folder, as it was given.
        files: SHA-256 of the files that hold graphs, weights and tokenizer, by path.
        pair: What runs where; Generator.describe.
        machine: Processor, system, versions of what computes.
        created: Local time in ISO 8601.
        seconds: How long it took.
        settings: What it was asked to do: prompts, numbers of tokens and samples.
        checks: What was found.
    """

    bundle: str
    files: Mapping[str, str]
    pair: Mapping[str, str]
    machine: Mapping[str, str]
    created: str
    seconds: float
    settings: Mapping[str, Any]
    checks: tuple[CheckReport, ...]

    @property
    def passed(self) -> bool:
        """Whether every claim was found to hold."""
        return all(verdict.passed for check in self.checks for verdict in check.verdicts)

    @property
    def false_alarm(self) -> float:
        """At most so probable it is that a pair without fault fails: the sum over all verdicts."""
        return sum(verdict.false_alarm for check in self.checks for verdict in check.verdicts)

    @classmethod
    def of(
        cls,
        bundle: Bundle,
        folder: str,
        generator: Generator,
        seconds: float,
        settings: Mapping[str, Any],
        checks: Sequence[CheckReport],
    ) -> "Certificate":
        """Gathers what was checked, and on what."""
        return cls(
            folder,
            {record.path: record.sha256 for record in bundle.files()},
            generator.describe(),
            _machine(),
            datetime.now(timezone.utc).astimezone().isoformat(timespec="seconds"),
            seconds,
            settings,
            tuple(checks),
        )

    def write(self, folder: Path) -> None:
        """Writes both documents, the one for programs first; neither is there half.

        Raises:
            SpecError: They cannot be written.
        """
        document = {
            "format_version": _FORMAT_VERSION,
            "passed": self.passed,
            "false_alarm": self.false_alarm,
            **asdict(self),
        }
        _write(folder, JSON_NAME, json.dumps(document, indent=2, ensure_ascii=False) + "\n")
        _write(folder, PAGE_NAME, self._page())

    def _page(self) -> str:
        import jinja2

        source = resources.files("runtime.certificate").joinpath("page.html.jinja").read_text(encoding="utf-8")
        template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(source)
        return template.render(certificate=self, plots=list(_plots(self.checks)))


def check_writable(folder: Path) -> None:
    """Makes the folder and tries to write to it, so that no work is done for nothing.

    Raises:
        SpecError: It cannot be written to.
    """
    _write(folder, ".probe", "")
    (folder / ".probe").unlink()


def _write(folder: Path, name: str, text: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(folder / name)
    except OSError as error:
        raise SpecError(f"The certificate cannot be written to {folder}: {error.strerror or error}.") from error


def run_check(check: Check, advance: Advance) -> CheckReport:
    """Runs one check; an error of the pair's is a verdict, not the end of the certificate.

    Args:
        check: The check.
        advance: See Check.run.
    """
    try:
        return CheckReport(check.title, tuple(check.run(advance)))
    except ImportError:
        raise  # the machine's trouble, not the pair's
    except Exception as error:  # noqa: BLE001 - whatever a broken pair does, it has failed
        found = f"{type(error).__name__}: {error}"
        return CheckReport(check.title, (Verdict("The check runs to its end.", passed=False, found=found),))


def _machine() -> dict[str, str]:
    machine = {
        "system": platform.platform(),
        "processor": processor(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
    }
    shown = {"specrt", "numpy", "onnxruntime", "onnxruntime-gpu", "tokenizers", "tensorrt"}
    installed = {package.name: package.version for package in metadata.distributions() if package.name in shown}
    return machine | dict(sorted(installed.items()))


def _plots(checks: Sequence[CheckReport]) -> Iterator[tuple[str, str]]:
    """Yields captions and SVG drawings."""
    for check in checks:
        for verdict in check.verdicts:
            if "work" in verdict.figures:
                yield f"Tokens a round by the number of draft tokens, {check.title}", _draw_work(verdict.figures["work"])
            if "outcomes" in verdict.figures:
                yield f"Most probable outcomes: {check.title}", _draw_law(verdict.figures["outcomes"])


def _draw_work(work: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    for drafter, by_number in work.items():
        lengths = [counted["mean_acceptance_length"] for counted in by_number.values()]
        axes.plot([int(number) for number in by_number], lengths, marker="o", label=drafter)
    axes.set_xlabel("draft tokens a round (K)")
    axes.set_ylabel("tokens a round")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    return svg_of(figure)


def _draw_law(outcomes: Sequence[Mapping[str, Any]]) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    places = range(len(outcomes))
    axes.bar(places, [outcome["expected"] for outcome in outcomes], color="#c8d4e6", label="the target alone")
    axes.plot(places, [outcome["observed"] for outcome in outcomes], "k.", label="sampled with speculation")
    # As plain text: a token may look like a formula.
    labels = [outcome["text"].replace("$", r"\$")[:24] for outcome in outcomes]
    axes.set_xticks(list(places), labels, rotation=60, ha="right", fontsize=7)
    axes.set_ylabel("probability")
    axes.legend()
    return svg_of(figure)


def svg_of(figure: Any) -> str:
    """Returns a matplotlib figure as an SVG element."""
    import matplotlib as mpl

    drawing = io.StringIO()
    # Text stays text, for the reader's browser to draw: our fonts lack the letters of many tokens.
    with mpl.rc_context({"svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(drawing, format="svg", metadata={"Date": None})
    text = drawing.getvalue()
    return text[text.index("<svg") :]
