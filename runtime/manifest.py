"""Reading and writing `bundle.json`: JSON objects to the contract's dataclasses and back.

Fields this version does not know are kept and written again. A missing or ill-typed field is named in the error with
the place where it should stand.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path, PurePosixPath
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from .consistency import check_consistency
from .contract import FORMAT_VERSION, MANIFEST, Bundle, DecoderSpec, FileRecord, GraphNames, TokenizerSpec
from .errors import BundleError
from .graph_metadata import check_context_lengths

_Record = TypeVar("_Record")
_NESTED = (DecoderSpec, FileRecord, GraphNames, TokenizerSpec)
_CHOICES = {
    "lowering": ("gqa", "gqa-half", "static", "primitive", "growing"),
    "precision": ("fp32", "fp16", "bf16", "int8", "int4", "checkpoint"),
    "cache_dtype": ("float32", "float16", "bfloat16"),
}
# Far beyond any model, and far below what would exhaust memory before it is noticed.
_RANGES = {
    "num_layers": (1, 10_000),
    "num_key_value_heads": (1, 10_000),
    "head_size": (1, 100_000),
    "vocab_size": (1, 100_000_000),
    "context_length": (2, 1_000_000_000),
    "min_rows": (1, 1024),
    "row_multiple": (1, 1024),
    "spare_slots": (0, 1024),
    "size": (0, 1 << 60),
    "cache_capacity": (1, 1_000_000_000),
    "block_size": (1, 1_000_000),
}
_LAYER_NAMES = ("past_key", "past_value", "present_key", "present_value")


def load_bundle(folder: str | Path, *, hash_contents: bool = True) -> Bundle:
    """Reads a bundle's manifest and checks its files.

    Args:
        folder: The bundle's folder.
        hash_contents: Whether to compare every file's SHA-256 (a second or two per GB), or sizes only.

    Raises:
        BundleError: No bundle there, a manifest that cannot be read, another major version, a file that is missing, truncated,
            changed or not to be read, or a longer context than a graph was made for.
    """
    bundle = read_manifest(Path(folder))
    try:
        for record in bundle.files():
            record.check(bundle.folder, hash_contents=hash_contents)
        check_context_lengths(bundle)
    except OSError as error:
        raise _unreadable(error) from error
    return bundle


def save_bundle(bundle: Bundle) -> Path:
    """Writes `bundle.json` into the bundle's folder, whole or not at all, and returns its path."""
    path = bundle.folder / MANIFEST
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(manifest_of(bundle), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def read_manifest(folder: Path) -> Bundle:
    """Parses the manifest of a bundle; looks at no other file.

    Raises:
        BundleError: No manifest, no JSON, another major version, a field that is missing or of the wrong kind, or fields
            that contradict each other.
    """
    path = folder / MANIFEST
    try:
        is_there, _ = folder.is_dir(), str(path).encode()
    except UnicodeEncodeError as error:
        raise BundleError(f"The bundle's path {str(folder)!a} is not UTF-8, as engines need it: rename it.") from error
    except OSError:  # a name no folder can have
        is_there = False
    if not is_there:
        raise BundleError(f"There is no bundle folder at {folder!s:.200}: make one with scripts/export.py.")
    if not path.is_file():
        raise BundleError(f"{folder} is not a bundle: it holds no {MANIFEST}; make one with scripts/export.py.")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # JSON that is none, or whose numbers or nesting no manifest has
        raise BundleError(f"{path} is not valid JSON ({error}): the file is truncated or damaged; export again.") from error
    except OSError as error:
        raise _unreadable(error) from error
    if not isinstance(manifest, dict):
        raise BundleError(f"{path} holds a JSON {type(manifest).__name__} where an object is expected.")
    _check_version(manifest.pop("format_version", None), path)
    bundle = _parse(Bundle, {**manifest, "folder": folder}, str(path))
    check_consistency(bundle, str(path))
    return bundle


def manifest_of(bundle: Bundle) -> dict[str, Any]:
    """Returns the JSON object of a bundle, fields of other versions included."""
    manifest = {"format_version": ".".join(map(str, FORMAT_VERSION)), **_object_of(bundle)}
    del manifest["folder"]
    return manifest


def _unreadable(error: OSError) -> BundleError:
    return BundleError(f"{error.filename} cannot be read ({error.strerror}): mend its permissions, or copy the bundle again.")


def _check_version(version: object, path: Path) -> None:
    try:
        major, _minor = (int(part) for part in str(version).split("."))
    except ValueError:
        raise BundleError(f"{path} has format_version {version!r:.80}; expected one such as '1.0'.") from None
    if major != FORMAT_VERSION[0]:
        raise BundleError(
            f"{path} has format version {version}; this runtime reads {FORMAT_VERSION[0]}.x: "
            f"{'update the package' if major > FORMAT_VERSION[0] else 'export the bundle again'}."
        )


def _parse(record: type[_Record], values: object, where: str) -> _Record:
    if not isinstance(values, Mapping):
        raise BundleError(f"{where} is {values!r} where an object is expected.")
    hints = get_type_hints(record)
    known: dict[str, Any] = {}
    for item in fields(record):  # type: ignore[arg-type]
        if item.name == "unknown":
            continue
        if item.name in values:
            known[item.name] = _convert(hints[item.name], values[item.name], f"{where}: {item.name}")
            _check_value(item.name, known[item.name], where)
        elif item.default is MISSING and item.default_factory is MISSING:
            raise BundleError(f"{where} lacks the field '{item.name}': the manifest is damaged, or written by hand.")
    rest = {name: value for name, value in values.items() if name not in hints}
    return record(**known, unknown=rest)  # type: ignore[call-arg]


def _convert(hint: Any, value: Any, where: str) -> Any:
    if isinstance(hint, UnionType):
        inner, _none = get_args(hint)
        return None if value is None else _convert(inner, value, where)
    if hint in _NESTED:
        return _parse(hint, value, where)
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise BundleError(f"{where} is {value!r} where a list is expected.")
        return tuple(_convert(get_args(hint)[0], entry, f"{where}[{index}]") for index, entry in enumerate(value))
    if hint is Any:
        return value
    expected = get_origin(hint) or hint
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        raise BundleError(f"{where} is {value!r} where {expected.__name__} is expected.")
    if expected is Mapping:
        return {key: _convert(get_args(hint)[1], entry, f"{where}[{key!r}]") for key, entry in value.items()}
    return value


def _check_value(name: str, value: Any, where: str) -> None:
    if name in _CHOICES and value not in _CHOICES[name]:
        raise BundleError(f"{where}: {name} is '{value}'; this runtime knows {', '.join(_CHOICES[name])}.")
    if name in _RANGES and value is not None:
        low, high = _RANGES[name]
        if value < low:
            raise BundleError(f"{where}: {name} is {value}; at least {low} is expected.")
        if value > high:
            raise BundleError(f"{where}: {name} is {value}; at most {high:,} is expected.")
    if name == "eos_token_ids" and min(value, default=0) < 0:
        raise BundleError(f"{where}: eos_token_ids is {list(value)}; ids of at least 0 are expected.")
    if name in _LAYER_NAMES and "{layer}" not in value:
        raise BundleError(f"{where}: {name} is '{value}'; a name with '{{layer}}' in it is expected.")
    if name == "path" and (PurePosixPath(value).is_absolute() or ".." in PurePosixPath(value).parts):
        raise BundleError(f"{where}: the path '{value}' leaves the bundle's folder.")
    if name == "graph" and not value:
        raise BundleError(f"{where}: graph names no file.")


def _object_of(record: Any) -> dict[str, Any]:
    written = {item.name: _json_of(getattr(record, item.name)) for item in fields(record) if item.name != "unknown"}
    return {**written, **record.unknown}


def _json_of(value: Any) -> Any:
    if isinstance(value, _NESTED):
        return _object_of(value)
    if isinstance(value, tuple):
        return [_json_of(entry) for entry in value]
    return value
