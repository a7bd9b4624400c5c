"""Turns generated ids, one at a time, into text that can be handed out, and finds stop strings in it.

It knows neither the tokenizer (a function that decodes ids is given) nor why a model said what it said. The ids themselves, and
where to cut them, are the caller's.
"""

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_CHARACTER_BYTES = 4  # the longest UTF-8 character; while its last byte is missing, three tokens of one byte wait
_LONGEST_WINDOW = 32  # ids without one end on a whole character; only bytes that are not text get this far
_SETTLED_IDS = 4  # about as many are decoded before a new one: enough not to decode most of them once more by themselves
_KEPT_WINDOW = 16  # of these: more bytes than the waiting characters have, so that the text's end stays the same


class IncrementalDecoder:
    """Decodes ids one at a time, each with only the few ids before it.

    One id alone is not enough: its bytes can be part of a character, and SentencePiece decoders strip the space of the first
    token. So the last ids whose text is settled are decoded again with the new one, and their text is cut off.

    The text is that of decoding everything at once, with one exception: byte fallback turns a whole run of byte tokens into
    U+FFFD when one of them is wrong, also characters before it, which have long been handed out. Here only the bytes that
    belong to no character become U+FFFD, one each.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        """Starts behind `context`, the ids of the text before, whose own text is left out."""
        self._decode = decode
        self._settled: list[int]  # the last ids whose text is settled, and their text
        self._settled_text: str
        end = list(context[-_LONGEST_WINDOW:])
        # Cut inside a character, the prompt's end would be stray bytes, which spoil the run of byte tokens they are in.
        starts = [skip for skip in range(_CHARACTER_BYTES) if (text := decode(end[skip:])) and text[0] != _REPLACEMENT]
        self._settle_behind(end[starts[0] :] if starts else end)
        self._pending: list[int] = []  # the ids since then: none of them ends with a whole character
        self._pending_text = ""
        self._given = 0  # characters of the pending text that no later id can change, already returned

    @property
    def unfinished(self) -> str:
        """Bytes that are not a character yet, as they read if nothing follows: at most three U+FFFD."""
        return self._pending_text[self._given :]

    def append(self, token_id: int) -> str:
        """Takes the next id and returns the text, possibly empty, that is now certain whatever follows."""
        if not self._pending:  # as nearly always, and then one call is enough: calls are what costs here
            ids = [*self._settled, token_id]
            text = self._decode(ids)
            known = self._settled_text
            if len(text) > len(known) and text.startswith(known) and text[-1] != _REPLACEMENT:
                if len(ids) <= _SETTLED_IDS:
                    self._settled, self._settled_text = ids, text
                else:
                    self._settle_behind([token_id])
                return text[len(known) :]
        # A special token that the decoder leaves out must not grow the window. Doubled, because a lone space may be stripped.
        if not self._decode([token_id, token_id]):
            return ""
        self._pending.append(token_id)
        # Behind stray bytes, byte fallback only finds a character when it is decoded without them; it has at most four tokens.
        for stray in (0, *range(max(1, len(self._pending) - _CHARACTER_BYTES), len(self._pending))):
            window = self._decode(self._settled + self._pending[stray:])
            # Where the settled text reads otherwise, stray bytes have spoiled a run of byte tokens that began in it.
            if window.startswith(self._settled_text) and not window.endswith(_REPLACEMENT):
                return self._settle(stray, window[len(self._settled_text) :])
        return self._wait()

    def _settle(self, stray: int, text: str) -> str:
        if stray:
            text = self._text_of(self._pending[:stray]) + text
        new = text[self._given :]
        self._settle_behind(self._pending[stray:])
        self._pending, self._pending_text, self._given = [], "", 0
        return new

    def _settle_behind(self, token_ids: list[int]) -> None:
        self._settled, self._settled_text = token_ids, self._decode(token_ids)
        if not self._settled_text:  # a space at the very beginning, stripped; a second one is not, so it can be compared
            self._settled = token_ids * 2
            self._settled_text = self._decode(self._settled)

    def _wait(self) -> str:
        text = self._text_of(self._pending)
        wrong = len(text) - len(text.rstrip(_REPLACEMENT))
        new = text[self._given : len(text) - min(wrong, _CHARACTER_BYTES - 1)]
        self._pending_text = text
        self._given += len(new)
        if len(self._pending) > _LONGEST_WINDOW:
            waiting = len(self.unfinished)
            del self._pending[:-_KEPT_WINDOW]
            self._pending_text = self._text_of(self._pending)
            self._given = len(self._pending_text) - waiting
        return new

    def _text_of(self, token_ids: list[int]) -> str:
        window = self._decode(self._settled + token_ids)
        return window[len(self._settled_text) :] if window.startswith(self._settled_text) else self._decode(token_ids)


class OutputText:
    """The text of one generation as it grows, cut before, or behind, the first stop string.

    Of several stop strings the one that is complete first wins, reading character by character; of those complete at the same
    character the longest, so that nothing of a stop string is left over. Thus the cut depends on the text alone. A rule by
    where stop strings begin would, for `abc` and `b`, cut "abc" in one place when it is one token and in another when it is
    three.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        context: Sequence[int] = (),
        *,
        include_stop: bool = False,
    ) -> None:
        """Starts an empty text.

        Args:
            decode: Turns ids into text, with U+FFFD for bytes that are not UTF-8; special tokens left out or not, as it likes.
            stop: Strings that end the text; SamplingParams has refused what cannot be one.
            context: The prompt's ids, for decoders that strip the space before the first token. Its text is neither handed
                out nor searched, and should end with a whole character; only the last 32 ids are looked at.
            include_stop: Whether the stop string itself stands in the text.
        """
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._decoder = IncrementalDecoder(decode, context)
        self._ended = False
        self._taken: list[str] = []
        self._early = 0  # characters handed out by `flush` before they were certain
        self._ready = ""
        self._held = ""  # settled text that could be the beginning of a stop string

    def append(self, token_id: int) -> bool:
        """Adds one id.

        Returns:
            True when this id completes a stop string: the text has ended.

        Raises:
            RuntimeError: The text has already ended by a stop string.
        """
        if self._ended:
            raise RuntimeError(f"Token {token_id} comes after the end of the text: start a new OutputText.")
        text = self._held + self._decoder.append(token_id)
        found = [(end, start) for stop in self._stop if (start := text.find(stop)) >= 0 for end in [start + len(stop)]]
        if found:
            self._ended = True
            end, start = min(found)
            self._ready += text[: end if self._include_stop else start]
            self._held = ""
        else:
            certain = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
            self._ready += text[:certain]
            self._held = text[certain:]
        return bool(found)

    def take(self) -> str:
        """Returns the text since the last call that is certain: whole characters that cannot belong to a stop string."""
        new = self._ready[self._early :]
        self._early = max(0, self._early - len(self._ready))
        self._taken.append(self._ready)
        self._ready = ""
        return new

    def flush(self) -> str:
        """Returns what `take` has not, as if the text ended here: text that was held back, U+FFFD for an unfinished character.

        The text may go on all the same: what has been handed out is then not handed out again, though a stop string may
        turn out to begin in it, or U+FFFD to be the beginning of a character.
        """
        new = self.take()
        unfinished = self._unfinished()
        early = (self._held + unfinished)[self._early :]
        # However many U+FFFD an unfinished character reads as, it will be one character.
        self._early = max(self._early, len(self._held) + bool(unfinished))
        return new + early

    @property
    def text(self) -> str:
        """Everything so far as if it ended here, handed out or not. Joined anew in each call."""
        return "".join(self._taken) + self._ready + self._held + self._unfinished()

    def _unfinished(self) -> str:
        return "" if self._ended else self._decoder.unfinished


def _overlap(text: str, stop: str) -> int:
    """Returns how many characters at the end of `text`, which does not hold `stop`, could be the beginning of `stop`."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
