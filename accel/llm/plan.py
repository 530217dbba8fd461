"""The plan of a language model: what every model's is, and its weights quantised before anything is bound to them."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from accel.llm.family import QUANTISATION, RULES
from accel.llm.quant.module import dequantising
from accel.llm.quant.quantisation import RULE
from accel.llm.quant.swap import Swap
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
            if quantisation.records:
                self.patches.insert(0, quantisation.swap)
            self.rows += [Row(path, RULE, status, reason) for path, status, reason in quantisation.rows]
            self.weights = quantisation.records

    @contextmanager
    def unfused(self) -> Iterator[None]:
        """Inside, the model is stock but for its quantised linears, which multiply by torch's own products."""
        patches = [patch for patch in self.patches if not isinstance(patch, Swap)]
        for patch in patches:
            patch.check()
        try:
            for patch in reversed(patches):
                patch.undo()
            self.pool.clear()
            with dequantising(self.root):
                yield
        finally:
            for patch in patches:
                patch.apply()
