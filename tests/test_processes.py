"""A generator belongs to the process that loaded it: not pickled, not copied, not used in a fork."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime import Generator, SamplingParams
from runtime.chat import Chat
from runtime.session import Session
from tests.fakes import CHAT_TEMPLATE, FakeModel, fake_generator

PARAMS = SamplingParams(max_new_tokens=4)
PROMPT = [7, 8, 9]


def loaded() -> Generator:
    return fake_generator(FakeModel(seed=1), FakeModel(seed=2), chat_template=CHAT_TEMPLATE)


@pytest.mark.parametrize("take", [pickle.dumps, copy.deepcopy])
@pytest.mark.parametrize("held", [lambda it: it, Generator.session, Generator.chat])
def test_what_holds_engines_is_neither_pickled_nor_copied(
    take: Callable[[object], object], held: Callable[[Generator], Generator | Session | Chat]
) -> None:
    generator = loaded()
    with pytest.raises(
        TypeError, match=r"^A loaded generator, .*: call Generator\.from_bundle in each process, or let threads"
    ):
        take(held(generator))
    assert len(generator.generate(PROMPT, PARAMS).token_ids) == 4


def test_a_session_is_copied_by_fork_only() -> None:
    with pytest.raises(TypeError, match=r"^A loaded generator, its sessions and chats cannot be pickled or copied"):
        copy.copy(loaded().session())


def test_what_a_text_gives_is_pickled() -> None:
    result = loaded().generate(PROMPT, PARAMS)
    assert pickle.loads(pickle.dumps(result)) == result  # noqa: S301 - our own


def refusal_in_a_fork(use: Callable[[], object]) -> str:
    """What `use` raises in a fork of this process."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(60)  # it would hang
        try:
            use()
            said = "nothing"
        except Exception as error:  # noqa: BLE001 - whatever it is
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said.replace(str(child), "CHILD").replace(str(os.getpid()), "PARENT")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_is_told_to_load_its_own() -> None:
    """ONNX Runtime's threads stay behind, and what a fork inherits of them can end it."""
    generator = loaded()
    session = generator.session()
    session.generate(PROMPT, PARAMS)
    begun = session.stream([*PROMPT, 5], SamplingParams(max_new_tokens=30))
    next(begun)
    session._lock.acquire()  # as by another thread, in the middle of a pass
    for use in (
        lambda: generator.generate(PROMPT, PARAMS),
        generator.session,
        generator.chat,
        lambda: session.generate(PROMPT, PARAMS),
        lambda: session.resume(4),
        lambda: next(begun),
    ):
        assert refusal_in_a_fork(use) == (
            "RuntimeError: This generator was loaded in process PARENT, and this is its fork CHILD, without the engines' "
            "threads: call Generator.from_bundle behind the fork, or start processes by 'spawn'."
        )
    session._lock.release()
    assert next(begun).token_ids


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_may_load_its_own() -> None:
    loaded().generate(PROMPT, PARAMS)
    assert refusal_in_a_fork(lambda: loaded().generate(PROMPT, PARAMS)) == "nothing"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("shared", [False, True])
def test_a_fork_may_drop_what_it_inherited(tiny_bundle: Path, shared: bool) -> None:
    """ONNX Runtime would wait for its threads, which are not there. In a process of its own: the pool is there for good."""
    code = f"""
import gc, os, signal
from runtime import Generator, SamplingParams
load = lambda: Generator.from_bundle({str(tiny_bundle)!r}, threads=2, shared_thread_pool={shared})
text = lambda generator: generator.generate([5, 6, 7], SamplingParams(max_new_tokens=8)).token_ids
generator = load()
expected = text(generator)
child = os.fork()
if not child:
    signal.alarm(60)
    generator = load()
    gc.collect()
    os._exit(text(generator) != expected)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text(generator) == expected)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout == "0 True\n", done.stderr
