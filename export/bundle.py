"""From sources to a bundle: checks first, then work in a folder beside the goal, which appears whole or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.contract import Bundle, FileRecord, TokenizerSpec
from runtime.draft_vocabulary import DRAFT_VOCABULARY
from runtime.manifest import save_bundle

from .decoders import (
    BYTES_PER_WEIGHT,
    DEFAULT_DRAFT_PRECISION,
    DEFAULT_PRECISION,
    Report,
    Role,
    check_decoders,
    exporter_of,
    write_decoder,
)
from .draft_tokens import DraftTokens, read_counted_text
from .errors import ExportError
from .existing_graph import graph_tokenizer
from .genai_config import write_genai_files
from .gguf_tokenizer import tokenizer_from_gguf
from .pair import compare_vocabularies
from .probe import PROBE_TEXT, PROBE_TOKENS, probe_tokens
from .quantization import BITS, BLOCK_SIZE
from .source import Source, resolve_source
from .tokenizer import TokenizerAssets, tokenizer_from_folder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SELF = "self"


def export_bundle(
    target: str,
    draft: str | None,
    out: Path,
    *,
    precision: str = DEFAULT_PRECISION,
    draft_precision: str = DEFAULT_DRAFT_PRECISION,
    block_size: int = BLOCK_SIZE,
    draft_block_size: int = BLOCK_SIZE,
    draft_vocab: int | None = None,
    draft_vocab_text: Path | None = None,
    max_length: int | None = None,
    lowering: str = "gqa",
    exporter: str = "auto",
    emit_genai_config: bool = False,
    overwrite: bool = False,
    report: Report = lambda _title, _done, _total: None,
) -> Bundle:
    """Exports a target and a draft into one bundle folder.

    Args:
        target: A `.gguf` file, a Hugging Face folder, a hub name, or an ONNX graph that is taken as it is (see
            export.existing_graph).
        draft: Likewise, or "self" for the target's own weights in `draft_precision`, or None for lookup drafting only.
        out: The bundle's folder; must not exist unless `overwrite`.
        precision: Of the target's weights: "fp32", "fp16", "int8" or "int4".
        draft_precision: Of the draft's weights.
        block_size: The most quantised weights of the target that share a scale: 32, 64 or 128.
        draft_block_size: Likewise of the draft.
        draft_vocab: Tokens the draft may propose, the most frequent ones; None for all it has.
        draft_vocab_text: A UTF-8 text to count them in; None for texts that the target writes.
        max_length: The longest context to serve; None for the target's own.
        lowering: The form of both graphs: "gqa", "static" or "primitive"; see docs/bundle.md.
        exporter: What makes a checkpoint's graph: "mobius", "optimum", or "auto" (see choose_exporter).
        emit_genai_config: Also write what ONNX Runtime GenAI needs to run the bundle's folder.
        overwrite: Replace a bundle that is there, once the new one is complete.
        report: Told what happens, for progress bars.

    Returns:
        The bundle as written.

    Raises:
        ExportError: The sources cannot be exported or do not fit each other, the disk is too small, or the result does
            not compute what the checkpoints do. No part of a bundle is left behind, and an old one stays as it was.
    """
    named, out = out, out.resolve()
    if max_length is not None and max_length < PROBE_TOKENS:
        raise ExportError(f"The max length is {max_length}; at least {PROBE_TOKENS} tokens are needed.")
    _check_out(out, overwrite=overwrite)
    counted = read_counted_text(draft, draft_vocab, draft_vocab_text)
    report("reading the sources", 0, 0)
    source = resolve_source(target)
    assets = _tokenizer_of(source)
    context_length = min(max_length or source.context_length, source.context_length)
    roles = [Role("target", source, precision, context_length, block_size, exporter_of(source, exporter), lowering)]
    draft_tokens = None
    if draft is not None:
        other = source if draft == SELF else resolve_source(draft)
        length = min(context_length, other.context_length)
        roles.append(Role("draft", other, draft_precision, length, draft_block_size, exporter_of(other, exporter), lowering))
        theirs = assets if draft == SELF else _tokenizer_of(other)
        shared = compare_vocabularies(source, assets, other, theirs, PROBE_TEXT)
        if shared is not None:
            report(f"the draft has a vocabulary of its own: it can propose {shared.description}", 0, 0)
        draft_tokens = DraftTokens(theirs, shared, draft_vocab, counted)
    _check_roles(roles, cuts_head=draft_vocab is not None)
    if emit_genai_config:
        _check_genai(roles, draft_tokens)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _check_disk(out, roles)
        with _staged(out) as staging:
            bundle = _write(staging, assets, draft_tokens, roles, report)
            if emit_genai_config:
                write_genai_files(bundle)
    except OSError as error:
        raise ExportError(f"The bundle could not be written to {out}: {error.strerror or error}.") from error
    return replace(bundle, folder=named)


@contextmanager
def _staged(out: Path) -> Iterator[Path]:
    """Lends a folder that takes `out`'s place when the block ends well, and is gone when it does not."""
    staging, old = out.with_name(f".{out.name}.partial"), out.with_name(f".{out.name}.old")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        yield staging
        if not out.exists():
            staging.rename(out)
            return
        # A folder cannot be renamed onto one that holds files: the old bundle steps aside, and back where that fails.
        shutil.rmtree(old, ignore_errors=True)
        out.rename(old)
        try:
            staging.rename(out)
        except BaseException:
            old.rename(out)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check_out(out: Path, *, overwrite: bool) -> None:
    if out.exists() and not overwrite:
        raise ExportError(f"{out} exists already: choose another --out, or pass --overwrite to replace it.")
    is_bundle = (out / "bundle.json").is_file()
    if out.exists() and not is_bundle and any(out.iterdir() if out.is_dir() else [out]):
        raise ExportError(f"{out} exists and is no bundle: it is not replaced even with --overwrite.")


def _check_roles(roles: list[Role], *, cuts_head: bool) -> None:
    for role in roles:
        role.source.require_rewindable_cache(role.context_length)
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
            f"--draft self in {draft.precision} would be the target itself: pass a lower --draft-precision, or no draft."
        )


def _check_genai(roles: list[Role], draft_tokens: DraftTokens | None) -> None:
    """Refuses before the work what ONNX Runtime GenAI could not run behind it."""
    for role in roles:
        if role.lowering != "gqa" or (role.precision in BITS and role.block_size > BLOCK_SIZE):
            raise ExportError(
                f"--emit-genai-config needs the lowering gqa and blocks of {BLOCK_SIZE} weights, and the {role.name} would "
                f"have {role.lowering} and {role.block_size}: leave --lowering and the block sizes out."
            )
    if draft_tokens is not None and (draft_tokens.shared is not None or draft_tokens.num_head_tokens is not None):
        raise ExportError(
            "--emit-genai-config is for pairs with one vocabulary, which ONNX Runtime GenAI needs, and this draft would have "
            "one of its own: leave --draft-vocab out, or take a draft of the same family."
        )


def _tokenizer_of(source: Source) -> TokenizerAssets:
    if source.kind == "graph":
        return graph_tokenizer(source.path)
    return tokenizer_from_gguf(source.path) if source.kind == "gguf" else tokenizer_from_folder(source.path)


def _check_disk(out: Path, roles: list[Role]) -> None:
    needed = sum(role.source.num_parameters * BYTES_PER_WEIGHT[role.precision] for role in roles) * 1.05
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        raise ExportError(
            f"The bundle needs about {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free at {out.parent}: "
            "free some disk, choose another --out, or a lower --precision."
        )


def _write(
    folder: Path, assets: TokenizerAssets, draft_tokens: DraftTokens | None, roles: list[Role], report: Report
) -> Bundle:
    tokenizer = _write_tokenizer(folder, assets)
    probes = {"target": probe_tokens(assets)}
    specs = {"target": write_decoder(roles[0], folder, report)}
    _check_tokenizer_fits(assets, specs["target"].vocab_size)
    heads: dict[str, NDArray[np.int32]] = {}
    vocabulary = None
    if draft_tokens is not None:
        probes["draft"] = probe_tokens(draft_tokens.assets)
        head = draft_tokens.choose_head(specs["target"], tokenizer, folder, report)
        specs["draft"] = write_decoder(roles[1], folder, report, head_tokens=head)
        if head is not None:
            heads["draft"] = head
        vocabulary = draft_tokens.vocabulary(specs["target"].vocab_size, specs["draft"].vocab_size, head)
    specs = check_decoders(roles, specs, folder, probes, heads, report)
    draft_vocabulary = None
    if vocabulary is not None:
        vocabulary.save(folder / DRAFT_VOCABULARY)
        draft_vocabulary = FileRecord.of(folder, DRAFT_VOCABULARY)
    bundle = Bundle(folder, tokenizer, specs["target"], specs.get("draft"), _producer(), draft_vocabulary)
    save_bundle(bundle)
    return bundle


def _check_tokenizer_fits(assets: TokenizerAssets, width: int) -> None:
    if max(len(assets.tokens) - 1, *assets.eos_token_ids, 0) >= width:
        raise ExportError(
            f"The tokenizer has {len(assets.tokens)} tokens and ends a text with {list(assets.eos_token_ids)}, and the target "
            f"knows {width} tokens: the tokenizer does not belong to the model."
        )


def _producer() -> str:
    try:
        return f"specrt {version('specrt')}"
    except PackageNotFoundError:
        return "specrt (source tree)"


def _write_tokenizer(folder: Path, assets: TokenizerAssets) -> TokenizerSpec:
    (folder / "tokenizer.json").write_text(assets.tokenizer_json, encoding="utf-8")
    template = None
    if assets.chat_template is not None:
        (folder / "chat_template.jinja").write_text(assets.chat_template, encoding="utf-8")
        template = FileRecord.of(folder, "chat_template.jinja")
    return TokenizerSpec(
        FileRecord.of(folder, "tokenizer.json"),
        template,
        assets.bos_token,
        assets.eos_token,
        assets.eos_token_ids,
        len(assets.tokens),
    )
