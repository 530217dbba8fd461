"""What becomes of a class that is tried at a tiny size, and when an answer is wrong."""

import re
from typing import Any

import torch

WHOLE, PART, STOCK, WRONG, NOT_BUILT, ENDED = OUTCOMES = ("whole", "part", "stock", "wrong", "not built", "ended")
MEANING = {
    WHOLE: "every layer is fused, or each attention inside of its own code, and the model's own forward runs them",
    PART: "some layers are fused, between others that run stock; or around attention that does",
    STOCK: "no layer is fused; norms and experts may be",
    WRONG: "it gives other tokens or hidden states than stock, or raises where stock does not",
    NOT_BUILT: "no tiny configuration of the class was found that runs",
    ENDED: "the process took too long, or died",
}
FAR = 1e-3  # of the largest logit: further from stock in float32 is no rounding


def wrong_answer(stock: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """How an optimized model's answers differ from stock's; None where they do not, or stock has none."""
    for name, right in stock.items():
        got = ours[name]
        if isinstance(right, str):
            continue
        if isinstance(got, str):
            return f"{name}: {got}"
        if right.is_floating_point():
            far = ((got - right).abs().max() / right.abs().max()).item()
            if not far <= FAR:
                return f"{name}: {far:.1e} of the largest number from stock's"
        elif not torch.equal(right, got):
            return f"{name}: {right.tolist()} stock, {got.tolist()} optimized"
    return None


def generalized(reason: str) -> str:
    """A reason without the layer it is told of, and without measurements, so that equal ones are counted as one."""
    named = re.sub(r"^[a-z_]\w*(\.\w+)*\.\d+(\.\w+)*: |^layer \d+ ", "", reason)
    return re.sub(r"\d+(\.\d+)?e[+-]\d+", "#", named)
