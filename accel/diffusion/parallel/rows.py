"""Which part of a call's arguments each rank takes: rows of every tensor whose first dimension is the batch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from accel.parallel.ranks import Ranks

PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


class BatchCall(NamedTuple):
    """The arguments of a call as leaves. sample: the place of the noisy image, None where it is no tensor."""

    leaves: list
    spec: pytree.TreeSpec
    sample: int | None

    @classmethod
    def of(cls, args: tuple, kwargs: dict, name: str) -> "BatchCall":
        """name: of the first parameter, which is the noisy image."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        sample = args[0] if args else kwargs.get(name)
        place = next((i for i, leaf in enumerate(leaves) if leaf is sample and isinstance(leaf, torch.Tensor)), None)
        return cls(leaves, spec, place)

    @property
    def batch(self) -> int:
        return 0 if self.sample is None or self.leaves[self.sample].dim() == 0 else len(self.leaves[self.sample])

    def names(self, names: Sequence[str]) -> list[str]:
        """Of each leaf the argument that it is of, by the names of the parameters in order."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self.spec)
        given = [*zip(names, args, strict=False), *kwargs.items()]
        return [name for name, value in given for _ in pytree.tree_leaves(value)]

    def divided(self, ranks: int) -> "list[bool] | str":
        """Which of the leaves are divided; or why none can be."""
        batch = self.batch
        if not batch:
            return "its first argument is no tensor with a batch"
        if batch % ranks:
            return f"a batch of {batch}, which {ranks} ranks cannot share equally"
        found = []
        for leaf in self.leaves:
            if not isinstance(leaf, torch.Tensor):
                if not isinstance(leaf, PLAIN):
                    return f"an argument holds a {type(leaf).__name__}"
                found.append(False)
            elif type(leaf) not in (torch.Tensor, torch.nn.Parameter):
                return f"an argument is a {type(leaf).__name__}"
            elif leaf.dim() == 0 or len(leaf) == 1:  # one value for all rows
                found.append(False)
            elif len(leaf) == batch:
                found.append(True)
            else:
                return f"a tensor of {tuple(leaf.shape)} in a call of {batch} rows"
        return found


def rank_rows(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The rows of this rank, a view."""
    rows = len(tensor) // ranks.size
    return tensor.narrow(0, ranks.rank * rows, rows)


def gather_rows(output: Any, rows: int, ranks: Ranks) -> Any:
    """What a forward gave for the rows of each rank, put together on all of them; of the same structure.

    Raises TypeError for an output that is not made of tensors with that many rows.
    """
    leaves, spec = pytree.tree_flatten(output)
    if (reason := not_rows(leaves, rows)) is not None:
        raise TypeError(reason)
    return pytree.tree_unflatten([None if leaf is None else _gathered(leaf, ranks) for leaf in leaves], spec)


def not_rows(leaves: list, rows: int) -> str | None:
    """Why leaves of an output do not have a row for each row of the input."""
    for leaf in leaves:
        if leaf is not None and (type(leaf) is not torch.Tensor or leaf.dim() == 0 or len(leaf) != rows):
            shape = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            return f"gives {shape} for {rows} rows"
    return None


def _gathered(part: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """As bytes: the same bits on all ranks, of any dtype."""
    part = part.contiguous()
    whole = part.new_empty(ranks.size * len(part), *part.shape[1:])
    dist.all_gather_into_tensor(whole.view(-1).view(torch.uint8), part.view(-1).view(torch.uint8), group=ranks.group)
    return whole
