"""What passes cost on this machine: the numbers that decide whether, and how far, drafting pays."""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .backend import Model
from .decoder import Decoder

ROWS = (1, 2, 3, 4, 5, 7, 9, 13, 17)
_CACHED_TOKENS = 64
_REPETITIONS = 3
_SMALL_STEP = 2
# Of any pass that was ever measured; what is beyond, nobody can reckon with.
_LEAST_SECONDS, _MOST_SECONDS, _MOST_ROWS = 1e-9, 1e6, 10**6


@dataclass(frozen=True)
class PassCosts:
    """Seconds of passes and of what stands between them.

    Attributes:
        target_by_rows: (rows, seconds) of one target pass, rows ascending from 1.
        draft_by_rows: (rows, seconds) of one draft pass, likewise; None without a draft model.
        round_seconds: What a round takes beside the passes.
    """

    target_by_rows: tuple[tuple[int, float], ...]
    draft_by_rows: tuple[tuple[int, float], ...] | None = None
    round_seconds: float = 0.0

    def target(self, rows: int) -> float:
        """Returns the seconds of a target pass of so many rows."""
        return _interpolated(self.target_by_rows, rows)

    def draft(self, rows: int = 1) -> float:
        """Returns the seconds of a draft pass of so many rows."""
        assert self.draft_by_rows is not None, "asked of a pair without a draft model"
        return _interpolated(self.draft_by_rows, rows)

    @classmethod
    def from_dict(cls, document: Mapping[str, object]) -> "PassCosts":
        """Reads what `dataclasses.asdict` wrote, by way of JSON.

        Raises:
            ValueError: It is not of this form.
        """
        try:
            draft = document["draft_by_rows"]
            costs = cls(
                _points(document["target_by_rows"]),
                None if draft is None else _points(draft),
                float(document["round_seconds"]),  # type: ignore[arg-type]
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"Measured costs lack something or are of another form ({error!r}): measure again.") from error
        if not 0 <= costs.round_seconds <= _MOST_SECONDS:
            raise ValueError(f"Measured costs say {costs.round_seconds} seconds for a round: measure again.")
        return costs


def measure_costs(
    target: Model, draft: Model | None, *, rows: Sequence[int] = ROWS, repetitions: int = _REPETITIONS
) -> PassCosts:
    """Runs each kind of pass a few times behind 64 cached tokens, and takes the fastest of each.

    By default it takes about as long as a hundred passes of one row; the two models take turns, as they do in a round. The
    target gives logits for every row and the draft for the last one, as there.

    Args:
        target: The target.
        draft: The draft, or None.
        rows: Of the passes, ascending from 1; those that the contexts have no room for are left out.
        repetitions: Passes of each kind that count, at least 1.
    """
    models = [model for model in (target, draft) if model is not None]
    room = min(model.spec.context_length for model in models)
    cached = min(_CACHED_TOKENS, room // 2)
    # Where passes come in multiples of many rows, costs jump behind each.
    step = max(model.spec.row_multiple for model in models)
    jumps = {number + more for number in range(step, max(rows), step) for more in (0, 1)} if step > _SMALL_STEP else set()
    measured = [number for number in sorted({*rows, *jumps}) if number <= room - cached]
    decoders = [Decoder(model, cached + measured[-1], num_rows=measured[-1]) for model in models]
    seconds: list[dict[int, list[float]]] = [{} for _ in decoders]
    for decoder in decoders:
        decoder.forward([0] * cached, 1)
    for _, number in itertools.product(range(repetitions + 1), measured):
        for decoder, by_rows in zip(decoders, seconds, strict=True):
            decoder.rewind_to(cached)
            num_rows = number if decoder is decoders[0] else 1
            started = time.perf_counter()
            decoder.forward([0] * number, num_rows)
            by_rows.setdefault(number, []).append(time.perf_counter() - started)
    points = [_fastest(by_rows) for by_rows in seconds]
    return PassCosts(points[0], points[1] if draft is not None else None)


def _fastest(by_rows: Mapping[int, Sequence[float]]) -> tuple[tuple[int, float], ...]:
    """Takes the fastest, the first repetition left out: it warms up. What else ran meanwhile only ever adds time.

    More rows never cost less: that is noise.
    """
    fastest = (min(times[1:]) for times in by_rows.values())
    return tuple(zip(by_rows, itertools.accumulate(fastest, max), strict=True))


def _interpolated(points: Sequence[tuple[int, float]], rows: int) -> float:
    """Between two measured points, and beyond the last, cost grows linearly."""
    if len(points) == 1:
        return points[0][1]
    later = next((place for place, (known, _) in enumerate(points) if known >= rows), len(points) - 1)
    (rows_before, before), (rows_behind, behind) = points[max(1, later) - 1], points[max(1, later)]
    return max(0.0, before + (behind - before) * (rows - rows_before) / (rows_behind - rows_before))


def _points(value: object) -> tuple[tuple[int, float], ...]:
    points = tuple((int(rows), float(seconds)) for rows, seconds in value)  # type: ignore[attr-defined]
    ascending = all(one < other for (one, _), (other, _) in itertools.pairwise(points))
    within = all(rows <= _MOST_ROWS and _LEAST_SECONDS <= seconds <= _MOST_SECONDS for rows, seconds in points)
    if not points or points[0][0] != 1 or not ascending or not within:
        raise ValueError(f"passes of {points!r:.200}")
    return points
