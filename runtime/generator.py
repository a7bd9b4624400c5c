"""The public face: a loaded bundle that generates texts, from any thread, as many at once as memory allows."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .backend import Model, open_backend
from .checks import is_whole
from .decoder import Decoder
from .drafters import Drafter, LookupDrafter, ModelDrafter, NoDrafter
from .errors import BundleError, PromptError
from .generation import Generation, GenerationResult, Piece
from .manifest import load_bundle
from .sampling import SamplingParams
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing import TypeAlias

    Prompt: TypeAlias = str | Sequence[Mapping[str, str]] | Sequence[int]

DRAFTERS = ("model", "lookup", "off")
DEFAULT_NUM_DRAFT_TOKENS = 4
MAX_NUM_DRAFT_TOKENS = 64


class Generator:
    """Generates text with a target model, checked proposals making it faster and never different.

    Weights and sessions are shared by all generations; each generation has its own caches, so calls from several threads
    and interleaved streams do not meet.
    """

    def __init__(
        self,
        target: Model,
        draft: Model | None,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int],
        *,
        drafter: str | None = None,
        num_draft_tokens: int = DEFAULT_NUM_DRAFT_TOKENS,
    ) -> None:
        """Puts loaded parts together; `from_bundle` is the usual way.

        Args:
            target: The model whose text is generated.
            draft: The model that proposes, or None.
            tokenizer: Of both models.
            eos_token_ids: Ids that end a text.
            drafter: "model", "lookup" or "off"; None takes the draft model where there is one, lookup otherwise.
            num_draft_tokens: The most tokens a round proposes, 0 to 64.

        Raises:
            ValueError: An unknown drafter, a drafter that needs a draft model where there is none, or a number of tokens
                out of range.
        """
        self.target = target
        self.draft = draft
        self.tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._drafter = ("lookup" if draft is None else "model") if drafter is None else drafter
        self._num_draft_tokens = num_draft_tokens
        self._check_drafting(self._drafter, num_draft_tokens)

    @classmethod
    def from_bundle(
        cls,
        folder: str | Path,
        *,
        device: str = "cpu",
        draft_device: str | None = None,
        drafter: str | None = None,
        num_draft_tokens: int = DEFAULT_NUM_DRAFT_TOKENS,
        threads: int | None = None,
        shared_thread_pool: bool = False,
        verify_files: bool = True,
    ) -> "Generator":
        """Loads a bundle made by scripts/export.py.

        Args:
            folder: The bundle's folder.
            device: Where the target runs.
            draft_device: Where the draft runs; None for the same device.
            drafter: See `__init__`.
            num_draft_tokens: See `__init__`.
            threads: CPU threads for a pass; None for all the cores this process may use.
            shared_thread_pool: For programs that make no other ONNX Runtime sessions; see OrtBackend.
            verify_files: Whether to compare the files' hashes; without it, their sizes only.

        Raises:
            BundleError: The bundle is missing, damaged, changed, or of another format version.
            DeviceError: The device is not there.
            ValueError: See `__init__`.
        """
        bundle = load_bundle(folder, hash_contents=verify_files)
        tokenizer = Tokenizer.from_spec(bundle.tokenizer, bundle.folder)
        _check_tokenizer(tokenizer, bundle.tokenizer.vocab_size, bundle.target.vocab_size, bundle.folder)
        backend = open_backend(device, threads=threads, shared_thread_pool=shared_thread_pool)
        target = backend.load(bundle.target, bundle.folder)
        draft = None
        if bundle.draft is not None and drafter not in ("lookup", "off"):
            if draft_device is not None and draft_device != device:
                backend = open_backend(draft_device, threads=threads, shared_thread_pool=shared_thread_pool)
            draft = backend.load(bundle.draft, bundle.folder)
        return cls(
            target,
            draft,
            tokenizer,
            bundle.tokenizer.eos_token_ids,
            drafter=drafter,
            num_draft_tokens=num_draft_tokens,
        )

    def generate(
        self,
        prompt: "Prompt",
        params: SamplingParams | None = None,
        *,
        drafter: str | None = None,
        num_draft_tokens: int | None = None,
        cancel: threading.Event | None = None,
    ) -> GenerationResult:
        """Generates a whole text; arguments and errors are those of `stream`."""
        result = None
        for piece in self.stream(prompt, params, drafter=drafter, num_draft_tokens=num_draft_tokens, cancel=cancel):
            result = piece.result
        assert result is not None, "a stream that ends has a result"
        return result

    def stream(
        self,
        prompt: "Prompt",
        params: SamplingParams | None = None,
        *,
        drafter: str | None = None,
        num_draft_tokens: int | None = None,
        cancel: threading.Event | None = None,
    ) -> Iterator[Piece]:
        """Generates a text round by round. Closing the iterator at any time is safe.

        Args:
            prompt: A string, a list of chat messages ({"role": ..., "content": ...}) for the model's chat template, or a
                list of token ids.
            params: Sampling rules and limits; None for greedy with the default limits.
            drafter: "model", "lookup" or "off" for this text; None for the generator's own.
            num_draft_tokens: The most tokens a round proposes; None for the generator's own number.
            cancel: Setting this event, from any thread, ends the text before the next pass.

        Returns:
            An iterator over pieces; the last one carries the result.

        Raises:
            PromptError: The prompt is empty, longer than the context, or holds unknown tokens.
            ValueError: An unknown drafter or a number of tokens out of range.
            LogitsError: While iterating: a model returned NaN or infinite logits. The generator stays usable.
        """
        # Checked here and not in a generator function, so that a bad call fails where it stands.
        if not isinstance(params, SamplingParams | None):
            raise ValueError(f"params is {params!r:.80}; SamplingParams are expected, or None.")
        if cancel is not None and not (callable(getattr(cancel, "is_set", None)) and not isinstance(cancel, type)):
            raise ValueError(f"cancel is {cancel!r:.80}; a threading.Event is expected, or None.")
        return self._start(
            self._prompt_tokens(prompt),
            params or SamplingParams(),
            self._drafter if drafter is None else drafter,
            self._num_draft_tokens if num_draft_tokens is None else num_draft_tokens,
            cancel,
        ).pieces()

    def describe(self) -> dict[str, str]:
        """Returns what runs where, for people: engines, threads, precision, exactness, memory of a cached token."""
        described = {"drafter": self._drafter, "num_draft_tokens": str(self._num_draft_tokens)}
        for role, model in (("target", self.target), ("draft", self.draft)):
            if model is not None:
                spec = model.spec
                described[role] = f"{spec.source}, {spec.precision}, {spec.lowering} lowering; {model.description}"
                described[f"{role} exactness"] = "every row has the same bits, however the text is cut into passes" + (
                    f" of {spec.min_rows} rows or more" if spec.min_rows > 1 else ""
                )
                described[f"{role} cache"] = f"{spec.cache_bytes_per_token / 1024:.0f} KiB a token"
        return described

    def _prompt_tokens(self, prompt: "Prompt") -> list[int]:
        if isinstance(prompt, str):
            tokens = self.tokenizer.encode(prompt)
        elif (
            not isinstance(prompt, Sequence | np.ndarray)
            or isinstance(prompt, bytes | bytearray)
            or getattr(prompt, "ndim", 1) != 1
        ):
            raise PromptError(f"The prompt is {prompt!r:.80}; a string, a list of messages or a list of token ids is expected.")
        elif len(prompt) and isinstance(prompt[0], Mapping):
            tokens = self.tokenizer.encode_chat(prompt)  # type: ignore[arg-type]
        else:
            tokens = _checked_token_ids(prompt, self.target.spec.vocab_size)
        if not tokens:
            raise PromptError("The prompt is empty: give a string, chat messages or token ids that make at least one token.")
        context = self.target.spec.context_length
        if len(tokens) >= context:
            raise PromptError(
                f"The prompt has {len(tokens)} tokens and the context holds {context}, one of them for the answer: "
                f"shorten the prompt by {len(tokens) - context + 1} tokens or more, or export with a larger --max-length."
            )
        return tokens

    def _start(
        self, prompt: list[int], params: SamplingParams, drafter: str, num_draft_tokens: int, cancel: threading.Event | None
    ) -> Generation:
        self._check_drafting(drafter, num_draft_tokens)
        max_new_tokens = min(params.max_new_tokens, self.target.spec.context_length - len(prompt))
        max_length = len(prompt) + max_new_tokens
        random = np.random.Generator(np.random.Philox(params.seed))
        target = Decoder(self.target, max_length, num_rows=num_draft_tokens + 1, cancel=cancel)
        return Generation(
            target,
            self._new_drafter(drafter, params, max_length, random, cancel),
            prompt,
            params,
            num_draft_tokens=num_draft_tokens,
            max_new_tokens=max_new_tokens,
            eos_token_ids=self._ends_of(params),
            decode=self.tokenizer.decode,
            random=random,
        )

    def _new_drafter(
        self, name: str, params: SamplingParams, max_length: int, random: np.random.Generator, cancel: threading.Event | None
    ) -> Drafter:
        if name == "off":
            return NoDrafter()
        if name == "lookup":
            return LookupDrafter()
        assert self.draft is not None, "checked by _check_drafting"
        decoder = Decoder(self.draft, min(max_length, self.draft.spec.context_length), num_rows=1, cancel=cancel)
        return ModelDrafter(decoder, params, random, self.target.spec.vocab_size, self._ends_of(params))

    def _ends_of(self, params: SamplingParams) -> frozenset[int]:
        return frozenset() if params.ignore_eos else self._eos_token_ids

    def _check_drafting(self, drafter: str, num_draft_tokens: int) -> None:
        if not isinstance(drafter, str) or drafter not in DRAFTERS:
            raise ValueError(f"The drafter '{drafter}' is unknown; there are {', '.join(DRAFTERS)}.")
        if drafter == "model" and self.draft is None:
            raise ValueError("The drafter 'model' needs a draft model, and this generator was loaded without one.")
        if not is_whole(num_draft_tokens) or not 0 <= num_draft_tokens <= MAX_NUM_DRAFT_TOKENS:
            raise ValueError(
                f"num_draft_tokens is {num_draft_tokens!r}; a whole number from 0 to {MAX_NUM_DRAFT_TOKENS} is expected."
            )


def _checked_token_ids(prompt: Sequence[object], vocab_size: int) -> list[int]:
    for token in prompt:
        if not is_whole(token) or not 0 <= token < vocab_size:
            raise PromptError(f"The prompt holds {token!r}; token ids from 0 to {vocab_size - 1} are expected.")
    return [int(token) for token in prompt]  # type: ignore[call-overload]


def _check_tokenizer(tokenizer: Tokenizer, recorded: int, vocab_size: int, folder: Path) -> None:
    if tokenizer.vocab_size != recorded or tokenizer.vocab_size > vocab_size:
        raise BundleError(
            f"The tokenizer in {folder} has {tokenizer.vocab_size} tokens; the manifest says {recorded} and the target takes "
            f"{vocab_size}: it does not belong to this model, export again."
        )
