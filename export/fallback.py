"""The second try where the user left open what makes a graph: what mobius builds wrongly, optimum may trace rightly."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from .errors import ExportError, OtherModelError
from .optimum_graph import can_trace
from .role import Report, Role

_Made = TypeVar("_Made")


def make_by_either(
    make: Callable[[list[Role]], _Made], roles: Sequence[Role], asked: str, folder: Path, report: Report
) -> _Made:
    """Makes decoders, and those that became another model a second time by optimum.

    Args:
        make: Makes and checks all of them.
        roles: What to make.
        asked: The source of graphs that the user asked for; only "auto" leaves a second try.
        folder: Where `make` writes; emptied before the second try.
        report: Told of it.

    Raises:
        ExportError: As `make` raises; where the second try fails too, the first try's reason and the second's.
    """
    try:
        return make(list(roles))
    except OtherModelError as error:
        traced = [replace(role, exporter="optimum") if _is_meant(role, error) else role for role in roles]
        if asked != "auto" or traced == list(roles):
            raise
        first = error
    report(f"optimum is tried, because {str(first).removesuffix('.')}", 0, 0)
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    try:
        return make(traced)
    except ExportError as second:
        raise ExportError(f"{str(first).removesuffix('.')}; nor did optimum's graph serve: {second}") from second


def _is_meant(role: Role, error: OtherModelError) -> bool:
    return role.source.name == error.source and role.exporter == "mobius" and can_trace(role.source)
