"""The group of all processes: found, or made as torchrun says."""

import os
import socket

import pytest
import torch.distributed as dist

from accel.errors import Refused
from accel.parallel.ranks import STARTED, all_ranks, world
from support.ranks import RankPool


def launched(port: int) -> tuple[int, int, bool]:
    """In a process with the environment of torchrun, where nobody has made a group."""
    found = world("parallel='guidance'")  # the one that is there
    dist.destroy_process_group()
    assert all_ranks() is None
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    made = world("parallel='guidance'")
    assert (made.rank, made.size, made.members) == (found.rank, found.size, found.members)
    assert made.group is not found.group and all_ranks() is made
    return made.rank, made.size, made.any(made.rank == 1, "cpu")


@pytest.mark.turns(2)
def test_the_group_is_made_as_torchrun_says(rank_pool):
    """By ranks of its own, forked where all others are."""
    pool = RankPool(2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        assert pool.run(launched, port, timeout=60) == [(0, 2, True), (1, 2, True)]
    finally:
        pool.close()


def test_a_process_alone_is_refused(monkeypatch):
    for name in STARTED:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(Refused, match="parallel='tiles': this process is alone; .*torchrun --nproc-per-node 2"):
        world("parallel='tiles'")
    for name, value in zip(STARTED, ("0", "1", "127.0.0.1", "0"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(Refused, match="the only one of its group"):
        world("parallel='tiles'")
    assert all_ranks() is None and not dist.is_initialized()
