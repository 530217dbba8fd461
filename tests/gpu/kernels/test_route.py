"""The router's compiled kernel against its reference on the same GPU, and in a CUDA graph."""

import pytest
import torch
from accel_kernels import Routing, route

from support.kernels.routing import assert_routes_as_torch, poisoned, route_case

CUDA = torch.device("cuda")
NAN = float("nan")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", route.cases, ids=lambda case: case.name)
def test_the_compiled_kernel_chooses_what_the_reference_chooses(case, dtype, monkeypatch):
    args = route_case(case.name, CUDA, dtype)
    poisoned(monkeypatch)
    if args[2] is None:
        return assert_routes_as_torch(*args)
    # With a bias scores are compared, which differ in their last digit: one token in a hundred at most.
    (index, shares), (wanted, torchs) = route(*args), route.reference(*args)
    same = (index == wanted).all(1)
    assert int((~same).sum()) <= len(same) // 100
    torch.testing.assert_close(shares[same], torchs[same], rtol=1e-5 if shares.dtype == torch.float32 else 8e-3, atol=0)


@pytest.mark.parametrize("groups", [1, 4])
def test_equal_scores_and_nan(groups):
    logits = torch.zeros(4, 128, device="cuda")
    logits[1, 7::2] = 2.0
    logits[2, [5, 90]] = NAN
    logits[3] = NAN
    routing = Routing(8, "sigmoid", "sum", groups=groups, kept=min(2, groups))
    (index, shares), (wanted, torchs) = route(logits, routing), route.reference(logits, routing)
    assert torch.equal(index, wanted) and index[0].tolist() == list(range(8))
    torch.testing.assert_close(shares, torchs, equal_nan=True)


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3-256", "qwen3-next"])
def test_one_graph_for_all_logits(name):
    logits, routing, bias, dtype = route_case(name, CUDA, torch.bfloat16)
    route(logits, routing, bias, dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        index, shares = route(logits, routing, bias, dtype)
    for seed in range(3):
        logits.copy_(torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        wanted = route(logits, routing, bias, dtype)
        assert torch.equal(index, wanted[0]) and torch.equal(shares, wanted[1])
