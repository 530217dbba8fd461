"""Layers that transformers has divided among ranks, and their weights, which are torch's DTensors."""

import sys
from typing import Any, NamedTuple

import torch
from torch import nn

from accel.libraries import tensor_parallel
from accel.libraries.tensor_parallel import STYLES, closure_of, dispatch_of
from accel.parallel.ranks import Ranks

TENSORS = "torch.distributed.tensor"
OUTPUTS, INPUTS = 0, 1  # which dimension of a weight (outputs, inputs) is divided; of a table, words and channels


class Sharding(NamedTuple):
    """How one module is divided. style, mesh: of transformers and torch, by which a module in its place is divided
    alike; None where none can be.

    dim: of a linear's or a table's weight, `OUTPUTS` or `INPUTS`; of experts None. gathers: the ranks' outputs are put
    side by side, so that each rank has all of them; what ranks give is summed where inputs, the words of a table or
    experts are divided. splits: it is given whole inputs and takes its part of them. first: the number of this rank's
    first expert where it is given numbers of all; an expert that it does not have adds nothing.
    """

    ranks: Ranks
    style: Any = None
    mesh: Any = None
    dim: int | None = None
    gathers: bool = False
    splits: bool = False
    first: int = 0

    def install(self, module: nn.Module) -> None:
        """Lets another module that holds this rank's part of the weights do before and after what this one does."""
        self.style.install_forward(module, self.mesh)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that is divided among ranks, always the same object; any other tensor itself.

    DTensor's own method would make a view: what is moved into one storage with others would stay where it was.
    """
    if type(tensor) is torch.Tensor or type(tensor) is nn.Parameter or not divided(tensor):
        return tensor
    return tensor._local_tensor  # type: ignore[attr-defined]


def divided(tensor: torch.Tensor | None) -> bool:
    """Whether ranks hold parts of it, or copies that they share: a DTensor. There is none before its module is."""
    kind = getattr(sys.modules.get(TENSORS), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def sharded_dim(tensor: torch.Tensor | None) -> int | None:
    """The dimension along which ranks have divided a tensor; None for one that each has whole."""
    if tensor is None or not divided(tensor):
        return None
    dims = [one.dim % tensor.dim() for one in tensor.placements if hasattr(one, "dim")]  # type: ignore[attr-defined]
    return dims[0] if dims else None


def sharding(module: nn.Module) -> Sharding | None:
    """How transformers has divided this linear or embedding; None for any other, or a way that is not known.

    Its closure is then all that stands in the place of the code of its class.
    """
    held = closure_of(module)
    if held is None or held[1].ndim != 1:
        return None
    how, weight = tensor_parallel.style_of(held[0], isinstance(module, nn.Embedding)), module._parameters.get("weight")
    if how is None or (weight is not None and not _lies(weight, how.dim)):
        return None
    return Sharding(Ranks.of(held[1].get_group()), *held, how.dim, how.gathers, how.splits)


def ranks_of(model: nn.Module) -> Ranks | None:
    """The ranks among which a model's weights are divided, or its layers work together; None where it is whole."""
    meshes = [parameter.device_mesh for parameter in model.parameters() if divided(parameter)]  # type: ignore[attr-defined]
    for find in (closure_of, dispatch_of):
        meshes += [held[1] for held in map(find, model.modules()) if held is not None]
    return None if not meshes else Ranks.of(meshes[0].get_group(0))


def fully_sharded(module: nn.Module) -> bool:
    """Whether torch's FSDP, of either kind, divides the weights of this module and those in it that it does not wrap.

    They are put together before each of its calls, in memory that is taken from them afterwards.
    """
    library = sys.modules.get("torch.distributed.fsdp")
    kinds = (getattr(library, name, None) for name in ("FullyShardedDataParallel", "FSDPModule"))
    return isinstance(module, tuple(kind for kind in kinds if kind is not None))


def expert_sharding(module: nn.Module) -> Sharding | None:
    """How transformers has divided the experts of this module; None for any other, or a way that is not known."""
    held = closure_of(module)
    if held is not None:
        known = type(held[0]) is getattr(sys.modules[STYLES], tensor_parallel.MATRICES) and held[1].ndim == 1
        return Sharding(Ranks.of(held[1].get_group()), *held) if known else None
    held = dispatch_of(module)
    if held is None or held[1].ndim != 1 or (here := tensor_parallel.experts_here(held[0])) is None:
        return None
    ranks = Ranks.of(held[1].get_group())
    return Sharding(ranks, first=ranks.rank * here)


def install_sharding(module: nn.Module, quantized: nn.Module) -> None:
    """Lets a quantized linear do around its product what transformers' closure of a divided module does."""
    held = closure_of(module)
    if held is not None:
        setattr(quantized, tensor_parallel.WITH_GRADIENTS, True)
        held[0].install_forward(quantized, held[1])


def known(module: nn.Module) -> bool:
    """Whether what stands in the place of the code of its class is what transformers divides it by, as known here."""
    return sharding(module) is not None or expert_sharding(module) is not None


def _lies(weight: torch.Tensor, dim: int) -> bool:
    """Whether a weight is divided along this dimension, and no other way."""
    if not divided(weight):
        return False
    (placement,) = weight.placements  # type: ignore[attr-defined]
    return type(placement).__name__ == "Shard" and placement.dim % weight.dim() == dim
