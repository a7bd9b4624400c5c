"""A conversation: a list of messages and a session's caches.

The caches save work and change nothing: an answer is what the same messages would get from a fresh generator.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence

from .checks import check_whole, is_whole
from .errors import PromptError
from .generation import Generation, GenerationResult, Piece
from .sampling_params import SamplingParams
from .session import Session, last_result
from .tokenizer import check_messages

Message = dict[str, str]


class Chat:
    """Messages that grow by turns. What is new is computed, what was said before is not. For one thread at a time."""

    def __init__(self, session: Session, messages: Sequence[Mapping[str, str]] = ()) -> None:
        """Starts a conversation; `Generator.chat` is the usual way.

        Args:
            session: Caches for this chat alone.
            messages: What has been said, each with the strings "role" and "content".
        """
        self._session = session
        self._messages: list[Message] = [dict(message) for message in messages]
        self._answer: Generation | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        """What has been said so far, as copies; the last one may be an answer that is still growing."""
        return tuple(dict(message) for message in self._messages)

    def send(
        self,
        text: str | None = None,
        params: SamplingParams | None = None,
        *,
        drafter: str | None = None,
        num_draft_tokens: int | None = None,
        cancel: threading.Event | None = None,
    ) -> GenerationResult:
        """Returns the whole answer; arguments and errors are those of `stream`."""
        return last_result(self.stream(text, params, drafter=drafter, num_draft_tokens=num_draft_tokens, cancel=cancel))

    def stream(
        self,
        text: str | None = None,
        params: SamplingParams | None = None,
        *,
        drafter: str | None = None,
        num_draft_tokens: int | None = None,
        cancel: threading.Event | None = None,
    ) -> Iterator[Piece]:
        """Answers the messages, and adds the answer to them as it grows.

        An answer whose stream is closed stays as far as it got. After an error the messages are what they were before.

        Args:
            text: The user's next message; None answers the messages as they are, after `edit` for instance.
            params: See Generator.stream.
            drafter: See Generator.stream.
            num_draft_tokens: See Generator.stream.
            cancel: See Generator.stream.

        Returns:
            An iterator over pieces, as of Generator.stream.

        Raises:
            PromptError: The chat template refuses the messages, or they fill the context.
            ValueError: See Generator.stream.
        """
        before = len(self._messages)
        asked: list[Message] = [*self._messages, *([] if text is None else [{"role": "user", "content": text}])]
        self._answer = self._session.start(asked, params, drafter=drafter, num_draft_tokens=num_draft_tokens, cancel=cancel)
        self._messages = [*asked, {"role": "assistant", "content": ""}]
        return self._grow(self._answer, self._messages[-1], before)

    def resume(self, max_new_tokens: int, *, cancel: threading.Event | None = None) -> Iterator[Piece]:
        """Lets the last answer go on as if it had never stopped; arguments and errors are those of `Session.resume`."""
        if self._answer is None:
            raise ValueError("There is no answer to go on with: the last message is not one that this chat has given.")
        self._session.resume(max_new_tokens, cancel=cancel)
        return self._grow(self._answer, self._messages[-1], len(self._messages))

    def rewind_to(self, num_messages: int) -> None:
        """Forgets all messages but the first `num_messages`; does nothing when there are no more.

        Raises:
            ValueError: A negative number.
        """
        check_whole("num_messages", num_messages, 0)
        if num_messages < len(self._messages):
            del self._messages[num_messages:]
            self._answer = None

    def edit(self, index: int, content: str) -> None:
        """Gives a message other words, and forgets those behind it.

        Raises:
            PromptError: There is no such message.
        """
        if not is_whole(index) or not 0 <= index < len(self._messages):
            raise PromptError(f"There is no message {index!r:.80}: the chat has {len(self._messages)}, counted from 0.")
        edited = {**self._messages[index], "content": content}
        check_messages([edited])
        self.rewind_to(index)
        self._messages.append(edited)
        self._answer = None

    def fork(self) -> "Chat":
        """Returns a chat with the same messages and a copy of the caches; the two go separate ways from here.

        Raises:
            DeviceError: There is no memory for it.
        """
        return Chat(self._session.fork(), self._messages)

    def _grow(self, answer: Generation, message: Message, length_before: int) -> Iterator[Piece]:
        try:
            for piece in self._session.pieces(answer):
                message["content"] = answer.text
                yield piece
        except Exception:
            if self._answer is answer:
                self.rewind_to(length_before)
            raise
