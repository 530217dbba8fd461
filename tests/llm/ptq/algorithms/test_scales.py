"""Clipping, rounding of activations, and the search for scales, on matrices and layers that are small."""

import copy

import pytest
import torch

from accel.llm.analysis.compare import off
from accel.llm.ptq.algorithms import smoothquant as smooth
from accel.llm.ptq.algorithms.clipping import LEAST, BlockHessian, clipped
from accel.llm.ptq.calibrate import LayerResult, quantize_layers
from accel.llm.ptq.calibration.fake_quant import rounded_by_token, rounding_inputs
from accel.llm.ptq.calibration.folding import layer_groups
from accel.quantization.rounding import round_to_nearest
from accel.quantization.scheme import Scheme
from support.llm.families import make, prompt

GROUPED = [Scheme.parse(name) for name in ("int4-g32", "int4-g32-asym", "int4-g64", "int4")]


def normal(*shape, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_group(x: torch.Tensor, off: torch.Tensor, group: int) -> torch.Tensor:
    """(rows, groups): mean square of every group's part of the products."""
    parts = torch.einsum("tgi,ngi->tng", x.unflatten(1, (-1, group)), off.unflatten(1, (-1, group)))
    return parts.square().mean(0)


@pytest.mark.parametrize("scheme", GROUPED, ids=str)
def test_no_group_is_worse_for_being_clipped(scheme):
    x, weight = normal(200, 256, seed=0), normal(24, 256, seed=1)
    weight[torch.rand(24, 256, generator=torch.Generator().manual_seed(2)) < 0.02] *= 4
    hessian = BlockHessian(scheme)
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
    assert off(model(**ids[0]).logits, stock(**ids[0]).logits) < 1e-5 and groups[0].label == "attention"
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
