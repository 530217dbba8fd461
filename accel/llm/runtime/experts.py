"""The experts of a mixture: one pass over what the router chose instead of a loop, for any number of tokens."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from accel.llm.analysis.experts import ORDINARY, ExpertFormula, beyond_limits, expert_formulas, holds_experts, sized
from accel.llm.recording.implementation import foreign_experts
from accel.parallel.sharded_layers import ExpertSharding, expert_sharding, local_twin
from accel.patching.fallback_log import FallbackLog
from accel.patching.fast_forward import FastForward, Kernels
from accel.patching.guard import Parts, changed_since
from accel.patching.probe import example
from accel.patching.rule import Context, Match, Site, Skip
from accel.patching.structure import meta_weights, placement
from accel.quantization.experts import QuantizedExperts, stock_parameters

PROBED = 3  # tokens


class ExpertsForward(FastForward):
    """Experts stacked in two parameters, called with tokens (T, H), choices (T, k) and shares (T, k)."""

    def __init__(
        self, module: nn.Module, path: str, kernels: Kernels, log: FallbackLog, formula: ExpertFormula
    ) -> None:
        super().__init__(module, path, kernels, log)
        self.formula, self.names = formula, stock_parameters(module)
        self.parameters = tuple(module._parameters)

    def unfit(self, *args: Any, **kwargs: Any) -> str | None:
        given = self._given(args, kwargs)
        if not all(type(one) is torch.Tensor for one in given):
            return "other arguments than tokens, choices and shares"
        config = vars(self.module).get("config")
        if config is not None and foreign_experts([config]):
            return "an implementation of the user's"
        if tuple(self.module._parameters) != self.parameters:
            return changed_since("which weights it has")
        x, index, shares = given
        return self.kernels.experts.supports(x.contiguous(), index.contiguous(), shares.contiguous(), self._weights())

    def parts(self) -> Parts:
        own = (self.module.original_class(),) if isinstance(self.module, QuantizedExperts) else ()
        return Parts((self.module, *self.module.children()), own)

    def remember(self) -> None:
        """Any class will do, as each token is computed by itself."""
        super().remember()

    def example(self, rows: int, like: torch.Tensor) -> tuple | None:
        weights = self._weights()
        x = example(self.module, rows, weights.hidden)
        index = torch.arange(2 * rows, device=x.device).view(rows, 2) % weights.experts
        return x, index, torch.full_like(x[:, :2], 0.5)

    def fast(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        x, index, shares = self._given(args, kwargs)
        return self.kernels.experts(x.contiguous(), index.contiguous(), shares.contiguous(), self._weights())

    def _given(self, args: tuple, kwargs: dict) -> tuple:
        """Tokens, choices and shares, however they are given; None for what is not."""
        return args if len(args) == 3 else (*args, *(kwargs.get(name) for name in self.names[len(args) :]))

    def _weights(self) -> Any:
        return self.formula.weights(self.module)


class ShardedExpertsForward(ExpertsForward):
    """The same of experts that are divided among ranks: each computes what it has of them, and the sum has all."""

    def __init__(
        self,
        module: nn.Module,
        path: str,
        kernels: Kernels,
        log: FallbackLog,
        formula: ExpertFormula,
        found: ExpertSharding,
    ) -> None:
        super().__init__(module, path, kernels, log, formula)
        self.sharding, self.around = found, vars(module)["forward"]

    def example(self, rows: int, like: torch.Tensor) -> None:
        """None is timed: a call is a sum over ranks."""

    def fast(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        x, index, shares = self._given(args, kwargs)
        part = super().fast(x, index - self.sharding.first if self.sharding.first else index, shares)
        return self.sharding.ranks.reduce(part)


def match_experts(site: Site, context: Context) -> Match | Skip | None:
    """A module with two stacks of matrices that fit each other, called with tokens, choices and shares."""
    module = site.module
    if not holds_experts(module):
        return None
    divided = expert_sharding(module)
    whole = module if divided is None else local_twin(module)
    found = find_formula(whole, context, (context.kernels.plain(), context.kernels))
    if isinstance(found, str):
        return Skip(found)
    if divided is not None:
        forward = ShardedExpertsForward(module, site.path, context.kernels, context.log, found, divided)
        return Match(forward)
    return Match(ExpertsForward(module, site.path, context.kernels, context.log, found))


def find_formula(module: nn.Module, context: Context, kernels: Iterable[Kernels]) -> ExpertFormula | str:
    """By what experts compute, or why that is not known. kernels: operations by which the formula is to agree with the
    module: plain ones first, by which it is found, then those that are to run, if any.
    """
    if meta_weights(module):
        return "weights not loaded"
    reason, kernels = None, tuple(kernels)
    for formula in expert_formulas(module):
        found = _disagreement(module, formula, context, kernels)
        if found is None:
            return formula
        reason = reason or found
    return reason or "experts stored or activated in a way of their own"


def _disagreement(
    module: nn.Module, formula: ExpertFormula, context: Context, tried: tuple[Kernels, ...]
) -> str | None:
    """Why experts compute something else than this formula: where activations bend, or where a clamp would show."""
    how: tuple = ()
    if isinstance(module, QuantizedExperts):
        how = (module.kind, module.scheme, module.dtype)
    weights = formula.weights(module)
    large = beyond_limits(module, placement(module)[1])
    if large is None:
        return "a number among its settings is too large for its dtype to be tried as a limit"

    def inputs(size: float) -> tuple[torch.Tensor, ...]:
        x = example(module, PROBED, weights.hidden)
        index = torch.arange(2 * PROBED, device=x.device).view(PROBED, 2) % weights.experts
        shares = torch.rand(PROBED, 2, generator=torch.Generator().manual_seed(0)).to(x)
        return sized(x, formula, module, size), index, shares

    for place, kernels in enumerate(tried):
        candidate = ExpertsForward(module, "", kernels, context.log, formula).fast
        for size in (ORDINARY, large):
            given, variant = partial(inputs, size), (formula, size, place, *how)
            reason = context.probe.disagreement(module, candidate, given, variant=variant, ahead=True)
            if reason is not None:
                return reason
    return None
