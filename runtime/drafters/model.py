"""A smaller model, its tokens chosen by the same rules as the target's."""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.acceptance import AcceptanceRule, Proposal
from runtime.candidates import Candidates
from runtime.decoder import Decoder
from runtime.draft_decoder import DraftDecoder
from runtime.errors import SamplingError


@dataclass(frozen=True)
class DraftedToken:
    """One token of a draft model.

    Attributes:
        token: Its id.
        row: The distribution it was drawn from; None where it was chosen.
        ends_text: Whether nothing is worth proposing behind it.
    """

    token: int
    row: Candidates | None
    ends_text: bool


class ModelDrafter:
    """A draft model that reads along and proposes."""

    name = "model"

    def __init__(
        self, decoder: Decoder | DraftDecoder, rule: AcceptanceRule, *, target_vocab_size: int, end_token_ids: frozenset[int]
    ) -> None:
        """Keeps a decoder of its own.

        Args:
            decoder: The draft model, reading the target's tokens; what it has cached must be a beginning of the sequence.
            rule: How the generation's tokens are chosen.
            target_vocab_size: Width of the target's rows; what the draft has beyond it is never proposed (padded vocabularies).
            end_token_ids: Ids behind which nothing is worth proposing.
        """
        self._decoder = decoder
        self._rule = rule
        self._target_vocab_size = target_vocab_size
        self._end_token_ids = end_token_ids
        self._chooses_largest = rule.sampler.num_top == 1 and not rule.depends_on_rounds
        # Behind a gap the cache holds the text from `_gap_end` on, where `_gap_start` tokens stand before it.
        self._gap_start = self._gap_end = 0

    @property
    def passes(self) -> int:
        """Passes of the draft model so far."""
        return self._decoder.passes

    @property
    def seconds(self) -> float:
        """Time spent in them."""
        return self._decoder.seconds

    @property
    def last_total(self) -> float | None:
        """See Decoder."""
        return self._decoder.last_total

    def expect_end(self, length: int) -> None:
        """Has nothing to plan."""

    def propose(self, sequence: Sequence[int], num_tokens: int) -> Proposal:
        """Chooses tokens one by one, each fed back, until `next_token` has none or one ends the text."""
        if self._chooses_largest and isinstance(self._decoder, Decoder) and self._decoder.can_chain:
            return Proposal(tuple(self._chain(self._decoder, sequence, num_tokens)))
        tokens: list[int] = []
        rows: list[Candidates | None] = []
        while len(tokens) < num_tokens and (drafted := self.next_token(sequence, tokens)) is not None:
            tokens.append(drafted.token)
            rows.append(drafted.row)
            if drafted.ends_text:
                break
        return Proposal.of(tokens, rows)

    def missing(self, sequence: Sequence[int], block: Sequence[int]) -> int:
        """Returns how many tokens of sequence and block the model has not read yet."""
        return len(sequence) + len(block) - self._read()

    def skip_to_last(self, num_tokens: int, sequence: Sequence[int]) -> None:
        """Leaves a gap in what the model has read, where more than the last `num_tokens` of the sequence are missing.

        Only what it proposes can suffer. The text before the first gap stays read; a new gap takes the place of an old one.
        """
        if len(sequence) - self._read() > num_tokens:
            if self._gap_end > self._gap_start:
                self._decoder.rewind_to(self._gap_start)
            self._gap_start, self._gap_end = self._decoder.past_length, len(sequence) - num_tokens

    def logits(self, sequence: Sequence[int], block: Sequence[int]) -> Candidates | None:
        """Reads what it has not read, and returns its logits behind sequence and block.

        Returns:
            One row, a view that the next call overwrites; None where the draft's context ends, where it does not have a token,
            or none of those so far.
        """
        past = self._read()
        unread = [*sequence[past:], *block[max(0, past - len(sequence)) :]]
        if not self._decoder.takes(unread):
            return None
        return self._decoder.candidates(unread, 1).below(self._target_vocab_size)

    def choose(self, logits: Candidates, sequence: Sequence[int], block: Sequence[int]) -> DraftedToken | None:
        """Chooses the token behind sequence and block from its logits; None where the sampling rules leave none."""
        try:
            token, row = self._rule.propose(logits, sequence, block)
        except SamplingError:
            return None
        return DraftedToken(token, row, token in self._end_token_ids)

    def next_token(self, sequence: Sequence[int], block: Sequence[int]) -> DraftedToken | None:
        """Chooses the token behind sequence and block; None where there can be none."""
        logits = self.logits(sequence, block)
        return None if logits is None else self.choose(logits, sequence, block)

    def observe(self, num_accepted: int) -> None:
        """Has nothing to learn."""

    def rewind_to(self, length: int) -> None:
        """Drops cached tokens from `length` on."""
        if length < self._gap_end:
            self._decoder.rewind_to(min(length, self._gap_start))
            self._gap_start = self._gap_end = 0
        else:
            self._decoder.rewind_to(length - (self._gap_end - self._gap_start))

    def _chain(self, decoder: Decoder, sequence: Sequence[int], num_tokens: int) -> list[int]:
        """Chooses as `propose`, all on the device; what is chosen behind a token that ends the text is dropped."""
        unread = sequence[self._read() :]
        num_tokens = min(num_tokens, decoder.room() - len(unread) + 1)
        if num_tokens < 1 or not decoder.takes(unread):
            return []
        tokens = decoder.chain(unread, num_tokens)
        end = next((place for place, token in enumerate(tokens, start=1) if token in self._end_token_ids), num_tokens)
        return tokens[:end]

    def _read(self) -> int:
        """Returns how far into the text the model has read, a gap counted as if it had."""
        return self._decoder.past_length + (self._gap_end - self._gap_start)
