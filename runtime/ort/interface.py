"""Whether an ONNX Runtime session has the inputs and outputs that a manifest says: names, element types, sizes.

What differs is refused before a pass: ONNX Runtime would tell it in words of its own, and some of it not at all.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import onnxruntime as ort

from runtime.contract import DecoderSpec
from runtime.errors import BundleError

_CACHE_TYPES = {"float32": "tensor(float)", "float16": "tensor(float16)", "bfloat16": "tensor(bfloat16)"}
_LOGITS_TYPES = (_CACHE_TYPES["float32"], _CACHE_TYPES["float16"])
_BATCH = ("the batch", 1)
_ROWS = ("the number of rows", None)
_GIVEN = "what the runtime gives"


@dataclass(frozen=True)
class _Tensor:
    """What a manifest says of one input or output.

    Attributes:
        types: ONNX Runtime's names of the element types that will do.
        said_by: What has these types, for the sentence.
        axes: What each axis is, for the sentence, and its size; None where the graph must leave it open.
    """

    types: tuple[str, ...]
    said_by: str
    axes: tuple[tuple[str, int | None], ...]


def check_interface(session: ort.InferenceSession, spec: DecoderSpec, path: Path) -> None:
    """Refuses a graph whose inputs and outputs are not those of the manifest.

    Args:
        session: Of the graph.
        spec: What the manifest says.
        path: The graph's file, for the sentence.

    Raises:
        BundleError: The first difference, names before types before sizes.
    """
    inputs = (*session.get_inputs(), *session.get_overridable_initializers())
    for kind, expected, found in (("input", _inputs(spec), inputs), ("output", _outputs(spec), session.get_outputs())):
        _check_names(kind, expected, {value.name for value in found}, path)
        for value in found:
            _check_tensor(value, expected[value.name], f"{path} has the {kind} '{value.name}'")


def _inputs(spec: DecoderSpec) -> dict[str, _Tensor]:
    names, whole = spec.names, ("tensor(int64)",)
    rows = _Tensor(whole, _GIVEN, (_BATCH, _ROWS))
    tensors = {
        names.input_ids: rows,
        names.attention_mask: _Tensor(whole, _GIVEN, (_BATCH, ("the number of tokens", None))),
        names.position_ids: rows,
        names.past_length: _Tensor(whole, _GIVEN, (_BATCH,)),
        names.use_cache_branch: _Tensor(("tensor(bool)",), _GIVEN, (_BATCH,)),
        names.num_logits_to_keep: _Tensor(whole, _GIVEN, ()),
        names.logits_rows: _Tensor(whole, _GIVEN, (_ROWS,)),
    }
    pasts = (past for past, _ in names.cache_pairs(spec.num_layers))
    return {name: tensor for name, tensor in tensors.items() if name is not None} | dict.fromkeys(pasts, _cache(spec))


def _outputs(spec: DecoderSpec) -> dict[str, _Tensor]:
    presents = (present for _, present in spec.names.cache_pairs(spec.num_layers))
    logits = _Tensor(_LOGITS_TYPES, "what the runtime reads", (_BATCH, _ROWS, ("the manifest's vocab_size", spec.vocab_size)))
    return {spec.names.logits: logits} | dict.fromkeys(presents, _cache(spec))


def _cache(spec: DecoderSpec) -> _Tensor:
    axes = (
        _BATCH,
        ("the manifest's num_key_value_heads", spec.num_key_value_heads),
        ("the manifest's cache_capacity", spec.cache_capacity),
        ("the manifest's head_size", spec.head_size),
    )
    return _Tensor((_CACHE_TYPES[spec.cache_dtype],), "the manifest's cache_dtype", axes)


def _check_names(kind: str, expected: Iterable[str], found: set[str], path: Path) -> None:
    if odd := sorted(found.symmetric_difference(expected)):
        raise BundleError(
            f"{path} does not have the {kind}s its manifest names (differing: {', '.join(odd[:4])}): export it again."
        )


def _check_tensor(value: ort.NodeArg, expected: _Tensor, begin: str) -> None:
    if value.type not in expected.types:
        said = f"{expected.said_by} is {' or '.join(expected.types)}"
        raise BundleError(f"{begin} of {value.type}, and {said}: export it again.")
    if len(value.shape) != len(expected.axes):
        raise BundleError(f"{begin} of {len(value.shape)} dimensions, and {len(expected.axes)} are expected: export it again.")
    for found, (what, size) in zip(value.shape, expected.axes, strict=True):
        # A size the graph leaves open is a name or None: it takes any number.
        if isinstance(found, int) and found != size:
            shape = ", ".join(map(str, value.shape))
            said = f"{what} is {'open' if size is None else size}"
            raise BundleError(f"{begin} as [{shape}], and {said}: export it again.")
