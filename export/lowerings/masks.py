"""Says whether an attention's mask is the plain causal one, by computing it for small and for late passes.

A lowering makes the causal mask anew, so whatever else a mask holds would be lost: a sliding window, a prefix that sees
itself, a bias by distance. What operators a graph makes its mask from does not tell which; what comes out of them does.
"""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from export.errors import ExportError

from .attention import AttentionLayer, read_attention_layers
from .finish import remove_unread_nodes

# Cached tokens and rows of the passes that are tried, beside one at the end of the context, where every window shows.
_SMALL_PASSES = ((0, 1), (0, 5), (3, 1), (3, 4))
_LAST_ROWS = 2
# A score this far below the others has no weight in float32.
_HIDDEN = -10_000.0
_POSITIONAL_INPUTS = frozenset({"attention_mask", "position_ids", "input_ids"})
# Of these, what they hold tells where tokens stand, and nothing else.
_PLACES = frozenset({"attention_mask", "position_ids"})
_IR_VERSION = 11
_MASK_INPUT = 3


def drop_causal_masks(graph: ir.Graph, context_length: int, lowering: str) -> None:
    """Takes the masks from a graph whose every row sees all tokens up to its own, and refuses any other graph.

    Args:
        graph: The base graph; its attention nodes lose their masks.
        context_length: The longest text; a window shorter than that is found.
        lowering: The lowering's name, for what is refused.

    Raises:
        ExportError: There is no attention, or a mask is another one; the sentence says what it does.
    """
    seen: set[tuple[ir.Value | None, bool]] = set()
    layers = read_attention_layers(graph, lowering)
    for layer in layers:
        if (layer.mask, layer.is_causal) not in seen:
            seen.add((layer.mask, layer.is_causal))
            _require_causal(graph, layer, context_length, lowering)
    for layer in layers:
        layer.node.replace_input_with(_MASK_INPUT, None)
    remove_unread_nodes(graph)


def _require_causal(graph: ir.Graph, layer: AttentionLayer, context_length: int, lowering: str) -> None:
    where = f"Layer {layer.index}'s attention '{layer.node.name}'"
    mask = None if layer.mask is None else _MaskGraph(graph, layer.mask, where, lowering)
    for past, rows in (*_SMALL_PASSES, (context_length - _LAST_ROWS, _LAST_ROWS)):
        causal = np.tri(rows, past + rows, past, dtype=bool)
        shown = causal if layer.is_causal else np.ones_like(causal)
        if mask is not None:
            shown = shown & mask.visible(past, rows)
        ahead, missing = np.argwhere(shown & ~causal), np.argwhere(causal & ~shown)
        if len(ahead):
            raise ExportError(f"{where} is not causal, or lets a prefix see itself: only decoders can be exported.")
        if len(missing):
            row, token = (int(place) for place in missing[-1][-2:])
            raise ExportError(
                f"{where} hides the token at {token} from the one at {past + row}, as a sliding window or chunks would; the "
                f"{lowering} lowering keeps plain causal masks only: pass a shorter --max-length, or take another model."
            )


class _MaskGraph:
    """The part of a graph that makes a mask, as a session."""

    def __init__(self, graph: ir.Graph, mask: ir.Value, where: str, lowering: str) -> None:
        self._where, self._lowering = where, lowering
        inputs = [value for value in graph.inputs if value.name in _POSITIONAL_INPUTS or _is_cache(value)]
        try:
            part = ir.convenience.extract(graph, inputs, [mask])
        except ValueError as error:
            raise self._dependent("more inputs than the places of tokens") from error
        for value in part.inputs:
            if value.name not in _PLACES and any(reader.op_type != "Shape" for reader, _ in value.uses()):
                raise self._dependent("which tokens there are" if value.name == "input_ids" else "what is cached")
        # A cache's length may be what tells where a row stands.
        caches = [value for value in part.inputs if _is_cache(value)]
        self._caches = {value.name: (int(value.shape[1]), int(value.shape[3])) for value in caches}
        part.outputs[0].name = "mask"
        part.opset_imports.update(graph.opset_imports)
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        model = ir.to_proto(ir.Model(part, ir_version=_IR_VERSION)).SerializeToString()
        self._session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def visible(self, past: int, rows: int) -> NDArray[np.bool_]:
        """Returns bool [any, rows, past + rows]: which tokens a row may see, in each head where they differ.

        Raises:
            ExportError: The mask weighs tokens instead of showing or hiding them.
        """
        feeds = {
            "attention_mask": np.ones((1, past + rows), np.int64),
            "position_ids": np.arange(past, past + rows)[None],
            "input_ids": np.zeros((1, rows), np.int64),
        }
        for name, (heads, width) in self._caches.items():
            feeds[name] = np.zeros((1, heads, past, width), np.float32)
        names = [value.name for value in self._session.get_inputs()]
        mask = self._session.run(None, {name: feeds[name] for name in names})[0]
        if mask.dtype != bool:
            if not ((mask == 0) | (mask <= _HIDDEN)).all():
                raise ExportError(
                    f"{self._where} adds a positional bias to its scores (as ALiBi does); the {self._lowering} lowering keeps "
                    "plain causal masks only: take a model that tells places by rotation or by a table."
                )
            mask = mask == 0
        return np.broadcast_to(mask, (*mask.shape[:-2], rows, past + rows)).reshape(-1, rows, past + rows)

    def _dependent(self, what: str) -> ExportError:
        return ExportError(
            f"{self._where} has a mask that depends on {what}; the {self._lowering} lowering keeps plain causal masks only."
        )


def _is_cache(value: ir.Value) -> bool:
    return value.shape is not None and len(value.shape) == 4
