"""A tiny diffusion transformer, optimized, beside an unpatched copy: both go through the same changes and calls."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import accel
from accel.diffusion.dit.executable import Executable
from support.compatibility.diffusers_calls import inputs
from support.compatibility.tiny_diffusers_models import build

FLUX, SD3, WAN = "FluxTransformer2DModel", "SD3Transformer2DModel", "WanTransformer3DModel"
ROUNDING = {FLUX: 0.0, SD3: 0.0, WAN: 1e-6}  # of the largest output: a product and a sum may be rounded once


class TransformerPair:
    """plans: how many ran so far. call: changes of the inputs that last."""

    def __init__(self, name: str, monkeypatch):
        self.name, self.plans = name, 0
        self.ours = build(name)
        self.stock, self.inputs = copy.deepcopy(self.ours), inputs(self.ours)
        accel.optimize(self.ours, cpu="fuse")
        run = Executable.__call__

        def counted(executable, *args):
            self.plans += 1
            return run(executable, *args)

        monkeypatch.setattr(Executable, "__call__", counted)
        self.blocks = sum(row[1:3] == ("diffusion transformer block", "patched") for row in self.report().sites)
        assert self.blocks

    def report(self):
        return accel.report(self.ours)

    def change(self, function: Callable[[nn.Module], Any]) -> None:
        for model in (self.ours, self.stock):
            torch.manual_seed(5)
            function(model)

    def agree(self, fast: bool | None = True, said: str = "", blocks: int | None = None, **call) -> torch.Tensor:
        """What both give. fast: all blocks (or so many) ran from their plans; else stock, for the reason said; None for
        either.
        """
        ran, counts = self.plans, Counter({row[:2]: row[2] for row in self.report().fallbacks})
        given = {name: value for name, value in (self.inputs | call).items() if value is not None}
        with torch.set_grad_enabled(torch.is_grad_enabled() and said.startswith("gradients")):
            wanted, got = (first(model(**given)) for model in (self.stock, self.ours))
        alike(got, wanted, ROUNDING[self.name])
        new = Counter({row[:2]: row[2] for row in self.report().fallbacks}) - counts
        if fast is None:
            return got
        if fast:
            assert self.plans - ran == (self.blocks if blocks is None else blocks) and not new, (self.plans - ran, new)
        else:
            assert self.plans == ran and sum(new.values()) >= self.blocks, (self.plans - ran, new)
            assert all(said in reason for _, reason in new), new
        return got

    def block(self, model: nn.Module) -> nn.Module:
        return (model.blocks if self.name == WAN else model.transformer_blocks)[0]


def alike(got: torch.Tensor, wanted: torch.Tensor, rounding: float = 0.0) -> None:
    assert got.shape == wanted.shape and got.dtype == wanted.dtype and bool(wanted.isfinite().all())
    off = float((got - wanted).abs().max() / wanted.abs().max()) if wanted.numel() else 0.0
    assert off <= rounding, off


def first(output) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output.sample
