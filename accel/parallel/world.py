"""The group of all processes that were started together, as torchrun starts them."""

import os

import torch
import torch.distributed as dist

from accel.errors import Refused
from accel.parallel.ranks import Ranks

STARTED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun tells each process


def world(asked: str) -> Ranks:
    """All ranks; makes the group of them where torchrun has started this process and nobody has made it yet.

    asked: the option that needs them, for errors. Raises `errors.Refused` where there is no other process.
    """
    valid = "it needs two or more processes, one a card: start the script by `torchrun --nproc-per-node 2 SCRIPT`, or "
    valid += "call torch.distributed.init_process_group first"
    if not dist.is_available():
        raise Refused(f"{asked}: this torch has no torch.distributed")
    if not dist.is_initialized():
        if not all(name in os.environ for name in STARTED):
            raise Refused(f"{asked}: this process is alone; {valid}")
        if int(os.environ["WORLD_SIZE"]) > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    found = everybody()
    if found is None:
        raise Refused(f"{asked}: this process is the only one of its group; {valid}")
    return found


def everybody() -> Ranks | None:
    """All ranks of this process's group; None where it is alone."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    group = dist.group.WORLD
    return None if group is None else Ranks.of(group)
