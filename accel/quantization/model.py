"""The weights of one model to be quantized, and what there is to tell about it."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from accel_kernels import Quantized
from torch import nn

from accel.errors import Refused, SkippedSite
from accel.options import Options
from accel.patching.patch import Change
from accel.quantization.linears import Dense, nothing
from accel.quantization.module import QuantizedLinear
from accel.quantization.patch import QuantizedLinearPatch, held_elsewhere
from accel.quantization.rounding import round_to_nearest, sqnr_db
from accel.quantization.scheme import Scheme

RULE = "weights"  # what the report calls it


class Quantization:
    """swap: the patch that does it, when it is applied. rows: (path, status, reason) of every site. records: of those
    quantized, see `Report.weights`. warnings: that nothing is quantized, where the model holds no weight of that scheme
    either.

    weights: a value of `Options.weights`. chosen: the linears by path; skipped: why others are not. guard: see
    `QuantizedLinearPatch`. Raises ValueError for a site that is left alone where `strict` forbids it.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: str,
        options: Options,
        chosen: Mapping[str, Dense],
        skipped: Mapping[str, str],
        guard: Change | None = None,
    ):
        self.options, self.weights = options, weights
        self.scheme = replace(Scheme.parse(weights), activations=options.activations)
        self.chosen = chosen
        self.rows: list[tuple[str, str, str]] = []
        self.records: list[dict] = []
        self.warnings: list[str] = []
        self.skip(skipped)
        if not chosen and not _holds(model, Scheme.parse(weights)):
            self.warn(skipped)
        self.swap = QuantizedLinearPatch(model, options.keep_original, guard, self.run)
        self.tied = held_elsewhere(model, chosen.values())

    def run(self) -> None:
        """What `swap` does first: exchanges the linears. Raises ValueError for NaN or Inf in one, naming the module."""
        if not self.chosen:
            return
        paths = {id(module): path for path, module in self.chosen.items()}
        with torch.inference_mode(False), torch.no_grad():
            self.swap.put(self.chosen.values(), lambda module: self._quantized(paths[id(module)], module))

    def skip(self, reasons: Mapping[str, str]) -> None:
        for path, reason in reasons.items():
            if self.options.strict:
                raise SkippedSite(f"strict=True: {path or 'the model'} ({RULE}): {reason}")
            self.rows.append((path, "skipped", reason))

    def warn(self, reasons: Mapping[str, str]) -> None:
        """Nothing is quantized, for these reasons."""
        told = nothing(self.weights, reasons)
        self.skip({"": told})
        self.warnings.append(told)

    def scheme_of(self, path: str) -> Scheme:
        return self.scheme

    def transposed(self, module: Dense) -> bool:
        """Whether it holds its weight (in, out)."""
        return False

    def _quantized(self, path: str, module: Dense) -> QuantizedLinear:
        transposed, scheme = self.transposed(module), self.scheme_of(path)
        weight = module.weight.t() if transposed else module.weight
        try:
            quantized = round_to_nearest(weight, scheme)
        except ValueError as error:
            raise Refused(f"weights={self.weights!r}: {path}: {error}") from None
        other, kept = self.tied.get(id(module.weight)), self.options.keep_original
        self.records.append(
            quantization_record(path, scheme, weight, quantized, other, sqnr_db(weight, quantized), kept)
        )
        notes = [str(scheme)]
        if other is not None:
            notes.append(f"{quantized.nbytes / 1e6:,.2f} MB more, since {other} keeps the weight that it shares")
        if not kept:
            notes.append("not reversible, its original is not kept")
        self.rows.append((path, "patched", "; ".join(notes)))
        return QuantizedLinear(quantized, module.bias, weight.dtype, scheme, transposed)


def _holds(model: nn.Module, scheme: Scheme) -> bool:
    """Whether some linears are of this scheme already."""
    held = (module.scheme for module in model.modules() if type(module) is QuantizedLinear)
    return any(replace(one, activations=None) == scheme for one in held)


def quantization_record(
    path: str,
    scheme: Scheme,
    weight: torch.Tensor,
    quantized: Quantized,
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
        "bytes_after": quantized.nbytes + (0 if other is None else weight.nbytes),
        "reversible": reversible,
    }
