"""The memory of outputs of graphs, and copies of the host that they hold."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from accel.cuda_graphs.entry import CapturedGraph, Entry, switches
from accel.cuda_graphs.host_copies import HostCopies
from accel.cuda_graphs.pool import OUTPUTS, GraphPool
from accel.cuda_graphs.runner import GraphRunner
from accel.patching.fallback_log import FallbackLog

DEVICE, MB = torch.device("cpu"), 2**18  # float32 numbers


@pytest.fixture
def pool(monkeypatch):
    """One whose graphs' outputs may take 8 MB, and which counts how often it was waited for."""
    monkeypatch.setattr(GraphPool, "limit_mb", lambda self, device: 8 / OUTPUTS)
    pool, pool.waits = GraphPool(None), []
    pool.done[DEVICE] = SimpleNamespace(synchronize=lambda: pool.waits.append(1))
    return pool


def entry(mb: float, last_replay: int, device: torch.device = DEVICE) -> Entry:
    whole = torch.empty(int(mb * MB))
    outputs = [whole, whole.view(-1, 1), None]  # one memory counts once
    return Entry(
        graph=CapturedGraph(None, device, None, outputs, pytree.tree_structure(outputs), None),
        last_replay=last_replay,
        memory_mb=mb,
    )


ENTRIES = {  # of each (MB, when it was used), of the newest too, and whether its graph stays
    "those used the longest ago go": ([(3, 5), (2, 1), (2, 2), None, (1, 9)], 3, [True, False, False, False, True]),
    "there is room": ([(3, 1), (4, 2), (50, 3, "meta")], 1, [True, True, True]),
    "one that is too large alone stays alone": ([(1, 1)], 20, [False]),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_which_graphs_are_dropped_for_the_outputs_of_the_newest(pool, name):
    given, mb, stays = ENTRIES[name]
    entries = [Entry() if one is None else entry(*one[:2], torch.device(*(one[2:] or ("cpu",)))) for one in given]
    newest, dropped = entry(mb, last_replay=0), sum(one is not None for one in given) - sum(stays)
    pool.bound_outputs([*entries, newest], newest, DEVICE)
    assert [one.graph is not None for one in entries] == stays and newest.graph is not None
    assert pool.left_mb[DEVICE] == (4 if dropped == 2 else dropped) and len(pool.waits) == dropped
    assert all(one.reason is None for one in entries)  # captured again where it comes again


def test_memory_of_graphs_that_went_alone_counts_until_all_go(pool, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    runner = GraphRunner(nn.Linear(2, 2), "", pool, FallbackLog(), lambda module: None, True)
    runner.entries = {("a",): entry(3, last_replay=1), ("b",): entry(2, last_replay=2)}
    pool.drop(runner.entries[("a",)])
    assert pool.rows() == [{"device": "cpu", "used_mb": 5.0, "limit_mb": 8 / OUTPUTS}]
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    first = pool.handle(DEVICE)
    assert pool.handle(DEVICE) is first is not pool.handle(DEVICE, failed=True)
    assert pool.used_mb(DEVICE) == 5  # the memory in the last one is not given back
    pool.clear()
    assert pool.used_mb(DEVICE) == 0 and pool.rows() == []


def test_replays_are_counted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: SimpleNamespace(__enter__=None))
    runner = GraphRunner(nn.Linear(2, 2), "", GraphPool(None), FallbackLog(), lambda module: None, True)
    first, second = entry(1, last_replay=0), entry(1, last_replay=0)
    for one in (first, second, first):
        with pytest.raises((TypeError, AttributeError)):  # no GPU to replay on
            runner._replay(one, [], DEVICE, None)
    assert (first.last_replay, second.last_replay) == (3, 2)


def test_graphs_that_ranks_share_are_dropped_only_together(pool, monkeypatch):
    """A process that drops them on its own would call eagerly what the others replay."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    pool.handles[DEVICE] = "pool"
    runners = [GraphRunner(nn.Linear(2, 2), "", pool, FallbackLog(), lambda module: None, True) for _ in range(2)]
    runners[1].ranks = object()
    for runner in runners:
        runner.entries = {("a",): entry(1, last_replay=1), ("b",): Entry(reason="why")}
    pool.clear(alone=True)
    graphs = [[key for key, one in runner.entries.items() if one.graph is not None] for runner in runners]
    assert graphs == [[], [("a",)]] and runners[0].entries[("b",)].reason == "why"
    assert pool.handles == {DEVICE: "pool"} and DEVICE in pool.done and pool.waits == [1]
    pool.clear()
    assert runners[1].entries[("a",)].graph is None and not pool.handles and not pool.done


META = torch.device("meta")  # stands for a GPU: a device that is not the CPU


def forward(frequencies, scale=2.0):
    table = torch.outer(torch.arange(3.0), frequencies)
    buffer = torch.empty(2, dtype=torch.float64, device=META)
    buffer.copy_(frequencies)
    made = torch.tensor([1.0, scale], device=META)
    return (
        table.to(META, torch.bfloat16),
        table.cos().to(META),
        buffer,
        made,
        table.double(),
        torch.as_tensor(made, device=META),
    )


def test_copies_are_noted_in_order():
    copies, frequencies = HostCopies(), torch.tensor([0.5, 0.25])
    with copies.noted():
        moved, cosine, buffer, made, wide, same = forward(frequencies)
    table = torch.outer(torch.arange(3.0), frequencies)
    wanted = [frequencies, torch.tensor([1.0, 2.0]), table, table.cos()]
    assert len(copies.found) == 4 and all(
        torch.equal(one.host, right) for one, right in zip(copies.found, wanted, strict=True)
    )
    assert all(one.device.device == META for one in copies.found)
    assert moved.dtype == torch.bfloat16 and cosine.dtype == torch.float32 and buffer.dtype == torch.float64
    assert (made.device, same, wide.device.type) == (META, made, "cpu")
    frequencies.zero_()
    assert copies.found[0].host.any()  # as it was


def test_equal_copies_are_those_of_the_device():
    copies, frequencies = HostCopies(), torch.tensor([0.5, float("nan")])
    with copies.noted():
        forward(frequencies)
    known = [one.device for one in copies.found]
    with copies.replayed():
        moved, cosine, *_ = forward(frequencies.clone())
    assert moved.shape == (3, 2) and moved.dtype == torch.bfloat16 and cosine.device == META
    assert all(moved is not one for one in known) and len(copies.found) == 4


@pytest.mark.parametrize(
    "other",
    [
        lambda: forward(torch.tensor([0.5, 0.26])),
        lambda: forward(torch.tensor([0.5, 0.25]), 3.0),
        lambda: forward(torch.tensor([0.5, 0.25, 0.1])),
        lambda: forward(torch.tensor([0.5, 0.25]).double()),
        lambda: (forward(torch.tensor([0.5, 0.25])), torch.ones(2).to(META)),
        lambda: None,
        lambda: torch.rand(4).to(META),
    ],
    ids=["numbers", "a number", "shape", "dtype", "more", "fewer", "random numbers"],
)
def test_others_are_refused(other):
    copies = HostCopies()
    with copies.noted():
        forward(torch.tensor([0.5, 0.25]))
    with pytest.raises(RuntimeError, match="numbers of the CPU"), copies.replayed():
        other()


def test_what_stays_on_its_device_is_left_alone():
    copies = HostCopies()
    with copies.noted():
        torch.ones(2).to(torch.float64).copy_(torch.zeros(2))
        torch.tensor([1.0], device="cpu").clone()
        torch.empty(3, device=META).to(torch.float64)
    assert copies.found == []


def test_tensors_of_the_cpu_given_to_makers_are_noted_and_others_are_not():
    copies = HostCopies()
    with copies.noted():
        torch.as_tensor(torch.ones(2), device=META)
        torch.asarray(obj=[1.0, 2.0, 3.0], device="meta")
        torch.asarray(obj=torch.empty(4, device=META), device=META)
        torch.tensor(data=5, device=META)
    assert [one.host.tolist() for one in copies.found] == [[1.0, 1.0], [1.0, 2.0, 3.0], 5]


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_a_graph_is_for_one_precision_of_sums(kind):
    """Products of the same shape take other kernels where the user has asked for full sums since."""
    name, matmul, before = f"allow_{kind}_reduced_precision_reduction", torch.backends.cuda.matmul, switches()
    was = getattr(matmul, name)
    try:
        setattr(matmul, name, not was)
        assert switches() != before
    finally:
        setattr(matmul, name, was)
