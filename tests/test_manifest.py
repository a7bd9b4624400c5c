"""bundle.json: read, refused, kept and written again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.contract import Bundle, DecoderSpec, FileRecord, GraphNames, TokenizerSpec
from runtime.errors import BundleError
from runtime.manifest import load_bundle, manifest_of, read_manifest, save_bundle

# A place in the manifest: keys and list indices from the top.
Place = tuple[str | int, ...]


def decoder_spec(folder: Path, name: str) -> DecoderSpec:
    return DecoderSpec(
        source=f"made/{name}",
        architecture="llama",
        graph=(FileRecord.of(folder, f"{name}/model.onnx"), FileRecord.of(folder, f"{name}/model.onnx.data")),
        lowering="gqa",
        precision="int4",
        num_layers=4,
        num_key_value_heads=2,
        head_size=16,
        vocab_size=512,
        context_length=256,
        cache_dtype="float16",
        spare_slots=1,
        min_rows=2,
        names=GraphNames(input_ids="tokens", past_key="old.{layer}.k"),
        parity={"prefill": {"max_difference": 1.5e-05}},
    )


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """A bundle on the disk whose fields all differ from their defaults; its graphs are no graphs."""
    folder = tmp_path / "bundle"
    for name in ("target", "draft"):
        (folder / name).mkdir(parents=True)
        (folder / name / "model.onnx").write_bytes(b"graph of the " + name.encode())
        (folder / name / "model.onnx.data").write_bytes(bytes(range(256)))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }} é")
    tokenizer = TokenizerSpec(
        FileRecord.of(folder, "tokenizer.json"), FileRecord.of(folder, "chat_template.jinja"), "<s>", "</s>", (0, 2), 500
    )
    (folder / "draft" / "vocabulary.npz").write_bytes(b"no vocabulary")
    vocabulary = FileRecord.of(folder, "draft/vocabulary.npz")
    made = Bundle(folder, tokenizer, decoder_spec(folder, "target"), decoder_spec(folder, "draft"), "specrt 1 é", vocabulary)
    save_bundle(made)
    return made


@pytest.fixture
def rewrite(bundle: Bundle) -> Callable[[Callable[[dict[str, Any]], None]], None]:
    """A function that changes the manifest on the disk."""

    def change_file(change: Callable[[dict[str, Any]], None]) -> None:
        path = bundle.folder / "bundle.json"
        manifest = json.loads(path.read_text(encoding="utf-8"))
        change(manifest)
        path.write_text(json.dumps(manifest), encoding="utf-8")

    return change_file


def setting(place: Place, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(manifest: Any) -> None:
        for key in place[:-1]:
            manifest = manifest[key]
        manifest[place[-1]] = value

    return change


def deleting(place: Place) -> Callable[[dict[str, Any]], None]:
    def change(manifest: Any) -> None:
        for key in place[:-1]:
            manifest = manifest[key]
        del manifest[place[-1]]

    return change


# --- round trip ------------------------------------------------------------------------------------------------------


def test_round_trip(bundle: Bundle):
    assert load_bundle(bundle.folder) == bundle
    assert load_bundle(str(bundle.folder)) == bundle
    assert {file.name for file in bundle.folder.iterdir()} == {
        "bundle.json", "chat_template.jinja", "tokenizer.json", "target", "draft"
    }  # fmt: skip


def test_round_trip_without_what_may_be_absent(bundle: Bundle, rewrite):
    rewrite(setting(("draft",), None))
    rewrite(deleting(("draft_vocabulary",)))
    rewrite(setting(("tokenizer", "chat_template"), None))
    rewrite(setting(("tokenizer", "bos_token"), None))
    for optional in ("names", "parity"):
        rewrite(deleting(("target", optional)))
    read = load_bundle(bundle.folder)
    assert read.draft is None
    assert read.draft_vocabulary is None
    assert read.tokenizer.chat_template is None
    assert read.tokenizer.bos_token is None
    assert (read.target.names, read.target.parity) == (GraphNames(), {})
    save_bundle(read)
    assert load_bundle(bundle.folder) == read


def test_files_are_all_named(bundle: Bundle):
    assert [record.path for record in bundle.files()] == [
        "tokenizer.json", "chat_template.jinja",
        "target/model.onnx", "target/model.onnx.data", "draft/model.onnx", "draft/model.onnx.data", "draft/vocabulary.npz",
    ]  # fmt: skip


def test_a_vocabulary_of_no_draft_is_refused(bundle: Bundle, rewrite):
    rewrite(setting(("draft",), None))
    with pytest.raises(BundleError, match="names a draft_vocabulary and no draft"):
        load_bundle(bundle.folder)


def test_file_record_is_the_files_own_figures(bundle: Bundle):
    contents = (bundle.folder / "target" / "model.onnx.data").read_bytes()
    record = bundle.target.graph[1]
    assert (record.size, record.sha256) == (256, hashlib.sha256(contents).hexdigest())


def test_unknown_fields_are_kept_on_every_level(bundle: Bundle, rewrite):
    places: list[Place] = [
        (), ("tokenizer",), ("tokenizer", "file"), ("target",), ("target", "names"), ("target", "graph", 1), ("draft",)
    ]  # fmt: skip
    for number, place in enumerate(places):
        rewrite(setting((*place, "measured_costs"), {"number": number, "list": [1, None]}))
    before = json.loads((bundle.folder / "bundle.json").read_text(encoding="utf-8"))
    read = load_bundle(bundle.folder)
    assert read.target.names.unknown == {"measured_costs": {"number": 4, "list": [1, None]}}
    save_bundle(read)
    assert json.loads((bundle.folder / "bundle.json").read_text(encoding="utf-8")) == before == manifest_of(read)


def test_cache_bytes_per_token(bundle: Bundle):
    assert bundle.target.cache_bytes_per_token == 2 * 4 * 2 * 16 * 2  # key and value, layers, heads, width, bytes of float16


# --- versions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.0", "1.7", "1.123"])
def test_any_minor_version_is_read(bundle: Bundle, rewrite, version: str):
    rewrite(setting(("format_version",), version))
    assert load_bundle(bundle.folder).target == bundle.target


@pytest.mark.parametrize(("version", "advice"), [("2.0", "update the package"), ("0.9", "export the bundle again")])
def test_other_major_version_is_refused(bundle: Bundle, rewrite, version: str, advice: str):
    rewrite(setting(("format_version",), version))
    # Before anything else is looked at: another version may mean anything by any field.
    rewrite(setting(("target",), "something else"))
    with pytest.raises(BundleError, match=rf"has format version {version}; this runtime reads 1.x: {advice}"):
        load_bundle(bundle.folder)


@pytest.mark.parametrize("version", [None, 1, "1", "one", "1.0.0", "", [1, 0], {"major": 1}])
def test_version_that_is_none_is_refused(bundle: Bundle, rewrite, version: object):
    rewrite(setting(("format_version",), version))
    with pytest.raises(BundleError, match=r"has format_version .*; expected one such as '1\.0'"):
        load_bundle(bundle.folder)


def test_missing_version_is_refused(bundle: Bundle, rewrite):
    rewrite(deleting(("format_version",)))
    with pytest.raises(BundleError, match="has format_version None"):
        load_bundle(bundle.folder)


# --- fields ----------------------------------------------------------------------------------------------------------

REQUIRED: list[Place] = [
    ("tokenizer",), ("target",), ("draft",), ("producer",),
    *[("tokenizer", name) for name in ("file", "chat_template", "bos_token", "eos_token", "eos_token_ids", "vocab_size")],
    *[("tokenizer", "file", name) for name in ("path", "size", "sha256")],
    *[
        ("draft", name)
        for name in (
            "source", "architecture", "graph", "lowering", "precision", "num_layers", "num_key_value_heads", "head_size",
            "vocab_size", "context_length", "cache_dtype", "spare_slots", "min_rows",
        )
    ],
]  # fmt: skip


@pytest.mark.parametrize("place", REQUIRED, ids=".".join)
def test_missing_field_is_named_with_its_place(bundle: Bundle, rewrite, place: Place):
    rewrite(deleting(place))
    where = "".join(f": {key}" for key in place[:-1])
    with pytest.raises(BundleError, match=rf"bundle\.json{where} lacks the field '{place[-1]}'"):
        load_bundle(bundle.folder)


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        (("producer",), 5, "producer is 5 where str is expected"),
        (("producer",), None, "producer is None where str is expected"),
        (("target",), [], r"target is \[\] where an object is expected"),
        (("target",), None, "target is None where an object is expected"),
        (("draft",), "none", "draft is 'none' where an object is expected"),
        (("tokenizer", "file"), "tokenizer.json", "tokenizer: file is 'tokenizer.json' where an object is expected"),
        (("tokenizer", "bos_token"), 1, "tokenizer: bos_token is 1 where str is expected"),
        (("tokenizer", "eos_token_ids"), 2, "tokenizer: eos_token_ids is 2 where a list is expected"),
        (("tokenizer", "eos_token_ids"), [0, "2"], r"tokenizer: eos_token_ids\[1\] is '2' where int is expected"),
        (("tokenizer", "vocab_size"), 512.0, "tokenizer: vocab_size is 512.0 where int is expected"),
        (("tokenizer", "vocab_size"), 0, "tokenizer: vocab_size is 0"),
        (("tokenizer", "file", "size"), "5", "tokenizer: file: size is '5' where int is expected"),
        (("target", "graph", 1, "path"), 3, r"target: graph\[1\]: path is 3 where str is expected"),
        (("target", "graph"), [], "target: graph names no file"),
        (("target", "graph"), {}, "target: graph is {} where a list is expected"),
        (("target", "num_layers"), True, "target: num_layers is True where int is expected"),
        (("target", "num_layers"), None, "target: num_layers is None where int is expected"),
        (("target", "names"), "default", "target: names is 'default' where an object is expected"),
        (("target", "names", "logits"), ["logits"], r"target: names: logits is \['logits'\] where str is expected"),
        (("target", "parity"), 0.1, "target: parity is 0.1 where Mapping is expected"),
        (("target", "parity"), {"prefill": "x"}, r"target: parity\['prefill'\] is 'x' where Mapping is expected"),
        (
            ("target", "lowering"),
            "dense",
            "target: lowering is 'dense'; this runtime knows gqa, gqa-half, static, primitive, growing",
        ),
        (("target", "precision"), "int2", "target: precision is 'int2'; this runtime knows fp32, fp16, bf16, int8, int4"),
        (("draft", "cache_dtype"), "float8", "draft: cache_dtype is 'float8'; this runtime knows float32, float16, bfloat16"),
        *[
            (("draft", name), value, f"draft: {name} is {value}")
            for name in ("num_layers", "num_key_value_heads", "head_size", "vocab_size", "context_length", "min_rows")
            for value in (0, -1)
        ],
        (("target", "num_layers"), 10**9, "target: num_layers is 1000000000; at most 10,000 is expected"),
        (("target", "min_rows"), 10**18, "target: min_rows is 1000000000000000000; at most 1,024"),
        (("target", "spare_slots"), 10**9, "target: spare_slots is 1000000000; at most 1,024"),
        (("target", "spare_slots"), -1, "target: spare_slots is -1"),
        (("target", "graph", 0, "size"), -1, r"target: graph\[0\]: size is -1"),
        (("tokenizer", "eos_token_ids"), [-1], r"tokenizer: eos_token_ids"),
        (("target", "names", "past_key"), "past.{number}.key", "target: names: past_key is 'past.{number}.key'"),
        (("target", "names", "past_key"), "past.{layer.key", "target: names: past_key is 'past.{layer.key'"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else repr(value)[:30],
)
def test_wrong_field_is_named_with_its_place(bundle: Bundle, rewrite, place: Place, value: object, sentence: str):
    rewrite(setting(place, value))
    with pytest.raises(BundleError, match=rf"bundle\.json: {sentence}"):
        read_manifest(bundle.folder)


@pytest.mark.parametrize("path", ["/etc/passwd", "../other/model.onnx", "target/../../model.onnx", ".."])
@pytest.mark.parametrize("place", [("target", "graph", 1, "path"), ("tokenizer", "file", "path")])
def test_path_that_leaves_the_folder_is_refused(bundle: Bundle, rewrite, place: Place, path: str):
    (bundle.folder.parent / "model.onnx").write_bytes(bytes(range(256)))
    rewrite(setting(place, path))
    with pytest.raises(BundleError, match=f"the path '{path}' leaves the bundle's folder"):
        load_bundle(bundle.folder)


# --- files -----------------------------------------------------------------------------------------------------------


def test_no_folder(tmp_path: Path):
    with pytest.raises(BundleError, match=r"There is no bundle folder at .*no-such: make one with scripts/export.py"):
        load_bundle(tmp_path / "no-such")


def test_file_instead_of_a_folder(tmp_path: Path):
    (tmp_path / "file").write_text("{}")
    with pytest.raises(BundleError, match="There is no bundle folder at"):
        load_bundle(tmp_path / "file")


def test_name_that_no_folder_can_have(tmp_path: Path):
    with pytest.raises(BundleError, match=r"^There is no bundle folder at .{1,250}: make one with scripts/export.py\.$"):
        load_bundle(tmp_path / ("x" * 5000))


def test_path_that_is_not_utf8(bundle: Bundle):
    """ONNX Runtime would refuse it in words about its constructor."""
    odd = bundle.folder.rename(bundle.folder.with_name(os.fsdecode(b"bundle\xff")))
    with pytest.raises(
        BundleError, match=r"^The bundle's path '.*bundle\\udcff' is not UTF-8, as engines need it: rename it\.$"
    ):
        load_bundle(odd)


def test_folder_that_is_no_bundle(tmp_path: Path):
    with pytest.raises(BundleError, match=r"is not a bundle: it holds no bundle\.json"):
        load_bundle(tmp_path)


@pytest.mark.parametrize("kept", [0, 1, 500, -3])
def test_truncated_manifest(bundle: Bundle, kept: int):
    path = bundle.folder / "bundle.json"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(BundleError, match=r"bundle\.json is not valid JSON .*: the file is truncated or damaged"):
        load_bundle(bundle.folder)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[1]", "holds a JSON list where an object"),
        (b"[" * 200_000, "not valid JSON .*recursion"),
        (b'{"format_version": "1.0", "size": ' + b"9" * 5000 + b"}", "not valid JSON .*digits"),
        (b'{"format_version": "' + b"x" * 5000 + b'"}', r"has format_version 'x{1,80}; expected one such"),
    ],
    ids=["UTF-16", "list", "deep", "large", "long"],
)
def test_manifest_that_is_no_object(bundle: Bundle, text: bytes, sentence: str):
    (bundle.folder / "bundle.json").write_bytes(text)
    with pytest.raises(BundleError, match=sentence):
        load_bundle(bundle.folder)


FILES = ["tokenizer.json", "chat_template.jinja", "target/model.onnx", "target/model.onnx.data", "draft/model.onnx.data"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("hash_contents", [True, False])
def test_missing_file_is_named(bundle: Bundle, name: str, hash_contents: bool):
    (bundle.folder / name).unlink()
    with pytest.raises(BundleError, match=f"lacks '{name}', which its manifest names"):
        load_bundle(bundle.folder, hash_contents=hash_contents)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("hash_contents", [True, False])
def test_truncated_file_is_named_with_both_sizes(bundle: Bundle, name: str, hash_contents: bool):
    file = bundle.folder / name
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(BundleError, match=f"'{name}' in .* has {size - 1} bytes where the manifest says {size}"):
        load_bundle(bundle.folder, hash_contents=hash_contents)


@pytest.mark.parametrize("name", FILES)
def test_changed_file_is_found_by_its_hash_only(bundle: Bundle, name: str):
    file = bundle.folder / name
    contents = bytearray(file.read_bytes())
    contents[-1] ^= 1
    file.write_bytes(contents)
    with pytest.raises(BundleError, match=f"'{name}' in .* was changed after the export"):
        load_bundle(bundle.folder)
    assert load_bundle(bundle.folder, hash_contents=False) == bundle


@pytest.mark.parametrize("name", ["bundle.json", "target/model.onnx"])
def test_a_file_that_may_not_be_read(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, name: str):
    opened = Path.open

    def refuse(self: Path, *arguments: object, **options: object) -> object:
        if self == bundle.folder / name:
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(BundleError, match=rf"{name}.* cannot be read \(Permission denied\): mend its permissions"):
        load_bundle(bundle.folder)


def test_file_of_several_chunks_is_hashed_whole(tmp_path: Path):
    contents = bytes(3 << 20) + b"end"
    (tmp_path / "large").write_bytes(contents)
    assert FileRecord.of(tmp_path, "large").sha256 == hashlib.sha256(contents).hexdigest()


def test_manifest_is_replaced_whole_or_not_at_all(bundle: Bundle, monkeypatch: pytest.MonkeyPatch):
    before = (bundle.folder / "bundle.json").read_bytes()

    def half(self: Path, text: str, **_: object) -> None:
        self.write_bytes(text[: len(text) // 2].encode())
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="No space left"):
        save_bundle(bundle)
    assert (bundle.folder / "bundle.json").read_bytes() == before
