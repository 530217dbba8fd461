"""What of a layer's modules its formula rests on besides weights: all that stock code could read of them in a call."""

import copy
from collections.abc import Iterable

import torch
from torch import nn

from accel.patching.fast_forward import FastForward
from accel.patching.settings import plain_value, settings
from accel.patching.structure import foreign_hooks, hooked, own_forward, stock_method

OF_ANY = frozenset(vars(nn.Module())) | {"forward", "config"}  # a configuration is looked at field by field


class Basis:
    """The modules of a layer as they were when it was understood, by their names in it.

    live: names of modules that are called, or looked at by whoever reads their weights; what is inside them is theirs.
    answered: of modules that are called where their type or settings are others, or something hangs on them.
    """

    def __init__(self, layer: nn.Module, live: Iterable[str], answered: Iterable[str]):
        live = tuple(live)
        self.answered = frozenset(answered)
        self.known = {
            name: (settings(module), _others(module))
            for name, module in layer.named_modules()
            if not any(name == one or name.startswith(f"{one}.") for one in live)
        }

    def changed(self, layer: nn.Module) -> str | None:
        """What is another now."""
        modules = dict(layer.named_modules())
        for name, (known, others) in self.known.items():
            module = modules.get(name)
            if module is None:
                return f"{name} is gone"
            now, metadata = settings(module), f"{name}." if name else ""
            if name in self.answered and now != known:
                continue
            if now != known:
                names = {f"{metadata}{pair[0]}" for pair in set(known[1:]) ^ set(now[1:])}
                return f"changed since it was optimized: {', '.join(sorted(names)) or now[0].__name__}"
            different = _different(_others(module), others)
            if different is not None:
                return f"changed since it was optimized: {metadata}{different}"
            hung = None if name in self.answered else _hung(module)
            if hung is not None:
                return f"{name or 'it'} has {hung}"
        return None


def _hung(module: nn.Module) -> str | None:
    """What hangs on a module that is not called any more, but for the hooks of transformers itself."""
    attributes = vars(module)
    if not isinstance(attributes.get("forward"), FastForward | None) and not stock_method(
        module, attributes["forward"]
    ):
        return f"a replaced forward ({own_forward(module)})"
    return hooked(module) if "_hf_hook" in attributes or foreign_hooks(module) else None


def _others(module: nn.Module) -> dict[str, object]:
    """Attributes that are neither plain values, which `settings` has, nor tensors or modules."""
    return {
        name: copy.copy(value) if isinstance(value, dict | list | set) else value
        for name, value in vars(module).items()
        if name not in OF_ANY and not plain_value(value) and not isinstance(value, torch.Tensor | nn.Module)
    }


def _different(now: dict[str, object], before: dict[str, object]) -> str | None:
    for name in sorted(now.keys() | before.keys()):
        value, known = now.get(name), before.get(name)
        if value is not known and not (isinstance(value, dict | list | set | tuple) and value == known):
            return name
    return None
