"""Rows in 8 bits and their products on a GPU: against the reference, inside CUDA graphs, waiting for nothing."""

import pytest
import torch
from accel_kernels import Quantized, fp8_linear, int8_linear, quantize_rows
from accel_kernels.gemm.int8_linear import in_passes, integer_product

FP8 = torch.float8_e4m3fn


def weight_of(n, k, dtype=torch.bfloat16, to=torch.int8):
    rows = quantize_rows.reference(torch.randn(n, k, device="cuda") * k**-0.5, dtype=to)
    return Quantized(rows.data, rows.scales.to(dtype))


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
    if torch.cuda.get_device_capability() != (9, 0):
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
        torch.cuda.set_sync_debug_mode("error")
        try:
            int8_linear(quantize_rows(x, outliers=outliers), weight)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", fp8_linear.cases, ids=lambda case: case.name)
def test_float8_through_torchs_scaled_product(case):
    args, given = case.make(torch.device("cuda"), torch.bfloat16)
    assert fp8_linear.supports(*args, **given) is None
    exact = fp8_linear.reference(args[0]._replace(scales=args[0].scales.double()), *args[1:], **given)
    found = fp8_linear.triton(*args, **given)
    own = (fp8_linear.reference(*args, **given).double() - exact).abs().max()
    assert (found.double() - exact).abs().max() <= 4 * own  # rounded after the product, after the gate and at the end
