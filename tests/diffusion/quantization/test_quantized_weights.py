"""Denoisers with weights in 8 bits, against stock over the same weights: outputs, what is fused, undo, refusals."""

import copy
import json

import pytest
import torch
from torch import nn

import accel
from accel.bench.diffusion.cases import CASES
from accel.diffusion.linears import denoiser_linears, denoises, sensitive_linears
from accel.fusion import stacked_linears as joint
from accel.quantization.scheme import Scheme
from benchmarks.models.tiny_denoisers import DITS, given, transformer
from support.diffusion.oracles import EXACT, oracle
from support.diffusion.outputs import close, error, in_dtype, run
from support.diffusion.tiny_models import UNETS
from support.llm.quantized import held_by, rounded
from support.noted import noted
from support.patched import sites

FUSED = ("resnet block", "transformer stack", "transformer block", "attention", "upward block", "layer norm")


WAYS = [
    ("int8", None),
    ("int8-asym", None),
    ("fp8", None),
    ("int8", "int8"),
    ("int8", "int8-outliers"),
    ("fp8", "fp8"),
]


@pytest.mark.parametrize(("weights", "activations"), WAYS)
@pytest.mark.parametrize("name", [*UNETS, *DITS])
@pytest.mark.share(24)
@pytest.mark.turns(2)
def test_equals_stock_over_its_weights_and_rows(name, weights, activations, tiny, unet_and_inputs, in_double):
    """In float64 where rows are rounded: rounding before it would put numbers next to a half to the other side."""
    rounds = activations is not None
    stock, inputs = (transformer(name), given(name, times=4)) if name in DITS else unet_and_inputs(name, torch.float32)
    if rounds:
        stock, inputs = stock.double(), in_dtype(inputs, torch.float64)
        for module in stock.modules():  # channels of large values behind a norm
            if type(module) is nn.LayerNorm and module.weight is not None:
                module.weight.data[5] *= 10
        in_double()
    model = copy.deepcopy(stock)
    before = tiny.snapshot(model)
    accel.optimize(model, weights=weights, activations=activations)
    twin, plain = (oracle(stock, model), rounded(stock, model)) if rounds else (rounded(stock, model), stock)
    close(run(model, inputs), run(twin, inputs), EXACT if rounds else 1e-5)
    lost = error(run(model, inputs), run(plain, inputs))
    assert 1e-5 < lost < (0.5 if rounds else 0.05 if weights == "fp8" else 0.02)
    left = {path for path, module in model.named_modules() if type(module) is nn.Linear}
    assert name in UNETS or left == denoiser_linears(stock, Scheme.parse(weights)).kept.keys()
    assert (rounds and name in DITS) or accel.report(model).fallbacks == []  # blocks have no passes in float64
    accel.restore(model)
    tiny.assert_same_state(before, tiny.snapshot(model))
    assert torch.equal(run(model, inputs), run(stock, inputs))


def test_a_linear_without_inputs_is_left_alone():
    """As of a feed-forward of which a configuration leaves no width."""
    model = transformer(next(iter(DITS)))
    path = next(iter(denoiser_linears(model, Scheme("int8")).chosen))
    empty = nn.Linear(0, model.get_submodule(path).out_features)
    model.set_submodule(path, empty)
    found = denoiser_linears(model, Scheme("int8"))
    assert found.skipped[path] == "no inputs" and path not in found.chosen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["sd15", "sdxl"])
@pytest.mark.share(2)
@pytest.mark.turns(2)
def test_in_half_precision_as_near_to_the_truth_as_stock(name, dtype, tiny, unet):
    stock = unet(name).to(dtype)
    model = accel.optimize(copy.deepcopy(stock), weights="int8")
    twin, truth, inputs = rounded(stock, model), rounded(stock, model, torch.float32), tiny.inputs(stock)
    wanted, half = run(truth, inputs), in_dtype(inputs, dtype)
    assert error(run(model, half), wanted) <= 2 * error(run(twin, half), wanted)
    assert accel.verify(model).passed


@pytest.mark.share(3)
@pytest.mark.turns(2)
def test_everything_that_is_fused_takes_quantized_linears(family, unet):
    plain, model = accel.optimize(unet(family)), accel.optimize(unet(family), weights="int8")
    assert {rule: sites(model, rule) for rule in FUSED} == {rule: sites(plain, rule) for rule in FUSED}


def test_one_product_for_projections_of_one_input(tiny, unet, monkeypatch):
    model = accel.optimize(unet("sd15"), weights="int8")
    inputs = tiny.inputs(model, height=16, width=16)
    products = noted(monkeypatch, joint, "multiplied", lambda _, tensors, rows, *rest: (rows.x.shape, tensors[0].shape))
    run(model, inputs)
    assert ((2, 256, 16), (48, 16)) in products  # queries, keys and values
    assert sum(shape == (2, 64) for shape, _ in products) == 1  # all time embeddings
    assert sum(len(shape) == 3 and shape[1] == 7 for shape, _ in products) == 1  # the prompt's keys and values
    assert len([row for row in accel.report(model).weights if ".attn2.to_k" in row["path"]]) > 2


def test_the_report_tells_what_became_of_the_bytes(unet):
    model = unet("sdxl")
    before = sum(p.nbytes for p in model.parameters())
    accel.optimize(model, weights="int8")
    report = accel.report(model)
    held = sum(t.nbytes for module in held_by(model) for t in module.buffers())
    now = sum(p.nbytes for p in model.parameters()) + held
    status, told = sites(model, "weights")[""]
    assert status == "patched" and f"{before / 1e6:.1f} MB become {now / 1e6:.1f}" in told and "convolutions, " in told
    assert before - now == sum(row["bytes_before"] - row["bytes_after"] for row in report.weights)
    assert len(report.weights) == len(held_by(model)) == 99 and all(row["sqnr_db"] > 38 for row in report.weights)
    assert "SQNR dB" in str(report) and json.dumps(report.to_dict())


SHARES = {"sd15": 0.84, "sdxl": 0.57, "pixart": 0.51, "zimage": 0.51, "flux": 0.64, "qwen-image": 0.67}


# docs/measurements/quantization.md says so.
@pytest.mark.share(2)
@pytest.mark.parametrize("name", SHARES)
@pytest.mark.turns(2)
def test_what_published_models_become(name):
    model = CASES[name].build(torch.device("meta"), torch.bfloat16)
    assert denoises(model)
    total, kept = sum(p.numel() for p in model.parameters()), sensitive_linears(model)
    linear = [m for m in model.modules() if type(m) is nn.Linear and m not in kept]
    assert round(1 - sum(m.weight.numel() / 2 - m.out_features for m in linear) / total, 2) == SHARES[name]


def test_an_error_leaves_nothing_quantized(tiny, unet, monkeypatch):
    model = unet()
    layer = model.mid_block.attentions[0].transformer_blocks[0].ff.net[2]
    before = tiny.snapshot(model)
    kept = layer.weight.detach().clone()
    layer.weight.data[3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"weights='int8': mid_block.attentions.0.*ff.net.2: NaN or Inf"):
        accel.optimize(model, weights="int8")
    layer.weight.data.copy_(kept)
    tiny.assert_same_state(before, tiny.snapshot(model))

    def broken(*given):
        assert held_by(model)
        raise MemoryError

    monkeypatch.setattr(joint.PromptProjections, "shared", broken)
    with pytest.raises(MemoryError):
        accel.optimize(model, weights="int8")
    tiny.assert_same_state(before, tiny.snapshot(model))


def test_what_does_not_fit_is_left_with_a_reason(tiny):
    model = tiny.unet(cross_attention_dim=12)
    accel.optimize(model, weights="int8")
    left = {reason for status, reason in sites(model, "weights").values() if status == "skipped"}
    assert left == {"12 inputs, not a multiple of 8"}
    assert type(model.mid_block.attentions[0].transformer_blocks[0].attn2.to_k) is nn.Linear
    inputs = tiny.inputs(model)
    close(run(model, inputs), run(rounded(accel.restore(copy.deepcopy(model)), model), inputs))
    with pytest.raises(ValueError, match=r"strict=True: .*to_k \(weights\): 12 inputs"):
        accel.optimize(tiny.unet(cross_attention_dim=12), weights="int8", strict=True)
    accel.optimize(tiny.unet(cross_attention_dim=16), weights="int8", strict=True)


def test_scales_of_float8_are_as_the_product_takes_them():
    """A cast for each product would be a launch for each."""
    model = transformer(next(iter(DITS))).bfloat16()
    accel.optimize(model, weights="fp8", activations="fp8")
    held = held_by(model)
    assert held and {linear.scales.dtype for linear in held} == {torch.float32}
