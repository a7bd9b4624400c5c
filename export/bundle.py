"""From sources to a bundle: checks first, then work in a folder beside the goal, which appears whole or not at all."""

from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.contract import Bundle, FileRecord, TokenizerSpec
from runtime.draft_vocabulary import DRAFT_VOCABULARY
from runtime.manifest import save_bundle
from runtime.memory import free_memory

from .calibration_text import Calibration, read_calibration_text
from .decoders import check_decoders, exporter_of, write_decoder
from .draft_tokens import DraftTokens, read_counted_text
from .errors import ExportError
from .existing_graph import graph_tokenizer
from .fallback import make_by_either
from .genai_config import write_genai_files
from .gguf_tokenizer import tokenizer_from_gguf
from .memory import check_memory
from .options import check_effect, check_genai, check_no_bundle, check_roles, with_quantizer
from .pair import compare_vocabularies
from .probe import PROBE_TEXT, PROBE_TOKENS, probe_tokens
from .quantization import BLOCK_SIZE
from .role import DEFAULT_DRAFT_PRECISION, DEFAULT_PRECISION, SEARCH, Report, Role
from .source import Source, resolve_source
from .staging import check_disk, check_out, staged
from .steps import Steps, planned_steps
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
    block_size: int | None = None,
    draft_block_size: int | None = None,
    draft_vocab: int | None = None,
    draft_vocab_text: Path | None = None,
    quantizer: str = SEARCH,
    calibration_text: Path | None = None,
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
        precision: Of the target's weights: "fp32", "fp16", "bf16", "int8", "int4", or "checkpoint" for the checkpoint's own.
        draft_precision: Of the draft's weights.
        block_size: The most quantised weights of the target that share a scale: 32, 64 or 128; None for 32.
        draft_block_size: Likewise of the draft.
        draft_vocab: Tokens the draft may propose, the most frequent ones; None for all it has.
        draft_vocab_text: A UTF-8 text to count them in; None for texts that the target writes.
        quantizer: What decides on the codes of int8 and int4 weights: "search" for the least squared error of each block, or
            "gptq" for that of each matrix's outputs on a text.
        calibration_text: A UTF-8 text for that; None for texts that the target writes.
        max_length: The longest context to serve; None for the target's own.
        lowering: The form of both graphs: "gqa", "gqa-half", "static" or "primitive", see docs/bundle.md; or several with
            commas between, of which each device takes its own.
        exporter: What makes a checkpoint's graph: "mobius", "optimum", or "auto" (see choose_exporter).
        emit_genai_config: Also write what ONNX Runtime GenAI needs to run the bundle's folder.
        overwrite: Replace a bundle that is there, once the new one is complete.
        report: Told what happens, for progress bars.

    Returns:
        The bundle as written.

    Raises:
        ExportError: The sources cannot be exported or do not fit each other, the disk or the memory is too small, or the
            result does not compute what the checkpoints do. No part of a bundle is left behind, and an old one stays as it was.
    """
    named, out = out, out.resolve()
    if max_length is not None and max_length < PROBE_TOKENS:
        raise ExportError(f"The max length is {max_length}; at least {PROBE_TOKENS} tokens are needed.")
    check_out(out, overwrite=overwrite)
    counted = read_counted_text(draft, draft_vocab, draft_vocab_text)
    text = read_calibration_text(calibration_text)
    report("reading the sources", 0, 0)
    source = _resolve(target)
    assets = tokenizer_of(source)
    context_length = min(max_length or source.context_length, source.context_length)
    size = block_size or BLOCK_SIZE
    roles = [Role("target", source, precision, context_length, size, exporter_of(source, exporter), lowering)]
    draft_tokens = None
    if draft is not None:
        other = source if draft == SELF else _resolve(draft)
        length, size = min(context_length, other.context_length), draft_block_size or BLOCK_SIZE
        roles.append(Role("draft", other, draft_precision, length, size, exporter_of(other, exporter), lowering))
        theirs = assets if draft == SELF else tokenizer_of(other)
        shared = compare_vocabularies(source, assets, other, theirs, PROBE_TEXT)
        if shared is not None:
            report(f"the draft has a vocabulary of its own: it can propose {shared.description}", 0, 0)
        draft_tokens = DraftTokens(theirs, shared, draft_vocab, counted)
    roles = with_quantizer(roles, quantizer, is_text_given=text is not None)
    check_roles(roles, cuts_head=draft_vocab is not None)
    check_effect(roles, {"target": block_size, "draft": draft_block_size}, exporter, draft_tokens)
    if emit_genai_config:
        check_genai(roles, draft_tokens)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        check_disk(out, roles)
        check_memory(roles, free_memory())
        with staged(out) as staging:
            check_out(out, overwrite=overwrite)  # another export may have been here since it was first looked at
            write = partial(_write, staging, assets, draft_tokens, text, report=report)
            bundle = make_by_either(write, roles, exporter, staging, report)
            if emit_genai_config:
                write_genai_files(bundle)
    except OSError as error:
        raise ExportError(f"The bundle could not be written to {out}: {error.strerror or error}.") from error
    return replace(bundle, folder=named)


def _resolve(name: str) -> Source:
    check_no_bundle(name)
    return resolve_source(name)


def tokenizer_of(source: Source) -> TokenizerAssets:
    """Reads a source's tokenizer.

    Raises:
        ExportError: It has none that can be read.
    """
    if source.kind == "graph":
        return graph_tokenizer(source.path)
    return tokenizer_from_folder(source.path) if source.gguf is None else tokenizer_from_gguf(source.gguf)


def _write(
    folder: Path,
    assets: TokenizerAssets,
    draft_tokens: DraftTokens | None,
    calibration_text: str | None,
    roles: list[Role],
    report: Report,
) -> Bundle:
    counts = draft_tokens is not None and draft_tokens.samples_target
    report = Steps(planned_steps(roles, counts_tokens=counts, samples_texts=calibration_text is None), report)
    tokenizer = _write_tokenizer(folder, assets)
    calibration = Calibration(calibration_text, tokenizer, folder, report)
    probes = {"target": probe_tokens(assets)}
    roles[0] = calibration.applied(roles[0], assets, None)
    specs = {"target": write_decoder(roles[0], folder, report)}
    _check_tokenizer_fits(assets, specs["target"].vocab_size)
    heads: dict[str, NDArray[np.int32]] = {}
    vocabulary = None
    if draft_tokens is not None:
        probes["draft"] = probe_tokens(draft_tokens.assets)
        head = draft_tokens.choose_head(specs["target"], tokenizer, folder, report)
        roles[1] = calibration.applied(roles[1], draft_tokens.assets, specs["target"])
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
