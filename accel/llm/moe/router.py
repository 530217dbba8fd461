"""The router of a mixture: a product, and one kernel from its logits to the chosen experts and their shares."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from accel.comparison import rows_agree
from accel.llm.moe.router_formula import (
    GIVEN,
    INDEX,
    LOGITS,
    SHARE,
    Formulas,
    RouterFormula,
    dtypes_of,
    held,
    holds_router,
    router_formulas,
    router_settings,
)
from accel.llm.parts.linear import product_for
from accel.patching.fallback_log import FallbackLog
from accel.patching.fast_forward import FastForward, Kernels
from accel.patching.guard import Parts, changed_since
from accel.patching.probe import compile_ahead, example
from accel.patching.rule import Context, Match, Site, Skip, foreign_forward
from accel.patching.structure import meta_weights, side_effects, untouched
from accel.quantization.experts import stock_parameters
from accel.tolerances import BLOCK, bound

PROBED = 1  # token, as a step has: its kernels are needed anyway


class RouterForward(FastForward):
    """Called with tokens, (T, H) or (rows, T, H), and where stock is given one the bias for the choice, (E,).

    Returns what stock does: choices and shares, (T, k), and logits, (T, E).
    """

    def __init__(self, module: nn.Module, path: str, kernels: Kernels, log: FallbackLog, formulas: Formulas) -> None:
        super().__init__(module, path, kernels, log)
        self.formulas, self.names = formulas, stock_parameters(module)
        self.shapes = {name: tensor.shape for name, tensor in held(module).items()}

    def parts(self) -> Parts:
        return Parts((self.module, *self.module.children()))

    def unfit(self, *args: Any, **kwargs: Any) -> str | None:
        x, correction = self._given(args, kwargs)
        tensors = held(self.module)
        if {name: tensor.shape for name, tensor in tensors.items()} != self.shapes:
            return changed_since("which weights it has")
        if type(x) is not torch.Tensor:
            return "something else than tokens"
        formula = self.formulas.get(dtypes_of(x, tensors))
        if formula is None:
            return f"{x.dtype}, with weights of {', '.join(str(one.dtype) for one in tensors.values())}"
        weight = tensors[formula.weight]
        if x.dim() not in formula.dims or x.shape[-1] != weight.shape[1] or not x.numel():
            return f"tokens of shape {tuple(x.shape)}"
        if formula.correction == GIVEN:
            if not isinstance(correction, torch.Tensor) or correction.shape != weight.shape[:1]:
                return "no bias for the choice, or one of another form"
            if formula.routing.rounded and correction.dtype != torch.float32:
                return f"a bias for the choice in {correction.dtype}"
            tensors[GIVEN] = correction
        plain = all(type(one) in (torch.Tensor, nn.Parameter) and one.device == x.device for one in tensors.values())
        return None if plain else "weights of another kind, or on another device"

    def call_of(self, x: torch.Tensor) -> tuple | None:
        """What it is called with for tokens (T, H), the bias for the choice being zero; None for a dtype not known."""
        formula = self.formula(x)
        if formula is None:
            return None
        experts = held(self.module)[formula.weight].shape[0]
        correction = (torch.zeros(experts, device=x.device),) if formula.correction == GIVEN else ()
        return (x if 2 in formula.dims else x.unsqueeze(0), *correction)

    def example(self, rows: int, like: torch.Tensor) -> tuple:
        x = example(self.module, rows, _hidden(self.module, self.formulas))
        dtypes = (like.dtype, *(tensor.dtype for tensor in held(self.module).values()))
        return next(filter(None, (self.call_of(x.to(one)) for one in dtypes)), (x,))

    def fast(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        x, correction = self._given(args, kwargs)
        tensors = held(self.module)
        formula = self.formulas[dtypes_of(x, tensors)]
        if formula.correction != GIVEN:
            correction = None if formula.correction is None else tensors[formula.correction].reshape(-1)
        logits = self._logits(x.reshape(-1, x.shape[-1]), formula, tensors)
        index, shares = self.kernels.route(logits, formula.routing, correction, formula.shares)
        found = {LOGITS: logits, INDEX: index, SHARE: shares}
        return tuple(found[name] for name in formula.outputs)

    def _logits(self, x: torch.Tensor, formula: RouterFormula, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        weight, bias = tensors[formula.weight], None if formula.bias is None else tensors[formula.bias]
        if not formula.wide:
            logits = product_for(self.kernels, x)(x, weight, bias)
            return logits if formula.logits is None else logits.to(formula.logits)
        if weight.dtype == torch.float32 and (bias is None or bias.dtype == torch.float32):
            return self.kernels.fused_linear(x, weight, bias)
        if x.is_cuda and bias is None and x.dtype == weight.dtype != torch.float32:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)  # products of 16 bits are exact in it
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())

    def _given(self, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        """Tokens, and the second argument; None for what is not given."""
        given = [*args, *(kwargs.get(name) for name in self.names[len(args) :]), None]
        return given[0], given[1]

    def formula(self, x: torch.Tensor) -> RouterFormula | None:
        """The one for tokens of this dtype, and what the router holds now."""
        return self.formulas.get(dtypes_of(x, held(self.module)))


class KnownRouters(dict[tuple, Formulas | str]):
    """What was found of routers of one make and the same settings; layers have dozens of them."""


def match_router(site: Site, context: Context) -> Match | Skip | None:
    """A module with one matrix that gives choices and their shares by the logits of tokens."""
    module = site.module
    if not holds_router(module):
        return None
    if meta_weights(module):
        return Skip("weights not loaded")
    reason = foreign_forward(module) or side_effects(module) or untouched(*module.children())
    if reason is not None:
        return Skip(reason)
    known, key = context.of(KnownRouters), router_settings(module)
    if key not in known:
        found = router_formulas(module)
        wrong = None if isinstance(found, str) else _disagreement(module, found, context)
        known[key] = wrong or found
    found = known[key]
    if isinstance(found, str):
        return Skip(found)
    return Match(RouterForward(module, site.path, context.kernels, context.log, found))


def _disagreement(module: nn.Module, formulas: Formulas, context: Context) -> str | None:
    """Why the operations that are to run compute something else than plain ones, with the router's own weights."""
    x = example(module, PROBED, _hidden(module, formulas))
    formula = formulas.get(dtypes_of(x, held(module)))
    if formula is None:
        return f"its formula does not hold for {x.dtype}"
    x = x if 2 in formula.dims else x.unsqueeze(0)
    experts = held(module)[formula.weight].shape[0]
    correction = torch.rand(experts, generator=torch.Generator().manual_seed(0), device="cpu").to(x.device)
    outputs = []
    with torch.no_grad():
        for one in (context.kernels.plain(), context.kernels):
            candidate = partial(RouterForward(module, "", one, context.log, formulas).fast, x, correction)
            compile_ahead(candidate, x.device)
            found = candidate()
            outputs.append(dict(zip(formula.outputs, found, strict=True)))
    for name, dtype in ((LOGITS, x.dtype), (SHARE, formula.shares)):
        if name in formula.outputs:
            # Neighbors that are nearly equal may have changed places.
            wanted, got = (output[name].sort(descending=True).values for output in outputs)
            if not rows_agree(got, wanted, bound(BLOCK, dtype)):
                return f"its {name} come out otherwise in one kernel"
    return None


def _hidden(module: nn.Module, formulas: Formulas) -> int:
    return held(module)[next(iter(formulas.values())).weight].shape[1]
