"""Whether two models can speculate together: refused before any work, in one sentence."""

from .errors import ExportError
from .source import Source
from .tokenizer import TokenizerAssets


def check_pair(target: Source, target_tokens: TokenizerAssets, draft: Source, draft_tokens: TokenizerAssets) -> None:
    """Compares the token tables: the same text must stand behind the same id in both.

    Padding of the models' vocabularies beyond the table does not matter.

    Raises:
        ExportError: The tables differ; the sentence names the first id that does.
    """
    first, second = target_tokens.tokens, draft_tokens.tokens
    for token_id, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            raise ExportError(
                f"{target.name} and {draft.name} do not share a vocabulary: token {token_id} is {one!r} in the target and "
                f"{other!r} in the draft. Take a draft of the same family, --draft self, or no draft (lookup)."
            )
    if len(first) != len(second):
        raise ExportError(
            f"{target.name} and {draft.name} do not share a vocabulary: the target has {len(first):,} tokens and the draft "
            f"{len(second):,}. Take a draft of the same family, --draft self, or no draft (lookup)."
        )
