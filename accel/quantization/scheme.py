"""How a weight is written in fewer bits, what it is multiplied with, and their names among the options."""

from dataclasses import dataclass, replace

from accel_kernels.gemm.fused_linear import MOST_ROWS
from accel_kernels.gemm.quantized_weight import FORMATS, MXFP4, PER_WORD, WeightFormat

from accel.quantization.activations import FIXED, is_static, weight_dtype_of

GROUP = 128  # columns to a scale of 4-bit numbers, where the name says nothing else


@dataclass(frozen=True)
class Scheme:
    """weight_dtype: the name of a `WeightFormat`, such as "int8", "int4" or "fp8" (float8_e4m3fn). group: columns to a
    scale, None for one scale a row.

    symmetric: without a zero point; otherwise the numbers cover least to largest. activations: a value of
    `Options.activations`, how rows that it is multiplied with are rounded; None for not. ordered: columns that share a
    scale lie apart, "act-order".
    """

    weight_dtype: str
    group: int | None = None
    symmetric: bool = True
    activations: str | None = None
    ordered: bool = False

    @classmethod
    def parse(cls, name: str) -> "Scheme":
        """Of the layers, by a value of `Options.weights`, such as "int4-g64-asym"."""
        weight_dtype, *rest = name.split("-")
        groups = [int(part[1:]) for part in rest if part.startswith("g")]
        group = None if weight_dtype != "int4" else (*groups, GROUP)[0]
        return cls(weight_dtype, group, "asym" not in rest)

    @classmethod
    def of_head(cls, name: str) -> "Scheme | None":
        """Of the output head, by a value of `Options.weights`; None where it keeps its dtype.

        That of the layers, but never 4 bits: what is wrong in a logit no later layer evens out.
        """
        layers = cls.parse(name)
        if not name.endswith("-head"):
            return None
        return cls("int8") if layers.weight_dtype == "int4" else layers

    @property
    def exact(self) -> bool:
        """Whether weights are only written so where that changes none."""
        return self.format is MXFP4

    @property
    def format(self) -> WeightFormat:
        return FORMATS[self.weight_dtype]

    @property
    def range(self) -> tuple[float, float]:
        """Least and largest number."""
        return self.format.range(self.symmetric)

    def refuses(self, columns: int) -> str | None:
        """Why a weight with this many inputs cannot be stored."""
        unit = PER_WORD if self.group is None else self.group
        return f"{columns} inputs, not a multiple of {unit}" if columns % unit else None

    def rounding(self, activations: str, calibrated: bool = False) -> "Scheme | str":
        """The same with activations rounded so, or why they cannot be. calibrated: what they need is fixed."""
        kind = weight_dtype_of(activations)
        if (self.weight_dtype, self.group, self.symmetric) != (kind, None, True):
            return f"activations={activations!r} needs a weight of {Scheme(kind)}; it is {self}"
        if is_static(activations) and not calibrated:
            return (
                f"activations={activations!r} needs what calibration fixes (its {FIXED[activations]}), and it has none"
            )
        return replace(self, activations=activations)

    def __str__(self) -> str:
        where = "by row" if self.group is None else f"by {self.group} columns"
        rounded = "" if self.activations is None else f", activations {self.activations} beyond {MOST_ROWS} rows"
        more = ("" if self.symmetric else ", asymmetric") + (", act-order" if self.ordered else "")
        return f"{self.weight_dtype} {where}{more}{rounded}"
