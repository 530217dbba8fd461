"""What quantised models are compared with: stock code over the same weights, rounded beforehand."""

import copy

import torch
from families import padded

import accel


def held_by(model) -> list:
    """The model's quantised linears."""
    from accel.llm.quant.module import QuantisedLinear

    return [module for module in model.modules() if isinstance(module, QuantisedLinear)]


def rounded(stock, ours, dtype: torch.dtype | None = None):
    """A copy of stock, in dtype where one is given, whose linears have the weights that ours hold."""
    twin = copy.deepcopy(stock).to(dtype or stock.dtype)
    for row in accel.report(ours).weights:
        theirs, held = twin.get_submodule(row["path"]), ours.get_submodule(row["path"]).quantised
        held = held.dequantised(theirs.weight.dtype)
        theirs.weight.data = (held.t() if type(theirs).__name__ == "Conv1D" else held).contiguous()
    return twin


def logits(model) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)  # of dropout
    ids, mask = padded()
    return {"logits": model(input_ids=ids, attention_mask=mask).logits[mask.bool()]}
