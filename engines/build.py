"""One engine from one graph: parse, profiles, build. Works without a GPU where TensorRT-RTX does.

TensorRT returns None where it fails and says why in its log only, so the log is kept and becomes the error's sentence.
"""

import contextlib
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from runtime.contract import DecoderSpec
from runtime.errors import BundleError, DeviceError
from runtime.top_logits import top_logits_graph

from .cuda import CudaDevice
from .profiles import Profile, input_shapes
from .trt_module import TensorRTModule, last_error, one_line

# How much of the build is done, from 0 to 1, and what TensorRT calls the part at hand.
Report = Callable[[float, str], None]
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class BuildOptions:
    """What a user may choose.

    Attributes:
        workspace_bytes: The most scratch memory a kernel may take; None for all there is.
        timing_cache: A file with the timings of earlier builds, read and written; None for none.
        device_number: The GPU to build on, from 0 on; None where there need not be one.
    """

    workspace_bytes: int | None = None
    timing_cache: Path | None = None
    device_number: int | None = None


@dataclass(frozen=True)
class BuiltEngine:
    """A built engine and how it came about; see EngineRecord for the fields.

    Attributes:
        plan: The engine as TensorRT serialises it.
    """

    plan: bytes
    flags: dict[str, bool | int | None]
    build_seconds: float
    peak_memory: int


def call_interruptibly(function: Callable[[threading.Event], _Result]) -> _Result:
    """Calls a function in a thread of its own, so that Ctrl-C is heard while TensorRT works; it is told by the event."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(function, stop)
        try:
            return called.result()
        except BaseException:
            # It ends at TensorRT's next step and clears up; a second Ctrl-C must not leave what was half done.
            while not called.done():
                with contextlib.suppress(KeyboardInterrupt):
                    stop.set()
                    wait([called])
            raise


def build_engine(
    tensorrt: TensorRTModule,
    spec: DecoderSpec,
    graph: Path,
    compute_capability: tuple[int, int],
    profiles: tuple[Profile, ...],
    options: BuildOptions,
    report: Report,
    stop: threading.Event,
) -> BuiltEngine:
    """Builds a decoder's engine; nothing is written but the timing cache.

    Args:
        tensorrt: What builds it.
        spec: The decoder.
        graph: Its ONNX file.
        compute_capability: Of the GPU that will run it.
        profiles: Sizes of passes.
        options: The user's choices.
        report: Told of progress, from the thread that builds.
        stop: Ends the build at its next step when set.

    Raises:
        BundleError: TensorRT does not take the graph, or the graph is not the manifest's.
        DeviceError: The GPU is not one it builds for, or the build failed or was stopped.
    """
    started = time.perf_counter()
    _reset_peak_memory()
    if options.device_number is not None:
        CudaDevice(options.device_number).use()
    trt, logger = tensorrt.trt, tensorrt.create_logger()
    builder = trt.Builder(logger)
    network = tensorrt.create_network(builder)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(graph)):
        raise BundleError(f"{tensorrt.title} does not take {graph}: {_parser_sentence(parser)}")
    _check_inputs(network, spec, graph)
    tensorrt.allow_decomposition(network)
    config = builder.create_builder_config()
    flags = _configure(tensorrt, config, compute_capability, options)
    for profile in profiles:
        config.add_optimization_profile(_new_profile(builder, spec, profile))
    config.progress_monitor = _new_progress_monitor(trt, report, stop)
    if options.timing_cache is not None:
        _read_timing_cache(tensorrt, config, options.timing_cache)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        if stop.is_set():
            raise DeviceError(f"The build of {graph} was stopped.")
        raise DeviceError(f"{tensorrt.title} could not build {graph}: {_build_sentence(last_error(logger.errors), spec)}")
    if options.timing_cache is not None:
        _write_timing_cache(config, options.timing_cache)
    return BuiltEngine(bytes(plan), flags, time.perf_counter() - started, _peak_memory())


def build_top_engine(
    tensorrt: TensorRTModule,
    spec: DecoderSpec,
    fixed_rows: int,
    count: int,
    compute_capability: tuple[int, int],
    options: BuildOptions,
) -> bytes:
    """Builds what finds the largest logits of a decoder's step; see runtime.top_logits.

    Args:
        tensorrt: What builds it.
        spec: The decoder.
        fixed_rows: Rows of its step.
        count: How many logits of each row to find.
        compute_capability: Of the GPU that will run it.
        options: The user's choices.

    Raises:
        DeviceError: The build failed.
    """
    logger = tensorrt.create_logger()
    builder = tensorrt.trt.Builder(logger)
    network = tensorrt.create_network(builder)
    parser = tensorrt.trt.OnnxParser(network, logger)
    graph = top_logits_graph(half=False, rows=fixed_rows, vocab_size=spec.vocab_size, count=count)
    config = builder.create_builder_config()
    _configure(tensorrt, config, compute_capability, options)
    plan = builder.build_serialized_network(network, config) if parser.parse(graph) else None
    if plan is None:
        raise DeviceError(
            f"{tensorrt.title} could not build what finds the {count} largest of {spec.vocab_size} logits: "
            f"{last_error(logger.errors)}"
        )
    return bytes(plan)


def _parser_sentence(parser: Any) -> str:
    """Names the node and the operator of the parser's first error."""
    parser_error = parser.get_error(0)
    # What follows is a complaint that there is no driver, which is no error of the graph.
    reason = one_line(parser_error.desc().partition("[checkMacros")[0])
    if not parser_error.node_operator():
        return reason
    return f"its operator {parser_error.node_operator()} (node '{parser_error.node_name()}') is not supported ({reason})"


def _build_sentence(reason: str, spec: DecoderSpec) -> str:
    """Adds what to do where a GPU lacks the types of a graph, as Turing (7.5) does float32 products and int4."""
    if "Cannot compile" not in reason or spec.precision == "fp16":
        return reason
    return f"{reason}; that GPU may lack what {spec.precision} needs: export the model in fp16"


def _check_inputs(network: Any, spec: DecoderSpec, graph: Path) -> None:
    """Refuses a graph whose inputs are not the manifest's, or whose shapes depend on more than the number of rows."""
    tensors = [network.get_input(index) for index in range(network.num_inputs)]
    found = {tensor.name: tuple(tensor.shape) for tensor in tensors}
    expected = input_shapes(spec, -1, -1)  # -1 is what TensorRT writes for a size that is open
    if differing := {name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)}:
        name = min(differing)
        raise BundleError(
            f"{graph} has the input '{name}' as {found.get(name, 'nothing')} where the manifest says "
            f"{expected.get(name, 'nothing')}: export it again."
        )
    if shape_inputs := [tensor.name for tensor in tensors if tensor.is_shape_tensor]:
        raise BundleError(
            f"{graph} computes shapes from the numbers in '{shape_inputs[0]}', so its passes cannot be enqueued ahead: "
            "export it again."
        )


def _new_profile(builder: Any, spec: DecoderSpec, profile: Profile) -> Any:
    sizes = zip((profile.min_rows, profile.opt_rows, profile.max_rows), profile.logits_rows, strict=True)
    shapes = [input_shapes(spec, rows, logits_rows) for rows, logits_rows in sizes]
    optimization_profile = builder.create_optimization_profile()
    for name in shapes[0]:
        optimization_profile.set_shape(name, *(shape[name] for shape in shapes))
    return optimization_profile


def _configure(
    tensorrt: TensorRTModule, config: Any, compute_capability: tuple[int, int], options: BuildOptions
) -> dict[str, bool | int | None]:
    trt = tensorrt.trt
    tensorrt.set_compute_capability(config, compute_capability)
    # On by default, it would round the factors of float32 products to 10 bits: not what the bundle promises.
    config.clear_flag(trt.BuilderFlag.TF32)
    if options.workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    return {"strongly_typed": True, "tf32": False, "workspace_bytes": options.workspace_bytes}


def _read_timing_cache(tensorrt: TensorRTModule, config: Any, path: Path) -> None:
    if tensorrt.is_rtx:
        raise ValueError(f"{tensorrt.title} times nothing when it builds: leave --timing-cache out.")
    timing_cache = config.create_timing_cache(path.read_bytes() if path.is_file() else b"")
    if not config.set_timing_cache(timing_cache, ignore_mismatch=False):
        raise ValueError(f"The timing cache {path} is of another GPU or TensorRT: choose another file, or delete it.")


def _write_timing_cache(config: Any, path: Path) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(bytes(config.get_timing_cache().serialize()))
    partial.replace(path)


def _new_progress_monitor(trt: Any, report: Report, stop: threading.Event) -> Any:
    """Returns a monitor that turns TensorRT's nested phases into one number; an exception in it would only be printed."""

    class ProgressMonitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._phases: list[tuple[str, int]] = []  # from the outermost in: name and number of steps
            self._steps_done: dict[str, int] = {}
            self._reported = 0.0

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:  # noqa: ARG002
            self._phases.append((phase_name, num_steps))
            self._steps_done[phase_name] = 0

        def step_complete(self, phase_name: str, step: int) -> bool:
            self._steps_done[phase_name] = step + 1
            fraction = 0.0
            for name, steps in reversed(self._phases):
                fraction = min(1.0, (self._steps_done[name] + fraction) / max(steps, 1))
            # Phases may be skipped, or begin again: what is shown never goes back.
            self._reported = max(self._reported, fraction)
            report(self._reported, phase_name)
            return not stop.is_set()

        def phase_finish(self, phase_name: str) -> None:
            self._phases = [phase for phase in self._phases if phase[0] != phase_name]

    return ProgressMonitor()


def _reset_peak_memory() -> None:
    with contextlib.suppress(OSError):  # Linux; elsewhere the peak is that of the whole process
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
