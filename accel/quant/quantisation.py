"""The weights of one model quantised, and what there is to tell about it."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from accel_kernels import Quantised
from torch import nn

from accel.options import Options
from accel.patch import Patch
from accel.quant.module import QuantisedLinear
from accel.quant.rounding import quantise, sqnr_db
from accel.quant.scheme import Scheme
from accel.quant.swap import Swap

RULE = "weights"  # what the report calls it


class Quantisation:
    """rows: (path, status, reason) of every site. records: of those quantised, see `Report.weights`.

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
        self.skip(skipped)
        self.swap = Swap(model, options.keep_original, guard)

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
                raise ValueError(f"strict=True: {path} ({RULE}): {reason}")
            self.rows.append((path, "skipped", reason))

    def turned(self, module: nn.Module) -> bool:
        """Whether it holds its weight (in, out)."""
        return False

    def _quantised(self, path: str, module: nn.Module) -> QuantisedLinear:
        turned = self.turned(module)
        weight = module.weight.t() if turned else module.weight
        try:
            quantised = quantise(weight, self.scheme)
        except ValueError as error:
            raise ValueError(f"weights={self.options.weights!r}: {path}: {error}") from None
        self._record(path, weight, quantised)
        return QuantisedLinear(quantised, module.bias, weight.dtype, self.scheme, turned)

    def _record(self, path: str, weight: torch.Tensor, quantised: Quantised) -> None:
        note = "" if self.options.keep_original else "; not reversible, its original is not kept"
        self.records.append(
            {
                "path": path,
                "scheme": str(self.scheme),
                "sqnr_db": sqnr_db(weight, quantised),
                "bytes_before": weight.nbytes,
                "bytes_after": quantised.nbytes,
                "reversible": self.options.keep_original,
            }
        )
        self.rows.append((path, "patched", str(self.scheme) + note))
