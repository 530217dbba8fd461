"""Rows rounded to int8, and columns that are too large for it."""

import pytest
import torch
from accel_kernels import Norm, int8_linear, quantize_rows
from accel_kernels.gemm.quantize_rows import KnownColumns
from accel_kernels.norm import norm as norms

from support.kernels.numbers import NORMS, cast, sqnr, weight_of

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")


@interpreted
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 80), (3, 5, 80)], ids=str)
@pytest.mark.share(2)
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


pytest.importorskip("triton")


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
@pytest.mark.share(1)
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
