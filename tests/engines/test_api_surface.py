"""Every name of TensorRT and of CUDA that the engines package uses is one that exists, in every generation it says it serves.

Nothing here runs an engine: the sources are read, so that a name that is not there fails where there is no GPU.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import pytest

from engines.trt_module import TensorRTModule

ENGINES = Path(__file__).parents[2] / "engines"
# What a variable or an attribute of that name holds, everywhere in the package.
CLASSES = {
    "builder": "Builder",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "parser_error": "ParserError",
    "config": "IBuilderConfig",
    "optimization_profile": "IOptimizationProfile",
    "timing_cache": "ITimingCache",
    "tensor": "ITensor",
    "layer": "IAttentionOutputLayer",
    "attention": "IAttention",
    "runtime_config": "IRuntimeConfig",
    "_runtime": "Runtime",
    "_engine": "ICudaEngine",
    "engine": "ICudaEngine",
    "_execution": "IExecutionContext",
    "execution": "IExecutionContext",
}
# The project's own objects of these names, by module: an engine's file and its record.
OWN = {"bundle.py": {"engine"}, "sidecar.py": {"engine"}}
# Only TensorRT-RTX has these; trt_module.py alone may use them, behind is_rtx.
RTX_ONLY = {
    "ComputeCapability",
    "CudaGraphStrategy",
    "DynamicShapesKernelSpecializationStrategy",
    "IBuilderConfig.num_compute_capabilities",
    "IBuilderConfig.set_compute_capability",
    "IRuntimeConfig.cuda_graph_strategy",
    "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy",
}
# trt_module.py uses these where it has looked that they are there, or where the module is TensorRT-RTX.
GUARDED = {
    "IAttention.decomposable",
    "IAttentionOutputLayer",
    "IAttentionOutputLayer.attention",
    "IAttentionOutputLayer.type",
    "ICudaEngine.create_runtime_config",
    "IRuntimeConfig.set_execution_context_allocation_strategy",
}
# Names that some generation lacks: those that came later than 10.3, and those that 11 took away.
_ATTENTION = {"add_attention", "add_kv_cache_update", "add_rotary_embedding"}
MISSING = {
    "10.3": GUARDED | {f"INetworkDefinition.{name}" for name in _ATTENTION},
    "10.13": {f"INetworkDefinition.{name}" for name in _ATTENTION},
    "10.16": {"Builder.build_engine", "ICudaEngine.get_binding_index", "IExecutionContext.execute_async_v2"},
    "11.4": {
        "BuilderFlag.FP16",
        "BuilderFlag.INT8",
        "BuilderFlag.BF16",
        "NetworkDefinitionCreationFlag.EXPLICIT_BATCH",
        "IBuilderConfig.int8_calibrator",
        "Builder.platform_has_fast_fp16",
        "ICudaEngine.device_memory_size",
        "ICudaEngine.has_implicit_batch_dimension",
    },
}


def last_name(node: ast.expr) -> str | None:
    """The name an expression ends with: `network`, or `_engine` of `self._engine`."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def uses(root: str, classes: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yields (file, dotted name) of what is read of the module `root` and of the objects in `classes`."""
    for file in sorted(ENGINES.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Attribute):
                continue
            holder = last_name(node.value)
            if holder == root:
                yield file.name, node.attr
            elif isinstance(node.value, ast.Attribute) and last_name(node.value.value) == root:
                yield file.name, f"{node.value.attr}.{node.attr}"
            elif holder in classes and holder not in OWN.get(file.name, ()):
                yield file.name, f"{classes[holder]}.{node.attr}"


TENSORRT_USES = sorted(set(uses("trt", CLASSES)))
PYTHONS_OWN = {"__version__", "__class__", "__members__"}


def test_the_walk_sees_what_is_used() -> None:
    found = {name for _, name in TENSORRT_USES}
    assert len(found) > 50
    for name in (
        "Builder",
        "OnnxParser.parse_from_file",
        "BuilderFlag.TF32",
        "IBuilderConfig.progress_monitor",
        "ICudaEngine.create_execution_context",
        "IExecutionContext.execute_async_v3",
        "IExecutionContext.set_tensor_address",
        "Runtime.deserialize_cuda_engine",
        "ParserError.node_operator",
    ):
        assert name in found


@pytest.mark.parametrize(("file", "name"), TENSORRT_USES)
def test_tensorrt_rtx_has_every_name(file: str, name: str) -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install -e '.[tensorrt-rtx]'")
    holder = trt
    for part in name.split("."):
        if part in PYTHONS_OWN:
            return
        assert hasattr(holder, part), f"{file} uses {name}, which TensorRT-RTX {trt.__version__} does not have"
        holder = getattr(holder, part)


@pytest.mark.parametrize("version", sorted(MISSING))
def test_no_generation_lacks_a_name_that_is_used_unguarded(version: str) -> None:
    used = {name for _, name in TENSORRT_USES}
    assert not used & MISSING[version] - GUARDED


def test_what_needs_a_guard_is_in_the_module_that_has_them() -> None:
    for names in (GUARDED, RTX_ONLY):
        assert {file for file, name in TENSORRT_USES if name in names} == {"trt_module.py"}


def test_a_generation_without_attention_is_not_asked_for_it() -> None:
    old = TensorRTModule("tensorrt", SimpleNamespace(LayerType=Enum("LayerType", ["CONVOLUTION"])))
    old.allow_decomposition(network=None)


CUDA_USES = sorted(set(uses("cudart", {})))


@pytest.mark.parametrize(("file", "name"), CUDA_USES)
def test_cuda_bindings_have_every_name(file: str, name: str) -> None:
    holder = pytest.importorskip("cuda.bindings.runtime", reason="needs cuda-bindings: pip install cuda-bindings")
    assert file == "cuda.py"
    for part in name.split("."):
        assert hasattr(holder, part), f"{file} uses {name}, which cuda-bindings does not have"
        holder = getattr(holder, part)


def test_all_of_cuda_is_in_one_module() -> None:
    assert len(CUDA_USES) > 20
    for file in ENGINES.glob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert ("cuda.bindings" in text) == (file.name == "cuda.py")
