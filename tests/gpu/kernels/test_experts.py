"""Experts and products of int8, at the sizes of models."""

import pytest
import torch
from accel_kernels import Quantized, autotune, fp8_linear, int8_linear, quantize_rows
from accel_kernels.device import Feature, has
from accel_kernels.gemm.int8_linear import in_passes, integer_product
from accel_kernels.moe.chooser import ExpertsChooser, possible_ways
from accel_kernels.moe.experts import CASES, experts
from accel_kernels.moe.hopper.wgmma_triton import tile_for
from accel_kernels.moe.route import Routing, route
from accel_kernels.moe.tiles import DEQUANTIZED, GEMV, TILES
from accel_kernels.trials import Trials

from support.kernels.numbers import assert_scaled_product
from support.kernels.waiting import waits_noted

WARPGROUPS_HERE = torch.cuda.is_available() and has(torch.device("cuda"), Feature.WARPGROUPS)
WARPGROUPS = ("grouped-64-int4", "grouped-128-mxfp4")  # on Hopper


def given(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple:
    args, _ = next(case for case in CASES if case.name == name).make(torch.device("cuda"), dtype)
    return args


@pytest.mark.parametrize(
    "name", ["several", "grouped-64", "grouped-64-gpt-oss", "grouped-64-int4", "grouped-128-mxfp4"]
)
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
        *((name, GEMV) for name in ("several", "gpt-oss", "transposed", "int8", "int4", "mxfp4")),
        *(
            ("several", "16"),
            ("int8", "16"),
            ("grouped-64", "64"),
            ("grouped-64", "128/64"),
            ("grouped-128-mxfp4", "64"),
        ),
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
@pytest.mark.parametrize(
    "name",
    [
        "int8",
        "int8-zeros",
        "int4-zeros",
        "grouped-int4-rows",
        "mxfp4",
        "grouped-mxfp4",
        "grouped-64-int4",
        "grouped-128-mxfp4",
    ],
)
def test_written_out_first_gives_the_same(name, dtype):
    args = given(name, dtype)
    wanted = experts.reference(*args)
    for tile in (*TILES, *DEQUANTIZED, GEMV):
        error = float((experts.triton(*args, tile=tile) - wanted).abs().max())
        assert error <= 0.02 * float(wanted.abs().max()), tile


@pytest.mark.skipif(not WARPGROUPS_HERE, reason="by warpgroups, on Hopper")
@pytest.mark.parametrize(
    "name", ["gpt-oss-20b-512-mxfp4", "qwen3-moe-2048-int4", "grouped-64-int4", "grouped-128-mxfp4"]
)
@pytest.mark.parametrize("skewed", [False, True])
def test_products_of_warpgroups_are_as_exact_as_those_of_16_rows(name, skewed):
    """Many pairs of one expert, few of others and none; two calls give equal bits."""
    x, index, shares, weights = given(name)
    if skewed:
        index[: len(x) // 2, 0], index[-3:, 1] = 0, weights.experts
    wide = weights._replace(
        **{n: None if (b := getattr(weights, n)) is None else b.float() for n in weights._fields[-2:]}
    )
    wanted = experts.reference(x.float(), index, shares.float(), wide)
    assert tile_for(x, weights, 64) is not None
    off = {}
    for tile in ("16", "64", "128"):
        found = experts.triton(x, index, shares, weights, tile=tile)
        off[tile] = float((found.float() - wanted).norm() / wanted.norm())
        assert torch.equal(found, experts.triton(x, index, shares, weights, tile=tile))
    assert max(off.values()) <= 1.1 * off["16"] <= 0.005, off


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


def weight_of(n, k, dtype=torch.bfloat16, to=torch.int8):
    rows = quantize_rows.reference(torch.randn(n, k, device="cuda") * k**-0.5, dtype=to)
    return Quantized.of(rows.data, rows.scales.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", quantize_rows.cases, ids=lambda case: case.name)
def test_rows_are_rounded_as_the_reference_rounds_them(case, dtype):
    args, given = case.make(torch.device("cuda"), dtype)
    assert quantize_rows.supports(*args, **given) is None
    theirs, ours = quantize_rows.reference(*args, **given), quantize_rows.triton(*args, **given)
    torch.testing.assert_close(ours.scales, theirs.scales, rtol=2e-6, atol=0)
    apart = ours.data.float() != theirs.data.float()
    assert float(apart.float().mean()) < 1e-3  # a norm summed in another order, next to a half
    assert given.get("norm") is not None or not apart.any()
    if theirs.count is not None:
        count = int(theirs.count)
        assert int(ours.count) == count and torch.equal(ours.columns[:count], theirs.columns[:count])
        eps = torch.finfo(dtype).eps if given.get("norm") else 0.0
        torch.testing.assert_close(
            ours.outliers[..., :count], theirs.outliers[..., :count], rtol=max(eps, 2e-6), atol=0
        )


@pytest.mark.parametrize("sizes", [(1, 16, 1), (129, 4096, 257), (300, 14336, 640)], ids=str)
def test_sums_of_integers_are_exact(sizes):
    m, k, n = sizes
    x, weight = (torch.randint(-127, 128, (rows, k), dtype=torch.int8, device="cuda") for rows in (m, n))
    assert torch.equal(integer_product(x, weight), (x.double() @ weight.double().t()).int())


@pytest.mark.parametrize("outliers", [None, 6.0, torch.tensor([3, 1, 79])], ids=repr)
@pytest.mark.parametrize("gate", [False, True], ids=["plain", "gate"])
@pytest.mark.parametrize("sizes", [(1, 80, 7), (129, 4112, 1000), (2048, 1024, 4096)], ids=str)
def test_kernel_and_passes_agree(sizes, gate, outliers):
    m, k, n = sizes
    x = torch.randn(m, k, device="cuda").bfloat16()
    x[:, [1, k - 1]] *= 30
    rows = quantize_rows(x, outliers=outliers.cuda() if isinstance(outliers, torch.Tensor) else outliers)
    weight, residual = weight_of(n, k), torch.randn(m, n, device="cuda").bfloat16()
    given = {"residual": residual} | ({"up": weight_of(n, k), "activation": "silu"} if gate else {})
    found, wanted = int8_linear.triton(rows, weight, **given), in_passes(rows, weight, **given)
    step = 2**-7 * wanted.double().abs() + 1e-5 * wanted.double().abs().max()
    assert ((found.double() - wanted.double()).abs() <= step).all()


@pytest.mark.parametrize("gate", [False, True], ids=["plain", "gate"])
@pytest.mark.parametrize("sizes", [(300, 4112, 9000), (2048, 1024, 4096), (4097, 80, 1288)], ids=str)
def test_large_products_are_those_of_specialized_warps(sizes, gate, monkeypatch):
    if not has(torch.device("cuda"), Feature.WARPGROUPS):
        pytest.skip("for Hopper alone")
    from accel_kernels.gemm.hopper import hopper_gemm_triton as kernels

    launched, real = [], kernels.launch
    monkeypatch.setattr(
        kernels, "launch", lambda kernel, *args, **more: launched.append(kernel) or real(kernel, *args, **more)
    )
    m, k, n = sizes
    rows, weight = quantize_rows(torch.randn(m, k, device="cuda").bfloat16()), weight_of(n, k)
    given = {"residual": torch.randn(m, n, device="cuda").bfloat16()}
    given |= {"up": weight_of(n, k), "activation": "silu"} if gate else {}
    wanted = in_passes(rows, weight, **given)
    step = 2**-7 * wanted.double().abs() + 1e-5 * wanted.double().abs().max()
    for _ in range(3):  # a race would show in one of them
        found = int8_linear(rows, weight, **given)
        assert ((found.double() - wanted.double()).abs() <= step).all()
    assert len(launched) == 3


def test_a_graph_finds_as_many_outliers_as_there_are():
    """Captured over rows with none; replayed over rows with three, and with all."""
    x, weight = torch.randn(64, 512, device="cuda").half(), weight_of(256, 512, torch.float16)
    quiet = x.clone()

    def linear():
        return int8_linear(quantize_rows(x, outliers=6.0), weight)

    linear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear()
    for columns in ([], [0, 77, 511], list(range(512))):
        x.copy_(quiet)
        x[:, columns] *= 50
        y.fill_(float("nan"))
        graph.replay()
        exact = x.double() @ weight.dequantized(torch.float64).t()
        noise = float((y.double() - exact).norm() / exact.norm())
        assert noise < 0.012, columns  # 38 dB


def test_nothing_waits_for_the_device():
    x, weight = torch.randn(64, 512, device="cuda").bfloat16(), weight_of(256, 512)
    for outliers in (None, 6.0, torch.tensor([3, 5], device="cuda")):
        int8_linear(quantize_rows(x, outliers=outliers), weight)
        with waits_noted("error"):
            int8_linear(quantize_rows(x, outliers=outliers), weight)


@pytest.mark.parametrize("case", fp8_linear.cases, ids=lambda case: case.name)
def test_float8_through_torchs_scaled_product(case):
    assert_scaled_product(case, "cuda")
