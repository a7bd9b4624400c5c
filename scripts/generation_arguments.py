"""Command-line options of the scripts that generate text: what is loaded, and SamplingParams."""

import argparse
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from runtime import CudaOptions, Generator, SamplingParams

_GIGABYTE = 10**9


class DeviceSettings(TypedDict):
    """Those of Generator.from_bundle's arguments that say where a pair runs."""

    device: str
    draft_device: str | None
    threads: int | None
    cuda_options: "CudaOptions"


def add_generator_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds options for how a bundle is loaded and what proposes."""
    parser.add_argument("--drafter", choices=["auto", "hybrid", "model", "lookup", "off"], help="default auto: what pays")
    parser.add_argument(
        "--num-draft-tokens", type=int, metavar="K", help="the most tokens a round proposes (default 4; auto 16)"
    )
    add_max_slowdown_argument(parser)
    add_device_arguments(parser)


def add_max_slowdown_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the option for how much drafter auto may lose."""
    parser.add_argument(
        "--max-slowdown",
        type=float,
        metavar="F",
        help="by which fraction drafter auto may make any 64 tokens slower; more lets a good draft propose more (default 0.03)",
    )


def max_slowdown(arguments: argparse.Namespace) -> float:
    """Returns what Generator.from_bundle is to be told of it."""
    from runtime.draft_policy import MAX_SLOWDOWN

    return MAX_SLOWDOWN if arguments.max_slowdown is None else float(arguments.max_slowdown)


def drafter_names(text: str) -> tuple[str, ...]:
    """Reads --drafters, a list with commas, each name once; see chosen_drafters."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names no drafter: name some with commas between, or leave --drafters out")
    return names


def chosen_drafters(asked: Sequence[str] | None, usual: Sequence[str], *, has_draft: bool) -> tuple[str, ...]:
    """Returns the drafters to be measured, all of them checked before any is.

    Args:
        asked: What drafter_names has read; None where nothing was given.
        usual: Those to take then, as far as there is a draft.
        has_draft: Whether the bundle has a draft model.

    Raises:
        ValueError: A drafter that is unknown, or that needs a draft where there is none.
    """
    from runtime.pair import DRAFTERS, MODEL_DRAFTERS

    if asked is None:
        return tuple(name for name in usual if has_draft or name not in MODEL_DRAFTERS)
    for name in asked:
        if name not in DRAFTERS:
            raise ValueError(f"The drafter {name!r} is unknown; there are {', '.join(DRAFTERS)}.")
        if name in MODEL_DRAFTERS and not has_draft:
            raise ValueError(f"The drafter '{name}' needs a draft model, and the bundle has none: leave it out.")
    return tuple(asked)


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds options for where a pair runs; see device_settings."""
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, ort-tensorrt, tensorrt, tensorrt-rtx; or cuda:1")
    parser.add_argument("--draft-device", help="where the draft runs (default: the same)")
    parser.add_argument("--threads", type=int, metavar="N", help="of the CPU (default: all cores)")
    parser.add_argument("--gpu-memory-limit", type=float, metavar="GB", help="a model's most, without its caches (cuda)")
    parser.add_argument("--tf32", action="store_true", help="round float32 products: another model (cuda, ort-tensorrt)")
    parser.add_argument("--cuda-graphs", action="store_true", help="replay passes whole: for sessions that are kept (cuda)")


def device_settings(arguments: argparse.Namespace) -> "DeviceSettings":
    """Returns what Generator.from_bundle is to be told of devices.

    Raises:
        ValueError: A memory limit below a byte, or beyond any memory.
    """
    from runtime import CudaOptions

    limit = arguments.gpu_memory_limit
    if limit is not None and not 1 / _GIGABYTE <= limit <= _GIGABYTE:
        raise ValueError(f"--gpu-memory-limit is {limit}; gigabytes are expected, such as 4 or 0.5.")
    memory_limit = None if limit is None else max(1, int(limit * _GIGABYTE))
    return {
        "device": arguments.device,
        "draft_device": arguments.draft_device,
        "threads": arguments.threads,
        "cuda_options": CudaOptions(memory_limit=memory_limit, tf32=arguments.tf32, cuda_graphs=arguments.cuda_graphs),
    }


def load_generator(arguments: argparse.Namespace) -> "Generator":
    """Loads the bundle that the parsed options ask for; see Generator.from_bundle for the errors."""
    from runtime import Generator

    # The scripts make no other ONNX Runtime sessions, so they may use one thread pool for everything.
    return Generator.from_bundle(
        arguments.bundle,
        drafter=arguments.drafter,
        num_draft_tokens=arguments.num_draft_tokens,
        max_slowdown=max_slowdown(arguments),
        shared_thread_pool=True,
        **device_settings(arguments),
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
    expected = 'a JSON object such as {"42": -100} is expected'
    try:
        pairs = json.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:  # the latter of brackets in brackets
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no JSON: {expected}") from error
    if not isinstance(pairs, _Pairs):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no object: {expected}")
    bias: dict[int, float] = {}
    for token, value in pairs:
        if not re.fullmatch(r"-?(0|[1-9][0-9]{0,17})", token):
            raise argparse.ArgumentTypeError(f"{token!r} is no token id: {expected}")
        if not isinstance(value, int | float) or isinstance(value, bool):
            shown = json.dumps(value)
            raise argparse.ArgumentTypeError(f"the bias of {token} is {shown:.80}, which is no number: {expected}")
        if int(token) in bias:
            raise argparse.ArgumentTypeError(f"token {token} stands there twice: give each token one bias")
        bias[int(token)] = value
    return bias


class _Pairs(list[tuple[str, object]]):
    """A JSON object as it was written, with what stands there twice."""
