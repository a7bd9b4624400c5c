"""A GGUF file as `Q4_K_M` mixes it, kept from end to end: its graph against torch with the gguf package's own values."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from export.bundle import export_bundle
from export.parity import exact_activations
from runtime import Generator, SamplingParams
from runtime.contract import Bundle
from runtime.decoder import Decoder
from runtime.ort.backend import OrtBackend

from .k_quants import quantize
from .quantized_checkpoints import write_gguf

Q4_K, Q6_K = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K
# What llama.cpp gives more bits in a small model: the embedding where it is the head, and half of these matrices.
FINER = ("token_embd.weight", "blk.0.attn_v.weight", "blk.0.ffn_down.weight")
TOKENS = np.random.default_rng(7).integers(3, 512, 48).tolist()


@pytest.fixture(scope="module")
def checkpoint(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights whose rows are multiples of 256 wide, as blocks of these types are."""
    folder = tmp_path_factory.mktemp("k_quants") / "model"
    shutil.copytree(tiny_target, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2, "initializer_range": 0.06}
    config = transformers.LlamaConfig(**json.loads((folder / "config.json").read_text(encoding="utf-8")) | wide)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "norm" in name:
                weights.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def source(checkpoint: Path) -> Path:
    return write_gguf(checkpoint, checkpoint.with_name("model-Q4_K_M.gguf"), Q4_K, dict.fromkeys(FINER, Q6_K))


@pytest.fixture(scope="module")
def bundle(source: Path) -> Bundle:
    return export_bundle(str(source), None, source.with_name("bundle"), precision="checkpoint", max_length=96)


def logits_in_torch(checkpoint: Path, source: Path) -> np.ndarray:
    """The logits of TOKENS by transformers' own model, its matrices replaced by what the gguf package reads in the file."""
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    stored = {tensor.name: tensor for tensor in GGUFReader(source).tensors}
    taken = set()

    def load(name: str, weights: torch.Tensor, heads: int = 0) -> None:
        values = dequantize(stored[name].data, stored[name].tensor_type).reshape(weights.shape)
        if heads:  # llama.cpp rotates neighbouring channels
            values = values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        weights.data = torch.from_numpy(np.array(values))
        taken.add(name)

    load("token_embd.weight", model.model.embed_tokens.weight)
    load("output_norm.weight", model.model.norm.weight)
    for number, layer in enumerate(model.model.layers):
        load(f"blk.{number}.attn_norm.weight", layer.input_layernorm.weight)
        load(f"blk.{number}.ffn_norm.weight", layer.post_attention_layernorm.weight)
        load(f"blk.{number}.attn_q.weight", layer.self_attn.q_proj.weight, model.config.num_attention_heads)
        load(f"blk.{number}.attn_k.weight", layer.self_attn.k_proj.weight, model.config.num_key_value_heads)
        load(f"blk.{number}.attn_v.weight", layer.self_attn.v_proj.weight)
        load(f"blk.{number}.attn_output.weight", layer.self_attn.o_proj.weight)
        for ours, theirs in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")):
            load(f"blk.{number}.ffn_{ours}.weight", getattr(layer.mlp, theirs).weight)
    model.tie_weights()
    assert taken == set(stored)
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].numpy()


@pytest.mark.parametrize(("kind", "error"), [(Q4_K, 0.1), (Q6_K, 0.03)])
def test_blocks_that_are_written_here_stand_for_the_weights(kind: GGMLQuantizationType, error: float) -> None:
    """Otherwise the file would be noise, and little in it told apart."""
    weights = np.random.default_rng(1).normal(0.01, 0.05, (24, 768)).astype(np.float32)
    read = dequantize(quantize(weights, kind), kind)
    assert np.square(read - weights).mean() < error**2 * np.square(weights).mean()


def test_the_file_mixes_both_types(source: Path) -> None:
    kinds = Counter(tensor.tensor_type.name for tensor in GGUFReader(source).tensors)
    assert kinds == {"Q4_K": 12, "Q6_K": 3, "F32": 5}


def test_the_graph_has_the_files_blocks_and_computes_with_their_values(checkpoint: Path, source: Path, bundle: Bundle) -> None:
    expected = logits_in_torch(checkpoint, source)
    with exact_activations(bundle.target, bundle.folder) as exact:
        decoder = Decoder(OrtBackend(threads=1).load(exact, bundle.folder), 96, num_rows=len(TOKENS))
        found = decoder.forward(TOKENS, len(TOKENS)).copy()
    assert expected.std() > 0.5
    np.testing.assert_allclose(found, expected, atol=1e-3)
    nodes = onnx.load(bundle.folder / "target" / "model.onnx", load_external_data=False).graph.node
    bits = Counter(
        (node.op_type, attributes["bits"].i, attributes["block_size"].i)
        for node in nodes
        if "bits" in (attributes := {attribute.name: attribute for attribute in node.attribute})
    )
    # Fewer weights share a step in Q6_K, whose six bits are kept in eight; the head is the embedding.
    assert bits == {("MatMulNBits", 4, 32): 12, ("MatMulNBits", 8, 16): 3, ("GatherBlockQuantized", 8, 16): 1}


def test_it_generates_and_speculates(bundle: Bundle) -> None:
    generator = Generator.from_bundle(bundle.folder, threads=1, drafter="lookup")
    params = SamplingParams(max_new_tokens=32, ignore_eos=True)
    texts = {generator.generate("a b c a b c a b", params, drafter=drafter).token_ids for drafter in ("lookup", "off")}
    assert len(texts) == 1
