"""Prompt lookup (Saxena 2023): what followed the text's own ending before is proposed again."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.acceptance import Proposal

LONGEST = 8
SHORTEST = 2


@dataclass
class _Followers:
    """What has followed one run of tokens: how often each token, and where it did so last."""

    counts: dict[int, int] = field(default_factory=dict)
    last: int = -1

    def add(self, token: int) -> None:
        self.counts[token] = self.counts.get(token, 0) + 1
        self.last = token

    def best(self) -> int:
        """The most frequent token; of several, the one that followed last if it is among them."""
        most = max(self.counts.values())
        return self.last if self.counts[self.last] == most else max(self.counts, key=lambda token: self.counts[token])


class NgramIndex:
    """Every run of 2 to 8 tokens of a text, with the tokens that followed it. A token is added in constant time."""

    def __init__(self, *, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        """Starts with an empty text.

        Args:
            longest: Tokens of an ending looked up first.
            shortest: The fewest tokens that still count as a match.

        Raises:
            ValueError: Not 1 <= shortest <= longest.
        """
        if not 1 <= shortest <= longest:
            raise ValueError(f"Lookup needs 1 <= shortest <= longest; found {shortest} and {longest}.")
        self._sizes = range(longest, shortest - 1, -1)
        self._followers: dict[tuple[int, ...], _Followers] = {}
        self._length = 0

    def extend_to(self, text: Sequence[int]) -> None:
        """Adds the tokens of a text behind those that were added before."""
        for place in range(self._length, len(text)):
            for size in self._sizes:
                if size <= place:
                    run = tuple(text[place - size : place])
                    followers = self._followers.get(run)
                    if followers is None:
                        followers = self._followers[run] = _Followers()
                    followers.add(text[place])
        self._length = max(self._length, len(text))

    def next_token(self, ending: Sequence[int]) -> tuple[int, int] | None:
        """Returns the token that follows the longest known run at the end of a text, and how long that run is."""
        for size in self._sizes:
            if size <= len(ending) and (followers := self._followers.get(tuple(ending[len(ending) - size :]))) is not None:
                return followers.best(), size
        return None


class LookupDrafter:
    """Copies from the text itself, token by token: each time what followed the longest known ending most often."""

    name = "lookup"
    passes = 0
    seconds = 0.0

    def __init__(self, *, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        """Starts with an empty index; arguments and errors are those of NgramIndex."""
        self._index = NgramIndex(longest=longest, shortest=shortest)
        self._longest = longest

    def expect_end(self, length: int) -> None:
        """Has nothing to plan."""

    def propose(self, sequence: Sequence[int], num_tokens: int) -> Proposal:
        """Copies while something of the ending is known."""
        self._index.extend_to(sequence)
        tokens: list[int] = []
        while len(tokens) < num_tokens and (found := self.next_token(sequence, tokens)) is not None:
            tokens.append(found[0])
        return Proposal(tuple(tokens))

    def next_token(self, sequence: Sequence[int], block: Sequence[int]) -> tuple[int, int] | None:
        """Returns what may follow sequence and block, and how many tokens of them were known; None where nothing was.

        Args:
            sequence: Prompt and text, as of the last `extend`.
            block: Tokens proposed behind it, which are looked up and not learned.
        """
        return self._index.next_token([*sequence[len(sequence) - min(len(sequence), self._longest) :], *block])

    def extend(self, sequence: Sequence[int]) -> None:
        """Learns what is new of the sequence."""
        self._index.extend_to(sequence)

    def observe(self, num_accepted: int) -> None:
        """Has nothing to learn."""

    def rewind_to(self, length: int) -> None:
        """Keeps the index: it holds committed tokens only, which are never taken back within a generation."""
