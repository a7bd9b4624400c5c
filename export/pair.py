"""Whether two models can speculate together, and what their tokenizers share where these differ."""

from dataclasses import dataclass

import numpy as np

from runtime.draft_vocabulary import DraftVocabulary, Spelling

from .errors import ExportError
from .source import Source
from .token_bytes import TokenBytes
from .tokenizer import TokenizerAssets

# With a share s of a text's tokens, even a draft that is always right has s + s^2 + ... = s / (1 - s) tokens of a round
# accepted: less than one below a half, for which no draft is worth its passes.
_LEAST_TEXT_SHARE = 0.5


@dataclass(frozen=True)
class SharedVocabulary:
    """What a draft with another tokenizer shares with its target.

    Attributes:
        draft_tokens: The draft's tokenizer.
        to_target: By id of the draft, the target's id of the same content, -1 for none.
        spellings: By id of the target, the draft's ids it is read as.
        prefix: The draft's ids before every text.
        num_ordinary: How many ids of the target are no special tokens.
        num_shared: How many of these the draft has.
        text_share: The share of a sample text's tokens that the draft has.
    """

    draft_tokens: TokenizerAssets
    to_target: tuple[int, ...]
    spellings: tuple[tuple[int, ...], ...]
    prefix: tuple[int, ...]
    num_ordinary: int
    num_shared: int
    text_share: float

    @property
    def description(self) -> str:
        """The figures, for people."""
        share = f"{self.text_share:.0%} of a sample text's tokens"
        return f"{self.num_shared:,} of the target's {self.num_ordinary:,} tokens, {share}"

    def draft_vocabulary(self, target_vocab_size: int, draft_vocab_size: int) -> DraftVocabulary:
        """Returns the table for models with logits this wide, padding included.

        Raises:
            ExportError: The draft's tokenizer has ids that the draft does not read.
        """
        beyond = max((token for spelling in (*self.spellings, self.prefix) for token in spelling), default=0)
        if beyond >= draft_vocab_size:
            raise ExportError(
                f"The draft's tokenizer has the token {beyond}, and the draft knows {draft_vocab_size} tokens: the tokenizer "
                "does not belong to the model."
            )
        to_target = np.full(draft_vocab_size, -1, np.int32)
        known = self.to_target[:draft_vocab_size]
        to_target[: len(known)] = known
        padding = [()] * (target_vocab_size - len(self.spellings))
        return DraftVocabulary(
            target_vocab_size, draft_vocab_size, to_target, Spelling.of([*self.spellings, *padding], self.prefix)
        )


def compare_vocabularies(
    target: Source, target_tokens: TokenizerAssets, draft: Source, draft_tokens: TokenizerAssets, sample_text: str
) -> SharedVocabulary | None:
    """Compares two models' tokens by the bytes they stand for.

    Returns:
        What they share, or None where the same text stands behind the same id in both. Padding of the models' vocabularies
        beyond the table does not matter.

    Raises:
        ExportError: They share too little for the draft to be of use; the sentence tells how much.
    """
    if target_tokens.tokens == draft_tokens.tokens:
        return None
    ours, theirs = TokenBytes(target_tokens), TokenBytes(draft_tokens)
    roles = _roles(target_tokens, ours, draft_tokens, theirs)
    to_target = [-1] * len(theirs.contents)
    for content, token in ours.ids.items():
        if (other := theirs.ids.get(content, roles.get(token, -1))) >= 0:
            to_target[other] = token
    shared = set(to_target)
    ordinary = [token for token, content in enumerate(ours.contents) if content is not None and not content.special]
    sample = ours.tokenizer.encode(sample_text, add_special_tokens=False).ids
    spellings = _spellings(ours, theirs, roles)
    vocabulary = SharedVocabulary(
        draft_tokens=draft_tokens,
        to_target=tuple(to_target),
        spellings=spellings,
        prefix=_prefix(ours, spellings, draft_tokens, theirs),
        num_ordinary=len(ordinary),
        num_shared=sum(token in shared for token in ordinary),
        text_share=sum(token in shared for token in sample) / max(1, len(sample)),
    )
    if vocabulary.text_share < _LEAST_TEXT_SHARE:
        raise ExportError(
            f"{draft.name} can propose too little of what {target.name} says, {vocabulary.description}, and at least "
            f"{_LEAST_TEXT_SHARE:.0%} of these are needed: take a draft with a tokenizer more like the target's, --draft self, "
            "or no draft (lookup)."
        )
    return vocabulary


def _roles(
    target_tokens: TokenizerAssets, ours: TokenBytes, draft_tokens: TokenizerAssets, theirs: TokenBytes
) -> dict[int, int]:
    """Returns the target's beginning and end of text with the draft's for the same, where the two write them differently."""
    roles: dict[int, int] = {}
    for one, other in (
        (target_tokens.bos_token, draft_tokens.bos_token),
        (target_tokens.eos_token, draft_tokens.eos_token),
    ):
        if one in target_tokens.tokens and other in draft_tokens.tokens:
            token, counterpart = target_tokens.tokens.index(one), draft_tokens.tokens.index(other)
            if theirs.contents[counterpart] not in ours.ids:
                roles[token] = counterpart
    return roles


def _spellings(ours: TokenBytes, theirs: TokenBytes, roles: dict[int, int]) -> tuple[tuple[int, ...], ...]:
    """Returns what each of the target's tokens is read as: one token of the same content, or those that spell its text.

    A special token without a counterpart is not read at all.
    """
    spellings: list[tuple[int, ...]] = [()] * len(ours.contents)
    texts: dict[int, bytes] = {}
    for token, content in enumerate(ours.contents):
        if content in theirs.ids:
            spellings[token] = (theirs.ids[content],)
        elif token in roles:
            spellings[token] = (roles[token],)
        elif content is not None and not content.special:
            texts[token] = content.text
    for token, ids in zip(texts, theirs.spell(list(texts.values())), strict=True):
        spellings[token] = tuple(ids)
    return tuple(spellings)


def _prefix(
    ours: TokenBytes, spellings: tuple[tuple[int, ...], ...], draft_tokens: TokenizerAssets, theirs: TokenBytes
) -> tuple[int, ...]:
    """Returns the draft's beginning-of-text token, if it begins every text with one and the target's texts bring none."""
    begin, own = (tokens.tokenizer.encode("", add_special_tokens=True).ids[:1] for tokens in (ours, theirs))
    if not own or draft_tokens.tokens[own[0]] != draft_tokens.bos_token:
        return ()
    brought = [token for first in begin for token in spellings[first]]
    return () if brought == own else tuple(own)
