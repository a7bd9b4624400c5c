"""The law of sampled text: what the round draws follows the target's own distribution."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from runtime.candidates import Candidates, Columns
from runtime.decoder import Decoder
from runtime.draft_decoder import DraftDecoder
from runtime.draft_policy import MAX_NUM_DRAFT_TOKENS
from runtime.draft_vocabulary import DraftVocabulary, draft_length
from runtime.generator import Generator
from runtime.sampling import Sampler
from runtime.sampling_params import SamplingParams
from runtime.session import Session
from runtime.speculation import Round

from .replay import ReplayedModel
from .statistics import chi_square, total_variation
from .texts import Prompt
from .verdict import Advance, Verdict

FALSE_ALARM = 1e-6
_ADVANCE_EVERY = 100
_MOST_SHOWN = 24


@dataclass(frozen=True)
class SampledLaw:
    """Samples the same few tokens very often, and counts.

    Attributes:
        generator: The pair.
        prompt: What to answer.
        params: The sampling rules; top_k bounds the outcomes. The seed is the first of as many as there are samples.
        drafter: What proposes.
        num_draft_tokens: The most tokens a round proposes.
        positions: How many tokens are counted jointly.
        samples: How many texts are sampled.
    """

    generator: Generator
    prompt: Prompt
    params: SamplingParams
    drafter: str
    num_draft_tokens: int
    positions: int
    samples: int

    @property
    def title(self) -> str:
        """See Check."""
        rules = f"{self.params.acceptance} rule, drafter {self.drafter}, {_rules(self.params)}"
        return f"law of {_positions(self.positions)}, {rules}"

    @property
    def steps(self) -> int:
        """See Check."""
        return -(-self.samples // _ADVANCE_EVERY)

    def run(self, advance: Advance) -> list[Verdict]:
        """See Check."""
        tokens = self.generator.prompt_tokens(self.prompt)
        length = min(len(tokens) + self.positions + 2, self.generator.target.spec.context_length)
        target = ReplayedModel(self.generator.target, length + self.num_draft_tokens, self.num_draft_tokens + 1)
        vocabulary = self.generator.draft_vocabulary
        draft_room = draft_length(length + MAX_NUM_DRAFT_TOKENS, vocabulary)  # what the session's decoder will have
        draft = None if self.generator.draft is None else ReplayedModel(self.generator.draft, draft_room, 1)
        counts: dict[tuple[int, ...], int] = {}
        generator = Generator(target, draft, self.generator.tokenizer, (), draft_vocabulary=vocabulary)
        session = generator.session(max_length=length)
        proposed = accepted = first_accepted = 0
        for number in range(self.samples):
            outcome, rounds = self._sample(session, tokens, (self.params.seed or 0) + number)
            counts[outcome] = counts.get(outcome, 0) + 1
            proposed += sum(len(done.proposal.tokens) for done in rounds)
            accepted += sum(done.verification.num_accepted for done in rounds)
            first_accepted += rounds[0].verification.num_accepted > 0
            if number % _ADVANCE_EVERY == 0:
                advance()
        verdicts = [
            Verdict(
                f"The {self.title} is put to the test: tokens are proposed.",
                proposed > 0,
                f"{proposed} tokens were proposed, {accepted} of them accepted.",
                figures={"proposed": proposed, "accepted": accepted},
            )
        ]
        verdicts += self._judge(target_law(target, tokens, self.params, self.positions), counts)
        if self.positions == 1 and self.drafter == "model" and draft is not None and proposed:
            logits = _draft_logits(draft, vocabulary, tokens)
            verdicts.append(self._judge_acceptance(target, logits, tokens, first_accepted / self.samples))
        return verdicts

    def _sample(self, session: Session, prompt: Sequence[int], seed: int) -> tuple[tuple[int, ...], list[Round]]:
        """Returns the first tokens of a text, and the rounds they came from."""
        # One token more than is counted, so that a rule which proposes nothing for the last one still proposes.
        params = replace(self.params, seed=seed, max_new_tokens=self.positions + 1)
        outcome: tuple[int, ...] = ()
        rounds: list[Round] = []
        for piece in session.stream(prompt, params, drafter=self.drafter, num_draft_tokens=self.num_draft_tokens):
            outcome += piece.token_ids
            if piece.round is not None:
                rounds.append(piece.round)
            if len(outcome) >= self.positions:
                break
        return outcome[: self.positions], rounds

    def _judge(self, law: Mapping[tuple[int, ...], float], counts: Mapping[tuple[int, ...], int]) -> list[Verdict]:
        outcomes = sorted({*law, *counts}, key=lambda outcome: -law.get(outcome, 0.0))
        observed = np.array([counts.get(outcome, 0) for outcome in outcomes], np.int64)
        expected = np.array([law.get(outcome, 0.0) for outcome in outcomes])
        pearson = chi_square(observed, expected)
        variation = total_variation(observed, expected, FALSE_ALARM)
        shown = [
            {
                "text": " ".join(repr(self.generator.tokenizer.token(token))[1:-1] for token in outcome),
                "expected": float(probability),
                "observed": int(count) / self.samples,
            }
            for outcome, probability, count in list(zip(outcomes, expected, observed, strict=True))[:_MOST_SHOWN]
        ]
        return [
            Verdict(
                f"The {self.title} is the target's, by Pearson's chi-square test.",
                pearson.p_value >= FALSE_ALARM,
                f"{self.samples} samples, {len(outcomes)} outcomes: chi-square {pearson.statistic:.1f} with {pearson.degrees} "
                f"degree{'s' * (pearson.degrees != 1)} of freedom, p = {pearson.p_value:.3g}.",
                FALSE_ALARM,
                {
                    "statistic": pearson.statistic,
                    "degrees": pearson.degrees,
                    "p_value": pearson.p_value,
                    "outcomes": shown,
                },
            ),
            Verdict(
                f"The {self.title} is within the reach of chance from the target's, by total variation.",
                variation.distance <= variation.limit,
                f"total variation {variation.distance:.4f}, at most {variation.limit:.4f} by chance.",
                FALSE_ALARM,
                {"distance": variation.distance, "limit": variation.limit},
            ),
        ]

    def _judge_acceptance(
        self, target: ReplayedModel, draft_logits: Candidates, prompt: Sequence[int], acceptance_rate: float
    ) -> Verdict:
        """Compares how often the first proposed token is accepted with what the two rows say.

        With d the total variation distance of the two, the rejection rule accepts 1 - d; coupling accepts at most that, and at
        least (1 - d) / (1 + d) (Daliri, Musco & Suresh 2024, theorem 3). Chance adds less than Hoeffding's bound.
        """
        sampler = Sampler(self.params, prompt_length=len(prompt))
        vocabulary = Columns(target.spec.vocab_size)
        target_row = sampler.distributions(_logits(target, prompt), prompt, ()).rows[0]
        draft_probs = sampler.distributions(draft_logits.below(vocabulary.width), prompt, ())
        most = float(np.minimum(target_row, draft_probs.over(vocabulary, 0)[0]).sum(dtype=np.float64))
        least = most if self.params.acceptance == "rejection" else most / (2 - most)
        reach = math.sqrt(math.log(2 / FALSE_ALARM) / (2 * self.samples))
        bounds = f"{most:.1%}" if least == most else f"{least:.1%} to {most:.1%}"
        return Verdict(
            f"The {self.params.acceptance} rule accepts the first proposed token as often as the two distributions allow.",
            least - reach <= acceptance_rate <= most + reach,
            f"accepted {acceptance_rate:.1%} of {self.samples}; expected {bounds}, and up to {reach:.1%} off by chance.",
            FALSE_ALARM,
            {"acceptance_rate": acceptance_rate, "least": least, "most": most, "reach": reach},
        )


def target_law(
    model: ReplayedModel, prompt: Sequence[int], params: SamplingParams, positions: int
) -> dict[tuple[int, ...], float]:
    """Returns the exact joint law of the first tokens behind a prompt, computed row by row with no cache and no round."""
    sampler = Sampler(params, prompt_length=len(prompt))
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(positions):
        longer: dict[tuple[int, ...], float] = {}
        for outcome, probability in law.items():
            text = [*prompt, *outcome]
            row = sampler.distributions(_logits(model, text), text, ()).rows[0].astype(np.float64)
            row /= row.sum()
            for token in np.flatnonzero(row).tolist():
                longer[(*outcome, token)] = probability * float(row[token])
        law = longer
    return law


def _logits(model: ReplayedModel, text: Sequence[int]) -> Candidates:
    return Candidates.whole(model.rows(np.array(text, np.int64), 1)[0][None])


def _draft_logits(model: ReplayedModel, vocabulary: DraftVocabulary | None, text: Sequence[int]) -> Candidates:
    if vocabulary is None:
        return _logits(model, text)
    length = min(model.spec.context_length, draft_length(len(text) + MAX_NUM_DRAFT_TOKENS, vocabulary))
    return DraftDecoder(Decoder(model, length, num_rows=1), vocabulary).candidates(text, 1)


def _positions(count: int) -> str:
    return "the first token" if count == 1 else f"the first {count} tokens jointly"


def _rules(params: SamplingParams) -> str:
    named = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty")
    usual = SamplingParams()
    return ", ".join(f"{name} {getattr(params, name):g}" for name in named if getattr(params, name) != getattr(usual, name))
