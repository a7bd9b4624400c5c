"""What a generation cost and what speculation brought: counters, and the figures that follow from them."""

from dataclasses import dataclass, field


@dataclass
class GenerationStats:
    """Counters of one generation. Every new token is accepted, a correction or a bonus.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        cached_tokens: How many of them, the first ones, the target had cached from a text before.
        new_tokens: Tokens generated, an end-of-text token included.
        rounds: Rounds, so target passes that judged something.
        proposed_tokens: Tokens proposed.
        accepted_tokens: Proposed tokens that stand in the text.
        correction_tokens: Tokens drawn from a residual.
        bonus_tokens: Tokens drawn behind a fully accepted proposal, empty ones included.
        proposed_by_position: How often a proposal had a token at position i.
        accepted_by_position: How often the token at position i came to stand in the text.
        target_passes: Passes of the target, prefill included.
        draft_passes: Passes of the draft model.
        target_seconds: Time in the target's passes.
        draft_seconds: Time in the draft's passes.
        first_token_seconds: Of the first round, prefill included.
        first_round_tokens: Tokens of that round.
        total_seconds: Of all rounds; what a reader does between two pieces does not count.
        top_logits: How many of a row's largest logits were to decide the text, where only these came from the target's device;
            0 where whole rows came.
        repeated_passes: Passes of the target that were run again for whole rows, since what came did not decide.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    rounds: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    correction_tokens: int = 0
    bonus_tokens: int = 0
    proposed_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    target_passes: int = 0
    draft_passes: int = 0
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    first_token_seconds: float = 0.0
    first_round_tokens: int = 0
    total_seconds: float = 0.0
    top_logits: int = 0
    repeated_passes: int = 0

    def count_round(self, num_proposed: int) -> None:
        """Counts one round and what it proposed."""
        self.rounds += 1
        self.proposed_tokens += num_proposed
        for counts in (self.proposed_by_position, self.accepted_by_position):
            counts.extend([0] * (num_proposed - len(counts)))
        for position in range(num_proposed):
            self.proposed_by_position[position] += 1

    def count_kept(self, num_proposed: int, num_accepted: int, kept: range) -> None:
        """Counts tokens of a round that came to stand in the text.

        Args:
            num_proposed: Tokens the round proposed.
            num_accepted: How many of them, the first ones, it accepted.
            kept: Which of its num_accepted + 1 tokens now stand in the text.
        """
        self.new_tokens += len(kept)
        for place in kept:
            if place < num_accepted:
                self.accepted_tokens += 1
                self.accepted_by_position[place] += 1
            elif num_accepted < num_proposed:
                self.correction_tokens += 1
            else:
                self.bonus_tokens += 1

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens for each proposed one; 0 when nothing was proposed."""
        return self.accepted_tokens / self.proposed_tokens if self.proposed_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """New tokens a round, bonus and corrections included; 1 is what decoding without a draft gives."""
        return self.new_tokens / self.rounds if self.rounds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens per second behind the first round, so without the prefill; 0 when there was one round only."""
        seconds = self.total_seconds - self.first_token_seconds
        return (self.new_tokens - self.first_round_tokens) / seconds if self.rounds > 1 and seconds > 0 else 0.0
