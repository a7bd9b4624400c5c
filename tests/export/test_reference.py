"""The checkpoint in torch, its weights read as they are needed: the same numbers as transformers' own loading of it all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

import export.base_graph
from export.base_graph import build_base_graph
from export.errors import ExportError
from export.gguf_file import dequantize_tensor, read_gguf
from export.reference import Reference, load_reference
from export.source import Source, resolve_source

from .conftest import CopyCheckpoint
from .quantized_checkpoints import write_gguf


@pytest.fixture(scope="module")
def gguf_source(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Source:
    """The tiny target as a GGUF file in Q8_0."""
    return resolve_source(
        str(write_gguf(tiny_target, tmp_path_factory.mktemp("gguf") / "tiny.gguf", GGMLQuantizationType.Q8_0))
    )


def logits_of_transformers(texts: list[list[int]], folder: Path, **options: str) -> NDArray[np.float32]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **options
    ).eval()
    with torch.inference_mode():
        return model(torch.tensor(texts), use_cache=False).logits.numpy()


def stored_as(folder: Path, types: dict[bool, torch.dtype]) -> None:
    """Casts the matrices (True) and the vectors (False) of a folder's weights."""
    weights = load_file(folder / "model.safetensors")
    cast = {name: tensor.to(types[tensor.ndim > 1]) for name, tensor in weights.items()}
    save_file(cast, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("vectors", [torch.bfloat16, torch.float32], ids=["one type", "two types"])
@pytest.mark.parametrize("matrices", [torch.bfloat16, torch.float16, torch.float32])
def test_a_folder_gives_what_transformers_computes_from_it(
    tiny_target: Path,
    copy_checkpoint: CopyCheckpoint,
    probe: list[int],
    matrices: torch.dtype,
    vectors: torch.dtype,
):
    folder = copy_checkpoint(tiny_target, dtype="bfloat16")  # what a config says of the type does not count
    stored_as(folder, {True: matrices, False: vectors})
    texts = [probe[:20], probe[20:40]]
    found = load_reference(resolve_source(str(folder))).logits(texts)
    assert np.array_equal(found, logits_of_transformers(texts, folder))


def test_a_gguf_file_gives_what_transformers_computes_from_it(gguf_source: Source, probe: list[int]):
    texts = [probe[:20], probe[20:40]]
    expected = logits_of_transformers(texts, gguf_source.path.parent, gguf_file=gguf_source.path.name)
    assert np.array_equal(load_reference(gguf_source).logits(texts), expected)


def on_meta(reference: Reference) -> bool:
    return all(parameter.is_meta for parameter in reference.module.parameters())


def test_weights_are_there_only_while_a_layer_computes(target_source: Source, probe: list[int]):
    reference = load_reference(target_source)
    held: list[int] = []

    def look(_: torch.nn.Module) -> None:
        held.append(sum(not parameter.is_meta for parameter in reference.module.parameters()))

    assert on_meta(reference)
    reference.logits([probe[:4]], look)
    assert set(held) == {1}
    assert on_meta(reference)


def test_a_rounding_changes_the_pass_and_not_the_checkpoint(target_source: Source, probe: list[int]):
    def halve(module: torch.nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.mul_(0.5)

    reference = load_reference(target_source)
    before = reference.logits([probe[:20]])
    assert not np.allclose(reference.logits([probe[:20]], halve), before)
    assert np.array_equal(reference.logits([probe[:20]]), before)


def test_weights_are_dropped_after_a_failure(target_source: Source, probe: list[int]):
    def fail(_: torch.nn.Module) -> None:
        raise ArithmeticError

    reference = load_reference(target_source)
    with pytest.raises(ArithmeticError):
        reference.logits([probe[:4]], fail)
    assert reference.logits([probe[:4]]).shape[:2] == (1, 4)


def test_a_parameter_without_a_value_is_refused(gguf_source: Source):
    reference = load_reference(gguf_source)
    weights = {name: torch.zeros(1) for name, _ in reference.module.named_parameters() if "layers.2.mlp.up" not in name}
    with pytest.raises(
        ExportError, match=r"no weights for 1 tensors of its model, model\.layers\.2\.mlp\.up_proj\.weight first"
    ):
        Reference(reference.module, weights)


# --- GGUF files ------------------------------------------------------------------------------------------------------


def test_building_a_graph_reads_no_tensor_of_a_gguf_file(gguf_source: Source, monkeypatch: pytest.MonkeyPatch):
    read: list[str] = []

    def noted(path: Path, tensor: object) -> NDArray[np.float32]:
        read.append(tensor.name)
        return dequantize_tensor(path, tensor)

    monkeypatch.setattr(export.base_graph, "dequantize_tensor", noted)
    model = build_base_graph(gguf_source)
    assert not read
    for value in model.graph.initializers.values():
        assert value.const_value.numpy().shape == tuple(value.const_value.shape)
    assert sorted(read) == sorted(tensor.name for tensor in read_gguf(gguf_source.path).tensors)


def test_a_tensor_is_dequantised_in_pieces_as_in_one(gguf_source: Source, monkeypatch: pytest.MonkeyPatch):
    tensor = max(read_gguf(gguf_source.path).tensors, key=lambda tensor: tensor.n_elements)
    whole = dequantize_tensor(gguf_source.path, tensor)
    monkeypatch.setattr("export.gguf_file._CHUNK", 3 * whole.shape[1])
    assert len(whole) % 3, "the last piece is a shorter one"
    assert np.array_equal(dequantize_tensor(gguf_source.path, tensor), whole)
