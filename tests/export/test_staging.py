"""The folder a bundle is made in: one process at a time, its place taken whole, rests of killed ones gone."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import export.bundle
from export.errors import ExportError
from export.staging import check_out, staged

ROOT = Path(__file__).parents[2]
HOLD = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from export.staging import staged
    with staged(Path(sys.argv[1])) as staging:
        (staging / "theirs").mkdir()
        (staging / "theirs" / "weights").write_text("half")
        print("working", flush=True)
        sys.stdin.readline()
    """
)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, in the middle of its work on the same goal, until it is sent a line."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "out")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        yield process
        process.kill()


def make(out: Path, name: str) -> None:
    with staged(out) as staging:
        (staging / name).write_text("whole")


def test_two_at_once_are_refused_and_do_not_meet(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    out = tmp_path / "out"
    with pytest.raises(ExportError, match=rf"^Another export to {out}, or a build of its engines, is under way: wait until"):
        make(out, "mine")
    assert {file.name for file in tmp_path.iterdir()} == {".out.partial"}
    make(tmp_path / "elsewhere", "mine")
    other.communicate("\n")
    assert (other.returncode, (out / "theirs" / "weights").read_text()) == (0, "half")
    make(out, "mine")
    assert [file.name for file in out.iterdir()] == ["mine"]


def test_a_place_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match=rf"cannot be made, because {tmp_path / 'file'} is a file: choose another --out"):
        check_out(tmp_path / "file" / "x" / "y", overwrite=False)
    check_out(tmp_path / "new" / "x", overwrite=False)


def test_a_process_that_was_killed_leaves_no_lock_and_its_rests_do_not_get_in(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    other.send_signal(signal.SIGKILL)
    other.wait(timeout=60)
    rests = tmp_path / ".out.partial"
    assert (rests / "theirs" / "weights").exists()
    (rests / "link").symlink_to(tmp_path / "keep", target_is_directory=True)
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep" / "thesis").write_text("years of work")
    make(tmp_path / "out", "mine")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine"]
    assert (tmp_path / "keep" / "thesis").exists()
    assert not rests.exists()


@pytest.mark.parametrize("begun_anew", [False, True])
def test_a_folder_that_changed_hands_before_it_was_locked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun_anew: bool
) -> None:
    """Between our opening and our lock, another process finished, and a third began: what we have locked is a bundle now."""
    out, opened = tmp_path / "out", os.open

    def late(path: Path, flags: int) -> int:
        descriptor = opened(path, flags)
        Path(path).rename(out)
        (out / "theirs").write_text("whole")
        if begun_anew:
            Path(path).mkdir()
            (Path(path) / "third").write_text("half")
        return descriptor

    monkeypatch.setattr("runtime.folder_lock.os.open", late)
    with pytest.raises(ExportError, match="Another export to"):
        make(out, "mine")
    assert [file.name for file in out.iterdir()] == ["theirs"]
    assert [file.name for file in tmp_path.glob(".out.partial/*")] == ["third"] * begun_anew


def test_a_link_in_the_folders_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep" / "thesis").write_text("years of work")
    (tmp_path / ".out.partial").symlink_to(tmp_path / "keep", target_is_directory=True)
    with pytest.raises(OSError, match=r"\.out\.partial"):
        make(tmp_path / "out", "mine")
    assert (tmp_path / "keep" / "thesis").exists()


def test_without_locks_work_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(_descriptor: int, _operation: int) -> None:
        raise OSError("No locks available")

    monkeypatch.setattr("runtime.folder_lock.fcntl.flock", unsupported)
    make(tmp_path / "out", "one")
    monkeypatch.setattr("runtime.folder_lock.fcntl", None)
    make(tmp_path / "out", "two")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["two"]
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_the_folder_of_another_that_began_meanwhile_stays(tmp_path: Path) -> None:
    """Behind its own success a process touches the name no more."""
    out = tmp_path / "out"
    lent = staged(out)
    lent.__enter__()
    rename = Path.rename

    def begin_anew(self: Path, goal: Path) -> Path:
        moved = rename(self, goal)
        self.mkdir()
        return moved

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", begin_anew)
        lent.__exit__(None, None, None)
    assert {file.name for file in tmp_path.iterdir()} == {"out", ".out.partial"}


def test_rests_of_a_replaced_bundle_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".out.old").mkdir()
    make(tmp_path / "out", "mine")
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_a_bundle_that_came_meanwhile_is_not_replaced_unasked(
    tiny_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, check = tmp_path / "out", export.bundle.check_disk

    def finish_another(*arguments: object) -> None:
        out.mkdir()
        (out / "bundle.json").write_text("{}")
        check(*arguments)

    monkeypatch.setattr(export.bundle, "check_disk", finish_another)
    monkeypatch.setattr(export.bundle, "write_decoder", lambda *_, **__: pytest.fail("work was begun"))
    with pytest.raises(ExportError, match="exists already"):
        export.bundle.export_bundle(str(tiny_draft), None, out)
    assert (out / "bundle.json").read_text() == "{}"
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
