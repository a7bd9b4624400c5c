"""What the scripts share: the project's packages on the path, and one sentence for whatever goes wrong."""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

# In front of the scripts' own folder, whose export.py would hide the package of that name.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

INTERRUPTED = 130


class Terminated(KeyboardInterrupt):
    """SIGTERM came: nobody is there to talk with, so it must end even what Ctrl-C only pauses."""


def new_parser(description: str | None, examples: str) -> argparse.ArgumentParser:
    """Returns a parser whose --help ends with examples; options must be written out."""
    return argparse.ArgumentParser(
        description=description, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


def run(main: Callable[[], int], *, extra: str, interrupted: str = "interrupted") -> int:
    """Calls a script's main and turns what goes wrong into one sentence on standard error.

    Args:
        main: Returns the exit status.
        extra: What to install where a module is missing, ".[cpu]" for example.
        interrupted: What to say on Ctrl-C or SIGTERM.

    Returns:
        main's own status; 1 for a refusal, 2 where something is not installed, 130 when interrupted.
    """
    _mend_closed_errors()
    if sys.stdout is None:  # closed by whoever started the script: what is written would be lost, or land in another file
        return _fail("The standard output is closed: leave it open, or send it to a file such as /dev/null.", 1)
    on_interrupt = _leave_at_once(interrupted)
    try:
        from runtime.errors import SpecError
    except ImportError as error:
        return _fail(f"{error.name} is not installed: from the project's folder, pip install -e '{extra}'", 2)
    signal.signal(signal.SIGINT, on_interrupt)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return main()
    except ImportError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # as a module of C++ tells it
            return _fail_interrupted(interrupted)
        return _fail(f"{error.name or error} is not installed: from the project's folder, pip install -e '{extra}'", 2)
    except BrokenPipeError:  # whoever read the output has left
        _give_up_output()
        return 1
    except UnicodeEncodeError as error:
        odd = ascii(error.object[error.start : error.end])
        return _fail(f"The output's encoding, {error.encoding}, cannot write {odd}: set PYTHONIOENCODING=utf-8:replace.", 1)
    except OSError as error:
        _give_up_output()
        return _fail(f"{error.strerror or error}{'' if error.filename is None else f': {error.filename}'}", 1)
    except (SpecError, ValueError, MemoryError) as error:
        return _fail(_sentence(error), 1)
    except KeyboardInterrupt:
        return _fail_interrupted(interrupted)


def require(*modules: str) -> None:
    """Imports what is needed only after minutes of work, so that whoever lacks it knows now; raises ImportError."""
    for module in modules:
        importlib.import_module(module)


def read_prompts(path: Path) -> dict[str, str]:
    """Reads prompts from a text file, one a line, named "prompt 1" and so on.

    Raises:
        ValueError: The file cannot be read, or has none.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ValueError(f"The prompts file {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"The prompts file {path} is not UTF-8 (byte {error.start}): convert it first.") from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"The prompts file {path} has no prompt: write one a line.")
    return {f"prompt {number}": prompt for number, prompt in enumerate(prompts, start=1)}


def check_folder_of(file: Path | None) -> None:
    """Refuses, before minutes of work, a file that cannot be written behind them; None is no file.

    Raises:
        ValueError: Its folder is not there, or it is a folder itself.
    """
    if file is not None and (not file.parent.is_dir() or file.is_dir()):
        raise ValueError(f"{file} cannot be written: {'it is a folder' if file.is_dir() else f'there is no {file.parent}'}.")


def _leave_at_once(interrupted: str) -> signal.Handlers | Callable[[int, FrameType | None], Any] | int | None:
    """Lets Ctrl-C and SIGTERM end the process while modules are imported; returns what Ctrl-C did before.

    There is nothing to clean up then, and what those modules make of an exception in their midst is anything but a sentence.
    """

    def leave(_number: int, _frame: FrameType | None) -> NoReturn:
        os.write(2, f"\n{interrupted}\n".encode())
        os._exit(INTERRUPTED)

    on_interrupt = signal.getsignal(signal.SIGINT)
    if on_interrupt is signal.default_int_handler:  # another one is the caller's, as nohup's, which ignores it
        signal.signal(signal.SIGINT, leave)
    signal.signal(signal.SIGTERM, leave)
    return on_interrupt


def _give_up_output() -> None:
    """Lets Python's own attempt to flush the output at exit find a place."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _mend_closed_errors() -> None:
    """Gives progress bars and input() something to write to where whoever started the script has closed standard error."""
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the process ends


def _terminate(_number: int, _frame: object) -> NoReturn:
    raise Terminated


def _sentence(error: Exception) -> str:
    if isinstance(error, MemoryError):  # numpy's tells of an array, and most others tell nothing
        return f"There is too little memory for this{f' ({error})' if str(error) else ''}: ask for less."
    return str(error)


def _fail_interrupted(interrupted: str) -> int:
    print(f"\n{interrupted}", file=sys.stderr)
    return INTERRUPTED


def _fail(sentence: str, status: int) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return status
