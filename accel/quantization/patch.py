"""Quantized modules put in the place of a model's own, and taken out again."""

from collections.abc import Callable, Container, Iterable
from typing import Any, TypeAlias

import torch
from torch import nn

from accel.errors import PatchConflict
from accel.libraries.hooks import hook_of
from accel.parallel.sharded_layers import known, local
from accel.patching.fast_forward import FastForward
from accel.patching.rule import Change, set_data
from accel.patching.structure import stock_method
from accel.quantization.experts import QuantizedExperts
from accel.quantization.module import QuantizedLinear
from accel.quantization.parking import Parking

QuantizedModule: TypeAlias = QuantizedLinear | QuantizedExperts


class QuantizedModulePatch:
    """A patch that exchanges (original, quantized) linears and experts of one model.

    The originals' weights wait on the CPU, so that the device holds one of both. They come back bit for bit, as the
    same Parameters, to the device that the model is on then. keep: without it `settle` drops them, and `undo` leaves
    the quantized ones in place. guard: a patch that is applied as long as quantized modules are in place. first: makes
    the quantized modules and calls `put`, at the first apply.
    """

    def __init__(
        self, root: nn.Module, keep: bool, guard: Change | None = None, first: Callable[[], None] | None = None
    ):
        self.root, self.keep, self.first = root, keep, first
        self.pairs: list[tuple[Any, QuantizedModule]] = []  # what stood there, and what does now
        self.there = self.final = False
        self.guard = guard

    def put(self, originals: Iterable[nn.Module], make: Callable[[Any], QuantizedModule]) -> None:
        """Exchanges the originals one by one for make(original): never more than a few weights twice on the device."""
        originals = list(originals)
        self.there = True
        if self.guard is not None:
            self.guard.apply()
        places, shared = _places(self.root, originals), held_elsewhere(self.root, originals)
        last = {id(weight): original for original in originals for weight in matrices(original)}
        with Parking() as parking:
            for original in originals:
                quantized = make(original)
                _share_hooks(original, quantized)
                self.pairs.append((original, quantized))
                _set(places[id(original)], quantized)
                for weight in matrices(original):
                    if last[id(weight)] is original and _parks(weight, shared):
                        parking.park(weight)

    def apply(self) -> None:
        """Puts them in place; once more after `undo`, the same ones."""
        if self.there or not (self.pairs or self.first):
            return
        (before, self.pairs), (first, self.first) = (self.pairs, []), (self.first, None)
        waiting = dict(before)
        try:
            if first is not None:
                first()
            else:
                weights = {one: matrices(one)[0] for one in waiting}
                self.put(waiting, lambda one: _moved(waiting[one], weights[one].device, weights[one].dtype))
        except BaseException:
            self.undo()
            self.pairs, self.first = before, first
            raise

    def drop(self) -> None:
        """Undoes what was put, for good."""
        self.undo()
        self.pairs = []

    def settle(self) -> None:
        """Drops the originals where they are not to be kept."""
        if not self.keep:
            self.pairs, self.final = [], True

    def check(self) -> None:
        """Raises PatchConflict where someone replaced the forward of a quantized module, as offloading does. A fast
        forward has a patch of its own. The modules may be inside an adapter by now.
        """
        if self.final or not self.there:
            return
        if self.guard is not None:
            self.guard.check()
        for _, quantized in self.pairs:
            forward = vars(quantized).get("forward")
            plain = forward is None or isinstance(forward, FastForward) or stock_method(quantized, forward)
            plain = plain or known(quantized)
            hook = hook_of(quantized)
            if hook is not None or not plain:
                by = repr(forward if hook is None else hook)
                raise PatchConflict(
                    f"{type(quantized).__name__}.forward was replaced after accel.optimize by {by}; "
                    "undo that change first (accelerate's hooks: remove_hook_from_submodules), then call accel.restore"
                )

    def undo(self) -> None:
        if self.final or not self.there:
            return
        if self.guard is not None:
            self.guard.undo()
        places = _places(self.root, [quantized for _, quantized in self.pairs])
        with Parking() as parking:
            for original, quantized in reversed(self.pairs):
                device, dtype = next(quantized.buffers(recurse=False)).device, quantized.dtype
                _set(places[id(quantized)], original)
                _leave(quantized, parking)
                if isinstance(quantized, QuantizedExperts):
                    vars(original).update(quantized.settings())
                weights = matrices(original)
                for weight in weights:
                    if (weight.device, weight.dtype) != (device, dtype):
                        set_data(weight, lambda data, device=device, dtype=dtype: data.to(device, dtype))
                for bias in map(local, original.parameters(recurse=False)):
                    beside = bias.untyped_storage().nbytes() != bias.nbytes  # others, see stack_rows
                    if beside and not any(bias is weight for weight in weights):
                        set_data(bias, torch.clone)
        self.there = False


def matrices(module: nn.Module) -> list[torch.Tensor]:
    """Those parameters of an original that are quantized: of most dimensions, as the stacks of experts. Of what is
    divided among ranks, this rank's part.
    """
    found = list(map(local, module.parameters(recurse=False)))
    most = max(parameter.dim() for parameter in found)
    return [parameter for parameter in found if parameter.dim() == most]


def exchange(root: nn.Module, pairs: Iterable[tuple[nn.Module, nn.Module]]) -> None:
    """Puts the second of each in all places of the first."""
    pairs = list(pairs)
    places = _places(root, [before for before, _ in pairs])
    for before, after in pairs:
        _share_hooks(before, after)
        _set(places[id(before)], after)


def _share_hooks(original: nn.Module, quantized: nn.Module) -> None:
    """Hooks put on one are on the other: those of the user's outlive `undo`."""
    for name, value in vars(original).items():
        if name.startswith(("_forward_", "_backward_")) and isinstance(value, dict):
            vars(quantized)[name] = value


def _places(root: nn.Module, modules: Iterable[nn.Module]) -> dict[int, list[tuple[nn.Module, str]]]:
    """(parent, name) of all places of each of these modules, by its id."""
    places: dict[int, list[tuple[nn.Module, str]]] = {id(module): [] for module in modules}
    for parent in root.modules():
        for name, child in parent._modules.items():
            if id(child) in places:
                places[id(child)].append((parent, name))
    return places


def _set(places: Iterable[tuple[nn.Module, str]], module: nn.Module) -> None:
    for parent, name in places:
        module.training = parent.get_submodule(name).training
        parent._modules[name] = module


def held_elsewhere(root: nn.Module, modules: Iterable[nn.Module]) -> dict[int, str]:
    """By the ids of parameters that modules other than these hold too: the path of one that does."""
    own = set(map(id, modules))
    others = ((path, module) for path, module in root.named_modules() if id(module) not in own)
    return {id(local(p)): path for path, module in others for p in module._parameters.values() if p is not None}


def _parks(weight: torch.Tensor, shared: Container[int]) -> bool:
    """Whether its memory on the device can be freed."""
    return weight.device.type != "cpu" and id(weight) not in shared and not weight.is_inference()


def _leave(module: QuantizedModule, parking: Parking) -> None:
    """Moves its buffers to the CPU; the bias is the original's too, and stays."""
    for name, tensor in module._buffers.items():
        if tensor is not None and tensor.device.type != "cpu":
            if tensor.is_inference():
                module._buffers[name] = tensor.cpu()
            else:
                parking.park(tensor)


def _moved(module: QuantizedModule, device: torch.device, dtype: torch.dtype) -> QuantizedModule:
    """The module with its buffers on a device; the bias is the original's too, and stays."""
    module.dtype = dtype
    with torch.inference_mode(False), torch.no_grad():
        for name, tensor in module._buffers.items():
            module._buffers[name] = None if tensor is None else tensor.to(device)
    return module
