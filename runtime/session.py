"""Caches that outlive a text: a prompt that begins as the text before it is computed from where the two part."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from .acceptance import AcceptanceRule
from .checks import shown
from .decoder import Decoder
from .draft_decoder import DraftDecoder
from .draft_policy import MAX_NUM_DRAFT_TOKENS
from .drafters import AdaptiveDrafter, Drafter, HybridDrafter, LookupDrafter, ModelDrafter, NoDrafter
from .errors import PromptError
from .generation import Generation, GenerationResult, Piece
from .pair import MODEL_DRAFTERS, DecoderPair
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .pair import Prompt


class Session:
    """One text at a time, and the caches it leaves to the next. For one thread at a time.

    A text is the same in whatever session it is generated: what is cached saves work and changes nothing.
    """

    def __init__(self, pair: DecoderPair, max_length: int) -> None:
        """Allocates the target's cache, and later the draft's, when it is first asked for.

        Args:
            pair: The models.
            max_length: The most tokens of prompt and text together, at most the target's context.

        Raises:
            DeviceError: There is not so much memory.
            RuntimeError: The models were loaded before this process was forked.
        """
        pair.check_process()
        self._pair = pair
        self._max_length = max_length
        # Room for proposals beyond it, so that a text does not depend on how much was asked for.
        self._capacity = min(pair.target.spec.context_length, max_length + MAX_NUM_DRAFT_TOKENS)
        self._target = Decoder(pair.target, self._capacity, num_rows=MAX_NUM_DRAFT_TOKENS + 1)
        self._draft: Decoder | DraftDecoder | None = None
        self._current: Generation | None = None
        self._stream = 0
        self._lock = threading.Lock()

    def generate(
        self,
        prompt: "Prompt",
        params: SamplingParams | None = None,
        *,
        drafter: str | None = None,
        num_draft_tokens: int | None = None,
        cancel: threading.Event | None = None,
    ) -> GenerationResult:
        """Generates a whole text; arguments and errors are those of `Generator.stream`."""
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
        """Generates a text round by round; arguments and errors are those of `Generator.stream`.

        The stream of the text before it, if it has not ended, raises RuntimeError from here on.
        """
        started = self.start(prompt, params, drafter=drafter, num_draft_tokens=num_draft_tokens, cancel=cancel)
        return self.pieces(started)

    def resume(self, max_new_tokens: int, *, cancel: threading.Event | None = None) -> Iterator[Piece]:
        """Lets the last text, which was cut off by its length, cancelled or left, go on as if it had never stopped.

        Args:
            max_new_tokens: How many tokens it may grow by.
            cancel: See Generator.stream.

        Returns:
            An iterator over what is new; its result is the whole text.

        Raises:
            ValueError: There is no text, it has come to its own end, or the context is full.
        """
        if self._current is None:
            raise ValueError("There is no text to go on with: generate one first.")
        check_cancel(cancel)
        with self._in_use():
            self._current.extend(max_new_tokens)
            for decoder in (self._target, self._draft):
                if decoder is not None:
                    decoder.cancel = cancel
            return self.pieces(self._current)

    def fork(self) -> "Session":
        """Returns a session with copies of the caches; neither sees what the other does from here on.

        Raises:
            DeviceError: There is no memory for it.
        """
        fork = Session(self._pair, self._max_length)
        fork._target = self._target.fork()
        fork._draft = self._draft and self._draft.fork()
        return fork

    def start(
        self,
        prompt: "Prompt",
        params: SamplingParams | None = None,
        *,
        drafter: str | None = None,
        num_draft_tokens: int | None = None,
        cancel: threading.Event | None = None,
    ) -> Generation:
        """Begins a text and computes nothing yet; arguments and errors are those of `Generator.stream`."""
        pair = self._pair
        params = checked_params(params)
        check_cancel(cancel)
        drafter = pair.drafter if drafter is None else drafter
        pair.check_drafting(drafter, num_draft_tokens)
        tokens = pair.prompt_tokens(prompt)
        check_prompt_length(len(tokens), self._max_length)
        rule = pair.acceptance_rule(params, len(tokens))
        eos_token_ids, stop_token_ids = pair.end_token_ids(params)
        with self._in_use():
            uses_model = drafter in MODEL_DRAFTERS or (drafter == "auto" and pair.draft is not None)
            draft = self._draft_decoder() if uses_model else None
            self._current = None
            top_rule = None if params.logprobs is not None else rule.sampler
            self._target.begin(tokens, cancel, top_rule)
            model = None
            if draft is not None:
                draft.begin(tokens, cancel, None if self._draft_rows_are_whole(drafter, rule) else top_rule)
                model = ModelDrafter(
                    draft,
                    rule,
                    target_vocab_size=pair.target.spec.vocab_size,
                    end_token_ids=eos_token_ids | stop_token_ids,
                )
            self._current = Generation(
                self._target,
                _new_drafter(drafter, model, pair),
                tokens,
                params,
                rule=rule,
                num_draft_tokens=pair.draft_tokens_of(drafter, num_draft_tokens),
                max_length=self._max_length,
                capacity=self._capacity,
                eos_token_ids=eos_token_ids,
                decode=pair.tokenizer.decode,
            )
            return self._current

    def pieces(self, generation: Generation) -> Iterator[Piece]:
        """Runs a generation that was started here, as long as it is the current one, and this its last stream.

        Raises:
            RuntimeError: Another text was begun in this session, the text was resumed by another stream, or another thread is
                in the middle of a pass.
        """
        self._stream += 1
        return self._run(generation, self._stream)

    def _run(self, generation: Generation, stream: int) -> Iterator[Piece]:
        pieces = generation.pieces()
        while generation is self._current and stream == self._stream:
            with self._in_use():
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece
            if piece.result is not None:
                return
        raise RuntimeError("This stream cannot go on: its session has begun another text, or gone on with this one elsewhere.")

    def __reduce__(self) -> NoReturn:
        """Refuses to be pickled or copied, as its pair does; `fork` makes a copy of a session."""
        self._pair.__reduce__()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        self._pair.check_process()  # first, because a thread that is not in this fork may hold the lock
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("This session is in use by another thread: give each thread a session of its own.")
        try:
            yield
        finally:
            self._lock.release()

    def _draft_rows_are_whole(self, drafter: str, rule: AcceptanceRule) -> bool:
        """Whether all of the draft's logits matter where only the target's largest do."""
        draft = self._pair.draft
        # Those beyond the target's vocabulary are cut off, and may be the largest.
        wider = draft is not None and draft.spec.vocab_size > self._pair.target.spec.vocab_size
        # "auto" proposes more where the draft is sure, which a device rounds otherwise: that must not change what is drawn.
        return wider or (drafter == "auto" and rule.depends_on_rounds)

    def _draft_decoder(self) -> Decoder | DraftDecoder:
        if self._draft is None:
            self._draft = self._pair.open_draft(self._capacity)
        return self._draft


def _new_drafter(name: str, model: ModelDrafter | None, pair: DecoderPair) -> Drafter:
    if name == "auto":
        return AdaptiveDrafter(
            LookupDrafter(),
            model,
            pair.costs,
            model_prior=pair.model_prior,
            max_slowdown=pair.max_slowdown,
        )
    if name == "lookup":
        return LookupDrafter()
    if name == "off":
        return NoDrafter()
    assert model is not None, "checked by check_drafting"
    return model if name == "model" else HybridDrafter(LookupDrafter(), model)


def last_result(pieces: Iterator[Piece]) -> GenerationResult:
    """Runs a stream to its end and returns its result."""
    result = None
    for piece in pieces:
        result = piece.result
    assert result is not None, "a stream that ends has a result"
    return result


def check_cancel(cancel: object) -> None:
    """Raises ValueError for what is neither an event nor None."""
    if cancel is not None and not (callable(getattr(cancel, "is_set", None)) and not isinstance(cancel, type)):
        raise ValueError(f"cancel is {shown(cancel)}; a threading.Event is expected, or None.")


def checked_params(params: SamplingParams | None) -> SamplingParams:
    """Returns the rules, or the default ones; raises ValueError for anything else."""
    if not isinstance(params, SamplingParams | None):
        raise ValueError(f"params is {shown(params)}; SamplingParams are expected, or None.")
    return params or SamplingParams()


def check_prompt_length(length: int, max_length: int) -> None:
    """Raises PromptError when a prompt leaves no room for an answer."""
    if length >= max_length:
        raise PromptError(
            f"The prompt has {length} tokens and the context holds {max_length}, one of them for the answer: shorten the "
            f"prompt by {length - max_length + 1} or more, or raise the max_length of the session or the export."
        )
