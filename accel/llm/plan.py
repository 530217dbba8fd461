"""The plan of a language model: what every model's is, and its weights quantised before anything is bound to them."""

from torch import nn

from accel.llm.family import QUANTISATION, RULES
from accel.llm.quant.quantisation import RULE
from accel.plan import Context, Plan, Row


class LanguagePlan(Plan):
    """Weights are quantised while planning, once the layers are understood: what is bound and tried is what will run.

    They are the first patch, taken back last. Where planning fails nothing stays quantised.
    """

    def __init__(self, root: nn.Module, context: Context):
        try:
            super().__init__(root, RULES, context)
        except BaseException:
            if QUANTISATION in context.shared:
                context.shared[QUANTISATION].swap.undo()
            raise
        quantisation = context.shared.get(QUANTISATION)
        if quantisation is not None:
            self.patches.insert(0, quantisation.swap)
            self.rows += [Row(path, RULE, status, reason) for path, status, reason in quantisation.rows]
            self.weights = quantisation.records
