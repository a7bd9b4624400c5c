"""Equality of whole texts: speculation, its drafters, its numbers of draft tokens and its cuts change nothing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from runtime.generation import GenerationResult
from runtime.generator import Generator
from runtime.sampling_params import SamplingParams
from runtime.session import Session

from .verdict import Advance, Verdict

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]
_SHOWN = 3


@dataclass(frozen=True)
class TextEquality:
    """Generates each prompt's text without speculation, then with every drafter and number of draft tokens.

    Attributes:
        generator: The pair.
        prompts: What to answer.
        params: How tokens are chosen: greedy or coupled, so that a text depends on nothing else.
        name: "greedy" or "coupled".
        numbers: The numbers of draft tokens.
    """

    generator: Generator
    prompts: Sequence[Prompt]
    params: SamplingParams
    name: str
    numbers: Sequence[int]

    @property
    def title(self) -> str:
        """See Check."""
        return f"{self.name} texts"

    @property
    def steps(self) -> int:
        """See Check."""
        return len(self.prompts) * (1 + len(self.numbers) * len(all_drafters_of(self.generator)))

    def run(self, advance: Advance) -> list[Verdict]:
        """See Check."""
        differing: list[str] = []
        compared = 0
        work = {drafter: {number: _Work() for number in self.numbers} for drafter in all_drafters_of(self.generator)}
        for index, prompt in enumerate(self.prompts):
            session = self.generator.session()
            plain = session.generate(prompt, self.params, drafter="off")
            advance()
            for drafter, number in self._modes():
                result = session.generate(prompt, self.params, drafter=drafter, num_draft_tokens=number)
                work[drafter][number].add(result)
                compared += 1
                if _content(result) != _content(plain):
                    place = _first_difference(result.token_ids, plain.token_ids)
                    differing.append(f"prompt {index + 1}, drafter {drafter}, K={number}, from token {place + 1} on")
                advance()
        shown = _first(differing)
        return [
            Verdict(
                f"{self.name.capitalize()} text is that of the target alone, token for token: {self._tried()}.",
                not differing,
                f"{len(differing)} of {compared} texts differ from those without speculation{shown}.",
                figures={
                    "texts": compared,
                    "differing": differing,
                    "work": {
                        drafter: {str(number): counted.figures() for number, counted in by_number.items()}
                        for drafter, by_number in work.items()
                    },
                },
            )
        ]

    def _tried(self) -> str:
        numbers = ", ".join(map(str, self.numbers))
        return f"{len(self.prompts)} prompts, drafters {', '.join(all_drafters_of(self.generator))}, K = {numbers}"

    def _modes(self) -> Iterator[tuple[str, int]]:
        for drafter in all_drafters_of(self.generator):
            for number in self.numbers:
                yield drafter, number


@dataclass
class _Work:
    new_tokens: int = 0
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0

    def add(self, result: GenerationResult) -> None:
        self.new_tokens += result.stats.new_tokens
        self.rounds += result.stats.rounds
        self.proposed += result.stats.proposed_tokens
        self.accepted += result.stats.accepted_tokens

    def figures(self) -> dict[str, float]:
        return {
            "acceptance_rate": self.accepted / max(1, self.proposed),
            "mean_acceptance_length": self.new_tokens / max(1, self.rounds),
        }


@dataclass(frozen=True)
class Cuts:
    """Ends one text in every way at every place of it, and goes on behind each end from what the caches hold.

    Attributes:
        generator: The pair.
        prompt: What to answer.
        max_new_tokens: How far to look for places.
        num_draft_tokens: The most tokens a round proposes; the text's places then fall on all places of a block.
    """

    generator: Generator
    prompt: Prompt
    max_new_tokens: int
    num_draft_tokens: int

    @property
    def title(self) -> str:
        """See Check."""
        return "cuts inside a block"

    @property
    def steps(self) -> int:
        """See Check."""
        return 4 * self.max_new_tokens * len(drafters_of(self.generator))

    def run(self, advance: Advance) -> list[Verdict]:
        """See Check."""
        params = SamplingParams(max_new_tokens=self.max_new_tokens, ignore_eos=True, logprobs=5)
        whole = self.generator.generate(self.prompt, params, drafter="off").token_ids
        tried = {kind: _Tried() for kind in ("end-of-text token", "stop token", "stop string", "length")}
        plain = self.generator.session()
        sessions = {drafter: self.generator.session() for drafter in drafters_of(self.generator)}
        for place in range(self.max_new_tokens):
            expected = self._behind(plain, whole[: place + 1], "off")
            for drafter, session in sessions.items():
                for kind, results in tried.items():
                    cut = self._cut(kind, session, params, whole, place)
                    if cut is not None:
                        problem = self._problem(*cut, drafter, whole[: place + 1], expected, results)
                        results.add(f"{drafter}, token {place + 1}", problem)
                    advance()
        return [
            Verdict(
                f"A text cut by its {kind} inside a block ends there, and the caches hold what stands before the cut.",
                not results.problems,
                f"{len(results.problems)} of {results.cuts} cuts went wrong, {results.proposed} tokens proposed"
                f"{_first(results.problems)}.",
                figures={"cuts": results.cuts, "proposed_tokens": results.proposed, "wrong": results.problems},
            )
            for kind, results in tried.items()
        ]

    def _cut(
        self, kind: str, session: Session, params: SamplingParams, whole: Sequence[int], place: int
    ) -> tuple[Session, SamplingParams] | None:
        """Returns what ends the text behind whole[place]; None where it would end before."""
        generator, token = self.generator, whole[place]
        if kind == "length":
            return session, replace(params, max_new_tokens=place + 1)
        if kind == "stop string":
            before, text = (generator.tokenizer.decode(whole[:end]) for end in (place, place + 1))
            ending = text[len(before) :].strip("\ufffd")
            ends_first_here = ending and text.endswith(ending) and text.find(ending) == len(text) - len(ending)
            return (session, replace(params, stop=(ending,))) if ends_first_here else None
        if token in whole[:place]:
            return None
        if kind == "stop token":
            return session, replace(params, stop_token_ids=(token,))
        ending_there = Generator(
            generator.target, generator.draft, generator.tokenizer, (token,), draft_vocabulary=generator.draft_vocabulary
        )
        return ending_there.session(), replace(params, ignore_eos=False)

    def _problem(
        self,
        session: Session,
        params: SamplingParams,
        drafter: str,
        expected: Sequence[int],
        expected_behind: GenerationResult,
        tried: "_Tried",
    ) -> str:
        """Returns what is wrong with one cut, "" for nothing."""
        result = session.generate(self.prompt, params, drafter=drafter, num_draft_tokens=self.num_draft_tokens)
        tried.proposed += result.stats.proposed_tokens
        if result.token_ids != tuple(expected):
            return f"the text has {len(result.token_ids)} tokens instead of {len(expected)}"
        behind = self._behind(session, expected, drafter)
        missing = behind.stats.prompt_tokens - 1 - behind.stats.cached_tokens
        if missing:
            return f"{missing} tokens before the cut were not cached"
        same = _content(behind) == _content(expected_behind)
        return "" if same else "the text behind the cut differs from that of empty caches"

    def _behind(self, session: Session, cut: Sequence[int], drafter: str) -> GenerationResult:
        """Goes on behind a cut, with what the session has cached."""
        params = SamplingParams(max_new_tokens=4, ignore_eos=True, logprobs=5)
        prompt = [*self.generator.prompt_tokens(self.prompt), *cut]
        return session.generate(prompt, params, drafter=drafter, num_draft_tokens=2)


@dataclass
class _Tried:
    cuts: int = 0
    proposed: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, where: str, problem: str) -> None:
        self.cuts += 1
        if problem:
            self.problems.append(f"{where}: {problem}")


def drafters_of(generator: Generator) -> tuple[str, ...]:
    """Returns the drafters that take their proposals from one place."""
    return ("lookup",) if generator.draft is None else ("model", "lookup")


def all_drafters_of(generator: Generator) -> tuple[str, ...]:
    """Returns all drafters that propose something with this pair, the mixed ones last."""
    return (*drafters_of(generator), *(() if generator.draft is None else ("hybrid",)), "auto")


def _first(problems: Sequence[str]) -> str:
    """Returns the first problems as the end of a sentence."""
    shown = "; ".join(problems[:_SHOWN])
    return (f": {shown}" if problems else "") + (f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else "")


def _content(result: GenerationResult) -> tuple[object, ...]:
    return result.token_ids, result.text, result.finish_reason, result.logprobs


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    places = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(places, min(len(one), len(other)))
