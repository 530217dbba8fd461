"""One MLP: gated, dense, or in a way of its own and then called as a module."""

import copy
from dataclasses import dataclass

import torch
from accel_kernels.norm.norm import ACTIVATIONS
from torch import nn

from accel.comparison import agree
from accel.errors import reason_of
from accel.llm.parts.linear import Weights
from accel.llm.parts.part import BoundLinear, NormedInput, part_product
from accel.llm.recording.record import NOTHING_STORED, Call, LayerRecord, NotUnderstood, is_absent
from accel.patching.fast_forward import Kernels
from accel.patching.guard import as_understood, plain_settings
from accel.quantization.experts import holds_numbers
from accel.tolerances import ACTIVATION


@dataclass(frozen=True)
class MlpSpec:
    """One MLP. first: the projections of the input: one, or gate and up; down: the last; empty where `whole` is called.

    halves: the one projection gives gate and up, True for gate first, False for up first; None for no gate in it.
    scale: by which the gate is multiplied before its activation.
    whole: the module of them all, where there is one; alone: it takes the input alone, and gives what `down` does.
    settings: of that module and of the activation's. All by name, from the layer; "" for what there is not.
    """

    whole: str = ""
    alone: bool = True
    first: tuple[str, ...] = ()
    down: str = ""
    activation: str = ""
    settings: tuple[tuple[str, tuple], ...] = ()
    halves: bool | None = None
    scale: float = 1.0


def understand_mlp(layer: LayerRecord) -> tuple[MlpSpec | None, tuple[Call, ...]]:
    """The MLP of a recorded layer, and the calls of its modules: first the one that is given its input and the one that
    gives its output. None where the layer has nothing besides the attention that could be one. Raises NotUnderstood
    where it has none that can be told from the rest, or neither.
    """
    mixer = layer.attention if layer.mixes else None
    around = {module for module in layer.layer.modules() if any(m in layer.mixers for m in module.modules())}
    mine = [call for call in layer.inside(layer.layer) if call.module not in around]
    if mixer is not None and not any(_matrices(call.module) for call in mine):
        return None, ()
    containers = [call for call in mine if _matrices(call.module) and vars(call.module)["_modules"]]
    if len(containers) > 1:
        raise NotUnderstood(NOTHING_STORED if mixer is None else "more than one block besides the attention")
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


def _formula(layer: LayerRecord, calls: list[Call], whole: Call | None) -> tuple[MlpSpec, tuple[Call, ...]] | None:
    calls = [call for call in calls if call.alone and call.made is not None]
    products = [call for call in calls if _matrices(call.module)]
    for act in calls:
        name = None if list(act.module.parameters()) else activation_name(act.module)
        for down in products if name is not None else ():
            first, halves, scale = _before(act, down, [call for call in products if call is not down], whole)
            if first:
                looked_at = (act,) if whole is None else (act, whole)
                spec = MlpSpec(
                    "" if whole is None else layer.name(whole.module),
                    alone=whole is None or (whole.alone and _gives(whole, down)),
                    first=tuple(layer.name(call.module) for call in first),
                    down=layer.name(down.module),
                    activation=name or "",
                    settings=tuple((layer.name(call.module), plain_settings(call.module)) for call in looked_at),
                    halves=halves,
                    scale=scale,
                )
                return spec, (first[0], down, *first[1:], *looked_at)
    return None


def _gives(whole: Call, down: Call) -> bool:
    """Whether the module gives what its last projection does, and not a multiple of it."""
    given, made = down.output.held, None if whole.made is None else whole.made.held
    return made is not None and made.numel() == given.numel() and torch.equal(made.flatten(), given.flatten())


def _before(
    act: Call, down: Call, products: list[Call], whole: Call | None
) -> tuple[tuple[Call, ...], bool | None, float]:
    """The projections between the MLP's input and what `down` takes, whether one holds both gate and up, and the scale
    of the gate.
    """
    acted, taken = act.output.held, down.input.held
    held = () if whole is None else (x for x in vars(whole.module).values() if type(x) is float)
    numbers = tuple(dict.fromkeys((1.0, *held)))
    for gate in products:
        y = gate.output.held
        scale = next((x for x in numbers if y.shape == acted.shape and torch.equal(act.input.held, y * x)), None)
        if scale is not None:
            if scale == 1.0 and agree(acted, taken):
                return (gate,), None, scale
            for up in products:
                if up is not gate and up.input.same(gate.input) and up.output.held.shape == y.shape:
                    if agree(acted * up.output.held, taken):
                        return (gate, up), None, scale
        for gate_first, (first, second) in ((True, y.chunk(2, dim=-1)), (False, reversed(y.chunk(2, dim=-1)))):
            if first.shape == acted.shape == taken.shape and torch.equal(first, act.input.held):
                if agree(acted * second, taken):
                    return (gate,), gate_first, 1.0
    return (), None, 1.0


def activation_name(module: nn.Module) -> str | None:
    """The name of the activation a module without weights computes, or None."""
    x = torch.linspace(-9, 9, 2001, dtype=torch.float64, device="cpu")
    probe = copy.copy(module)
    vars(probe)["training"] = False
    try:
        with torch.no_grad():
            y = type(module).forward(probe, x)
    except Exception as error:  # whatever it may be, it is not a function of one tensor
        reason_of(error)
        return None
    if not isinstance(y, torch.Tensor) or y.shape != x.shape:
        return None
    close = (name for name, f in ACTIVATIONS.items() if float((f(x) - y).abs().max()) <= ACTIVATION)
    return next(close, None)


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
        if plain and len(parts) == 2 and parts[0].fits(parts[1]) and spec.scale == 1.0:
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

    def _middle(self, kernels: Kernels, before: NormedInput) -> torch.Tensor:
        name = self.spec.activation
        if self.gate is not None:
            return part_product(kernels, self.gate, before, up=self.up, activation=name)
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
