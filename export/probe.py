"""An ordinary text that models are held against each other on: the one that the runtime measures rows on."""

from tokenizers import Tokenizer

from runtime.row_equality import PROBE_TEXT, PROBE_TOKENS, repeated

from .tokenizer import TokenizerAssets

__all__ = ["PROBE_TEXT", "PROBE_TOKENS", "probe_tokens"]


def probe_tokens(assets: TokenizerAssets) -> list[int]:
    """Returns the text's first PROBE_TOKENS ids; it is repeated where it has fewer."""
    return repeated(Tokenizer.from_str(assets.tokenizer_json).encode(PROBE_TEXT, add_special_tokens=False).ids)
