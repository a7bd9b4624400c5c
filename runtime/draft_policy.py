"""How far to propose: where one more token is worth more than it costs, and where a proposal could cost too much.

A proposal of k tokens brings 1 + a_1 + a_1 a_2 + ... tokens, a_i being the acceptance rates, for the time of one target pass
of k + 1 rows and what drafting takes. Its rate is greatest when a token is added as long as it brings more than the same time
would bring at that rate. Nothing here looks at a clock: costs were measured before, and acceptance is counted; so the same text
and the same costs always lead to the same proposals.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from .pass_costs import PassCosts

Kind = int | str
MAX_NUM_DRAFT_TOKENS = 64
GUARDED_TOKENS = 64
MAX_SLOWDOWN = 0.03
_FORGETTING = 0.95
_PRIOR_WEIGHT = 4.0
_RATE_MEMORY = 0.9
_CAUTION = 0.6


@dataclass
class _Count:
    accepted: float = 0.0
    tried: float = 0.0


class AcceptanceEstimate:
    """How often tokens of each kind are accepted, where all tokens before them were. Old rounds count less and less."""

    def __init__(self, priors: Mapping[Kind, float]) -> None:
        """Starts with guesses.

        Args:
            priors: The acceptance rate of each kind before anything was seen, 0 to 1; what was seen long ago fades into it.
        """
        self._priors = priors
        self._counts: dict[Kind, _Count] = {}

    def rate(self, kind: Kind) -> float:
        """Returns the probability that the next token of this kind is accepted."""
        count = self._counts.get(kind, _Count())
        return (count.accepted + _PRIOR_WEIGHT * self._priors[kind]) / (count.tried + _PRIOR_WEIGHT)

    def count(self, kind: Kind, *, accepted: bool) -> None:
        """Counts one token that was judged."""
        count = self._counts.setdefault(kind, _Count())
        count.tried += 1
        count.accepted += accepted

    def fade(self) -> None:
        """Lets all that was counted fade a little, once a round."""
        for count in self._counts.values():
            count.accepted *= _FORGETTING
            count.tried *= _FORGETTING


class DraftPolicy:
    """Decides token by token, from costs and from what was accepted before.

    No stretch of 64 tokens takes longer than without speculation by more than a given fraction, as far as costs tell: the loss
    of the worst stretch that ends here, and what a proposal would lose if all of it were refused, together stay below.

    What a refusal takes of that allowance is dearer than its seconds: behind a few of them a draft must pause, however good it
    is. So a proposal also answers for the chance of a refusal times the square of its loss over the allowance: small bets
    first, and large ones when enough was won. (On recorded texts of Qwen2.5-Coder this was 3 to 10 % faster.)
    """

    def __init__(self, costs: PassCosts, max_slowdown: float = MAX_SLOWDOWN) -> None:
        """Starts a text.

        Args:
            costs: Measured on this machine.
            max_slowdown: That fraction. More of it lets a good draft propose more: with little, a few refusals in a row must
                end in a pause.
        """
        # By the number of proposed tokens; looked up many times a round.
        self._target_seconds = [costs.target(proposed + 1) for proposed in range(MAX_NUM_DRAFT_TOKENS + 1)]
        self._max_slowdown = max_slowdown
        self._plain = costs.target(1) + costs.round_seconds
        self._rate = 1 / self._plain
        self._recent: deque[tuple[int, float]] = deque()

    def worth(
        self,
        proposed: int,
        spent: float,
        reach: float,
        rate: float,
        draft_seconds: float,
        num_tokens: int,
        *,
        drafted: int = 0,
    ) -> bool:
        """Tells whether to go on proposing.

        Args:
            proposed: Tokens proposed so far.
            spent: Seconds spent on drafting them.
            reach: The probability that all of them are accepted.
            rate: The acceptance rate of the tokens to come.
            draft_seconds: What drafting one more takes.
            num_tokens: The most tokens to propose in all.
            drafted: How many of those to come have been drafted already, their seconds being among those spent.
        """
        gained, reached, allowance = 0.0, reach, self._allowance()
        target_seconds = self._target_seconds
        risked = (1 - reach) * self.at_risk(proposed, spent) ** 2
        # The second row may be dear and those behind it cheap: a few more together can pay where one alone does not.
        for more in range(1, num_tokens - proposed + 1):
            reached *= rate
            gained += reached
            drafting = (more - drafted) * draft_seconds
            loss = self.at_risk(proposed + more, spent + drafting)
            if loss > allowance:
                return False
            seconds = drafting + target_seconds[proposed + more] - target_seconds[proposed]
            caution = _CAUTION * ((1 - reached) * loss**2 - risked) / allowance if allowance else 0.0
            if gained > (seconds + caution) * self._rate:
                return True
        return False

    def at_risk(self, proposed: int, spent: float) -> float:
        """Returns the seconds a round loses if all its `proposed` tokens are refused."""
        return spent + self._target_seconds[proposed] - self._target_seconds[0]

    def saved(self, rate: float, draft_seconds: float, num_tokens: int) -> float:
        """Returns the seconds a token of text takes less where proposals of the best length are made in every round.

        Args:
            rate: The acceptance rate of a proposed token.
            draft_seconds: What drafting one takes.
            num_tokens: The most tokens to propose.
        """
        best = 0.0
        expected, reach = 1.0, 1.0
        for proposed in range(1, num_tokens + 1):
            reach *= rate
            expected += reach
            best = max(best, self._plain - (self._plain + self.at_risk(proposed, proposed * draft_seconds)) / expected)
        return best

    def count_round(self, proposed: int, spent: float, new_tokens: int) -> None:
        """Books a round that gave `new_tokens` tokens."""
        seconds = self._plain + self.at_risk(proposed, spent)
        self._recent.append((new_tokens, seconds - new_tokens * self._plain))
        while sum(tokens for tokens, _ in self._recent) >= GUARDED_TOKENS:
            self._recent.popleft()
        rate = max(new_tokens / seconds, 1e-9)
        self._rate = max(1 / self._plain, _RATE_MEMORY * self._rate + (1 - _RATE_MEMORY) * rate)

    def _allowance(self) -> float:
        """Returns the seconds the next round may lose: what is left behind the worst stretch that ends here."""
        worst = lost = 0.0
        for _, loss in reversed(self._recent):
            lost += loss
            worst = max(worst, lost)
        return self._max_slowdown * GUARDED_TOKENS * self._plain - worst
