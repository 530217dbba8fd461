"""The blocks of a model that can lie elsewhere between their calls, and what of each does."""

from collections.abc import Iterable, Iterator
from itertools import chain
from weakref import ref

import torch
from torch import nn

from accel.errors import Refused
from accel.libraries.adapters import BASE, own_parts
from accel.libraries.hooks import forward_slots, grouped_on_disk
from accel.offload.budget import ROOM_FOR_CALLS, Budget, WeightSizes
from accel.offload.call_hooks import streamed_model
from accel.offload.layout import Layout, bytes_in, is_movable, storage_of, weights_in
from accel.offload.piece import blocks_moved
from accel.patching.fast_forward import FastForward
from accel.patching.owner import PLAN

SHARE = 16  # a block is at most this part of its model, where it consists of blocks itself


def streaming_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The modules in lists that are called, by path, in the order they are registered.

    Weights of modules whose work a fast forward does without calling them stay where it finds them; layers whose guard
    sees hooks inside are not divided. Where most weights are experts', these alone.
    """
    if experts := stacked_experts(model):
        return experts
    fast = _fast_forwards(model)
    read = {id(part) for forward in fast for part in chain(*forward.parts()) if part is not forward.module}
    return dict(_blocks(model, "", read, nbytes(model) / SHARE))


def _fast_forwards(model: nn.Module) -> list[FastForward]:
    forwards = [holder.get(name) for module in model.modules() for holder, name in forward_slots(module)]
    forwards += [getattr(forward, "inner", None) for forward in forwards]
    return [forward for forward in forwards if isinstance(forward, FastForward)]


def stacked_experts(model: nn.Module) -> dict[str, nn.Module]:
    """By path, the modules that hold most weights of the model: experts that are alike in all, and read one by one."""
    found = {path: (module, experts_in(module)) for path, module in model.named_modules()}
    stacks = {path: module for path, (module, (experts, _)) in found.items() if experts}
    alike = len({found[path][1] for path in stacks}) == 1
    return stacks if alike and 2 * sum(map(nbytes, stacks.values())) > nbytes(model) else {}


def experts_in(module: nn.Module) -> tuple[int, tuple[int, ...]]:
    """How many experts a module holds in stacks, and bytes of one in each of them; (0, ()) for others."""
    forward = vars(module).get("forward")
    if isinstance(forward, FastForward):
        weights = forward.readable() if hasattr(forward, "readable") else None
        return (0, ()) if weights is None else (weights.experts, tuple(weights.steps()))
    stacks = [one for one in module._parameters.values() if one is not None and one.is_meta and one.dim() == 3]
    alike = len(stacks) == 2 and stacks[0].shape[0] == stacks[1].shape[0] > 1
    return (stacks[0].shape[0], tuple(one.nbytes // len(one) for one in stacks)) if alike else (0, ())


def _blocks(
    module: nn.Module, path: str, read: set[int], most: float, inside: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """inside: of a block, whose parts of several classes stay together."""
    items = _is_list_of_blocks(module, alike=inside)
    for name, child in module.named_children():
        if id(child) in read:
            continue
        place = f"{path}.{name}" if path else name
        whole = items and (nbytes(child) <= most or hasattr(vars(child).get("forward"), "layer_guard"))
        inner = [] if whole else list(_blocks(child, place, read, most, inside or items))
        if inner or not items:
            yield from inner
        else:
            yield place, child


def _is_list_of_blocks(module: nn.Module, alike: bool) -> bool:
    """Whether it holds modules that consist of others and are called: those that only hold some have no forward."""
    held = list(module.children()) if isinstance(module, nn.ModuleList) else []
    called = (type(one).forward is not nn.Module.forward and next(one.children(), None) is not None for one in held)
    return 0 < len(set(map(type, held))) <= (1 if alike else len(held)) and all(called)


def streamable(
    model: nn.Module, blocks: dict[str, nn.Module], joint: Iterable[nn.Module] = ()
) -> list[list[torch.Tensor]]:
    """Of each block the weights that nobody reads but its call: matrices, in memory that is theirs alone.

    Vectors stay: they are small, and a block's last operation may be fused with the norm of the next one. So do masks
    and tables of places, which guards read before a call, and the first weight of all, which tells where a model is;
    adapters, which are copied for a graph before a call; and what is computed for several blocks at once, as are these
    layers too.
    """
    held = [list(filter(_is_matrix, weights_in(block))) for block in blocks.values()]
    owner: dict[int, set[int]] = {}
    home = {id(one): number for number, tensors in enumerate(held) for one in tensors}
    for one in weights_in(model):
        owner.setdefault(storage_of(one), set()).add(home.get(id(one), -1))
    first = {id(one) for one in list(model.parameters())[:1]}
    shared = first | {id(one) for tensors in held for one in tensors if len(owner[storage_of(one)]) > 1}
    twice = [id(one) for tensors in held for one in tensors]
    shared |= {one for one in twice if twice.count(one) > 1} if len(set(twice)) < len(twice) else set()
    adapted = (part for one in model.modules() if BASE in one._modules for part in own_parts(one))
    shared |= {id(one) for part in adapted for one in chain(part._parameters.values(), part._buffers.values())}
    layers = chain(joint, *(forward.joint() for forward in _fast_forwards(model)))
    together = {id(layer): layer for layer in layers}
    shared |= {id(one) for layer in together.values() for one in weights_in(layer)}
    return [[one for one in tensors if id(one) not in shared] for tensors in held]


def sizes_of(model: nn.Module, joint: Iterable[nn.Module] = ()) -> WeightSizes:
    """As `StreamedModel` has them, or would, of a model on any device, meta too. joint: see `streamable`."""
    held = streamed_model(model)
    if held is not None and held.pieces:
        return held.sizes
    blocks = streamable(model, streaming_blocks(model), joint)
    moved = tuple(sum(one.nbytes for one in tensors) for tensors in blocks)
    experts = next((experts_in(one)[0] for one in stacked_experts(model).values()), 0)
    return WeightSizes(nbytes(model) - sum(moved), moved, experts)


def _is_matrix(weight: torch.Tensor) -> bool:
    return weight.dim() > 1 and weight.dtype not in (torch.bool, torch.int64) and is_movable(weight)


def still_placed(model: nn.Module, pieces: list, plans: list | None) -> tuple[list, list]:
    """The pieces, or none where they are to be made anew: blocks were moved, or by another plan than these somebody
    reads weights beside their block, as where the model was fused since. And the plans, as they are now.
    """
    now = [ref(vars(one)[PLAN]) for one in model.modules() if PLAN in vars(one)]
    moved = blocks_moved(model, pieces)
    if pieces and not moved and now != plans:
        blocks, present = streaming_blocks(model), set(map(id, weights_in(model)))
        alone = {path: set(map(id, held)) for path, held in zip(blocks, streamable(model, blocks), strict=True)}
        held = ((piece.path, present & {id(slot.tensor) for slot in piece.layout.slots}) for piece in pieces)
        moved = any(path and not own <= alone.get(path, set()) for path, own in held)
    return [] if moved else pieces, now


def any_on_meta(weights: list[torch.Tensor]) -> bool:
    """Whether some have no numbers: of a model on paper, or one that another offload brings part by part."""
    return any(one.is_meta for one in weights)


def brought_by_another(model: nn.Module) -> bool:
    """Whether another offload holds the numbers of its weights, and brings them to each call."""
    return any_on_meta(weights_in(model)) or grouped_on_disk(model)


def nbytes(model: nn.Module) -> int:
    """Of its weights, each counted once; so is the memory that several share, as tied ones do."""
    return sum({one.data_ptr() or id(one): bytes_in(one) for one in weights_in(model)}.values())


def check_whole(model: nn.Module, budget: Budget, reason: str | None, alone: bool = False) -> None:
    """Raises Refused for weights that cannot stream, for this reason, and are too large to be on the card as a whole.
    alone: nobody else brings them.
    """
    if alone or nbytes(model) > ROOM_FOR_CALLS * budget.card:
        raise Refused(f"memory=: the weights of a {type(model).__name__} cannot be streamed: {reason}")


def pieces(model: nn.Module, apart: set[int]) -> list[tuple[str, Layout]]:
    """The layout of each block's own weights; and last, as the first ones are pinned where not all may be, of what is
    in none, of path "", as are those apart, by id. Raises ValueError as `Layout`.
    """
    blocks = streaming_blocks(model)
    held = ([one for one in tensors if id(one) not in apart] for tensors in streamable(model, blocks))
    found = dict(zip(blocks, held, strict=True))
    own = {id(one) for tensors in found.values() for one in tensors}
    rest = Layout([one for one in weights_in(model) if id(one) not in own])
    return [*((path, Layout(tensors)) for path, tensors in found.items() if tensors), ("", rest)]
