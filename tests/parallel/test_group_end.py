"""Graphs that hold a communicator are dropped before torch ends its groups, with no restore asked of the user."""

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from accel.parallel.group_end import GroupEnd, clear_at_end


class Holder:
    def __init__(self):
        self.told = []

    def clear(self):
        self.told.append(dist.is_initialized())  # a graph is destroyed while its communicator is there


@pytest.fixture
def world():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_holders_are_told_before_the_end_and_groups_begin_anew(world):
    first, second, gone = Holder(), Holder(), Holder()
    for holder in (first, second, first, gone):
        clear_at_end(holder)
    told = gone.told
    del gone, holder
    group = dist.new_group([0])  # groups are made, named and ended beside it
    assert dist.get_process_group_ranks(group) == [0]
    names = distributed_c10d._world.pg_names
    assert isinstance(max(names, key=names.get), GroupEnd)  # torch begins with the last name
    dist.destroy_process_group(group)
    assert first.told == []
    dist.destroy_process_group()
    assert (first.told, second.told, told) == ([True], [True], [])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    assert first.told == [True]


def test_without_groups_nothing_happens():
    holder = Holder()
    clear_at_end(holder)
    assert not dist.is_initialized() and holder.told == []
