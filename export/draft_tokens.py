"""Which of a draft's tokens get logits, and what they stand for in the target's vocabulary."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from runtime.contract import DecoderSpec, TokenizerSpec
from runtime.draft_vocabulary import DraftVocabulary

from .errors import ExportError
from .graph_head import most_frequent_tokens
from .pair import SharedVocabulary
from .role import COUNTING, Report
from .target_samples import sample_tokens
from .tokenizer import TokenizerAssets

_SMALLEST_HEAD = 64
_FEWEST_COUNTED = 8


@dataclass(frozen=True)
class DraftTokens:
    """What is to be known of a draft's tokens before it is made.

    Attributes:
        assets: Its tokenizer.
        shared: What it shares with the target, if it is another one.
        num_head_tokens: How many tokens get logits; None for all.
        text: What these are counted in; None for texts of the target.
    """

    assets: TokenizerAssets
    shared: SharedVocabulary | None
    num_head_tokens: int | None
    text: str | None

    @property
    def samples_target(self) -> bool:
        """Whether the target is to write texts that tokens are counted in."""
        return self.num_head_tokens is not None and self.text is None

    def choose_head(
        self, target: DecoderSpec, tokenizer: TokenizerSpec, folder: Path, report: Report
    ) -> NDArray[np.int32] | None:
        """Returns the draft's ids that get logits, int32 [any], ascending; None for all.

        Args:
            target: The target, as it was written.
            tokenizer: The target's.
            folder: Where both lie.
            report: Told how far the target is with its texts.

        Raises:
            ExportError: The text is too short to tell.
        """
        if self.num_head_tokens is None:
            return None
        text = self.text
        if text is None:
            sampled = sample_tokens(target, tokenizer, folder, lambda done, total: report(COUNTING, done, total))
            text = Tokenizer.from_file(str(folder / tokenizer.file.path)).decode(sampled)
        ids = Tokenizer.from_str(self.assets.tokenizer_json).encode(text, add_special_tokens=False).ids
        if len(ids) < _FEWEST_COUNTED:
            raise ExportError(
                f"The text to count tokens in has {len(ids)} of them; at least {_FEWEST_COUNTED} are needed to tell which are "
                "frequent: give a longer one with --draft-vocab-text."
            )
        return most_frequent_tokens(
            ids, self.num_head_tokens, vocab_size=len(self.assets.tokens), always=self.assets.eos_token_ids
        )

    def vocabulary(
        self, target_vocab_size: int, draft_vocab_size: int, head: NDArray[np.int32] | None
    ) -> DraftVocabulary | None:
        """Returns the table of a pair; None where both models have the same ids.

        Args:
            target_vocab_size: Width of the target's logits.
            draft_vocab_size: Width of the draft's.
            head: What `choose_head` chose.

        Raises:
            ExportError: The draft's tokenizer has ids that the draft does not read.
        """
        num_input_ids = draft_vocab_size if head is None else len(self.assets.tokens)
        if self.shared is not None:
            whole = self.shared.draft_vocabulary(target_vocab_size, num_input_ids)
        elif head is not None:
            ids = np.arange(num_input_ids, dtype=np.int32)
            whole = DraftVocabulary(
                target_vocab_size, num_input_ids, np.where(ids < target_vocab_size, ids, -1).astype(np.int32)
            )
        else:
            return None
        return whole if head is None else replace(whole, to_target=whole.to_target[head])


def read_counted_text(draft: str | None, num_head_tokens: int | None, text: Path | None) -> str | None:
    """Returns the text that a draft's tokens are counted in; None for texts of the target, or where nothing is cut.

    Raises:
        ExportError: The options do not go together, or the text cannot be read.
    """
    if num_head_tokens is None:
        if text is not None:
            raise ExportError("--draft-vocab-text counts tokens for --draft-vocab, which is not given: pass both, or neither.")
        return None
    if draft is None:
        raise ExportError("--draft-vocab cuts the vocabulary of a draft model, and there is none: pass --draft.")
    if num_head_tokens < _SMALLEST_HEAD:
        raise ExportError(f"--draft-vocab is {num_head_tokens}; at least {_SMALLEST_HEAD} tokens are needed.")
    try:
        return None if text is None else text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ExportError(f"The text {text} of --draft-vocab-text cannot be read: {reason}.") from error
