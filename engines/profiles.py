"""Which sizes of passes an engine is made for, and the shapes of its inputs for each of them.

TensorRT picks its kernels for a profile, a range of shapes. Passes of other profiles may round otherwise, so what a text's
bits depend on is which profile its rows are computed in. The first profile therefore has one size only, `fixed_rows`, and every
row whose logits are asked for is computed in it: a plain step and the verification of a proposal are the same step, or several
of them where the proposal is long, padded where it is short. Its launches can be kept as a CUDA graph.
"""

from dataclasses import dataclass
from pathlib import Path

from runtime.contract import DecoderSpec
from runtime.errors import BundleError
from runtime.steps import in_steps


@dataclass(frozen=True)
class Profile:
    """A range of rows in one pass.

    Attributes:
        name: "fixed", "short" or "prefill".
        min_rows: The fewest.
        opt_rows: What kernels are chosen for.
        max_rows: The most.
    """

    name: str
    min_rows: int
    opt_rows: int
    max_rows: int

    def __str__(self) -> str:
        """Returns "8", or "1 to 170"."""
        return str(self.max_rows) if self.is_fixed else f"{self.min_rows} to {self.max_rows}"

    @property
    def is_fixed(self) -> bool:
        """Whether every pass of this profile has the same number of rows."""
        return self.min_rows == self.max_rows

    @property
    def logits_rows(self) -> tuple[int, int, int]:
        """The fewest, the usual and the most rows that get logits: all of a step's; of other passes one that nobody reads."""
        return (self.max_rows,) * 3 if self.is_fixed else (1, 1, self.max_rows)


def plan_profiles(fixed_rows: int, num_draft_tokens: int, max_rows: int) -> tuple[Profile, ...]:
    """Returns an engine's profiles, from few rows to many.

    Args:
        fixed_rows: Rows of a step: num_draft_tokens + 1 for a target, so that most verifications are one; few for a draft.
        num_draft_tokens: One less than the rows of such a verification.
        max_rows: The most rows of a pass, so the size of a prompt's pieces.

    Raises:
        ValueError: A number below 1, or fixed_rows or a verification above max_rows.
    """
    verified = num_draft_tokens + 1
    if not 1 <= fixed_rows <= max_rows or not 1 <= num_draft_tokens < max_rows:
        raise ValueError(
            f"Passes of up to {max_rows} rows cannot hold steps of {fixed_rows} rows and the {verified} rows that verify "
            f"{num_draft_tokens} tokens: at least {max(fixed_rows, verified, 2)} rows (--max-rows) and 1 token are needed."
        )
    profiles = [Profile("fixed", fixed_rows, fixed_rows, fixed_rows)]
    if fixed_rows < verified < max_rows:
        profiles.append(Profile("short", 1, verified, verified))
    if fixed_rows < max_rows:
        profiles.append(Profile("prefill", 1, max_rows, max_rows))
    return tuple(profiles)


def choose_profile(profiles: tuple[Profile, ...], rows: int) -> int:
    """Returns the index of the first profile that holds a pass of so many rows."""
    return next(index for index, profile in enumerate(profiles) if profile.min_rows <= rows <= profile.max_rows)


def slots_needed(spec: DecoderSpec, fixed_rows: int) -> int:
    """Returns the slots of a cache that holds a full context and the padding of its last step."""
    return spec.context_length + in_steps(spec, fixed_rows).most_padding + spec.spare_slots


def input_shapes(spec: DecoderSpec, rows: int, logits_rows: int) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every input in a pass.

    Args:
        spec: The decoder; of a form that choose_form returns.
        rows: Tokens of the pass.
        logits_rows: Rows that get logits, where the graph lets one choose.
    """
    names = spec.names
    assert names.past_length is not None
    assert spec.cache_capacity is not None
    cache = (1, spec.num_key_value_heads, spec.cache_capacity, spec.head_size)
    shapes: dict[str, tuple[int, ...]] = {names.input_ids: (1, rows), names.past_length: (1,)}
    if names.logits_rows is not None:
        shapes[names.logits_rows] = (logits_rows,)
    return shapes | {past: cache for past, _ in names.cache_pairs(spec.num_layers)}


def choose_form(decoder: DecoderSpec, supported: tuple[str, ...], title: str, folder: Path) -> DecoderSpec:
    """Returns the form of a decoder that TensorRT builds, the best one of those in the bundle.

    Args:
        decoder: The decoder.
        supported: The lowerings that will do, best first.
        title: "TensorRT 10.3.0", for instance.
        folder: The bundle's, for the sentence.

    Raises:
        BundleError: The bundle has none of them, and the sentence the command that adds one; or a manifest without the sizes
            that such a graph fixes.
    """
    form = decoder.best_form(supported)
    if form.lowering not in supported:
        there = " and ".join(f"'{each.lowering}'" for each in decoder.forms)
        remedy = f"add that form, python scripts/export.py --add-lowering {supported[0]} --out {folder}"
        if form.lowering == "growing":  # a graph that was taken as it is, of which no other form can be made
            remedy = f"export its checkpoint, with --lowering {supported[0]}"
        elif form.precision == "checkpoint":
            remedy += "; where the checkpoint's blocks have offsets, export it anew in int8 or int4"
        raise BundleError(
            f"The graph of {decoder.source} has the lowering {there}, and {title} takes {' or '.join(supported)}: {remedy}"
        )
    if form.cache_capacity is None or form.names.past_length is None:
        raise BundleError(
            f"The manifest of {form.source} has no cache_capacity or no past_length, which a graph of the lowering "
            f"'{form.lowering}' needs: it is damaged, or written by hand; export again."
        )
    return form
