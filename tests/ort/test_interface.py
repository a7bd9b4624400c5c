"""A manifest held against a graph's inputs and outputs: each name, type and size, one sentence for what differs."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime.contract import DecoderSpec, GraphNames
from runtime.errors import BundleError
from runtime.ort.interface import check_interface

PATH = Path("target/model.onnx")
OPTIONAL = {name: name for name in ("position_ids", "use_cache_branch", "num_logits_to_keep")}
OPEN = DecoderSpec(
    source="made",
    architecture="llama",
    graph=(),
    lowering="gqa",
    precision="fp32",
    num_layers=2,
    num_key_value_heads=3,
    head_size=8,
    vocab_size=50,
    context_length=64,
    cache_dtype="float32",
    spare_slots=1,
    min_rows=1,
    names=GraphNames(**OPTIONAL),
)
FIXED = replace(OPEN, lowering="static", cache_capacity=80, names=GraphNames(attention_mask=None, past_length="past_length"))
# The sizes of these in a graph whose caches are open, and of past_length in one that fixes them.
SHAPES = {
    "input_ids": ("int64", ["batch", "rows"]),
    "attention_mask": ("int64", ["batch", "past + rows"]),
    "position_ids": ("int64", ["batch", "rows"]),
    "use_cache_branch": ("bool", [1]),
    "num_logits_to_keep": ("int64", []),
    "past_length": ("int64", [1]),
    "logits": ("float", ["batch", "rows", 50]),
}


def session_of(spec: DecoderSpec, **changes: tuple[str, list[str | int | None]]) -> SimpleNamespace:
    """A session with the inputs and outputs of a spec, those in `changes` (dots as __) of another type and shape."""
    pairs = list(spec.names.cache_pairs(spec.num_layers))
    cache = ("float", [1, 3, 80, 8] if spec.cache_capacity else ["batch", 3, "past", 8])
    values = SHAPES | {name: cache for pair in pairs for name in pair} | {k.replace("__", "."): v for k, v in changes.items()}

    def nodes(names: set[str]) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name, type=f"tensor({values[name][0]})", shape=values[name][1]) for name in sorted(names)]

    inputs, outputs = spec.names.inputs(spec.num_layers), {spec.names.logits, *(present for _, present in pairs)}
    return SimpleNamespace(
        get_inputs=lambda: nodes(inputs - {"use_cache_branch"}),
        get_overridable_initializers=lambda: nodes(inputs & {"use_cache_branch"}),
        get_outputs=lambda: nodes(outputs),
    )


@pytest.mark.parametrize("spec", [OPEN, FIXED], ids=["open", "fixed"])
def test_a_graph_that_is_the_manifests_passes(spec: DecoderSpec) -> None:
    check_interface(session_of(spec), spec, PATH)


@pytest.mark.parametrize("width", ["vocabulary", None])
def test_what_the_graph_leaves_open_contradicts_nothing(width: str | None) -> None:
    check_interface(session_of(OPEN, logits=("float16", [None, None, width])), OPEN, PATH)
    check_interface(session_of(OPEN, past_key_values__1__key=("float", [None, "heads", None, width])), OPEN, PATH)


@pytest.mark.parametrize(
    ("spec", "name", "value", "sentence"),
    [
        (OPEN, "input_ids", ("int32", ["batch", "rows"]), r"of tensor\(int32\), and what the runtime gives is tensor\(int64\)"),
        (OPEN, "input_ids", ("int64", ["rows"]), "of 1 dimensions, and 2 are expected"),
        (OPEN, "input_ids", ("int64", [4, "rows"]), r"as \[4, rows\], and the batch is 1"),
        (OPEN, "input_ids", ("int64", [1, 1]), r"as \[1, 1\], and the number of rows is open"),
        (OPEN, "attention_mask", ("bool", ["batch", "rows"]), r"of tensor\(bool\), and what the runtime gives"),
        (OPEN, "attention_mask", ("int64", [1, 128]), "and the number of tokens is open"),
        (OPEN, "position_ids", ("float", ["batch", "rows"]), r"of tensor\(float\)"),
        (OPEN, "use_cache_branch", ("int64", [1]), r"what the runtime gives is tensor\(bool\)"),
        (OPEN, "num_logits_to_keep", ("int64", [1]), "of 1 dimensions, and 0 are expected"),
        (FIXED, "past_length", ("int64", []), "of 0 dimensions, and 1 are expected"),
        (FIXED, "past_length", ("int32", [1]), r"of tensor\(int32\)"),
        (OPEN, "logits", ("double", ["batch", "rows", 50]), r"what the runtime reads is tensor\(float\) or tensor\(float16\)"),
        (OPEN, "logits", ("float", ["batch", 1, 50]), "and the number of rows is open"),
        (OPEN, "logits", ("float", ["batch", "rows", 51]), r"as \[batch, rows, 51\], and the manifest's vocab_size is 50"),
        # Not of the first layer's key alone.
        *[
            (OPEN, name, value, sentence)
            for name in ("past_key_values.1.value", "present.0.key", "present.1.value")
            for value, sentence in (
                (("float16", ["batch", 3, "past", 8]), r"and the manifest's cache_dtype is tensor\(float\)"),
                (("float", ["batch", 4, "past", 8]), "and the manifest's num_key_value_heads is 3"),
                (("float", ["batch", 3, 80, 8]), "and the manifest's cache_capacity is open"),
                (("float", ["batch", 3, "past", 9]), r"as \[batch, 3, past, 9\], and the manifest's head_size is 8"),
            )
        ],
        (FIXED, "present.1.key", ("float", [1, 3, 96, 8]), "and the manifest's cache_capacity is 80"),
    ],
)
def test_what_differs_is_named_with_what_was_found_and_expected(
    spec: DecoderSpec, name: str, value: tuple[str, list[str | int | None]], sentence: str
) -> None:
    with pytest.raises(BundleError, match=rf"model\.onnx has the \w+ '{name}' .*{sentence}.*: export it again\.$"):
        check_interface(session_of(spec, **{name.replace(".", "__"): value}), spec, PATH)


@pytest.mark.parametrize(
    "names",
    [{"past_value": "past_key_values.{layer}.key"}, {"present_value": "present.{layer}.key"}, {"attention_mask": "input_ids"}],
)
def test_one_name_for_two_things_is_refused(names: dict[str, str]) -> None:
    spec = replace(OPEN, names=replace(OPEN.names, **names))
    with pytest.raises(BundleError, match=r"does not have the (inputs|outputs) its manifest names"):
        check_interface(session_of(OPEN), spec, PATH)
