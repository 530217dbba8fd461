"""What of a layer's modules its formula relies on besides weights; see `accel/patching/relied.py`."""

import hashlib
from collections.abc import Iterable

import torch
from torch import nn

from accel.libraries.hooks import hook_of
from accel.patching.fast_forward import FastForward
from accel.patching.patch import MISSING
from accel.patching.relied import TRAINING_INSIDE, PartRecord, another_class, changed_since, settings_of
from accel.patching.settings import plain_value
from accel.patching.structure import foreign_hooks, hooked, own_forward, stock_method, trains


class LayerParts:
    """The modules of a layer as they were when it was understood, by their names in it.

    live: names of modules that are called, or looked at by whoever reads their weights; what is inside them is theirs.
    answered: of modules that are called where their type or settings are others, or something hangs on them.
    """

    def __init__(self, layer: nn.Module, live: Iterable[str], answered: Iterable[str]):
        live = tuple(live)
        self.answered = frozenset(answered)
        self.records = {
            name: _record(module)
            for name, module in layer.named_modules()
            if not any(name == one or name.startswith(f"{one}.") for one in live)
        }

    def changed(self, layer: nn.Module) -> str | None:
        """What is another now."""
        modules = dict(layer.named_modules())
        for name, before in self.records.items():
            module = modules.get(name)
            if module is None:
                return changed_since(f"{name}, which is gone,")
            now = _record(module)
            others = before.others(now)
            if name in self.answered:
                values = (record.settings.get(other, MISSING) for other in others for record in (before, now))
                if now.kind is not before.kind or any(map(plain_value, values)):
                    continue
            if now.kind is not before.kind:
                return changed_since(f"{name or 'it'}: {another_class(before.kind, now.kind)}")
            if others:
                return changed_since(".".join(filter(None, (name, min(others)))))
            reason = None if name in self.answered else hung(module)
            if reason is not None:
                return f"{name or 'it'} has {reason}"
        return None


def hung(module: nn.Module) -> str | None:
    """What hangs on a module that is not called any more, but for the hooks of transformers itself, and for one of
    accelerate's in whose place its fast forward stands.
    """
    if trains(module):
        return TRAINING_INSIDE
    aligned = hook_of(module) is not None and getattr(vars(module).get("forward"), "around", None) is None
    return replaced_forward(module) or (hooked(module) if aligned or foreign_hooks(module) else None)


def replaced_forward(module: nn.Module) -> str | None:
    """That this instance has a forward which is neither its class's nor a fast one."""
    forward = vars(module).get("forward")
    if isinstance(forward, FastForward | None) or stock_method(module, forward):
        return None
    return f"a replaced forward ({own_forward(module)})"


def _record(module: nn.Module) -> PartRecord:
    """Tensors are weights, and modules that lie beside the submodules are somebody else's. Buffers by their content."""
    values = settings_of(module).items()
    found = {k: v for k, v in values if not isinstance(v, torch.Tensor | nn.Module)}
    return PartRecord(type(module), None, found | {k: _content(v) for k, v in module._buffers.items() if v is not None})


def _content(buffer: torch.Tensor) -> tuple:
    """Equal for equal content. Of tables of fractions nothing: they are read where they lie, in any precision."""
    if buffer.is_meta or buffer.is_floating_point():
        return ()
    return tuple(buffer.shape), hashlib.sha1(buffer.detach().cpu().contiguous().numpy().tobytes()).digest()
