"""GPTQ, and scales that are searched."""

import copy

import pytest
import torch

from accel.comparison import relative_rms
from accel.llm.ptq.algorithms import gptq as module
from accel.llm.ptq.algorithms import smoothquant as smooth
from accel.llm.ptq.algorithms.awq import LEAST, clipped
from accel.llm.ptq.algorithms.gptq import Hessian
from accel.llm.ptq.calibrate import LayerResult, quantize_layers
from accel.llm.ptq.calibration.folding import layer_groups
from accel.llm.ptq.calibration.layer_work import rounded_by_token, rounding_inputs
from accel.options import SCHEMES as NAMES
from accel.quantization.rounding import round_to_nearest
from accel.quantization.scheme import Scheme
from support.llm.families import make, prompt

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
    return hessian.mean[0]


def gptq(weight: torch.Tensor, *given):
    return module.gptq([weight], *given)[0]


def error(x: torch.Tensor, weight: torch.Tensor, quantized) -> torch.Tensor:
    """(N,) of the products with every row of the weight."""
    return (x.double() @ (quantized.dequantized(torch.float64) - weight.double()).t()).square().sum(0)


def test_a_hessian_of_parts_is_that_of_the_whole():
    x = normal(37, 16, seed=0)
    for parts in (1, 3, 37):
        torch.testing.assert_close(hessian_of(x, parts), x.t() @ x / 37)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_better_than_the_nearest(scheme):
    x, weight = correlated(512, 256, seed=2), normal(20, 256, seed=3)
    found, nearest = gptq(weight, hessian_of(x), scheme), round_to_nearest(weight, scheme)
    kinds = [{name: (part.dtype, part.shape) for name, part in one.parts().items()} for one in (found, nearest)]
    assert kinds[0] == kinds[1]
    assert error(x, weight, found).sum() < 0.6 * error(x, weight, nearest).sum()
    assert bool((found.numbers().float().abs() <= max(map(abs, scheme.range))).all())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_where_inputs_have_nothing_to_do_with_each_other_it_is_the_nearest(scheme):
    weight = normal(12, 128, seed=4)
    found = gptq(weight, torch.diag(torch.rand(128) + 0.1), scheme)
    assert torch.equal(found.dequantized(torch.float32), round_to_nearest(weight, scheme).dequantized(torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_are_in_the_dtype_of_the_weight(dtype):
    x, weight = correlated(256, 128, seed=2), normal(12, 128, seed=3).to(dtype)
    found = gptq(weight, hessian_of(x), Scheme.parse("int4-g32"))
    assert found.scales.dtype == dtype
    tiny = gptq(weight * 1e-6, hessian_of(x), Scheme.parse("int4-g32"))
    assert tiny.scales.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    assert bool(tiny.dequantized(torch.float32).isfinite().all())


def test_weights_given_the_same_are_rounded_together_as_each_alone():
    """One of them has scales too small for float16, which is nothing to the others."""
    x, scheme = correlated(256, 128, seed=2), Scheme.parse("int4-g32-asym")
    weights = [normal(rows, 128, seed=rows).half() * scale for rows, scale in ((12, 1.0), (8, 1e-6), (5, 1.0))]
    together = module.gptq(weights, hessian_of(x), scheme)
    assert [found.scales.dtype for found in together] == [torch.float16, torch.float32, torch.float16]
    for weight, found in zip(weights, together, strict=True):
        alone = gptq(weight, hessian_of(x), scheme)
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


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_one_direction_only_and_nothing_at_all(scheme):
    """A Hessian of rank 1, as of one token; and of rank 0."""
    x, weight = normal(1, 256, seed=2), normal(20, 256, seed=3)
    found, nearest = gptq(weight, hessian_of(x), scheme), round_to_nearest(weight, scheme)
    assert bool(found.dequantized(torch.float32).isfinite().all())
    assert error(x, weight, found).sum() < 0.1 * error(x, weight, nearest).sum()
    nothing = gptq(weight, torch.zeros(256, 256), scheme)
    assert torch.equal(nothing.dequantized(torch.float32), nearest.dequantized(torch.float32))


def test_inputs_of_very_different_size_have_an_inverse_and_zeros_stay_zeros():
    x = correlated(64, 128, seed=1)
    found = gptq(normal(8, 128, seed=2), hessian_of(x * torch.logspace(-8, 4, 128)), Scheme.parse("int4"))
    assert bool(found.dequantized(torch.float32).isfinite().all())
    weight = normal(8, 128, seed=2)
    weight[3] = 0
    found = gptq(weight, hessian_of(x), Scheme.parse("int4-asym"))
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


GROUPED = [Scheme.parse(name) for name in ("int4-g32", "int4-g32-asym", "int4-g64", "int4")]


def by_group(x: torch.Tensor, off: torch.Tensor, group: int) -> torch.Tensor:
    """(rows, groups): mean square of every group's part of the products."""
    parts = torch.einsum("tgi,ngi->tng", x.unflatten(1, (-1, group)), off.unflatten(1, (-1, group)))
    return parts.square().mean(0)


@pytest.mark.parametrize("scheme", GROUPED, ids=str)
def test_no_group_is_worse_for_being_clipped(scheme):
    x, weight = normal(200, 256, seed=0), normal(24, 256, seed=1)
    weight[torch.rand(24, 256, generator=torch.Generator().manual_seed(2)) < 0.02] *= 4
    hessian = Hessian(scheme.group)
    for rows in x.split(37):
        hessian(rows)
    parts = x.unflatten(1, (-1, scheme.group))
    torch.testing.assert_close(hessian.mean, torch.einsum("tgi,tgj->gij", parts, parts) / 200)
    narrow, plain = clipped(weight, hessian.mean, scheme), round_to_nearest(weight, scheme)
    mine, own = (by_group(x, q.dequantized(torch.float32) - weight, scheme.group) for q in (narrow, plain))
    assert bool((mine <= own * (1 + 1e-4)).all()) and mine.sum() < 0.95 * own.sum()
    ratio = narrow.scales / plain.scales
    assert float(ratio.min()) >= LEAST * 0.99 and float(ratio.max()) <= 1.001 and float(ratio.min()) < 0.9


def test_activations_are_rounded_by_token_by_hand():
    x = torch.tensor([[127.5, 0.4, -3.6, 0.0], [0.0, 0.0, 0.0, 0.0], [1.275, -0.004, 0.016, -1.2]])
    wanted = torch.tensor([[127.0, 0, -4, 0], [0, 0, 0, 0], [1.27, 0, 0.02, -1.2]])
    torch.testing.assert_close(rounded_by_token(x), wanted)
    assert rounded_by_token(x.bfloat16()).dtype == torch.bfloat16
    linear = torch.nn.Linear(4, 2)
    with rounding_inputs([linear]):
        got, named = linear(x), linear(input=x)
    assert torch.equal(got, linear(rounded_by_token(x))) and torch.equal(named, got)
    assert not linear._forward_pre_hooks


def test_awq_scales_up_what_gets_large_inputs():
    """Channels of which the norm makes 30 times what it makes of others."""
    model = make("llama", num_hidden_layers=1)
    layer = model.model.layers[0]
    layer.input_layernorm.weight.data[[5, 40]] *= 30
    before = layer.input_layernorm.weight.detach().clone()
    ids = [{"input_ids": prompt(4, 24)}]
    nearest = next(quantize_layers(copy.deepcopy(model), Scheme.parse("int4-g32"), "rtn", ids)).sqnr_db
    found = next(quantize_layers(model, Scheme.parse("int4-g32"), "awq", ids))
    scales = before / layer.input_layernorm.weight
    others = [channel for channel in range(64) if channel not in (5, 40)]
    assert float(scales[[5, 40]].min()) > 2 * float(scales[others].median())
    assert found.sqnr_db > nearest + 3


def test_smooth_quant_evens_out_what_goes_into_the_linears():
    model = make("llama")
    stock = copy.deepcopy(model)
    layer, groups = model.model.layers[0], layer_groups(model)["model.layers.0"]
    layer.input_layernorm.weight.data[[5, 40]] *= 100
    for name in ("q_proj", "k_proj", "v_proj"):
        layer.self_attn.get_submodule(name).weight.data[:, [5, 40]] /= 100
    ids = [{"input_ids": prompt(4, 24)}]
    assert relative_rms(model(**ids[0]).logits, stock(**ids[0]).logits) < 1e-5 and groups[0].label == "attention"
    found = next(quantize_layers(model, Scheme.parse("int8"), "smoothquant", ids))
    even = next(quantize_layers(stock, Scheme.parse("int8"), "smoothquant", ids))
    weight = layer.input_layernorm.weight.abs()
    assert float(weight[[5, 40]].max()) < 15 * float(weight.median())
    assert found.sqnr_db > even.sqnr_db - 1
    assert set(found.changed) == {
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
    }


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("size", [1.0, 20.0])
def test_smooth_quant_takes_the_exponent_that_leaves_most_of_the_layer(size, seed, monkeypatch):
    """Each tried by itself; with channels that are planted, not to smooth is by far the worst."""

    def result() -> LayerResult:
        model = make("llama", seed=seed, num_hidden_layers=1)
        layer = model.model.layers[0]
        for norm, linears, planted in (
            (layer.input_layernorm, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), [5, 40]),
            (layer.post_attention_layernorm, ("mlp.gate_proj", "mlp.up_proj"), [7, 9]),
        ):
            norm.weight.data[planted] *= size
            for path in linears:
                layer.get_submodule(path).weight.data[:, planted] /= size
        return next(quantize_layers(model, Scheme.parse("int8"), "smoothquant", [{"input_ids": prompt(4, 24)}]))

    chosen, every = result().sqnr_db, smooth.EXPONENTS
    found = {}
    for exponent in every:
        monkeypatch.setattr(smooth, "EXPONENTS", (exponent,))
        found[exponent] = result().sqnr_db
    best = max(found, key=found.get)
    assert chosen == pytest.approx(found[best], abs=1e-3) and len(set(found.values())) == len(every)
    assert size == 1 or (best is not None and found[best] > found[None] + 10)
