"""The stages between a model as it came and a fast one. Each looks when it is asked, and changes nothing."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from accel.patching.context import Context
from accel.patching.patch import Change


@dataclass(frozen=True)
class Row:
    """One line of the report: what became of a site."""

    path: str
    rule: str
    status: str
    reason: str


@dataclass
class StageReport:
    """What a stage has for the report. weights: what was quantized, see `Report.weights`. warnings: what was asked for
    and cannot be. prequantized: some layers came quantized by another library.
    """

    rows: list[Row] = field(default_factory=list)
    weights: list[dict] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    prequantized: bool = False


@dataclass(frozen=True)
class StageResult:
    """What a stage found. patches: applied before the next stage looks. report: asked once all stages' are."""

    patches: tuple[Change, ...] = ()
    report: Callable[[], StageReport] = StageReport


Stage = Callable[[Any, Context], StageResult]  # (what is optimized, what rules may use); raises what `optimize` raises
