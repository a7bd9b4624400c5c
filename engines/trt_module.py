"""TensorRT's Python module as a parameter: `tensorrt` 10.3 to 11 or `tensorrt_rtx`, and all in which they differ.

What this project uses is the same in all of them, but for what stands here. Networks are always strongly typed (types are the
graph's, so the flags FP16 and INT8, gone in 11, are never needed), and explicit batch is the only kind there is since 10.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runtime.errors import DeviceError

_OLDEST = (10, 3)
# add_attention and add_kv_cache_update, which Attention and TensorScatter are parsed into, are there together since then.
_STATIC_SINCE = (10, 15)
_TITLES = {"tensorrt": "TensorRT", "tensorrt_rtx": "TensorRT-RTX"}
MODULES = tuple(_TITLES)


@dataclass(frozen=True)
class TensorRTModule:
    """One of the two modules.

    Attributes:
        name: "tensorrt" or "tensorrt_rtx".
        trt: The module itself.
    """

    name: str
    trt: Any

    @classmethod
    def load(cls, name: str) -> "TensorRTModule":
        """Imports a module. On a machine without a driver, its builder works and its runtime may crash: probe first.

        Raises:
            DeviceError: It is not installed, cannot be loaded, or is too old.
        """
        try:
            trt = importlib.import_module(name)
        except ImportError as error:
            if isinstance(error.__cause__, KeyboardInterrupt):  # as a module of C++ tells of Ctrl-C
                raise error.__cause__ from None
            raise DeviceError(
                f"The Python module '{name}' cannot be imported ({error}): pip install -e '.[{name.replace('_', '-')}]', or on "
                "a Jetson use the one of its JetPack."
            ) from error
        module = cls(name, trt)
        if not module.is_rtx and module.numbers < _OLDEST:
            raise DeviceError(f"{module.title} is too old: 10.3 (JetPack 6.1) or later is needed.")
        return module

    @property
    def is_rtx(self) -> bool:
        """Whether this is TensorRT-RTX, which compiles for a GPU that need not be there, and finishes on the device."""
        return self.name == "tensorrt_rtx"

    @property
    def version(self) -> str:
        """The module's version."""
        return str(self.trt.__version__)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Major and minor version."""
        return tuple(int(part) for part in self.version.split(".")[:2])

    @property
    def title(self) -> str:
        """Name and version, for people."""
        return f"{_TITLES[self.name]} {self.version}"

    @property
    def lowerings(self) -> tuple[str, ...]:
        """The forms of graph that it builds, best first."""
        return ("static", "primitive") if self.is_rtx or self.numbers >= _STATIC_SINCE else ("primitive",)

    def create_network(self, builder: Any) -> Any:
        """Returns an empty network whose types are those of the graph."""
        return builder.create_network(1 << int(self.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))

    def set_compute_capability(self, config: Any, compute_capability: tuple[int, int]) -> None:
        """Aims a build at a GPU; TensorRT proper always builds for the one it runs on.

        Raises:
            DeviceError: TensorRT-RTX does not know that GPU.
        """
        if not self.is_rtx:
            return
        trt, wanted = self.trt, "SM{}{}".format(*compute_capability)
        known = [name for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
        if wanted not in known:
            raise DeviceError(
                f"{self.title} does not build for compute capability {format_capability(compute_capability)}: it knows "
                f"{', '.join(name[2:] for name in known)}; use the module tensorrt there."
            )
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, wanted), 0)

    def allow_decomposition(self, network: Any) -> None:
        """Lets attention fall apart into several kernels where there is no fused one: float32, or exactly one row.

        The same as the node attribute TRT_decomposable of TensorRT's parser, with which ONNX Runtime would refuse the graph.
        """
        trt = self.trt
        if "ATTENTION_OUTPUT" not in trt.LayerType.__members__:
            return
        for index in range(network.num_layers):
            layer = network.get_layer(index)
            if layer.type == trt.LayerType.ATTENTION_OUTPUT:
                layer.__class__ = trt.IAttentionOutputLayer  # how the bindings narrow what get_layer returns
                layer.attention.decomposable = True

    def create_execution_context(self, engine: Any) -> Any:
        """Returns an execution context that takes the memory of its own profile, not of the largest; None where that fails."""
        trt = self.trt
        on_profile_change = trt.ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE
        if not self.is_rtx:
            return engine.create_execution_context(on_profile_change)
        runtime_config = engine.create_runtime_config()
        runtime_config.set_execution_context_allocation_strategy(on_profile_change)
        # The default compiles kernels for a shape in the background and switches to them when they are done: the same pass
        # would round otherwise from some moment on.
        runtime_config.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
        runtime_config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        return engine.create_execution_context(runtime_config)

    def create_logger(self) -> Any:
        """Returns a logger whose `errors` are the messages of errors, for the sentence that is raised: calls return None."""
        trt = self.trt

        class Logger(trt.ILogger):
            def __init__(self) -> None:
                trt.ILogger.__init__(self)
                self.errors: list[str] = []

            def log(self, severity: Any, msg: str) -> None:
                if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                    self.errors.append(msg)

        return Logger()


def last_error(errors: Sequence[str]) -> str:
    """Returns the last message that tells something, in one line."""
    # A builder without a driver looks for one now and then, and goes on.
    telling = [message for message in errors if "CUDA driver version is insufficient" not in message] or list(errors)
    return one_line(telling[-1]) if telling else "it gives no reason"


def one_line(text: str) -> str:
    """Returns a message on one line of bounded length."""
    return " ".join(text.split())[:400]


def format_capability(compute_capability: tuple[int, int]) -> str:
    """Returns a compute capability as folders and options write it: "86"."""
    return "{}{}".format(*compute_capability)
