"""The second way from a checkpoint to a graph: optimum, for architectures that mobius does not know.

optimum traces the model in torch, so what it writes is a `growing` graph of small operators, right for whatever transformers
runs and optimum has a configuration for. Where all its attentions are recognised it becomes a base graph, which every lowering
takes; where not, it stays as it is, several times slower than a `gqa` graph.
"""

import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import onnx_ir as ir

from .errors import ExportError
from .graph_edit import CONTRIB
from .known_models import check_known
from .optimum_fusion import fuse_decoder
from .source import Source

EXPORTERS = ("auto", "mobius", "optimum")
_TASK = "text-generation-with-past"


def choose_exporter(source: Source, asked: str) -> str:
    """Returns "mobius" or "optimum": what is to make a source's graph.

    Args:
        source: A checkpoint or a GGUF file.
        asked: One of EXPORTERS; "auto" is mobius, and optimum where it is installed and mobius does not know the model.

    Raises:
        ExportError: optimum is asked for and not installed, or cannot read the source; or the model is not known.
    """
    if asked not in EXPORTERS:
        raise ExportError(f"The source of graphs '{asked}' is unknown; there are {', '.join(EXPORTERS)}.")
    if asked == "optimum" and source.kind != "folder":
        raise ExportError(f"optimum reads Hugging Face folders, and {source.name} is none: leave --source out.")
    if asked == "optimum" and _installed() is None:
        raise ExportError("--source optimum needs the package optimum-onnx: pip install '.[export,optimum]'.")
    check_known(source, can_trace=asked != "mobius" and can_trace(source))
    if asked != "auto" or not can_trace(source):
        return asked if asked == "optimum" else "mobius"
    import mobius

    return "mobius" if source.architecture in mobius.registry else "optimum"


def can_trace(source: Source) -> bool:
    """Tells whether optimum is installed and reads such a source; whether it knows the model shows when it is asked."""
    return source.kind == "folder" and _installed() is not None


@dataclass(frozen=True)
class TracedGraph:
    """A graph that optimum made.

    Attributes:
        model: A base graph; or, where something in it was not recognised, a `growing` one.
        unrecognised: A sentence on the first such thing; None where there is none.
    """

    model: ir.Model
    unrecognised: str | None


@contextmanager
def optimum_graph(source: Source, folder: Path, context_length: int) -> Iterator[TracedGraph]:
    """Lends a checkpoint's graph as optimum exports it, in float32; its weights stay on the disk while it is lent.

    Args:
        source: Of kind "folder".
        folder: Where the work may lie; it is removed from there at the end.
        context_length: Tokens it must serve.

    Raises:
        ExportError: optimum cannot export it.
    """
    work = folder / ".optimum"
    try:
        model, unrecognised = _export(source, work), None
        try:
            fuse_decoder(model, context_length)
        except ExportError as error:
            # What it has rewritten so far is lost with the model.
            model, unrecognised = _load(work), str(error)
        yield TracedGraph(model, unrecognised)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _export(source: Source, work: Path) -> ir.Model:
    import transformers
    from optimum.exporters.onnx import main_export

    transformers.logging.set_verbosity_error()
    logging.getLogger("optimum").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tracer's, one for each Python condition in the model
            main_export(
                str(source.path), work, task=_TASK, dtype="fp32", device="cpu", do_validation=False, local_files_only=True
            )
        return _load(work)
    except Exception as error:  # whatever transformers, the tracer and optimum raise
        reason = str(error).strip().partition("\n")[0][:300]
        raise ExportError(
            f"optimum-onnx {_installed()} could not export {source.name} ('{source.architecture}'): "
            f"{type(error).__name__}: {reason}"
        ) from error


def _load(work: Path) -> ir.Model:
    model = ir.load(work / "model.onnx")
    model.opset_imports.setdefault(CONTRIB, 1)  # for the quantised operators
    return model


def _installed() -> str | None:
    try:
        return version("optimum-onnx")
    except PackageNotFoundError:
        return None
