"""Which architectures can be exported, told before any work, and which stand closest to one that cannot."""

import difflib
from collections.abc import Collection

from .errors import ExportError
from .source import Source, read_json


def check_known(source: Source, *, can_trace: bool = False) -> None:
    """Refuses an architecture that nothing here builds.

    Args:
        source: A checkpoint or a GGUF file.
        can_trace: Whether what mobius does not know may be traced as transformers computes it.

    Raises:
        ExportError: It is unknown, or known to the checkpoint's own code only, which is never run.
    """
    import mobius
    from mobius.integrations.gguf._config_mapping import GGUF_ARCH_TO_MODEL_TYPE

    if source.kind == "gguf":
        if GGUF_ARCH_TO_MODEL_TYPE.get(source.architecture, source.architecture) not in mobius.registry:
            known = _closest(source.architecture, GGUF_ARCH_TO_MODEL_TYPE)
            raise ExportError(
                f"{source.name} is a GGUF file of a '{source.architecture}' model, which mobius-onnx {mobius.__version__} does "
                f"not read; closest known: {known}."
            )
        return
    if source.architecture in mobius.registry:
        return
    transformers_types = _transformers_types() if can_trace else ()
    if source.architecture in transformers_types:
        return
    if "auto_map" in read_json(source.path / "config.json", source.name):
        raise ExportError(
            f"{source.name} is a '{source.architecture}' model, which only code of its own computes (auto_map in config.json), "
            "and that is never run here: take a model that transformers itself knows, or pass an ONNX graph of this one."
        )
    by_whom = (
        f"mobius-onnx {mobius.__version__} does not know" if not can_trace else "neither mobius-onnx nor transformers knows"
    )
    known = _closest(source.architecture, {*mobius.registry.architectures(), *transformers_types})
    raise ExportError(f"{source.name} is a '{source.architecture}' model, which {by_whom}; closest known: {known}.")


def _transformers_types() -> Collection[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    types: Collection[str] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    return types


def _closest(name: str, known: Collection[str]) -> str:
    names = sorted(known)
    return ", ".join(difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names[:3])
