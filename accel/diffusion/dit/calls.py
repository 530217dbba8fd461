"""Which plan holds for a call of a block: kinds of blocks and of calls, their code, and the tensors that they read."""

import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from accel.diffusion.dit.executable import Executable
from accel.diffusion.dit.ranks.receive_buffers import ReceiveBuffers
from accel.diffusion.dit.recorder import PLAIN, tensors_in
from accel.libraries.adapters import own_parts
from accel.libraries.diffusion import attention_backends
from accel.patching.code import CalledCode, ClassCode, CodeTable
from accel.patching.guard import BASE, settings_of
from accel.patching.owner import PartlyCopied
from accel.quantization.product import adapts, keeps_forward
from accel.quantization.scheme import Scheme


def weights_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """By path; a tensor that stands in two places under both."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
    yield from attributes_of(module)


def attributes_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are attributes of modules, or stand in a dictionary that is one, as the scales of adapters do."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name in BASE:
                continue
            place = f"{path}.{name}" if path else name
            if isinstance(value, torch.Tensor):
                yield place, value
            elif type(value) is dict:
                yield from ((f"{place}[{key}]", one) for key, one in value.items() if isinstance(one, torch.Tensor))


def attributes_replaced(before: list[tuple[str, torch.Tensor]], now: list[tuple[str, torch.Tensor]]) -> bool:
    """Whether some tensor stands where another stood."""
    return [(path, id(one)) for path, one in before] != [(path, id(one)) for path, one in now]


def weight_forms(held: list[dict[str, torch.Tensor | None]]) -> list:
    """Type, dtype and shape of each tensor; fast, since it is called in every forward."""
    return [None if one is None else (type(one), one.dtype, one.shape) for part in held for one in part.values()]


def called_layers(module: nn.Module) -> dict[str, nn.Module]:
    """By path, the linears inside that run their own forward, of a library's format, in an adapter or out of it; and
    those with adapters of low rank.
    """
    return {
        path: part
        for path, part in module.named_modules()
        if path and ((isinstance(part, nn.Linear) and keeps_forward(part)) or adapts(part))
    }


def weight_of(module: nn.Module, path: str) -> Any:
    """The tensor, or the called layer, that stands at a path now."""
    place, _, key = path.removesuffix("]").partition("[")
    owner, _, name = place.rpartition(".")
    attributes = vars(module.get_submodule(owner))
    for held in (attributes["_parameters"], attributes["_buffers"], attributes["_modules"]):
        if held.get(name) is not None:
            return held[name]
    return attributes[name][key] if key else attributes[name]


def block_signature(module: nn.Module) -> tuple:
    """All that decides what a block computes besides its weights: equal for blocks of one program."""
    found: list[tuple] = []
    apart: set[int] = set()  # of adapters that whoever runs a plan adds as they are by then
    for path, part in module.named_modules():
        if adapts(part):
            apart.update(map(id, own_parts(part)))
            found.append((path, type(part)))
        if id(part) in apart:
            continue
        tensors = [*part._parameters.items(), *part._buffers.items()]
        shapes = ((name, None if t is None else (type(t), t.shape, t.dtype, t.device)) for name, t in tensors)
        found.append((path, type(part), _settings(part), tuple(shapes)))
        processor = vars(part).get("processor")
        if processor is not None:
            found.append((type(processor), _settings(processor)))
    return tuple(found)


def _settings(part: object) -> tuple:
    held = ((name, value) for name, value in settings_of(part).items() if name not in BASE and name != "processor")
    return tuple((name, frozen(value)) for name, value in held)


def frozen(value: object) -> Hashable:
    """A hashable value: plain settings and containers by value, tensors by their form, other objects by identity."""
    if isinstance(value, (*PLAIN, Scheme)):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return type(value), value.shape, value.dtype, value.device
    if isinstance(value, list | tuple):
        return type(value), *map(frozen, value)
    if isinstance(value, dict):
        return type(value), *((frozen(name), frozen(one)) for name, one in value.items())
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(frozen, value))
    return ByIdentity(value)


@dataclass(frozen=True, eq=False)
class ByIdentity:
    """An object compared by identity. It is kept alive, so that no other object gets its place in memory."""

    held: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


def call_signature(args: tuple, kwargs: dict) -> tuple | None:
    """All that decides which steps a call makes; None where that is not known.

    Tensors count by shape, strides and dtype, and by which arguments are the same tensor.
    """
    form, places = _form((args, kwargs)), [id(tensor) for tensor in tensors_in((args, kwargs))]
    if form is None or len(set(places)) == len(places):
        return form
    return form, *map(places.index, places)


def _form(tree: Any) -> tuple | None:
    if isinstance(tree, torch.Tensor):
        if type(tree) not in (torch.Tensor, nn.Parameter) or tree.layout is not torch.strided:
            return None
        return "tensor", tree.shape, tree.stride(), tree.dtype, tree.device
    if isinstance(tree, tuple | list | dict):
        if type(tree) not in (tuple, list, dict):
            return None
        pairs = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree))
        members = [(name, _form(one)) for name, one in pairs]
        return None if any(one is None for _, one in members) else (type(tree), *members)
    return ("plain", type(tree), tree) if isinstance(tree, PLAIN) else None


class BlockCode(CalledCode):
    """All code of a block's classes, the functions that a call runs, and diffusers' attention backends.

    A plan calls none of it: it holds what these functions were seen to compute.
    """

    def find(self) -> list[CodeTable]:
        backends = attention_backends()
        tables = [CodeTable("attention backends", backends, tuple(backends), dict(backends))] if backends else []
        return [*ClassCode(self.kinds).tables, *super().find(), *tables]

    def entries(self) -> list[object]:
        return list(attention_backends().values())


MOST_CALLS = 64  # kinds of calls that are remembered of one kind of block
MOST_KINDS = 64  # of blocks, as many settings of an adapter make


@dataclass
class BlockPlan:
    """What runs for one kind of call, or why stock does. compared: with stock. outcome: of a dry run, no values."""

    executable: Executable | None = None
    reason: str = ""
    compared: bool = False
    outcome: Any = None

    def dry_run(self, run: Callable[[], Any]) -> Any:
        """run(), in which launches only compile; once for all blocks of the plan, since they launch the same."""
        if self.outcome is None:
            made = run()
            self.outcome = pytree.tree_map_only(torch.Tensor, lambda one: (one.device, one.to("meta")), made)
            return made
        return pytree.tree_map(_unfilled, self.outcome, is_leaf=_is_outcome)


def _is_outcome(one: object) -> bool:
    return isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], torch.device)


def _unfilled(one: Any) -> Any:
    return torch.empty_like(one[1], device=one[0]) if _is_outcome(one) else one


class BlockPlans(PartlyCopied):
    """The plans of all blocks of a model, by kind of block and of call, and the receive buffers of their exchanges."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.found: dict[tuple, dict[tuple, BlockPlan]] = {}
        self.buffers = ReceiveBuffers()
        self.lock = threading.RLock()

    def of(self, kind: tuple) -> dict[tuple, BlockPlan]:
        """The plans of one kind of block, by kind of call. A block keeps the result: hashing its kind takes long."""
        with self.lock:
            if kind not in self.found and len(self.found) >= MOST_KINDS:
                del self.found[next(iter(self.found))]
            return self.found.setdefault(kind, {})

    def keep(self, plans: dict[tuple, BlockPlan], call: tuple, plan: BlockPlan) -> None:
        with self.lock:
            if len(plans) >= MOST_CALLS:
                del plans[next(iter(plans))]
            plans[call] = plan
