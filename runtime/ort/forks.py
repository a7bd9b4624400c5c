"""Sessions that a fork inherits are never taken apart there: ONNX Runtime would wait for threads that only the parent has."""

import ctypes
import os
import weakref

import onnxruntime as ort

# Of this process, as forks are.
_SESSIONS: "weakref.WeakSet[ort.InferenceSession]" = weakref.WeakSet()


def keep_in_forks(session: ort.InferenceSession) -> None:
    """Gives the session, in any fork from now on, a reference that is never taken back.

    So a generator can be dropped there, and another one take its place. What ONNX Runtime takes apart itself when a process
    ends by sys.exit is out of reach: such a fork ends by os._exit, as multiprocessing's do.
    """
    _SESSIONS.add(session)


def _keep() -> None:
    for session in list(_SESSIONS):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_keep)
