"""The plan of a language model: what every model's is, and its weights quantised before anything is bound to them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from accel.llm.family import QUANTISATION, RULES
from accel.llm.pace import pace
from accel.llm.quant.arrival import Arrival
from accel.options import STATIC, calibrate
from accel.plan import Context, Plan, Row
from accel.quant.activations import kind_of
from accel.quant.quantisation import RULE
from accel.quant.row_rounding import RULE as ROUNDING
from accel.quant.row_rounding import Rounding, fixed, rounding


class LanguagePlan(Plan):
    """Weights are quantised while planning, once the layers are understood: what is bound and tried is what will run.
    Quantised linears that the model arrived with are repacked before.

    They are the first patches, taken back last. Where planning fails nothing stays quantised, nor repacked.
    """

    def __init__(self, root: nn.Module, context: Context):
        options = context.options
        self.arrival = arrival = Arrival(root, options.activations)
        self.rounding = Rounding(options)
        if options.strict and (left := [row for row in arrival.rows if row[1] == "skipped"]):
            raise ValueError(f"strict=True: {left[0][0]} ({RULE}): {left[0][2]}")
        try:
            with torch.inference_mode(False), torch.no_grad():
                arrival.put()
            self.rounding.find(root, set(root.get_output_embeddings().modules()))  # of few rows, but for all logits
            super().__init__(root, RULES, context)
            if options.activations is not None and options.weights is None and not rounding(root):
                if options.activations in STATIC:
                    raise ValueError(
                        f"activations={options.activations!r}: no linear layer of the model holds what it "
                        f"needs; {calibrate(options.activations)}"
                    )
                raise ValueError(
                    f"activations={options.activations!r} needs weights of the same kind, and the model holds none: "
                    f"give weights={kind_of(options.activations)!r} too"
                )
        except BaseException:
            if QUANTISATION in context.shared:
                context.shared[QUANTISATION].swap.undo()
            self.rounding.undo()
            arrival.undo()
            raise
        quantisation = context.shared.get(QUANTISATION)
        if quantisation is not None:
            self.rounding.add(quantised for _, quantised in quantisation.swap.pairs)
        if self.rounding.pairs:
            self.patches.insert(0, self.rounding)
        self.rows += [Row(path, ROUNDING, status, reason) for path, status, reason in self.rounding.rows]
        self.rows += [Row("", ROUNDING, "patched", told) for told in fixed(root)]
        if quantisation is not None:
            if quantisation.records:
                self.patches.insert(0, quantisation.swap)
            self.rows += [Row(path, RULE, status, reason) for path, status, reason in quantisation.rows]
            self.weights, self.warnings = quantisation.records, quantisation.warnings
        self.arrived = bool(arrival.found)
        if self.arrived:
            self.patches.insert(0, arrival)
        self.rows += [Row(path, RULE, status, reason) for path, status, reason in arrival.rows]

    def pace(self) -> tuple[float, float]:
        return pace(self.root, self.ledger)

    @contextmanager
    def as_arrived(self) -> Iterator[None]:
        """As `unfused`, but what was quantised here has its original weights. Linears that arrived quantised stay ours:
        in a call of their own, compressed-tensors would dequantise them for good.
        """
        with self._only(Arrival):
            yield
