"""Whether the fields of a manifest fit each other: what can be told before any graph is opened.

What a graph itself says is held against the manifest where it is loaded (runtime/ort/interface.py for ONNX Runtime).

The standard forms' caches have the size that was chosen at export, and a number tells them what is cached; the other forms are
told by the length of an attention mask, and their callers choose the size.
"""

from dataclasses import fields

from .contract import Bundle, DecoderSpec
from .device_forms import STANDARD_LOWERINGS
from .errors import BundleError


def check_consistency(bundle: Bundle, where: str) -> None:
    """Refuses a manifest whose fields contradict each other.

    Args:
        bundle: The manifest.
        where: Its path, for the sentence.

    Raises:
        BundleError: The first contradiction, with the field, what it is and what is expected.
    """
    if bundle.draft is None and bundle.draft_vocabulary is not None:
        raise BundleError(f"{where} names a draft_vocabulary and no draft: the manifest is damaged, or written by hand.")
    for role, decoder in (("target", bundle.target), ("draft", bundle.draft)):
        for form in () if decoder is None else decoder.forms:
            _check_names(form, f"{where}: {role}")
            _check_past(form, f"{where}: {role}")
            _check_capacity(form, f"{where}: {role}")
        if decoder is not None:
            _check_forms(decoder, f"{where}: {role}")
    width = bundle.target.vocab_size
    if (largest := max(bundle.tokenizer.eos_token_ids, default=0)) >= width:
        raise BundleError(f"{where}: tokenizer: eos_token_ids holds {largest}; the target's ids are 0 to {width - 1}.")


def slots_needed(spec: DecoderSpec) -> int:
    """Returns the slots of a cache that holds a full context and the padding of its last pass."""
    return spec.context_length + spec.most_padding + spec.spare_slots


def _check_forms(decoder: DecoderSpec, where: str) -> None:
    """Holds the forms of a decoder against each other."""
    lowerings = [form.lowering for form in decoder.forms]
    if len(set(lowerings)) < len(lowerings):
        raise BundleError(f"{where}: other_forms gives it the lowerings {', '.join(lowerings)}; each once is expected.")
    for form in decoder.other_forms:
        if form.other_forms:
            raise BundleError(f"{where}: other_forms: '{form.lowering}' has other_forms of its own; one list is expected.")
        if form.vocab_size != decoder.vocab_size:
            raise BundleError(
                f"{where}: other_forms: '{form.lowering}' has a vocab_size of {form.vocab_size}; {decoder.vocab_size} is "
                "expected, as the decoder's first form has it."
            )


def _check_names(spec: DecoderSpec, where: str) -> None:
    """Refuses one name for two inputs or outputs: the second would be bound over the first."""
    bearers: dict[str, str] = {}
    for item in fields(spec.names):
        pattern = None if item.name == "unknown" else getattr(spec.names, item.name)
        if pattern is None:
            continue
        for layer in range(spec.num_layers if "{layer}" in pattern else 1):
            name = pattern.replace("{layer}", str(layer))
            if (other := bearers.setdefault(name, item.name)) != item.name:
                raise BundleError(f"{where}: names: {other} and {item.name} are both '{name}'; a name for each is expected.")


def _check_past(spec: DecoderSpec, where: str) -> None:
    """Holds what tells a graph of its past against the form it has."""
    is_fixed = spec.lowering in STANDARD_LOWERINGS
    for field, is_expected in (("past_length", is_fixed), ("attention_mask", not is_fixed)):
        name = getattr(spec.names, field)
        if (name is not None) != is_expected:
            raise BundleError(
                f"{where}: names: {field} is {'null' if name is None else repr(name)}; "
                f"{'a name' if is_expected else 'null'} is expected with the lowering '{spec.lowering}'."
            )


def _check_capacity(spec: DecoderSpec, where: str) -> None:
    """Holds the slots of a cache against the form of the graph, and the context that is promised."""
    capacity, is_fixed = spec.cache_capacity, spec.lowering in STANDARD_LOWERINGS
    if (capacity is not None) != is_fixed:
        raise BundleError(
            f"{where}: cache_capacity is {'null' if capacity is None else capacity}; {'a number' if is_fixed else 'null'} is "
            f"expected with the lowering '{spec.lowering}'."
        )
    needed = slots_needed(spec)
    if capacity is not None and capacity < needed:
        raise BundleError(
            f"{where}: cache_capacity is {capacity}; at least {needed} is expected, for a context_length of "
            f"{spec.context_length} and a pass's padding."
        )
