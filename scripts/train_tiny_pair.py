"""Trains the small target and draft that the tests run on: minutes on a laptop's CPU, nothing is downloaded.

The corpus (tiny_corpus.py), the tokenizer and both models are made from one seed. The two architectures differ on purpose
(Llama, and Qwen2 with its QKV biases), and the draft is distilled from the target but much smaller: often right, often wrong.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tiny_corpus import CHAT_TEMPLATE, END_OF_TEXT, IM_END, IM_START, SPECIAL_TOKENS, make_corpus

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from transformers import PretrainedConfig, PreTrainedModel

EOS_IDS = [0, 2]  # the tokenizer's trainer numbers the special tokens first, in their order
VOCAB_SIZE = 512
CONTEXT_LENGTH = 512
ROW_LENGTH = 192
BATCH_ROWS = 16
NUM_PROMPTS = 60
PROMPT_LENGTH = 8  # tokens kept of a held-out document that is no chat
MAX_NEW_TOKENS = 100
EXAMPLES = """examples:
  # the pair that lies in the repository: writes tests/data/tiny-target and tests/data/tiny-draft, over what is there
  python scripts/train_tiny_pair.py --out tests/data

  # a quick, bad pair, to try a change of this script
  python scripts/train_tiny_pair.py --out /tmp/pair --steps 20

  # another pair of the same shape
  python scripts/train_tiny_pair.py --out /tmp/pair --seed 7

The same seed gives the same pair on the same machine and PyTorch; elsewhere sums may be rounded otherwise.
"""


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """Trains a byte-level BPE tokenizer of `VOCAB_SIZE` tokens that splits numbers into their digits."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    by_digit = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([by_digit, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # No ChatML: the trainer would learn pieces of its markers.
    tokenizer.train_from_iterator([document for document in documents if IM_START not in document], trainer)
    return tokenizer


def pack(tokenizer: Tokenizer, documents: list[str]) -> torch.Tensor:
    """Fills rows with documents, each ended by the end-of-text token: int64 [rows, ROW_LENGTH].

    A row starts where a document starts, as a prompt does; the row's last document is cut.
    """
    import torch

    rows: list[list[int]] = [[]]
    for encoding in tokenizer.encode_batch([document + END_OF_TEXT for document in documents]):
        rows[-1] += encoding.ids
        if len(rows[-1]) >= ROW_LENGTH:
            rows.append([])
    return torch.tensor([row[:ROW_LENGTH] for row in rows[:-1]])


def make_configs() -> tuple[PretrainedConfig, PretrainedConfig]:
    """Returns the shapes of target and draft; each dimension that is quantised is a multiple of 32, the int4 block."""
    from transformers import LlamaConfig, Qwen2Config

    shared = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": CONTEXT_LENGTH, "rope_theta": 10_000.0}
    # Says what is the default anyway: mobius-onnx 0.1.0 takes a bare rope_theta of 10000 for a model without RoPE.
    shared |= {"rope_scaling": {"rope_type": "default"}}
    shared |= {"tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "head_dim": 16}
    target = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    draft = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaConfig(num_hidden_layers=4, **target, **shared), Qwen2Config(num_hidden_layers=1, **draft, **shared)


def train(config: PretrainedConfig, rows: torch.Tensor, steps: int, teacher: PreTrainedModel | None = None) -> PreTrainedModel:
    """Trains a model on rows int64 [rows, length]; with a teacher, half on the text and half on the teacher's logits."""
    import torch
    from torch.nn.functional import cross_entropy
    from tqdm import trange
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps, pct_start=0.1)
    progress = trange(steps, desc="target" if teacher is None else "draft")
    for _ in progress:
        batch = rows[torch.randint(len(rows), (BATCH_ROWS,))]
        logits = model(batch, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = cross_entropy(logits, batch[:, 1:].flatten())
        if teacher is not None:
            with torch.no_grad():
                target_probs = teacher(batch, use_cache=False).logits[:, :-1].flatten(0, 1).softmax(-1)
            loss = (loss + cross_entropy(logits, target_probs)) / 2
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return model.eval()


def perplexity(model: PreTrainedModel, rows: torch.Tensor) -> float:
    """Returns the perplexity of rows int64 [rows, length] under the model."""
    import torch
    from torch.nn.functional import cross_entropy

    with torch.no_grad():
        logits = model(rows, use_cache=False).logits[:, :-1]
    return float(cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).exp())


def continue_prompts(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Tokenizer, held_out: list[str]
) -> tuple[float, float]:
    """Lets the target go on greedily from held-out prompts.

    Returns:
        The share of its tokens that the draft would have chosen too, and the share of the texts that it ends by itself.
    """
    import torch

    same: list[bool] = []
    ended = 0
    for document in held_out[:NUM_PROMPTS]:
        question, header, _ = document.rpartition(f"{IM_START}assistant\n")
        ids = tokenizer.encode(question + header).ids or tokenizer.encode(document).ids[:PROMPT_LENGTH]
        inputs = torch.tensor([ids])
        mask = torch.ones_like(inputs)
        with torch.no_grad():
            sequence = target.generate(
                inputs, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, eos_token_id=EOS_IDS
            )
            choices = draft(sequence).logits[0].argmax(-1)
        same += (choices[len(ids) - 1 : -1] == sequence[0, len(ids) :]).tolist()
        ended += int(sequence[0, -1]) in EOS_IDS
    return sum(same) / len(same), ended / NUM_PROMPTS


def save(model: PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes model, generation config and tokenizer as a Hugging Face folder, in float32."""
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=EOS_IDS, pad_token_id=0)
    model.save_pretrained(folder)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START, IM_END],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    wrapped.save_pretrained(folder, save_jinja_files=False)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder that tiny-target and tiny-draft go into")
    parser.add_argument("--steps", type=int, default=800, metavar="N", help="training steps a model (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="fixes corpus, weights, batches (default: %(default)s)"
    )
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"--steps is {arguments.steps}; give at least 2")
    if arguments.seed < 0:
        parser.error(f"--seed is {arguments.seed}; give 0 or more")
    if arguments.out.exists() and not arguments.out.is_dir():
        parser.error(f"--out {arguments.out} is a file; name a folder")
    return arguments


def main() -> None:
    """Trains the pair, writes it and prints what it is worth."""
    arguments = parse_arguments()
    import torch

    torch.set_num_threads(1)  # as fast as more for matrices this small, and the same bits on any number of cores
    torch.use_deterministic_algorithms(mode=True)
    torch.manual_seed(arguments.seed)
    documents, held_out = make_corpus(arguments.seed)
    tokenizer = train_tokenizer(documents)
    rows = pack(tokenizer, documents)
    target_config, draft_config = make_configs()
    target = train(target_config, rows, arguments.steps)
    draft = train(draft_config, rows, arguments.steps, teacher=target)
    agreement, ended = continue_prompts(target, draft, tokenizer, held_out)
    held_out_rows = pack(tokenizer, held_out)
    print(f"{'':12} {'parameters':>10} {'kB':>5} {'held-out perplexity':>20}")
    for name, model in (("tiny-target", target), ("tiny-draft", draft)):
        save(model, tokenizer, arguments.out / name)
        size = sum(file.stat().st_size for file in (arguments.out / name).iterdir()) / 1000
        print(f"{name:12} {model.num_parameters():10,} {size:5.0f} {perplexity(model, held_out_rows):20.2f}")
    print(f"greedy tokens of the target that the draft would choose too: {agreement:.0%}")
    print(f"greedy texts of the target that end within {MAX_NEW_TOKENS} tokens:     {ended:.0%}")


if __name__ == "__main__":
    main()
