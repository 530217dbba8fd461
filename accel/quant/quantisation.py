"""The weights of one model quantised, and what there is to tell about it."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from accel_kernels import Quantised
from torch import nn

from accel.failure import Refused
from accel.options import Options
from accel.patch import Patch
from accel.quant.linears import nothing
from accel.quant.module import QuantisedLinear
from accel.quant.rounding import quantise, sqnr_db
from accel.quant.scheme import Scheme
from accel.quant.swap import Swap, held_elsewhere

RULE = "weights"  # what the report calls it


class Quantisation:
    """rows: (path, status, reason) of every site. records: of those quantised, see `Report.weights`. warnings: that
    nothing is quantised, where the model holds no weight of that scheme either.

    chosen: the linears by path; skipped: why others are not. guard: see `Swap`. Raises ValueError for a site that is
    left alone where `strict` forbids it.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        chosen: Mapping[str, nn.Module],
        skipped: Mapping[str, str],
        guard: Patch | None = None,
    ):
        self.options = options
        self.scheme = replace(Scheme.parse(options.weights), activations=options.activations)
        self.chosen = chosen
        self.rows: list[tuple[str, str, str]] = []
        self.records: list[dict] = []
        self.warnings: list[str] = []
        self.skip(skipped)
        if not chosen and not _holds(model, Scheme.parse(options.weights)):
            self.warn(skipped)
        self.swap = Swap(model, options.keep_original, guard)
        self.tied = held_elsewhere(model, chosen.values())

    def run(self) -> None:
        """Exchanges the linears. Raises ValueError for NaN or Inf in a weight, naming the module."""
        if not self.chosen:
            return
        paths = {id(module): path for path, module in self.chosen.items()}
        with torch.inference_mode(False), torch.no_grad():
            self.swap.put(self.chosen.values(), lambda module: self._quantised(paths[id(module)], module))

    def skip(self, reasons: Mapping[str, str]) -> None:
        for path, reason in reasons.items():
            if self.options.strict:
                raise Refused(f"strict=True: {path or 'the model'} ({RULE}): {reason}")
            self.rows.append((path, "skipped", reason))

    def warn(self, reasons: Mapping[str, str]) -> None:
        """Nothing is quantised, for these reasons."""
        told = nothing(self.options.weights, reasons)
        self.skip({"": told})
        self.warnings.append(told)

    def scheme_of(self, path: str) -> Scheme:
        return self.scheme

    def turned(self, module: nn.Module) -> bool:
        """Whether it holds its weight (in, out)."""
        return False

    def _quantised(self, path: str, module: nn.Module) -> QuantisedLinear:
        turned, scheme = self.turned(module), self.scheme_of(path)
        weight = module.weight.t() if turned else module.weight
        try:
            quantised = quantise(weight, scheme)
        except ValueError as error:
            raise Refused(f"weights={self.options.weights!r}: {path}: {error}") from None
        other, kept = self.tied.get(id(module.weight)), self.options.keep_original
        self.records.append(record(path, scheme, weight, quantised, other, sqnr_db(weight, quantised), kept))
        notes = [str(scheme)]
        if other is not None:
            notes.append(f"{quantised.nbytes / 1e6:,.2f} MB more, since {other} keeps the weight that it shares")
        if not kept:
            notes.append("not reversible, its original is not kept")
        self.rows.append((path, "patched", "; ".join(notes)))
        return QuantisedLinear(quantised, module.bias, weight.dtype, scheme, turned)


def _holds(model: nn.Module, scheme: Scheme) -> bool:
    """Whether some linears are of this scheme already."""
    held = (module.scheme for module in model.modules() if type(module) is QuantisedLinear)
    return any(replace(one, activations=None) == scheme for one in held)


def record(
    path: str,
    scheme: Scheme,
    weight: torch.Tensor,
    quantised: Quantised,
    other: str | None,
    ratio: float | None,
    reversible: bool,
) -> dict:
    """A row of `Report.weights`. other: who else holds the weight, which then takes its memory as before."""
    return {
        "path": path,
        "scheme": str(scheme),
        "sqnr_db": ratio,
        "bytes_before": weight.nbytes,
        "bytes_after": quantised.nbytes + (0 if other is None else weight.nbytes),
        "reversible": reversible,
    }
