"""Texts that a target writes of its own accord: what it says often is what a draft should be able to propose."""

from collections.abc import Callable
from pathlib import Path

from runtime import Generator, SamplingParams
from runtime.contract import DecoderSpec, TokenizerSpec
from runtime.ort.backend import OrtBackend
from runtime.tokenizer import Tokenizer

from .bfloat16 import computed_in_float32

PROMPTS = (
    "Write a Python function that reads a CSV file and returns the rows as dictionaries.",
    "Explain how a refrigerator works.",
    "Write a short story about a lighthouse keeper.",
    "List ten tips for growing tomatoes on a balcony.",
    "Write a polite e-mail that asks for a refund.",
    "Summarise the causes of the First World War.",
    "Write a JavaScript class for a shopping cart.",
    "Give me a recipe for lentil soup.",
    "What is the difference between TCP and UDP?",
    "Write a SQL query that counts the orders of each customer, and explain it.",
)
TOKENS_A_PROMPT = 128
_TEMPERATURE = 0.8


def sample_tokens(
    spec: DecoderSpec,
    tokenizer_spec: TokenizerSpec,
    folder: Path,
    on_prompt: Callable[[int, int], None],
    *,
    tokens_a_prompt: int = TOKENS_A_PROMPT,
    runs_on: bool = False,
) -> list[int]:
    """Lets an exported target answer PROMPTS, and returns the tokens of all answers.

    Args:
        spec: The target, as it was written.
        tokenizer_spec: Its tokenizer.
        folder: Where both lie.
        on_prompt: Called with (prompts done, prompts in all) after each.
        tokens_a_prompt: The most tokens of an answer.
        runs_on: Whether an answer goes on where the target would have ended it, so that each has the most tokens.
    """
    tokenizer = Tokenizer.from_spec(tokenizer_spec, folder)
    with computed_in_float32(spec, folder) as runnable:
        model = OrtBackend().load(runnable, folder)
    generator = Generator(model, None, tokenizer, tokenizer_spec.eos_token_ids, drafter="lookup")
    tokens: list[int] = []
    for done, prompt in enumerate(PROMPTS, start=1):
        asked = [{"role": "user", "content": prompt}] if tokenizer.has_chat_template else prompt
        room = spec.context_length - len(generator.prompt_tokens(asked))
        if room > 0:
            most = min(tokens_a_prompt, room)
            least = most if runs_on else 0
            params = SamplingParams(max_new_tokens=most, min_new_tokens=least, temperature=_TEMPERATURE, seed=done)
            tokens += generator.generate(asked, params).token_ids
        on_prompt(done, len(PROMPTS))
    return tokens
