"""What is written beside an engine, and the check that the engine still fits.

An engine belongs to one version of TensorRT, one GPU architecture and one graph. Nothing is rebuilt behind the user's back: an
engine that does not fit is refused with the reason and the command that builds it anew.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

from runtime.contract import DecoderSpec, file_sha256
from runtime.errors import BundleError

from .profiles import Profile, slots_needed
from .trt_module import TensorRTModule, format_capability

ENGINES = "engines"


@dataclass(frozen=True)
class EngineRecord:
    """One engine's facts.

    Attributes:
        module: "tensorrt" or "tensorrt_rtx".
        version: The module's.
        compute_capability: Of the GPU it was built for, "86".
        graph: SHA-256 of each file of the graph it was built from, by path in the bundle.
        capacity: Slots of each cache.
        profiles: Sizes of passes it serves, in the engine's own order.
        flags: How it was built.
        build_seconds: How long that took.
        peak_memory: The most resident bytes the building process had; not what the GPU held.
        size: Bytes of the engine.
        sha256: Of the engine.
        top: SHA-256 of each engine that finds the largest logits of its steps, by how many it finds.
    """

    module: str
    version: str
    compute_capability: str
    graph: Mapping[str, str]
    capacity: int
    profiles: tuple[Profile, ...]
    flags: Mapping[str, bool | int | None]
    build_seconds: float
    peak_memory: int
    size: int
    sha256: str
    top: Mapping[str, str] = field(default_factory=dict)

    @property
    def fixed_rows(self) -> int:
        """Rows of a step."""
        return self.profiles[0].max_rows

    @property
    def max_rows(self) -> int:
        """The most rows of a pass."""
        return self.profiles[-1].max_rows

    def save(self, engine: Path) -> None:
        """Writes the record beside its engine."""
        sidecar_of(engine).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, engine: Path, command: str) -> "EngineRecord":
        """Reads the record beside an engine.

        Args:
            engine: The engine's file.
            command: What builds it anew, for the sentence.

        Raises:
            BundleError: There is none, or it is damaged.
        """
        path = sidecar_of(engine)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            profiles = tuple(Profile(**profile) for profile in values.pop("profiles"))
            return cls(**values, profiles=profiles)
        except OSError as error:
            raise BundleError(f"The engine {engine} has no record ({path.name}, {error.strerror}): {command}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BundleError(f"The record {path} is damaged ({type(error).__name__}: {error}): {command}") from error

    def check(
        self, engine: Path, spec: DecoderSpec, tensorrt: TensorRTModule, compute_capability: tuple[int, int], command: str
    ) -> None:
        """Refuses an engine that does not fit.

        Args:
            engine: The engine's file.
            spec: The decoder it should compute.
            tensorrt: What would run it.
            compute_capability: Of the GPU that would run it.
            command: What builds it anew, for the sentence.

        Raises:
            BundleError: It was built by another version, for another GPU, or from another graph, serves too short a context, or
                is truncated or changed.
        """
        here = f"{tensorrt.name} {tensorrt.version}"
        capability = format_capability(compute_capability)
        needed = slots_needed(spec, self.fixed_rows)
        reason = None
        if (self.module, self.version) != (tensorrt.name, tensorrt.version):
            reason = f"was built by {self.module} {self.version}, and this is {here}"
        elif self.compute_capability != capability:
            reason = f"was built for compute capability {self.compute_capability}, and this GPU has {capability}"
        elif self.graph != graph_hashes(spec):
            reason = "was built from another graph than the bundle has now"
        elif self.capacity < needed:
            reason = f"has caches of {self.capacity} slots, and a context of {spec.context_length} tokens needs {needed}"
        elif not engine.is_file():
            reason = "is not there, though its record is"
        elif (size := engine.stat().st_size) != self.size:
            reason = f"has {size:,} bytes where its record says {self.size:,}, so it is truncated or was replaced"
        elif file_sha256(engine) != self.sha256:
            reason = "was changed after it was built"
        elif not all(_is_file_of(top_engine_path(engine, count), digest) for count, digest in self.top.items()):
            reason = "lacks an engine that finds the largest logits, or that was changed after it was built"
        if reason is not None:
            raise BundleError(f"The engine {engine} {reason}: {command}")

    def check_rows(self, max_rows: int, engine: Path, command: str) -> None:
        """Raises BundleError when passes of so many rows are more than the engine's profiles hold."""
        if max_rows > self.max_rows:
            raise BundleError(
                f"The engine {engine} takes passes of up to {self.max_rows} rows, and {max_rows} are needed: "
                f"{command} --max-rows {max_rows}"
            )


def engines_folder(bundle: Path, tensorrt: TensorRTModule, compute_capability: tuple[int, int]) -> Path:
    """Returns where the engines of a bundle lie for one version of TensorRT and one GPU."""
    capability = format_capability(compute_capability)
    return bundle / ENGINES / f"{tensorrt.name}-{tensorrt.version}-sm{capability}"


def engine_path(folder: Path, spec: DecoderSpec) -> Path:
    """Returns a decoder's engine in an engines folder; it lies there as its graph lies in the bundle."""
    return folder / PurePosixPath(spec.graph[0].path).with_suffix(".engine")


def top_engine_path(engine: Path, count: int | str) -> Path:
    """Returns where the engine lies that finds so many of the largest logits of another's steps."""
    return engine.with_name(f"top-{count}.engine")


def _is_file_of(path: Path, digest: str) -> bool:
    return path.is_file() and file_sha256(path) == digest


def sidecar_of(engine: Path) -> Path:
    """Returns where the record of an engine lies."""
    return engine.with_name(f"{engine.name}.json")


def graph_hashes(spec: DecoderSpec) -> dict[str, str]:
    """Returns the SHA-256 of each file of a decoder's graph, by path."""
    return {file.path: file.sha256 for file in spec.graph}


def rebuild_command(bundle: Path, tensorrt: TensorRTModule) -> str:
    """Returns the command that builds a bundle's engines on this machine."""
    return f"python scripts/build_engines.py {bundle} --module {tensorrt.name}"
