import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
SCRIPT = ROOT / "scripts" / "train_tiny_pair.py"
FOLDERS = ["tiny-target", "tiny-draft"]
FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def read_json(folder: str, name: str) -> dict:
    return json.loads((DATA / folder / name).read_text(encoding="utf-8"))


def read_header(folder: str) -> dict:
    """The tensors' names, dtypes and shapes: a length of 8 bytes, then JSON."""
    data = (DATA / folder / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header.pop("__metadata__", None)
    return header


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_is_whole(folder):
    names = {path.name for path in (DATA / folder).iterdir()}
    assert names >= FILES
    assert names <= FILES | {"special_tokens_map.json"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_json_files_name_no_path_of_a_machine(folder):
    for path in (DATA / folder).glob("*.json"):
        if path.name != "tokenizer.json":  # its vocabulary has every character as a token
            text = path.read_text(encoding="utf-8")
            assert "_name_or_path" not in text, path.name
            assert not re.search(r'"(/|~|[A-Za-z]:\\)', text), path.name


def test_both_have_one_tokenizer():
    target, draft = ((DATA / folder / "tokenizer.json").read_bytes() for folder in FOLDERS)
    assert target == draft


def test_pair_stays_small():
    assert sum(path.stat().st_size for folder in FOLDERS for path in (DATA / folder).iterdir()) < 1_500_000


def test_architectures_differ_and_agree_on_the_vocabulary():
    configs = [read_json(folder, "config.json") for folder in FOLDERS]
    assert [config["architectures"] for config in configs] == [["LlamaForCausalLM"], ["Qwen2ForCausalLM"]]
    assert [config["vocab_size"] for config in configs] == [512, 512]
    # Without this entry mobius-onnx 0.1.0 builds graphs without RoPE, silently.
    assert [config["rope_scaling"] for config in configs] == [{"rope_type": "default"}] * 2
    assert [config["num_attention_heads"] // config["num_key_value_heads"] for config in configs] == [2, 2]


@pytest.mark.parametrize("folder", FOLDERS)
def test_weights_fill_blocks_of_32_and_embeddings_are_tied(folder):
    header = read_header(folder)
    assert {tensor["dtype"] for tensor in header.values()} == {"F32"}
    assert all(tensor["shape"][-1] % 32 == 0 for name, tensor in header.items() if name.endswith("proj.weight"))
    assert "lm_head.weight" not in header
    assert ("model.layers.0.self_attn.q_proj.bias" in header) == (folder == "tiny-draft")


@pytest.mark.parametrize("folder", FOLDERS)
def test_generation_ends_at_either_end_token(folder):
    tokenizer = Tokenizer.from_file(str(DATA / folder / "tokenizer.json"))
    ids = [tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_end|>")]
    assert read_json(folder, "generation_config.json")["eos_token_id"] == ids


@pytest.mark.parametrize("folder", FOLDERS)
def test_chat_template_is_chatml(folder):
    import jinja2

    template = jinja2.Environment(autoescape=False).from_string(  # noqa: S701 - a prompt is no HTML
        read_json(folder, "tokenizer_config.json")["chat_template"]
    )
    text = template.render(messages=[{"role": "user", "content": "a < b"}], add_generation_prompt=True)
    assert text == "<|im_start|>user\na < b<|im_end|>\n<|im_start|>assistant\n"


def test_tokenizer_splits_digits_and_spells_what_it_never_saw_in_bytes():
    tokenizer = Tokenizer.from_file(str(DATA / "tiny-target" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 512
    assert tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]
    for text in ("été 猫 🐱\n", "ß ∑ 🦄 не видел", "  x\t= 1"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("🦄").ids) > 1  # one character of several tokens, as streaming must expect


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False, timeout=120, env=environment
    )


def test_help_teaches_by_example():
    result = run_script("--help")
    assert result.returncode == 0
    assert "python scripts/train_tiny_pair.py --out tests/data" in result.stdout
    assert all(option in result.stdout for option in ("--out DIR", "--steps N", "--seed N"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--steps", "1"), "--steps is 1; give at least 2"),
        (("--seed", "-1"), "--seed is -1; give 0 or more"),
        (("--out", str(SCRIPT)), "is a file; name a folder"),
    ],
)
def test_bad_input_gets_one_sentence(arguments, sentence, tmp_path):
    result = run_script("--out", str(tmp_path), *arguments)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert not list(tmp_path.iterdir())
