"""The linears and experts of a language model quantized, where it still runs with them."""

from transformers import PreTrainedModel

from accel.errors import reason_of
from accel.llm.ptq.calibration.linears import heads, linears
from accel.llm.ptq.experts import Find, experts
from accel.llm.ptq.formats.saving import guard
from accel.llm.recording.recorder import example_ids, model_side_effects, resting
from accel.llm.runtime.linear import holds_transposed
from accel.options import Options
from accel.quantization import model as quantization
from accel.quantization.linears import Dense
from accel.quantization.module import dequantizing
from accel.quantization.scheme import Scheme

TOKENS = 3


class LanguageModelQuantization(quantization.Quantization):
    """Of the linears and experts inside the decoder layers, and of the output head where the options name it; the model
    is then saved in the layout of compressed-tensors.

    find: see `experts`. tried: the model is called then, and left as it was where it does not run any more: some write
    into their weights.
    """

    def __init__(self, model: PreTrainedModel, weights: str, options: Options, find: Find, tried: bool = False):
        self.tried = model if tried else None
        self.head_scheme = Scheme.of_head(weights)
        self.heads, left = heads(model, self.head_scheme)
        chosen, skipped = linears(model, Scheme.parse(weights))
        mixtures, others = experts(model, Scheme.parse(weights), find)
        skipped = {path: reason for path, reason in (skipped | others | left).items() if path not in mixtures}
        super().__init__(model, weights, options, chosen | self.heads, skipped, guard(model), mixtures)

    def run(self) -> None:
        super().run()
        reason = None if self.tried is None or not self.modules else _failure(self.tried)
        if reason is not None:
            self.swap.drop()
            self.records.clear()
            self.rows = [row for row in self.rows if row[1] == "skipped"]
            left = dict.fromkeys(self.modules, f"the model does not run with quantized linears: {reason}")
            self.skip(left)
            self.warn(left)

    def scheme_of(self, path: str) -> Scheme:
        return self.scheme if self.head_scheme is None or path not in self.heads else self.head_scheme

    def transposed(self, module: Dense) -> bool:
        return holds_transposed(module)


def _failure(model: PreTrainedModel) -> str | None:
    """The error of calling the model on a few tokens; None where there is none, or calling it would be noticed."""
    if model_side_effects(model) is not None:
        return None
    try:
        with resting(model), dequantizing(model):
            type(model).forward(model, input_ids=example_ids(model, TOKENS))
    except Exception as error:  # whatever a forward may raise
        return reason_of(error)
    return None
