"""The weights of one model quantised, and what there is to tell about it."""

import torch
from accel_kernels import Quantised
from torch import nn

from accel.llm.linear import weights
from accel.llm.quant.linears import linears
from accel.llm.quant.module import QuantisedLinear
from accel.llm.quant.rounding import quantise, sqnr_db
from accel.llm.quant.scheme import Scheme
from accel.llm.quant.swap import Swap
from accel.options import Options

RULE = "weights"  # what the report calls it


class Quantisation:
    """rows: (path, status, reason) of every site. records: of those quantised, see `Report.weights`.

    Raises ValueError for a site that is left alone where `strict` forbids it.
    """

    def __init__(self, model: nn.Module, options: Options):
        self.options, self.scheme = options, Scheme.parse(options.weights)
        self.chosen, skipped = linears(model, self.scheme)
        for path, reason in skipped.items():
            if options.strict:
                raise ValueError(f"strict=True: {path} ({RULE}): {reason}")
        self.rows = [(path, "skipped", reason) for path, reason in skipped.items()]
        self.records: list[dict] = []
        self.swap = Swap(model, options.keep_original)

    def run(self) -> None:
        """Exchanges the linears. Raises ValueError for NaN or Inf in a weight, naming the module."""
        paths = {id(module): path for path, module in self.chosen.items()}
        with torch.inference_mode(False), torch.no_grad():
            self.swap.put(self.chosen.values(), lambda module: self._quantised(paths[id(module)], module))

    def _quantised(self, path: str, module: nn.Module) -> QuantisedLinear:
        weight = module.weight.t() if weights(module).turned else module.weight
        try:
            quantised = quantise(weight, self.scheme)
        except ValueError as error:
            raise ValueError(f"weights={self.options.weights!r}: {path}: {error}") from None
        self._record(path, weight, quantised)
        return QuantisedLinear(quantised, module.bias, weight.dtype, self.scheme)

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
