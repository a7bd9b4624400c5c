"""A bundle's folder while it is made: it appears at its place whole or not at all."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .errors import ExportError
from .role import BYTES_PER_WEIGHT, Role

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# Graphs, tokenizer and manifest, beside the weights.
_OTHER_FILES = 1.05


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Lends a folder that takes `out`'s place when the block ends well, and is gone when it does not.

    Raises:
        ExportError: Another process is at work on the same `out`.
    """
    staging = out.with_name(f".{out.name}.partial")
    with _sole_use(staging, out):
        for rest in staging.iterdir():  # of an export that was killed
            shutil.rmtree(rest) if rest.is_dir() and not rest.is_symlink() else rest.unlink()
        try:
            yield staging
            _take_place(staging, out)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise


@contextmanager
def _sole_use(staging: Path, out: Path) -> Iterator[None]:
    """Makes the folder unless it is there, and locks it until the block ends, or the process, however it does.

    The lock is on the folder itself, so that nothing is left behind. File systems without such locks, and Windows, go without.
    """
    staging.mkdir(exist_ok=True)
    if fcntl is None:
        yield
        return
    descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not _locks(descriptor) or not staging.exists() or not os.path.samestat(os.fstat(descriptor), staging.stat()):
            raise ExportError(f"Another export to {out} is under way: wait until it is done, or choose another --out.")
        yield
    finally:
        os.close(descriptor)


def _locks(descriptor: int) -> bool:
    """Returns whether nobody else holds the lock of an open folder, which is ours from here on."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # the file system has no such locks
    return True


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
