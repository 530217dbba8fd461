"""Reversible changes to one object: an attribute, or the memory layout of weights.

Every change knows what was there before, "nothing" included, so undoing it leaves no trace.
"""

import enum
import types
from collections.abc import Callable, Sequence

import torch
from torch import nn

from accel.quant.module import in_rows
from accel.structure import stock_method


class Sentinel(enum.Enum):
    """`MISSING` marks an attribute that was not there; an enum member survives pickle and deepcopy as itself."""

    MISSING = "missing"


MISSING = Sentinel.MISSING


class PatchConflict(RuntimeError):
    """Someone changed an attribute after us; undoing would throw their change away."""


class Patch:
    """Sets `vars(owner)[name]` on one instance, never on a class; undo restores the old value or its absence."""

    def __init__(self, owner: object, name: str, value: object):
        self.owner, self.name, self.value = owner, name, value
        self.before: object = MISSING

    def apply(self) -> None:
        self.before = vars(self.owner).get(self.name, MISSING)
        vars(self.owner)[self.name] = self.value

    def check(self) -> None:
        """Raises PatchConflict unless the attribute is still what `apply` put there."""
        current = vars(self.owner).get(self.name, MISSING)
        if current is not self.value:
            raise PatchConflict(
                f"{type(self.owner).__name__}.{self.name} was replaced after accel.optimize by {current!r}; "
                "undo that change first, then call accel.restore"
            )

    def undo(self) -> None:
        if self.before is MISSING:
            vars(self.owner).pop(self.name, None)
        else:
            vars(self.owner)[self.name] = self.before


class ForwardPatch(Patch):
    """Replaces the forward of one module, underneath the hooks of accelerate and diffusers where there are any.

    Both keep the forward they wrap, accelerate in `_old_forward`, diffusers in the references of its hook registry;
    and a hook that comes after us keeps ours there. All these places are looked at, so hooks and patches may come and
    go in any order.
    """

    def __init__(self, module: nn.Module, value: object):
        super().__init__(module, "forward", value)

    def apply(self) -> None:
        places = self._places(lambda value: stock_method(self.owner, value))
        holder, self.name = places[0] if places else (vars(self.owner), "forward")
        self.before = holder.get(self.name, MISSING)
        holder[self.name] = self.value

    def check(self) -> None:
        if not self._places(lambda value: value is self.value):
            self.name = "forward"
            super().check()

    def undo(self) -> None:
        for holder, name in self._places(lambda value: value is self.value):
            if name == self.name and self.before is not MISSING:
                holder[name] = self.before
            elif name == "forward" and holder is vars(self.owner):  # nothing was there, or our hook is gone
                del holder[name]
            else:  # a hook was put on top: let it wrap the stock forward
                holder[name] = types.MethodType(type(self.owner).forward, self.owner)

    def _places(self, wanted: Callable) -> list[tuple[dict, str]]:
        """(attributes, name) of all places where a forward of the module is kept that is `wanted`."""
        attributes = vars(self.owner)
        references = getattr(attributes.get("_diffusers_hook"), "_fn_refs", ())
        places = [(attributes, "forward"), (attributes, "_old_forward")]
        places += [(vars(reference), name) for reference in references for name in ("forward", "original_forward")]
        return [(holder, name) for holder, name in places if wanted(holder.get(name))]


def foreign_forward(module: nn.Module) -> str | None:
    """Why the module's forward may not be replaced: someone else did so, and no hook keeps the stock one."""
    patch = ForwardPatch(module, None)
    if "forward" not in vars(module) or patch._places(lambda value: stock_method(module, value)):
        return None
    return f"its forward was replaced ({type(vars(module)['forward']).__name__})"


class ChannelsLast:
    """Stores 4-D weights as (out, height, width, in), in place: same Parameter, same values, other strides.

    everywhere: not on GPUs alone. Without it, on a CPU, they stay: convolutions would hand channels-last images to
    stock code, and torch's own group norm over those is wrong there, far from zero.
    """

    def __init__(self, modules: Sequence[nn.Module], everywhere: bool = False):
        self.modules, self.everywhere = tuple(modules), everywhere
        self.strides: dict[int, tuple[int, ...]] = {}
        self.on_gpu = False

    @staticmethod
    def lies_on_gpu(weight: torch.Tensor) -> bool:
        return weight.is_cuda

    def follow(self, device: torch.device) -> None:
        """The model is called on this device, to which it may have been moved since."""
        if device.type in ("cuda", "cpu") and (device.type == "cuda") is not self.on_gpu and not self.everywhere:
            if self.on_gpu:
                self.undo()
            else:
                self.apply()

    def apply(self) -> None:
        weights = [module.weight for module in self.modules]
        self.on_gpu = any(map(self.lies_on_gpu, weights))
        for index, weight in enumerate(weights):
            if not (self.everywhere or self.lies_on_gpu(weight)):
                continue
            if not weight.is_meta and not weight.is_contiguous(memory_format=torch.channels_last):
                self.strides[index] = weight.stride()
                set_data(weight, lambda data: data.contiguous(memory_format=torch.channels_last))

    def check(self) -> None:
        """A layout the user changed since is theirs; undo leaves it alone."""

    def undo(self) -> None:
        for index, strides in self.strides.items():
            weight = self.modules[index].weight
            if weight.is_contiguous(memory_format=torch.channels_last):
                set_data(weight, lambda data, strides=strides: _strided(data, strides))
        self.strides, self.on_gpu = {}, False


class Stacked:
    """Puts the weights of several linears into one storage, each a view of its rows, so that one GEMM serves all.

    No new parameters, no second copy: `stacked_rows` finds the whole again from the parts. Undo gives each its own
    storage.
    """

    def __init__(self, linears: Sequence[nn.Linear]):
        self.linears = linears  # as given: whoever made the list may still add to it before the patch is applied

    def apply(self) -> None:
        if len({type(linear) for linear in self.linears}) == 1:
            for parts in zip(*map(in_rows, self.linears), strict=True):
                stack_rows(parts)

    def check(self) -> None:
        """Nothing to conflict with: values and shapes are the user's own."""

    def undo(self) -> None:
        for linear in self.linears:
            for tensor in in_rows(linear):
                if tensor is not None and tensor.untyped_storage().nbytes() != tensor.nbytes:
                    set_data(tensor, torch.clone)


def stacked_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensor whose consecutive rows the parts are, or None where they do not lie one after the other."""
    first = parts[0]
    place = first.data_ptr()
    for part in parts:
        if part.data_ptr() != place or part.dtype != first.dtype or not part.is_contiguous():
            return None
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        place += part.nbytes
    rows = sum(part.shape[0] for part in parts)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def stack_rows(parts: Sequence[torch.Tensor | None]) -> None:
    """Moves the parts into one storage, in place; does nothing where one is missing, or they do not match."""
    if any(part is None or part.is_meta for part in parts) or stacked_rows(parts) is not None:
        return
    if any(part.is_inference() for part in parts):  # their place in memory cannot be changed
        return
    if len({id(part) for part in parts}) != len(parts):  # tied weights cannot be two rows of one storage
        return
    if len({(part.dtype, part.device, part.shape[1:]) for part in parts}) != 1:
        return
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat([part.detach() for part in parts])
        for part, rows in zip(parts, whole.split([part.shape[0] for part in parts]), strict=True):
            part.data = rows


def set_data(parameter: torch.Tensor, change) -> None:
    """parameter.data = change(parameter.data): an ordinary tensor stays one under inference mode, as an inference
    tensor does outside of it. One with the data of the other kind would have no version, and not say so.
    """
    with torch.inference_mode(parameter.is_inference()), torch.no_grad():
        parameter.data = change(parameter.detach())


def _strided(data: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(data.shape, strides, dtype=data.dtype, device=data.device).copy_(data)
