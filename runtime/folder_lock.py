"""A folder that one process works in at a time: an export, or a build of engines."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def sole_use(folder: Path, refusal: Exception) -> Iterator[None]:
    """Locks a folder until the block ends, or the process, however it does.

    The lock is on the folder itself, so that nothing is left behind. File systems without such locks, and Windows, go without.

    Args:
        folder: It is there, and is no symbolic link.
        refusal: What is raised where another holds the lock, or has put another folder in its place.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not _locks(descriptor) or not folder.exists() or not os.path.samestat(os.fstat(descriptor), folder.stat()):
            raise refusal
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
