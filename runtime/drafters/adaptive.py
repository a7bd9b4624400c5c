"""Whatever pays: lookup, the draft model, both or nothing, and as many tokens as are worth their cost."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runtime.acceptance import Proposal
from runtime.draft_policy import MAX_SLOWDOWN, AcceptanceEstimate, DraftPolicy, Kind
from runtime.pass_costs import PassCosts

from .lookup import LookupDrafter
from .model import DraftedToken, ModelDrafter

if TYPE_CHECKING:
    from runtime.candidates import Candidates

MODEL_PRIOR = 0.8
# By the number of tokens that matched, the last one for all longer matches.
_LOOKUP_PRIORS: dict[Kind, float] = {2: 0.4, 3: 0.5, 4: 0.6, 5: 0.7, 6: 0.85}
_LONG_MATCH = 6
# By the draft's own probability for its most probable token; acceptance rates relative to the model's in all.
_CONFIDENCE_BOUNDS = (0.3, 0.5, 0.7, 0.85, 0.95, 0.99)
_CONFIDENCE_FACTORS = (0.35, 0.55, 0.75, 0.95, 1.1, 1.25, 1.35)
_NEGLIGIBLE = 12.0  # e^-12 of the largest's probability
_ANY = "any"  # the model before it is asked, so of whatever confidence
_WINDOW = 8  # tokens a model reads that comes back after it was dropped


class AdaptiveDrafter:
    """Builds a proposal token by token from the better of two sources, while the policy finds one more token worth it.

    A drawn token is never dropped for what it is: only what was known before it was drawn, the draft's confidence among it,
    decides whether it is proposed. Otherwise what is proposed would no longer follow the draft's distribution, and the law of
    the text would suffer.
    """

    name = "auto"

    def __init__(
        self,
        lookup: LookupDrafter,
        model: ModelDrafter | None,
        costs: PassCosts,
        *,
        model_prior: float = MODEL_PRIOR,
        max_slowdown: float = MAX_SLOWDOWN,
    ) -> None:
        """Takes the drafters of one generation.

        Args:
            lookup: Copies from the text.
            model: The draft model, or None.
            costs: Measured on this machine.
            model_prior: The acceptance rate expected of the model before anything was seen.
            max_slowdown: See DraftPolicy.
        """
        self._lookup = lookup
        self._model = model
        self._costs = costs
        self._policy = DraftPolicy(costs, max_slowdown)
        self._expected_end = 0
        self._lookup_rates = AcceptanceEstimate(_LOOKUP_PRIORS)
        by_confidence: dict[Kind, float] = {
            kind: min(0.98, factor * model_prior) for kind, factor in enumerate(_CONFIDENCE_FACTORS)
        }
        self._model_rates = AcceptanceEstimate({_ANY: model_prior, **by_confidence})
        self._model_has_read = False
        self._kinds: list[tuple[AcceptanceEstimate, Kind]] = []
        self._spent = 0.0

    @property
    def passes(self) -> int:
        """Passes of the draft model so far."""
        return 0 if self._model is None else self._model.passes

    @property
    def seconds(self) -> float:
        """Time spent in them."""
        return 0.0 if self._model is None else self._model.seconds

    def expect_end(self, length: int) -> None:
        """Keeps it: a draft reads the prompt only where the text to come can bring that in.

        A text begins or goes on: a round that was cancelled behind its proposal was never judged, and is forgotten.
        """
        self._expected_end = length
        self._kinds, self._spent = [], 0.0

    def propose(self, sequence: Sequence[int], num_tokens: int) -> Proposal:
        """Proposes what is worth it; see the class."""
        self._lookup.extend(sequence)
        self._kinds, self._spent = [], 0.0
        tokens: list[int] = []
        rows: list[Candidates | None] = []
        reach = 1.0
        while len(tokens) < num_tokens:
            found = self._lookup.next_token(sequence, tokens)
            if found is not None:
                token, size = found
                rate = self._lookup_rates.rate(_match_kind(size))
                if self._policy.worth(len(tokens), self._spent, reach, rate, 0.0, num_tokens):
                    tokens.append(token)
                    rows.append(None)
                    self._kinds.append((self._lookup_rates, _match_kind(size)))
                    reach *= rate
                    continue
            drafted = self._drafted(sequence, tokens, reach, num_tokens)
            if drafted is None:
                break
            tokens.append(drafted.token)
            rows.append(drafted.row)
            estimate, kind = self._kinds[-1]
            reach *= estimate.rate(kind)
            if drafted.ends_text:
                break
        return Proposal.of(tokens, rows)

    def observe(self, num_accepted: int) -> None:
        """Counts the tokens that were judged, those behind the first refusal not among them."""
        self._lookup_rates.fade()
        self._model_rates.fade()
        for place, (estimate, kind) in enumerate(self._kinds[: num_accepted + 1]):
            estimate.count(kind, accepted=place < num_accepted)
            if estimate is self._model_rates:
                estimate.count(_ANY, accepted=place < num_accepted)
        self._policy.count_round(len(self._kinds), self._spent, num_accepted + 1)
        self._kinds, self._spent = [], 0.0

    def rewind_to(self, length: int) -> None:
        """Drops what the model has cached from `length` on."""
        if self._model is not None:
            self._model.rewind_to(length)

    def _drafted(self, sequence: Sequence[int], block: Sequence[int], reach: float, num_tokens: int) -> DraftedToken | None:
        """Lets the model say one token, if that is expected to pay before it is asked, and still does when it has read."""
        model, policy = self._model, self._policy
        if model is None:
            return None
        seconds = self._costs.draft(1)
        rate = self._model_rates.rate(_ANY)
        reading = self._reading(model, sequence, block, rate, num_tokens)
        if reading is None or not policy.worth(len(block), self._spent + reading, reach, rate, seconds, num_tokens):
            return None
        if self._model_has_read:
            model.skip_to_last(_WINDOW, sequence)
        logits = model.logits(sequence, block)
        if logits is None:
            return None
        self._model_has_read = True
        self._spent += reading + seconds
        kind = _confidence_kind(logits.rows[0], model.last_total)
        if not policy.worth(len(block), self._spent, reach, self._model_rates.rate(kind), seconds, num_tokens, drafted=1):
            return None
        drafted = model.choose(logits, sequence, block)
        if drafted is not None:
            self._kinds.append((self._model_rates, kind))
        return drafted

    def _reading(
        self, model: ModelDrafter, sequence: Sequence[int], block: Sequence[int], rate: float, num_tokens: int
    ) -> float | None:
        """Returns the seconds of reading, beside the token itself, that this round answers for; None where it cannot pay.

        The prompt is read once, as an investment in all that is to come, if that can be expected to bring it in. Later on, a
        model that was dropped reads the last few tokens only.
        """
        if self._model_has_read:
            unread = min(model.missing(sequence, ()), _WINDOW) + len(block)
            return self._costs.draft(unread) - self._costs.draft(1)
        # Whatever a session has cached of it: a text must not depend on that.
        unread = len(sequence) + len(block)
        saved = (self._expected_end - len(sequence)) * self._policy.saved(rate, self._costs.draft(1), num_tokens)
        return 0.0 if self._costs.draft(unread) - self._costs.draft(1) < saved else None


def _match_kind(size: int) -> int:
    return min(size, _LONG_MATCH)


def _confidence_kind(logits: NDArray[np.float32], total: float | None = None) -> int:
    """Returns the class of the model's own probability for its most probable token.

    Args:
        logits: float32 [columns].
        total: The sum of exp(logit - largest), where the logits are not all there to be summed.
    """
    if total is None:
        largest = logits.max()
        # What lies further below adds next to nothing, and most of a vocabulary does: several times cheaper than all of it.
        total = float(np.exp(logits[logits > largest - _NEGLIGIBLE] - largest).sum())
    return int(np.searchsorted(_CONFIDENCE_BOUNDS, 1 / total))
