"""Further lowerings for a bundle that is there: whatever it holds stays as it is, and only what is new is made.

Tokenizers, token counts and vocabularies are the bundle's own, and weights with the same bytes are not stored again. All forms,
old ones too, are compared with the checkpoint, so that a bundle never holds two models under one name. The work is done in a
twin of the folder, made of hard links where the disk allows it, which takes the folder's place at the end.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.contract import Bundle, DecoderSpec
from runtime.draft_vocabulary import DraftVocabulary
from runtime.manifest import load_bundle, read_manifest, save_bundle
from runtime.memory import free_memory

from .bundle import tokenizer_of
from .decoders import base_graph_of, check_decoders, exporter_of, write_decoder
from .errors import ExportError
from .links import link_or_copy
from .lowerings import GQA_HALF, STANDARD_FORMS
from .memory import check_memory
from .options import check_kept_forms, check_no_bundle
from .probe import probe_tokens
from .quantization import BLOCK_SIZE
from .role import GPTQ, SEARCH, Report, Role
from .source import Source, resolve_source
from .staging import check_disk, staged
from .steps import Steps, planned_steps

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def add_lowerings(
    folder: Path,
    lowering: str,
    *,
    target: str | None = None,
    draft: str | None = None,
    exporter: str = "auto",
    report: Report = lambda _title, _done, _total: None,
) -> Bundle:
    """Adds forms to both decoders of a bundle, in the precision and for the context that they have.

    Args:
        folder: The bundle's.
        lowering: The forms: one of "gqa", "gqa-half", "static" and "primitive", or several with commas between.
        target: Where the target's checkpoint is; None where the name in the manifest leads there.
        draft: Likewise of the draft; not needed where it was made of the target's own weights.
        exporter: What makes the checkpoints' graphs, see export_bundle; "auto" is what made those that are there.
        report: Told what happens, for progress bars.

    Returns:
        The bundle as written.

    Raises:
        ExportError: The bundle has these forms, or a decoder of which no other form can be made; a checkpoint is not there, or
            is not the one that the bundle was made from; or another process is at work on it. The bundle stays as it was.
        BundleError: There is no bundle, or a damaged one.
    """
    named, folder = folder, folder.resolve()
    bundle = load_bundle(folder)
    report("reading the sources", 0, 0)
    roles = _roles(bundle, lowering, target, draft, exporter)
    heads = {} if bundle.draft is None else _head_of_draft(bundle)
    try:
        check_disk(folder, roles)
        check_memory(roles, free_memory())
        with staged(folder) as staging:
            if read_manifest(folder) != bundle:  # what was planned for is gone, and would be written over
                raise ExportError(f"The bundle {folder} was changed by another export meanwhile: begin anew.")
            shutil.copytree(folder, staging, copy_function=_link, dirs_exist_ok=True)
            added = _write(replace(bundle, folder=staging), roles, heads, Steps(planned_steps(roles), report))
            save_bundle(added)
    except OSError as error:
        raise ExportError(f"The bundle {folder} could not be added to: {error.strerror or error}.") from error
    return replace(added, folder=named)


def _roles(bundle: Bundle, lowering: str, target: str | None, draft: str | None, exporter: str) -> list[Role]:
    """Returns what is to be made, checked as far as it can be before the work."""
    sources = {"target": _source("target", target, bundle.target)}
    if bundle.draft is not None:
        is_self = draft is None and bundle.draft.source == bundle.target.source
        sources["draft"] = sources["target"] if is_self else _source("draft", draft, bundle.draft)
    elif draft is not None:
        raise ExportError(f"--draft names a draft model, and the bundle {bundle.folder} has none: leave it out.")
    roles = []
    for name, source in sources.items():
        spec = _decoder(bundle, name)
        size = spec.block_size or BLOCK_SIZE
        _check_model(bundle, name, source)
        there = tuple(form.lowering for form in spec.forms)
        made_by = exporter_of(source, (spec.exporter or exporter) if exporter == "auto" else exporter)
        quantizer = spec.quantizer or SEARCH
        role = Role(name, source, spec.precision, spec.context_length, size, made_by, lowering, quantizer, beside=there)
        check_kept_forms(role)
        if quantizer == GPTQ and set(role.lowerings) & set(STANDARD_FORMS) and not set(there) & set(STANDARD_FORMS):
            raise ExportError(
                f"The {name} in {bundle.folder} was rounded by GPTQ with scales of either sign, which "
                f"{' and '.join(STANDARD_FORMS)} cannot have: export the bundle anew with all its lowerings, --lowering "
                "gqa,static for example."
            )
        if again := [lowering for lowering in there if lowering in role.lowerings]:
            raise ExportError(f"The {name} in {bundle.folder} has the lowering {again[0]} already: leave it out.")
        roles.append(role)
    if not any(role.lowerings for role in roles):
        raise ExportError(
            f"The bundle {bundle.folder} is in {' and '.join(dict.fromkeys(role.precision for role in roles))}, where gqa and "
            f"{GQA_HALF} are the same graph, and has it already: leave {lowering} out."
        )
    return [role for role in roles if role.lowerings]


def _source(name: str, given: str | None, spec: DecoderSpec) -> Source:
    if spec.lowering == "growing" or "prefill" not in spec.parity:
        raise ExportError(
            f"The graph of the bundle's {name}, {spec.source}, is kept as another exporter made it, and no other form can be "
            "made of it: export its checkpoint."
        )
    named = spec.source if given is None else given
    check_no_bundle(named)
    try:
        return resolve_source(named)
    except ExportError as error:
        if given is not None:
            raise
        raise ExportError(
            f"The bundle's {name} was made from '{spec.source}', which does not lead to it from here ({error}): pass "
            f"--{name} with its place."
        ) from error


def _check_model(bundle: Bundle, name: str, source: Source) -> None:
    """Refuses before the work what is plainly another model; whether it has the same weights shows when it is compared.

    Raises:
        ExportError: It is one; the sentence says by what.
    """
    spec, facts = _decoder(bundle, name), {}
    if (source.kind == "gguf") == spec.source.endswith(".gguf"):  # GGUF has names of its own
        facts["architecture"] = (source.architecture, spec.architecture)
    if source.num_layers:
        facts["number of layers"] = (source.num_layers, spec.num_layers)
    if name == "target":
        facts["number of tokens"] = (len(tokenizer_of(source).tokens), bundle.tokenizer.vocab_size)
    for fact, (found, expected) in facts.items():
        if found != expected:
            raise ExportError(
                f"{source.name} is not what the bundle's {name} was made from: its {fact} is {found}, and the bundle's "
                f"{expected}; pass --{name} with the checkpoint that it was made from."
            )


def _head_of_draft(bundle: Bundle) -> "dict[str, NDArray[np.int32]]":
    """Returns the ids that a draft's cut head has, by role, as check_decoders takes them."""
    vocabulary = DraftVocabulary.of_bundle(bundle)
    if vocabulary is None or len(vocabulary.to_target) == vocabulary.num_input_ids:
        return {}
    if vocabulary.spelling is not None or (vocabulary.to_target < 0).any():
        raise ExportError(
            f"The draft in {bundle.folder} has a tokenizer of its own and a head that was cut, and which tokens it kept is not "
            "recorded: export the bundle anew with all its lowerings, --lowering gqa,static for example."
        )
    return {"draft": vocabulary.to_target}


def _write(bundle: Bundle, roles: list[Role], heads: "dict[str, NDArray[np.int32]]", report: Report) -> Bundle:
    roles = [_with_stored_codes(role, _decoder(bundle, role.name), bundle.folder) for role in roles]
    specs = {
        role.name: write_decoder(
            role, bundle.folder, report, head_tokens=heads.get(role.name), beside=_decoder(bundle, role.name)
        )
        for role in roles
    }
    probes = {role.name: probe_tokens(tokenizer_of(role.source)) for role in roles}
    try:
        specs = check_decoders(roles, specs, bundle.folder, probes, heads, report)
    except ExportError as error:
        raise ExportError(
            f"The new forms of {bundle.target.source} are not added, and if the bundle was made from another checkpoint, that "
            f"one is needed: {error}"
        ) from error
    return replace(bundle, **specs)


def _with_stored_codes(role: Role, spec: DecoderSpec, folder: Path) -> Role:
    """Returns a role with the codes that the bundle has, where these depend on a text."""
    if role.quantizer != GPTQ:
        return role
    from .packed_checkpoint import unpacked
    from .stored_codes import stored_weights

    with unpacked(role.source, folder) as source, base_graph_of(replace(role, source=source), folder) as base:
        return replace(role, calibrated=stored_weights(spec, folder, base.model))


def _decoder(bundle: Bundle, name: str) -> DecoderSpec:
    decoder = bundle.target if name == "target" else bundle.draft
    assert decoder is not None, "only decoders that are there are asked for"
    return decoder


def _link(file: str, goal: str) -> None:
    link_or_copy(Path(file), Path(goal))
