"""TensorRT's module without a GPU: engines are ONNX graphs, which ONNX Runtime computes when the fake stream comes to them.

What TensorRT demands is checked: every tensor bound, a cache bound under both names to one address, shapes within the profile,
a profile before anything else. What is broken returns False or None and leaves the reason in the log, as TensorRT does. Kernels
of another profile than the first can be made to round otherwise, far more than real ones would.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort

from engines.profiles import Profile

from .fake_cuda import FakeCudart

_TYPES = {"tensor(int64)": np.int64, "tensor(float)": np.float32, "tensor(float16)": np.float16}


class AllocationStrategy(enum.Enum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1


class SpecializationStrategy(enum.Enum):
    LAZY = 0
    EAGER = 1


class CudaGraphStrategy(enum.Enum):
    DISABLED = 0
    WHOLE_GRAPH_CAPTURE = 1


class RuntimeConfig:
    """Of TensorRT-RTX."""

    def __init__(self) -> None:
        self.allocation = AllocationStrategy.STATIC
        self.dynamic_shapes_kernel_specialization_strategy = SpecializationStrategy.LAZY
        self.cuda_graph_strategy = CudaGraphStrategy.DISABLED

    def set_execution_context_allocation_strategy(self, strategy: AllocationStrategy) -> None:
        self.allocation = strategy


def write_engine(path: Path, graph: Path, profiles: tuple[Profile, ...]) -> None:
    """Writes what the fake runtime takes for an engine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ranges = [(profile.min_rows, profile.max_rows) for profile in profiles]
    path.write_text(json.dumps({"graph": str(graph), "profiles": ranges}))


def fake_module(cudart: FakeCudart, version: str = "10.16.1.11") -> SimpleNamespace:
    """Returns what stands for the module `tensorrt`.

    On it, `passes` tells (profile, rows) of every pass that was computed, `logits_rows` how many of each got logits, and
    `rounding` is what a profile's number times that adds to the keys, values and logits of each row it computes.
    """

    class ILogger:
        ERROR, INTERNAL_ERROR, WARNING = "ERROR", "INTERNAL_ERROR", "WARNING"

        def log(self, severity: Any, msg: str) -> None:
            raise NotImplementedError

    class Runtime:
        def __init__(self, logger: ILogger) -> None:
            self._logger = logger

        def deserialize_cuda_engine(self, plan: bytes) -> FakeEngine | None:
            try:
                contents = json.loads(plan)
            except ValueError:
                self._logger.log(ILogger.ERROR, "Magic tag does not match")
                return None
            return FakeEngine(contents, cudart, module, lambda message: self._logger.log(ILogger.ERROR, message))

    module = SimpleNamespace(
        __version__=version,
        ILogger=ILogger,
        Runtime=Runtime,
        ExecutionContextAllocationStrategy=AllocationStrategy,
        DynamicShapesKernelSpecializationStrategy=SpecializationStrategy,
        CudaGraphStrategy=CudaGraphStrategy,
        float32=np.dtype(np.float32),
        passes=[],
        logits_rows=[],
        rounding=0.0,
    )
    return module


class FakeEngine:
    def __init__(self, contents: Any, cudart: FakeCudart, module: SimpleNamespace, log: Callable[[str], None]) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self.session = ort.InferenceSession(contents["graph"], options, providers=["CPUExecutionProvider"])
        self.profiles: list[tuple[int, int]] = contents["profiles"]
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        self.outputs = {value.name: value for value in self.session.get_outputs()}
        self.cudart, self.module, self.log = cudart, module, log
        self.runtime_configs: list[RuntimeConfig | None] = []

    def get_tensor_dtype(self, name: str) -> np.dtype:
        return np.dtype(_TYPES[(self.inputs | self.outputs)[name].type])

    def create_runtime_config(self) -> RuntimeConfig:
        return RuntimeConfig()

    def create_execution_context(self, strategy: AllocationStrategy | RuntimeConfig) -> FakeExecutionContext:
        config = strategy if isinstance(strategy, RuntimeConfig) else None
        assert (strategy if config is None else config.allocation) is AllocationStrategy.ON_PROFILE_CHANGE
        self.runtime_configs.append(config)
        return FakeExecutionContext(self)


class FakeExecutionContext:
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._profile: int | None = None
        self._addresses: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        assert 0 <= profile < len(self._engine.profiles)
        self._engine.cudart.stream(stream).give(lambda: None)
        self._profile = profile
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        if name not in self._engine.inputs | self._engine.outputs:
            return self._refuse(f"no tensor {name}")
        self._addresses[name] = address
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self._profile is not None
        low, high = self._engine.profiles[self._profile]
        declared = self._engine.inputs[name].shape
        fits = len(declared) == len(shape) and all(
            size == wanted if isinstance(wanted, int) else low <= size <= high
            for size, wanted in zip(shape, declared, strict=True)
        )
        if not fits:
            return self._refuse(f"{name} of shape {shape} is out of profile {self._profile}")
        self._shapes[name] = shape
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        engine = self._engine
        if missing := (engine.inputs | engine.outputs).keys() - self._addresses.keys():
            return self._refuse(f"{sorted(missing)} are not bound")
        if missing := engine.inputs.keys() - self._shapes.keys():
            return self._refuse(f"{sorted(missing)} have no shape")
        for name in engine.outputs:
            if name.startswith("present"):
                past = name.replace("present", "past_key_values")
                if self._addresses[name] != self._addresses[past]:
                    return self._refuse(f"{name} must share the address of {past}")
        # Addresses and shapes are those of now; what lies there is that of then.
        addresses, shapes = dict(self._addresses), dict(self._shapes)
        engine.cudart.stream(stream_handle).give(lambda: self._compute(addresses, shapes))
        return True

    def _compute(self, addresses: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
        engine = self._engine
        feeds = {}
        for name, shape in shapes.items():
            dtype = engine.get_tensor_dtype(name)
            size = int(np.prod(shape)) * dtype.itemsize
            feeds[name] = engine.cudart.device_bytes(addresses[name], size).view(dtype).reshape(shape).copy()
        assert self._profile is not None
        names = list(engine.outputs)
        outputs = dict(zip(names, engine.session.run(names, feeds), strict=True))
        if "past_length" in feeds:
            begin, rows = int(feeds["past_length"][0]), feeds["input_ids"].shape[1]
            for name, values in outputs.items():
                computed = values if name == "logits" else values[:, :, begin : begin + rows]
                computed += self._profile * engine.module.rounding
            engine.module.passes.append((self._profile, rows))
            engine.module.logits_rows.append(shapes.get("logits_rows", (rows,))[0])
        for name, values in outputs.items():
            contents = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
            engine.cudart.device_bytes(addresses[name], contents.size)[:] = contents

    def _refuse(self, message: str) -> bool:
        self._engine.log(message)
        return False
