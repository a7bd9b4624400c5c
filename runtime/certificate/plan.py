"""Which checks make up a certificate."""

import math
from collections.abc import Sequence
from dataclasses import replace

from runtime.errors import LogitsError, PromptError
from runtime.generator import Generator
from runtime.sampling_params import SamplingParams
from runtime.session import Session

from .law import SampledLaw
from .rows import RowEquality
from .texts import Cuts, Prompt, TextEquality, drafters_of
from .verdict import Check

DEFAULT_PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Rewrite this list in alphabetical order: pear, apple, fig, banana, cherry.",
    "Tell me a short story about a lighthouse keeper.",
    "Explain how tides work.",
    "Repeat after me: one two three one two three one two three.",
    "List ten animals, one a line.",
)
_SEED = 20_230_530
# Few outcomes, so that the joint law is known exactly with few passes; the second depends on what was said before.
_JOINT = SamplingParams(temperature=2.0, top_k=3, ignore_eos=True, seed=_SEED)
_JOINT_WITH_PENALTIES = SamplingParams(
    temperature=1.5, top_k=4, top_p=0.97, repetition_penalty=1.3, presence_penalty=0.3, ignore_eos=True, seed=_SEED
)
_SINGLE = SamplingParams(temperature=1.5, top_k=64, ignore_eos=True, seed=_SEED)
_LAWS = ((_JOINT, 3), (_JOINT_WITH_PENALTIES, 3), (_SINGLE, 1))
_ROW_TOKENS = 96
_REPEATED_TOKENS = 8
_CANDIDATES = 12
_EVEN = 0.5
# Two blocks: every place of a block comes up, and more than one round.
_CUT_DRAFT_TOKENS = 3
_CUT_PLACES = 8


def certificate_checks(
    generator: Generator,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    max_num_draft_tokens: int,
    samples: int,
    chat: bool,
) -> list[Check]:
    """Returns the checks of a pair.

    Args:
        generator: The pair.
        prompts: At least one; the first serves the checks that need one only.
        max_new_tokens: How long texts are.
        max_num_draft_tokens: Every K from 1 to this is tried.
        samples: How many texts are sampled for each law.
        chat: Whether the prompts are put into the chat template.

    Raises:
        PromptError: A prompt cannot be used; the sentence says which.
    """
    asked: list[Prompt] = [[{"role": "user", "content": prompt}] if chat else prompt for prompt in prompts]
    tokens = _checked_tokens(generator, asked, max_new_tokens)
    repeating = _repeating(generator, tokens)
    rows = (tokens * _ROW_TOKENS)[: min(_ROW_TOKENS, generator.target.spec.context_length - 1)]
    checks: list[Check] = [RowEquality("target", generator.target, rows)]
    if generator.draft is not None and generator.draft is not generator.target:
        spec = generator.draft.spec
        known = [min(token, spec.vocab_size - 1) for token in rows[: spec.context_length - 1]]
        checks.append(RowEquality("draft", generator.draft, known))
    checks.append(Cuts(generator, repeating, min(max_new_tokens, _CUT_PLACES), _CUT_DRAFT_TOKENS))
    drafters = drafters_of(generator)
    laws = [(drafter, params, positions) for drafter in drafters for params, positions in _LAWS]
    laws += [(drafters[0], replace(params, acceptance="coupled"), positions) for params, positions in (_LAWS[0], _LAWS[-1])]
    for drafter, params, positions in laws:
        prompt = repeating if drafter == "lookup" else tokens
        checks.append(
            SampledLaw(generator, prompt, params, drafter, num_draft_tokens=positions, positions=positions, samples=samples)
        )
    numbers = range(1, max_num_draft_tokens + 1)
    checks.append(TextEquality(generator, asked, SamplingParams(max_new_tokens=max_new_tokens), "greedy", numbers))
    sampled = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.8, top_p=0.95, seed=_SEED, acceptance="coupled")
    few = sorted({number for number in (1, 2, 4, max_num_draft_tokens) if number <= max_num_draft_tokens})
    checks.append(TextEquality(generator, asked[:2], sampled, "coupled", few))
    return checks


def _checked_tokens(generator: Generator, prompts: Sequence[Prompt], max_new_tokens: int) -> list[int]:
    """Returns the first prompt's tokens; refuses prompts that leave no room for their texts before anything is run."""
    room = generator.target.spec.context_length - max_new_tokens
    lengths = [len(generator.prompt_tokens(prompt)) for prompt in prompts]
    for number, length in enumerate(lengths, start=1):
        if length > room:
            raise PromptError(
                f"Prompt {number} has {length} tokens; beside {max_new_tokens} new ones the context holds {max(0, room)}: "
                "shorten it."
            )
    return generator.prompt_tokens(prompts[0])


def _repeating(generator: Generator, tokens: Sequence[int]) -> list[int]:
    """Returns a prompt for which a lookup proposes a token that the target may well say, and may well not.

    It is a beginning, a token, and the beginning again: the lookup proposes the token. Of those that the target finds most
    probable behind the beginning, the one is taken whose probability behind the whole is nearest to a half.
    """
    beginning = [*tokens[:_REPEATED_TOKENS], tokens[0]]  # at least two tokens, which must match
    look = SamplingParams(max_new_tokens=1, ignore_eos=True, logprobs=_CANDIDATES)
    session = generator.session()
    best, nearest = [*beginning, *beginning], 1.0
    try:
        for candidate, _ in _top(session, beginning, look):
            prompt = [*beginning, candidate, *beginning]
            distance = abs(math.exp(dict(_top(session, prompt, look)).get(candidate, -math.inf)) - _EVEN)
            if distance < nearest:
                best, nearest = prompt, distance
    except LogitsError:
        pass  # the checks will say so
    return best


def _top(session: Session, prompt: Sequence[int], params: SamplingParams) -> tuple[tuple[int, float], ...]:
    result = session.generate(prompt, params, drafter="off")
    assert result.logprobs is not None, "asked for"
    return result.logprobs[0].top
