"""Which arguments of a denoiser say what: the noisy sample, the timestep, and what stays the same through a loop."""

from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from accel.diffusion.step_cache.moment import version

PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class StepArguments:
    """By their names. sample: a tensor, or tensors in lists. conditions: the same tensors in every step of a loop;
    they tell calls of one step apart. others: further samples, of which only the shapes matter.
    reads: a timestep's value may be read from a GPU, where nothing else tells whether a loop goes on.
    """

    sample: str
    timestep: str
    conditions: tuple[str, ...]
    others: tuple[str, ...] = ()
    reads: bool = False

    def samples(self, given: dict) -> list:
        return pytree.tree_leaves(given.get(self.sample))

    def unfit(self, given: dict) -> str | None:
        """Why nobody knows what this call depends on."""
        for leaf in self.samples(given) or [None]:
            if type(leaf) is not torch.Tensor:
                return f"a sample of type {type(leaf).__name__}"
        for name in (*self.conditions, *self.others):
            for leaf in pytree.tree_leaves(given.get(name)):
                if not isinstance(leaf, (torch.Tensor, *PLAIN)):
                    return f"{name} holds a {type(leaf).__name__}, which may change from step to step"
        return None

    def conditions_of(self, given: dict) -> tuple[tuple, tuple[torch.Tensor, ...]]:
        """A key for calls that belong together, and the tensors that are to be held while it is used."""
        leaves, structure = pytree.tree_flatten([given.get(name) for name in self.conditions])
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        places = tuple((_place(leaf) if isinstance(leaf, torch.Tensor) else leaf) for leaf in leaves)
        return (self.shapes(given), structure, places), tensors

    def shapes(self, given: dict) -> tuple:
        """Of everything that decides how large features are."""
        names = (self.sample, *self.others, *self.conditions)
        leaves = pytree.tree_leaves([given.get(name) for name in names])
        return tuple((leaf.shape, leaf.dtype, leaf.device) for leaf in leaves if isinstance(leaf, torch.Tensor))


def _place(tensor: torch.Tensor) -> tuple:
    """The numbers that a tensor shows: views made anew in every step show the same."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return id(tensor), version(tensor)
    storage = tensor.untyped_storage().data_ptr()
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), version(tensor)
