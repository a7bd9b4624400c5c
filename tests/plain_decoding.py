"""Speculative decoding as on paper, to hold the loop against: no cache, no stream, every row from its whole prefix."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.generator import Generator
from runtime.noise import ExponentialNoise
from runtime.sampling import Sampler
from runtime.sampling_params import SamplingParams
from runtime.verify import draw, verify
from tests.fakes import FakeModel, ruled


@dataclass
class PlainText:
    """A text made the slow way, and what its rounds came to; see `plain_text`."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "unfinished"
    logprobs: list[float] = field(default_factory=list)
    rounds: int = 0
    corrections: int = 0
    bonuses: int = 0
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


def plain_text(
    generator: Generator, prompt: Sequence[int], params: SamplingParams, drafter: str, num_draft_tokens: int
) -> PlainText:
    """Speculative decoding as on paper: no cache and no stream; every row from the whole prefix, every text decoded anew."""
    target, plain, limit = generator.target, PlainText(), generator.target.spec.context_length
    last = min(limit, len(prompt) + params.max_new_tokens)
    for proposed, tokens in _plain_rounds(generator, prompt, params, drafter, num_draft_tokens, last):
        plain.rounds += 1
        for counts in (plain.proposed, plain.accepted):
            counts.extend([0] * (len(proposed) - len(counts)))
        plain.proposed[: len(proposed)] = [count + 1 for count in plain.proposed[: len(proposed)]]
        for place, token in enumerate(tokens):
            row = target.logits([*prompt, *plain.token_ids]).astype(np.float64)
            plain.logprobs.append(float(row[token] - np.log(np.exp(row).sum())))
            plain.token_ids.append(token)
            if place < len(tokens) - 1:
                plain.accepted[place] += 1
            elif len(tokens) == len(proposed) + 1:
                plain.bonuses += 1
            else:
                plain.corrections += 1
            plain.text, plain.finish_reason = _plain_end(generator, plain.token_ids, params)
            if plain.finish_reason == "unfinished" and len(prompt) + len(plain.token_ids) == last:
                plain.finish_reason = "length"
            if plain.finish_reason != "unfinished":
                return plain
    raise AssertionError("rounds never end by themselves")


def _plain_end(generator: Generator, token_ids: Sequence[int], params: SamplingParams) -> tuple[str, str]:
    """Decodes all tokens one by one from the start, and looks for what ends the text behind each."""
    eos, text = () if params.ignore_eos else generator._pair.eos_token_ids, ""
    for count, token in enumerate(token_ids, start=1):
        if token in eos:
            return text, "eos"
        if token in params.stop_token_ids:
            return text + generator.tokenizer.decode([token]) * params.include_stop, "stop"
        text = generator.tokenizer.decode(list(token_ids[:count]))
        for end in range(len(text) + 1):
            if complete := [stop for stop in params.stop if text[:end].endswith(stop)]:
                return text[: end if params.include_stop else end - max(map(len, complete))], "stop"
    return text, "unfinished"


def _plain_rounds(
    generator: Generator, prompt: Sequence[int], params: SamplingParams, drafter: str, num_draft_tokens: int, last: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yields what each round proposes and the tokens that come of it, uncut."""
    chooser = _PlainChooser(params, len(prompt))
    eos = () if params.ignore_eos else generator._pair.eos_token_ids
    ends, sequence = {*eos, *params.stop_token_ids}, list(prompt)
    while True:
        room = (generator.target.spec.context_length if chooser.draws else last) - len(sequence) - 1
        proposed, rows = [], []
        if drafter == "lookup":
            proposed = plain_lookup(sequence, min(num_draft_tokens, room))
        while drafter == "model" and len(proposed) < min(num_draft_tokens, room) and not ends & set(proposed):
            token, row = chooser.propose(generator.draft, [*sequence, *proposed])
            proposed.append(token)
            rows.append(row)
        befores = [[*sequence, *proposed[:place]] for place in range(len(proposed) + 1)]
        tokens = chooser.judge(generator.target, befores, proposed, rows)
        sequence += tokens
        yield proposed, tokens


class _PlainChooser:
    """Greedy, rejection or coupled, a row at a time and each from its whole prefix."""

    def __init__(self, params: SamplingParams, prompt_length: int) -> None:
        self.draws = not params.greedy and params.acceptance == "rejection"
        self._greedy = params.greedy
        self._sampler = Sampler(params, prompt_length=prompt_length)
        self._random = np.random.Generator(np.random.Philox(params.seed))
        self._noise = ExponentialNoise(params.seed)

    def propose(self, model: FakeModel, before: Sequence[int]) -> tuple[int, NDArray[np.float32] | None]:
        if not self.draws:
            return self._choice(model, before), None
        row = self._distribution(model, before)
        return draw(row, self._random.random()), row

    def judge(self, model: FakeModel, befores: Sequence[Sequence[int]], proposed: list[int], rows: list) -> list[int]:
        if self.draws:
            target_rows = np.stack([self._distribution(model, before) for before in befores])
            draft_rows = np.stack(rows) if rows else None
            done = verify(proposed, draft_rows, target_rows, self._random.random(len(befores)))
            return [*proposed[: done.num_accepted], done.next_token]
        tokens = []
        for before in befores:
            tokens.append(self._choice(model, before))
            if tokens != proposed[: len(tokens)]:
                break
        return tokens

    def _distribution(self, model: FakeModel, before: Sequence[int]) -> NDArray[np.float32]:
        return ruled(self._sampler.distributions, model.logits(before)[None], before, [])[0]

    def _choice(self, model: FakeModel, before: Sequence[int]) -> int:
        if self._greedy:
            return int(ruled(self._sampler.scores, model.logits(before)[None], before, [])[0].argmax())
        row = ruled(self._sampler.weights, model.logits(before)[None], before, [])[0]
        return int((row / self._noise.row(len(before), len(row))).argmax())


def plain_lookup(sequence: Sequence[int], num_tokens: int, longest: int = 8, shortest: int = 2) -> list[int]:
    """Searches the whole sequence for the ending of sequence and proposal, longest first, anew for every token."""
    proposed: list[int] = []
    while len(proposed) < num_tokens:
        ending = [*sequence, *proposed]
        for size in range(longest, shortest - 1, -1):
            wanted = ending[len(ending) - size :]
            places = [end for end in range(size, len(sequence)) if list(sequence[end - size : end]) == wanted]
            if places and size <= len(ending):
                followers = [sequence[place] for place in places]
                most = max(followers.count(token) for token in followers)
                frequent = [token for token in followers if followers.count(token) == most]
                proposed.append(followers[-1] if followers[-1] in frequent else frequent[0])
                break
        else:
            break
    return proposed
