"""What all texts of a generator share: two models, their tokenizer, and the answer to "how is this text to be made?"."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from .acceptance import AcceptanceRule, CoupledRule, GreedyRule, RejectionRule
from .backend import Model
from .checks import check_number, is_whole, shown
from .decoder import Decoder
from .draft_decoder import DraftDecoder
from .draft_policy import MAX_NUM_DRAFT_TOKENS, MAX_SLOWDOWN
from .draft_vocabulary import DraftVocabulary, draft_length
from .drafters.adaptive import MODEL_PRIOR
from .errors import PromptError
from .noise import ExponentialNoise
from .pass_costs import PassCosts, measure_costs
from .sampling import Sampler
from .sampling_params import SamplingParams
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing import TypeAlias

    Prompt: TypeAlias = str | Sequence[Mapping[str, str]] | Sequence[int]

DRAFTERS = ("auto", "hybrid", "model", "lookup", "off")
MODEL_DRAFTERS = ("hybrid", "model")  # which are nothing without a draft model
_FIXED_NUM_DRAFT_TOKENS = 4
_ADAPTIVE_NUM_DRAFT_TOKENS = 16


@dataclass(frozen=True)
class DecoderPair:
    """Two loaded models and what belongs to both.

    Attributes:
        target: The model whose text is generated.
        draft: The model that proposes, or None.
        tokenizer: Of the target, and of the draft unless it has a vocabulary of its own.
        eos_token_ids: Ids that end a text.
        drafter: What proposes unless a text asks for another: "auto", "hybrid", "model", "lookup" or "off".
        num_draft_tokens: The most tokens a round proposes unless a text asks for another number; None for 4, or for 16
            where "auto" decides how many.
        known_costs: What was measured before on this machine.
        model_prior: The acceptance rate to expect of the draft model.
        max_slowdown: By which fraction any 64 tokens may take longer than without speculation, where "auto" proposes.
        draft_vocabulary: The draft's, where its logits do not stand for the target's tokens column by column.
        process_id: The process that it was made in.

    Raises:
        ValueError: An unknown drafter, one that needs a draft model where there is none, or a number out of range.
        BundleError: The draft's vocabulary is that of another pair.
    """

    target: Model
    draft: Model | None
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    drafter: str
    num_draft_tokens: int | None = None
    known_costs: PassCosts | None = None
    model_prior: float = MODEL_PRIOR
    max_slowdown: float = MAX_SLOWDOWN
    draft_vocabulary: DraftVocabulary | None = None
    process_id: int = field(default_factory=os.getpid, init=False)
    _measured_costs: list[PassCosts] = field(default_factory=list, init=False, repr=False, compare=False)

    def __reduce__(self) -> NoReturn:
        """Refuses to be pickled or copied, and with it generators, sessions and chats, which all hold one."""
        raise TypeError(
            "A loaded generator, its sessions and chats cannot be pickled or copied, since engines and caches belong to their "
            "process: call Generator.from_bundle in each process, or let threads share one generator."
        )

    def __post_init__(self) -> None:
        """Refuses what cannot propose."""
        check_number("max_slowdown", self.max_slowdown, "a number from 0 to 1", lambda value: 0 <= value <= 1)
        self.check_drafting(self.drafter, self.num_draft_tokens)
        if self.draft is not None and self.draft_vocabulary is not None:
            self.draft_vocabulary.check_pair(self.target.spec, self.draft.spec)

    @property
    def costs(self) -> PassCosts:
        """What passes cost; measured now if that was not done before."""
        # No cached_property: up to Python 3.11 all pairs share its lock, and a fork may inherit it held by another thread.
        if not self._measured_costs:
            self._measured_costs.append(self.known_costs or measure_costs(self.target, self.draft))
        return self._measured_costs[0]

    def check_process(self) -> None:
        """Raises RuntimeError in a fork of the process that loaded the models: an engine's threads are not in it."""
        if os.getpid() != self.process_id:
            raise RuntimeError(
                f"This generator was loaded in process {self.process_id}, and this is its fork {os.getpid()}, without the "
                "engines' threads: call Generator.from_bundle behind the fork, or start processes by 'spawn'."
            )

    def open_draft(self, capacity: int) -> Decoder | DraftDecoder:
        """Returns a decoder of the draft that reads target tokens, up to `capacity` of them, or to its context's end.

        Raises:
            DeviceError: There is no memory for it.
        """
        assert self.draft is not None, "checked by check_drafting"
        vocabulary = self.draft_vocabulary
        length = min(draft_length(capacity, vocabulary), self.draft.spec.context_length)
        decoder = Decoder(self.draft, length, num_rows=1)
        return decoder if vocabulary is None else DraftDecoder(decoder, vocabulary)

    def draft_tokens_of(self, drafter: str, num_draft_tokens: int | None) -> int:
        """Returns the most tokens a round proposes with this drafter, where a text asks for so many, or for nothing."""
        if num_draft_tokens is None:
            num_draft_tokens = self.num_draft_tokens
        if num_draft_tokens is not None:
            return int(num_draft_tokens)
        return _ADAPTIVE_NUM_DRAFT_TOKENS if drafter == "auto" else _FIXED_NUM_DRAFT_TOKENS

    def check_drafting(self, drafter: str, num_draft_tokens: int | None) -> None:
        """Raises ValueError as the class does."""
        if not isinstance(drafter, str) or drafter not in DRAFTERS:
            raise ValueError(f"The drafter {shown(drafter)} is unknown; there are {', '.join(DRAFTERS)}.")
        if drafter in MODEL_DRAFTERS and self.draft is None:
            raise ValueError(f"The drafter '{drafter}' needs a draft model, and this generator was loaded without one.")
        if num_draft_tokens is None:
            return
        if not is_whole(num_draft_tokens) or not 0 <= num_draft_tokens <= MAX_NUM_DRAFT_TOKENS:
            raise ValueError(
                f"num_draft_tokens is {shown(num_draft_tokens)}; a whole number from 0 to {MAX_NUM_DRAFT_TOKENS} is expected."
            )

    def prompt_tokens(self, prompt: "Prompt") -> list[int]:
        """Returns a prompt's token ids, at least one.

        Args:
            prompt: A string, chat messages for the template, or token ids.

        Raises:
            PromptError: It is none of these, is empty, or holds unknown tokens.
            BundleError: The chat template is not valid.
        """
        if isinstance(prompt, str):
            tokens = self.tokenizer.encode(prompt)
        elif (
            not isinstance(prompt, Sequence | np.ndarray)
            or isinstance(prompt, bytes | bytearray)
            or getattr(prompt, "ndim", 1) != 1
        ):
            raise PromptError(
                f"The prompt is {shown(prompt)}; a string, a list of messages or a list of token ids is expected."
            )
        elif len(prompt) and isinstance(prompt[0], Mapping):
            tokens = self.tokenizer.encode_chat(prompt)  # type: ignore[arg-type]
        else:
            tokens = _checked_token_ids(prompt, self.target.spec.vocab_size)
        if not tokens:
            raise PromptError("The prompt is empty: give a string, chat messages or token ids that make at least one token.")
        return tokens

    def end_token_ids(self, params: SamplingParams) -> tuple[frozenset[int], frozenset[int]]:
        """Returns the end-of-text tokens of a text, and its stop tokens."""
        return frozenset() if params.ignore_eos else self.eos_token_ids, frozenset(params.stop_token_ids)

    def acceptance_rule(self, params: SamplingParams, prompt_length: int) -> AcceptanceRule:
        """Returns the way a text's tokens are chosen and judged.

        Raises:
            ValueError: The rules name tokens that the target does not have.
        """
        bad_words = self._bad_words(params)
        self._check_named_tokens((*params.logit_bias, *params.stop_token_ids, *(token for word in bad_words for token in word)))
        ends = frozenset().union(*self.end_token_ids(params))
        sampler = Sampler(params, prompt_length=prompt_length, end_token_ids=ends, bad_words=bad_words)
        if params.greedy:
            return GreedyRule(sampler)
        if params.acceptance == "coupled":
            return CoupledRule(sampler, ExponentialNoise(params.seed))
        return RejectionRule(sampler, np.random.Generator(np.random.Philox(params.seed)))

    def _bad_words(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """Returns bad_words as runs of ids: a string as it begins a text, and as it follows a space."""
        words: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            if isinstance(word, str):
                bare = word.lstrip(" ")
                for text in (word, f" {bare}") if bare else (word,):
                    words[tuple(self.tokenizer.encode(text, add_special_tokens=False))] = None
            else:
                words[tuple(word)] = None
        return [word for word in words if word]

    def _check_named_tokens(self, tokens: Iterable[int]) -> None:
        largest = max(tokens, default=0)
        if largest >= self.target.spec.vocab_size:
            raise ValueError(
                f"The sampling rules (logit_bias, stop_token_ids, bad_words) name token {largest}; the target's are 0 to "
                f"{self.target.spec.vocab_size - 1}."
            )


def _checked_token_ids(prompt: Sequence[object], vocab_size: int) -> list[int]:
    for token in prompt:
        if not is_whole(token) or not 0 <= token < vocab_size:
            raise PromptError(f"The prompt holds {shown(token)}; token ids from 0 to {vocab_size - 1} are expected.")
    return [int(token) for token in prompt]  # type: ignore[call-overload]
