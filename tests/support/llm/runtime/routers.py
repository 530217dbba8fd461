"""The fused routers of a model, and what of theirs is compared with stock's."""

import torch
from torch import nn

from accel.llm.analysis.router import RouterFormula
from accel.llm.runtime.router import RouterForward


def routers(model: nn.Module) -> dict[str, RouterForward]:
    found = {path: vars(module).get("forward") for path, module in model.named_modules()}
    return {path: forward for path, forward in found.items() if type(forward) is RouterForward}


def now(forward: RouterForward) -> RouterFormula:
    """For tokens of its weight's dtype."""
    found = forward.formula(next(forward.module.parameters())[:0])
    assert found is not None
    return found


def assert_routed_alike(found: tuple, wanted: tuple, least: float) -> None:
    """The same form; the same choices, in any order, of all tokens in float32 and of so many in 16 bits, where several
    have equal scores; of these tokens shares and logits that differ by the order of sums in float32, else in the last
    digit but one.
    """
    assert type(found) is type(wanted) and len(found) == len(wanted)
    for ours, stock in zip(found, wanted, strict=True):
        assert ours.dtype == stock.dtype and ours.shape == stock.shape and ours.device == stock.device
    mine, theirs = (next(one for one in many if one.dtype == torch.int64) for many in (found, wanted))
    same = mine.sort().values.eq(theirs.sort().values).all(1)
    assert same.float().mean() >= least
    for ours, stock in zip(found, wanted, strict=True):
        if ours.is_floating_point():
            rtol = max(1e-5, 4 * torch.finfo(stock.dtype).eps)
            left, right = (one[same].sort().values.float() for one in (ours, stock))
            torch.testing.assert_close(left, right, rtol=rtol, atol=rtol)
