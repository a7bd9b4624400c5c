"""What a caller may ask of a text: how tokens are chosen, and where it ends.

The names are those of transformers and of the OpenAI API.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from .checks import check_number, check_whole, is_whole, shown

ACCEPTANCE_RULES = ("rejection", "coupled")
MAX_LOGPROBS = 100
_LEAST = {"max_new_tokens": 1, "min_new_tokens": 0, "top_k": 0, "no_repeat_ngram_size": 0, "seed": 0, "logprobs": 0}
_NUMBERS: tuple[tuple[tuple[str, ...], str, Callable[[float], bool]], ...] = (
    (("temperature",), "a finite number of at least 0", lambda value: value >= 0),
    (("min_p",), "a number from 0 to 1", lambda value: 0 <= value <= 1),
    (("repetition_penalty",), "a finite number above 0", lambda value: value > 0),
    (("top_p", "typical_p"), "a number above 0 and at most 1", lambda value: 0 < value <= 1),
    (("presence_penalty", "frequency_penalty"), "a number from -2 to 2", lambda value: abs(value) <= 2),
)


class TokenBias(dict[int, float]):
    """A dict that cannot be changed, since SamplingParams are values; it copies, compares and pickles as dicts do."""

    def _refuse(self, *_arguments: object, **_entries: object) -> NoReturn:
        raise TypeError("logit_bias cannot be changed: make new SamplingParams, with dataclasses.replace for instance.")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type["TokenBias"], tuple[dict[int, float]]]:
        """Pickles and copies it whole; a dict is filled entry by entry."""
        return TokenBias, (dict(self),)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a text ends.

    The rules that change logits apply in this order: logit_bias, repetition_penalty, presence_penalty and
    frequency_penalty, no_repeat_ngram_size, bad_words, min_new_tokens; then, where tokens are sampled, temperature, top_k,
    top_p, min_p, typical_p. It is the order of transformers, which lacks the OpenAI API's two penalties.

    Attributes:
        max_new_tokens: The most tokens to generate, at least 1.
        min_new_tokens: Before so many, no end-of-text token and none of stop_token_ids is chosen.
        temperature: 0 takes the most probable token (greedy); above 0 the logits are divided by it.
        top_k: Keep only the k most probable tokens; 0 keeps all.
        top_p: Keep the fewest most probable tokens whose probabilities sum to at least this; 1 keeps all.
        min_p: Keep tokens at least this fraction as probable as the most probable one; 0 keeps all.
        typical_p: Keep the fewest tokens, those first whose surprisal is nearest to its mean, whose probabilities sum to at
            least this (Meister et al. 2022); 1 keeps all.
        repetition_penalty: Above 1 makes tokens that already stand in the prompt or the text less likely (Keskar et al.
            2019): positive logits are divided by it, negative ones multiplied.
        presence_penalty: Taken from the logits of tokens that stand in the new text, -2 to 2.
        frequency_penalty: Taken from them as often as they stand in the new text, -2 to 2.
        logit_bias: Token id to a number added to its logit; -100 or less practically forbids a token, 100 forces it.
        bad_words: Strings, or lists of token ids, that are never completed. A string is forbidden as it is tokenised at
            the start of a text and behind a space.
        no_repeat_ngram_size: No run of so many tokens stands twice in prompt and text; 0 allows it.
        seed: Makes sampled text repeatable; None draws a fresh seed.
        acceptance: "rejection" accepts a proposed token with probability min(1, target / draft). "coupled" accepts it when
            it is the target's own choice, both models having chosen with the same noise: then one seed gives one text,
            whatever proposes, however much, or nothing at all.
        stop: Strings that end the text.
        stop_token_ids: Tokens that end the text, beside the model's own end-of-text tokens.
        include_stop: Whether the stop string, or the text of the stop token, stands in the text; ids always have it.
        ignore_eos: Go on past the model's end-of-text tokens, for measurements.
        logprobs: How many of the most probable tokens to report at each position, 0 to 100, beside the chosen one; None
            reports nothing.

    Raises:
        ValueError: A value outside its range; the sentence names it.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    bad_words: Sequence[str | Sequence[int]] = ()
    no_repeat_ngram_size: int = 0
    seed: int | None = None
    acceptance: str = "rejection"
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Refuses values outside their range, and keeps copies of what the caller could change."""
        for name in ("include_stop", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {shown(getattr(self, name))}; True or False is expected.")
        if not isinstance(self.acceptance, str) or self.acceptance not in ACCEPTANCE_RULES:
            raise ValueError(f"acceptance is {shown(self.acceptance)}; one of {', '.join(ACCEPTANCE_RULES)} is expected.")
        self._keep_numbers()
        self._keep("stop", _checked_stop(self.stop))
        self._keep("stop_token_ids", _checked_ids("stop_token_ids", self.stop_token_ids))
        self._keep("bad_words", _checked_words(self.bad_words))
        self._keep("logit_bias", _checked_bias(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0

    def _keep_numbers(self) -> None:
        """Checks the numbers, and keeps them as Python's own: numpy's small types would overflow."""
        for name, low in _LEAST.items():
            value = getattr(self, name)
            if value is not None or name not in ("seed", "logprobs"):
                check_whole(name, value, low)
                self._keep(name, int(value))
        if self.logprobs is not None and self.logprobs > MAX_LOGPROBS:
            raise ValueError(f"logprobs is {shown(self.logprobs)}; a number from 0 to {MAX_LOGPROBS} is expected, or None.")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens, which is {self.max_new_tokens}."
            )
        for names, expected, fits in _NUMBERS:
            for name in names:
                check_number(name, getattr(self, name), expected, fits)
                self._keep(name, float(getattr(self, name)))

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _checked_stop(stop: object) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"stop is {stop!r:.80}; a string, or a list of strings, of at least one character is expected.")
    if any("\ufffd" in text or not _is_unicode(text) for text in texts):
        raise ValueError(f"stop is {stop!r:.80}; U+FFFD and half surrogate pairs are not text, so they cannot end one.")
    return tuple(texts)


def _checked_ids(name: str, ids: object) -> tuple[int, ...]:
    if (
        isinstance(ids, str | bytes)
        or not isinstance(ids, Sequence)
        or not all(is_whole(token) and token >= 0 for token in ids)
    ):
        raise ValueError(f"{name} is {shown(ids)}; a list of token ids is expected.")
    return tuple(int(token) for token in ids)


def _checked_words(words: object) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(words, str | bytes) or not isinstance(words, Sequence):
        raise ValueError(f"bad_words is {shown(words)}; a list of strings, or of lists of token ids, is expected.")
    checked = tuple(word if isinstance(word, str) else _checked_ids("An entry of bad_words", word) for word in words)
    if not all(checked):
        raise ValueError(f"bad_words is {shown(words)}; strings of at least one character, or token ids, are expected.")
    if not all(_is_unicode(word) for word in checked if isinstance(word, str)):
        raise ValueError(f"bad_words is {shown(words)}; half surrogate pairs are not text, so they cannot be forbidden.")
    return checked


def _is_unicode(text: str) -> bool:
    """Whether UTF-8 can write it, so whether it holds no half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _checked_bias(bias: object) -> TokenBias:
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias is {shown(bias)}; a mapping of token ids to numbers is expected.")
    for token, value in bias.items():
        if not is_whole(token) or token < 0:
            raise ValueError(f"logit_bias has the key {shown(token)}; token ids are expected.")
        check_number(f"logit_bias[{token}]", value, "a finite number", lambda _: True)
    return TokenBias({int(token): float(value) for token, value in bias.items()})
