"""Puts a file at a second place without a second copy where the disk allows it."""

import os
import shutil
from pathlib import Path


def link_or_copy(file: Path, goal: Path) -> None:
    """Makes a hard link to a file, or a copy where there can be none; makes the folders above it.

    A symbolic link will not do: ONNX Runtime refuses weights behind one that leaves the folder.
    """
    goal.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file.resolve(), goal)
    except OSError:  # another disk, or a file system without hard links
        shutil.copyfile(file, goal)
