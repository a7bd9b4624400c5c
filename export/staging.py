"""A bundle's folder while it is made: it appears at its place whole or not at all."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from runtime.folder_lock import sole_use

from .errors import ExportError
from .role import BYTES_PER_WEIGHT, Role

# Graphs, tokenizer and manifest, beside the weights.
_OTHER_FILES = 1.05


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Lends a folder that takes `out`'s place when the block ends well, and is gone when it does not.

    Raises:
        ExportError: Another process is at work on the same `out`.
    """
    staging = out.with_name(f".{out.name}.partial")
    refusal = ExportError(f"Another export to {out}, or a build of its engines, is under way: wait until it is done.")
    staging.mkdir(exist_ok=True)
    with sole_use(staging, refusal):
        try:
            for rest in staging.iterdir():  # of an export that was killed
                shutil.rmtree(rest) if rest.is_dir() and not rest.is_symlink() else rest.unlink()
            with sole_use(out, refusal) if out.is_dir() else nullcontext():  # engines are built in the bundle itself
                yield staging
                _take_place(staging, out)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise


def _take_place(staging: Path, out: Path) -> None:
    old = out.with_name(f".{out.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if not out.exists():
        staging.rename(out)
        return
    # A folder cannot be renamed onto one that holds files: the old bundle steps aside, and back where that fails.
    out.rename(old)
    try:
        staging.rename(out)
    except BaseException:
        old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def check_out(out: Path, *, overwrite: bool) -> None:
    """Refuses a place that something stands at which must stay.

    Raises:
        ExportError: A bundle that is not to be replaced, or what is no bundle.
    """
    if out.exists() and not overwrite:
        raise ExportError(f"{out} exists already: choose another --out, or pass --overwrite to replace it.")
    is_bundle = (out / "bundle.json").is_file()
    if out.exists() and not is_bundle and any(out.iterdir() if out.is_dir() else [out]):
        raise ExportError(f"{out} exists and is no bundle: it is not replaced even with --overwrite.")
    above = next(folder for folder in out.absolute().parents if folder.exists())
    if not above.is_dir():
        raise ExportError(f"{out} cannot be made, because {above} is a file: choose another --out.")


def check_disk(out: Path, roles: Sequence[Role]) -> None:
    """Refuses what the disk at `out` has no room for.

    Args:
        out: The bundle's folder; packed weights are written as floats beside its files, one source behind the other.
        roles: What is to be made.

    Raises:
        ExportError: There is too little.
    """
    needed, free = sum(role.weight_bytes for role in roles) * _OTHER_FILES, shutil.disk_usage(out.parent).free
    floats = max(role.source.num_parameters * BYTES_PER_WEIGHT["fp32"] * role.source.is_packed for role in roles)
    if needed + floats > free:
        what, remedies = "The bundle", ", choose another --out, or a lower --precision"
        if any(role.beside for role in roles):
            what, remedies = "What is added", ""
        meanwhile = f", and {_size(floats)} more while its packed weights are read as floats," if floats else ""
        raise ExportError(
            f"{what} needs about {_size(needed)}{meanwhile} and {_size(free)} are free at {out.parent}: free some "
            f"disk{remedies}."
        )


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
