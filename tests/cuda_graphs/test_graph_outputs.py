"""What graphs keep for their outputs alone is bounded: those used the longest ago are dropped."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from accel.cuda_graphs.entry import Captured, Entry
from accel.cuda_graphs.pool import OUTPUTS, GraphPool
from accel.cuda_graphs.runner import GraphRunner
from accel.patching.ledger import Ledger

DEVICE, MB = torch.device("cpu"), 2**18  # float32 numbers


@pytest.fixture
def pool(monkeypatch):
    """One whose graphs' outputs may take 8 MB, and which counts how often it was waited for."""
    monkeypatch.setattr(GraphPool, "limit_mb", lambda self, device: 8 / OUTPUTS)
    pool, pool.waits = GraphPool(None), []
    pool.done[DEVICE] = SimpleNamespace(synchronize=lambda: pool.waits.append(1))
    return pool


def entry(mb: float, used: int, device: torch.device = DEVICE) -> Entry:
    whole = torch.empty(int(mb * MB))
    outputs = [whole, whole.view(-1, 1), None]  # one memory counts once
    return Entry(
        graph=Captured(None, device, None, outputs, pytree.tree_structure(outputs), None), used=used, memory_mb=mb
    )


def test_those_used_the_longest_ago_are_dropped(pool):
    entries = [entry(3, used=5), entry(2, used=1), entry(2, used=2), Entry(), entry(1, used=9)]
    newest = entry(3, used=0)
    pool.bound_outputs([*entries, newest], newest, DEVICE)
    assert [one.graph is not None for one in entries] == [True, False, False, False, True]
    assert newest.graph is not None and pool.left_mb[DEVICE] == 4 and len(pool.waits) == 2
    assert all(one.reason is None for one in entries)  # captured again where it comes again


def test_nothing_is_dropped_where_there_is_room(pool):
    entries = [entry(3, used=1), entry(4, used=2), entry(50, used=3, device=torch.device("meta"))]
    newest = entry(1, used=0)
    pool.bound_outputs([*entries, newest], newest, DEVICE)
    assert all(one.graph is not None for one in (*entries, newest)) and not pool.waits


def test_one_that_is_too_large_alone_stays_alone(pool):
    entries, newest = [entry(1, used=1)], entry(20, used=0)
    pool.bound_outputs([*entries, newest], newest, DEVICE)
    assert entries[0].graph is None and newest.graph is not None


def test_memory_of_graphs_that_went_alone_counts_until_all_go(pool, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    runner = GraphRunner(nn.Linear(2, 2), "", pool, Ledger(), lambda module: None, True)
    runner.entries = {("a",): entry(3, used=1), ("b",): entry(2, used=2)}
    pool.drop(runner.entries[("a",)])
    assert pool.rows() == [{"device": "cpu", "used_mb": 5.0, "limit_mb": 8 / OUTPUTS}]
    pool.clear()
    assert pool.used_mb(DEVICE) == 0 and pool.rows() == []


def test_replays_are_counted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: SimpleNamespace(__enter__=None))
    runner = GraphRunner(nn.Linear(2, 2), "", GraphPool(None), Ledger(), lambda module: None, True)
    first, second = entry(1, used=0), entry(1, used=0)
    for one in (first, second, first):
        with pytest.raises((TypeError, AttributeError)):  # no GPU to replay on
            runner._replay(one, [], DEVICE, None)
    assert (first.used, second.used) == (3, 2)


def test_graphs_that_ranks_share_are_dropped_only_together(pool, monkeypatch):
    """A process that drops them on its own would call eagerly what the others replay."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    pool.handles[DEVICE] = "pool"
    runners = [GraphRunner(nn.Linear(2, 2), "", pool, Ledger(), lambda module: None, True) for _ in range(2)]
    runners[1].ranks = object()
    for runner in runners:
        runner.entries = {("a",): entry(1, used=1), ("b",): Entry(reason="why")}
    pool.clear(alone=True)
    graphs = [[key for key, one in runner.entries.items() if one.graph is not None] for runner in runners]
    assert graphs == [[], [("a",)]] and runners[0].entries[("b",)].reason == "why"
    assert pool.handles == {DEVICE: "pool"} and DEVICE in pool.done and pool.waits == [1]
    pool.clear()
    assert runners[1].entries[("a",)].graph is None and not pool.handles and not pool.done
