"""The linears of a language model quantised, where it still runs with them."""

from torch import nn

from accel.llm.linear import weights
from accel.llm.quant.linears import heads, linears
from accel.llm.quant.saving import guard
from accel.llm.recorder import example_ids, resting, side_effects
from accel.options import Options
from accel.quant import quantisation
from accel.quant.module import dequantising
from accel.quant.scheme import Scheme

TOKENS = 3


class Quantisation(quantisation.Quantisation):
    """Of the linears inside the decoder layers, and of the output head where the options name it; the model is then
    saved in the layout of compressed-tensors.
    """

    def __init__(self, model: nn.Module, options: Options):
        self.head_scheme = Scheme.of_head(options.weights)
        self.heads, left = heads(model, self.head_scheme)
        chosen, skipped = linears(model, Scheme.parse(options.weights))
        super().__init__(model, options, chosen | self.heads, skipped | left, guard(model))

    def run(self, model: nn.Module | None = None) -> None:
        """model: to be called then, and left as it was where it does not run any more: some write into their weights.

        Raises ValueError for NaN or Inf in a weight, naming the module.
        """
        super().run()
        reason = None if model is None or not self.chosen else _failure(model)
        if reason is not None:
            self.swap.undo()
            self.records.clear()
            self.rows = [row for row in self.rows if row[1] == "skipped"]
            left = dict.fromkeys(self.chosen, f"the model does not run with quantised linears: {reason}")
            self.skip(left)
            self.warn(left)

    def scheme_of(self, path: str) -> Scheme:
        return self.head_scheme if path in self.heads else self.scheme

    def turned(self, module: nn.Module) -> bool:
        return weights(module).turned


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
