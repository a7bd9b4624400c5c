"""Bit-equal rows on a machine the exporter did not measure on: measured when a model is first loaded there, and kept.

What the manifest says of rows holds for the processor and the ONNX Runtime that the exporter had. Other kernels, and a GPU's,
are measured anew, by about a hundred passes; the answer stands in a file beside the manifest, or is measured at each load where
the folder cannot be written.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .backend import Backend, Model
from .checks import is_whole, shown
from .contract import DecoderSpec
from .errors import BundleError
from .row_equality import PaddedModel, PassShape, measure_fixed_rows, measure_row_equality
from .steps import SteppedModel

ROWS = "rows.json"
_INEXACT = "a row's last bits depend on its pass here, so a text may depend on what is proposed"
EXACT = "every row has the same bits, however the text is cut"
_FORMAT_VERSION = 1
_MOST_ROWS = 64  # more are not tried, unless a manifest asks for them


@dataclass(frozen=True)
class RowMeasurement:
    """How a decoder's passes must be shaped, somewhere.

    Attributes:
        shape: Padding that makes every cut of a text give the same bits; None where none does.
        fixed_rows: Where none does, the rows of a step that does; None where no step does either, or none is needed.
    """

    shape: PassShape | None
    fixed_rows: int | None = None

    @classmethod
    def of(cls, model: Model, token_ids: Sequence[int]) -> "RowMeasurement":
        """Measures; arguments as measure_row_equality has."""
        shape = measure_row_equality(model, token_ids)
        return cls(shape, None if shape is not None else measure_fixed_rows(model, token_ids))

    @property
    def sentence(self) -> str:
        """What it means, for people."""
        if self.shape is not None:
            return EXACT
        if self.fixed_rows is not None:
            return f"every row has the same bits, computed in steps of {self.fixed_rows}"
        return _INEXACT


def load_measured(
    backend: Backend, spec: DecoderSpec, folder: Path, kernels: str | None, token_ids: Sequence[int]
) -> tuple[Model, str]:
    """Loads a decoder such that its rows' bits do not depend on how a text is cut, where that can be had.

    Args:
        backend: Where it runs.
        spec: The decoder, as the manifest has it.
        folder: The bundle's.
        kernels: What the CPU's kernels depend on (runtime.ort.backend.cpu_kernels); None on any other device, where the
            engine's name says it.
        token_ids: An ordinary text of at least 48 tokens, a multiple of 16.

    Returns:
        The model, and what holds of its rows, a sentence for people.

    Raises:
        BundleError: The file of measurements is damaged; or as the backend raises.
        DeviceError: As the backend raises.
    """
    model = backend.load(spec, folder)
    if kernels is not None and model.spec.rows_measured_on in (None, kernels):
        return model, EXACT
    place = kernels or model.engine
    kept = _Kept(folder)
    graph = model.spec.graph[0].sha256
    measured = kept.find(place, graph, max(_MOST_ROWS, model.spec.min_rows) * model.spec.row_multiple)
    if measured is None:
        measured = RowMeasurement.of(model, token_ids)
        kept.add(place, graph, measured)
    sentence = f"{measured.sentence} (measured on {place})"
    if measured.fixed_rows is not None:
        return SteppedModel(model, measured.fixed_rows), sentence
    if measured.shape in (None, (model.spec.min_rows, model.spec.row_multiple)):
        return model, sentence
    return PaddedModel(model, measured.shape), sentence


class _Kept:
    """The file of measurements: by place, by the graph's hash."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ROWS

    def find(self, place: str, graph: str, most_rows: int) -> RowMeasurement | None:
        entry = self._read().get(place, {}).get(graph)
        if entry is None:
            return None
        try:
            shape, fixed_rows = entry["shape"], entry["fixed_rows"]
            return RowMeasurement(
                None if shape is None else PassShape(*(_rows(number, most_rows) for number in shape)),
                None if fixed_rows is None else _rows(fixed_rows, most_rows),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(error) from error

    def add(self, place: str, graph: str, measured: RowMeasurement) -> None:
        document = self._read()
        document.setdefault(place, {})[graph] = {"shape": measured.shape, "fixed_rows": measured.fixed_rows}
        text = json.dumps({"format_version": _FORMAT_VERSION, "measured": document}, indent=2) + "\n"
        partial = self._path.with_name(f".{ROWS}.partial")
        with contextlib.suppress(OSError):  # a folder that cannot be written: measured again next time
            partial.write_text(text, encoding="utf-8")
            partial.replace(self._path)

    def _read(self) -> dict[str, Any]:
        if not self._path.is_file():
            return {}
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
            if document["format_version"] != _FORMAT_VERSION:
                return {}
            return {str(place): dict(graphs) for place, graphs in document["measured"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> BundleError:
        return BundleError(f"{self._path} is damaged ({error}): remove it, and the rows are measured again.")


def _rows(value: object, most: int) -> int:
    """Returns a number of rows as it stands in the file; raises ValueError, naming it, unless it is one."""
    if not is_whole(value) or not 1 <= value <= most:
        raise ValueError(f"{shown(value)} rows where 1 to {most} are expected")
    return value
