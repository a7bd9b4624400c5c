"""All engines of a bundle for one GPU: built in a folder beside the goal, which appears whole or not at all."""

import functools
import hashlib
import shutil
import threading
from collections.abc import Callable

from runtime.contract import Bundle, DecoderSpec
from runtime.decoder import context_size
from runtime.draft_policy import MAX_NUM_DRAFT_TOKENS
from runtime.errors import BundleError
from runtime.folder_lock import sole_use
from runtime.steps import in_steps
from runtime.top_logits import SPARE

from .build import BuildOptions, BuiltEngine, build_engine, build_top_engine
from .profiles import Profile, choose_form, plan_profiles, slots_needed
from .sidecar import EngineRecord, engine_path, engines_folder, graph_hashes, top_engine_path
from .trt_module import TensorRTModule, format_capability

# A decoder's name, how much of its build is done, and the part at hand.
BundleReport = Callable[[str, float, str], None]

# A draft's step is one token, or two behind a round whose proposal was accepted whole. TensorRT-RTX 1.7 has fused attention for
# two rows, and none for exactly one.
_DRAFT_STEP_ROWS = 2
# Of greedy texts, and of those with a top_k of up to 64.
_BFLOAT16_CAPABILITY = (8, 0)
TOP_COUNTS = (1 + SPARE, 64 + SPARE)


def build_bundle_engines(
    bundle: Bundle,
    tensorrt: TensorRTModule,
    compute_capability: tuple[int, int],
    *,
    num_draft_tokens: int,
    max_rows: int | None = None,
    options: BuildOptions,
    report: BundleReport,
    stop: threading.Event,
) -> dict[str, EngineRecord]:
    """Builds and writes the engines of a target and a draft.

    Args:
        bundle: The bundle; its `engines` folder is written.
        tensorrt: What builds them.
        compute_capability: Of the GPU that will run them.
        num_draft_tokens: The most tokens a round will propose for the price of one step of the target.
        max_rows: The most rows of a pass; None for what the runtime asks for.
        options: Further choices.
        report: Told of progress.
        stop: See build_engine.

    Returns:
        Each decoder's record.

    Raises:
        BundleError: The bundle has a decoder in no form that this TensorRT takes, or in bf16, which the GPU lacks; another
            process builds engines of it, or exports to it; or as build_engine raises.
        DeviceError: As build_engine raises.
        ValueError: Numbers of rows that do not fit each other.
    """
    decoders = {"target": bundle.target} | ({} if bundle.draft is None else {"draft": bundle.draft})
    forms = {
        name: choose_form(decoder, tensorrt.lowerings, tensorrt.title, bundle.folder) for name, decoder in decoders.items()
    }
    for name, spec in forms.items():
        if spec.precision == "bf16" and compute_capability < _BFLOAT16_CAPABILITY:
            raise BundleError(
                f"The {name} is in bf16, which needs compute capability 8.0 or more, and this GPU has "
                f"{'.'.join(map(str, compute_capability))}: export it in fp16."
            )
    # Only the target decides what is said, so only its verifications must be one step.
    steps = {"target": num_draft_tokens + 1, "draft": _DRAFT_STEP_ROWS}
    planned = {name: _plan(spec, steps[name], num_draft_tokens, max_rows) for name, spec in forms.items()}
    out = engines_folder(bundle.folder, tensorrt, compute_capability)
    staging = out.with_name(f".{out.name}.partial")
    refusal = BundleError(
        f"An export to {bundle.folder}, or another build of its engines, is under way: wait until it is done, and begin anew."
    )
    with sole_use(bundle.folder.resolve(), refusal):
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        try:
            records = {}
            for name, spec in forms.items():
                profiles = planned[name]
                graph, told = bundle.folder / spec.graph[0].path, functools.partial(report, name)
                built = build_engine(tensorrt, spec, graph, compute_capability, profiles, options, told, stop)
                engine = engine_path(staging, spec)
                engine.parent.mkdir(parents=True, exist_ok=True)
                engine.write_bytes(built.plan)
                top = {}
                for count in (each for each in TOP_COUNTS if each < spec.vocab_size):
                    plan = build_top_engine(tensorrt, spec, profiles[0].max_rows, count, compute_capability, options)
                    top_engine_path(engine, count).write_bytes(plan)
                    top[str(count)] = hashlib.sha256(plan).hexdigest()
                records[name] = _record_of(built, tensorrt, compute_capability, spec, profiles, top)
                records[name].save(engine)
            shutil.rmtree(out, ignore_errors=True)
            staging.rename(out)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return records


def _plan(spec: DecoderSpec, fixed_rows: int, num_draft_tokens: int, max_rows: int | None) -> tuple[Profile, ...]:
    """Returns a decoder's profiles, whose longest pass is a multiple of a step, as the runtime pads it."""
    assert spec.cache_capacity is not None  # choose_form has looked
    if spec.cache_capacity < (needed := slots_needed(spec, fixed_rows)):
        raise BundleError(
            f"The graph of {spec.source} has caches of {spec.cache_capacity} slots, and a context of {spec.context_length} "
            f"tokens in steps of {fixed_rows} rows needs {needed}: build with a smaller --num-draft-tokens, or export it anew."
        )
    stepped = in_steps(spec, fixed_rows)
    rows = max_rows or context_size(stepped, spec.context_length, MAX_NUM_DRAFT_TOKENS + 1)[1]
    return plan_profiles(fixed_rows, num_draft_tokens, stepped.rows_of_pass(min(rows, spec.context_length)))


def _record_of(
    built: BuiltEngine,
    tensorrt: TensorRTModule,
    compute_capability: tuple[int, int],
    spec: DecoderSpec,
    profiles: tuple[Profile, ...],
    top: dict[str, str],
) -> EngineRecord:
    assert spec.cache_capacity is not None  # choose_form has looked
    return EngineRecord(
        module=tensorrt.name,
        version=tensorrt.version,
        compute_capability=format_capability(compute_capability),
        graph=graph_hashes(spec),
        capacity=spec.cache_capacity,
        profiles=profiles,
        flags=built.flags,
        build_seconds=round(built.build_seconds, 1),
        peak_memory=built.peak_memory,
        size=len(built.plan),
        sha256=hashlib.sha256(built.plan).hexdigest(),
        top=top,
    )
