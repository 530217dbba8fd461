"""Quantised linears put in the place of a model's own, and taken out again."""

from collections.abc import Container, Iterable

import torch
from torch import nn

from accel.patch import Patch, PatchConflict, set_data
from accel.quant.module import QuantisedLinear
from accel.quant.parking import Parking
from accel.structure import stock_method


class Swap:
    """A patch: (original, quantised) linears of one model, exchanged.

    The weights of the originals wait on the CPU, so that the device holds either those or the quantised ones. They come
    back bit for bit, the same Parameters, to the device where the model then is. keep: without it `settle` drops them,
    and `undo` leaves the quantised ones in place. guard: a patch that is there as long as quantised linears are.
    """

    def __init__(self, root: nn.Module, keep: bool, guard: Patch | None = None):
        self.root, self.keep = root, keep
        self.pairs: list[tuple[nn.Module, QuantisedLinear]] = []
        self.there = self.final = False
        self.guard = guard

    def put(self, originals: Iterable[nn.Module], make) -> None:
        """Exchanges the originals one by one for make(original): never more than a few weights twice on the device."""
        originals = list(originals)
        self.there = True
        if self.guard is not None:
            self.guard.apply()
        places, shared = _places(self.root, originals), held_elsewhere(self.root, originals)
        last = {id(original.weight): original for original in originals}
        with Parking() as parking:
            for original in originals:
                quantised = make(original)
                _share_hooks(original, quantised)
                self.pairs.append((original, quantised))
                _set(places[id(original)], quantised)
                weight = original.weight
                if last[id(weight)] is original and _parks(weight, shared):
                    parking.park(weight)

    def apply(self) -> None:
        """Once more after `undo`; the first time `put` has done it already."""
        if self.there:
            return
        before, self.pairs = self.pairs, []
        waiting = dict(before)
        try:
            self.put(waiting, lambda original: _moved(waiting[original], original.weight.device, original.weight.dtype))
        except BaseException:
            self.undo()
            self.pairs = before
            raise

    def settle(self) -> None:
        """Drops the originals where they are not to be kept."""
        if not self.keep:
            self.pairs, self.final = [], True

    def check(self) -> None:
        """Raises PatchConflict where someone replaced the forward of a quantised linear, as offloading does.

        Wherever they are by now, in an adapter or out of it, they are found.
        """
        if self.final or not self.there:
            return
        if self.guard is not None:
            self.guard.check()
        for _, quantised in self.pairs:
            forward = vars(quantised).get("forward")
            if "_hf_hook" in vars(quantised) or (forward is not None and not stock_method(quantised, forward)):
                by = repr(vars(quantised).get("_hf_hook", forward))
                raise PatchConflict(
                    f"QuantisedLinear.forward was replaced after accel.optimize by {by}; "
                    "undo that change first (accelerate's hooks: remove_hook_from_submodules), then call accel.restore"
                )

    def undo(self) -> None:
        if self.final or not self.there:
            return
        if self.guard is not None:
            self.guard.undo()
        places = _places(self.root, [quantised for _, quantised in self.pairs])
        with Parking() as parking:
            for original, quantised in reversed(self.pairs):
                device, dtype = quantised.data.device, quantised.dtype
                _set(places[id(quantised)], original)
                _leave(quantised, parking)
                if (original.weight.device, original.weight.dtype) != (device, dtype):
                    set_data(original.weight, lambda data, device=device, dtype=dtype: data.to(device, dtype))
                bias = original.bias
                if bias is not None and bias.untyped_storage().nbytes() != bias.nbytes:  # beside others, see stack_rows
                    set_data(bias, torch.clone)
        self.there = False


def exchange(root: nn.Module, pairs: Iterable[tuple[nn.Module, nn.Module]]) -> None:
    """Puts the second of each in all places of the first."""
    pairs = list(pairs)
    places = _places(root, [before for before, _ in pairs])
    for before, after in pairs:
        _share_hooks(before, after)
        _set(places[id(before)], after)


def _share_hooks(original: nn.Module, quantised: nn.Module) -> None:
    """Hooks put on one are on the other: those of the user's outlive `undo`."""
    for name, value in vars(original).items():
        if name.startswith(("_forward_", "_backward_")) and isinstance(value, dict):
            vars(quantised)[name] = value


def _places(root: nn.Module, modules: list[nn.Module]) -> dict[int, list[tuple[nn.Module, str]]]:
    """(parent, name) of all places of each of these modules, by its id."""
    places = {id(module): [] for module in modules}
    for parent in root.modules():
        for name, child in parent._modules.items():
            if id(child) in places:
                places[id(child)].append((parent, name))
    return places


def _set(places: list[tuple[nn.Module, str]], module: nn.Module) -> None:
    for parent, name in places:
        module.training = parent._modules[name].training
        parent._modules[name] = module


def held_elsewhere(root: nn.Module, modules: Iterable[nn.Module]) -> dict[int, str]:
    """By the ids of parameters that modules other than these hold too: the path of one that does."""
    own = set(map(id, modules))
    others = ((path, module) for path, module in root.named_modules() if id(module) not in own)
    return {id(p): path for path, module in others for p in module._parameters.values() if p is not None}


def _parks(weight: nn.Parameter, shared: Container[int]) -> bool:
    """Whether its memory on the device can be given free."""
    return weight.device.type != "cpu" and id(weight) not in shared and not weight.is_inference()


def _leave(module: QuantisedLinear, parking: Parking) -> None:
    """Its numbers go to the CPU; the bias, which is the original's too, stays."""
    for name, tensor in module._buffers.items():
        if tensor is not None and tensor.device.type != "cpu":
            if tensor.is_inference():
                module._buffers[name] = tensor.cpu()
            else:
                parking.park(tensor)


def _moved(module: QuantisedLinear, device: torch.device, dtype: torch.dtype) -> QuantisedLinear:
    """Its numbers on another device; the bias, which is the original's too, stays."""
    module.dtype = dtype
    with torch.inference_mode(False), torch.no_grad():
        for name, tensor in module._buffers.items():
            module._buffers[name] = None if tensor is None else tensor.to(device)
    return module
