"""The public face: a loaded bundle that generates texts, from any thread, as many at once as memory allows."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .backend import Model
from .chat import Chat
from .checks import checked_max_length
from .cuda_options import CudaOptions
from .device_memory import check_pair_fits
from .draft_policy import MAX_SLOWDOWN
from .draft_vocabulary import DraftVocabulary
from .drafters.adaptive import MODEL_PRIOR
from .errors import BundleError, PromptError
from .first_pass import check_pair_runs
from .generation import GenerationResult, Piece
from .loading import load_pair
from .manifest import load_bundle
from .memory import describe_memory, free_memory, promised_length
from .pair import DecoderPair
from .plan import PLAN, Plan, machine_of
from .row_equality import PROBE_TEXT, repeated
from .row_record import EXACT
from .sampling_params import SamplingParams
from .session import Session, check_prompt_length, checked_params, last_result
from .tokenizer import Tokenizer, check_messages

if TYPE_CHECKING:
    from .pair import Prompt


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
        num_draft_tokens: int | None = None,
        plan: Plan | None = None,
        max_slowdown: float = MAX_SLOWDOWN,
        draft_vocabulary: DraftVocabulary | None = None,
        exactness: str = EXACT,
    ) -> None:
        """Puts loaded parts together; `from_bundle` is the usual way.

        Args:
            target: The model whose text is generated.
            draft: The model that proposes, or None.
            tokenizer: Of the target, and of the draft unless it has a vocabulary of its own.
            eos_token_ids: Ids that end a text.
            drafter: "auto" proposes whatever pays on this machine, by measured costs; "hybrid" looks up, and lets the draft
                model fill in; "model"; "lookup"; "off" proposes nothing. None takes the model where there is one, lookup
                otherwise.
            num_draft_tokens: The most tokens a round proposes, 0 to 64; None for 4, or 16 with "auto".
            plan: What was measured of the pair on this machine before; None to measure costs when "auto" first needs them.
            max_slowdown: By which fraction any 64 tokens may take longer than without speculation, 0 to 1, where "auto"
                proposes. More lets a good draft propose more.
            draft_vocabulary: The draft's, where its logits do not stand for the target's tokens column by column.
            exactness: What holds of the bits of the target's rows, for `describe`.

        Raises:
            BundleError: The draft's vocabulary is that of another pair.
            ValueError: An unknown drafter, a drafter that needs a draft model where there is none, or a number of tokens
                out of range.
        """
        default = "lookup" if draft is None else "model"
        self._plan = plan
        self._exactness = exactness
        self._pair = DecoderPair(
            target,
            draft,
            tokenizer,
            frozenset(eos_token_ids),
            default if drafter is None else drafter,
            num_draft_tokens,
            known_costs=None if plan is None else plan.costs,
            model_prior=MODEL_PRIOR if plan is None or plan.model_prior is None else plan.model_prior,
            max_slowdown=max_slowdown,
            draft_vocabulary=draft_vocabulary,
        )
        self._free_memory = free_memory()

    @property
    def target(self) -> Model:
        """The model whose text is generated."""
        return self._pair.target

    @property
    def draft(self) -> Model | None:
        """The model that proposes, if there is one."""
        return self._pair.draft

    @property
    def draft_vocabulary(self) -> DraftVocabulary | None:
        """The draft's, if it has one of its own."""
        return self._pair.draft_vocabulary

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's, and the draft's unless that has a vocabulary of its own."""
        return self._pair.tokenizer

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        return self._pair.eos_token_ids

    def prompt_tokens(self, prompt: "Prompt") -> list[int]:
        """Returns a prompt's token ids; see `stream` for what a prompt is, and for the errors."""
        return self._pair.prompt_tokens(prompt)

    @classmethod
    def from_bundle(
        cls,
        folder: str | Path,
        *,
        device: str = "cpu",
        draft_device: str | None = None,
        drafter: str | None = None,
        num_draft_tokens: int | None = None,
        threads: int | None = None,
        shared_thread_pool: bool = False,
        verify_files: bool = True,
        max_slowdown: float = MAX_SLOWDOWN,
        max_length: int | None = None,
        check_memory: bool = True,
        cuda_options: CudaOptions | None = None,
    ) -> "Generator":
        """Loads a bundle made by scripts/export.py.

        Args:
            folder: The bundle's folder.
            device: Where the target runs: "cpu", "cuda", "ort-tensorrt", "tensorrt" or "tensorrt-rtx"; "cuda:1" and so on for
                another GPU than the first.
            draft_device: Where the draft runs; None for the same device.
            drafter: See `__init__`; None for "auto", which measures costs now unless scripts/plan.py has done so here.
            num_draft_tokens: See `__init__`.
            threads: CPU threads for a pass; None for all the cores this process may use.
            shared_thread_pool: For programs that make no other ONNX Runtime sessions; see OrtBackend.
            verify_files: Whether to compare the files' hashes; without it, their sizes only.
            max_slowdown: See `__init__`.
            max_length: Tokens of the longest text there must be memory for, prompt included; it limits no text. None for
                2048, or the context if that is less: caches take memory as they fill, so a machine that could not hold a
                context of 32768 tokens still serves the texts most people ask of it.
            check_memory: Whether to refuse, before anything is loaded, what does not fit into this machine's free memory;
                pass False where the weights go into memory of a device's own.
            cuda_options: What is asked of ONNX Runtime on a GPU; None for the defaults.

        Raises:
            BundleError: The bundle is missing, damaged, changed, of another format version, or does not fit its graphs.
            DeviceError: The device is not there, or there is too little memory.
            ValueError: See `__init__`; or max_length is not from 2 to the target's context; or an option that no device here
                has; or a draft_device where the bundle has no draft.
        """
        bundle = load_bundle(folder, hash_contents=verify_files)
        if draft_device is not None and bundle.draft is None:
            raise ValueError(
                f"draft_device (--draft-device) is {draft_device!r:.80}, and the bundle {folder} has no draft: leave it out."
            )
        draft_spec = None if drafter in ("lookup", "off") else bundle.draft
        vocabulary = None if draft_spec is None else DraftVocabulary.of_bundle(bundle)
        max_length = promised_length(max_length, bundle.target.context_length)
        devices = (device, draft_device or device)
        if check_memory:
            check_pair_fits(bundle.target, draft_spec, max_length, devices, vocabulary)
        tokenizer = Tokenizer.from_spec(bundle.tokenizer, bundle.folder)
        _check_tokenizer(tokenizer, bundle.tokenizer.vocab_size, bundle.target.vocab_size, bundle.folder)
        pair = load_pair(
            bundle,
            draft_spec,
            devices,
            repeated(tokenizer.encode(PROBE_TEXT, add_special_tokens=False)),
            threads=threads,
            shared_thread_pool=shared_thread_pool,
            cuda_options=cuda_options or CudaOptions(),
        )
        check_pair_runs(pair.target, pair.draft, tokenizer.vocab_size, vocabulary)
        generator = cls(
            pair.target,
            pair.draft,
            tokenizer,
            bundle.tokenizer.eos_token_ids,
            drafter="auto" if drafter is None else drafter,
            num_draft_tokens=num_draft_tokens,
            plan=Plan.load(bundle.folder, bundle, _machine(pair.target, pair.draft)),
            max_slowdown=max_slowdown,
            draft_vocabulary=vocabulary,
            exactness=pair.exactness,
        )
        if generator._pair.drafter == "auto":
            _ = generator._pair.costs  # measured here, and not in the first text
        return generator

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
        return last_result(self.stream(prompt, params, drafter=drafter, num_draft_tokens=num_draft_tokens, cancel=cancel))

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
            drafter: Another drafter than the generator's own for this text; see `__init__`.
            num_draft_tokens: The most tokens a round proposes; None for the generator's own number.
            cancel: Setting this event, from any thread, ends the text before the next pass.

        Returns:
            An iterator over pieces; the last one carries the result.

        Raises:
            PromptError: The prompt is empty, longer than the context, or holds unknown tokens.
            ValueError: An unknown drafter or a number of tokens out of range.
            LogitsError: While iterating: a model returned NaN or infinite logits. The generator stays usable.
        """
        pair = self._pair
        params = checked_params(params)
        tokens = pair.prompt_tokens(prompt)
        context_length = pair.target.spec.context_length
        check_prompt_length(len(tokens), context_length)
        session = Session(pair, min(context_length, len(tokens) + params.max_new_tokens))
        return session.stream(tokens, params, drafter=drafter, num_draft_tokens=num_draft_tokens, cancel=cancel)

    def session(self, *, max_length: int | None = None) -> Session:
        """Returns caches for texts that follow each other: a prompt that begins like the text before it costs what is new.

        Args:
            max_length: The most tokens of prompt and text together; None for the target's whole context. Memory is taken as
                it is used.

        Raises:
            ValueError: Fewer than 2, or more than the context.
        """
        context_length = self._pair.target.spec.context_length
        return Session(self._pair, context_length if max_length is None else checked_max_length(max_length, context_length))

    def chat(self, messages: Sequence[Mapping[str, str]] = (), *, max_length: int | None = None) -> Chat:
        """Returns a conversation that keeps its caches between turns.

        Args:
            messages: What has been said, a system message for instance, each with the strings "role" and "content".
            max_length: See `session`.

        Raises:
            PromptError: The messages are not of this form, or there is no chat template.
            ValueError: See `session`.
        """
        check_messages(messages, at_least=0)
        if not self.tokenizer.has_chat_template:
            raise PromptError("The bundle has no chat template, so it holds no conversation: use `session` with strings.")
        return Chat(self.session(max_length=max_length), messages)

    def machine(self) -> dict[str, str]:
        """Returns what this machine and its engines are, as far as costs depend on it."""
        return _machine(self.target, self.draft)

    def describe(self) -> dict[str, str]:
        """Returns what runs where, for people: engines, threads, precision, exactness, memory."""
        described = {
            "drafter": self._pair.drafter,
            "num_draft_tokens": str(self._pair.draft_tokens_of(self._pair.drafter, None)),
        }
        if self._pair.drafter == "auto":
            described["costs"] = "measured at load" if self._plan is None else f"from {PLAN}: {self._plan.advice}"
        for role, model in (("target", self._pair.target), ("draft", self._pair.draft)):
            if model is not None:
                spec = model.spec
                described[role] = f"{spec.source}, {spec.precision}, {spec.lowering} lowering; {model.description}"
                described[f"{role} exactness"] = f"{self._exactness}; {spec.padding}" if role == "target" else spec.padding
                described[f"{role} cache"] = f"{spec.cache_bytes_per_token / 1024:.0f} KiB a token"
        draft_spec = self.draft.spec if self.draft is not None else None
        if self.draft_vocabulary is not None:
            described["draft vocabulary"] = self.draft_vocabulary.description
        return described | describe_memory(self.target.spec, draft_spec, self._free_memory, self.draft_vocabulary)


def _machine(target: Model, draft: Model | None) -> dict[str, str]:
    engines = {role: model.engine for role, model in (("target", target), ("draft", draft)) if model is not None}
    return machine_of(engines)


def _check_tokenizer(tokenizer: Tokenizer, recorded: int, vocab_size: int, folder: Path) -> None:
    if tokenizer.vocab_size != recorded or tokenizer.vocab_size > vocab_size:
        raise BundleError(
            f"The tokenizer in {folder} has {tokenizer.vocab_size} tokens; the manifest says {recorded} and the target takes "
            f"{vocab_size}: it does not belong to this model, export again."
        )
