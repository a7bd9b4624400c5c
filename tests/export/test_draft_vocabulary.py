"""Pairs with two tokenizers, end to end: exported, loaded, and the text is the target's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import jsonschema
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from export.bundle import export_bundle
from export.errors import ExportError
from export.genai_config import genai_config, write_genai_folder
from runtime import BundleError, Generator, SamplingParams
from runtime.contract import FileRecord
from runtime.draft_vocabulary import DraftVocabulary
from runtime.manifest import load_bundle, save_bundle
from tests.export.test_bundle import SCHEMA, manifest_of

CORPUS = [
    "The sea rises and falls twice a day, because the moon pulls the water.",
    "def add(first, second):\n    return first + second\n",
    "Der Junge geht zum Hafen. Le garçon va au port. 猫は木の下にいる。",
    "The old boat was blue, and the new one was green and very small.",
]
PROMPTS = ("The sea was blue", "def add(one, two):\n    return", "猫 und der Hafen 🐱")
PARAMS = {
    "greedy": SamplingParams(max_new_tokens=24),
    "coupled": SamplingParams(max_new_tokens=24, temperature=0.9, seed=3, acceptance="coupled"),
}


def with_tokenizer(folder: Path, tokenizer: Tokenizer, roles: dict[str, str], embedding: torch.Tensor | None = None) -> str:
    """Gives a checkpoint another tokenizer, and, where it is given, the embedding that goes with it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": None, "eos_token": None} | roles))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    if embedding is not None:
        weights = load_file(folder / "model.safetensors")
        weights["model.embed_tokens.weight"] = embedding.contiguous()
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def with_shuffled_ids(folder: Path) -> str:
    """Gives the tiny target's tokens other ids, and its embedding other rows."""
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    places = np.random.default_rng(3).permutation(512)
    document["model"]["vocab"] = {token: int(places[place]) for token, place in document["model"]["vocab"].items()}
    for token in document["added_tokens"]:
        token["id"] = int(places[token["id"]])
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    shuffled = torch.empty_like(embedding)
    shuffled[torch.from_numpy(places)] = embedding
    return with_tokenizer(folder, Tokenizer.from_str(json.dumps(document)), {}, shuffled)


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS[:3], trainer)
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """SentencePiece's kind: pieces of characters, a piece for each byte, and a beginning of text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    special = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=460, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS[::3], trainer)
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = document["added_tokens"][:2]  # the bytes are ordinary pieces
    tokenizer = Tokenizer.from_str(json.dumps(document))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("other")


@pytest.fixture(scope="module")
def reports() -> list[str]:
    return []


@pytest.fixture(scope="module")
def other_bundle(tiny_target: Path, tiny_draft: Path, folder: Path, reports: list[str]) -> Path:
    """A target with a byte-level tokenizer, and a draft of another width with one of SentencePiece's kind."""
    random = torch.Generator().manual_seed(5)
    target = with_tokenizer(copytree(tiny_target, folder / "target"), byte_level_tokenizer(), {"eos_token": "<|end|>"})
    draft = copytree(tiny_draft, folder / "draft")
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    (draft / "config.json").write_text(json.dumps(config | {"vocab_size": 480}))
    embedding = torch.randn(480, config["hidden_size"], generator=random)
    draft = with_tokenizer(draft, metaspace_tokenizer(), {"bos_token": "<s>", "eos_token": "</s>"}, embedding)
    out = folder / "bundle"
    export_bundle(target, draft, out, draft_precision="fp32", report=lambda title, *_: reports.append(title))
    return out


def test_the_bundle_holds_the_vocabulary(other_bundle: Path) -> None:
    bundle = load_bundle(other_bundle)
    jsonschema.Draft202012Validator(SCHEMA).validate(manifest_of(other_bundle))
    assert bundle.draft is not None
    assert bundle.draft_vocabulary is not None
    vocabulary = DraftVocabulary.load(other_bundle / bundle.draft_vocabulary.path)
    assert (vocabulary.target_vocab_size, len(vocabulary.to_target), vocabulary.num_input_ids) == (512, 480, 480)
    ours, theirs = byte_level_tokenizer(), metaspace_tokenizer()
    assert vocabulary.to_target[theirs.token_to_id("▁the")] == ours.token_to_id("Ġthe")
    assert vocabulary.to_target[theirs.token_to_id("</s>")] == ours.token_to_id("<|end|>")
    assert vocabulary.to_target[theirs.token_to_id("<s>")] == -1
    assert vocabulary.spelling is not None
    assert vocabulary.spelling.prefix.tolist() == [theirs.token_to_id("<s>")]
    text = ours.encode(" the boat 猫 von 🐱")
    read, _ = vocabulary.spell(text.ids)
    assert theirs.decoder.decode([theirs.id_to_token(token) for token in read]).lstrip() == "the boat 猫 von 🐱"


def test_the_export_tells_how_much_is_shared(other_bundle: Path, reports: list[str]) -> None:
    (told,) = {report for report in reports if "vocabulary" in report}
    assert told.startswith("the draft has a vocabulary of its own: it can propose ")
    assert f"of the target's {byte_level_tokenizer().get_vocab_size() - 1} tokens, " in told  # one is special
    assert told.endswith("% of a sample text's tokens")


@pytest.mark.parametrize("rule", PARAMS)
@pytest.mark.parametrize("drafter", ["auto", "hybrid", "model"])
def test_the_text_is_the_targets_own(other_bundle: Path, rule: str, drafter: str) -> None:
    generator = Generator.from_bundle(other_bundle, drafter=drafter)
    session, proposed = generator.session(), 0
    for prompt in (*PROMPTS, PROMPTS[0] + " and"):
        result = session.generate(prompt, PARAMS[rule])
        assert result.token_ids == generator.generate(prompt, PARAMS[rule], drafter="off").token_ids
        proposed += result.stats.proposed_tokens
    assert proposed > 0 or drafter == "auto"


def test_costs_and_memory_of_such_a_pair_are_told(other_bundle: Path) -> None:
    described = Generator.from_bundle(other_bundle).describe()
    assert described["draft vocabulary"].endswith("of 512 target tokens; reads its own tokens")
    assert described["costs"] == "measured at load"
    assert "caches at the full context" in described


def test_a_target_drafting_for_itself_in_other_numbers_is_always_right(
    tiny_target: Path, copy_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The same weights under a tokenizer whose ids are shuffled: whatever is misread or misplaced costs acceptance."""
    out = tmp_path / "bundle"
    export_bundle(str(tiny_target), with_shuffled_ids(copy_checkpoint(tiny_target, "shuffled")), out, draft_precision="fp32")
    generator = Generator.from_bundle(out, drafter="model")
    for messages in ("What is 3 + 4?", "Tell me about the sea, le chat et 猫."):
        result = generator.generate([{"role": "user", "content": messages}], SamplingParams(max_new_tokens=32, ignore_eos=True))
        assert result.stats.accepted_tokens == result.stats.proposed_tokens > 20


def test_a_damaged_vocabulary_is_one_sentence(other_bundle: Path, tmp_path: Path) -> None:
    twin = copytree(other_bundle, tmp_path / "twin")
    file = twin / "draft" / "vocabulary.npz"
    good = file.read_bytes()
    file.write_bytes(good[:-30] + b"?" * 30)
    with pytest.raises(BundleError, match=r"vocabulary\.npz' in .* was changed after the export"):
        Generator.from_bundle(twin)
    bundle = load_bundle(other_bundle)
    save_bundle(replace(bundle, folder=twin, draft_vocabulary=FileRecord.of(twin, "draft/vocabulary.npz")))
    with pytest.raises(BundleError, match=r"The draft's vocabulary in .* is damaged"):
        Generator.from_bundle(twin)
    assert Generator.from_bundle(twin, drafter="lookup").generate("The sea", PARAMS["greedy"]).token_ids
    vocabulary = DraftVocabulary(512, 3, np.array([0, 1, 2], np.int32))
    vocabulary.save(file)
    save_bundle(replace(bundle, folder=twin, draft_vocabulary=FileRecord.of(twin, "draft/vocabulary.npz")))
    with pytest.raises(BundleError, match="with 512 and 3 logits a row, and target and draft give 512 and 480"):
        Generator.from_bundle(twin)


def test_genai_is_given_no_draft_that_it_cannot_translate(other_bundle: Path, tmp_path: Path) -> None:
    bundle = load_bundle(other_bundle)
    with pytest.raises(ExportError, match="has a vocabulary of its own"):
        genai_config(bundle, num_draft_tokens=4)
    with pytest.raises(ExportError, match="has a vocabulary of its own"):
        write_genai_folder(bundle, tmp_path / "draft", "draft")
    assert write_genai_folder(bundle, tmp_path / "target").is_dir()


# --- heads that were cut ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cut_bundle(tiny_target: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair; the draft may propose the 150 tokens that a text has most of."""
    out = tmp_path_factory.mktemp("cut")
    (out / "text.txt").write_text("She put the red cup on the table. " * 3, encoding="utf-8")
    export_bundle(
        str(tiny_target), str(tiny_draft), out / "bundle", draft_vocab=150, draft_vocab_text=out / "text.txt", max_length=256
    )
    return out / "bundle"


def test_a_cut_head_keeps_what_the_text_says_and_what_ends_it(cut_bundle: Path, tiny_target: Path) -> None:
    bundle = load_bundle(cut_bundle)
    assert (bundle.draft.vocab_size, bundle.target.vocab_size) == (150, 512)
    vocabulary = DraftVocabulary.load(cut_bundle / bundle.draft_vocabulary.path)
    assert vocabulary.spelling is None
    kept = set(vocabulary.to_target.tolist())
    assert len(kept) == 150
    said = Tokenizer.from_file(str(tiny_target / "tokenizer.json")).encode("She put the red cup on the table.").ids
    assert kept >= {*said, *bundle.tokenizer.eos_token_ids}
    assert set(bundle.draft.parity) >= {"prefill", "rewind", "rounded_weights"}
    jsonschema.Draft202012Validator(SCHEMA).validate(manifest_of(cut_bundle))


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_a_cut_head_never_changes_the_text(cut_bundle: Path, params: SamplingParams) -> None:
    generator = Generator.from_bundle(cut_bundle, drafter="model")
    kept = set(generator.draft_vocabulary.to_target.tolist())
    accepted = 0
    for prompt in ("She put the red cup", "The children went to", "Once there was a king who"):
        plain = generator.generate(prompt, params, drafter="off")
        fast = generator.generate(prompt, params)
        assert fast.token_ids == plain.token_ids
        accepted += fast.stats.accepted_tokens
        for piece in generator.stream(prompt, params):
            assert piece.round is None or set(piece.round.proposal.tokens) <= kept
    assert accepted > 0


def test_the_target_writes_what_is_counted_where_no_text_is_given(
    tiny_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("export.target_samples.PROMPTS", ("The sea", "A boat"))
    titles: list[str] = []
    bundle = export_bundle(
        str(tiny_draft), "self", tmp_path / "b", draft_vocab=100, report=lambda title, done, total: titles.append((title, done))
    )
    assert bundle.draft.vocab_size == 100
    assert [done for title, done in titles if "counting tokens in texts of the target" in title] == [1, 2]


def test_a_draft_with_another_tokenizer_can_be_cut_too(
    tiny_target: Path, copy_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    draft = with_shuffled_ids(copy_checkpoint(tiny_target, "shuffled"))
    bundle = export_bundle(str(tiny_target), draft, tmp_path / "b", draft_vocab=200, max_length=128)
    generator = Generator.from_bundle(bundle.folder, drafter="model")
    assert generator.draft_vocabulary.spelling is not None
    assert len(generator.draft_vocabulary.to_target) == 200
    for prompt in ("She put the red cup", "The children went to"):
        plain = generator.generate(prompt, PARAMS["greedy"], drafter="off")
        assert generator.generate(prompt, PARAMS["greedy"]).token_ids == plain.token_ids


def test_a_text_too_short_to_count_in_is_refused(tiny_draft: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n", encoding="utf-8")
    with pytest.raises(ExportError, match=r"has \d of them; at least 8 are needed to tell which are frequent"):
        export_bundle(str(tiny_draft), "self", tmp_path / "b", draft_vocab=100, draft_vocab_text=tmp_path / "text.txt")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("options", [{"draft_vocab": 100}, {"draft_block_size": 64}, {"lowering": "static"}], ids=str)
def test_what_genai_cannot_run_is_refused_before_the_work(
    tiny_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    monkeypatch.setattr("export.decoders.build_base_graph", lambda _: pytest.fail("work began"))
    with pytest.raises(ExportError, match="--emit-genai-config"):
        export_bundle(str(tiny_draft), "self", tmp_path / "b", emit_genai_config=True, **options)
