"""Assignments to a part of the rows, as steps that write nothing in place.

Some models rotate only the image's tokens: `query[:, :, text:] = rotate(query[:, :, text:])`. A pass cannot use memory
that is written in place. A concatenation of the kept and the assigned rows is the same, and passes can write into it.
"""

from dataclasses import replace
from typing import Any

import torch

from accel.diffusion.dit.program import Program, Ref, TensorValue, TorchStep, refs, replaced


def without_slices(program: Program) -> Program:
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
