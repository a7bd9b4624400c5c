"""Quantised checkpoints of the tiny pair: GGUF files and folders of GPTQ and AWQ, as others' tools write them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from safetensors.numpy import load_file
from safetensors.torch import save_file

from .k_quants import quantize

_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(
    folder: Path, path: Path, kind: GGMLQuantizationType, others: Mapping[str, GGMLQuantizationType] | None = None
) -> Path:
    """Writes a Llama's folder as llama.cpp's converter does, its matrices quantised to one type, or to `others` by name."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    _write_tokenizer(writer, folder)
    for name, stored in load_file(folder / "model.safetensors").items():
        named, values = _gguf_name(name), stored
        short = named.split(".")[-2]
        if short in heads:  # llama.cpp rotates neighbouring channels
            values = stored.reshape(heads[short], 2, -1, stored.shape[1]).swapaxes(1, 2).reshape(stored.shape)
        if values.ndim == 1:
            writer.add_tensor(named, values)
        else:
            chosen = (others or {}).get(named, kind)
            writer.add_tensor(named, quantize(values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[rest.removesuffix('.weight')]}.weight"


def _write_tokenizer(writer: GGUFWriter, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


def pack(codes: np.ndarray, bits: int, places: tuple[int, ...] | None = None) -> np.ndarray:
    """Packs codes [rows, n] into int32 [rows, n * bits / 32]: the i-th code of a word is its column places[i]."""
    size = 32 // bits
    words = codes.astype(np.uint32).reshape(len(codes), -1, size)[:, :, places or range(size)]
    return np.bitwise_or.reduce(words << np.arange(0, 32, bits, dtype=np.uint32), axis=2).view(np.int32)


def group_codes(weights: np.ndarray, bits: int, groups: np.ndarray, *, symmetric: bool) -> tuple[np.ndarray, ...]:
    """Rounds [columns, rows]: returns codes like it, float16 scales and zero points [groups, rows]."""
    top = 2**bits - 1
    scales, zero_points = (np.empty((groups.max() + 1, weights.shape[1]), kind) for kind in (np.float16, np.int64))
    codes = np.empty(weights.shape, np.int64)
    for group in range(len(scales)):
        part = weights[groups == group]
        low, high = np.minimum(part.min(axis=0), 0), np.maximum(part.max(axis=0), 0)
        if symmetric:
            low, high = -np.maximum(-low, high), np.maximum(-low, high)
        scales[group] = np.maximum((high - low) / top, 1e-6)
        # The format of GPTQ without a version stores them less one, so none is 0.
        zero_points[group] = (top + 1) // 2 if symmetric else np.clip(np.rint(-low / scales[group]), 1, top)
        codes[groups == group] = np.clip(np.rint(part / scales[group].astype(np.float32)) + zero_points[group], 0, top)
    return codes, scales, zero_points


def write_packed(
    folder: Path,
    out: Path,
    method: str,
    *,
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = False,
    act_order: bool = False,
) -> tuple[Path, dict[str, np.ndarray]]:
    """Writes a model's folder with its layers' matrices packed as GPTQ ("gptq", "gptq_v2") or AWQ ("awq") does.

    Returns:
        The folder, and float32 [rows, columns] what each packed matrix stands for, by the layer's name.
    """
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors: dict[str, Any] = {}
    values: dict[str, np.ndarray] = {}
    for name, stored in load_file(folder / "model.safetensors").items():
        if stored.ndim == 1 or "embed" in name:
            tensors[name] = torch.from_numpy(stored).to(torch.float16)
            continue
        layer, weights = name.removesuffix(".weight"), stored.T
        groups = np.arange(len(weights)) // group_size
        if act_order:
            groups = np.random.default_rng(0).permutation(groups)
        codes, scales, zero_points = group_codes(weights, bits, groups, symmetric=symmetric)
        values[layer] = ((codes - zero_points[groups]) * scales[groups].astype(np.float32)).T.astype(np.float32)
        if method == "awq":
            places = (0, 2, 4, 6, 1, 3, 5, 7)
            packed = {"qweight": pack(codes, 4, places), "qzeros": pack(zero_points, 4, places)}
        else:
            less = 1 if method == "gptq" else 0
            packed = {
                "qweight": pack(codes.T, bits).T,
                "qzeros": pack(zero_points - less, bits),
                "g_idx": groups.astype(np.int32),
            }
        packed["scales"] = scales
        tensors |= {f"{layer}.{kind}": torch.from_numpy(np.ascontiguousarray(array)) for kind, array in packed.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    quantization: dict[str, Any] = {"quant_method": method, "bits": bits, "group_size": group_size, "version": "gemm"}
    if method != "awq":
        quantization |= {"quant_method": "gptq", "checkpoint_format": method, "desc_act": act_order, "sym": symmetric}
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}), encoding="utf-8")
    return out, values
