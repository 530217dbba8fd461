"""Experts on a GPU: one CUDA graph for every routing, the same from every tile, and the tile chosen by timing."""

import pytest
import torch
from accel_kernels import autotune
from accel_kernels.moe.chooser import ExpertsChooser, possible_ways
from accel_kernels.moe.experts import CASES, experts
from accel_kernels.moe.route import Routing, route
from accel_kernels.moe.tiles import DEQUANTIZED, GEMV, TILES
from accel_kernels.trials import Trials


def given(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple:
    args, _ = next(case for case in CASES if case.name == name).make(torch.device("cuda"), dtype)
    return args


@pytest.mark.parametrize("name", ["several", "grouped-64", "grouped-64-gpt-oss"])
def test_one_graph_for_every_routing(name):
    x, index, shares, weights = given(name)
    experts(x, index, shares, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = experts(x, index, shares, weights)
    for seed in range(3):
        torch.manual_seed(seed)
        x.normal_()
        index.copy_(torch.rand(len(x), weights.experts, device="cuda").topk(index.shape[1]).indices)
        if seed == 1:  # all to one expert, and some to none
            index.fill_(1)
            index[: len(x) // 2, 0] = weights.experts
        graph.replay()
        wanted = experts.reference(x, index, shares, weights)
        assert float((y - wanted).abs().max()) <= 0.02 * float(wanted.abs().max())
        again = y.clone()
        graph.replay()
        assert torch.equal(again, y)


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        *((name, GEMV) for name in ("several", "gpt-oss", "transposed", "int8", "int4")),
        *(("several", "16"), ("int8", "16"), ("grouped-64", "64"), ("grouped-64", "128/64")),
    ],
)
def test_no_kernel_sees_choices_of_the_round_before(name, tile):
    """Each starts before the one in front has ended, and reads early what it may."""
    x, index, _, weights = given(name)
    logits = [torch.randn(len(x), weights.experts, device="cuda") for _ in range(16)]

    def chosen(one):
        return route.triton(one, Routing(index.shape[1]), None, x.dtype)

    experts.triton(x, *chosen(logits[0]), weights, tile=tile)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [experts.triton(x, *chosen(one), weights, tile=tile) for one in logits]
    for _ in range(4):
        for one in logits:
            one.normal_()
        graph.replay()
        for one, y in zip(logits, found, strict=True):
            wanted = experts.reference(x, *chosen(one), weights)
            assert float((y - wanted).abs().max()) <= 0.02 * float(wanted.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["grouped-64", "grouped-64-gpt-oss"])
def test_every_tile_gives_the_same(name, dtype):
    args = given(name, dtype)
    wanted = experts.reference(*(one.double() if one.is_floating_point() else one for one in args[:3]), wide(args[3]))
    own = float((experts.reference(*args).double() - wanted).abs().max())
    for tile in (*TILES, GEMV):
        error = float((experts.triton(*args, tile=tile).double() - wanted).abs().max())
        assert error <= 2 * own + 4e-6 * float(wanted.abs().max()), tile


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["int8", "int8-zeros", "int4-zeros", "grouped-int4-rows", "fp8"])
def test_written_out_first_gives_the_same(name, dtype):
    args = given(name, dtype)
    wanted = experts.reference(*args)
    for tile in (*TILES, *DEQUANTIZED, GEMV):
        error = float((experts.triton(*args, tile=tile) - wanted).abs().max())
        assert error <= 0.02 * float(wanted.abs().max()), tile


def wide(weights):
    return type(weights)(*(one.double() if isinstance(one, torch.Tensor) else one for one in weights))


def test_the_tile_is_chosen_by_timing(tmp_path, monkeypatch):
    x, index, shares, weights = given("grouped-64")
    chooser, trials = ExpertsChooser(tmp_path / "experts.json"), Trials()
    with trials.noting() as asked:
        wanted = chooser(x, index, shares, weights)
    assert not chooser.choices and trials.work(asked) == []
    (choice,) = chooser.choices.values()
    assert choice in possible_ways(len(x), index.shape[1], weights.experts)
    found = chooser(x, index, shares, weights)
    assert float((found - wanted).abs().max()) <= 0.02 * float(wanted.abs().max())
    again = ExpertsChooser(chooser.cache)
    monkeypatch.setattr(autotune, "race", None)  # must not be needed
    with trials.noting() as asked:
        again(x, index, shares, weights)
    assert trials.work(asked) == [] and again.choices == chooser.choices
