"""The router's kernel in Triton's interpreter: the reference's choices, ties, NaN, odd shapes and strides."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from accel_kernels import Routing, route
from accel_kernels.moe.route import CASES

from support.kernels.numbers import assert_routes_as_torch, route_case
from support.kernels.waiting import NothingWaits

CPU = torch.device("cpu")
INF, NAN = float("inf"), float("nan")
SMALL = [case.name for case in CASES if case.small]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
compiled = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")


@compiled
@pytest.mark.parametrize(
    "name, dtype", [(name, DTYPES[number % 3]) for number, name in enumerate(SMALL)] + [("mixtral", torch.float16)]
)
def test_the_same_choices_and_shares(name, dtype, poisoned):
    args = route_case(name, CPU, dtype)
    assert_routes_as_torch(*args)


@pytest.mark.parametrize("score, share", [("softmax", "sum"), ("sigmoid", "score"), ("none", "softmax")])
def test_the_reference_is_what_routers_write(score, share):
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    index, shares = route(logits, Routing(3, score, share, scale=2.0))
    scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "none": logits}[score]
    top, wanted = scores.topk(3)
    top = {"sum": top / top.sum(-1, keepdim=True), "score": top, "softmax": top.softmax(-1)}[share]
    assert torch.equal(index, wanted)
    torch.testing.assert_close(shares, 2 * top, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=compiled)], ids=["reference", "kernel"])
@pytest.mark.parametrize("bias, groups", [(False, 1), (True, 1), (True, 4)])
def test_of_equal_scores_the_lower_index_comes_first(kernel, bias, groups):
    logits = torch.zeros(3, 20)
    logits[1, 7::2] = 2.0
    logits[2, ::2] = -0.0
    routing = Routing(5, "sigmoid", "sum", groups=groups, kept=min(2, groups))
    run = route.triton if kernel else route.reference
    index, shares = run(logits, routing, torch.zeros(20) if bias else None)
    first, last = [0, 1, 2, 3, 4], 15 if groups == 1 else 5
    assert index.tolist() == [first, [7, 9, 11, 13, last], first]
    assert shares[0].tolist() == pytest.approx([0.2] * 5)


@pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=compiled)], ids=["reference", "kernel"])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "none"])
def test_nan_is_the_largest_and_no_index_is_out_of_range(kernel, groups, score):
    logits = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    logits[0, 9] = NAN
    logits[1] = NAN
    logits[2] = -INF
    logits[3, 4] = INF
    logits[4, [2, 11]] = torch.tensor([NAN, INF])
    routing = Routing(4, score, "softmax" if score == "none" else "sum", groups=groups, kept=2 if groups > 1 else 1)
    index, shares = (route.triton if kernel else route.reference)(logits, routing)
    assert all(sorted(set(row)) == sorted(row) and set(row) <= set(range(12)) for row in index.tolist())
    assert index[1].tolist() == [0, 1, 2, 3]
    if score != "softmax" or groups == 1:  # else all of a row is NaN
        assert index[0, 0] == 9 and index[4, 0] == 2 and index[3, 0] == 4
    assert shares[[0, 1, 4]].isnan().any(1).all()
    wanted_index, wanted = route.reference(logits, routing)
    assert torch.equal(index, wanted_index)
    torch.testing.assert_close(shares, wanted, equal_nan=True)


@compiled
@pytest.mark.parametrize("experts, chosen, groups", [(1, 1, 1), (3, 3, 1), (160, 6, 8), (513, 32, 1), (24, 24, 3)])
def test_odd_numbers(experts, chosen, groups, poisoned):
    g = torch.Generator().manual_seed(experts)
    logits, bias = torch.randn(2, experts, generator=g), torch.rand(experts, generator=g)
    routing = Routing(chosen, "sigmoid", "sum", 1e-20, scale=2.5, groups=groups, kept=(groups + 1) // 2)
    if chosen == experts:
        routing = routing._replace(kept=groups)
    for rows, shift in itertools.product((logits, torch.stack([logits, logits], 1)[:, 0]), (None, bias, bias.half())):
        assert_routes_as_torch(rows, routing, shift)


@compiled
def test_what_no_sum_can_be_divided_by(poisoned):
    logits = torch.tensor([[-70.0, -80.0, -75.0], [-30.0, -31.0, -32.0], [0.0, 1.0, -1.0]])
    for more in ({"eps": 1e-20}, {"floor": 1e-12}, {"eps": 1e-6, "floor": 0.5}, {}):
        assert_routes_as_torch(logits, Routing(2, "sigmoid", "sum", **more))


@compiled
def test_scores_are_rounded_where_the_router_rounds_them():
    logits = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).half()
    bias = torch.rand(16, generator=torch.Generator().manual_seed(1))
    routing = Routing(4, "sigmoid", rounded=True)
    index, shares = route.triton(logits, routing, bias)
    scores = logits.sigmoid()
    assert torch.equal(index, (scores + bias).topk(4).indices)
    assert torch.equal(shares, scores.gather(1, index))


def test_many_experts_take_more_warps(monkeypatch):
    from accel_kernels.moe import route_triton

    launched = []
    monkeypatch.setattr(route_triton, "launch", lambda *args, **meta: launched.append((args[1], meta["num_warps"])))
    with NothingWaits():
        for name in ("qwen3-moe-512", "qwen3-next", "many"):
            route.triton(*route_case(name, CPU, torch.bfloat16))
    assert launched == [((512,), 1), ((32,), 1), ((7,), 8)]


def test_a_warmup_chooses_experts_that_there_are(monkeypatch):
    """Its kernels only compile, but stock experts run."""
    from accel_kernels.moe import route_triton

    monkeypatch.setattr(route_triton, "launch", lambda *args, **meta: None)
    monkeypatch.setattr(route_triton, "warming_up", lambda: True)
    index, _ = route.triton(torch.randn(3, 9), Routing(4))
    assert index.tolist() == [[0, 1, 2, 3]] * 3


def test_what_the_kernel_cannot_take_is_named():
    logits = torch.randn(2, 8)
    assert "5 of 4" in route.supports(logits[:, :4], Routing(5))
    assert "groups" in route.supports(logits, Routing(2, groups=3))
    assert "best" in route.supports(logits, Routing(2, groups=8, kept=2))
    assert "tanh" in route.supports(logits, Routing(2, "tanh"))
    assert "contiguous" in route.supports(logits.t(), Routing(2))
    assert "bias" in route.supports(logits, Routing(2), torch.zeros(7))
    assert "float64" in route.supports(logits.double(), Routing(2))
    assert "more than" in route.supports(torch.zeros(1, 5000), Routing(2))
    assert "shape" in route.supports(logits[:0], Routing(2))
    assert route(logits[:0], Routing(2))[0].shape == (0, 2)
