"""A bundle for ONNX Runtime GenAI: its `genai_config.json`, and a folder it loads, alone or as a pair that drafts.

For people who run that engine already, and for holding our texts against another engine's on the same graphs. Written for
onnxruntime-genai 0.18, which is not needed here. It knows the manifest only; it opens no graph.
"""

import json
from pathlib import Path
from typing import Any, Literal

from runtime.contract import Bundle, DecoderSpec

from .errors import ExportError
from .links import link_or_copy

CONFIG = "genai_config.json"
# The engine's own limits of a proposal.
_DRAFT_TOKENS = range(1, 17)
_NUM_DRAFT_TOKENS = 4


def genai_config(
    bundle: Bundle,
    role: Literal["target", "draft"] = "target",
    *,
    num_draft_tokens: int = 0,
    threads: int | None = None,
) -> str:
    """Returns the text of a `genai_config.json` for one decoder of a bundle, or for it with the other as its draft.

    The engine's `max_length` is the size of its caches, and its default here is the whole context. A pass writes
    `spare_slots` behind its tokens, so ask for room: a plain text may grow to `max_length`, a speculative one to
    `max_length - num_draft_tokens - 1`, behind which the engine's pass fails.

    Args:
        bundle: The bundle.
        role: Which decoder generates.
        num_draft_tokens: The most tokens the other decoder proposes in a round, 1 to 16; 0 for plain decoding.
        threads: For each decoder's pool; None for ONNX Runtime's own choice, one for each physical core.

    Raises:
        ExportError: The decoder asked for is not there, the two cannot be paired in that engine, or a number is out of range.
    """
    decoder = _decoder(bundle, role)
    model: dict[str, Any] = {
        # Any plain decoder: the engine then asks nothing of an architecture, as the graph says all.
        "type": "decoder",
        "context_length": decoder.context_length,
        "vocab_size": decoder.vocab_size,
        "eos_token_id": list(bundle.tokenizer.eos_token_ids),
        "decoder": _decoder_section(decoder, threads),
    }
    config = {"model": model, "search": _search_section(decoder.context_length)}
    if num_draft_tokens:
        draft = _draft_of(bundle, role, num_draft_tokens)
        context_length = min(decoder.context_length, draft.context_length)
        model |= {"context_length": context_length, "draft": _decoder_section(draft, threads)}
        config |= {"search": _search_section(context_length), "speculative": {"max_draft_tokens": num_draft_tokens}}
    return json.dumps(config, indent=2) + "\n"


def write_genai_files(bundle: Bundle) -> None:
    """Makes a bundle's own folder one that ONNX Runtime GenAI loads, drafting with the draft where one shares the vocabulary.

    Raises:
        ExportError: As in genai_config.
    """
    can_draft = bundle.draft is not None and bundle.draft_vocabulary is None
    config = genai_config(bundle, num_draft_tokens=_NUM_DRAFT_TOKENS if can_draft else 0)
    (bundle.folder / "tokenizer_config.json").write_text(_tokenizer_config(bundle), encoding="utf-8")
    (bundle.folder / CONFIG).write_text(config, encoding="utf-8")


def write_genai_folder(
    bundle: Bundle,
    folder: Path,
    role: Literal["target", "draft"] = "target",
    *,
    num_draft_tokens: int = 0,
    threads: int | None = None,
) -> Path:
    """Lays out a folder that ONNX Runtime GenAI loads; graphs are hard links where the disk allows it, else copies.

    Its tokenizer is an implementation of its own that does not know every `tokenizer.json` (that of SmolLM2's GGUF file
    fails outside ASCII): where it fails, give it the token ids that ours makes.

    Args:
        bundle: The bundle.
        folder: Must not exist yet, or be empty.
        role: See genai_config; so are `num_draft_tokens` and `threads`.
        num_draft_tokens: See `role`.
        threads: See `role`.

    Returns:
        `folder`.

    Raises:
        ExportError: As in genai_config; or the folder holds something, or cannot be written.
    """
    config = genai_config(bundle, role, num_draft_tokens=num_draft_tokens, threads=threads)
    roles = ("target", "draft") if num_draft_tokens else (role,)
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ExportError(f"{folder} holds files already: choose a folder that does not exist yet.")
        folder.mkdir(parents=True, exist_ok=True)
        for name in roles:
            for record in _decoder(bundle, name).graph:
                link_or_copy(bundle.folder / record.path, folder / record.path)
        link_or_copy(bundle.folder / bundle.tokenizer.file.path, folder / "tokenizer.json")
        (folder / "tokenizer_config.json").write_text(_tokenizer_config(bundle), encoding="utf-8")
        # Last, so that a folder with a config is complete.
        (folder / CONFIG).write_text(config, encoding="utf-8")
    except OSError as error:
        raise ExportError(f"{folder} could not be written: {error.strerror or error}.") from error
    return folder


def _decoder(bundle: Bundle, role: str) -> DecoderSpec:
    if role not in ("target", "draft"):
        raise ExportError(f"The role is {role!r}; 'target' or 'draft' is expected.")
    decoder = bundle.target if role == "target" else bundle.draft
    if decoder is None:
        raise ExportError(f"The bundle {bundle.folder} has no draft model: export it with --draft.")
    if role == "draft" and bundle.draft_vocabulary is not None:
        raise ExportError(
            f"The draft in {bundle.folder} has a vocabulary of its own, which ONNX Runtime GenAI cannot translate: pass "
            "num_draft_tokens=0."
        )
    if decoder.lowering != "gqa":
        raise ExportError(f"The {role} in {bundle.folder} has the lowering '{decoder.lowering}'; 'gqa' is expected.")
    if decoder.most_padding:
        raise ExportError(
            f"The {role} in {bundle.folder} is exact where {decoder.padding}, and ONNX Runtime GenAI feeds what there is: its "
            "text would depend on speculation. Export with blocks of 32 weights (--block-size, --draft-block-size)."
        )
    return decoder


def _draft_of(bundle: Bundle, role: str, num_draft_tokens: int) -> DecoderSpec:
    if num_draft_tokens not in _DRAFT_TOKENS:
        raise ExportError(
            f"num_draft_tokens is {num_draft_tokens!r}; ONNX Runtime GenAI takes {_DRAFT_TOKENS[0]} to {_DRAFT_TOKENS[-1]}, "
            "and 0 means plain decoding."
        )
    draft = _decoder(bundle, "draft" if role == "target" else "target")
    width = _decoder(bundle, role).vocab_size
    if draft.vocab_size != width:
        raise ExportError(
            f"The two models give {width} and {draft.vocab_size} logits a row, and ONNX Runtime GenAI pairs equal widths only: "
            "pass num_draft_tokens=0."
        )
    return draft


def _decoder_section(decoder: DecoderSpec, threads: int | None) -> dict[str, Any]:
    names = decoder.names
    # Two pools that spin while they wait would take the cores from each other.
    options: dict[str, Any] = {"provider_options": [], "session.force_spinning_stop": "1"}
    if threads is not None:
        options["intra_op_num_threads"] = threads
    return {
        "session_options": options,
        "filename": decoder.graph[0].path,
        "head_size": decoder.head_size,
        "num_hidden_layers": decoder.num_layers,
        "num_key_value_heads": decoder.num_key_value_heads,
        "inputs": {
            "input_ids": names.input_ids,
            "attention_mask": names.attention_mask,
            "past_key_names": _numbered(names.past_key),
            "past_value_names": _numbered(names.past_value),
        },
        "outputs": {
            "logits": names.logits,
            "present_key_names": _numbered(names.present_key),
            "present_value_names": _numbered(names.present_value),
        },
    }


def _search_section(max_length: int) -> dict[str, Any]:
    # One buffer for past and present: without it the engine sizes a pass's caches to its tokens, which leaves no spare slot.
    return {"do_sample": False, "max_length": max_length, "past_present_share_buffer": True}


def _numbered(name: str) -> str:
    return name.replace("{layer}", "%d")


def _tokenizer_config(bundle: Bundle) -> str:
    tokenizer = bundle.tokenizer
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    if tokenizer.chat_template is not None:
        config["chat_template"] = (bundle.folder / tokenizer.chat_template.path).read_text(encoding="utf-8")
    return json.dumps({key: value for key, value in config.items() if value is not None}, indent=2) + "\n"
