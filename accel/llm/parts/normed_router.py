"""A router of a mixture that norms and scales tokens before its product, and the shares of experts after, as Gemma 4's.

Softmax of all logits, the k largest, divided by their sum, each times a gain of its expert.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from accel_kernels.moe.route import Routing, scores_of, shares_of
from torch import nn

from accel.comparison import agree, factor, named_factor
from accel.llm.parts.norm import NormSpec, norm_spec, normlike
from accel.llm.parts.part import BoundLinear, BoundNorm, NormedInput, part_product
from accel.llm.recording.record import Call, LayerRecord
from accel.patching.fast_forward import Kernels


@dataclass(frozen=True)
class NormedRouterSpec:
    """name: of the router, and product: of its linear, from the layer. scale, gains: parameters of the router, (H,) and
    (E,). index, shares: places of these in what it gives.
    """

    name: str
    norm: NormSpec
    scale: str
    factor: float
    product: str
    chosen: int
    gains: str
    index: int
    shares: int


def understand_router(layer: LayerRecord, call: Call) -> NormedRouterSpec | None:
    """What a recorded router computes; None for any other."""
    found = call.result if isinstance(call.result, tuple) else ()
    own = {name: one.detach() for name, one in call.module._parameters.items() if one is not None and one.dim() == 1}
    inside = layer.inside(call.module)
    index = next((place for place, one in enumerate(found) if one.dtype == torch.int64), None)
    for norm in (one for one in inside if normlike(layer, one) and one.input.same(call.taken)):
        for product in (one for one in inside if type(one.module) is nn.Linear and one.alone and one.made is not None):
            for scale, by in own.items():
                if by.shape != norm.output.held.shape[-1:] or product.input.held.shape != norm.output.held.shape:
                    continue
                scaled = norm.output.held * by
                times = named_factor(factor(scaled, product.input.held), scaled.dtype, (call.module,))
                if times is None or not agree(scaled * times, product.input.held) or index is None:
                    continue
                for gains, shares in _shares(product.output.held, found, index, own):
                    return NormedRouterSpec(
                        layer.name(call.module), norm_spec(layer, norm), scale, times, layer.name(product.module),
                        found[index].shape[-1], gains, index, shares,
                    )  # fmt: skip
    return None


def _shares(logits: torch.Tensor, found: tuple, index: int, own: dict) -> list[tuple[str, int]]:
    """By which gains, and at which place, shares of these choices are given."""
    wide, chosen = logits.float(), found[index]
    routing = Routing(chosen.shape[-1], "softmax", "sum")
    scores = scores_of(wide, routing, logits.dtype)
    if not agree(scores.gather(1, chosen).sort(-1).values, scores.topk(chosen.shape[-1]).values.sort(-1).values):
        return []
    plain = shares_of(wide, scores, chosen, routing)
    return [
        (name, place)
        for name, gains in own.items()
        if gains.numel() == logits.shape[-1]
        for place, one in enumerate(found)
        if one.shape == chosen.shape and one.is_floating_point() and agree(plain * gains.float()[chosen], one)
    ]


def called_router(module: nn.Module, flat: bool) -> Callable[[Kernels, torch.Tensor], tuple]:
    """A router that is called as it is, as `BoundRouter` is. flat: with tokens in one row."""
    return lambda kernels, x: module(x.flatten(0, -2) if flat else x)


class BoundRouter:
    """Such a router with the tensors it reads; the module itself where its parts are no longer plain."""

    def __init__(self, kernels: Kernels, layer: nn.Module, spec: NormedRouterSpec):
        self.spec, self.module = spec, layer.get_submodule(spec.name)
        self.norm, self.product = BoundNorm(kernels, layer, spec.norm), BoundLinear(layer.get_submodule(spec.product))
        self.scale, self.gains = (self.module._parameters[name] for name in (spec.scale, spec.gains))
        self.routing = Routing(spec.chosen, "softmax", "sum")
        if self.norm.norm is not None:
            self.norm.norm = self.norm.norm._replace(weight=self.scale)

    def __call__(self, kernels: Kernels, x: torch.Tensor) -> tuple | dict[int, torch.Tensor]:
        """Choices and shares by their places; x: (rows, new, H)."""
        weights, spec, x = self.product.weights, self.spec, x.flatten(0, -2)
        if weights is None or self.norm.norm is None:
            return self.module(x)
        logits = part_product(kernels, weights, NormedInput(x, self.norm), scale=spec.factor)
        index, shares = kernels.route(logits, self.routing, None, torch.float32, gains=self.gains)
        return {spec.index: index, spec.shares: shares}
