"""A mixture whose shares multiply what experts are given, not what they give, as Llama 4's: stock code has all experts
compute all tokens, most of them times zero.

y = sum over the chosen e of expert_e(sigmoid(logit_e) x), and perhaps what an expert that all share makes of x.
"""

from collections.abc import Iterator
from functools import partial
from itertools import permutations, product
from typing import Any

import torch
from accel_kernels.moe.route import Routing
from torch import nn

from accel.comparison import rows_agree
from accel.llm.moe.experts import BEYOND, ORDINARY, SEEN, ExpertFormula, expert_formulas, numbers
from accel.llm.parts.activation import activation_name
from accel.llm.parts.linear import product_for
from accel.llm.parts.part import NormedInput
from accel.llm.runtime.mlp import BoundMlp, MlpSpec
from accel.patching.fallback_log import FallbackLog
from accel.patching.fast_forward import FastForward, Kernels
from accel.patching.guard import Parts, changed_since, plain_settings
from accel.patching.probe import example
from accel.patching.rule import Context, Match, Site, Skip, foreign_forward
from accel.patching.structure import foreign_hooks, hooked, meta_weights, side_effects, tampered
from accel.quantization.experts import stock_parameters
from accel.quantization.module import QuantizedLinear
from accel.tolerances import SHARES, bound

TOKENS = 4  # of a probe
SEEDS = (0, 1)  # one of which has no logits that are equal once rounded


class ScaledInputsForward(FastForward):
    """Called with tokens, (..., H); gives (T, H) and logits, (T, E). names: of children: of the router, which is called
    where something hangs on it; of that with the stacks; of an MLP, or "".
    """

    def __init__(
        self,
        module: nn.Module,
        path: str,
        kernels: Kernels,
        log: FallbackLog,
        names: tuple[str, str, str],
        formula: ExpertFormula,
        mlp: MlpSpec | None,
        chosen: int,
    ) -> None:
        super().__init__(module, path, kernels, log)
        self.children, self.formula, self.mlp, self.chosen = names, formula, mlp, chosen
        self.routing = plain_settings(getattr(module, names[0]))

    def parts(self) -> Parts:
        acts = [one for one in self.module.modules() if not one._modules and not one._parameters]
        router, stacks = (getattr(self.module, name) for name in self.children[:2])
        kind: type[nn.Module] = type(router)
        unhooked = kind.__new__(kind)  # hooks of the library's on the router are no reason
        nn.Module.__init__(unhooked)
        shared = () if self.mlp is None else (getattr(self.module, self.children[2]),)
        return Parts((self.module, stacks, *shared, *acts), (unhooked,))

    def unfit(self, *args: Any, **kwargs: Any) -> str | None:
        given, router = (*args, *kwargs.values()), getattr(self.module, self.children[0])
        if plain_settings(router) != self.routing:
            return changed_since("its router")
        # Its shares are computed again here, from its logits alone.
        if (reason := "forward hooks" if foreign_hooks(router) else tampered(router, known_hooks=True)) is not None:
            return f"its router has {reason}"
        return None if len(given) == 1 and type(given[0]) is torch.Tensor else "something else than one tensor"

    def fast(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given: torch.Tensor = next(iter((*args, *kwargs.values())))
        x = given.reshape(-1, given.shape[-1]).contiguous()
        router, stacks = (getattr(self.module, name) for name in self.children[:2])
        logits = router(x)[1] if hooked(router) else product_for(self.kernels, x)(x, router.weight, router.bias)
        index, shares = self.kernels.route(logits, Routing(self.chosen, "sigmoid"))
        scaled = (x.unsqueeze(1) * shares.unsqueeze(2)).flatten(0, 1)
        weights = self.formula.weights(stacks)
        ones = torch.ones_like(shares).reshape(-1, 1)
        y = self.kernels.experts(scaled, index.reshape(-1, 1), ones, weights).view(len(x), -1, x.shape[-1])
        y = y.squeeze(1) if self.chosen == 1 else y.sum(1)
        if self.mlp is not None:
            shared = BoundMlp(self.kernels, getattr(self.module, self.children[2]), self.mlp)
            y = shared(self.kernels, NormedInput(x), residual=y)
        return y, logits


def match_scaled_inputs(site: Site, context: Context) -> Match | Skip | None:
    """A module of a linear that chooses, two stacks of matrices that are given one tensor, and perhaps an MLP."""
    module = site.module
    names = _children(module)
    if names is None or meta_weights(module):
        return None
    if (reason := foreign_forward(module) or side_effects(module)) is not None:
        return Skip(reason)
    router, stacks = (getattr(module, name) for name in names[:2])
    whole = {value for one in (router, module) for value in vars(one).values() if type(value) is int}
    counts = sorted(value for value in whole if 1 <= value < router.out_features)
    mlps = list(_mlps(getattr(module, names[2]))) if names[2] else [None]
    for formula, mlp, chosen in product(expert_formulas(stacks), mlps, counts):
        parts = site.path, context.kernels, context.log, names, formula, mlp, chosen
        forward = ScaledInputsForward(module, *parts)
        largest = BEYOND * max([SEEN, *numbers(stacks)])
        if all(_agrees(context, forward, size, (formula, mlp, chosen)) for size in (ORDINARY, largest)):
            return Match(forward) if _gives_logits(module, forward) else Skip("it gives something else beside")
    return Skip("a mixture of a way of its own")


def _children(module: nn.Module) -> tuple[str, str, str] | None:
    """Names of the router, of the module with the stacks, and of any third; None for other children."""
    if not isinstance(module, nn.Module) or len(module._modules) not in (2, 3) or module._parameters:
        return None
    found = {name: one for name, one in module.named_children()}
    routers = [name for name, one in found.items() if isinstance(one, nn.Linear) and type(one) is not nn.Linear]
    stacks = [
        name
        for name, one in found.items()
        if sorted(p.dim() for p in one._parameters.values() if p is not None) == [3, 3]
        and len(stock_parameters(one)) == 1
    ]
    if len(routers) != 1 or len(stacks) != 1 or not all(type(p) is nn.Parameter for p in module.parameters()):
        return None
    return routers[0], stacks[0], next((name for name in found if name not in (*routers, *stacks)), "")


def _mlps(module: nn.Module) -> Iterator[MlpSpec]:
    """Gated MLPs that this may be."""
    kinds = nn.Linear, QuantizedLinear
    linears = {name: one.weight.shape for name, one in module.named_children() if isinstance(one, kinds)}
    acts = {name: one for name, one in module.named_children() if name not in linears}
    for name, act in acts.items():
        known = activation_name(act) if not act._parameters and len(acts) == 1 and len(linears) == 3 else None
        for gate, up, down in permutations(linears) if known is not None else ():
            if linears[gate] == linears[up] == linears[down][::-1]:
                settings = ((name, plain_settings(act)),)
                yield MlpSpec(first=(gate, up), down=down, activation=known or "", settings=settings)


def _agrees(context: Context, forward: ScaledInputsForward, size: float, variant: tuple) -> bool:
    """Whether both sets of operations give what stock does; size: of gates and ups of the first expert."""
    module = forward.module
    hidden = getattr(module, forward.children[0]).in_features

    def inputs(seed: int) -> tuple[torch.Tensor]:
        x = example(module, TOKENS, hidden, seed=seed)
        gate_up, _ = forward.formula.weights(getattr(module, forward.children[1])).matrices(0, x.dtype)
        first = (x.float() @ gate_up.detach().float().t()).square().mean().sqrt()
        return (x * float(size / first.clamp_min(1e-6)),)

    for kernels in (context.kernels.plain(), context.kernels):
        candidate = ScaledInputsForward(
            module, "", kernels, context.log, forward.children, forward.formula, forward.mlp, forward.chosen
        ).fast
        plain = kernels is not context.kernels
        found = (
            context.probe.disagreement(
                module, candidate, partial(inputs, seed), variant=(*variant, size, seed, plain), ahead=True
            )
            for seed in SEEDS
        )
        if not any(one is None for one in found):
            return False
    return True


def _gives_logits(module: nn.Module, forward: ScaledInputsForward) -> bool:
    """Whether stock gives logits behind its result, and nothing else."""
    x = example(module, TOKENS, getattr(module, forward.children[0]).in_features)
    with torch.no_grad():
        found, ours = type(module).forward(module, x), forward.fast(x)
    pair = isinstance(found, tuple) and len(found) == 2
    return pair and found[1].dtype == ours[1].dtype and rows_agree(ours[1], found[1], bound(SHARES, found[1].dtype))
