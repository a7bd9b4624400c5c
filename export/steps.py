"""How far a whole export is: its steps numbered, and the time that is left by the speed of those behind."""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from .role import BUILDING, CALIBRATING, COMPARING, COUNTING, GPTQ, MEASURING, QUANTISING, SAMPLING, WRITING, Report, Role
from .source import Source

# Seconds of a core for a billion weights and one form, as SmolLM2-135M took them. Only their proportions count: an export's own
# speed is measured as it goes.
_WORK = {BUILDING: 50, QUANTISING: 40, WRITING: 20, COMPARING: 75, MEASURING: 90, COUNTING: 150}
_WORK |= {SAMPLING: 400, CALIBRATING: 900}


def planned_steps(roles: Sequence[Role], *, counts_tokens: bool = False, samples_texts: bool = False) -> dict[str, float]:
    """Returns what an export will report, in order, each with its share of the work.

    Args:
        roles: What is to be made; graphs that are taken as they are have no steps.
        counts_tokens: Whether the draft's tokens are counted in texts of the target.
        samples_texts: Whether the target writes what decoders are calibrated on, if any are.
    """
    made = [role for role in roles if role.source.kind != "graph"]
    writing = {role.name: list(_writing(role)) for role in made}
    if counts_tokens and "target" in writing:
        writing["target"].append((COUNTING, _WORK[COUNTING] * made[0].source.num_parameters))
    calibrated = next((role.name for role in made if role.quantizer == GPTQ), None)
    if samples_texts and calibrated is not None:
        writing[calibrated].insert(0, (SAMPLING, _WORK[SAMPLING] * made[0].source.num_parameters))
    checking = (
        step
        for source, group in itertools.groupby(made, key=lambda role: role.source)
        for step in _checking(source, list(group))
    )
    return dict([*itertools.chain.from_iterable(writing.values()), *checking])


def _writing(role: Role) -> Iterator[tuple[str, float]]:
    weights = role.source.num_parameters
    if role.quantizer == GPTQ and not role.beside:  # what lies in the bundle was calibrated
        yield role.title(CALIBRATING, role.lowerings[0]), _WORK[CALIBRATING] * weights
    yield role.title(BUILDING.format(role.source.name)), _WORK[BUILDING] * weights
    for lowering in role.lowerings:
        if role.is_quantised:
            yield role.title(QUANTISING, lowering), _WORK[QUANTISING] * weights
        yield role.title(WRITING, lowering), _WORK[WRITING] * weights


def _checking(source: Source, roles: Sequence[Role]) -> Iterator[tuple[str, float]]:
    forms = [(role, lowering) for role in roles for lowering in role.lowerings]
    yield COMPARING.format(source.name), len(forms) * _WORK[COMPARING] * source.num_parameters
    for role, lowering in forms:
        yield role.title(MEASURING, lowering), _WORK[MEASURING] * source.num_parameters


class Steps:
    """A Report that numbers the planned steps before it hands them on; whatever was not planned goes as it comes."""

    def __init__(self, planned: Mapping[str, float], report: Report, clock: Callable[[], float] = time.monotonic) -> None:
        """Takes planned_steps and the report to hand on to; time runs from now."""
        self._planned, self._report, self._clock = planned, report, clock
        self._started = clock()
        self._shown: dict[str, str] = {}

    def __call__(self, title: str, done: int, total: int) -> None:
        """Takes one report of the export."""
        if title in self._planned and title not in self._shown:
            self._shown[title] = self._numbered(title)
        self._report(self._shown.get(title, title), done, total)

    def _numbered(self, title: str) -> str:
        titles = list(self._planned)
        number = titles.index(title)
        done, left = (sum(self._planned[each] for each in part) for part in (titles[:number], titles[number:]))
        numbered = f"step {number + 1} of {len(titles)}: {title}"
        if not done:
            return numbered
        return f"{numbered} ({_duration((self._clock() - self._started) * left / done)} left in all)"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return "less than a minute"
    return f"about {seconds / 60:.0f} min"
