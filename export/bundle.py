"""From sources to a bundle: checks first, then work in a folder beside the goal, which appears whole or not at all."""

import gc
import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import onnx_ir as ir
from tokenizers import Tokenizer

from runtime.contract import Bundle, DecoderSpec, FileRecord, TokenizerSpec
from runtime.manifest import save_bundle
from runtime.ort_backend import OrtBackend

from .base_graph import build_base_graph
from .errors import ExportError
from .gguf_tokenizer import tokenizer_from_gguf
from .lowering import SPARE_ROWS, lower_to_group_query_attention
from .pair import check_pair
from .parity import check_parity
from .quantization import quantize_graph
from .row_equality import measure_min_rows
from .source import Source, resolve_source
from .tokenizer import TokenizerAssets, tokenizer_from_folder

PRECISIONS = ("fp32", "int8", "int4")
DEFAULT_PRECISION = "fp32"
DEFAULT_DRAFT_PRECISION = "int4"
SELF = "self"
# What happens, how much of it is done, and how much there is (0 where that cannot be told).
Report = Callable[[str, int, int], None]

_BYTES_PER_WEIGHT = {"fp32": 4.0, "int8": 1.125, "int4": 0.625}
_PROBE_TEXT = (
    "The tides are the regular rise and fall of the sea, caused by the pull of the moon and of the sun on the turning earth. "
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n"
)
_PROBE_TOKENS = 64


@dataclass(frozen=True)
class _Role:
    """One decoder to be made."""

    name: str
    source: Source
    precision: str
    context_length: int


def export_bundle(
    target: str,
    draft: str | None,
    out: Path,
    *,
    precision: str = DEFAULT_PRECISION,
    draft_precision: str = DEFAULT_DRAFT_PRECISION,
    max_length: int | None = None,
    overwrite: bool = False,
    report: Report = lambda _title, _done, _total: None,
) -> Bundle:
    """Exports a target and a draft into one bundle folder.

    Args:
        target: A `.gguf` file, a Hugging Face folder, or a hub name.
        draft: Likewise, or "self" for the target's own weights in `draft_precision`, or None for lookup drafting only.
        out: The bundle's folder; must not exist unless `overwrite`.
        precision: Of the target's weights: "fp32", "int8" or "int4".
        draft_precision: Of the draft's weights.
        max_length: The longest context to serve; None for the target's own.
        overwrite: Replace a bundle that is there, once the new one is complete.
        report: Told what happens, for progress bars.

    Returns:
        The bundle as written.

    Raises:
        ExportError: The sources cannot be exported or do not fit each other, the disk is too small, or the result does
            not compute what the checkpoints do. No part of a bundle is left behind, and an old one stays as it was.
    """
    named, out = out, out.resolve()
    _check_options(out, precision, draft_precision, max_length, overwrite=overwrite)
    report("reading the sources", 0, 0)
    source = resolve_source(target)
    assets = _tokenizer_of(source)
    context_length = min(max_length or source.context_length, source.context_length)
    roles = [_Role("target", source, precision, context_length)]
    if draft == SELF:
        if draft_precision == precision:
            raise ExportError(
                f"--draft self in {draft_precision} would be the target itself: pass a lower --draft-precision, or no draft."
            )
        roles.append(_Role("draft", source, draft_precision, context_length))
    elif draft is not None:
        other = resolve_source(draft)
        check_pair(source, assets, other, _tokenizer_of(other))
        roles.append(_Role("draft", other, draft_precision, min(context_length, other.context_length)))
    for role in roles:
        role.source.require_rewindable_cache(role.context_length)
        if role.context_length < _PROBE_TOKENS:
            raise ExportError(
                f"{role.source.name} would serve {role.context_length} tokens; at least {_PROBE_TOKENS} are needed, "
                "which the exported graph is checked on."
            )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _check_disk(out, roles)
        with _staged(out) as staging:
            bundle = _write(staging, assets, roles, report)
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


def _check_options(out: Path, precision: str, draft_precision: str, max_length: int | None, *, overwrite: bool) -> None:
    for name, value in (("precision", precision), ("draft precision", draft_precision)):
        if value not in PRECISIONS:
            raise ExportError(f"The {name} '{value}' is unknown; there are {', '.join(PRECISIONS)}.")
    if max_length is not None and max_length < _PROBE_TOKENS:
        raise ExportError(f"The max length is {max_length}; at least {_PROBE_TOKENS} tokens are needed.")
    if out.exists() and not overwrite:
        raise ExportError(f"{out} exists already: choose another --out, or pass --overwrite to replace it.")
    is_bundle = (out / "bundle.json").is_file()
    if out.exists() and not is_bundle and any(out.iterdir() if out.is_dir() else [out]):
        raise ExportError(f"{out} exists and is no bundle: it is not replaced even with --overwrite.")


def _tokenizer_of(source: Source) -> TokenizerAssets:
    return tokenizer_from_gguf(source.path) if source.kind == "gguf" else tokenizer_from_folder(source.path)


def _check_disk(out: Path, roles: list[_Role]) -> None:
    needed = sum(role.source.num_parameters * _BYTES_PER_WEIGHT[role.precision] for role in roles) * 1.05
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        raise ExportError(
            f"The bundle needs about {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free at {out.parent}: "
            "free some disk, choose another --out, or a lower --precision."
        )


def _write(folder: Path, assets: TokenizerAssets, roles: list[_Role], report: Report) -> Bundle:
    tokenizer = _write_tokenizer(folder, assets)
    probe = _probe_tokens(assets)
    specs: dict[str, DecoderSpec] = {}
    for _source, group in itertools.groupby(roles, key=lambda role: role.source):
        specs |= _export_decoders(list(group), folder, probe, report)
    width = specs["target"].vocab_size
    if max(len(assets.tokens) - 1, *assets.eos_token_ids, 0) >= width:
        raise ExportError(
            f"The tokenizer has {len(assets.tokens)} tokens and ends a text with {list(assets.eos_token_ids)}, and the target "
            f"knows {width} tokens: the tokenizer does not belong to the model."
        )
    try:
        producer = f"specrt {version('specrt')}"
    except PackageNotFoundError:
        producer = "specrt (source tree)"
    bundle = Bundle(folder, tokenizer, specs["target"], specs.get("draft"), producer)
    save_bundle(bundle)
    return bundle


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


def _probe_tokens(assets: TokenizerAssets) -> list[int]:
    """Ids of an ordinary text, to hold models against each other on."""
    ids: list[int] = Tokenizer.from_str(assets.tokenizer_json).encode(_PROBE_TEXT, add_special_tokens=False).ids
    return (ids * (_PROBE_TOKENS // len(ids) + 1))[:_PROBE_TOKENS]


def _export_decoders(roles: list[_Role], folder: Path, probe: list[int], report: Report) -> dict[str, DecoderSpec]:
    """Makes and checks the decoders that come from one source."""
    source = roles[0].source
    specs = [_write_decoder(role, folder, report) for role in roles]
    gc.collect()
    report(f"comparing with {source.name} in torch", 0, 0)
    parities = check_parity(source, specs, folder, probe)
    exported = {}
    for role, spec, parity in zip(roles, specs, parities, strict=True):
        report(f"{role.name}: measuring row equality", 0, 0)
        min_rows = measure_min_rows(OrtBackend().load(spec, folder), probe)
        if min_rows is None:
            raise ExportError(
                f"On this machine the graph of {source.name} gives other bits for a row when the text is cut into other "
                "passes, at any number of rows up to 16: its greedy text could depend on speculation."
            )
        exported[role.name] = replace(spec, min_rows=min_rows, parity=parity)
    return exported


def _write_decoder(role: _Role, folder: Path, report: Report) -> DecoderSpec:
    label = f"{role.name} ({role.precision})"
    report(f"{label}: building the graph from {role.source.name}", 0, 0)
    model = build_base_graph(role.source)
    geometry = lower_to_group_query_attention(model, role.context_length)
    vocab_size = int(model.graph.outputs[0].shape[2])
    if role.precision != "fp32":
        quantize_graph(model, role.precision, lambda done, total: report(f"{label}: quantising the weights", done, total))
    graph = _save_graph(model, folder, role.name, lambda done, total: report(f"{label}: writing the weights", done, total))
    return DecoderSpec(
        source=role.source.name,
        architecture=role.source.architecture,
        graph=graph,
        lowering="gqa",
        precision=role.precision,
        num_layers=geometry.num_layers,
        num_key_value_heads=geometry.num_key_value_heads,
        head_size=geometry.head_size,
        vocab_size=vocab_size,
        context_length=role.context_length,
        cache_dtype="float32",
        spare_slots=SPARE_ROWS,
        min_rows=1,
    )


def _save_graph(model: ir.Model, folder: Path, name: str, on_tensor: Callable[[int, int], None]) -> tuple[FileRecord, ...]:
    (folder / name).mkdir()
    path, data = folder / name / "model.onnx", "model.onnx.data"
    ir.save(model, path, external_data=data, callback=lambda _tensor, state: on_tensor(state.index + 1, state.total))
    written = [path.name, data] if path.with_name(data).exists() else [path.name]
    return tuple(FileRecord.of(folder, f"{name}/{file}") for file in written)
