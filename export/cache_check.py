"""The check of a graph that has no checkpoint to be held against: that it computes, and that its cache can be relied on."""

import itertools
from pathlib import Path

import numpy as np

from runtime.backend import Model
from runtime.contract import DecoderSpec
from runtime.decoder import Decoder
from runtime.errors import DeviceError, SpecError
from runtime.ort.backend import OrtBackend

from .errors import ExportError
from .graph_interface import computes_one_row, last_row_only
from .parity import Comparison

# Nats. Sound graphs in fp32, fp16 and int4 stayed below 1e-5; one whose attention does not read its cache is far above.
TOLERANCE = 0.01
_CUTS = (20, 25)  # a prompt, a proposal, the rest; no lone row, which some kernels compute on another path


def check_cache(spec: DecoderSpec, folder: Path, token_ids: list[int]) -> dict[str, float]:
    """Computes a text in one pass, and in three, before each of which other tokens are fed and taken back.

    Args:
        spec: The decoder, its min_rows 1.
        folder: The bundle's folder.
        token_ids: At least 30 tokens of an ordinary text.

    Returns:
        How far the pieces are from the whole, for the manifest.

    Raises:
        ExportError: The graph does not load, gives one row of logits only, gives NaN, or its pieces are not the whole.
    """
    try:
        if computes_one_row(folder / spec.graph[0].path):
            raise ExportError(last_row_only(Path(spec.source)))
        model = OrtBackend().load(spec, folder)
        if not _gives_every_row(model, token_ids):
            raise ExportError(last_row_only(Path(spec.source)))
        comparison = _compare_pieces(model, token_ids)
    except SpecError as error:
        raise ExportError(f"{spec.source} cannot be used: {error}") from error
    if not comparison.divergence <= TOLERANCE:
        raise ExportError(
            f"{spec.source} gives other logits for a text in pieces than for the whole text (mean divergence "
            f"{comparison.divergence:.3g} nats, {comparison.same_top_token:.0%} of the top tokens agree): its attention does "
            "not see the cached tokens and the new ones rightly when a pass has several; export it with a newer exporter."
        )
    return comparison.rounded()


def _gives_every_row(model: Model, token_ids: list[int]) -> bool:
    try:
        Decoder(model, 3, num_rows=3).forward(token_ids[:3], 3)
    except DeviceError:
        # Where one row alone goes well, the three failed because one came back; else this raises what is wrong.
        Decoder(model, 1, num_rows=1).forward(token_ids[:1], 1)
        return False
    return True


def _compare_pieces(model: Model, token_ids: list[int]) -> Comparison:
    length = len(token_ids)
    whole = Decoder(model, length, num_rows=length).forward(token_ids, length)
    decoder = Decoder(model, length, num_rows=length)
    pieces = []
    for start, end in itertools.pairwise((0, *_CUTS, length)):
        # Other tokens first, and back: what they leave in the cache must not show.
        decoder.forward(token_ids[::-1][: end - start], 1)
        decoder.rewind_to(start)
        pieces.append(decoder.forward(token_ids[start:end], end - start).copy())
    return Comparison.of(whole, np.concatenate(pieces))
