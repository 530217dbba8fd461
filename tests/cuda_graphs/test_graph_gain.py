"""Whether a graph is kept, by times as they are told; what is captured is tested on GPUs."""

import contextlib
import time
from types import SimpleNamespace

import pytest
import torch
from accel_kernels.trials import put_off
from torch import nn

from accel.cuda_graphs import host_copies
from accel.cuda_graphs import runner as graphs
from accel.cuda_graphs.fingerprint import MOST
from accel.cuda_graphs.runner import GraphPool, GraphRunner
from accel.patching.fallback_log import FallbackLog


class Graph:
    def replay(self):
        pass


class Times:
    """Milliseconds of each way to run, and until it was launched."""

    def __init__(self, **ways):
        self.ways, self.run = ways, []

    def __call__(self, run, device):
        self.run.clear()
        run()
        return self.ways[self.run[-1] if self.run else "graph"]


@pytest.fixture
def runner_of(monkeypatch):
    for name, stub in {"device": contextlib.nullcontext, "CUDAGraph": Graph}.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    monkeypatch.setattr(host_copies, "capture", lambda graph, pool: contextlib.nullcontext())
    monkeypatch.setattr(GraphPool, "handle", lambda self, device, failed=False: None)
    monkeypatch.setattr(GraphPool, "limit_mb", lambda self, device: 100.0)
    monkeypatch.setattr(GraphRunner, "_replay", lambda self, entry, *rest: "graph")
    monkeypatch.setattr(GraphRunner, "_warm_up", lambda *args: None)

    def make(keep=False, **ways):
        times = Times(**ways)
        monkeypatch.setattr(graphs, "milliseconds", times)
        runner = GraphRunner(nn.Linear(2, 2), "", GraphPool(None), FallbackLog(), lambda module: None, keep)

        def way(name):
            def run(*args):
                times.run.append(name)
                return name

            return run

        def call(without_graph=True):
            times.run.clear()
            return runner(way("eager"), (torch.zeros(2),), {}, without_graph=way("plain") if without_graph else None)

        return runner, call

    return make


def test_a_graph_has_to_gain_over_the_other_way(runner_of):
    """Filled up a prompt takes longer: a graph of that is kept only where it is faster than the prompt as it is."""
    runner, call = runner_of(eager=(50.8, 45.0), plain=(47.7, 44.0), graph=(48.5, 0.1))
    assert call() == "eager" and call() == "plain"
    (row,) = runner.rows()
    assert row["status"] == "eager" and row["reason"].startswith("a graph gains nothing here (48.50 ms, eager 47.70")
    assert call() == "plain"


def test_it_is_kept_where_it_does(runner_of):
    _, call = runner_of(eager=(46.0, 45.0), plain=(45.0, 44.0), graph=(35.7, 0.1))
    assert [call() for _ in range(3)] == ["eager", "graph", "graph"]


def test_without_another_way_it_has_to_gain_over_itself(runner_of):
    _, call = runner_of(eager=(50.8, 20.0), graph=(48.5, 0.1))
    assert [call(False) for _ in range(3)] == ["eager", "graph", "graph"]


def test_what_the_gpu_bounds_is_not_captured(runner_of, monkeypatch):
    runner, call = runner_of(eager=(300.0, 20.0))
    monkeypatch.setattr(host_copies, "capture", lambda graph, pool: pytest.fail("captured"))
    assert [call() for _ in range(3)] == ["eager", "plain", "plain"]
    assert "20.00 ms to launch 300.00 ms" in runner.rows()[0]["reason"]


def test_what_fails_in_each_shape_is_no_longer_captured(runner_of, monkeypatch):
    runner, _ = runner_of(keep=True, graph=(48.5, 0.1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    tried = []
    monkeypatch.setattr(host_copies, "capture", lambda *args: tried.append(args) or 1 / 0)
    for size in range(1, 7):
        assert [runner(lambda x: "eager", (torch.zeros(size),), {}) for _ in range(3)] == ["eager"] * 3
    assert len(tried) == 3 and runner.reason == "capture failed: ZeroDivisionError: division by zero"


@pytest.mark.share(1)
@pytest.mark.parametrize("turns", [[1, 2, 3, 4, 5, 6], [1, 2] * 6])
def test_all_graphs_together_stay_within_the_bound(runner_of, monkeypatch, turns):
    """Those of ever new shapes make room for one another; of two that do not fit together one stays eager."""
    runner, _ = runner_of(keep=True, graph=(1.0, 0.1))
    reserved, taken = [0], 40 if len(set(turns)) > 2 else 60

    @contextlib.contextmanager
    def capture(graph, pool):
        reserved[0] += taken * 2**20
        yield

    def give_back():
        held = sum(entry.graph is not None for entry in runner.entries.values())
        reserved[0] = reserved[0] if held else 0

    monkeypatch.setattr(host_copies, "capture", capture)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved[0])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", give_back)
    done, device = SimpleNamespace(synchronize=lambda: None), torch.device("cpu")
    captured = []
    for size in turns:
        for _ in range(1 if len(set(turns)) == 2 else 2):
            runner.pool.done[device] = done
            captured.append(runner(lambda x: "eager", (torch.zeros(size),), {}))
            assert reserved[0] <= 100 * 2**20 and runner.pool.used_mb(device) <= 100
    assert captured[-1] == "graph" or captured[-2] == "graph"
    if len(set(turns)) == 2:
        assert captured[-2:] != ["eager", "eager"] and captured.count("graph") >= 6
        assert [row["reason"] for row in runner.rows()].count(
            "together with the graphs in use it takes more than graph_memory_gb allows"
        ) == 1


@pytest.mark.parametrize("fills", [True, False])
def test_what_fills_a_list_that_it_is_given_is_not_captured(runner_of, fills):
    """A replay would leave the list as it is. One that is only emptied is the caller's to lose."""
    runner, _ = runner_of(keep=True, graph=(35.7, 0.1))

    def eager(x, kept):
        kept[:] = [x + 1] if fills else []
        return "eager"

    outputs = [runner(eager, (torch.zeros(2), [torch.zeros(2)]), {}) for _ in range(3)]
    assert outputs == (["eager"] * 3 if fills else ["eager", "graph", "graph"])
    assert ("writes into a list" in runner.rows()[0]["reason"]) is fills


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("memory", [True, False])
def test_ranks_look_for_copies_together_or_not_at_all(monkeypatch, here, memory):
    """An eager run waits for the other ranks: where one of them has no memory left to make it, none does."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(host_copies, "capture", lambda graph, pool: contextlib.nullcontext())
    elsewhere, asked, ran = iter([not here, not here and memory]), [], []
    error = torch.OutOfMemoryError("CUDA out of memory") if memory else RuntimeError("a copy from the CPU")

    def somewhere(flag):
        asked.append(flag)
        return next(elsewhere) or flag

    def run():
        ran.append(1)
        if here and len(ran) == 1:
            raise error
        return "made"

    if not here and not memory:
        assert host_copies.capture_with_copies(run, lambda failed: None, somewhere)[1] == "made" and len(ran) == 3
    else:
        wanted = "another rank could not capture it" if not here else str(error)
        with pytest.raises(RuntimeError, match=wanted):
            host_copies.capture_with_copies(run, lambda failed: None, somewhere)
        assert len(ran) == (1 if memory else 2)  # no copies were found in the second
    assert asked == [here, here and memory]


@pytest.mark.parametrize("same", [True, False])
def test_tables_of_the_cpu_are_copied_once(runner_of, monkeypatch, same):
    """A capture that fails over a copy from the CPU is made anew, with the numbers that are on the device already."""
    runner, _ = runner_of(keep=True, graph=(35.7, 0.1))
    captures, tables, meta, pools = [], iter(range(1, 9)), torch.device("meta"), []

    @contextlib.contextmanager
    def capture(graph, pool):
        captures.append(graph)
        pools.append(pool)
        yield
        if len(captures) == 1:
            raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture")

    monkeypatch.setattr(host_copies, "capture", capture)
    handles = iter("ab")
    monkeypatch.setattr(GraphPool, "handle", lambda self, device, failed=False: next(handles))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))

    def eager(x):
        return torch.full((2,), 0.5 if same else float(next(tables))).to(meta)

    for _ in range(2):
        runner(eager, (torch.zeros(2),), {})
    (row,), (entry,) = runner.rows(), runner.entries.values()
    assert pools == ["a", "b"] and row["status"] == ("graph" if same else "eager")
    if same:
        assert entry.graph.graph is captures[1]
        assert [one.host.tolist() for one in entry.graph.copies.found] == [[0.5, 0.5]]
    else:
        assert "numbers of the CPU" in row["reason"]


def test_a_capture_that_fails_over_something_else_says_so(runner_of, monkeypatch):
    runner, _ = runner_of(keep=True, graph=(35.7, 0.1))
    monkeypatch.setattr(host_copies, "capture", lambda graph, pool: 1 / 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    for _ in range(2):
        runner(lambda x: x, (torch.zeros(2),), {})
    assert runner.rows()[0]["reason"] == "capture failed: ZeroDivisionError: division by zero"


def test_asked_for_it_is_kept_anyway(runner_of):
    _, call = runner_of(keep=True, eager=(50.0, 10.0), plain=(40.0, 10.0), graph=(60.0, 0.1))
    assert [call() for _ in range(2)] == ["eager", "graph"]


def test_a_graph_is_not_replayed_where_weights_have_moved(runner_of):
    """It would read memory that may have been given back: the replay itself must not begin."""
    runner, call = runner_of(eager=(46.0, 45.0), plain=(45.0, 44.0), graph=(35.7, 0.1))
    assert [call() for _ in range(3)] == ["eager", "graph", "graph"]
    runner.module.weight.data = runner.module.weight.data.clone()
    replays = []
    runner._replay = lambda entry, *rest: replays.append(entry) or "graph"
    assert call() == "eager" and not replays
    assert call() == "graph" and len(replays) == 1  # captured anew


@pytest.mark.parametrize("change", ["moved", "written to"])
def test_a_step_begun_before_weights_change_is_not_taken(runner_of, change):
    """Nor is another begun where they have moved."""
    runner, call = runner_of(eager=(46.0, 45.0), plain=(45.0, 44.0), graph=(35.7, 0.1))
    args = ((torch.zeros(2),), {})
    assert [call() for _ in range(3)] == ["eager", "graph", "graph"]
    begun = runner.begin(*args)
    assert begun is not None and runner._stands(begun, ())
    bias = runner.module.bias
    if change == "moved":
        bias.data = bias.data.clone()
    else:
        with torch.no_grad():
            bias.mul_(2)
    assert not runner._stands(begun, ())
    assert change == "written to" or runner.begin(*args) is None


class Kernels:
    """A forward that asks for trials of so many parts, each of so many seconds of a clock that runs for them alone."""

    def __init__(self, runner, monkeypatch, warms_up=False):
        self.runner, self.now, self.left = runner, 0.0, {}
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
        monkeypatch.setattr(GraphRunner, "_warm_up", lambda *args: warms_up)

    def trial(self, key):
        while self.left[key] > 0:
            self.left[key] -= 1
            self.now += 0.06
            yield

    def call(self, size, parts=0):
        """What this call of an input of that size was, and the seconds that were measured in it."""
        self.left.setdefault(size, parts)
        before = self.now

        def eager(x):
            graphs.milliseconds.run.append("eager")
            if self.left[size] > 0:
                put_off(size, lambda: self.trial(size))
            return "eager"

        result = self.runner(eager, (torch.zeros(size),), {})
        return result, round(self.now - before, 2)


def test_a_size_is_captured_once_its_kernels_are_chosen_a_little_in_each_call(runner_of, monkeypatch):
    runner, _ = runner_of(eager=(50.0, 40.0), graph=(5.0, 0.1))
    kernels = Kernels(runner, monkeypatch)
    seconds = [kernels.call(2, parts=5) for _ in range(4)]
    assert seconds == [("eager", 0.0), ("eager", 0.12), ("eager", 0.12), ("eager", 0.06)]
    assert "being chosen" not in runner.rows()[0]["reason"]
    assert kernels.call(2) == ("graph", 0.0)
    assert kernels.call(3, parts=3) == ("eager", 0.0) and "being chosen" in runner.rows()[1]["reason"]
    assert kernels.call(4) == ("eager", 0.0) and kernels.call(4) == ("graph", 0.0)  # is not kept waiting by another
    assert [kernels.call(3) for _ in range(3)] == [("eager", 0.12), ("eager", 0.06), ("graph", 0.0)]


def test_a_size_is_captured_after_as_many_eager_calls_as_it_is_worth(runner_of, monkeypatch):
    runner, _ = runner_of(eager=(50.0, 40.0), graph=(5.0, 0.1))
    runner.eager_calls, kernels = 3, Kernels(runner, monkeypatch)
    assert [kernels.call(2)[0] for _ in range(3)] == 3 * ["eager"] and "seldom" in runner.rows()[0]["reason"]
    assert kernels.call(3) == ("eager", 0.0) and kernels.call(2) == ("graph", 0.0)


def test_the_first_call_of_all_measures_everything(runner_of, monkeypatch):
    runner, _ = runner_of(eager=(50.0, 40.0), graph=(5.0, 0.1))
    kernels = Kernels(runner, monkeypatch, warms_up=True)
    assert kernels.call(2, parts=20) == ("eager", 1.2) and kernels.call(2) == ("graph", 0.0)


def test_a_size_does_not_wait_for_ever(runner_of, monkeypatch):
    runner, _ = runner_of(eager=(50.0, 40.0), graph=(5.0, 0.1))
    kernels = Kernels(runner, monkeypatch)
    assert {kernels.call(2, parts=1000)[0] for _ in range(graphs.PATIENCE)} == {"eager"}
    assert kernels.call(2) == ("graph", 0.0)


def test_what_cannot_be_captured_is_settled_too(runner_of, monkeypatch):
    runner, _ = runner_of(eager=(50.0, 40.0), graph=(5.0, 0.1))
    runner.obstacle = lambda module: "hooks"
    kernels = Kernels(runner, monkeypatch)
    assert [kernels.call(2, parts=3) for _ in range(3)] == [("eager", 0.12), ("eager", 0.06), ("eager", 0.0)]
    found = runner(lambda x: "padded", (torch.zeros(2),), {}, without_graph=lambda: "plain")
    assert found == "plain" and runner.log.rows() == [("", "no graph: hooks", 4)]


def test_a_state_that_comes_back_finds_its_graph(runner_of):
    """As of an adapter that is switched off and on. Graphs of other weights are forgotten."""
    runner, call = runner_of(keep=True, eager=(10.0, 10.0), graph=(1.0, 1.0))
    module = runner.module
    module.scale = 1.0
    found = []
    for scale in (1.0, 2.0) * 3:
        module.scale = scale
        found.append([call(without_graph=False) for _ in range(3)])
    assert found[:2] == [["eager", "graph", "graph"]] * 2 and found[2:] == [["graph"] * 3] * 4
    assert len(runner.entries) == 2 and runner.reason is None
    for scale in range(6):
        module.scale = float(scale)
        call(without_graph=False)
    assert len(runner.entries) == MOST
    module.weight = nn.Parameter(torch.zeros(2, 2))
    assert [call(without_graph=False) for _ in range(2)] == ["eager", "graph"] and len(runner.entries) == 1
