"""One MLP: gated, dense, or in a way of its own and then called as a module."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from accel_kernels.norm.norm import ACTIVATIONS
from torch import nn

from accel.comparison import agree
from accel.llm.parts.activation import activation_name
from accel.llm.parts.linear import Weights
from accel.llm.parts.norm import NormSpec, norm_spec, normlike
from accel.llm.parts.normed_router import BoundRouter, NormedRouterSpec, called_router, understand_router
from accel.llm.parts.part import BoundLinear, BoundNorm, NormedInput, part_product
from accel.llm.recording.record import NOTHING_STORED, Call, LayerRecord, NotUnderstood, Value, is_absent
from accel.patching.fast_forward import Kernels
from accel.patching.guard import as_understood, plain_settings
from accel.quantization.experts import holds_numbers


@dataclass(frozen=True)
class MlpSpec:
    """One MLP. first: the projections of the input: one, or gate and up; down: the last; empty where `whole` is called.

    halves: the one projection gives gate and up, True for gate first, False for up first; None for no gate in it.
    whole: the module of them all, where there is one; alone: it takes the input and nothing else. settings: of that
    module and of the activation's. All by name, from the layer; "" for what there is not.

    beside: blocks whose results are added to this one's. before, post: norms of one of these blocks alone. router: it
    is given what the norm is, and gives choices and shares, at the places `chosen` of its result, which `whole` takes.
    route: what it computes, None where it is called.
    """

    whole: str = ""
    alone: bool = True
    first: tuple[str, ...] = ()
    down: str = ""
    activation: str = ""
    settings: tuple[tuple[str, tuple], ...] = ()
    halves: bool | None = None
    beside: "tuple[MlpSpec, ...]" = ()
    before: NormSpec | None = None
    post: NormSpec | None = None
    router: str = ""
    chosen: tuple[int, ...] = ()
    route: NormedRouterSpec | None = None

    @property
    def blocks(self) -> "tuple[MlpSpec, ...]":
        return (self, *self.beside)

    @property
    def called(self) -> tuple[str, ...]:
        """Linears, and modules that are called as a whole."""
        routers = [one.router if one.route is None else one.route.product for one in self.blocks]
        of_each = ((*one.first, one.down) if one.first else (one.whole,) for one in self.blocks)
        return tuple(name for names in (*of_each, routers) for name in names if name)

    @property
    def wholes(self) -> tuple[str, ...]:
        """Modules that are called as a whole, without routers."""
        return tuple(one.whole for one in self.blocks if not one.first)

    @property
    def norms(self) -> list[NormSpec]:
        routers = [one.route.norm for one in self.blocks if one.route is not None]
        return [*(norm for one in self.blocks for norm in (one.before, one.post) if norm is not None), *routers]


def understand_mlp(layer: LayerRecord, others: Sequence[Call] = ()) -> tuple[MlpSpec | None, tuple[Call, ...]]:
    """The MLP of a recorded layer, and the calls of its modules: first the one that is given its input and the one that
    gives its output. others: calls of something else. None where the layer has nothing besides the attention that could
    be one. Raises NotUnderstood where it has none that can be told from the rest, or neither.
    """
    mixer = layer.attention if layer.mixes else None
    around = {module for module in layer.layer.modules() if any(m is mixer for m in module.modules())}
    around |= {call.module for call in others}
    mine = [call for call in layer.inside(layer.layer) if call.module not in around]
    if mixer is not None and not any(_matrices(call.module) for call in mine):
        return None, ()
    containers = [call for call in mine if _matrices(call.module) and vars(call.module)["_modules"]]
    if len(containers) > 1:
        several = None if mixer is None else _several(layer, mine, containers)
        if several is None:
            raise NotUnderstood(NOTHING_STORED if mixer is None else "more than one block besides the attention")
        return several
    whole = containers[0] if containers else None
    found = _formula(layer, mine if whole is None else layer.inside(whole.module), whole)
    if found is not None:
        return found
    if whole is None:
        raise NotUnderstood(NOTHING_STORED if mixer is None else "no MLP that is known")
    given = (*whole.args, *whole.kwargs.values())
    if mixer is None and not all(is_absent(value) or isinstance(value, torch.Tensor) for value in given):
        raise NotUnderstood(NOTHING_STORED)  # but it is given a cache, or something else than its input
    if not whole.alone or whole.made is None:
        raise NotUnderstood("its MLP takes more than one tensor")
    return MlpSpec(layer.name(whole.module)), (whole, whole)


def _matrices(module: nn.Module) -> bool:
    return any(p.dim() >= 2 for p in module.parameters()) or any(map(holds_numbers, module.modules()))


def _several(layer: LayerRecord, mine: list[Call], containers: list[Call]) -> tuple[MlpSpec, tuple[Call, ...]] | None:
    """Blocks that all take the same, or norms of it, and whose results, or norms of these, are added."""
    norms = [call for call in mine if normlike(call)]
    routed = {id(call): found for call in containers if (found := _router(call, containers)) is not None}
    routers = [router for router, _ in routed.values()]
    specs: list[MlpSpec] = []
    inner: list[Call] = []
    taken: list[tuple[Call | None, Value]] = []
    given: list[torch.Tensor] = []
    for call in containers:
        if any(call is router for router in routers):
            continue
        spec, (begin, end, *more) = MlpSpec(layer.name(call.module)), (call, call)
        if id(call) in routed:
            router, chosen = routed[id(call)]
            route = understand_router(layer, router)
            spec = replace(spec, router=layer.name(router.module), chosen=chosen, route=route)
            more = [router]
        elif not call.alone or call.made is None:
            return None
        else:
            spec, (begin, end, *more) = _formula(layer, layer.inside(call.module), call) or (spec, (call, call))
        post = next((norm for norm in norms if norm.input.same(end.made)), None)
        specs.append(spec if post is None else replace(spec, post=norm_spec(layer, post)))
        taken.append((next((norm for norm in reversed(norms) if norm.output.same(begin.taken)), None), begin.input))
        given.append((end if post is None else post).output.held)
        inner += [begin, end, *more, *([] if post is None else [post])]
    start = taken[0][1]
    if not all(one.same(start) for one in (*(value for _, value in taken), *(router.input for router in routers))):
        start = taken[0][1] if taken[0][0] is None else taken[0][0].input
        for place, (norm, value) in enumerate(taken):
            if not start.same(value if norm is None else norm.input):
                return None
            if norm is not None:
                specs[place] = replace(specs[place], before=norm_spec(layer, norm))
                inner.append(norm)
    if not all(router.input.same(start) for router in routers) or len({one.numel() for one in given}) > 1:
        return None
    total = torch.stack([one.double().flatten() for one in given]).sum(0)
    x = layer.call.output.held
    if total.numel() != x.numel():
        return None
    total = total.view(x.shape).to(x.dtype)
    normed = (norm.input for norm in norms if norm.input.held.shape == x.shape and agree(total, norm.input.held))
    begin, end = replace(inner[0], taken=start), replace(inner[0], made=next(normed, Value(total)))
    return replace(specs[0], beside=tuple(specs[1:])), (begin, end, *inner)


def _router(call: Call, others: list[Call]) -> tuple[Call, tuple[int, ...]] | None:
    """The call among others that gave a call what it takes besides a tensor, and at which places of its result."""
    x, *more = (*call.args, *call.kwargs.values())
    for other in others:
        result = other.result if isinstance(other.result, tuple) else ()
        places = [next((n for n, one in enumerate(result) if one is value), None) for value in more]
        if other is not call and other.alone and places and None not in places and isinstance(x, torch.Tensor):
            return other, tuple(place for place in places if place is not None)
    return None


def _formula(layer: LayerRecord, calls: list[Call], whole: Call | None) -> tuple[MlpSpec, tuple[Call, ...]] | None:
    calls = [call for call in calls if call.alone and call.made is not None]
    products = [call for call in calls if _matrices(call.module)]
    for act in calls:
        name = None if list(act.module.parameters()) else activation_name(act.module)
        for down in products if name is not None else ():
            first, halves = _before(act, down, [call for call in products if call is not down])
            if first:
                looked_at = (act,) if whole is None else (act, whole)
                spec = MlpSpec(
                    "" if whole is None else layer.name(whole.module),
                    alone=whole is None or whole.alone,
                    first=tuple(layer.name(call.module) for call in first),
                    down=layer.name(down.module),
                    activation=name or "",
                    settings=tuple((layer.name(call.module), plain_settings(call.module)) for call in looked_at),
                    halves=halves,
                )
                return spec, (first[0], down, *first[1:], *looked_at)
    return None


def _before(act: Call, down: Call, products: list[Call]) -> tuple[tuple[Call, ...], bool | None]:
    """The projections between the MLP's input and what `down` takes, and whether one holds both gate and up."""
    acted, taken = act.output.held, down.input.held
    for gate in products:
        y = gate.output.held
        if torch.equal(act.input.held, y):
            if agree(acted, taken):
                return (gate,), None
            for up in products:
                if up is not gate and up.input.same(gate.input) and up.output.held.shape == y.shape:
                    if agree(acted * up.output.held, taken):
                        return (gate, up), None
        for gate_first, (first, second) in ((True, y.chunk(2, dim=-1)), (False, reversed(y.chunk(2, dim=-1)))):
            if first.shape == acted.shape == taken.shape and torch.equal(first, act.input.held):
                if agree(acted * second, taken):
                    return (gate,), gate_first
    return (), None


def bound_mlp(kernels: Kernels, layer: nn.Module, spec: MlpSpec) -> "BoundMlp | BoundSum":
    """With the tensors of a layer."""
    alone = not spec.beside
    return BoundMlp(layer, spec) if alone else BoundSum(kernels, layer, spec)


class BoundSum:
    """Several blocks with the tensors they read."""

    def __init__(self, kernels: Kernels, layer: nn.Module, spec: MlpSpec):
        def norm(one: NormSpec | None) -> BoundNorm | None:
            return None if one is None else BoundNorm(kernels, layer, one)

        self.blocks = [(BoundMlp(layer, one), norm(one.before), norm(one.post)) for one in spec.blocks]
        self.routers = [
            BoundRouter(kernels, layer, one.route) if one.route is not None
            else called_router(layer.get_submodule(one.router)) if one.router else None
            for one in spec.blocks
        ]  # fmt: skip
        self.times = sum(block.times for block, _, _ in self.blocks)

    def __call__(
        self, kernels: Kernels, before: NormedInput, residual: torch.Tensor | None = None, scale: float = 1.0
    ) -> torch.Tensor:
        """residual + scale * the sum of all blocks."""
        total: torch.Tensor | None = None
        for (block, norm, post), router in zip(self.blocks, self.routers, strict=True):
            h = before if norm is None else NormedInput(before.normed(), norm, block.times)
            if router is not None:
                y = block.routed(h.normed(), router(kernels, before.normed().flatten(0, -2)))
            elif post is None:
                total = block(kernels, h, residual=total)
                continue
            else:
                y = block(kernels, h)
            y = y if post is None else post(y)
            total = y if total is None else total + y
        assert total is not None
        return total if residual is None else torch.add(residual, total, alpha=scale)


class BoundMlp:
    """One MLP with the tensors it reads. gate, up: weights of one gated product, where they are plain."""

    def __init__(self, layer: nn.Module, spec: MlpSpec):
        self.spec = spec
        self.module: nn.Module | None = None  # called as it is
        self.times = 1
        known = (as_understood(layer.get_submodule(name), settings) for name, settings in spec.settings)
        if not spec.first or not all(known):
            if not spec.whole or not spec.alone:
                raise NotUnderstood("what its MLP was understood to be has changed")
            self.module = layer.get_submodule(spec.whole)
            return
        self.first = [BoundLinear(layer.get_submodule(name)) for name in spec.first]
        self.down = BoundLinear(layer.get_submodule(spec.down))
        self.gate: Weights | None = None
        self.up: Weights | None = None
        parts = [linear.weights for linear in self.first if linear.weights is not None]
        plain = len(parts) == len(self.first)
        if plain and len(parts) == 2 and parts[0].fits(parts[1]):
            self.gate, self.up = parts
        elif plain and spec.halves is not None and parts[0].ranks is None:
            n = parts[0].outputs // 2
            halves = [parts[0]._replace(rows=rows) for rows in ((0, n), (n, n))]
            self.gate, self.up = halves if spec.halves else reversed(halves)
        self.times = len(self.first)

    def __call__(
        self, kernels: Kernels, before: NormedInput, residual: torch.Tensor | None = None, scale: float = 1.0
    ) -> torch.Tensor:
        """residual + scale * mlp(norm(x))."""
        if self.module is None:
            return self.down(kernels, NormedInput(self._middle(kernels, before)), residual=residual, scale=scale)
        y = self.module(before.normed())
        y = y[0] if isinstance(y, tuple) else y
        return y if residual is None else torch.add(residual, y, alpha=scale)

    def routed(self, h: torch.Tensor, chosen: tuple | dict[int, torch.Tensor]) -> torch.Tensor:
        """What experts make of h, (rows, new, C). chosen: what their router gave."""
        assert self.module is not None
        return self.module(h.flatten(0, -2), *(chosen[place] for place in self.spec.chosen)).view(h.shape)

    def _middle(self, kernels: Kernels, before: NormedInput) -> torch.Tensor:
        name = self.spec.activation
        if self.gate is not None:
            return part_product(kernels, self.gate, before, up=self.up, activation=name)
        if self.spec.halves is None and len(self.first) == 1:
            return self.first[0](kernels, before, activation=name)
        if self.spec.halves is None:
            gate, up = (linear(kernels, before) for linear in self.first)
        else:
            gate, up = self.first[0](kernels, before).chunk(2, dim=-1)
            gate, up = (gate, up) if self.spec.halves else (up, gate)
        return ACTIVATIONS[name](gate) * up
