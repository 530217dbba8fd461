"""Models whose sequences diffusers divides among ranks, by `enable_parallelism(config=ContextParallelConfig(...))`.

That leaves a configuration with the mesh of ranks on the model and on its attention processors. Hooks split what a
module is given and gather what it gives (`libraries/hooks.py`).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from accel.libraries.diffusion import MESH, UNEVEN
from accel.parallel.ranks import Ranks


def sequence_ranks(config: Any) -> Ranks | None:
    """All ranks that compute one forward together; None where its mesh does not tell them."""
    mesh = getattr(config, MESH, None)
    if mesh is None or not dist.is_available() or not dist.is_initialized():
        return None
    return Ranks.of(mesh.get_group())


def uncapturable(config: Any) -> str | None:
    """Why no forward of a model that is divided so can be captured into CUDA graphs.

    Else all that ranks exchange may be: splitting is a view, an all-to-all and an all-gather of equal parts are
    launches whose results the stream waits for. What makes a capture fail is numbers that the host reads: ranks with
    sequences of different lengths tell each other the lengths, in every attention and as they gather.
    """
    uneven = next((name for name in UNEVEN if getattr(config, name, False)), None)
    if uneven is not None:
        return f"ranks tell each other the lengths of their sequences through the host ({uneven})"
    return None if sequence_ranks(config) is not None else "the ranks that divide its sequences are not known"


def waited(tree: Any) -> Any:
    """The received tensors, in place of those that wait when they are read.

    What is gathered for a batch of one is such a view at the end of a forward. A capture must not end before it is
    there.
    """

    def received(tensor: Any) -> torch.Tensor:
        return tensor.wait() if type(tensor).__name__ == "AsyncCollectiveTensor" else tensor

    return pytree.tree_map_only(torch.Tensor, received, tree)
