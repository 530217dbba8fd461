"""How one MLP computes: gated, dense, or in a way of its own and then called as a module."""

import copy
from dataclasses import dataclass

import torch
from accel_kernels.norm.norm import ACTIVATIONS
from torch import nn

from accel.comparison import agree
from accel.errors import reason_of
from accel.llm.recording.record import Call, LayerRecord, NotUnderstood
from accel.patching.guard import plain_settings
from accel.quantization.experts import holds_numbers
from accel.tolerances import ACTIVATION


@dataclass(frozen=True)
class MlpSpec:
    """One MLP. first: the projections of the input: one, or gate and up; down: the last; empty where `whole` is called.

    halves: the one projection gives gate and up, True for gate first, False for up first; None for no gate in it.
    whole: the module of them all, where there is one; alone: it takes the input and nothing else. settings: of that
    module and of the activation's, see `settings`. All by name, from the layer; "" for what there is not.
    """

    whole: str = ""
    alone: bool = True
    first: tuple[str, ...] = ()
    down: str = ""
    activation: str = ""
    settings: tuple[tuple[str, tuple], ...] = ()
    halves: bool | None = None


@dataclass(frozen=True)
class MlpCalls:
    """Where an MLP begins and ends in a record: the calls given its input first and giving its output; all modules."""

    first: Call
    last: Call
    modules: tuple[nn.Module, ...]


def understand_mlp(layer: LayerRecord) -> tuple[MlpSpec, MlpCalls]:
    """The MLP of a recorded layer. Raises NotUnderstood where the layer has none that can be told from the rest."""
    around = _ancestors(layer)
    mine = [call for call in layer.inside(layer.layer) if call.module not in around]
    containers = [call for call in mine if _matrices(call.module) and vars(call.module)["_modules"]]
    if len(containers) > 1:
        raise NotUnderstood("more than one block besides the attention")
    if containers:
        whole = containers[0]
        found = _formula(layer, layer.inside(whole.module), whole)
        if found is not None:
            return found
        if not whole.alone or whole.made is None:
            raise NotUnderstood("its MLP takes more than one tensor")
        return MlpSpec(layer.name(whole.module)), MlpCalls(whole, whole, (whole.module,))
    found = _formula(layer, [call for call in mine if call.alone], None)
    if found is None:
        raise NotUnderstood("no MLP that is known")
    return found


def _ancestors(layer: LayerRecord) -> set[nn.Module]:
    """The attention and the modules around it."""
    return {module for module in layer.layer.modules() if any(m is layer.attention for m in module.modules())}


def _matrices(module: nn.Module) -> bool:
    return any(p.dim() >= 2 for p in module.parameters()) or any(map(holds_numbers, module.modules()))


def _formula(layer: LayerRecord, calls: list[Call], whole: Call | None) -> tuple[MlpSpec, MlpCalls] | None:
    calls = [call for call in calls if call.alone and call.made is not None]
    acts = [(call, activation_name(call.module)) for call in calls if not list(call.module.parameters())]
    products = [call for call in calls if _matrices(call.module)]
    for act, name in ((call, name) for call, name in acts if name is not None):
        for down in products:
            first, halves = _before(act, down, [call for call in products if call is not down])
            if not first:
                continue
            names = tuple(layer.name(call.module) for call in first)
            spec = MlpSpec(
                "" if whole is None else layer.name(whole.module),
                alone=whole is None or whole.alone,
                first=names,
                down=layer.name(down.module),
                activation=name,
                settings=tuple((layer.name(call.module), plain_settings(call.module)) for call in (act, whole) if call),
                halves=halves,
            )
            parts = (*first, down, act) if whole is None else (*first, down, act, whole)
            modules = tuple(call.module for call in parts)
            return spec, MlpCalls(first[0], down, modules)
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


def activation_name(module: nn.Module) -> str | None:
    """The name of the activation a module without weights computes, or None."""
    x = torch.linspace(-9, 9, 2001, dtype=torch.float64)
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
