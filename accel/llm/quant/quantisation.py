"""The weights of one model quantised, and what there is to tell about it."""

import torch
from accel_kernels import Quantised
from torch import nn

from accel.llm.linear import weights
from accel.llm.quant.linears import linears
from accel.llm.quant.saving import guard
from accel.llm.recorder import example_ids, resting, side_effects
from accel.options import Options
from accel.quant.module import QuantisedLinear, dequantising
from accel.quant.rounding import quantise, sqnr_db
from accel.quant.scheme import Scheme
from accel.quant.swap import Swap

RULE = "weights"  # what the report calls it
TOKENS = 3


class Quantisation:
    """rows: (path, status, reason) of every site. records: of those quantised, see `Report.weights`.

    Raises ValueError for a site that is left alone where `strict` forbids it.
    """

    def __init__(self, model: nn.Module, options: Options):
        self.options, self.scheme = options, Scheme.parse(options.weights)
        self.chosen, skipped = linears(model, self.scheme)
        self.rows: list[tuple[str, str, str]] = []
        self.records: list[dict] = []
        self._skip(skipped)
        self.swap = Swap(model, options.keep_original, guard(model))

    def run(self, model: nn.Module | None = None) -> None:
        """Exchanges the linears. Raises ValueError for NaN or Inf in a weight, naming the module.

        model: to be called then, and left as it was where it does not run any more: some write into their weights.
        """
        if not self.chosen:
            return
        paths = {id(module): path for path, module in self.chosen.items()}
        with torch.inference_mode(False), torch.no_grad():
            self.swap.put(self.chosen.values(), lambda module: self._quantised(paths[id(module)], module))
        reason = None if model is None else _failure(model)
        if reason is not None:
            self.swap.undo()
            self.records.clear()
            self.rows = [row for row in self.rows if row[1] == "skipped"]
            self._skip(dict.fromkeys(self.chosen, f"the model does not run with quantised linears: {reason}"))

    def _skip(self, reasons: dict[str, str]) -> None:
        for path, reason in reasons.items():
            if self.options.strict:
                raise ValueError(f"strict=True: {path} ({RULE}): {reason}")
            self.rows.append((path, "skipped", reason))

    def _quantised(self, path: str, module: nn.Module) -> QuantisedLinear:
        turned = weights(module).turned
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


def _failure(model: nn.Module) -> str | None:
    """The error of calling the model on a few tokens; None where there is none, or calling it would be noticed."""
    if side_effects(model) is not None:
        return None
    try:
        with resting(model), dequantising(model):
            type(model).forward(model, input_ids=example_ids(model, TOKENS))
    except Exception as error:  # whatever a forward may raise
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None
