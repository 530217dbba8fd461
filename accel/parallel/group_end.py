"""What has to be let go of before torch ends its process groups.

A CUDA graph with a collective of NCCL in it holds the communicator, and `destroy_process_group()` waits until the last
such graph is gone. Torch has no hook for its end. It ends its groups one by one, in the reverse order of their names,
and asks each for nothing but its shutdown: so one more entry, of the last name, is the first to be told.
"""

import weakref
from typing import Any, NoReturn, Protocol

import torch.distributed as dist
from torch.distributed import distributed_c10d

LAST_NAME = "~accel"  # behind all letters and digits, of which torch makes names


class GraphHolder(Protocol):
    """What holds graphs."""

    def clear(self) -> None: ...


class GroupEnd:
    """Stands among torch's process groups as long as there are some; tells those who hold graphs of their end."""

    def __init__(self) -> None:
        self.holders: weakref.WeakSet[Any] = weakref.WeakSet()

    def shutdown(self) -> None:
        """What torch calls where all groups end."""
        for holder in list(self.holders):
            holder.clear()

    abort = shutdown

    def _get_backend(self, device: object) -> NoReturn:
        """What older versions of torch ask for, and then go on to the next group."""
        self.shutdown()
        raise RuntimeError("a group without a backend")


def clear_at_end(holder: GraphHolder) -> None:
    """holder.clear() is called before torch ends its process groups. Does nothing where there are none."""
    names = getattr(getattr(distributed_c10d, "_world", None), "pg_names", None)
    if names is None or not dist.is_initialized():
        return
    end = next((group for group in names if isinstance(group, GroupEnd)), None)
    if end is None:
        names[end := GroupEnd()] = LAST_NAME
    end.holders.add(holder)
