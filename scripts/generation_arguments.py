"""Command-line options of the scripts that generate text: what is loaded, and SamplingParams."""

import argparse
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime import Generator, SamplingParams


def add_generator_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds options for how a bundle is loaded and what proposes."""
    parser.add_argument("--drafter", choices=["auto", "hybrid", "model", "lookup", "off"], help="default auto: what pays")
    parser.add_argument(
        "--num-draft-tokens", type=int, metavar="K", help="the most tokens a round proposes (default 4; auto 16)"
    )
    parser.add_argument("--device", default="cpu", help="default cpu")
    parser.add_argument("--threads", type=int, metavar="N", help="default: all cores")


def load_generator(arguments: argparse.Namespace) -> "Generator":
    """Loads the bundle that the parsed options ask for; see Generator.from_bundle for the errors."""
    from runtime import Generator

    # The scripts make no other ONNX Runtime sessions, so they may use one thread pool for everything.
    return Generator.from_bundle(
        arguments.bundle,
        device=arguments.device,
        drafter=arguments.drafter,
        num_draft_tokens=arguments.num_draft_tokens,
        threads=arguments.threads,
        shared_thread_pool=True,
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each sampling rule; a rule that is not given keeps SamplingParams' own default."""
    group = parser.add_argument_group("sampling", "left out, a rule does nothing; without --temperature the text is greedy")
    whole, number = (
        [
            ("--max-new-tokens", "N", "the most tokens to generate (default 128)"),
            ("--min-new-tokens", "N", "no end-of-text token before so many"),
            ("--top-k", "K", "keep the K most probable tokens"),
            ("--no-repeat-ngram-size", "N", "no run of N tokens stands twice"),
            ("--seed", "N", "makes sampled text repeatable"),
        ],
        [
            ("--temperature", "T", "above 0 samples; the logits are divided by it"),
            ("--top-p", "P", "keep the top tokens that sum to P"),
            ("--min-p", "P", "keep tokens at least P times as probable as the top one"),
            ("--typical-p", "P", "keep the tokens of the most usual surprisal that sum to P"),
            ("--repetition-penalty", "R", "above 1 discourages tokens of the prompt and the text"),
            ("--presence-penalty", "X", "taken from the logits of tokens in the text"),
            ("--frequency-penalty", "X", "taken from them as often as they stand in the text"),
        ],
    )
    for options, kind in ((whole, int), (number, float)):
        for name, metavar, text in options:
            group.add_argument(name, type=kind, metavar=metavar, help=text, default=argparse.SUPPRESS)
    group.add_argument("--logit-bias", type=_bias, metavar="JSON", help='{"42": -100}: token id to what is added to its logit')
    group.add_argument("--bad-word", action="append", metavar="TEXT", help="never say this (may be repeated)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text (may be repeated)")
    group.add_argument("--stop-token-id", action="append", type=int, metavar="ID", help="end at this token (may be repeated)")
    group.add_argument("--include-stop", action="store_true", help="keep what stopped the text in it")
    group.add_argument(
        "--acceptance",
        choices=["rejection", "coupled"],
        default="rejection",
        help="coupled: one --seed gives one text, whatever drafts (default rejection, which accepts a little more)",
    )


def sampling_params(arguments: argparse.Namespace, *, logprobs: int | None = None) -> "SamplingParams":
    """Returns the rules that the parsed options ask for.

    Raises:
        ValueError: A value outside its range.
    """
    from runtime import SamplingParams

    names = (
        *("max_new_tokens", "min_new_tokens", "top_k", "no_repeat_ngram_size", "seed", "temperature", "top_p", "min_p"),
        *("typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    )
    return SamplingParams(
        **{name: getattr(arguments, name) for name in names if hasattr(arguments, name)},
        logit_bias=arguments.logit_bias or {},
        bad_words=arguments.bad_word or (),
        stop=arguments.stop or (),
        stop_token_ids=arguments.stop_token_id or (),
        include_stop=arguments.include_stop,
        acceptance=arguments.acceptance,
        logprobs=logprobs,
    )


def _bias(text: str) -> dict[int, float]:
    try:
        return {int(token): float(value) for token, value in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object such as {{"42": -100}}') from error
