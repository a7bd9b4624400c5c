"""What scripts/bench.py found, for people and for programs."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_figures import BASELINES, OURS_PLAIN, Mode, ModeFigures, Spread, overall
from bench_run import Case

FORMAT_VERSION = "1.0"
COLUMNS = {
    "mode": "off, auto, model, lookup and hybrid are ours",
    "tok/s": "behind the first token, median",
    "vs NAME": "times as fast as that mode behind the first token: median of the repetitions (least to greatest)",
    "whole s": "seconds of the whole text, prefill included, median",
    "whole vs off": "times as fast as our plain decoding over the whole text",
    "passes": "of target + draft",
    "tok/round": "new tokens a round",
    "accepted": "of the proposed tokens",
    "python ms": "a round, beside the passes",
    "text": "ours against our plain text, genai's against its plain text, and that against ours",
}
Result = tuple[Case, Sequence[ModeFigures]]


def legend(modes: Sequence[Mode]) -> str:
    """Returns what the columns mean, a line each."""
    names = ", ".join(mode.name for mode in BASELINES if mode in modes)
    columns = {f"vs {names}" if name == "vs NAME" else name: text for name, text in COLUMNS.items()}
    width = max(map(len, columns))
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in columns.items())


def table(figures: Sequence[ModeFigures]) -> str:
    """Returns the table of one case, a row for each mode; at least one."""
    return _aligned([_row(one, _baselines(figures)) for one in figures])


def summary(results: Sequence[Result]) -> str:
    """Returns the ratios over all prompts, a row for each mode and temperature: geometric mean, worst and best."""
    rows = []
    for temperature in dict.fromkeys(case.request.temperature for case, _ in results):
        cases = [figures for case, figures in results if case.request.temperature == temperature]
        for place, one in enumerate(cases[0]):
            row = {"mode": one.mode.name, "temperature": f"{temperature:g}"}
            for name in _baselines(cases[0]):
                of_cases = [figures[place].ratios[name] for figures in cases if name in figures[place].ratios]
                for kind, ratios in (("", [one.decode for one in of_cases]), ("whole ", [one.whole for one in of_cases])):
                    row[f"{kind}vs {name}"] = _spread(overall(one.median for one in ratios)) if ratios else "-"
            rows.append(row)
    return _aligned(rows)


def document(results: Sequence[Result], facts: Mapping[str, Any], *, complete: bool) -> dict[str, Any]:
    """Returns all of it for programs.

    Args:
        results: What was measured.
        facts: What it was measured with: bundle, machine, versions, settings, notes.
        complete: Whether nothing was broken off.
    """
    return {
        "format_version": FORMAT_VERSION,
        "complete": complete,
        **facts,
        "results": [
            {
                "prompt": case.prompt,
                "temperature": case.request.temperature,
                "prompt_tokens": len(case.request.prompt),
                "modes": [{"name": one.mode.name, **asdict(one)} for one in figures],
            }
            for case, figures in results
        ],
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes it.

    Raises:
        ValueError: It cannot be written.
    """
    _write(path, json.dumps(content, indent=2) + "\n")


def draw(path: Path, results: Sequence[Result]) -> None:
    """Draws the ratios to our plain decoding behind the first token: bars by prompt, a panel for each temperature.

    Raises:
        ValueError: It cannot be written.
    """
    from matplotlib.figure import Figure

    from runtime.certificate.report import svg_of

    temperatures = list(dict.fromkeys(case.request.temperature for case, _ in results))
    prompts = len(dict.fromkeys(case.prompt for case, _ in results))
    size = (max(6.0, 2.0 + 1.6 * prompts), 3.2 * len(temperatures))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(temperatures), squeeze=False)[:, 0]
    for axes, temperature in zip(panels, temperatures, strict=True):
        _draw_panel(axes, [result for result in results if result[0].request.temperature == temperature])
        axes.set_title("greedy" if temperature == 0 else f"temperature {temperature:g}", fontsize=9)
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=7, loc="outside right upper")
    _write(path, svg_of(figure))


def check_writable(path: Path) -> None:
    """Raises ValueError unless there can be a file of this name: better now than after minutes of measuring."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{path} cannot be written: name a file in a folder that exists and is yours.")


def machine() -> dict[str, Any]:
    """Returns where this runs."""
    from runtime.plan import processor

    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def load_average() -> float | None:
    """Returns the load of the last minute; None where the system does not tell."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _baselines(figures: Sequence[ModeFigures]) -> list[str]:
    present = {one.mode for one in figures}
    return [mode.name for mode in BASELINES if mode in present]


def _row(one: ModeFigures, baselines: Sequence[str]) -> dict[str, str]:
    ratios = {f"vs {name}": _spread(one.ratios[name].decode) if name in one.ratios else "-" for name in baselines}
    whole = one.ratios.get(OURS_PLAIN.name)
    return {
        "mode": one.mode.name,
        "tok/s": f"{one.tokens_per_second:.1f}",
        **ratios,
        "whole s": f"{one.seconds:.2f}",
        "whole vs off": "-" if whole is None else f"{whole.whole.median:.2f}",
        "passes": f"{one.target_passes:.0f} + {one.draft_passes:.0f}",
        "tok/round": f"{one.tokens_per_round:.2f}",
        "accepted": "-" if one.acceptance_rate is None else f"{one.acceptance_rate:.0%}",
        "python ms": "-" if one.python_milliseconds_per_round is None else f"{one.python_milliseconds_per_round:.2f}",
        "text": one.text or "-",
    }


def _spread(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})"


def _aligned(rows: Sequence[Mapping[str, str]]) -> str:
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    lines = [{name: name for name in widths}, {name: "-" * width for name, width in widths.items()}, *rows]
    return "\n".join("  ".join(f"{line[name]:<{width}}" for name, width in widths.items()).rstrip() for line in lines)


def _draw_panel(axes: Any, results: Sequence[Result]) -> None:
    modes = [one.mode.name for one in results[0][1] if one.mode != OURS_PLAIN]
    width = 0.8 / max(1, len(modes))
    for place, name in enumerate(modes):
        spreads = [one.ratios[OURS_PLAIN.name].decode for _, figures in results for one in figures if one.mode.name == name]
        medians = [spread.median for spread in spreads]
        errors = [[spread.median - spread.low for spread in spreads], [spread.high - spread.median for spread in spreads]]
        centres = [group + (place - (len(modes) - 1) / 2) * width for group in range(len(results))]
        axes.bar(centres, medians, width, yerr=errors, error_kw={"linewidth": 0.7}, label=name)
    axes.axhline(1, color="black", linewidth=0.8)
    # As plain text: a prompt's name may look like a formula.
    axes.set_xticks(range(len(results)), [case.prompt.replace("$", r"\$")[:24] for case, _ in results])
    axes.set_ylabel("times as fast as off")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} could not be written: {error.strerror or error}.") from error
