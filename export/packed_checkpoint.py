"""Folders whose matrices GPTQ or AWQ has quantised: their packed tensors, and the same model in float32 for who reads it."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .errors import ExportError
from .kept_weights import StoredMatrix
from .packed_layer import PackedLayer, Packing
from .source import Source

_PACKED = (".qweight", ".qzeros", ".scales", ".g_idx")
_SHARD_BYTES = 1 << 30


@contextmanager
def unpacked(source: Source, place: Path) -> Iterator[Source]:
    """Lends a source whose weights are floats: the given one, or one made in `place` while the block runs."""
    packed = PackedCheckpoint.find(source.path) if source.kind == "folder" else None
    if packed is None:
        yield source
        return
    with packed.in_float32(place) as twin:
        yield replace(source, path=twin)


class PackedCheckpoint:
    """The tensors of a folder whose matrices are packed, wherever in its files they lie."""

    def __init__(self, folder: Path, packing: Packing) -> None:
        """Reads the files' headers."""
        self.folder = folder
        self._packing = packing
        self._files: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                self._files.update(dict.fromkeys(tensors.keys(), file))
        self._layers = [name.removesuffix(".qweight") for name in self._files if name.endswith(".qweight")]

    @classmethod
    def find(cls, folder: Path) -> "PackedCheckpoint | None":
        """Opens a model's folder; None where its weights are not packed.

        Raises:
            ExportError: See Packing.of.
        """
        packing = Packing.of(json.loads((folder / "config.json").read_text(encoding="utf-8")), folder.name)
        return None if packing is None else cls(folder, packing)

    @property
    def num_parameters(self) -> int:
        """Weights of the model, packed or not."""
        return sum(self._count(name) for name in self._files if not name.endswith(_PACKED[1:]))

    def _count(self, name: str) -> int:
        with safe_open(self._files[name], framework="pt") as tensors:
            elements = int(np.prod(tensors.get_slice(name).get_shape()))
        return elements * 32 // self._packing.bits if name.endswith(".qweight") else elements

    def matrices(self) -> list[StoredMatrix]:
        """Returns the packed matrices.

        Raises:
            ExportError: The first has groups that cannot be kept.
        """
        for layer in self._layers[:1]:
            _ = self._layer(layer).blocks
        return [StoredMatrix(name, self._columns_of(name), lambda name=name: self._layer(name).blocks) for name in self._layers]

    def _columns_of(self, layer: str) -> int:
        with safe_open(self._files[f"{layer}.qweight"], framework="pt") as tensors:
            first = int(tensors.get_slice(f"{layer}.qweight").get_shape()[0])
        return first if self._packing.is_awq else first * 32 // self._packing.bits

    def _layer(self, layer: str) -> PackedLayer:
        there = [name for name in (f"{layer}{suffix}" for suffix in _PACKED) if name in self._files]
        tensors = {name.removeprefix(f"{layer}."): self._tensor(name).numpy() for name in there}
        return PackedLayer(self._packing, layer, tensors)

    def _tensor(self, name: str) -> torch.Tensor:
        with safe_open(self._files[name], framework="pt") as tensors:
            tensor: torch.Tensor = tensors.get_tensor(name)
        if not tensor.is_floating_point():
            return tensor
        values = tensor.float()
        if not values.isfinite().all():
            raise ExportError(f"'{name}' in {self.folder.name} holds NaN or infinity: download the model again.")
        return values

    @contextmanager
    def in_float32(self, place: Path) -> Iterator[Path]:
        """Lends a folder with the same model in float32, as transformers and mobius read it.

        Args:
            place: Where it is made; it takes four bytes a weight there.
        """
        with tempfile.TemporaryDirectory(dir=place, prefix=".float32-") as name:
            twin = Path(name)
            for file in self.folder.iterdir():
                if file.is_file() and ".safetensors" not in file.name and file.name != "config.json":
                    shutil.copyfile(file, twin / file.name)
            config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
            plain = {key: value for key, value in config.items() if key != "quantization_config"}
            (twin / "config.json").write_text(json.dumps(plain), encoding="utf-8")
            self._write_weights(twin)
            yield twin

    def _write_weights(self, twin: Path) -> None:
        weight_map: dict[str, str] = {}
        shard: dict[str, torch.Tensor] = {}

        def flush() -> None:
            file = f"weights-{len(set(weight_map.values()))}.safetensors"
            try:
                save_file(shard, twin / file, metadata={"format": "pt"})
            except SafetensorError as error:
                raise ExportError(
                    f"The weights of {self.folder.name} could not be written as floats to {twin.parent} ({error}): free "
                    "some disk, or raise the limit on the size of files (ulimit -f)."
                ) from error
            weight_map.update(dict.fromkeys(shard, file))
            shard.clear()

        for name in self._files:
            if name.endswith(".qweight"):
                layer = name.removesuffix(".qweight")
                shard[f"{layer}.weight"] = torch.from_numpy(self._layer(layer).values)
            elif not name.endswith(_PACKED):
                shard[name] = self._tensor(name)
            if sum(tensor.nbytes for tensor in shard.values()) > _SHARD_BYTES:
                flush()
        flush()
        index = {"metadata": {}, "weight_map": weight_map}
        (twin / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
