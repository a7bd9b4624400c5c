"""Which checks make up a certificate."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from runtime.generator import Generator
from runtime.sampling_params import SamplingParams

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
_ROW_TOKENS = 96
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
) -> Iterator[Check]:
    """Yields the checks of a pair, the quickest first.

    Args:
        generator: The pair.
        prompts: At least one; the first serves the checks that need one only.
        max_new_tokens: How long texts are.
        max_num_draft_tokens: Every K from 1 to this is tried.
        samples: How many texts are sampled for each law.
        chat: Whether the prompts are put into the chat template.

    Raises:
        PromptError: A prompt cannot be used.
    """
    asked: list[Prompt] = [[{"role": "user", "content": prompt}] if chat else prompt for prompt in prompts]
    tokens = (generator.prompt_tokens(asked[0]) * _ROW_TOKENS)[:_ROW_TOKENS]
    yield RowEquality("target", generator.target, tokens)
    if generator.draft is not None and generator.draft is not generator.target:
        yield RowEquality("draft", generator.draft, [min(token, generator.draft.spec.vocab_size - 1) for token in tokens])
    yield Cuts(generator, asked[0], min(max_new_tokens, _CUT_PLACES), _CUT_DRAFT_TOKENS)
    for drafter in drafters_of(generator):
        for params, positions in ((_JOINT, 3), (_JOINT_WITH_PENALTIES, 3), (_SINGLE, 1)):
            yield SampledLaw(
                generator, asked[0], params, drafter, num_draft_tokens=positions, positions=positions, samples=samples
            )
    drafter = drafters_of(generator)[0]
    for params, positions in ((_JOINT, 3), (_SINGLE, 1)):
        coupled = replace(params, acceptance="coupled")
        yield SampledLaw(
            generator, asked[0], coupled, drafter, num_draft_tokens=positions, positions=positions, samples=samples
        )
    numbers = range(1, max_num_draft_tokens + 1)
    yield TextEquality(generator, asked, SamplingParams(max_new_tokens=max_new_tokens), "greedy", numbers)
    sampled = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.8, top_p=0.95, seed=_SEED, acceptance="coupled")
    yield TextEquality(generator, asked[:2], sampled, "coupled", sorted({1, 2, 4, max_num_draft_tokens}))
