"""Sites that stand alone between stock code are patched where they are timed to pay; elsewhere stock runs."""

import pytest
import torch
from torch import nn
from transformers import FNetConfig, FNetModel

import accel
from accel.cuda_graphs import pays
from accel.cuda_graphs.pays import Cost, LiveTurns
from accel.fusion.norms import LayerNormForward
from accel.patching.fallback_log import FallbackLog
from accel.patching.fast_forward import FastForward
from accel.planning import sites
from accel.planning.plan import create_context
from accel.planning.sites import MOVED, LoneSites
from support.state import assert_same_state, snapshot

US = 1e-6


@pytest.fixture(autouse=True)
def judged(monkeypatch):
    """As on a GPU, and by the rule as it is: elsewhere in tests everything pays."""
    monkeypatch.setattr(pays, "GAIN", 0.97)
    monkeypatch.setattr(LiveTurns, "faster", None)
    monkeypatch.setattr(LoneSites, "_asked", lambda self: not self.options.strict)
    monkeypatch.setattr(LoneSites, "_elsewhere", lambda self: False)


@pytest.fixture
def timed(monkeypatch):
    """Says what calls take, fused and stock, of few rows and of many; what is timed is run once. Gives what was run."""
    ran = []

    def say(*costs):
        given = iter(costs)

        def measure(runs, device):
            ran.append([run() for run in runs])
            return next(given)

        monkeypatch.setattr(sites, "in_turns", measure)
        return ran

    return say


def fnet():
    """Without attention, so no layer of it is fused whole."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32, "max_position_embeddings": 16}
    return FNetModel(FNetConfig(vocab_size=64, **sizes)).eval()


def pair(fused, stock):
    return Cost(fused * US, fused * US), Cost(stock * US, stock * US)


def norms(model):
    return [module for module in model.modules() if type(module) is nn.LayerNorm]


def told(model):
    return {(status, reason) for _, rule, status, reason in accel.report(model).sites if rule == "layer norm"}


NOT = {
    "the host, few rows": ([pair(25, 7)], "would not pay: 25.0 us of the host fused, 7.0 stock, of 1 row"),
    "noise": ([pair(0.98, 1)], "would not pay: 1.0 us of the host fused, 1.0 stock, of 1 row"),
    "many rows": ([pair(5, 7), pair(60, 40)], "would not pay: 60.0 us fused, 40.0 stock, of 2048 rows"),
    "the GPU, few rows": (
        [(Cost(5 * US, 9 * US), Cost(7 * US, 8 * US))],
        "would not pay: 9.0 us fused, 8.0 stock, of 1 row",
    ),
}


@pytest.mark.parametrize(("costs", "reason"), NOT.values(), ids=NOT)
def test_what_is_slower_stays_stock_with_nothing_in_front(timed, costs, reason):
    model = fnet()
    before = snapshot(model)
    ran = timed(*costs)
    accel.optimize(model, cpu="fuse", graphs=False)
    assert told(model) == {("skipped", reason)} and len(ran) == len(costs)  # one kind, timed once
    assert norms(model) and not any("forward" in vars(norm) for norm in norms(model))
    accel.restore(model)
    assert_same_state(before, snapshot(model))


def test_what_is_faster_is_patched_and_was_timed_by_what_it_computes(timed, monkeypatch):
    model = fnet()
    before, calls, fast = snapshot(model), [], LayerNormForward.fast
    monkeypatch.setattr(LayerNormForward, "fast", lambda self, x: (calls.append(len(x)), fast(self, x))[1])
    ran = timed(pair(5, 7), pair(40, 40))
    accel.optimize(model, cpu="fuse", graphs=False)
    assert told(model) == {("patched", "")}
    assert all(isinstance(vars(norm).get("forward"), LayerNormForward) for norm in norms(model))
    assert calls == [1, 1, 2048, 2048]  # each once to see that it runs fused
    for fused, stock in ran:
        torch.testing.assert_close(fused, stock)
    assert accel.report(model).fallbacks == []
    accel.restore(model)
    assert_same_state(before, snapshot(model))


def test_what_cannot_be_timed_stays_stock(monkeypatch):
    def broken(runs, device):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(sites, "in_turns", broken)
    model = accel.optimize(fnet(), cpu="fuse", graphs=False)
    assert told(model) == {("skipped", "would not pay as far as is known: not timed, RuntimeError: out of memory")}
    assert not any("forward" in vars(norm) for norm in norms(model))


def test_a_model_that_may_come_to_a_gpu_waits_for_it(monkeypatch):
    monkeypatch.setattr(LoneSites, "_elsewhere", lambda self: True)
    model = accel.optimize(fnet(), cpu="fuse", graphs=False)
    assert told(model) == {("skipped", MOVED)}


def test_strict_leaves_nothing_out(timed):
    timed()
    model = accel.optimize(fnet(), strict=True)
    assert told(model) == {("patched", "")}


def test_inside_of_a_graph_nothing_is_timed(timed, tiny):
    ran = timed()
    model = accel.optimize(tiny.unet(), cpu="fuse")
    assert not ran and any(isinstance(vars(module).get("forward"), FastForward) for module in model.modules())


def test_all_ranks_leave_what_does_not_pay_on_one(timed, monkeypatch):
    timed(pair(5, 7), pair(40, 40))
    monkeypatch.setattr(sites, "ranks_of", lambda model: "both")

    def said(ranks, what, mine):
        assert list(mine.values()) == [True]
        return {0: {name: "True" for name in mine}, 1: {name: "False" for name in mine}}

    monkeypatch.setattr(sites, "gather_from_all", said)
    lone = LoneSites(fnet(), accel.Options())
    kind = lone.kind_of(fast_forward_of(nn.LayerNorm(8).eval()))
    assert lone.reasons() == {kind: "would not pay on another rank that shares the model"}


def fast_forward_of(norm):
    forward = LayerNormForward(norm, "norm", create_context(accel.Options()).kernels, FallbackLog())
    forward.remember()
    return forward


class Clock:
    """Stands for `time`: passes as calls say."""

    now = 0.0

    def perf_counter(self):
        return self.now


@pytest.mark.parametrize(("fused", "faster"), [(2.0, "fused"), (3.1, "stock")])
def test_calls_of_a_user_run_both_ways_in_turns_until_it_is_known(monkeypatch, fused, faster):
    clock, ran, turns = Clock(), [], LiveTurns()
    monkeypatch.setattr(pays, "time", clock)

    def way(name, seconds):
        def run():
            clock.now += seconds if ran.count(name) else 9.0  # the first gets ready
            ran.append(name)
            return name

        return run

    ways = {"fused": way("fused", fused), "stock": way("stock", 3.0)}
    results = [turns(ways, torch.device("cpu")) for _ in range(8)]
    assert results == ran == ["fused", "stock"] * 3 + [faster] * 2
    assert turns.reason == (None if faster == "fused" else "would not pay: 3100.00 ms fused, 3000.00 stock")


def test_runs_in_turns_give_the_least_of_each(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(pays, "time", clock)
    seconds = {"fast": iter([0.1] * 12 + [0.05] * 60), "slow": iter([0.4] * 72)}

    def run(name):
        clock.now += next(seconds[name])

    costs = pays.in_turns((lambda: run("fast"), lambda: run("slow")), torch.device("cpu"))
    assert [round(cost.host, 6) for cost in costs] == [0.05, 0.4] and costs[0].host == costs[0].wall
