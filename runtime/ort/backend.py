"""ONNX Runtime on the CPU: sessions shared by all generations, and caches bound once for each.

Target and draft take turns, and two thread pools that spin while they wait would halve each other's speed. So each
session stops its threads' spinning when a pass ends; or, where the process is ours alone, both share one pool.
"""

import os
from pathlib import Path

import onnxruntime as ort

from runtime.checks import is_whole
from runtime.contract import DecoderSpec
from runtime.device_forms import runs_on_cpu
from runtime.errors import BundleError, DeviceError, first_line
from runtime.plan import processor

from .contexts import InPlaceContext
from .forks import keep_in_forks
from .growing_context import GrowingContext
from .interface import check_interface

# The forms of a graph, fastest first.
LOWERINGS = ("gqa", "growing", "gqa-half", "static", "primitive")
_THREADS_PER_CORE = 8  # more only wait for each other


class OrtBackend:
    """Loads decoders into ONNX Runtime sessions on the CPU."""

    def __init__(self, *, threads: int | None = None, shared_thread_pool: bool = False, exact_products: bool = False) -> None:
        """Prepares threads; no session is made yet.

        Args:
            threads: Threads for a pass; None for all the cores this process may use.
            shared_thread_pool: Make ONNX Runtime's process-wide pool and use it for every decoder: about 5 % faster,
                but ONNX Runtime then refuses any later session of this process that asks for threads of its own, which
                is its default. For programs that make no sessions but ours.
            exact_products: Leave activations as they are where a graph's weights are dequantised, for comparisons. ONNX
                Runtime otherwise rounds them to int8, which is faster and gives a row the same bits in any pass.

        Raises:
            ValueError: Fewer than one thread, or many more than the machine has cores.
        """
        most = _THREADS_PER_CORE * (os.cpu_count() or 1)
        if threads is not None and (not is_whole(threads) or not 1 <= threads <= most):
            raise ValueError(f"threads is {threads!r:.80}; a number from 1 to {most} is expected, or None for all cores.")
        self._threads = threads or available_cores()
        self._shared = shared_thread_pool
        self._exact_products = exact_products
        if not shared_thread_pool:
            self._pool = "from a pool of its own"
        elif create_process_pool(self._threads):
            self._pool = "from the process's shared pool"
        else:
            self._pool = "or so from the process's shared pool, which was there already"

    def load(self, spec: DecoderSpec, folder: Path) -> "OrtModel":
        """Makes the session of a decoder; see Backend.load."""
        spec = spec.best_form(LOWERINGS)
        path = folder / spec.graph[0].path
        if not runs_on_cpu(spec):
            raise DeviceError(
                f"{path} computes in bfloat16, for which ONNX Runtime has no kernels on the CPU: pass device='cuda' or "
                "'tensorrt' (--device), or export the model in another precision."
            )
        try:
            session = self._create_session(path)
        except Exception as error:  # ONNX Runtime raises many classes, none of them public
            if "use_per_session_threads must be false" in str(error):
                raise DeviceError(
                    "This process has ONNX Runtime's shared thread pool, which rules out pools of our own: pass "
                    "shared_thread_pool=True."
                ) from error
            raise BundleError(f"ONNX Runtime {ort.__version__} cannot load {path}: {first_line(error)}") from error
        check_interface(session, spec, path)
        return OrtModel(spec, session, f"ONNX Runtime {ort.__version__}, CPU, {self._threads} threads", self._pool)

    def _create_session(self, path: Path) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.log_severity_level = 4  # what fails is raised, and told in a sentence
        if self._shared:
            options.use_per_session_threads = False
        else:
            options.intra_op_num_threads = self._threads
            options.inter_op_num_threads = 1
            options.add_session_config_entry("session.force_spinning_stop", "1")
        if self._exact_products:
            options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
        # Its fall-back to another provider would try the same again and print a banner.
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"], enable_fallback=0)


class OrtModel:
    """A decoder in an ONNX Runtime session; see Model."""

    def __init__(self, spec: DecoderSpec, session: ort.InferenceSession, engine: str, pool: str) -> None:
        """Keeps the session; used by OrtBackend."""
        self.spec = spec
        self.engine = engine
        self.description = f"{engine} {pool}"
        self._session = session
        keep_in_forks(session)

    def open_context(self, capacity: int, max_rows: int) -> InPlaceContext | GrowingContext:
        """Allocates and binds caches; see Model.open_context."""
        form = GrowingContext if self.spec.lowering == "growing" else InPlaceContext
        try:
            return form(self.spec, self._session, capacity, max_rows)
        except MemoryError as error:
            slots = self.spec.cache_capacity or capacity
            size = self.spec.context_bytes(slots, max_rows)
            raise DeviceError(
                f"A cache of {slots} tokens and {max_rows} rows of logits take {size / 1e9:.2f} GB, which this machine does "
                "not have free: shorten the prompt or lower max_new_tokens."
            ) from error


def available_cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_kernels() -> str:
    """Returns what the CPU's kernels, and so the bits of what they compute, depend on."""
    return f"{processor()}, ONNX Runtime {ort.__version__}"


def create_process_pool(threads: int) -> bool:
    """Makes ONNX Runtime's process-wide pool; False when the process has one already, of a size that cannot be told."""
    try:
        ort.set_global_thread_pool_sizes(threads, 1)
    except Exception as error:  # ONNX Runtime's own class is not public
        if "already been created" not in str(error):
            raise DeviceError(f"ONNX Runtime could not make a shared thread pool: {first_line(error)}") from error
        return False
    return True
