"""How a model wants to be called: what is found out about it by trying, beside the formulas of its layers."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

IN_ORDER, BY_MASK = "0, 1, 2 ..", "counted by the mask"  # positions a model gives itself where it is given none


class Kept(NamedTuple):
    """A tensor that a module keeps from call to call, and that no forward reads which is given positions.

    path: the module; name: its attribute; field: of the output that hands it on, None where none does.
    """

    path: str
    name: str
    field: str | None


# What an argument of a step may look like: a number for each new token, for each token so far, or three an image.
NEW, ALL, GRID = "new", "all", "grid"


@dataclass(frozen=True)
class CallingConvention:
    """output: the class of what it returns.

    mask: it takes a finished mask of four dimensions, and then makes none. positions: what it does without
    position_ids where a mask is given, IN_ORDER or BY_MASK; None for something else. fills: a prompt may be filled up
    on the right, and the logits of its last real token asked for by a tensor.

    bare: without a mask, or one that hides nothing, it reads a prompt as with one that hides something. counts: without
    mask and position_ids it counts 0, 1, 2 .. itself. parts: positions may also be (parts, rows, new), with one of
    these numbers of parts, as of time, height and width. idle: arguments, by name and form, that change nothing in a
    step of one token; blank: marks of tokens that change nothing where all are zero. kept: what generate() leaves in
    the model while it counts positions.
    """

    output: type
    mask: bool
    positions: str | None
    fills: bool = False
    bare: bool = True
    counts: bool = True
    parts: tuple[int, ...] = ()
    idle: frozenset[tuple[str, str]] = frozenset()
    blank: frozenset[str] = frozenset()
    kept: tuple[Kept, ...] = ()

    @property
    def passed(self) -> tuple[tuple[str, str], ...]:
        """What may change from call to call, as `Fingerprint` takes it."""
        return tuple((one.path, one.name) for one in self.kept)

    def says_nothing(self, name: str, value: torch.Tensor, rows: int, start: int, new: int) -> bool:
        """Whether an argument makes no difference to a call of `new` tokens behind `start`."""
        if start and new == 1 and any((name, form) in self.idle for form in forms(value.shape, rows, start, new)):
            return True
        # Waits for the GPU, once a prompt.
        return name in self.blank and value.shape == (rows, new) and not bool(value.any())

    def handed_on(self, model: nn.Module) -> dict[str, object]:
        """The fields of the output that hold what the model keeps."""
        held = {one.field: getattr(model.get_submodule(one.path), one.name) for one in self.kept if one.field}
        return {field: value for field, value in held.items() if value is not None}


def forms(shape: tuple[int, ...], rows: int, start: int, new: int) -> list[str]:
    """The forms that an argument of this shape may have."""
    lengths = {NEW: new, ALL: start + new}
    found = [form for form, length in lengths.items() if shape == (rows, length)]
    return [*found, GRID] if len(shape) == 2 and shape[1] == 3 else found
