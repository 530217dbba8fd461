"""Assignments to a part of a tensor, as steps that write nothing in place, since a pass cannot use such memory.

Two that fill an empty tensor join its halves. Some models rotate only the image's tokens: `query[:, :, text:] =
rotate(query[:, :, text:])`. A concatenation of the kept and the assigned rows is the same.
"""

from dataclasses import replace
from typing import Any

import torch

from accel.diffusion.dit.program import Program, Ref, TensorValue, TorchStep, refs, replaced
from accel.diffusion.dit.rotary_halves import EVEN, FIRST, ODD, SECOND, concatenate, halves_of, interleave


def without_assignments(program: Program) -> Program:
    """The program with joins and concatenations in place of assignments to an empty tensor or to some rows."""
    users, values = program.users(), program.values
    dropped: dict[int, TorchStep | None] = {}
    for place, step in enumerate(program.steps):
        if step.name not in ("empty_like", "zeros_like", "empty") or len(step.made) != 1:
            continue
        number = step.made[0]
        views = [v.number for v in values if v.base == number and v.number != number]
        filled = [i for i in users[number] if program.steps[i].name == "__setitem__"]
        others = [i for one in (number, *views) for i in users[one] if i not in filled]
        if len(filled) != 2 or (others and min(others) < filled[1]):
            continue
        if any(
            program.steps[i].args[0] != Ref(number) or not isinstance(program.steps[i].args[2], Ref) for i in filled
        ):
            continue
        if any(program.steps[i].writes for i in others):
            continue
        if any(values[one].device != values[number].device for i in filled for one in program.steps[i].taken):
            continue
        width = values[number].shape[-1]
        halves = {_columns(program.steps[i].args[1], width): program.steps[i].args[2] for i in filled}
        pair = next((pair for pair in ((EVEN, ODD), (FIRST, SECOND)) if halves.keys() == set(pair)), None)
        if pair is None:
            continue
        function = interleave if EVEN in pair else concatenate
        args = (*map(halves.get, pair), values[number].dtype)
        joined = TorchStep(function, function.__name__, args, {}, Ref(number))
        dropped |= {place: None, filled[0]: None, filled[1]: joined}
        for value in values:
            if value.base == number:
                value.pinned = False
    steps = [dropped.get(place, step) for place, step in enumerate(program.steps)]
    return _without_slices(Program(values, [step for step in steps if step is not None], program.result))


def _without_slices(program: Program) -> Program:
    """The program with a concatenation for each assignment to the first or the last rows of a tensor made in it."""
    place = 0
    while place < len(program.steps):
        if program.steps[place].name == "__setitem__":
            program = _joined(program, place)
        place += 1
    return program


def _joined(program: Program, place: int) -> Program:
    """The same program where the assignment is of another kind, or where something else looks at that memory."""
    values, steps = program.values, program.steps
    into, index, given = (*steps[place].args, None, None, None)[:3]
    if not isinstance(into, Ref) or not isinstance(given, Ref):
        return program
    whole, piece = values[into.number], values[given.number]
    window = _window(index, whole.shape)
    if window is None or whole.base != whole.number or whole.root is not None or not _contiguous(whole):
        return program
    dim, start, size = window
    shape = (*whole.shape[:dim], size, *whole.shape[dim + 1 :])
    same = piece.shape == shape and piece.dtype == whole.dtype and piece.device == whole.device
    if not same or piece.base == whole.number:
        return program
    memory = {value.number for value in values if value.base == whole.number}
    views_before = memory & {number for step in steps[:place] for number in step.made} - {whole.number}
    later = [*(number for step in steps[place + 1 :] for number in step.taken), *refs(program.result)]
    others = (step for i, step in enumerate(steps) if step.writes and i != place)
    if views_before & set(later) or any(memory & set(step.taken) for step in others):
        return program
    first = 0 if start else size
    kept = whole.shape[dim] - size
    rest = TensorValue(
        len(values),
        (*whole.shape[:dim], kept, *whole.shape[dim + 1 :]),
        whole.stride,
        whole.offset + first * whole.stride[dim],
        whole.dtype,
        whole.device,
        whole.number,
    )
    after = replace(whole, number=len(values) + 1, base=len(values) + 1, pinned=False)

    def renamed(tree: Any) -> Any:
        return replaced(tree, lambda one: Ref(after.number) if one == into else one)

    pieces = [Ref(rest.number), given] if start else [given, Ref(rest.number)]
    made = [
        TorchStep(torch.narrow, "narrow", (into, dim, first, kept), {}, Ref(rest.number)),
        TorchStep(torch.cat, "cat", (pieces, dim), {}, Ref(after.number)),
    ]
    changed = [replace(step, args=renamed(step.args), kwargs=renamed(step.kwargs)) for step in steps[place + 1 :]]
    seen = views_before | {whole.number}
    found = [
        replace(value, pinned=False, base=value.base if value.number in seen else after.number)
        if value.number in memory
        else value
        for value in values
    ]
    return Program([*found, rest, after], [*steps[:place], *made, *changed], renamed(program.result))


def _window(index: Any, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """The dimension, start and size of the first or the last rows; None for any other index, and for columns."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if parts.count(Ellipsis) == 1:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    if not all(isinstance(part, slice) for part in parts) or any(True for _ in refs(parts)):
        return None
    cut = [(dim, part) for dim, part in enumerate(parts) if part != slice(None)]
    if len(cut) != 1 or cut[0][0] >= len(shape) - 1:
        return None
    dim, part = cut[0]
    start, stop, step = part.indices(shape[dim])
    size = stop - start
    return (dim, start, size) if step == 1 and 0 < size < shape[dim] and (not start or stop == shape[dim]) else None


def _contiguous(value: TensorValue) -> bool:
    needed = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride), strict=True):
        if size != 1 and stride != needed:
            return False
        needed *= size
    return True


def _columns(index: object, width: int) -> str | None:
    """The half of rows that `[..., index]` takes."""
    if not isinstance(index, tuple) or len(index) != 2 or index[0] is not Ellipsis or not isinstance(index[1], slice):
        return None
    taken = list(range(width))[index[1]]
    places = {name: list(range(width)[start::step][: width // 2]) for name, (start, step) in halves_of(width).items()}
    return next((name for name, columns in places.items() if taken == columns), None)
