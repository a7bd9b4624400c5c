"""A decoder to be made: what of, in which forms and precision; and how its steps are called where people read them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .errors import ExportError
from .lowerings import FORMS, GQA_HALF, STANDARD_FORMS, compute_type
from .quantization import BITS, BLOCK_SIZE, BLOCK_SIZES, KEPT
from .source import Source

if TYPE_CHECKING:
    from .calibration import CalibratedWeights

BYTES_PER_WEIGHT = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.125, "int4": 0.625}
PRECISIONS = tuple(BYTES_PER_WEIGHT)
_MOST_KEPT_BYTES = 1.25  # of a quantised weight: 8 bits, a float32 scale and an offset for 32
DEFAULT_PRECISION = "fp32"
DEFAULT_DRAFT_PRECISION = "int4"
# What happens, how much of it is done, and how much there is (0 where that cannot be told).
Report = Callable[[str, int, int], None]
# What the steps are called; the first and the last with a source's name.
BUILDING = "building the graph from {}"
QUANTISING, WRITING, MEASURING = "quantising the weights", "writing the weights", "measuring row equality"
COUNTING = "counting tokens in texts of the target"
COMPARING = "comparing with {} in torch"
SAMPLING, CALIBRATING = "writing texts to calibrate on", "rounding by GPTQ"
# What decides on the codes of weights that are rounded: the least squared error of each block, or of a matrix's outputs.
SEARCH, GPTQ = QUANTIZERS = "search", "gptq"


@dataclass(frozen=True)
class Role:
    """One decoder to be made.

    Attributes:
        name: "target" or "draft", and the folder of its graphs.
        source: Where it comes from.
        precision: One of PRECISIONS, or KEPT for quantised weights as the checkpoint has them.
        context_length: Tokens it must serve.
        block_size: The most quantised weights that share a scale.
        exporter: What makes its graph: "mobius", "optimum", or "none" where there is a graph.
        lowering: The form of its graph: one of FORMS, or several of them with commas between.
        quantizer: What rounds its weights, one of QUANTIZERS; without effect where none are rounded.
        beside: The lowerings in the bundle that these are added to; none where the bundle is new.
        calibrated: Its matrices as GPTQ has rounded them, once that is done.
    """

    name: str
    source: Source
    precision: str
    context_length: int
    block_size: int = BLOCK_SIZE
    exporter: str = "mobius"
    lowering: str = "gqa"
    quantizer: str = SEARCH
    beside: tuple[str, ...] = ()
    calibrated: "CalibratedWeights | None" = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Refuses what cannot be made, before any work.

        Raises:
            ExportError: An unknown option, or one that does not go with another.
        """
        if self.precision not in (*PRECISIONS, KEPT):
            known = ", ".join((*PRECISIONS, KEPT))
            raise ExportError(f"The {self.name}'s precision '{self.precision}' is unknown; there are {known}.")
        if self.block_size not in BLOCK_SIZES:
            sizes = ", ".join(map(str, BLOCK_SIZES))
            raise ExportError(f"The {self.name}'s block size {self.block_size} is unknown; there are {sizes}.")
        if self.quantizer not in QUANTIZERS:
            raise ExportError(f"The quantizer '{self.quantizer}' is unknown; there are {', '.join(QUANTIZERS)}.")
        for lowering in self._asked:
            if lowering not in FORMS:
                raise ExportError(f"The lowering '{lowering}' is unknown; there are {', '.join(FORMS)}.")
        if self.exporter == "none" and self._asked != ("gqa",):
            raise ExportError(
                f"--lowering {self.lowering} rewrites what is built from a checkpoint, and {self.source.name} is a graph that "
                "is taken as it is: leave --lowering out."
            )
        if GQA_HALF in self._asked and self.precision == "fp32":
            option = "--precision" if self.name == "target" else "--draft-precision"
            raise ExportError(
                f"The lowering {GQA_HALF} computes in float16, and the {self.name} would have fp32: export it with {option} "
                "fp16, int8 or int4, or take the lowering gqa."
            )

    @property
    def _asked(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part.strip() for part in self.lowering.split(",")))

    @property
    def lowerings(self) -> tuple[str, ...]:
        """The forms of its graph to be made, each once."""
        return tuple(lowering for lowering in self._asked if lowering != self.served_by_its_twin)

    @property
    def served_by_its_twin(self) -> str | None:
        """The one of "gqa" and "gqa-half" that is not made, because the other one is the same graph; None for none.

        They are the same in 16 bits, and either runs wherever the other does.
        """
        if compute_type("gqa", self.precision) != compute_type(GQA_HALF, self.precision):
            return None
        if "gqa" in self._asked and GQA_HALF in self.beside:
            return "gqa"
        return GQA_HALF if GQA_HALF in self._asked and "gqa" in (*self._asked, *self.beside) else None

    @property
    def is_quantised(self) -> bool:
        """Whether weights share scales."""
        return self.precision in (*BITS, KEPT)

    @property
    def weight_bytes(self) -> float:
        """Bytes new on the disk: forms share their weights, but for quantised ones in contrib and in standard operators."""
        stored = {self.is_quantised and lowering in STANDARD_FORMS for lowering in self.beside}
        wanted = {self.is_quantised and lowering in STANDARD_FORMS for lowering in self.lowerings}
        return len(wanted - stored) * self.form_bytes

    @property
    def form_bytes(self) -> float:
        """Bytes of one form's weights."""
        return self.source.num_parameters * BYTES_PER_WEIGHT.get(self.precision, _MOST_KEPT_BYTES)

    def title(self, step: str, lowering: str | None = None) -> str:
        """Returns what a step is called; `lowering` is the form it makes, if it is one of several forms' steps."""
        form = f", {lowering}" if lowering is not None and len(self.lowerings) > 1 else ""
        return f"{self.name} ({self.precision}{form}): {step}"

    def counter(self, step: str, lowering: str, report: Report) -> Callable[[int, int], None]:
        """Returns what reports how much of a step is done."""
        title = self.title(step, lowering)
        return lambda done, total: report(title, done, total)
