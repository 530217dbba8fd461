"""Activations rounded to 8 bits in the quantized linears of one model, for as long as a patch is applied."""

from collections.abc import Callable, Collection
from dataclasses import replace

from torch import nn

from accel.errors import PatchConflict, SkippedSite
from accel.options import Options
from accel.quantization.activations import COLUMNS, FIXED, SCALE
from accel.quantization.module import QuantizedLinear
from accel.quantization.patch import QuantizedModulePatch
from accel.quantization.scheme import Scheme

RULE = "activations"  # what the report calls it


class Rounding:
    """A patch that changes the schemes of quantized linears. `find` collects those of a model.

    made: the patch that inserts linears whose schemes round already; it is applied before this one. rows: (path,
    status, reason) of each linear. Raises ValueError for one that cannot round, with `strict`.
    """

    def __init__(self, options: Options, made: QuantizedModulePatch | None = None):
        self.options, self.made = options, made
        self.pairs: list[tuple[QuantizedLinear, Scheme, Scheme]] = []  # with the scheme before, and now
        self.rows: list[tuple[str, str, str]] = []

    def find(
        self,
        model: nn.Module,
        left: Collection[nn.Module] = (),
        refuses: Callable[[QuantizedLinear], str | None] = lambda module: None,
    ) -> None:
        """Looks at all linears except those in `left`. refuses: why one must not round, though its scheme could."""
        if self.options.activations is None:
            return
        for path, module in model.named_modules():
            if type(module) is not QuantizedLinear or module in left:
                continue
            calibrated = FIXED.get(self.options.activations) in module.values
            wanted = refuses(module) or module.scheme.rounding(self.options.activations, calibrated)
            if isinstance(wanted, str):
                if self.options.strict:
                    raise SkippedSite(f"strict=True: {path} ({RULE}): {wanted}")
                self.rows.append((path, "skipped", wanted))
            elif wanted != module.scheme:
                self.pairs.append((module, module.scheme, wanted))
                self.rows.append((path, "patched", str(wanted)))

    def apply(self) -> None:
        if self.made is not None:
            linears = (quantized for _, quantized in self.made.pairs if isinstance(quantized, QuantizedLinear))
            made = [quantized for quantized in linears if quantized.scheme.activations is not None]
            self.pairs += [(one, replace(one.scheme, activations=None), one.scheme) for one in made]
            self.made = None
        for module, _, scheme in self.pairs:
            module.scheme = scheme

    def check(self) -> None:
        for module, _, scheme in self.pairs:
            if module.scheme != scheme:
                raise PatchConflict(f"the scheme of a linear was changed after accel.optimize, to {module.scheme}")

    def undo(self) -> None:
        for module, scheme, _ in self.pairs:
            module.scheme = scheme


def rounding_linears(model: nn.Module) -> list[QuantizedLinear]:
    """The quantized linears that round rows now."""
    return [module for module in model.modules() if type(module) is QuantizedLinear and module.activations is not None]


def calibration_notes(model: nn.Module) -> list[str]:
    """Sentences for the report about linears that round rows by what calibration fixed."""
    found = [(FIXED.get(module.activations), module.values) for module in rounding_linears(model)]
    scales = sorted(values[SCALE][0] for name, values in found if name == SCALE)
    counts = sorted(len(values[COLUMNS]) for name, values in found if name == COLUMNS)
    told = []
    if scales:
        told.append(f"{len(scales)} linear layers round by fixed scales, {scales[0]:.3g} to {scales[-1]:.3g}")
    if counts:
        told.append(f"{len(counts)} linear layers keep fixed columns in 16 bits, {counts[0]} to {counts[-1]} each")
    return told
