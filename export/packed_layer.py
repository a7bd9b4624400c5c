"""One matrix that GPTQ or AWQ has quantised: how it is packed, its values in float32, and its codes as blocks.

weight[k, n] = (code[k, n] - zero_point[group of k, n]) * scale[group of k, n], which float32 holds exactly where the scales are
float16. What a code and a zero point are:

- GPTQ (AutoGPTQ, GPTQModel): qweight int32 [K / codes, N], codes along K from the lowest bits; qzeros int32
  [groups, N / codes], likewise along N, less one unless the format is "gptq_v2"; g_idx int32 [K] names the groups.
- AWQ (AutoAWQ, "gemm"): qweight int32 [K, N / 8] and qzeros int32 [groups, N / 8], eight columns in the order 0 2 4 6 1 3 5 7.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ExportError
from .quantization import BLOCK_SIZES, BlockwiseWeights

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of a column's code among the eight of an int32
_GPTQ_BITS = (2, 4, 8)
_WHOLE_COLUMNS = -1  # the group size that stands for one group


@dataclass(frozen=True)
class Packing:
    """How a folder's matrices are packed.

    Attributes:
        is_awq: AWQ's layout; GPTQ's otherwise.
        bits: Of a code.
        zero_point_shift: To be added to stored zero points.
        group_size: The most columns that share a scale; -1 for all of a matrix.
    """

    is_awq: bool
    bits: int
    zero_point_shift: int
    group_size: int

    @classmethod
    def of(cls, config: Mapping[str, Any], name: str) -> "Packing | None":
        """Reads the quantization_config of a config.json; None where there is none.

        Raises:
            ExportError: Another method, or a form of one that is not read here; the sentence names it.
        """
        quantization = config.get("quantization_config")
        if quantization is None:
            return None
        values = quantization if isinstance(quantization, Mapping) else {}
        method, bits = values.get("quant_method"), _number(values.get("bits", values.get("w_bit")))
        layout = values.get("version", "gemm") if method == "awq" else values.get("checkpoint_format", "gptq")
        is_awq = method == "awq" and bits == 4 and str(layout).lower() == "gemm"
        if not is_awq and not (method == "gptq" and bits in _GPTQ_BITS and layout in ("gptq", "gptq_v2")):
            raise ExportError(
                f"{name} is quantised by '{method}' ({bits} bits, {layout}), and only GPTQ with 2, 4 or 8 bits and AWQ with 4 "
                "(gemm) are read: export the model it was made from."
            )
        group_size = _number(values.get("group_size", values.get("q_group_size")))
        if type(group_size) is not int or (group_size < 1 and group_size != _WHOLE_COLUMNS):
            raise ExportError(
                f"The group_size in the quantization_config of {name} is {group_size!r} where a whole number, or -1 for one "
                "group, is expected: download the model again."
            )
        return cls(is_awq, int(bits), int(not is_awq and layout == "gptq"), group_size)

    def group_of(self, columns: int) -> int:
        """Returns how many of so many columns share a scale."""
        return columns if self.group_size == _WHOLE_COLUMNS else min(self.group_size, columns)


def _number(value: object) -> object:
    """Returns a whole number that was written as a string as one; anything else as it is."""
    try:
        return int(value) if isinstance(value, str) else value
    except ValueError:
        return value


class PackedLayer:
    """The tensors of one quantised matrix."""

    def __init__(self, packing: Packing, name: str, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Unpacks a matrix.

        Args:
            packing: How it is packed.
            name: The layer's, for errors.
            tensors: qweight, qzeros, scales and perhaps g_idx, as the module's docstring has them.

        Raises:
            ExportError: A tensor is missing or of another type, their shapes do not fit, or a zero point is beyond 8 bits.
        """
        self.name = name
        _check_types(name, tensors)
        try:
            unpack = _awq_columns if packing.is_awq else _columns
            zero_points = unpack(tensors["qzeros"], packing.bits)
            codes = unpack(tensors["qweight"], 4) if packing.is_awq else _columns(tensors["qweight"].T, packing.bits).T
            self._codes = codes  # [columns, rows], as scales and zero points [groups, rows]
            self._scales = tensors["scales"].astype(np.float32)
            self._zero_points = zero_points + np.int16(packing.zero_point_shift)
            self._group = packing.group_of(len(codes))
            in_order = np.arange(len(codes)) // self._group
            self._groups = tensors.get("g_idx", in_order)
            self._is_in_order = bool((self._groups == in_order).all())
            fits = self._scales.shape == self._zero_points.shape == (in_order[-1] + 1, codes.shape[1])
            fits = fits and np.array_equal(np.sort(self._groups), in_order)  # act-order names other columns, no more of them
        except (KeyError, IndexError, ValueError):
            fits = False
        if not fits:
            shapes = ", ".join(f"{key} {list(value.shape)}" for key, value in tensors.items())
            raise ExportError(
                f"The packed tensors of '{name}' do not fit each other ({shapes}) and a group_size of {packing.group_size}: "
                "download the model again."
            )
        if (largest := int(self._zero_points.max(initial=0))) > np.iinfo(np.uint8).max:
            # Some readers of GPTQ take it for 0, others for 256.
            raise ExportError(
                f"'{name}' has a zero point of {largest}, one more than 8 bits hold: export the model it was made from."
            )

    @property
    def values(self) -> NDArray[np.float32]:
        """The matrix, float32 [rows, columns]."""
        steps = (self._codes - self._zero_points[self._groups]).astype(np.float32)
        return np.ascontiguousarray((steps * self._scales[self._groups]).T)

    @property
    def blocks(self) -> BlockwiseWeights:
        """The matrix with the codes it has.

        Raises:
            ExportError: Its groups are not in order, or no whole number of blocks.
        """
        columns, group = len(self._codes), self._group
        size = next((size for size in sorted(BLOCK_SIZES, reverse=True) if group % size == 0), None)
        if not self._is_in_order or size is None or columns % group:
            kind = f"groups of {group} weights" if self._is_in_order else "groups that are not in order (desc_act, act-order)"
            raise ExportError(f"The matrix '{self.name}' has {kind}, which cannot be kept: export in int8 or int4.")
        scales, zero_points = (
            np.repeat(values.T, group // size, axis=1) for values in (self._scales, self._zero_points.astype(np.uint8))
        )
        codes = self._codes.T.astype(np.uint8).reshape(len(scales), -1, size)
        # The format's own "less one" can mean a zero point of 16, one more than 4 bits hold.
        bits = 4 if max(int(codes.max()), int(zero_points.max())) < 16 else 8
        is_symmetric = bool((zero_points == 2 ** (bits - 1)).all())
        return BlockwiseWeights.of_codes(codes, scales, bits, columns, zero_points=None if is_symmetric else zero_points)


def _check_types(name: str, tensors: Mapping[str, NDArray[Any]]) -> None:
    expected = {"qweight": (np.int32, "int32"), "qzeros": (np.int32, "int32"), "scales": (np.floating, "floats")}
    for key, tensor in tensors.items():
        kind, called = expected.get(key, (np.integer, "whole numbers"))
        if not np.issubdtype(tensor.dtype, kind):
            raise ExportError(f"'{name}.{key}' holds {tensor.dtype} where {called} are expected: download the model again.")


def _columns(packed: NDArray[np.int32], bits: int) -> NDArray[np.int16]:
    """Unpacks int32 [rows, n] to [rows, n * 32 / bits], the lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (np.ascontiguousarray(packed).view(np.uint32)[:, :, None] >> shifts) & np.uint32(2**bits - 1)
    return codes.reshape(len(packed), -1).astype(np.int16)


def _awq_columns(packed: NDArray[np.int32], bits: int) -> NDArray[np.int16]:
    return _columns(packed, bits).reshape(len(packed), -1, 8)[:, :, _AWQ_PLACES].reshape(len(packed), -1)
