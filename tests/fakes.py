"""Fakes for tests of the generation loop: decoders whose logits depend on every cached token, and a real small tokenizer."""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from runtime.backend import Model
from runtime.candidates import Candidates
from runtime.contract import DecoderSpec
from runtime.generator import Generator
from runtime.tokenizer import Tokenizer

GARBAGE = -987_654_321  # what a cache slot holds that no pass has written, or that a pass spoils behind its own
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def ruled(
    apply: Callable[[Candidates, Sequence[int], Sequence[int]], Candidates],
    logits: NDArray[np.float32],
    history: Sequence[int],
    block: Sequence[int],
) -> NDArray[np.float32]:
    """What a sampler's method makes of rows as wide as the vocabulary."""
    return apply(Candidates.whole(logits), history, block).rows


class FakeModel:
    """A decoder whose row of logits is a hash of all that its cache holds up to that row.

    Attributes:
        calls: (past_length, rows, num_rows) of every pass, contexts together.
        broken_at: Position, counted from 0, whose row of logits is broken_value; None for none.
        on_pass: Called at the beginning of every pass.
    """

    def __init__(
        self,
        vocab_size: int = 16,
        *,
        seed: int = 0,
        sharpness: float = 4.0,
        noise: float = 0.0,
        period: int = 0,
        context_length: int = 128,
        min_rows: int = 1,
        row_multiple: int = 1,
        spare_slots: int = 1,
        broken_at: int | None = None,
        broken_value: float = np.nan,
    ) -> None:
        """Describes the decoder.

        Args:
            vocab_size: Width of a row; a narrower model with the same seed has the same logits as far as they go.
            seed: Models of equal seeds agree.
            sharpness: Logits lie between 0 and this; a negative one turns the model's preferences round.
            noise: Adds the logits of another seed, up to this: a draft that agrees with its target sometimes.
            period: Above 0, the token this many places back gets 3 * sharpness on top, so that texts repeat themselves.
            context_length: As in the spec.
            min_rows: As in the spec; a pass of fewer rows gives other logits.
            row_multiple: Likewise, and one of another number of rows.
            spare_slots: As in the spec; every pass spoils so many slots behind its own.
            broken_at: See the class.
            broken_value: See the class.
        """
        self.spec = DecoderSpec(
            source=f"fake-{seed}",
            architecture="fake",
            graph=(),
            lowering="fake",
            precision="fp32",
            num_layers=1,
            num_key_value_heads=1,
            head_size=1,
            vocab_size=vocab_size,
            context_length=context_length,
            cache_dtype="float32",
            spare_slots=spare_slots,
            min_rows=min_rows,
            row_multiple=row_multiple,
        )
        self.engine = self.description = "a fake"
        self.calls: list[tuple[int, int, int]] = []
        self.broken_at = broken_at
        self.broken_value = broken_value
        self.on_pass: Callable[[], None] = lambda: None
        self._seed = seed
        self._sharpness = sharpness
        self._noise = noise
        self._period = period
        self._memory: dict[bytes, NDArray[np.float32]] = {}

    def open_context(self, capacity: int, max_rows: int) -> "FakeContext":
        return FakeContext(self, capacity, max_rows)

    def logits(self, prefix: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns float32 [vocab_size], what stands behind the whole of `prefix`."""
        cached = np.asarray(prefix, np.int64)
        key = cached.tobytes()
        if key not in self._memory:
            row = self._sharpness * self._uniform(key, self._seed) + self._noise * self._uniform(key, self._seed + 1000)
            if 0 < self._period <= len(cached):
                row[cached[-self._period]] += 3 * self._sharpness
            self._memory[key] = row.astype(np.float32)
        return self._memory[key]

    def _uniform(self, key: bytes, seed: int) -> NDArray[np.float64]:
        digest = hashlib.shake_128(key + seed.to_bytes(8, "little")).digest(4 * self.spec.vocab_size)
        return np.frombuffer(digest, "<u4") / 2.0**32


class FakeContext:
    """One generation's cache: the tokens themselves, read back from it for every row. Refuses what the protocol forbids."""

    def __init__(self, model: FakeModel, capacity: int, max_rows: int) -> None:
        self._model = model
        self._max_rows = max_rows
        self._cache = np.full(capacity, GARBAGE, np.int64)
        self._logits = np.empty((max_rows, model.spec.vocab_size), np.float32)

    def run(self, token_ids: NDArray[np.int64], past_length: int, num_rows: int) -> NDArray[np.float32]:
        model, rows = self._model, len(token_ids)
        end = past_length + rows
        assert token_ids.dtype == np.int64
        assert 1 <= rows <= self._max_rows
        assert 0 <= num_rows <= rows
        assert past_length >= 0
        assert end + model.spec.spare_slots <= len(self._cache), "the pass does not fit into the cache"
        if token_ids.min() < 0 or token_ids.max() >= model.spec.vocab_size:
            raise IndexError(f"a token of {token_ids} is out of the embedding's bounds")  # as ONNX Runtime's Gather does
        model.on_pass()
        model.calls.append((past_length, rows, num_rows))
        self._cache[past_length:end] = token_ids
        self._cache[end : end + model.spec.spare_slots] = GARBAGE
        self._logits.fill(np.nan)  # whoever still looks at the last pass's rows, notices
        for row, length in enumerate(range(end - num_rows + 1, end + 1)):
            logits = model.logits(self._cache[:length])
            self._logits[row] = logits if rows == model.spec.rows_of_pass(rows) else logits[::-1]
            if length - 1 == model.broken_at:
                self._logits[row] = model.broken_value
        return self._logits[:num_rows]

    def copy_from(self, source: "FakeContext", length: int) -> None:
        assert source._model is self._model
        self._cache.fill(GARBAGE)
        self._cache[:length] = source._cache[:length]


CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.content == '!' %}{{ raise_exception('no exclamations') }}{% endif %}"
    "{{ {'system': 'X', 'user': 'Y', 'assistant': 'Z'}[message.role] + message.content }}{% endfor %}Z"
)


def fake_tokenizer(
    vocab_size: int = 16, special: Sequence[int] = (), *, bracketed: bool = False, chat_template: str | None = None
) -> Tokenizer:
    """Returns a tokenizer of one character a token, ALPHABET in order; texts leave the special ones out.

    With `bracketed`, a token is its character in brackets, so that stop strings can begin and end inside of one.
    """
    names = [f"<{character}>" if bracketed else character for character in ALPHABET[:vocab_size]]
    raw = RawTokenizer(models.WordLevel({name: token for token, name in enumerate(names)}))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("<.>" if bracketed else "."), "isolated")
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens([AddedToken(names[token], special=True) for token in special])
    return Tokenizer(raw.to_str(), chat_template=chat_template)


def fake_generator(
    target: Model,
    draft: Model | None = None,
    *,
    eos: Sequence[int] = (),
    drafter: str | None = None,
    num_draft_tokens: int = 4,
    bracketed: bool = False,
    chat_template: str | None = None,
) -> Generator:
    """Returns a generator on fakes; the end-of-text tokens are special ones of its tokenizer."""
    tokenizer = fake_tokenizer(target.spec.vocab_size, eos, bracketed=bracketed, chat_template=chat_template)
    return Generator(target, draft, tokenizer, eos, drafter=drafter, num_draft_tokens=num_draft_tokens)


def text_of(tokens: Sequence[int], special: Sequence[int] = ()) -> str:
    """What fake_tokenizer decodes `tokens` to."""
    return "".join(ALPHABET[token] for token in tokens if token not in special)


def greedy_text(model: FakeModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The target alone, with no cache and no loop of ours: the most probable token behind the whole text, again and again."""
    sequence = list(prompt)
    for _ in range(num_tokens):
        sequence.append(int(model.logits(sequence).argmax()))
    return sequence[len(prompt) :]
