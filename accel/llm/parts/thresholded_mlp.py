"""An MLP of which only the largest gates count, as Gemma 3n's: down(act(relu(gate - cut)) * up).

cut: mean + m * deviation of a token's gates, m the quantile of a normal distribution that a number of the module names.
Stock makes m on the host at each call, which no CUDA graph can hold.
"""

from collections.abc import Iterator
from functools import partial
from itertools import permutations
from typing import Any

import torch
from accel_kernels.norm.norm import ACTIVATIONS
from torch import nn

from accel.llm.parts.activation import activation_name
from accel.llm.parts.part import BoundLinear, NormedInput
from accel.patching.fast_forward import FastForward
from accel.patching.guard import Parts
from accel.patching.probe import example
from accel.patching.rule import Context, Match, Site, Skip
from accel.patching.structure import meta_weights

LARGE = 30.0  # times ordinary inputs
PROBED = 3  # tokens


class ThresholdedMlpForward(FastForward):
    """names of its linears: gate, up, down; share: the name of the number of gates that do not count."""

    linears: tuple[str, ...]
    activation: str
    share: str

    def parts(self) -> Parts:
        acts = [one for name, one in self.module.named_children() if name not in self.linears]
        return Parts((self.module, *acts))

    def unfit(self, *args: Any, **kwargs: Any) -> str | None:
        given = (*args, *kwargs.values())
        return None if len(given) == 1 and type(given[0]) is torch.Tensor else "something else than one tensor"

    def fast(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        x = NormedInput(next(iter((*args, *kwargs.values()))))
        gate, up, down = (BoundLinear(self.module.get_submodule(name)) for name in self.linears)
        y = gate(self.kernels, x)
        share = torch.tensor(getattr(self.module, self.share), dtype=torch.float32, device="cpu")
        m = float(torch.special.ndtri(share).to(y.dtype))
        cut = y.mean(-1, keepdim=True) + y.std(-1, keepdim=True, unbiased=False) * m
        acted = ACTIVATIONS[self.activation](torch.relu(y - cut))
        return down(self.kernels, NormedInput(acted * up(self.kernels, x)))


def match_thresholded_mlp(site: Site, context: Context) -> Match | Skip | None:
    """A module of three linears, an activation and a share between 0 and 1, told by running it."""
    module = site.module
    if not isinstance(module, nn.Module) or len(module._modules) != 4 or module._parameters:
        return None
    shares = [name for name, value in vars(module).items() if type(value) is float and 0 < value < 1]
    if not shares or meta_weights(module):
        return None
    for linears, activation, share in _formulas(module, shares):
        held = {"linears": linears, "activation": activation, "share": share}
        forward = ThresholdedMlpForward(module, site.path, context.kernels, context.log, **held)
        inputs = {size: partial(_scaled, module, linears[0], size) for size in (1.0, LARGE)}
        key = linears, share
        found = [context.probe.disagreement(module, forward.fast, x, variant=(*key, n)) for n, x in inputs.items()]
        if found == [None, None]:
            return Match(forward)
    return None


def _formulas(module: nn.Module, shares: list[str]) -> Iterator[tuple[tuple[str, ...], str, str]]:
    linears = {name: child.weight.shape for name, child in module.named_children() if type(child) is nn.Linear}
    others = [child for child in module.children() if type(child) is not nn.Linear]
    name = activation_name(others[0]) if len(others) == 1 and not list(others[0].parameters()) else None
    if len(linears) != 3 or name is None:
        return
    for share in shares:
        for order in permutations(linears):
            gate, up, down = (linears[one] for one in order)
            if gate == up == down[::-1]:
                yield order, name, share


def _scaled(module: nn.Module, linear: str, size: float) -> tuple[torch.Tensor]:
    """Tokens for a linear of the module, so many times as large as ordinary ones."""
    found = module.get_submodule(linear)
    assert isinstance(found, nn.Linear)
    return (example(module, PROBED, found.in_features) * size,)
