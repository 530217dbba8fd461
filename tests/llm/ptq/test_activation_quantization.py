"""Activations rounded to 8 bits, by scales of their own or fixed ones: against stock code in float64 over inputs that
are rounded by definition.
"""

import copy

import pytest
import torch
from torch import nn

import accel
from accel.options import Options
from accel.quantization.activations import KERNELS, is_static, weight_dtype_of
from accel.quantization.module import QuantizedLinear, dequantizing, unrounded
from accel.quantization.rounding import round_to_nearest
from accel.quantization.scheme import Scheme
from support.llm.edits.places import lora
from support.llm.families import layers, make, padded, prompt
from support.llm.optimized_models import optimized
from support.llm.outputs import generate, ran_fast
from support.llm.quantized import by_token, held_by, logits
from support.llm.rounded_cache import Counting, off, oracle

FAMILIES = ("llama-biases", "gpt2", "gemma2", "phi3", "falcon-grouped", "olmo2", "gpt-neox")
DYNAMIC, STATIC = ("int8", "int8-outliers", "fp8"), ("int8-static", "fp8-static")
MOST = {"int8-static": 127.0, "fp8-static": 448.0}
DATA = [{"input_ids": prompt(2, 40, seed)} for seed in range(2)]


def calibrated(model, kind: str, method: str = "rtn", **given):
    return accel.quantize(model, weight_dtype_of(kind), DATA, method=method, activations=kind, **given)


def by_definition(x: torch.Tensor, module: QuantizedLinear, kind: str) -> torch.Tensor:
    """x in float64 as it is after rounding; up to 64 rows as they are."""
    if x.shape[:-1].numel() <= 64 or kind in DYNAMIC:
        return by_token(x, kind)
    scale = module.input_scale.double()
    steps = (x / scale).clamp({"int8-static": -128.0, "fp8-static": -448.0}[kind], MOST[kind])
    return (steps.round() if kind == "int8-static" else steps.to(torch.float8_e4m3fn).double()) * scale


def optimized_pair(stock, kind: str, in_double):
    """(optimized, stock over the same weights and rounded inputs), in float64."""
    ours = copy.deepcopy(stock)
    if is_static(kind):
        calibrated(ours, kind)
    in_double()
    accel.optimize(ours, **{} if is_static(kind) else {"weights": weight_dtype_of(kind), "activations": kind})
    return ours, oracle(stock, ours, lambda x, module: by_definition(x, module, kind))


@pytest.mark.parametrize("kind", [*DYNAMIC, *STATIC])
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
@pytest.mark.share(18)
@pytest.mark.turns(2)
def test_prompts_are_rounded_as_the_formula_says_and_few_rows_are_not(name, kind, in_double):
    stock = make(name, torch.float64)
    if kind == "int8-outliers":
        for module in stock.modules():
            if "norm" in type(module).__name__.lower():
                module.weight.data[5] *= 40.0
    ours, wanted = optimized_pair(stock, kind, in_double)
    for ids in (prompt(1, 100), prompt(1, 65), prompt(5, 13), prompt(1, 64), prompt(3, 21)):
        found = ours(ids).logits
        assert off(found, wanted(ids).logits) < 1e-9
        with unrounded(ours):
            plain = ours(ids).logits
        assert torch.equal(plain, found) if ids.numel() <= 64 else off(plain, found) > 1e-3
    if name in ("llama-biases", "gpt2") and kind != "int8-outliers":
        ids, mask = padded((70, 41))
        assert torch.equal(*(generate(model, ids, mask)["sequences"] for model in (ours, wanted)))
    ran_fast(ours)


@pytest.mark.parametrize("kind", DYNAMIC)
@torch.no_grad()
def test_an_adapter_on_top_is_added_to_rounded_products(kind, in_double):
    ours, wanted = optimized_pair(make("llama", torch.float64), kind, in_double)
    for model in (ours, wanted):
        model.family = "llama"
        lora("first")(model)
        model.to(torch.float64)
    ids = prompt(1, 80)
    assert off(ours(ids).logits, wanted(ids).logits) < 1e-9
    ran_fast(ours)


@pytest.mark.parametrize("kind", ["int8", "int8-static"])
@torch.no_grad()
def test_rows_are_rounded_once_for_all_that_share_them(kind):
    """Queries, keys and values; gate and up; the norm in front inside."""
    static, counting = is_static(kind), Counting()
    options = {"weights": "int8", "activations": "int8"}
    model = accel.optimize(calibrated(make("llama"), kind)) if static else optimized("llama", **options)
    for module in held_by(model):
        module.products = counting
    wanted = model(prompt(1, 70)).logits
    once = [((1, 70, 64), True), ((1, 70, 64), False), ((1, 70, 64), True), ((1, 70, 96), False)]
    assert counting.calls == [(*call, static) for call in 2 * once]
    for layer in layers(model).values():  # queries in a call of their own: keys and values share rows still
        layer.self_attn.q_proj.register_forward_hook(lambda module, args, output: 2 * output)
    counting.calls.clear()
    model(prompt(1, 70))
    assert counting.calls == [(*call, static) for call in 2 * [((1, 70, 64), False), *once]]
    if static:  # keys are no longer rounded alike
        one = model.model.layers[0].self_attn.k_proj
        state = one.state_dict()
        one.load_state_dict(state | {"input_scale": state["input_scale"] * 1.5})
        counting.calls.clear()
        assert not torch.equal(model(prompt(1, 70)).logits, wanted) and len(counting.calls) == 2 * 5 + 1


# -- on and off, told and refused --------------------------------------------------------------------------------------


@torch.no_grad()
def test_restore_gives_back_all_and_the_model_can_be_optimized_otherwise(tiny):
    model, stock = make("llama-biases"), make("llama-biases")
    before = tiny.snapshot(model)
    for options in ({"activations": "int8"}, {}, {"activations": "int8-outliers"}):
        accel.optimize(model, weights="int8", **options)
        assert {module.activations for module in held_by(model)} == {options.get("activations")}
    accel.restore(model)
    tiny.assert_same_state(before, tiny.snapshot(model))
    assert torch.equal(logits(model)["logits"], logits(stock)["logits"])


@torch.no_grad()
def test_of_linears_that_stay_quantized_rounding_is_taken_back():
    model = optimized("llama", weights="int8", activations="int8", keep_original=False)
    with pytest.warns(UserWarning, match="stay quantized"):
        accel.restore(model)
    assert {str(module.scheme) for module in held_by(model)} == {"int8 by row"}
    accel.optimize(model, activations="int8-outliers")
    sites = {path: reason for path, rule, status, reason in accel.report(model).sites if rule == "activations"}
    assert sites["model.layers.0.mlp.up_proj"] == "int8 by row, activations int8-outliers beyond 64 rows"
    assert len(sites) == len(held_by(model)) == 14
    ids = prompt(1, 90)
    rounded = model(ids).logits
    accel.restore(model)
    accel.optimize(model)
    assert off(rounded, model(ids).logits) > 1e-3


@torch.no_grad()
def test_another_rounding_on_top_and_back():
    model, ids = calibrated(make("llama"), "int8-static"), prompt(1, 80)
    wanted = model(ids).logits
    accel.optimize(model, activations="int8")
    assert {module.activations for module in held_by(model)} == {"int8"}
    assert off(model(ids).logits, wanted) > 1e-4
    accel.restore(model)
    assert {module.activations for module in held_by(model)} == {"int8-static"}
    assert torch.equal(model(ids).logits, wanted)


@pytest.mark.turns(2)
def test_verify_judges_rows_and_the_report_tells_of_the_scales():
    model = calibrated(make("llama"), "int8-static")
    with torch.no_grad():
        state = {k: 0.7 * v if k.endswith("input_scale") else v for k, v in model.state_dict().items()}
        model.load_state_dict(state)  # much saturates, as it is meant to
    accel.optimize(model)
    quality = accel.verify(model, input_ids=prompt(1, 80))
    assert quality.passed and quality.lossy == "activations='int8-static'" and "rounded rows" in quality.parts
    told = [reason for path, rule, _, reason in accel.report(model).sites if rule == "activations" and not path]
    scales = sorted(module.input_scale.item() for module in held_by(model))
    assert told == [f"14 linear layers round by fixed scales, {scales[0]:.3g} to {scales[-1]:.3g}"]
    assert "input_scale=" in repr(held_by(model)[0]) and "int8-static beyond 64 rows" in repr(held_by(model)[0])
    report = accel.report(optimized("llama", weights="fp8", activations="fp8"))
    assert {row["scheme"] for row in report.weights} == {"fp8 by row, activations fp8 beyond 64 rows"}
    assert Options(weights="fp8", activations="fp8").lossy == "weights='fp8', activations='fp8'"


CALL = r"accel.quantize\(model, 'int8', calibration=..., activations='int8-static'\)"
WRONG = {  # by the message: the scheme for accel.quantize, None for accel.optimize; and the options
    "activations='int7' is not one of None, 'int8', 'int8-out": (None, {"weights": "int8", "activations": "int7"}),
    "activations='int8' needs weights='int8', not 'int4'": (None, {"weights": "int4", "activations": "int8"}),
    "needs weights='int8', not 'int8-asym'": (None, {"weights": "int8-asym", "activations": "int8"}),
    "activations='fp8' needs weights='fp8', not 'int8'": (None, {"weights": "int8", "activations": "fp8"}),
    "needs weights of the same kind, and the model holds none": (None, {"activations": "int8-outliers"}),
    CALL: (None, {"weights": "int8", "activations": "int8-static"}),
    f"{CALL}|": (None, {"activations": "int8-static"}),
    "is fixed by calibration data: give calibration=": ("int8", {"activations": "int8-static"}),
    "'fp8', 'int8-static', 'int8-outliers-static', 'fp8-s": (
        "int8",
        {"calibration": DATA, "activations": "int4-static"},
    ),
    "needs weights='int8', not 'fp8'": ("fp8", {"calibration": DATA, "activations": "int8-static"}),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_is_an_error_and_changes_nothing(message, tiny):
    model, (scheme, options) = make("llama"), WRONG[message]
    before = tiny.snapshot(model)
    with pytest.raises(ValueError, match=message.rstrip("|")):
        accel.optimize(model, **options) if scheme is None else accel.quantize(model, scheme, **options)
    tiny.assert_same_state(before, tiny.snapshot(model))


@torch.no_grad()
def test_linears_without_a_scale_or_of_another_kind_are_left_alone_and_named():
    model = accel.quantize(make("llama"), "int8")
    with pytest.raises(ValueError, match="no linear layer of the model holds what it needs"):
        accel.optimize(model, activations="int8-static")
    assert {module.activations for module in held_by(model)} == {None}
    model = accel.quantize(make("llama"), "int4-g32")
    one = model.model.layers[1].mlp
    plain = nn.Linear(64, 96, bias=False)
    one.up_proj = QuantizedLinear(round_to_nearest(plain.weight, Scheme("int8")), None, torch.float32, Scheme("int8"))
    with pytest.raises(ValueError, match="needs a weight of int8 by row; it is int4 by 32 columns"):
        accel.optimize(model, activations="int8", strict=True)
    accel.optimize(model, activations="int8")
    rows = [(path, status) for path, rule, status, _ in accel.report(model).sites if rule == "activations"]
    assert ("model.layers.1.mlp.up_proj", "patched") in rows and len(rows) == 14
    assert model(prompt(1, 70)).logits.isfinite().all()
    accel.restore(model)
    assert one.up_proj.activations is None


# -- the module by itself ----------------------------------------------------------------------------------------------


def linear(kind: str, plain: nn.Linear, scale: float = 0.015) -> QuantizedLinear:
    scheme = Scheme(weight_dtype_of(kind), activations=kind)
    fixed = {"input_scale": torch.tensor([scale])} if is_static(kind) else {}
    return QuantizedLinear(round_to_nearest(plain.weight, scheme), plain.bias, plain.weight.dtype, scheme, **fixed)


@pytest.mark.parametrize("kind", [*DYNAMIC, *STATIC])
@torch.no_grad()
@pytest.mark.share(2)
def test_a_linear_rounds_many_rows_and_its_scale_goes_with_it(kind):
    plain, x = nn.Linear(48, 32, dtype=torch.float64), torch.randn(13, 5, 48, dtype=torch.float64)
    module = linear(kind, plain)
    x[3, 2, 7] = 31.0
    held = module.quantized
    weight = held.numbers().double() * held.scales.double()
    wanted = by_definition(x, module, kind) @ weight.t() + module.bias
    torch.testing.assert_close(module(x), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(module(x.transpose(0, 1)), wanted.transpose(0, 1), rtol=1e-12, atol=1e-12)
    with dequantizing(module):
        torch.testing.assert_close(module(x), wanted, rtol=1e-12, atol=1e-12)
    exact = x @ module.weight.t() + module.bias
    for context in (unrounded(module), torch.enable_grad()):
        with context:
            torch.testing.assert_close(module(x), exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(module(x[:12]), exact[:12], rtol=1e-12, atol=1e-12)
    assert module.activations == kind and module.products is KERNELS
    other = linear(kind, plain, scale=1.0)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x), module(x)) and other.rounding == module.rounding
    if is_static(kind):
        assert copy.deepcopy(module).to(torch.bfloat16).input_scale.dtype == torch.float32
    if kind != "int8-outliers":  # what is not finite stays in its row
        x[9, 3, 0], x[11, 0, 5] = torch.nan, torch.nan if is_static(kind) else torch.inf
        finite = torch.ones(13, 5, dtype=torch.bool).index_put(
            (torch.tensor([9, 11]), torch.tensor([3, 0])), torch.tensor(False)
        )
        assert torch.equal(module(x).isfinite(), finite[..., None].expand(-1, -1, 32))
