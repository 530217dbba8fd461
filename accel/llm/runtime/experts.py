"""The experts of a mixture: for the few tokens of a step, one pass over what the router chose instead of a loop."""

import inspect
from typing import Any

import torch
from torch import nn

from accel.llm.analysis.mlp import activation_name
from accel.llm.recording.implementation import foreign_experts
from accel.patching.context import Context
from accel.patching.fast_forward import FastForward, Kernels
from accel.patching.ledger import Ledger
from accel.patching.probe import example
from accel.patching.relied import Parts, changed_since
from accel.patching.rule import Match, Skip
from accel.patching.site import Site
from accel.patching.structure import meta_weights

PROBED = 3  # tokens


class ExpertsForward(FastForward):
    """Experts stacked in two parameters: gates and ups (E, 2 I, H), downs (E, H, I), the names in this order."""

    def __init__(
        self, module: nn.Module, path: str, kernels: Kernels, ledger: Ledger, names: tuple[str, str], activation: str
    ) -> None:
        super().__init__(module, path, kernels, ledger)
        self.names, self.activation = names, activation
        self.parameters = tuple(module._parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            or self.ledger.rests(args, kwargs)
            or self.mode() is not None
            or self.unfit(*args, **kwargs) is not None
        ):
            return self.stock(*args, **kwargs)  # a prompt, or what the calls around it are asked about
        return self.fast(*args, **kwargs)

    def unfit(self, x: Any, index: Any, weights: Any, *more: Any, **others: Any) -> str | None:
        if more or others:
            return "other arguments"
        config = vars(self.module).get("config")
        if config is not None and foreign_experts([config]):
            return "an implementation of the user's"
        if tuple(self.module._parameters) != self.parameters:
            return changed_since("which weights it has")
        return self.kernels.experts.supports(x, index, weights, *self._stacks(), self.activation)

    def parts(self) -> Parts:
        return Parts((self.module, *self.module.children()))

    def remember(self) -> None:
        """Any class will do, as each token is computed by itself."""
        super().remember()

    def fast(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.kernels.experts(x, index, weights, *self._stacks(), self.activation)

    def _stacks(self) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(self.module._parameters[name] for name in self.names)


def match_experts(site: Site, context: Context) -> Match | Skip | None:
    """A module with two stacks of matrices that fit each other, called with tokens, choices and shares."""
    module = site.module
    own = vars(module)["_parameters"]
    stacks = [name for name, value in own.items() if value is not None and value.dim() == 3]
    arguments = list(inspect.signature(type(module).forward).parameters)[1:]
    acts = [child for child in module.children() if not list(child.parameters())]
    if len(own) != 2 or len(stacks) != 2 or len(arguments) != 3 or len(acts) != 1:
        return None
    (experts, inner, hidden), down = own[stacks[0]].shape, own[stacks[1]].shape
    name = activation_name(acts[0])
    if down != (experts, hidden, inner // 2) or name is None:
        return Skip("experts stored or activated in a way of their own")
    if meta_weights(module):
        return Skip("weights not loaded")
    forward = ExpertsForward(module, site.path, context.kernels, context.ledger, tuple(stacks), name)
    plain = ExpertsForward(module, site.path, context.kernels, context.ledger, tuple(stacks), name)
    x = example(module, PROBED, hidden)
    index = torch.arange(2 * PROBED, device=x.device).view(PROBED, 2) % experts
    shares = torch.rand(PROBED, 2, generator=torch.Generator().manual_seed(0)).to(x)
    reason = context.probe.disagreement(module, plain.fast, (x, index, shares))
    return Match(forward) if reason is None else Skip(reason)
