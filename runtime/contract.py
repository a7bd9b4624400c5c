"""The bundle: one folder whose `bundle.json` is the contract between export, engines and runtime.

The exporter writes facts, the runtime reads them and never guesses from a model's type. This module knows the manifest's
fields and the files' hashes; it knows no graph and no session. docs/bundle.md tells the format field by field, and
bundle.schema.json is the same in JSON Schema.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .errors import BundleError

MANIFEST = "bundle.json"
FORMAT_VERSION = (1, 1)
_HASH_CHUNK = 1 << 20


@dataclass(frozen=True)
class FileRecord:
    """A file of the bundle: its path relative to the folder, its size in bytes, its SHA-256 in hex."""

    path: str
    size: int
    sha256: str
    unknown: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, folder: Path, path: str) -> "FileRecord":
        """Measures a file that lies in `folder`."""
        return cls(path, (folder / path).stat().st_size, file_sha256(folder / path))

    def check(self, folder: Path, *, hash_contents: bool) -> None:
        """Raises BundleError when the file is not what the manifest says: absent, of another size, or changed."""
        file = folder / self.path
        try:
            there = file.is_file()
        except OSError:  # a name no file can have
            there = False
        if not there:
            raise BundleError(f"The bundle {folder} lacks '{self.path:.80}', which its manifest names: export it again.")
        if (size := file.stat().st_size) != self.size:
            raise BundleError(
                f"'{self.path}' in {folder} has {size:,} bytes where the manifest says {self.size:,}: "
                "the file is truncated or was replaced; copy or export the bundle again."
            )
        if hash_contents and (digest := file_sha256(file)) != self.sha256:
            raise BundleError(
                f"'{self.path}' in {folder} was changed after the export: its SHA-256 is {digest[:12]}…, "
                f"the manifest says {self.sha256[:12]}…; copy or export the bundle again."
            )


@dataclass(frozen=True)
class GraphNames:
    """Names of a decoder graph's inputs and outputs; `{layer}` stands for the layer's number from 0.

    Attributes:
        input_ids: int64 [1, rows], the tokens of this pass.
        attention_mask: int64 [1, past + rows], all ones; None where the graph has past_length instead.
        past_key: cache dtype [1, key_value_heads, capacity, head_size]; the same buffer is bound as present_key.
        past_value: As past_key.
        logits: float32 [1, rows, vocab_size], one row for each token of the pass, or for those chosen by an input below.
        present_key: The past_key buffer with the pass's keys written behind the cached ones.
        present_value: As present_key.
        position_ids: int64 [1, rows], the places of the pass's tokens in the text; None where the graph has no such input.
        use_cache_branch: bool [1], whether anything is cached; likewise.
        num_logits_to_keep: int64 [], how many rows of logits to compute, the last ones; likewise.
        past_length: int64 [1], the number of cached tokens, so the slot of the pass's first row; likewise.
        logits_rows: int64 [rows of logits], which of the pass's rows get logits; likewise.
    """

    input_ids: str = "input_ids"
    attention_mask: str | None = "attention_mask"
    past_key: str = "past_key_values.{layer}.key"
    past_value: str = "past_key_values.{layer}.value"
    logits: str = "logits"
    present_key: str = "present.{layer}.key"
    present_value: str = "present.{layer}.value"
    position_ids: str | None = None
    use_cache_branch: str | None = None
    num_logits_to_keep: str | None = None
    past_length: str | None = None
    logits_rows: str | None = None
    unknown: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def inputs(self, num_layers: int) -> set[str]:
        """Returns the names of all inputs the graph has."""
        pasts = (past for past, _ in self.cache_pairs(num_layers))
        lengths = (self.attention_mask, self.position_ids, self.use_cache_branch, self.past_length)
        chosen = (self.num_logits_to_keep, self.logits_rows)
        return {self.input_ids, *pasts, *(name for name in (*lengths, *chosen) if name is not None)}

    def cache_pairs(self, num_layers: int) -> Iterator[tuple[str, str]]:
        """Yields (past name, present name) of every cache buffer, layer by layer, key before value."""
        for layer in range(num_layers):
            number = str(layer)
            yield self.past_key.replace("{layer}", number), self.present_key.replace("{layer}", number)
            yield self.past_value.replace("{layer}", number), self.present_value.replace("{layer}", number)


@dataclass(frozen=True)
class DecoderSpec:
    """One decoder of a bundle: its graph, its cache, and how exactly it computes.

    Attributes:
        source: The checkpoint it was exported from, as the user named it.
        architecture: The model type, for people; the runtime does not read it.
        graph: The ONNX file and its external data; the first is the graph.
        lowering: The form of the graph; docs/bundle.md says what each is made of.
        precision: Of the weights: "fp32", "fp16", "bf16", "int8", "int4", or "checkpoint" for the checkpoint's own blocks.
        num_layers: Layers with a key/value cache.
        num_key_value_heads: Heads in a cache.
        head_size: Width of a head.
        vocab_size: Width of a logits row, padding included.
        context_length: The most tokens the cache may hold.
        cache_dtype: The caches' element type: "float32", "float16" or "bfloat16"; the last, which numpy does not know, on
            devices only.
        spare_slots: Cache slots behind the length that a pass may overwrite.
        min_rows: A pass of so many rows or more, and of a multiple of row_multiple, gives the same bits for a row however the
            text is cut into passes; shorter ones are padded.
        row_multiple: See min_rows.
        rows_measured_on: The processor, its instruction sets and the ONNX Runtime that min_rows and row_multiple were measured
            with; None where that is not known.
        block_size: The most quantised weights that share a scale; None where weights are not quantised, or it is not known.
        quantizer: What decided on the codes of int8 or int4 weights: "search" for the least squared error of each block,
            "gptq" for that of a matrix's outputs on a text; None where it is not known, or nothing was rounded.
        exporter: What made the graph of a checkpoint: "mobius" or "optimum"; None where it is not known, or the graph was
            taken as it is.
        cache_capacity: Slots of a cache where the graph fixes them, at least what a full context needs; None where the caller
            chooses.
        names: Input and output names.
        parity: Figures of the exporter's check against the checkpoint, by step.
        other_forms: The same decoder in other lowerings, for other engines; their files may be the same ones. Readers of format
            1.0 know the first form only.
    """

    source: str
    architecture: str
    graph: tuple[FileRecord, ...]
    lowering: str
    precision: str
    num_layers: int
    num_key_value_heads: int
    head_size: int
    vocab_size: int
    context_length: int
    cache_dtype: str
    spare_slots: int
    min_rows: int
    row_multiple: int = 1
    rows_measured_on: str | None = None
    block_size: int | None = None
    quantizer: str | None = None
    exporter: str | None = None
    cache_capacity: int | None = None
    names: GraphNames = field(default_factory=GraphNames)
    parity: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    other_forms: "tuple[DecoderSpec, ...]" = ()
    unknown: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def forms(self) -> "tuple[DecoderSpec, ...]":
        """The decoder in each of its lowerings, every one alone, this one first."""
        return replace(self, other_forms=()), *self.other_forms

    def best_form(self, lowerings: Sequence[str]) -> "DecoderSpec":
        """Returns the form whose lowering comes first in `lowerings`; where none is there this one, for engines to refuse."""
        there = {form.lowering: form for form in reversed(self.forms)}
        return next((there[lowering] for lowering in lowerings if lowering in there), self.forms[0])

    def rows_of_pass(self, num_tokens: int) -> int:
        """Returns how many rows a pass has that feeds so many tokens, padding rows included."""
        return -(-max(num_tokens, self.min_rows) // self.row_multiple) * self.row_multiple

    @property
    def padding(self) -> str:
        """How passes are padded, for people."""
        if self.row_multiple > 1:
            return f"passes are padded to multiples of {self.row_multiple} rows"
        return f"passes are padded to {self.min_rows} rows" if self.min_rows > 1 else "passes need no padding"

    @property
    def most_padding(self) -> int:
        """The most padding rows a pass can have."""
        return self.rows_of_pass(1) - 1

    def context_bytes(self, slots: int, max_rows: int) -> int:
        """Returns what caches of so many slots and the logits of so many rows take, in bytes."""
        return slots * self.cache_bytes_per_token + max_rows * self.vocab_size * 4

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of key and value cache one token takes, all layers together; a growing graph's past and present take turns."""
        buffers = 2 if self.lowering == "growing" else 1
        return buffers * 2 * self.num_layers * self.num_key_value_heads * self.head_size * self.cache_itemsize

    @property
    def cache_itemsize(self) -> int:
        """Bytes of one number in a cache."""
        return {"float32": 4, "float16": 2, "bfloat16": 2}[self.cache_dtype]


@dataclass(frozen=True)
class TokenizerSpec:
    """The tokenizer of both models.

    Attributes:
        file: tokenizer.json in the format of the tokenizers library.
        chat_template: The Jinja template, or None where the model has none.
        bos_token: What a chat template calls `bos_token`.
        eos_token: What a chat template calls `eos_token`.
        eos_token_ids: Every id that ends a text.
        vocab_size: Tokens in the table, added ones included; at most a decoder's `vocab_size`.
    """

    file: FileRecord
    chat_template: FileRecord | None
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    unknown: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Bundle:
    """A bundle's manifest, and the folder it lies in.

    Attributes:
        folder: Where the files are.
        tokenizer: The target's tokenizer; also the draft's, unless there is a draft vocabulary.
        target: The model whose text is generated.
        draft: The model that proposes, or None for lookup drafting only.
        producer: What made the bundle: "specrt" and its version.
        draft_vocabulary: What the draft's logits stand for, and how it reads the target's tokens (runtime/draft_vocabulary.py);
            None where both models have the same ids.
    """

    folder: Path
    tokenizer: TokenizerSpec
    target: DecoderSpec
    draft: DecoderSpec | None
    producer: str
    draft_vocabulary: FileRecord | None = None
    unknown: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def files(self) -> Iterator[FileRecord]:
        """Yields every file the manifest names, one that several forms share once."""
        decoders = [self.target, *([] if self.draft is None else [self.draft])]
        graphs = (record for decoder in decoders for form in decoder.forms for record in form.graph)
        named = (self.tokenizer.file, self.tokenizer.chat_template, *graphs, self.draft_vocabulary)
        there = [record for record in named if record is not None]
        yield from {(record.path, record.size, record.sha256): record for record in there}.values()


def file_sha256(file: Path) -> str:
    """Returns a file's SHA-256 in hex."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
