"""Graphs of optimum in every lowering, and ones with a part that no lowering could keep: they stay as they are, and right."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from export.decoders import write_decoder
from export.errors import ExportError
from export.lowerings import LOWERINGS
from export.lowerings.writer import Writer
from export.optimum_fusion import fuse_decoder
from export.parity import check_parity
from export.role import Role
from export.source import Source, resolve_source
from runtime.contract import DecoderSpec
from runtime.decoder import Decoder
from runtime.graph_metadata import CONTEXT_LENGTH, read_metadata
from runtime.ort.backend import OrtBackend

Change = Callable[[ir.Graph], None]
Export = Callable[..., tuple[DecoderSpec, list[str]]]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("optimum") is None, reason="needs optimum: pip install '.[export,optimum]'"
)
CONTEXT = 64
WINDOW = 48
# The tiny target's weights under other names: what differs is the code that transformers traces.
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
# Its norms of queries and keys are not in the file: transformers makes them with weights of one, and they are saved so.
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
GEMMA = {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "hidden_activation": "gelu_pytorch_tanh"}


@pytest.fixture(scope="module")
def sources(tiny_target: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    from transformers import AutoModelForCausalLM

    folders = {"llama": tiny_target, "qwen2": tiny_draft}
    configs = {
        "mistral": MISTRAL,
        "window": MISTRAL | {"sliding_window": WINDOW},
        "qwen3": QWEN3,
        "gemma": GEMMA,
    }
    for name, config in configs.items():
        folders[name] = tmp_path_factory.mktemp("sources") / name
        shutil.copytree(tiny_target, folders[name])
        path = folders[name] / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | config), encoding="utf-8")
        if name == "qwen3":
            AutoModelForCausalLM.from_pretrained(folders[name]).save_pretrained(folders[name])
    return {name: resolve_source(str(folder)) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def traced(sources: dict[str, Source], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that returns the folder of optimum's graph of a source, made once; "eager" is a way to trace "llama"."""
    from optimum.exporters.onnx import main_export, onnx_export_from_model
    from transformers import AutoModelForCausalLM

    options = {"task": "text-generation-with-past", "do_validation": False}

    @functools.cache
    def trace(name: str) -> Path:
        folder = tmp_path_factory.mktemp("traces") / name
        if name == "eager":
            model = AutoModelForCausalLM.from_pretrained(sources["llama"].path, attn_implementation="eager")
            onnx_export_from_model(model, folder, **options)
        else:
            main_export(str(sources[name].path), folder, dtype="fp32", **options)
        return folder

    return trace


@pytest.fixture
def export(
    sources: dict[str, Source], traced: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Export:
    """A function that exports a source by way of optimum, its trace changed; returns the spec and what the export said."""

    def run(
        name: str,
        lowering: str = "gqa",
        precision: str = "fp32",
        change: Change = lambda _: None,
        context_length: int = CONTEXT,
    ) -> tuple[DecoderSpec, list[str]]:
        def main_export(path: str, work: Path, **options: object) -> None:
            work.mkdir()
            model = ir.load(traced(name) / "model.onnx")
            change(model.graph)
            ir.save(model, work / "model.onnx")

        monkeypatch.setattr("optimum.exporters.onnx.main_export", main_export)
        said: list[str] = []
        role = Role("target", sources[name], precision, context_length, exporter="optimum", lowering=lowering)
        spec = write_decoder(role, tmp_path, lambda title, *_: said.append(title))
        return spec, [title for title in said if "slower form" in title]

    return run


def logits(spec: DecoderSpec, folder: Path, tokens: list[int], *cuts: int) -> NDArray[np.float32]:
    """Of a text in pieces: float32 [len(tokens), vocab_size]."""
    decoder = Decoder(OrtBackend(threads=1).load(spec, folder), len(tokens), num_rows=len(tokens))
    bounds = itertools.pairwise((0, *cuts, len(tokens)))
    return np.concatenate([decoder.forward(tokens[start:end], end - start).copy() for start, end in bounds])


def traced_logits(folder: Path, tokens: list[int], change: Change) -> NDArray[np.float32]:
    """What optimum's graph itself computes, changed in the same way."""
    model = ir.load(folder / "model.onnx")
    change(model.graph)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    feeds: dict[str, np.ndarray] = {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, len(tokens)), np.int64)}
    for value in session.get_inputs():
        if value.name == "position_ids":
            feeds[value.name] = np.arange(len(tokens))[None]
        elif value.name not in feeds:
            feeds[value.name] = np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
    return session.run(["logits"], feeds)[0][0]


# --- what is recognised -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral"])
def test_computes_what_the_checkpoint_does_and_says_what_the_other_way_does(
    export: Export, sources: dict[str, Source], tmp_path: Path, probe: list[int], name: str, lowering: str
):
    spec, said = export(name, lowering)
    assert (spec.lowering, said) == (lowering, [])
    (parity,) = check_parity(sources[name], [spec], tmp_path, probe)
    assert max(figures["max_difference"] for figures in parity.values()) < 1e-3
    (tmp_path / "other").mkdir()
    other = write_decoder(
        Role("target", sources[name], "fp32", CONTEXT, lowering=lowering), tmp_path / "other", lambda *_: None
    )
    assert greedy(spec, tmp_path, probe[:20]) == greedy(other, tmp_path / "other", probe[:20])


def greedy(spec: DecoderSpec, folder: Path, prompt: list[int]) -> list[int]:
    decoder = Decoder(OrtBackend(threads=1).load(spec, folder), len(prompt) + 24, num_rows=1)
    tokens = list(prompt)
    for _ in range(24):
        tokens.append(int(decoder.forward(tokens[decoder.past_length :], 1)[0].argmax()))
    return tokens


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("llama", {"RMSNormalization": 9}),
        ("eager", {"RMSNormalization": 9}),
        ("qwen3", {"RMSNormalization": 17, "Reshape": 16}),
    ],
)
def test_the_graph_is_the_base_graph(traced: Callable[[str], Path], name: str, others: dict[str, int]):
    model = ir.load(traced(name) / "model.onnx")
    # The guard that sdpa has around its Softmax.
    assert any(node.op_type == "IsNaN" for node in model.graph) == (name != "eager")
    fuse_decoder(model, CONTEXT)
    assert {node.attributes.get_float("scale") for node in model.graph if node.op_type == "Attention"} == {0.25}
    found = Counter(node.op_type for node in model.graph if node.op_type not in ("Constant", "Transpose"))
    # A Gather for the embedding, and for the rows of one pair of tables for all layers; nothing reads a shape.
    layers = {"Attention": 4, "RotaryEmbedding": 8, "Sigmoid": 4, "Mul": 8, "Add": 8}
    assert found == {"MatMul": 29, "Gather": 3} | layers | others
    assert all(value.dtype is not None for node in model.graph for value in node.outputs)


@pytest.mark.parametrize(("lowering", "precision"), [("gqa", "int4"), ("static", "fp16"), ("primitive", "int4")])
def test_precisions_of_the_lowerings(
    export: Export, sources: dict[str, Source], tmp_path: Path, probe: list[int], lowering: str, precision: str
):
    spec, _ = export("qwen2", lowering, precision)
    check_parity(sources["qwen2"], [spec], tmp_path, probe)
    assert (spec.lowering, spec.precision) == (lowering, precision)


def test_positions_that_the_graph_counts_become_an_input(
    export: Export, traced: Callable[[str], Path], tmp_path: Path, probe: list[int]
):
    inputs = {value.name for value in ir.load(traced("gemma") / "model.onnx").graph.inputs}
    assert "position_ids" not in inputs
    spec, said = export("gemma")
    assert (spec.lowering, said) == ("gqa", [])
    expected = traced_logits(traced("gemma"), probe[:40], lambda _: None)
    np.testing.assert_allclose(logits(spec, tmp_path, probe[:40], 20, 39), expected, atol=1e-3)


# --- what is broken on purpose ----------------------------------------------------------------------------------------


def nodes(graph: ir.Graph, name: str) -> list[ir.Node]:
    """Nodes whose names end so, by layer."""
    return [node for node in graph if node.name.endswith(name)]


def replaced(graph: ir.Graph, node: ir.Node, index: int, op_type: str, *others: ir.Value, **attributes: object) -> None:
    """Puts an operator between a node and one of its inputs."""
    new = ir.node(op_type, [node.inputs[index], *others], attributes=attributes or None, name=f"broken_{op_type}")
    graph.insert_before(node, new)
    node.replace_input_with(index, new.outputs[0])


def another_scale(graph: ir.Graph) -> None:
    node = nodes(graph, "layers.1/self_attn/Mul_8")[0]
    node.replace_input_with(1, Writer(graph).scalar(0.9, np.float32))


def scores_over_channels(graph: ir.Graph) -> None:
    node = nodes(graph, "layers.1/self_attn/MatMul")[0]
    factors = ir.Value(name="factors", const_value=ir.tensor(np.linspace(0.5, 1.5, 16, dtype=np.float32)))
    graph.register_initializer(factors)
    replaced(graph, node, 0, "Mul", factors)


def distance_bias(graph: ir.Graph) -> None:
    """ALiBi: the further back, the less weight, in the second layer alone."""
    node = nodes(graph, "layers.1/self_attn/Add_2")[0]
    write = Writer(graph)
    total = write.op("Squeeze", write.op("Shape", graph.inputs[1], start=1, end=2))
    places = write.op("Cast", write.op("Range", write.scalar(0, np.int64), total, write.scalar(1, np.int64)), to=1)
    bias = write.op("Mul", places, write.scalar(0.05, np.float32))
    graph.insert_before(node, write.nodes)
    replaced(graph, node, 1, "Add", bias)


def everyone_sees_everyone(graph: ir.Graph) -> None:
    node = nodes(graph, "layers.1/self_attn/Add_2")[0]
    replaced(graph, node, 1, "Mul", Writer(graph).scalar(0, np.float32))


def heads_in_another_order(graph: ir.Graph) -> None:
    # With as many groups as heads in each, repeating the whole lot has the same shapes as repeating each.
    axes = ir.node("Constant", [], attributes={"value": ir.tensor(np.array([1]))})
    node = nodes(graph, "layers.1/self_attn/Unsqueeze_10")[0]
    graph.insert_before(node, axes)
    node.replace_input_with(1, axes.outputs[0])


def fourth_powers(graph: ir.Graph) -> None:
    nodes(graph, "layers.1/input_layernorm/Pow")[0].replace_input_with(1, Writer(graph).scalar(4, np.float32))


def capped_scores(graph: ir.Graph) -> None:
    replaced(graph, nodes(graph, "layers.1/self_attn/Add_2")[0], 0, "Tanh")


def squared_keys(graph: ir.Graph) -> None:
    node = nodes(graph, "layers.1/self_attn/Concat_5")[0]
    replaced(graph, node, 1, "Mul", node.inputs[1])


def gated_values(graph: ir.Graph) -> None:
    replaced(graph, nodes(graph, "layers.1/self_attn/Concat_6")[0], 1, "Tanh")


def a_cache_read_twice(graph: ir.Graph) -> None:
    cache = next(value for value in graph.outputs if value.name == "present.1.key")
    logit = next(node for node in graph if node.outputs[0].name == "logits")
    write = Writer(graph)
    sums = write.op(
        "ReduceSum", write.op("ReduceSum", cache, write.integers(1, 2, 3), keepdims=0), write.integers(0), keepdims=0
    )
    graph.insert_before(logit, write.nodes)
    replaced(graph, logit, 0, "Add", sums)


BROKEN: dict[Change, str] = {
    distance_bias: r"Layer 1's attention '.*' adds a positional bias",
    everyone_sees_everyone: r"Layer 1's attention '.*' (is not causal|adds)",
    scores_over_channels: "Layer 1's query is no rotary embedding by position",
    heads_in_another_order: r"Layer 1's attention reads its keys by Transpose '/model/layers.1/self_attn/Transpose_3'",
    fourth_powers: r"ReduceMean '/model/layers.1/input_layernorm/ReduceMean' is no part of x / sqrt",
    capped_scores: "Layer 1's attention has scores from Tanh 'broken_Tanh', not from query and keys",
    squared_keys: "Layer 1's key is no rotary embedding by position",
    gated_values: "Layer 1's value is no rotary embedding by position",
    a_cache_read_twice: "Layer 1's cache is read outside its attention, by ReduceSum",
}


@pytest.mark.parametrize(("change", "reason"), BROKEN.items(), ids=lambda item: getattr(item, "__name__", ""))
def test_what_is_not_recognised_stays_as_it_is_and_says_so(
    export: Export,
    sources: dict[str, Source],
    traced: Callable[[str], Path],
    tmp_path: Path,
    probe: list[int],
    change: Change,
    reason: str,
):
    spec, said = export("llama", change=change)
    assert spec.lowering == "growing"
    assert read_metadata(tmp_path / spec.graph[0].path)[CONTEXT_LENGTH] == str(sources["llama"].context_length)
    (sentence,) = said
    assert re.search(reason, sentence), sentence
    expected = traced_logits(traced("llama"), probe[:40], change)
    assert np.abs(expected - traced_logits(traced("llama"), probe[:40], lambda _: None)).max() > 0.1
    np.testing.assert_allclose(logits(spec, tmp_path, probe[:40]), expected, atol=1e-3)


def test_another_scale_is_kept(export: Export, traced: Callable[[str], Path], tmp_path: Path, probe: list[int]):
    spec, said = export("llama", change=another_scale)
    assert (spec.lowering, said) == ("gqa", [])
    expected = traced_logits(traced("llama"), probe[:40], another_scale)
    assert np.abs(expected - traced_logits(traced("llama"), probe[:40], lambda _: None)).max() > 0.1
    np.testing.assert_allclose(logits(spec, tmp_path, probe[:40], 20, 39), expected, atol=1e-3)


def test_a_window_is_fused_only_where_it_never_slides(export: Export, tmp_path: Path):
    spec, said = export("window", context_length=WINDOW)
    assert (spec.lowering, said) == ("gqa", [])
    shutil.rmtree(tmp_path / "target")
    spec, (sentence,) = export("window", context_length=WINDOW + 2)
    assert spec.lowering == "growing"
    assert "hides the token at 1 from the one at 49, as a sliding window or chunks would" in sentence


@pytest.mark.parametrize(
    ("lowering", "precision", "option"), [("static", "fp32", "--lowering static"), ("gqa", "fp16", "fp16")]
)
def test_what_needs_the_base_graph_is_refused_with_the_reason(export: Export, lowering: str, precision: str, option: str):
    with pytest.raises(
        ExportError, match=rf"{option} needs more of .* than was recognised. Layer 1's attention has scores from"
    ):
        export("llama", lowering, precision, capped_scores)
