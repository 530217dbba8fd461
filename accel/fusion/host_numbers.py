"""Integers of a call that the host knows: what is made of a few of them is read without waiting for the GPU."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from accel.fusion.tensor_notes import TensorNotes

FEW = 1 << 16  # numbers of a tensor: more would take the host longer than the wait
READS = frozenset("item tolist __bool__ __int__ __index__ __float__ __format__".split())
CHANGES = frozenset(f"__i{one}__" for one in "add sub mul floordiv mod and or xor lshift rshift".split()) | {
    "__setitem__"
}
MAKES = frozenset(
    "eq __eq__ ne __ne__ sum prod any all _is_all_true mul __mul__ __rmul__ floor_divide __floordiv__".split()
)
MAKES |= frozenset(
    "__getitem__ unbind max min bool long int to add __add__ sub __sub__ gt __gt__ lt __lt__ unsqueeze clone".split()
)


class HostNumbers(TorchFunctionMode):
    """Inside, integers are made on the device as ever, and a few also on the host, where all that they are made of is
    known there. There they are read, and what a mask chooses is found. What is changed in place is known no more.

    pairs: tensors, and equal ones on the CPU.
    """

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]):
        super().__init__()
        self.known = {id(one): (one, host) for one, host in pairs}  # with itself, so that no other has its id
        self.chosen: dict[int, tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = {}  # by masks, with these themselves

    @classmethod
    def of_call(cls, kwargs: dict[str, Any], waits: bool = True) -> "HostNumbers":
        """Of the integers a call is given. waits: reads them, as the GPU is idle by then; else the known ones."""
        given = [one for one in kwargs.values() if type(one) is torch.Tensor and _few(one) and elsewhere(one)]
        pairs = ((one, one.cpu() if waits else on_host(one)) for one in given)
        return cls((one, host) for one, host in pairs if host is not one)

    def note(self) -> None:
        """What is known stays so behind this, on the tensors themselves."""
        for one, host in self.known.values():
            if not one.is_inference():  # which does not count its changes
                TensorNotes.begin(one).host = host

    def leave(self) -> None:
        """It is over, within its block already if nothing else was begun in that."""
        self.known.clear()
        if (stack := _get_current_function_mode_stack()) and stack[-1] is self:
            super().__exit__(None, None, None)

    def __exit__(self, *_: object) -> None:
        self.leave()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if not self.known or name.startswith("__get__"):
            return func(*args, **kwargs)
        if _changes(name, kwargs):
            written = args[:1] if name == "__setitem__" else (args, kwargs)
            changed = {one.untyped_storage().data_ptr() for one in _tensors(written)}
            known = self.known.items()
            self.known = {key: pair for key, pair in known if pair[0].untyped_storage().data_ptr() not in changed}
        if name in ("__getitem__", "__setitem__") and id(args[0]) not in self.known:
            return func(args[0], self._chosen(args[1]), *args[2:])
        mine = bool(args) and id(args[0]) in self.known and (name in READS or name in MAKES)
        if not mine or any(id(one) not in self.known for one in _tensors((args, kwargs))):
            return func(*args, **kwargs)
        if name == "to":  # another device, or another dtype
            made = func(*args, **kwargs)
            host = self._host(args[0]).to(made.dtype)
        else:
            given = tree_map_only(torch.Tensor, self._host, (args, kwargs))
            host = func(*given[0], **given[1])
            if name in READS:
                return host
            made = func(*args, **kwargs)
        pairs = zip(_tensors(made), _tensors(host), strict=True)
        self.known |= {id(one): (one, held) for one, held in pairs if _few(one)}
        return made

    def _chosen(self, index: Any) -> Any:
        """The index, with places for masks that are known: from a mask, the device would first have to count them."""
        parts = index if isinstance(index, tuple) else (index,)
        masks = [one for one in parts if isinstance(one, torch.Tensor) and one.dtype is torch.bool]
        if not masks or any(id(one) not in self.known for one in masks):
            return index
        for one in masks:
            if id(one) not in self.chosen:
                places = self._host(one).nonzero(as_tuple=True)
                places = tuple(held.pin_memory() for held in places) if one.is_cuda else places
                self.chosen[id(one)] = one, tuple(held.to(one.device, non_blocking=True) for held in places)
        found = (self.chosen.get(id(one), (one, (one,)))[1] for one in parts)
        return tuple(place for places in found for place in places)

    def _host(self, one: torch.Tensor) -> torch.Tensor:
        return self.known[id(one)][1]


def on_host(one: torch.Tensor) -> torch.Tensor:
    """What `note` has noted of it on the host; itself, where that is nothing, or it was changed since."""
    notes = None if one.is_inference() else TensorNotes.valid(one)
    return one if notes is None or notes.host is None else notes.host


def elsewhere(one: torch.Tensor) -> bool:
    """Whether the host would wait to read it."""
    return one.is_cuda


def few_on_host(one: Any) -> bool:
    """Whether these are integers on the CPU, few enough to be known."""
    return isinstance(one, torch.Tensor) and one.device.type == "cpu" and _few(one)


def _few(one: torch.Tensor) -> bool:
    return not one.is_floating_point() and not one.is_complex() and one.numel() <= FEW


def _changes(name: str, kwargs: dict) -> bool:
    """Whether a function writes into what it is given."""
    return name in CHANGES or "out" in kwargs or (name.endswith("_") and not name.endswith("__"))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]
