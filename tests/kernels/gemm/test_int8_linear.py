"""Rows in 8 bits and their products: exact sums, every epilogue, outliers, and how much of the signal is left."""

import os
import subprocess
import sys

import pytest
import torch
from accel_kernels import Norm, Quantized, fp8_linear, int8_linear, quantize_rows
from accel_kernels.gemm.int8_linear import in_passes, integer_product
from accel_kernels.gemm.quantize_rows import MOST, KnownColumns, QuantizedRows
from accel_kernels.norm import norm as norms

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")

NORMS = {
    "none": None,
    "rms": Norm(torch.randn(80), None, 1e-5),
    "gemma": Norm(torch.randn(80), None, 1e-6, offset=1.0),
    "layer": Norm(torch.randn(80), torch.randn(80), 1e-5, centred=True),
    "plain-layer": Norm(None, None, 1e-5, centred=True),
}
FLAGS = {
    "plain": {},
    "bias": {"bias": True, "scale": 0.5},
    "residual": {"residual": True, "scale": 2.0},
    "gelu": {"bias": True, "activation": "gelu"},
    "gate": {"gate": True, "activation": "silu", "residual": True},
    "gate-bias": {"gate": True, "bias": True, "activation": "gelu_tanh"},
    "gate-one-bias": {"gate": True, "bias": "up", "activation": "relu2"},
}


@pytest.fixture
def poisoned(monkeypatch):
    """Fresh memory holds NaN, or a number that no kernel writes, so that an element no program wrote shows."""
    for name in ("empty", "empty_like"):

        def poison(*args, make=getattr(torch, name), **kwargs):  # noqa: B008 (torch's own, before it is replaced)
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else -128)

        monkeypatch.setattr(torch, name, poison)


def weight_of(n, k, dtype=torch.bfloat16, to=torch.int8):
    rows = quantize_rows.reference(torch.randn(n, k) * k**-0.5, dtype=to)
    return Quantized(rows.data, rows.scales.to(dtype))


def integers(*shape):
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def cast(norm, dtype):
    """The norm with its weights in this dtype."""
    return norm and Norm(*(t.to(dtype) if isinstance(t, torch.Tensor) else t for t in norm))


def sqnr(found, exact) -> float:
    """Signal to quantization noise, dB."""
    exact = exact.double()
    return float(10 * torch.log10(exact.square().sum() / (found.double() - exact).square().sum()))


@interpreted
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 80), (3, 5, 80)], ids=str)
def test_rows_are_rounded_as_the_reference_rounds_them(shape, dtype, norm, poisoned):
    x = (torch.randn(shape) * 3).to(dtype)
    norm = cast(norm, dtype)
    theirs, ours = quantize_rows.reference(x, norm=norm), quantize_rows.triton(x, norm=norm)
    exact = quantize_rows.reference(x.double(), norm=cast(norm, torch.float64))
    torch.testing.assert_close(ours.scales, theirs.scales, rtol=5e-7, atol=0)
    apart = (ours.data.int() - theirs.data.int()).abs()
    if norm is None:
        assert not apart.any() and torch.equal(ours.scales, theirs.scales)
    assert apart.max() <= 1 and (apart > 0).float().mean() < 0.01  # sums in another order, next to a half
    assert ours.data.int().abs().amax(-1).ge(127).all()
    # Within half a step of the float64 values.
    wide = exact.data.double() * exact.scales
    assert float(((ours.data.double() * ours.scales.double() - wide).abs() / exact.scales).max()) < 1.001


@interpreted
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_given_scale_is_that_of_all_rows_and_what_is_beyond_saturates(dtype, norm, poisoned):
    """Against the formula in float64: within half a step, but for what lies beyond the least and the largest number."""
    x, scale = (torch.randn(3, 5, 80) * 3).to(dtype), torch.tensor([0.0137])
    norm = cast(norm, dtype)
    x[2, 1, 7] = 1e30 if norm is None else x[2, 1, 7]
    theirs, ours = (one(x, norm=norm, scale=scale) for one in (quantize_rows.reference, quantize_rows.triton))
    h = x.double() if norm is None else norms.reference(x.double(), cast(norm, torch.float64))
    wide = h / scale.double()
    assert (wide.abs() > 128).any() and (wide.abs() < 100).any()
    for rows in (ours, theirs):
        assert (rows.scales == scale).all() and rows.scales.shape == (3, 5, 1) and rows.scales.is_contiguous()
        assert float((rows.data.double() - wide.clamp(-128, 127)).abs().max()) < 0.501
    assert (ours.data.int() - theirs.data.int()).abs().float().mean() < (1e-9 if norm is None else 0.01)


@interpreted
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows_beside_a_given_scale(value, poisoned):
    x, scale = torch.randn(3, 77), torch.tensor([0.01])
    x[1, 70] = value
    for function in (quantize_rows.triton, quantize_rows.reference):
        scales = function(x, scale=scale).scales
        assert scales[1].isnan().all() and (scales[[0, 2]] == scale).all()


@interpreted
def test_columns_beside_a_given_scale(poisoned):
    x, scale, columns = torch.randn(4, 97), torch.tensor([0.02]), torch.tensor([90, 3])
    x[:, 3] *= 50
    for function in (quantize_rows.triton, quantize_rows.reference):
        rows = function(x, outliers=columns, scale=scale)
        assert not rows.data[:, [3, 90]].any() and (rows.scales == scale).all()
        assert torch.equal(rows.outliers, x[:, [3, 90]])
        rest = (x / scale).clamp(-128, 127).index_fill(1, columns, 0)
        assert float((rows.data - rest).abs().max()) < 0.501


def test_float8_by_a_given_scale_saturates_at_448():
    x, scale = torch.randn(7, 96) * 4, torch.tensor([0.01])
    rows = quantize_rows.reference(x, dtype=torch.float8_e4m3fn, scale=scale)
    wide = (x.double() / scale.double()).clamp(-448, 448)
    error = (rows.data.double() - wide).abs()
    assert rows.data.float().abs().max() == 448 and (error <= wide.abs() / 16 * 1.0001 + 2**-10).all()


@interpreted
def test_rounding_is_to_the_nearest_and_ties_to_even(poisoned):
    x = torch.tensor([[127.5, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.49, -127.5, 0.0]])
    ours = quantize_rows.triton(x)
    assert ours.data.tolist() == [[127, 0, 2, 2, 0, -2, -2, 126, -128, 0]]
    assert torch.equal(ours.data, quantize_rows.reference(x).data) and ours.scales.item() == 1.0


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_of_zeros_of_the_least_and_of_the_greatest(dtype, poisoned):
    most, least = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    x = torch.tensor([[0.0, -0.0, 0.0], [most, -most, most / 4], [least, -least, 0.0]], dtype=dtype)
    for rows in (quantize_rows.triton(x), quantize_rows.reference(x)):
        assert rows.data[0].tolist() == [0, 0, 0] and rows.data[1].tolist() in ([127, -127, 32], [127, -128, 32])
        assert rows.scales.isfinite().all() and (rows.scales > 0).all()
        step = rows.scales.double()
        assert ((rows.data.double() * step - x.double()).abs() <= 0.5001 * step + 1e-32).all()


@interpreted
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows_in_its_row_and_no_other(value, poisoned):
    x = torch.randn(3, 64)
    x[1, 7] = value
    weight = weight_of(16, 64)
    for rows in (quantize_rows.triton(x.bfloat16()), quantize_rows.reference(x.bfloat16())):
        for y in (int8_linear.triton(rows, weight), int8_linear.reference(rows, weight), in_passes(rows, weight)):
            assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


def test_numbers_of_float8_against_float64():
    x = torch.randn(7, 96) * torch.logspace(-3, 3, 7)[:, None]
    rows = quantize_rows.reference(x, dtype=torch.float8_e4m3fn)
    assert rows.data.float().abs().amax(1).eq(448).all()
    error = (rows.data.double() * rows.scales.double() - x.double()).abs()
    # Half of the last of 3 bits, and half of the least subnormal, 2^-9.
    assert (error <= x.double().abs() / 16 * 1.0001 + rows.scales.double() * 2**-10).all()


@interpreted
def test_float8_numbers_that_need_no_rounding_are_kept(poisoned):
    """Triton's interpreter loses the carry where rounding reaches a power of two, hence numbers of float8."""
    x = (torch.randn(5, 80) * 50).to(torch.float8_e4m3fn).float()
    x[:, 3] = 448.0
    ours = quantize_rows.triton(x, dtype=torch.float8_e4m3fn)
    assert torch.equal(ours.data.float(), x) and (ours.scales == 1).all()


@interpreted
@pytest.mark.parametrize(
    "outliers",
    [
        6.0,
        torch.tensor([90, 3, 50]),
        torch.tensor([3, 3, 90, 50, 17]),
        KnownColumns.of(torch.tensor([90, 3, 50]), 97),
        KnownColumns.of(torch.tensor([90, 3, 50, 3]), 97),
    ],
    ids=lambda outliers: str(outliers if isinstance(outliers, float) else len(outliers)),
)
@pytest.mark.parametrize("norm", [None, Norm(torch.ones(97), None, 1e-5)], ids=["none", "rms"])
def test_outliers_are_taken_out(norm, outliers, poisoned):
    x = torch.randn(21, 97).clamp(-2, 2)
    x[2, 3], x[20, 50], x[0, 90] = 40.0, -40.0, 40.0  # of a single row each, beyond 6 after the norm as well
    ours = quantize_rows.triton(x, norm=norm, outliers=outliers)
    theirs = quantize_rows.reference(x, norm=norm, outliers=outliers)
    wanted, room = [3, 50, 90], 97
    if isinstance(outliers, KnownColumns):
        room = outliers.columns.numel()
    elif isinstance(outliers, torch.Tensor):
        wanted, room = sorted(set(outliers.tolist())), outliers.numel()
    for rows in (ours, theirs):
        assert rows.count.item() == len(wanted) and rows.columns[: len(wanted)].tolist() == wanted
        assert not rows.data[:, wanted].any() and rows.data.int().abs().amax(1).ge(127).all()
        assert rows.outliers.shape == (21, room)
    count = len(wanted)
    torch.testing.assert_close(ours.outliers[:, :count], theirs.outliers[:, :count], rtol=5e-7, atol=0)
    h = x if norm is None else torch.nn.functional.rms_norm(x, (97,), eps=1e-5)
    assert float((ours.dequantized(torch.float32) - h).abs().max()) <= 0.51 * float(ours.scales.max())


@interpreted
@pytest.mark.parametrize("norm", [name for name in NORMS if name != "none"])
@pytest.mark.parametrize("outliers", [None, torch.tensor([66, 3, 40])], ids=["threshold", "columns"])
def test_outliers_behind_a_norm_are_what_the_norm_makes_of_them(norm, outliers, poisoned):
    """Its mean taken off, its weight and its bias in: against the formula in float64."""
    norm, x = NORMS[norm], torch.randn(6, 80) * 0.3 + 2.0
    x[:, [3, 40, 66]] += torch.tensor([[60.0, -45.0, 50.0]])
    norm = norm._replace(weight=None if norm.weight is None else norm.weight.sign() + norm.weight / 2)
    if norm.bias is not None:  # of one column an outlier by itself
        norm = norm._replace(bias=norm.bias.index_fill(0, torch.tensor([20]), 40.0))
    h = norms.reference(x.double(), cast(norm, torch.float64))
    sizes, columns = h.abs().amax(0).sort(descending=True)
    if outliers is None:  # a threshold between the third column and the fourth
        outliers, wanted = float(sizes[2:4].mean()), columns[:3].sort().values
    else:
        wanted = outliers.sort().values
    ours = quantize_rows.triton(x, norm=norm, outliers=outliers)
    count = ours.count.item()
    assert torch.equal(ours.columns[:count], wanted)
    torch.testing.assert_close(ours.outliers[:, :count].double(), h[:, wanted], rtol=1e-5, atol=1e-5)
    rest = h.index_fill(1, wanted, 0)
    assert float(((ours.data.double() * ours.scales.double() - rest).abs() / ours.scales.double()).max()) < 0.501


@interpreted
@pytest.mark.parametrize("norm", [None, Norm(torch.ones(96), None, 1e-5)], ids=["none", "rms"])
@pytest.mark.parametrize(("planted", "count"), [(6, 6), (7, 96)])
def test_where_more_than_one_column_in_sixteen_has_outliers_all_stay_in_16_bits(planted, count, norm, poisoned):
    x = torch.randn(21, 96).clamp(-2, 2)
    columns = torch.randperm(96)[:planted]
    x[torch.arange(planted), columns] = 60.0
    ours = quantize_rows.triton(x, norm=norm, outliers=5.0)
    theirs = quantize_rows.reference(x, norm=norm, outliers=5.0)
    wanted = sorted(columns.tolist()) if count < 96 else list(range(96))
    for rows in (ours, theirs):
        assert rows.count.item() == count and rows.columns[:count].tolist() == wanted
        assert not rows.data[:, wanted].any() and rows.scales.isfinite().all()
        assert rows.data.int().abs().amax(1).ge(127).all() == (count < 96)
    torch.testing.assert_close(ours.outliers[:, :count], theirs.outliers[:, :count], rtol=5e-7, atol=0)


@interpreted
def test_no_outliers_and_all_outliers(poisoned):
    """Room for every column: nothing is lost however many there are, and nothing is read where there are none."""
    x, weight = torch.randn(5, 64).half(), weight_of(24, 64, torch.float16)
    for threshold, count in ((100.0, 0), (1e-9, 64)):
        rows = quantize_rows.triton(x, outliers=threshold)
        assert rows.count.item() == count
        y = int8_linear.triton(rows, weight)
        torch.testing.assert_close(y, int8_linear.reference(rows, weight), rtol=1e-3, atol=1e-3)
        exact = x.double() @ weight.dequantized(torch.float64).t()
        assert sqnr(y, exact) > (60 if count else 38)


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
    rows, weight = QuantizedRows(x, torch.ones(m, 1), torch.float16), Quantized(weight, torch.full((n, 1), 2.0**-11))
    y = int8_linear.triton(rows, weight, residual=(-upper / 2048).half())
    assert torch.equal(y.double(), (exact - upper) / 2048)


def call(flags, m, k, n, dtype, outliers=None):
    x = torch.randn(m, k)
    if outliers is not None:
        x[:, [1, k - 1]] *= 30
    flags = dict(flags)
    gate, bias = flags.pop("gate", False), flags.pop("bias", None)
    given = {name: value for name, value in flags.items() if name != "residual"}
    if flags.get("residual"):
        given["residual"] = torch.randn(m, n).to(dtype)
    if gate:
        given["up"] = weight_of(n, k, dtype)
        given["up_bias"] = torch.randn(n).to(dtype) if bias else None
    shift = torch.randn(n).to(dtype) if bias and bias != "up" else None
    return (quantize_rows.reference(x.to(dtype), outliers=outliers), weight_of(n, k, dtype), shift), given


@interpreted
@pytest.mark.parametrize("outliers", [None, 6.0, torch.tensor([3, 1, 79])], ids=repr)
@pytest.mark.parametrize("sizes", [(1, 80, 7), (35, 96, 41)], ids=str)
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_kernel_and_passes_are_the_reference_within_a_rounding(flags, sizes, outliers, poisoned):
    args, given = call(flags, *sizes, torch.float16, outliers)
    assert int8_linear.supports(*args, **given) is None
    wanted = int8_linear.reference(*args, **given)
    for found in (int8_linear.triton(*args, **given), in_passes(*args, **given)):
        assert found.dtype == torch.float16 and found.shape == wanted.shape
        step = torch.finfo(torch.float16).eps * wanted.double().abs() + 2e-6 * wanted.double().abs().max()
        assert ((found.double() - wanted.double()).abs() <= step).all()
    exact_args = (args[0]._replace(scales=args[0].scales.double()), *args[1:])
    exact = int8_linear.reference(*exact_args, **given)
    assert exact.dtype == torch.float64
    assert (wanted.double() - exact).abs().max() <= 2**-11 * exact.abs().max() * 1.01


@interpreted
@pytest.mark.parametrize("group", [1, 2, 8])
def test_every_tile_is_computed_in_any_order(group, poisoned):
    from accel_kernels.gemm.int8_linear_triton import Shape

    args, given = call({}, 75, 48, 133, torch.float16)
    for shape in (Shape(32, 16, 32, 4, 2, group), Shape(16, 64, 16, 4, 2, group)):
        found = int8_linear.triton(*args, **given, shape=shape)
        torch.testing.assert_close(found, int8_linear.reference(*args, **given), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("case", [case for case in fp8_linear.cases if case.small], ids=lambda case: case.name)
def test_float8_through_torchs_scaled_product(case):
    args, given = case.make(torch.device("cpu"), torch.bfloat16)
    assert fp8_linear.supports(*args, **given) is None
    exact = fp8_linear.reference(args[0]._replace(scales=args[0].scales.double()), *args[1:], **given)
    found, wanted = fp8_linear.triton(*args, **given), fp8_linear.reference(*args, **given)
    own = (wanted.double() - exact).abs().max()
    assert (found.double() - exact).abs().max() <= 4 * own  # rounded after the product, after the gate and at the end


def linear_sqnr(x, weight, **how) -> float:
    exact = x.double() @ weight.double().t()
    if how.get("dtype") == torch.float8_e4m3fn:
        rows = quantize_rows(weight, dtype=torch.float8_e4m3fn)
        return sqnr(fp8_linear(quantize_rows(x, **how), Quantized(rows.data, rows.scales)), exact)
    rows = quantize_rows(weight)
    return sqnr(int8_linear(quantize_rows(x, **how), Quantized(rows.data, rows.scales)), exact)


def test_how_much_of_the_signal_is_left():
    """A layer of 512 inputs, bf16. Planted: 5 of them 60 times the others, as in language models."""
    x, weight = torch.randn(64, 512), torch.randn(256, 512) * 512**-0.5
    planted = x.clone()
    planted[:, [3, 77, 200, 201, 511]] *= 60
    x, planted, weight = (t.bfloat16() for t in (x, planted, weight))
    light = weight.clone()
    light[:, [3, 77, 200, 201, 511]] = 0.0  # what the other columns say, which planted ones must not drown
    columns = torch.tensor([3, 77, 200, 201, 511])
    assert 39 < linear_sqnr(x, weight) < 40
    assert 28 < linear_sqnr(x, weight, dtype=torch.float8_e4m3fn) < 29
    assert 28 < linear_sqnr(planted, light, dtype=torch.float8_e4m3fn) < 29  # an exponent each: planting costs nothing
    assert linear_sqnr(planted, weight) < 29 and linear_sqnr(planted, light) < 14  # naive int8
    for outliers in (6.0, columns):
        assert linear_sqnr(planted, weight, outliers=outliers) > 41
        assert linear_sqnr(planted, light, outliers=outliers) > 39
    for dtype, rows, heavy, least, most in (  # one scale for all rows: 8-bit floats lose nothing by it
        (torch.int8, x, weight, 37.5, 39),
        (torch.int8, planted, light, 7, 9),
        (torch.float8_e4m3fn, x, weight, 28, 29),
        (torch.float8_e4m3fn, planted, light, 28, 29),
    ):
        scale = (rows.float().abs().max() / MOST[dtype]).view(1)
        assert least < linear_sqnr(rows, heavy, dtype=dtype, scale=scale) < most


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from accel_kernels.gemm import int8_linear_triton as int8_linear, int8_wgmma_triton as int8_wgmma
from accel_kernels.gemm import quantize_rows_triton as quantize_rows
from accel_kernels.gemm.int8_linear_triton import Shape

SHAPE = Shape(128, 256, 128, 8, 3)
GATED = SHAPE._replace(columns=128)
BY_HAND = SHAPE._replace(stages=4)
plain = (int8_linear.compile_case(SHAPE, False, False, True),) if sys.argv[1:] == ["all"] else ()
for kernel, types, constants, warps, *stages in (
    *plain, int8_linear.compile_case(SHAPE, False, True, True), int8_linear.compile_case(GATED, True, False, False),
    quantize_rows.compile_case("fp8e4nv", False),
    int8_wgmma.compile_case(BY_HAND, False, True), int8_wgmma.compile_case(BY_HAND._replace(columns=128), True, False),
):
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    constexprs = {name: constants[name] for name in kernel.arg_names if name in constants}
    options = {"num_warps": warps} | ({"num_stages": stages[0]} if stages else {})
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    compiled = triton.compile(source(kernel, signature, constexprs), GPUTarget("cuda", 90, 32), options)
    ptx = compiled.asm["ptx"]
    assert compiled.asm["cubin"] and compiled.metadata.shared <= 232448
    if kernel is quantize_rows.quantize_rows_kernel:
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    else:
        assert ".s32.s8.s8" in ptx and "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
    if kernel is int8_linear.int8_linear_kernel:
        assert "mma.sync" not in ptx
    if source is GluonASTSource:
        assert f"wgmma.wait_group.sync.aligned {2 if constants['GATE'] else 1};" in ptx
print("wgmma")
"""


def test_hopper_multiplies_bytes_in_its_own_tensor_cores(tmp_path):
    """In the kernel that Triton pipelines, with and without a gate, and in the one written out by hand."""
    environment = dict(os.environ, TRITON_CACHE_DIR=str(tmp_path), PYTHONPATH="kernels", TRITON_DEFAULT_FP_FUSION="1",
                       TRITON_DISABLE_LINE_INFO="1")  # fmt: skip
    environment.pop("TRITON_INTERPRET", None)
    many = "all" if os.environ.get("ACCEL_TEST_EVERYTHING") else "some"
    done = subprocess.run([sys.executable, "-c", COMPILE, many], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "wgmma", done.stderr[-2000:]
