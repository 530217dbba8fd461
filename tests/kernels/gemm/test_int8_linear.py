"""Products of rows in 8 bits: exact sums, every epilogue, every tile, and what is refused."""

import importlib

import pytest
import torch
from accel_kernels import Quantized, fp8_linear, int8_linear, quantize_rows
from accel_kernels.gemm.int8_linear import in_passes, integer_product
from accel_kernels.gemm.quantize_rows import QuantizedRows

from support.kernels.numbers import weight_of

pytest.importorskip("triton")
from support.everything import EVERYTHING
from support.kernels.compiler import in_a_process
from support.kernels.numbers import assert_scaled_product

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")


def integers(*shape):
    return torch.randint(-127, 128, shape, dtype=torch.int8)


@interpreted
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows_in_its_row_and_no_other(value, poisoned):
    x = torch.randn(3, 64)
    x[1, 7] = value
    weight = weight_of(16, 64)
    for rows in (quantize_rows.triton(x.bfloat16()), quantize_rows.reference(x.bfloat16())):
        for y in (int8_linear.triton(rows, weight), int8_linear.reference(rows, weight), in_passes(rows, weight)):
            assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


@interpreted
@pytest.mark.parametrize("case", ["odd", "gate-bias", "threshold-gate"])
def test_numbers_come_alike_with_and_without_a_memory_accelerator(case, monkeypatch):
    kernels = importlib.import_module("accel_kernels.gemm.int8_linear_triton")
    args, more = next(one for one in int8_linear.cases if one.name == case).make(torch.device("cpu"), torch.float16)
    without = kernels.int8_linear(*args, **more)
    monkeypatch.setattr(kernels, "has", lambda device, feature: True)
    assert torch.equal(kernels.int8_linear(*args, **more), without)


def test_bad_requests_are_named():
    x = torch.randn(2, 32)
    with pytest.raises(ValueError, match="int4|int32"):
        quantize_rows(x, dtype=torch.int32)
    with pytest.raises(ValueError, match="threshold of 0"):
        quantize_rows(x, outliers=0.0)
    with pytest.raises(ValueError, match="taken out of int8"):
        quantize_rows(x, dtype=torch.float8_e4m3fn, outliers=6.0)
    with pytest.raises(IndexError):
        quantize_rows(x, outliers=torch.tensor([32]))
    rows, weight = quantize_rows(x.half()), weight_of(16, 32)
    with pytest.raises(ValueError, match="not int8"):
        int8_linear(quantize_rows(x, dtype=torch.float8_e4m3fn), weight)
    with pytest.raises(ValueError, match="2 scales to a row"):
        int8_linear(rows, weight._replace(scales=torch.ones(16, 2)))
    with pytest.raises(ValueError, match="not float8"):
        fp8_linear(rows, weight)
    for given in ({"residual": torch.zeros(1, 16).half()}, {"bias": torch.zeros(1).half()}, {"up": weight}):
        wide = {name: value for name, value in given.items() if name != "up"}
        assert int8_linear.supports(rows, weight, **given) is not None
        torch.testing.assert_close(int8_linear(rows, weight, **wide), int8_linear(rows, weight), rtol=0, atol=0)
    assert "16384" in quantize_rows.supports(torch.empty(1, 16385))
    assert "contiguous" in quantize_rows.supports(torch.empty(8, 4).t())
    assert "int64" in quantize_rows.supports(x, outliers=torch.tensor([1], dtype=torch.int32))
    for scale in (torch.ones(2), torch.ones(1, dtype=torch.float64)):
        assert "one float32" in quantize_rows.supports(x, scale=scale)


@pytest.mark.parametrize("k", [1, 8, 24, 40, 100])
def test_inputs_that_tiles_cannot_load_are_refused_with_the_reason(k):
    rows, weight = quantize_rows(torch.randn(3, k).half()), weight_of(16, k)
    assert "multiple of 16" in int8_linear.supports(rows, weight)
    fp8 = quantize_rows(torch.randn(3, k).bfloat16(), dtype=torch.float8_e4m3fn)
    assert "multiples of 16" in fp8_linear.supports(fp8, weight_of(16, k, to=torch.float8_e4m3fn))
    exact = rows.dequantized(torch.float64) @ weight.dequantized(torch.float64).t()
    torch.testing.assert_close(int8_linear(rows, weight).double(), exact, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 1, 16), (3, 7, 5), (33, 100, 37), (64, 1040, 48)], ids=str)
def test_sums_of_integers_are_exact(sizes):
    m, k, n = sizes
    x, weight = integers(m, k), integers(n, k)
    assert torch.equal(integer_product(x, weight), (x.double() @ weight.double().t()).int())


@interpreted
@pytest.mark.parametrize("sizes", [(1, 16, 1), (33, 144, 37), (65, 256, 70)], ids=str)
def test_the_kernel_sums_integers_exactly(sizes, poisoned):
    """With scales that are powers of two, and its upper half taken away as the residual, a sum shows its lower half."""
    m, k, n = sizes
    x, weight = integers(m, k), integers(n, k)
    x[0], weight[0] = 127, -127  # the largest sum there is
    exact = x.double() @ weight.double().t()
    upper = (exact / 2048).round() * 2048  # 11 bits, which float16 holds, and as many below them
    rows, weight = QuantizedRows(x, torch.ones(m, 1), torch.float16), Quantized.of(weight, torch.full((n, 1), 2.0**-11))
    y = int8_linear.triton(rows, weight, residual=(-upper / 2048).half())
    assert torch.equal(y.double(), (exact - upper) / 2048)


SMALL = [case for case in int8_linear.cases if case.small]


@interpreted
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.share(2)
def test_kernel_and_passes_are_the_reference_within_a_rounding(case, poisoned):
    (x, weight, bias), given = case.make(torch.device("cpu"), torch.float16)
    for shift in (bias, None) if given.get("up_bias") is not None else (bias,):  # of a gate one bias alone, too
        assert int8_linear.supports(x, weight, shift, **given) is None
        wanted = int8_linear.reference(x, weight, shift, **given)
        for found in (int8_linear.triton(x, weight, shift, **given), in_passes(x, weight, shift, **given)):
            assert found.dtype == torch.float16 and found.shape == wanted.shape
            step = torch.finfo(torch.float16).eps * wanted.double().abs() + 2e-6 * wanted.double().abs().max()
            assert ((found.double() - wanted.double()).abs() <= step).all()
        exact = int8_linear.reference(x._replace(scales=x.scales.double()), weight, shift, **given)
        assert exact.dtype == torch.float64
        assert (wanted.double() - exact).abs().max() <= 2**-11 * exact.abs().max() * 1.01


@interpreted
@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.turns(2)
def test_every_tile_is_computed_in_any_order(group, poisoned):
    from accel_kernels.gemm.int8_linear_triton import Shape

    args, given = next(case for case in SMALL if case.name == "several-tiles").make(torch.device("cpu"), torch.float16)
    for shape in (Shape(32, 16, 32, 4, 2, group), Shape(16, 64, 16, 4, 2, group)):
        found = int8_linear.triton(*args, **given, shape=shape)
        torch.testing.assert_close(found, int8_linear.reference(*args, **given), rtol=1e-3, atol=1e-4)


def takes_scales_of_rows() -> bool:
    ones = torch.ones(16, 16).to(torch.float8_e4m3fn)
    try:
        torch._scaled_mm(ones, ones.t(), scale_a=torch.ones(16, 1), scale_b=torch.ones(1, 16), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


@pytest.mark.skipif(not takes_scales_of_rows(), reason="torch 2.10's product on a CPU takes one scale of all rows")
@pytest.mark.parametrize("case", [case for case in fp8_linear.cases if case.small], ids=lambda case: case.name)
def test_float8_through_torchs_scaled_product(case):
    assert_scaled_product(case, "cpu")


COMPILE = """
import torch
from accel_kernels import Quantized, int8_linear, quantize_rows
from accel_kernels.gemm.int8_linear_triton import Shape
from support.kernels.absent_gpu import GPU, absent_gpu

SHAPE = Shape(128, 256, 128, 8, 3)
GATED = SHAPE._replace(columns=128)
with absent_gpu(90) as launches:
    x = torch.randn(2048, 4096).bfloat16()
    rows, residual = quantize_rows.reference(x), torch.randn(2048, 4096).bfloat16()
    weight = Quantized.of(torch.empty(4096, 4096, dtype=torch.int8, device=GPU), torch.randn(4096, 1).bfloat16())
    gate = {"up": weight, "activation": "silu"}
    int8_linear.triton(rows, weight, residual=residual, shape=SHAPE)
    int8_linear.triton(quantize_rows.reference(x, outliers=6.0), weight, residual=residual, shape=SHAPE)
    int8_linear.triton(rows, weight, shape=GATED, **gate)
    quantize_rows.triton(x, dtype=torch.float8_e4m3fn)
    int8_linear.triton(rows, weight, residual=residual)
    int8_linear.triton(rows, weight, **gate)
assert [launch.name for launch in launches[-2:]] == ["hopper_gemm_kernel"] * 2
for launch in launches:
    compiled = launch.compiled()
    ptx = compiled.asm["ptx"]
    assert compiled.asm["cubin"] and compiled.metadata.shared <= 232448
    if launch.name == "quantize_rows_kernel":
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    else:
        assert ".s32.s8.s8" in ptx and "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
    if launch.name == "int8_linear_kernel":
        assert "mma.sync" not in ptx
    if launch.name == "hopper_gemm_kernel":
        assert "wgmma.wait_group.sync.aligned 1;" in ptx
print("wgmma")
"""


@pytest.mark.skipif(not EVERYTHING, reason="seconds of compiling; make test-all runs it")
def test_hopper_multiplies_bytes_in_its_own_tensor_cores(tmp_path):
    """In the kernel that Triton pipelines, with and without a gate, and in that of specialized warps."""
    assert in_a_process(COMPILE, tmp_path).strip() == "wgmma"
