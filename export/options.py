"""What is asked of an export, held against what its sources are: refused before any work, and nothing left out in silence."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from runtime.contract import MANIFEST

from .draft_tokens import DraftTokens
from .errors import ExportError
from .genai_config import CONFIG as GENAI_CONFIG
from .graph_interface import read_interface
from .kept_weights import stored_matrices
from .lowerings import STANDARD_FORMS
from .probe import PROBE_TOKENS
from .quantization import BITS, BLOCK_SIZE, BLOCK_SIZES, KEPT
from .role import BYTES_PER_WEIGHT, GPTQ, SEARCH, Role

_LOWEST = min(BYTES_PER_WEIGHT, key=BYTES_PER_WEIGHT.__getitem__)


def check_no_bundle(name: str) -> None:
    """Refuses a bundle, or a decoder's folder in one, where the model it was made from is meant.

    A bundle that ONNX Runtime GenAI loads may be taken as such.

    Raises:
        ExportError: It is one.
    """
    path = Path(name).expanduser()
    folder = path.parent if path.suffix == ".onnx" else path
    for bundle in (folder, folder.parent):
        if (bundle / MANIFEST).is_file() and not any((at / GENAI_CONFIG).is_file() for at in (folder, bundle)):
            what = "a bundle" if folder == bundle else f"part of the bundle {bundle}"
            raise ExportError(
                f"{name} is {what}, not a model: pass what the bundle was made from, or add a form to it, --add-lowering "
                f"LOWERING --out {bundle}."
            )


def check_roles(roles: list[Role], *, cuts_head: bool) -> None:
    """Refuses decoders that could not be served, and a draft that would be no other model than its target.

    Raises:
        ExportError: A cache that cannot be rewound, a context that is too short, or options that need a checkpoint.
    """
    for role in roles:
        role.source.require_rewindable_cache(role.context_length)
        if role.precision == KEPT and role.source.kind != "graph":
            stored_matrices(role.source)
            check_kept_forms(role)
        if role.context_length < PROBE_TOKENS:
            raise ExportError(
                f"{role.source.name} would serve {role.context_length} tokens; at least {PROBE_TOKENS} are needed, "
                "which the exported graph is checked on."
            )
    if len(roles) == 1:
        return
    target, draft = roles
    if draft.source.kind == "graph" and cuts_head:
        raise ExportError(f"--draft-vocab needs a checkpoint, and {draft.source.name} is a graph that is taken as it is.")
    if draft.source is not target.source:
        return
    if draft.source.kind == "graph":
        raise ExportError(f"--draft self needs a checkpoint, and {draft.source.name} is a graph that is taken as it is.")
    rounded_further = draft.precision != target.precision or (draft.precision in BITS and draft.block_size > target.block_size)
    if not rounded_further and not cuts_head:
        raise ExportError(
            f"--draft self in {draft.precision} would be the target itself: {_other_drafts(target)}, or no draft."
        )


def _other_drafts(target: Role) -> str:
    """Returns what to pass where a draft of the target's own weights would be the target."""
    if target.precision != _LOWEST:
        return "pass a lower --draft-precision"
    coarser = [str(size) for size in BLOCK_SIZES if size > target.block_size]
    blocks = f"--draft-block-size {' or '.join(coarser)}, " if coarser else ""
    return f"{_LOWEST} is the lowest precision there is, so pass {blocks}--draft-vocab, another --draft, a higher --precision"


def check_kept_forms(role: Role) -> None:
    """Refuses forms in standard operators of blocks with offsets, which those operators have not.

    Raises:
        ExportError: A tensor has such blocks; the sentence names it and its type.
    """
    wanted = [lowering for lowering in role.lowerings if lowering in STANDARD_FORMS]
    if role.precision != KEPT or role.source.gguf is None or not wanted:
        return
    from .gguf_blocks import matrix_with_offsets

    if (found := matrix_with_offsets(role.source.gguf)) is not None:
        tensor, kind = found
        raise ExportError(
            f"The weights of '{tensor}' in {role.source.name} are of the type {kind}, whose blocks have an offset, which the "
            f"lowering {wanted[0]} cannot say: make a bundle of its own with --precision int8 or int4."
        )


def with_quantizer(roles: list[Role], quantizer: str, *, is_text_given: bool) -> list[Role]:
    """Returns the roles with what rounds their weights, where there are any to round.

    Raises:
        ExportError: An unknown quantizer, one that would round nothing, or a calibration text that none reads.
    """
    if quantizer == SEARCH:
        if is_text_given:
            raise ExportError(f"--calibration-text is read by --quantizer {GPTQ} only: pass both, or neither.")
        return roles
    rounded = [role.precision in BITS and role.source.kind != "graph" for role in roles]
    chosen = [replace(role, quantizer=quantizer) if one else role for role, one in zip(roles, rounded, strict=True)]
    if not any(rounded):
        found = " and ".join(
            f"the {role.name} would {'be taken as it is' if role.source.kind == 'graph' else f'have {role.precision}'}"
            for role in roles
        )
        raise ExportError(
            f"--quantizer {quantizer} rounds a checkpoint to {' or '.join(BITS)}, and {found}: leave it out, or ask for "
            "another precision."
        )
    return chosen


def check_effect(
    roles: list[Role], block_sizes: Mapping[str, int | None], exporter: str, draft_tokens: DraftTokens | None
) -> None:
    """Refuses options that would change nothing.

    Args:
        roles: What is to be made.
        block_sizes: What was asked for, by role; None where nothing was.
        exporter: Likewise.
        draft_tokens: The draft's, if there is one.

    Raises:
        ExportError: There is one; the sentence names it.
    """
    if block_sizes["draft"] is not None and len(roles) == 1:
        raise ExportError("--draft-block-size is for a draft model, and there is none: pass --draft, or leave it out.")
    for role in roles:
        option = "--block-size" if role.name == "target" else "--draft-block-size"
        if block_sizes[role.name] is not None and role.source.kind == "graph":
            raise ExportError(f"{option} rounds a checkpoint, and {role.source.name} is a graph that is taken as it is.")
        if block_sizes[role.name] is not None and role.precision not in BITS:
            raise ExportError(
                f"{option} is for weights in {' or '.join(BITS)}, and the {role.name} would have {role.precision}: leave it "
                "out, or ask for another precision."
            )
    if exporter != "auto" and all(role.source.kind == "graph" for role in roles):
        raise ExportError(
            f"--source {exporter} says what makes a checkpoint's graph, and {roles[0].source.name} is a graph that is taken as "
            "it is: leave it out."
        )
    kept = None if draft_tokens is None else draft_tokens.num_head_tokens
    if kept is not None and kept >= (there := len(draft_tokens.assets.tokens)):
        raise ExportError(f"--draft-vocab is {kept}, and the draft has {there} tokens: pass fewer, or leave it out.")


def check_genai(roles: list[Role], draft_tokens: DraftTokens | None) -> None:
    """Refuses before the work what ONNX Runtime GenAI could not run behind it.

    Raises:
        ExportError: Another form than gqa, large blocks, or a draft with a vocabulary of its own.
    """
    for role in roles:
        if role.source.kind == "graph" and (form := read_interface(role.source.path).lowering) != "gqa":
            raise ExportError(
                f"--emit-genai-config needs the lowering gqa, and {role.source.name} is a {form} graph: leave it out."
            )
        if "gqa" not in role.lowerings or (role.precision in BITS and role.block_size > BLOCK_SIZE):
            raise ExportError(
                f"--emit-genai-config needs the lowering gqa and blocks of {BLOCK_SIZE} weights, and the {role.name} would "
                f"have {role.lowering} and {role.block_size}: leave --lowering and the block sizes out."
            )
    if draft_tokens is not None and (draft_tokens.shared is not None or draft_tokens.num_head_tokens is not None):
        raise ExportError(
            "--emit-genai-config is for pairs with one vocabulary, which ONNX Runtime GenAI needs, and this draft would have "
            "one of its own: leave --draft-vocab out, or take a draft of the same family."
        )
