"""Tiny models of many architectures, with random weights: what the export makes of each is the README's table of families.

`python tests/export/families.py` runs the exports and writes tests/data/families.json and the table. The configs are in
transformers' own words; only sizes are small. Heads are 16 wide, which is the least that the attention kernel rotates.
"""

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from export.bundle import SELF, export_bundle
from export.errors import ExportError
from export.lowerings import LOWERINGS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "data" / "families.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- families: python tests/export/families.py -->\n", "<!-- end of families -->"
TAKEN = "yes"
MAX_LENGTH = 128
LONG = 256

_SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": LONG,
    **_SPECIAL,
}
# Every query head has keys and values of its own.
_NEOX_LIKE = {name: value for name, value in _LLAMA_LIKE.items() if name not in ("num_key_value_heads", "head_dim")}
_GPT2_LIKE = {"vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LONG, **_SPECIAL}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
# A head of its own: with the embedding's, a model of random weights repeats its last token.
_GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 128, "tie_word_embeddings": False}
_SLIDING_AND_FULL = ["sliding_attention", "full_attention"]
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Family:
    """An architecture with the options that matter.

    Attributes:
        name: As the README's table has it.
        model_type: As transformers has it.
        config: What its config says otherwise than `base`.
        base: What similar architectures have in common.
        max_length: The context to serve.
    """

    name: str
    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    base: Mapping[str, Any] = field(default_factory=lambda: _LLAMA_LIKE)
    max_length: int = MAX_LENGTH

    def make(self, folder: Path, tokenizer: Path) -> None:
        """Writes a checkpoint with random weights, large enough to matter, biases and norms included."""
        import torch
        import transformers

        config = transformers.AutoConfig.for_model(self.model_type, **{**self.base, **self.config})
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.3)
                else:
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
        model.save_pretrained(folder)
        for file in tokenizer.glob("*token*"):
            shutil.copy(file, folder)


FAMILIES = (
    Family("Llama", "llama"),
    Family("Llama 3 (scaled rotation)", "llama", {"rope_scaling": _LLAMA3_ROPE}),
    Family("Llama with biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    Family("Llama, dynamic rotary scaling", "llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    Family(
        "Llama, YaRN",
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    Family("Mistral", "mistral", {"sliding_window": None}),
    Family("Mistral, window shorter than the context", "mistral", {"sliding_window": 128}, max_length=LONG),
    Family("Mixtral", "mixtral", {**_EXPERTS, "sliding_window": None}),
    Family("Qwen2, Qwen2.5", "qwen2"),
    Family("Qwen3", "qwen3"),
    Family("Qwen3-MoE", "qwen3_moe", {**_EXPERTS, "moe_intermediate_size": 32}),
    Family("Phi-1, Phi-2", "phi", {"partial_rotary_factor": 0.5}),
    Family("Phi-3, Phi-4", "phi3", {"sliding_window": None}),
    Family("Gemma", "gemma"),
    Family("Gemma 2, context within the window", "gemma2", _GEMMA),
    Family("Gemma 2, longer contexts", "gemma2", _GEMMA, max_length=LONG),
    Family("Gemma 3 text, context within the window", "gemma3_text", {**_GEMMA, "layer_types": _SLIDING_AND_FULL}),
    Family("Gemma 3 text, longer contexts", "gemma3_text", {**_GEMMA, "layer_types": _SLIDING_AND_FULL}, max_length=LONG),
    Family("SmolLM3", "smollm3", {"no_rope_layers": [1, 0]}),
    Family("OLMo", "olmo"),
    Family("OLMo 2", "olmo2"),
    Family(
        "Granite",
        "granite",
        {"embedding_multiplier": 6.0, "attention_multiplier": 0.1, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    Family("GPT-2", "gpt2", base=_GPT2_LIKE),
    Family("GPT-J", "gptj", {"rotary_dim": 8}, base=_GPT2_LIKE),
    Family("GPT-NeoX, Pythia", "gpt_neox", {"rotary_pct": 0.25, "num_attention_heads": 2}, base=_NEOX_LIKE),
    Family("GPT-NeoX, one branch after the other", "gpt_neox", {"use_parallel_residual": False}, base=_NEOX_LIKE),
    Family("OPT", "opt", {"word_embed_proj_dim": 64, "ffn_dim": 96}, base=_NEOX_LIKE),
    Family("StableLM", "stablelm", {"partial_rotary_factor": 0.5, "num_attention_heads": 2, "head_dim": 32}),
    Family("Nemotron", "nemotron"),
    Family("Cohere (Command R)", "cohere", {"logit_scale": 1.0}),
    Family("Cohere 2", "cohere2", {"logit_scale": 1.0, "sliding_window": 128, "layer_types": _SLIDING_AND_FULL}),
    Family("GLM-4", "glm4"),
    Family("ERNIE 4.5", "ernie4_5"),
    Family("StarCoder2", "starcoder2", {"sliding_window": None}),
    Family("Falcon-7B", "falcon", {"ffn_hidden_size": 96}, base=_NEOX_LIKE),
    Family("Falcon with ALiBi", "falcon", {"ffn_hidden_size": 96, "alibi": True}, base=_NEOX_LIKE),
    Family("DeepSeek-V3", "deepseek_v3", {"num_key_value_heads": 4}),
    Family(
        "Mamba", "mamba", {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": LONG}, {}
    ),
)


def outcomes(family: Family, checkpoint: Path, out: Path) -> dict[str, str]:
    """Exports a checkpoint in every lowering, each parity check included, and by optimum where none takes it.

    Args:
        family: What it is of.
        checkpoint: A folder that `Family.make` wrote.
        out: Gets a bundle by the lowering's name for each that takes it; the first has a draft, the target itself in int4.

    Returns:
        By lowering TAKEN or the sentence that refuses it, a machine's own figures left out; by "optimum" TAKEN or "no".
    """
    found: dict[str, str] = {}
    for lowering in LOWERINGS:
        draft = None if TAKEN in found.values() else SELF
        options = {"max_length": family.max_length, "lowering": lowering, "exporter": "mobius"}
        found[lowering] = _outcome(checkpoint, draft, out / lowering, **options)
    if TAKEN not in found.values():
        options = {"max_length": family.max_length, "exporter": "optimum"}
        found["optimum"] = TAKEN if _outcome(checkpoint, SELF, out / "optimum", **options) == TAKEN else "no"
    return found


def _outcome(checkpoint: Path, draft: str | None, out: Path, **options: Any) -> str:
    try:
        export_bundle(str(checkpoint), draft, out, **options)
    except ExportError as error:
        sentence = str(error).replace(str(checkpoint), "the model")
        sentence = sentence[0].upper() + sentence[1:]
        return re.sub(r": at the step .*? top tokens agree", "", sentence)
    return TAKEN


def table(results: Mapping[str, Mapping[str, str]]) -> str:
    """Returns the README's table, in Markdown."""
    columns = ("family", "`model_type`", *(f"`{lowering}`" for lowering in LOWERINGS), "why not")
    rows = [columns, ("---",) * len(columns)]
    for name, found in results.items():
        taken = ["yes" if found[lowering] == TAKEN else "no" for lowering in LOWERINGS]
        rows.append((name, f"`{found['model_type']}`", *taken, _reasons(found)))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _reasons(found: Mapping[str, str]) -> str:
    refused = [lowering for lowering in LOWERINGS if found[lowering] != TAKEN]
    sentences = [f"`{lowering}`: {_first_sentence(found[lowering])}" for lowering in refused]
    if len(refused) == len(LOWERINGS):  # and all for the same reason
        sentences = [_first_sentence(found[refused[0]])]
    if found.get("optimum") == TAKEN:
        sentences.append("`--source optimum` exports it.")
    return " ".join(sentences)


def _first_sentence(text: str) -> str:
    return f"{text.removesuffix('.').partition('. ')[0]}."


def main() -> int:
    """Runs all exports; writes the results, and the table into the README."""
    results = {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as name:
            checkpoint = Path(name) / "checkpoint"
            family.make(checkpoint, ROOT / "tests" / "data" / "tiny-target")
            found = outcomes(family, checkpoint, Path(name))
        results[family.name] = {"model_type": family.model_type, **found}
        print(family.name, found, flush=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, marker, after = rest.partition(END)
    if not marker:
        print(f"README.md lacks the two markers {BEGIN.strip()} and {END}", file=sys.stderr)
        return 1
    README.write_text(before + BEGIN + table(results) + END + after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
