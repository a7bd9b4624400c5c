"""A decoder of two layers in the form of the `static` lowering, made by hand: no export, no torch, well under a second."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from runtime.contract import Bundle, DecoderSpec, FileRecord, GraphNames, TokenizerSpec
from runtime.manifest import save_bundle

LAYERS, HEADS, KEY_VALUE_HEADS, HEAD_SIZE, HIDDEN, VOCAB = 2, 4, 2, 16, 32, 48
CONTEXT, CAPACITY = 48, 64
NAMES = GraphNames(attention_mask=None, past_length="past_length", logits_rows="logits_rows")


class _Tape:
    """Nodes and constants in the order they are made."""

    def __init__(self, seed: int, dtype: type[np.floating]) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self._random, self._dtype = np.random.default_rng(seed), dtype

    def op(self, operator: str, inputs: list[str], output: str = "", domain: str = "", **attributes: object) -> str:
        output = output or f"value.{len(self.nodes)}"
        node = helper.make_node(operator, inputs, [output], name=f"node.{output}", domain=domain, **attributes)
        self.nodes.append(node)
        return output

    def ints(self, *values: int, scalar: bool = False) -> str:
        return self._constant(np.array(values[0] if scalar else values, np.int64))

    def weights(self, *shape: int, scale: float = 0.3) -> str:
        return self._constant(self._random.normal(0, scale, shape).astype(self._dtype))

    def number(self, value: float) -> str:
        return self._constant(np.array(value, self._dtype))

    def _constant(self, values: np.ndarray) -> str:
        self.constants.append(numpy_helper.from_array(values, f"constant.{len(self.constants)}"))
        return self.constants[-1].name


def build_tiny_graph(
    dtype: type[np.floating] = np.float32,
    *,
    seed: int = 0,
    capacity: int | str = CAPACITY,
    vocab: int = VOCAB,
    extra_operator: str | None = None,
    shapes_from_past: bool = False,
    chooses_rows: bool = True,
) -> onnx.ModelProto:
    """Returns the graph.

    Args:
        dtype: Of weights, activations and caches.
        seed: Of the weights.
        capacity: Slots of a cache; a string for a size that is open.
        vocab: Width of the logits.
        extra_operator: One more node at the end, of an operator that TensorRT refuses.
        shapes_from_past: Add an output whose shape depends on the value of past_length.
        chooses_rows: Whether an input says which rows get logits, as the exporter has it wherever it can.
    """
    tape = _Tape(seed, dtype)
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    rows = tape.op("Squeeze", [tape.op("Shape", ["input_ids"], start=1, end=2)])
    zero, one = tape.ints(0, scalar=True), tape.ints(1, scalar=True)
    positions = tape.op("Add", [tape.op("Range", [zero, rows, one]), "past_length"])
    slots = tape.ints(*range(capacity if isinstance(capacity, int) else CAPACITY))
    seen = tape.op("LessOrEqual", [slots, tape.op("Unsqueeze", [positions, tape.ints(1)])])
    mask = tape.op("Where", [seen, tape.number(0), tape.number(-60000)])
    mask = tape.op("Unsqueeze", [mask, tape.ints(0, 1)])
    state = tape.op("Gather", [tape.weights(vocab, HIDDEN, scale=1), "input_ids"])
    # Positions by a table, so that a row in the wrong slot shows.
    state = tape.op("Add", [state, tape.op("Gather", [tape.weights(CAPACITY, HIDDEN, scale=1), positions])])
    caches = []
    for layer in range(LAYERS):
        heads = {}
        for name, number in (("query", HEADS), ("key", KEY_VALUE_HEADS), ("value", KEY_VALUE_HEADS)):
            product = tape.op("MatMul", [state, tape.weights(HIDDEN, number * HEAD_SIZE)])
            split = tape.op("Reshape", [product, tape.ints(1, -1, number, HEAD_SIZE)])
            heads[name] = tape.op("Transpose", [split], perm=[0, 2, 1, 3])
        for name in ("key", "value"):
            past, present = f"past_key_values.{layer}.{name}", f"present.{layer}.{name}"
            caches.append((past, tape.op("TensorScatter", [past, heads[name], "past_length"], present, axis=2)))
        inputs = [heads["query"], caches[-2][1], caches[-1][1], mask]
        attended = tape.op("Transpose", [tape.op("Attention", inputs)], perm=[0, 2, 1, 3])
        joined = tape.op("Reshape", [attended, tape.ints(1, -1, HEADS * HEAD_SIZE)])
        state = tape.op("Add", [state, tape.op("MatMul", [joined, tape.weights(HEADS * HEAD_SIZE, HIDDEN)])])
    chosen = tape.op("Gather", [state, "logits_rows"], axis=1) if chooses_rows else state
    logits = tape.op("MatMul", [chosen, tape.weights(HIDDEN, vocab)])
    tape.op("Cast", [logits], "logits", to=onnx.TensorProto.FLOAT)
    rows_of_logits = "logits_rows" if chooses_rows else "rows"
    outputs = [helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, [1, rows_of_logits, vocab])]
    domains = [helper.make_opsetid("", 24)]
    if extra_operator == "NonZero":
        outputs.append(helper.make_tensor_value_info(tape.op("NonZero", ["input_ids"]), onnx.TensorProto.INT64, [2, "k"]))
    elif extra_operator == "GroupQueryAttention":
        tape.op("GroupQueryAttention", [state, state, state], "attended", "com.microsoft", num_heads=2, kv_num_heads=2)
        outputs.append(helper.make_tensor_value_info("attended", element, [1, "rows", HIDDEN]))
        domains.append(helper.make_opsetid("com.microsoft", 1))
    if shapes_from_past:
        length = tape.op("Squeeze", ["past_length"])
        outputs.append(helper.make_tensor_value_info(tape.op("Range", [zero, length, one]), onnx.TensorProto.INT64, ["past"]))
    inputs = [
        helper.make_tensor_value_info("input_ids", onnx.TensorProto.INT64, [1, "rows"]),
        helper.make_tensor_value_info("past_length", onnx.TensorProto.INT64, [1]),
    ]
    if chooses_rows:
        inputs.append(helper.make_tensor_value_info("logits_rows", onnx.TensorProto.INT64, ["logits_rows"]))
    for past, present in caches:
        shape = [1, KEY_VALUE_HEADS, capacity, HEAD_SIZE]
        inputs.append(helper.make_tensor_value_info(past, element, shape))
        outputs.append(helper.make_tensor_value_info(present, element, shape))
    graph = helper.make_graph(tape.nodes, "tiny", inputs, outputs, tape.constants)
    return helper.make_model(graph, opset_imports=domains, ir_version=11)


def write_tiny_bundle(folder: Path, dtype: type[np.floating] = np.float32, *, with_draft: bool = True) -> Bundle:
    """Writes a bundle of tiny graphs: a target, and a draft of other weights."""
    (folder / "tokenizer.json").write_text("{}")
    tokenizer = TokenizerSpec(FileRecord.of(folder, "tokenizer.json"), None, None, None, (0,), VOCAB)
    target = write_decoder(folder, "target", build_tiny_graph(dtype), dtype)
    draft = write_decoder(folder, "draft", build_tiny_graph(dtype, seed=1), dtype) if with_draft else None
    bundle = Bundle(folder, tokenizer, target, draft, "tests")
    save_bundle(bundle)
    return bundle


def write_decoder(folder: Path, name: str, model: onnx.ModelProto, dtype: type[np.floating] = np.float32) -> DecoderSpec:
    """Writes a graph into a bundle's folder and returns what its manifest says of it."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / name / "model.onnx")
    chooses_rows = any(value.name == "logits_rows" for value in model.graph.input)
    return DecoderSpec(
        source=f"some/{name}",
        architecture="llama",
        graph=(FileRecord.of(folder, f"{name}/model.onnx"),),
        lowering="static",
        precision="fp32" if dtype == np.float32 else "fp16",
        num_layers=LAYERS,
        num_key_value_heads=KEY_VALUE_HEADS,
        head_size=HEAD_SIZE,
        vocab_size=VOCAB,
        context_length=CONTEXT,
        cache_dtype=np.dtype(dtype).name,
        spare_slots=0,
        min_rows=1,
        names=NAMES if chooses_rows else replace(NAMES, logits_rows=None),
        cache_capacity=CAPACITY,
    )


def with_lowering(bundle: Bundle, lowering: str) -> Bundle:
    """Returns a bundle whose target says it has another lowering, and what a manifest says of such a one."""
    changes = {} if lowering in ("static", "primitive") else {"names": GraphNames(), "cache_capacity": None}
    return replace(bundle, target=replace(bundle.target, lowering=lowering, **changes))
