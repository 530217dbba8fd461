"""GPTQ on matrices: the error of the products, against the best there is and against rounding to nearest."""

import pytest
import torch

from accel.llm.ptq.algorithms import gptq as module
from accel.llm.ptq.algorithms.gptq import Hessian
from accel.options import SCHEMES as NAMES
from accel.quantization.rounding import round_to_nearest
from accel.quantization.scheme import Scheme

SCHEMES = [Scheme.parse(name) for name in NAMES]


def normal(*shape, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(tokens: int, columns: int, seed: int, noise: float = 0.3) -> torch.Tensor:
    """Inputs of a few directions, large ones and small ones, as layers have them."""
    mixed = normal(tokens, columns // 4, seed=seed) @ normal(columns // 4, columns, seed=seed + 1)
    return (mixed + noise * normal(tokens, columns, seed=seed + 2)) * (0.2 + torch.rand(columns))


def hessian_of(x: torch.Tensor, parts: int = 1) -> torch.Tensor:
    hessian = Hessian()
    for rows in x.chunk(parts):
        hessian(rows)
    return hessian.mean


def gptq(weight: torch.Tensor, *given):
    return module.gptq([weight], *given)[0]


def error(x: torch.Tensor, weight: torch.Tensor, quantized) -> torch.Tensor:
    """(N,) of the products with every row of the weight."""
    return (x.double() @ (quantized.dequantized(torch.float64) - weight.double()).t()).square().sum(0)


def test_a_hessian_of_parts_is_that_of_the_whole():
    x = normal(37, 16, seed=0)
    for parts in (1, 3, 37):
        torch.testing.assert_close(hessian_of(x, parts), x.t() @ x / 37)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_better_than_the_nearest(scheme, ordered):
    x, weight = correlated(512, 256, seed=2), normal(20, 256, seed=3)
    found, nearest = gptq(weight, hessian_of(x), scheme, ordered), round_to_nearest(weight, scheme)
    for mine, plain in zip(found, nearest, strict=True):
        assert (mine is None) == (plain is None)
        assert mine is None or (mine.dtype == plain.dtype and mine.shape == plain.shape)
    assert error(x, weight, found).sum() < 0.6 * error(x, weight, nearest).sum()
    assert bool((found.numbers().float().abs() <= max(map(abs, scheme.range))).all())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_where_inputs_have_nothing_to_do_with_each_other_it_is_the_nearest(scheme):
    weight = normal(12, 128, seed=4)
    for ordered in (False, True):
        found = gptq(weight, torch.diag(torch.rand(128) + 0.1), scheme, ordered)
        assert torch.equal(
            found.dequantized(torch.float32), round_to_nearest(weight, scheme).dequantized(torch.float32)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_are_in_the_dtype_of_the_weight(dtype):
    x, weight = correlated(256, 128, seed=2), normal(12, 128, seed=3).to(dtype)
    found = gptq(weight, hessian_of(x), Scheme.parse("int4-g32"))
    assert found.scales.dtype == dtype
    tiny = gptq(weight * 1e-6, hessian_of(x), Scheme.parse("int4-g32"))
    assert tiny.scales.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    assert bool(tiny.dequantized(torch.float32).isfinite().all())


@pytest.mark.parametrize("ordered", [False, True])
def test_weights_given_the_same_are_rounded_together_as_each_alone(ordered):
    """One of them has scales too small for float16, which is nothing to the others."""
    x, scheme = correlated(256, 128, seed=2), Scheme.parse("int4-g32-asym")
    weights = [normal(rows, 128, seed=rows).half() * scale for rows, scale in ((12, 1.0), (8, 1e-6), (5, 1.0))]
    together = module.gptq(weights, hessian_of(x), scheme, ordered)
    assert [found.scales.dtype for found in together] == [torch.float16, torch.float32, torch.float16]
    for weight, found in zip(weights, together, strict=True):
        alone = gptq(weight, hessian_of(x), scheme, ordered)
        assert found.data.is_contiguous() and found.shape == alone.shape == weight.shape
        off = (found.numbers() != alone.numbers()).float().mean()  # a sum in another order may move a tie
        assert off < 0.01
        assert error(x, weight, found).sum() < 1.01 * error(x, weight, alone).sum()


def test_a_scale_too_small_in_the_middle_of_a_weight_is_nothing_to_the_others():
    """Errors of the columns before may leave a group less than float16 can hold, which nearest did not see."""
    x, scheme = correlated(256, 64, seed=2), Scheme.parse("int4-g32")
    weights = [normal(4, 64, seed=1).half() / 4, normal(4, 64, seed=2).half()]
    refuse = weights[1].float().abs().amax()

    def grid(groups, scheme, dtype):
        return None if dtype == torch.float16 and bool(groups.abs().amax() >= refuse) else real(groups, scheme, dtype)

    real = module.grid
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "grid", grid)
        found = module.gptq(weights, hessian_of(x), scheme)
    assert [one.scales.dtype for one in found] == [torch.float16, torch.float32]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_one_direction_only_and_nothing_at_all(scheme, ordered):
    """A Hessian of rank 1, as of one token; and of rank 0."""
    x, weight = normal(1, 256, seed=2), normal(20, 256, seed=3)
    found, nearest = gptq(weight, hessian_of(x), scheme, ordered), round_to_nearest(weight, scheme)
    assert bool(found.dequantized(torch.float32).isfinite().all())
    assert error(x, weight, found).sum() < 0.1 * error(x, weight, nearest).sum()
    nothing = gptq(weight, torch.zeros(256, 256), scheme, ordered)
    assert torch.equal(nothing.dequantized(torch.float32), nearest.dequantized(torch.float32))


def test_inputs_of_very_different_size_have_an_inverse():
    x = correlated(64, 128, seed=1) * torch.logspace(-8, 4, 128)
    found = gptq(normal(8, 128, seed=2), hessian_of(x), Scheme.parse("int4"))
    assert bool(found.dequantized(torch.float32).isfinite().all())


def test_zeros_stay_zeros():
    weight = normal(8, 128, seed=2)
    weight[3] = 0
    found = gptq(weight, hessian_of(correlated(64, 128, seed=1)), Scheme.parse("int4-asym"))
    assert bool((found.dequantized(torch.float32)[3] == 0).all())


def by_columns(weight: torch.Tensor, hessian: torch.Tensor, damping: float = 0.01) -> torch.Tensor:
    """(N, K) int: the published algorithm in float64, one column after the other, symmetric int8 by row.

    Each column is rounded, and all behind it take its error by the inverse of the Hessian of what is left (OBQ, eq. 2
    and 3 of the paper): no factor, no blocks. Columns that get nothing are rounded to nearest.
    """
    hessian, rest = hessian.double().clone(), weight.double().clone()
    dead = hessian.diagonal() == 0
    mean = hessian.diagonal()[~dead].mean()
    hessian.diagonal()[dead] = mean
    hessian.diagonal().add_(damping * mean)
    scales, numbers = weight.double().abs().amax(1) / 127, []
    for column in range(weight.shape[1]):
        inverse = hessian[column:, column:].inverse()
        number = (rest[:, column] / scales).round().clamp(-127, 127)
        error = rest[:, column] - number * scales
        rest[:, column:] -= error[:, None] / inverse[0, 0] * inverse[0]
        numbers.append(number)
    return torch.stack(numbers, 1).int()


@pytest.mark.parametrize("dead", [(), (3, 60, 61, 62, 63, 64, 100), tuple(range(0, 192, 2))], ids=len)
def test_numbers_are_those_of_the_algorithm_without_blocks(dead, monkeypatch):
    """Blocks of 64 columns, three of them: errors must pass from each to all behind, and dead columns take no part."""
    monkeypatch.setattr(module, "COLUMNS", 64)
    x, weight = correlated(512, 192, seed=2), normal(16, 192, seed=3)
    weight[:, 5] = 4.0 * weight.abs().amax(1)  # the largest of each row, before there are errors: one scale for both
    x[:, list(dead)] = 0
    wanted = by_columns(weight, hessian_of(x))
    # A scale by row is taken of what the row was.
    found = gptq(weight, hessian_of(x), Scheme.parse("int8"))
    apart = (found.numbers().int() - wanted).abs()
    assert int(apart.max()) <= 1 and float((apart > 0).float().mean()) < 0.005  # next to a half, by float32
    exact = (weight / found.scales).round().int()
    assert torch.equal(found.numbers().int()[:, list(dead)], exact[:, list(dead)])
    live = x.any(0)
    assert float((wanted != exact)[:, live].float().mean()) > 0.2
