"""An ordinary text that models are held against each other on."""

from tokenizers import Tokenizer

from .tokenizer import TokenizerAssets

PROBE_TEXT = (
    "The tides are the regular rise and fall of the sea, caused by the pull of the moon and of the sun on the turning earth. "
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n"
)
PROBE_TOKENS = 64


def probe_tokens(assets: TokenizerAssets) -> list[int]:
    """Returns the text's first PROBE_TOKENS ids; it is repeated where it has fewer."""
    ids: list[int] = Tokenizer.from_str(assets.tokenizer_json).encode(PROBE_TEXT, add_special_tokens=False).ids
    return (ids * (PROBE_TOKENS // len(ids) + 1))[:PROBE_TOKENS]
