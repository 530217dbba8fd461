"""One MLP: gated, dense, or in a way of its own and then called as a module."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from accel_kernels import SharedExpert
from accel_kernels.gemm.fused_linear import MOST_ROWS
from accel_kernels.norm.norm import ACTIVATIONS
from torch import Tensor, nn

from accel.llm.moe.experts import ExpertsForward
from accel.llm.parts.linear import Weights, product_for
from accel.llm.parts.norm import NormSpec
from accel.llm.parts.normed_router import BoundRouter, NormedRouterSpec, called_router
from accel.llm.parts.part import BoundLinear, BoundNorm, NormedInput, adapted, part_product
from accel.llm.recording.record import NotUnderstood
from accel.patching.fast_forward import Kernels
from accel.patching.guard import as_understood
from accel.quantization.product import order_of

ALIGNED = 8  # numbers of 16 bits; where rows begin elsewhere, products take twice the time
PADDED_ROWS = 512  # of x, from which on copies of such weights take less than they save


@dataclass(frozen=True)
class MlpSpec:
    """One MLP. first: the projections of the input: one, or gate and up; down: the last; empty where `whole` is called.

    halves: the one projection gives gate and up, True for gate first, False for up first; None for no gate in it.
    scale: by which the gate is multiplied before its activation. inner: a norm of what `down` is given. whole: the
    module of them all, where there is one; alone: it takes the input and nothing else, and gives what `down` does.
    settings: of that module and of the activation's. All by name, from the layer; "" for what there is not.

    beside: blocks whose results are added to this one's. around: the module that does what they all do, called where
    their settings have changed. before, post: norms of one of these blocks alone. router: it is given what the norm is,
    in one row of tokens where `flat`, and gives choices and shares, at the places `chosen` of its result, which `whole`
    takes. route: what the router computes, None where it is called. gate: a linear whose sigmoid scales the result.
    """

    whole: str = ""
    alone: bool = True
    first: tuple[str, ...] = ()
    down: str = ""
    activation: str = ""
    settings: tuple[tuple[str, tuple], ...] = ()
    halves: bool | None = None
    scale: float = 1.0
    beside: "tuple[MlpSpec, ...]" = ()
    around: str = ""
    before: NormSpec | None = None
    post: NormSpec | None = None
    router: str = ""
    flat: bool = True
    chosen: tuple[int, ...] = ()
    route: NormedRouterSpec | None = None
    inner: NormSpec | None = None
    gate: str = ""

    @property
    def blocks(self) -> "tuple[MlpSpec, ...]":
        return (self, *self.beside)

    @property
    def called(self) -> tuple[str, ...]:
        """Linears, and modules that are called as a whole."""
        found: list[str] = []
        for one in self.blocks:
            found += [*one.first, one.down] if one.first else [one.whole]
            found += [one.router if one.route is None else one.route.product, one.gate]
        return tuple(filter(None, found))

    @property
    def wholes(self) -> tuple[str, ...]:
        """Modules that are called as a whole, without routers."""
        return (self.around,) if self.around else tuple(one.whole for one in self.blocks if not one.first)

    @property
    def norms(self) -> list[NormSpec]:
        routers = [one.route.norm for one in self.blocks if one.route is not None]
        return [
            *(norm for one in self.blocks for norm in (one.before, one.inner, one.post) if norm is not None),
            *routers,
        ]


def bound_mlp(kernels: Kernels, layer: nn.Module, spec: MlpSpec) -> "BoundMlp | BoundSum":
    """With the tensors of a layer."""
    if spec.around and not all(as_understood(layer.get_submodule(name), had) for name, had in spec.settings):
        spec = MlpSpec(spec.around)
    return BoundSum(kernels, layer, spec) if spec.beside else BoundMlp(kernels, layer, spec)


class BoundSum:
    """Several blocks with the tensors they read."""

    def __init__(self, kernels: Kernels, layer: nn.Module, spec: MlpSpec):
        def norm(one: NormSpec | None) -> BoundNorm | None:
            return None if one is None else BoundNorm(kernels, layer, one)

        self.blocks = [(BoundMlp(kernels, layer, one), norm(one.before), norm(one.post)) for one in spec.blocks]
        self.routers = [
            BoundRouter(kernels, layer, one.route) if one.route is not None
            else called_router(layer.get_submodule(one.router), one.flat) if one.router else None
            for one in spec.blocks
        ]  # fmt: skip
        self.gates = [BoundLinear(layer.get_submodule(one.gate)) if one.gate else None for one in spec.blocks]
        self.times = sum(block.times for block, _, _ in self.blocks)
        self.normed = bool(spec.around)  # once, as there
        bare = all(norm is None and post is None for _, norm, post in self.blocks)
        self.mixes = bare and [router is not None for router in self.routers] == [True, False]

    def __call__(
        self, kernels: Kernels, before: NormedInput, residual: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        """residual + scale * the sum of all blocks."""
        total: Tensor | None = None
        before = NormedInput(before.normed()) if self.normed else before
        for (block, norm, post), router, gate in zip(self.blocks, self.routers, self.gates, strict=True):
            h = before if norm is None else NormedInput(before.normed(), norm, block.times)
            last = block is self.blocks[-1][0] and residual is not None and total is not None and post is None
            if router is not None:
                x, chosen = h.normed(), router(kernels, before.normed())
                if residual is not None and (y := self._at_once(x, chosen, residual, scale)) is not None:
                    return y
                y = block.routed(x, chosen)
            elif last and block.takes_addend(kernels, h.x):
                share = None if gate is None else gate(kernels, h)
                return block(kernels, h, residual=residual, scale=scale, addend=total, share=share)
            elif gate is not None:
                assert total is not None
                total = torch.addcmul(total, gate(kernels, h).sigmoid(), block(kernels, h))
                continue
            elif post is None:
                total = block(kernels, h, residual=total)
                continue
            else:
                y = block(kernels, h)
            y = y if post is None else post(y)
            total = y if total is None else total + y
        assert total is not None
        return total if residual is None else torch.add(residual, total, alpha=scale)

    def _at_once(self, x: Tensor, chosen: tuple | dict[int, Tensor], residual: Tensor, scale: float) -> Tensor | None:
        """The sum for one token of experts and of one that all tokens share; None where that is no one operation."""
        (experts, *_), (shared, *_) = self.blocks[0], self.blocks[-1]
        if not self.mixes or experts.module is None or x.shape[:-1].numel() != 1:
            return None
        given = x.flatten(0, -2), *(chosen[place] for place in experts.spec.chosen)
        forward, beside = ExpertsForward.taken(experts.module, *given), shared.as_expert(self.gates[1])
        if forward is None or beside is None:
            return None
        total = forward.with_shared(given, beside, shared.spec.activation, residual.flatten(0, -2), scale)
        return None if total is None else total.view(residual.shape)


class BoundMlp:
    """One MLP with the tensors it reads. gate, up: weights of one gated product, where they are plain."""

    def __init__(self, kernels: Kernels, layer: nn.Module, spec: MlpSpec):
        self.spec = spec
        self.module: nn.Module | None = None  # called as it is
        self.gate: Weights | None = None
        self.up: Weights | None = None
        self.bases: list[Weights] | None = None
        self.times = 1
        known = (as_understood(layer.get_submodule(name), settings) for name, settings in spec.settings)
        if not spec.first or not all(known):
            if not spec.whole or not spec.alone:
                raise NotUnderstood("what its MLP was understood to be has changed")
            self.module = layer.get_submodule(spec.whole)
            return
        self.first = [BoundLinear(layer.get_submodule(name)) for name in spec.first]
        self.down = BoundLinear(layer.get_submodule(spec.down))
        self.inner = None if spec.inner is None else BoundNorm(kernels, layer, spec.inner)
        parts = [linear.weights for linear in self.first if linear.weights is not None]
        plain = len(parts) == len(self.first)
        if plain and len(parts) == 2 and parts[0].fits(parts[1]) and spec.scale == 1.0:
            self.gate, self.up = parts
        elif plain and spec.halves is not None and parts[0].ranks is None and not parts[0].in_blocks:
            n = parts[0].outputs // 2
            halves = [parts[0]._replace(rows=rows) for rows in ((0, n), (n, n))]
            self.gate, self.up = halves if spec.halves else reversed(halves)
        bases = [linear.base if linear.weights is None else linear.weights for linear in self.first]
        found = [one for one in bases if one is not None]
        gated = not plain and len(found) == 2 and found[0].fits(found[1]) and spec.scale == 1.0
        self.bases = found if gated else None  # of two linears that have adapters
        self.times = len(self.first)
        last = self.down.weights
        alone = plain and last is not None and not (self.inner or parts[0].quantized or last.quantized or last.ranks)
        self.uneven = alone and self.gate is not None and self.gate.outputs % ALIGNED > 0

    def __call__(
        self, kernels: Kernels, before: NormedInput, residual: Tensor | None = None, scale: float = 1.0, **mixed: Any
    ) -> Tensor:
        """residual + scale * mlp(norm(x)). mixed: as of `part_product`, where it `takes_addend`."""
        if self.module is None:
            x = before.x
            many = x.element_size() == 2 and x.numel() >= PADDED_ROWS * x.shape[-1]
            if self.uneven and many and not mixed.keys() - {"spare"}:
                return self._padded(kernels, before, residual, scale)
            middle = NormedInput(self._middle(kernels, before), self.inner)
            return self.down(kernels, middle, residual=residual, scale=scale, **mixed)
        y = self.module(before.normed())
        y = (y[0] if isinstance(y, tuple) else y).reshape(before.x.shape)  # Llama 4's experts give rows of tokens
        return y if residual is None else torch.add(residual, y, alpha=scale)

    def routed(self, h: Tensor, chosen: tuple | dict[int, Tensor]) -> Tensor:
        """What experts make of h, (rows, new, C). chosen: what their router gave."""
        assert self.module is not None
        return self.module(h.flatten(0, -2), *(chosen[place] for place in self.spec.chosen)).view(h.shape)

    def as_expert(self, share: BoundLinear | None) -> SharedExpert | None:
        """As the shared expert of a mixture, with this linear for its share; None where they are not plain."""
        linears = [self.gate, self.up, None if self.module is not None else self.down.weights]
        linears += [] if share is None else [share.weights]
        plain = (one is not None and one.ranks is None and not one.in_blocks for one in linears)
        given = [one.operands() if one is not None and fits else None for one, fits in zip(linears, plain, strict=True)]
        if self.spec.inner is not None or any(one is None or one[1] is not None for one in given):
            return None
        if any(order_of(one.module) is not None for one in linears if one is not None):
            return None
        return SharedExpert(*(one[0] for one in given if one is not None))

    def takes_addend(self, kernels: Kernels, x: Tensor) -> bool:
        """Whether its last product adds more than one tensor: of few tokens, whose products are kernels of ours."""
        return self.module is None and x.shape[:-1].numel() <= MOST_ROWS and self.down.takes_wide(kernels)

    def _padded(self, kernels: Kernels, before: NormedInput, residual: Tensor | None, scale: float) -> Tensor:
        """The same with zeros behind gate, up and so the middle: rows begin at multiples of 16 bytes."""
        assert self.gate is not None and self.up is not None and self.down.weights is not None
        (gate, bias), (up, up_bias), (down, last) = (one.operands() for one in (self.gate, self.up, self.down.weights))
        behind = 0, -len(gate) % ALIGNED
        gate, up, down = F.pad(gate, (0, 0, *behind)), F.pad(up, (0, 0, *behind)), F.pad(down, behind)
        bias, up_bias = (None if one is None else F.pad(one, behind) for one in (bias, up_bias))
        (x, norm), name = before.given(), self.spec.activation
        multiply = product_for(kernels, x, len(gate), name, True)
        middle = multiply(x, gate, bias, norm=norm, up=up, up_bias=up_bias, activation=name)
        multiply = product_for(kernels, middle, len(down))
        return multiply(middle, down, last, norm=None, residual=residual, scale=scale)

    def _middle(self, kernels: Kernels, before: NormedInput) -> Tensor:
        name = self.spec.activation
        if self.gate is not None:
            return part_product(kernels, self.gate, before, up=self.up, activation=name)
        if self.bases is not None and (low := adapted(kernels, self.first, self.bases[0], before.x, gate=True)):
            return part_product(kernels, self.bases[0], before, up=self.bases[1], activation=name, **low)
        if self.spec.halves is None and len(self.first) == 1:
            return self.first[0](kernels, before, activation=name)
        if self.spec.halves is None:
            gate, up = (linear(kernels, before) for linear in self.first)
            if self.spec.scale != 1.0:
                return kernels.gated(gate * self.spec.scale, up, name)
        else:
            gate, up = self.first[0](kernels, before).chunk(2, dim=-1)
            gate, up = (gate, up) if self.spec.halves else (up, gate)
        return ACTIVATIONS[name](gate) * up
