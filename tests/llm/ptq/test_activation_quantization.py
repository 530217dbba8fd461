"""Activations rounded to int8, and columns that are too large for it."""

import copy

import pytest
import torch
from torch import nn

import accel
from accel.options import Options
from accel.quantization.activations import KERNELS, RowProducts
from accel.quantization.module import QuantizedLinear, dequantizing, unrounded
from accel.quantization.rounding import round_to_nearest
from accel.quantization.scheme import Scheme
from support.llm.edits.places import lora
from support.llm.families import layers, make, padded, prompt
from support.llm.optimized_models import optimized
from support.llm.outputs import generate, ran_fast
from support.llm.quantized import by_token, held_by, logits
from support.llm.rounded_cache import Counting, off, oracle, planted

FAMILIES = ("llama-biases", "gpt2", "gemma2", "phi3", "falcon-grouped", "olmo2", "gpt-neox")
KINDS = ("int8", "int8-outliers", "fp8")


def pair(name: str, kind: str, planted: bool = False):
    stock = make(name, torch.float64)
    if planted:
        for module in stock.modules():
            if "norm" in type(module).__name__.lower():
                module.weight.data[5] *= 40.0
    ours = accel.optimize(copy.deepcopy(stock), weights=kind.partition("-")[0], activations=kind)
    return ours, oracle(stock, ours, lambda x, _: by_token(x, kind)), stock


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
@pytest.mark.share(4)
def test_prompts_are_rounded_as_the_formula_says_and_few_rows_are_not(name, kind, in_double):
    in_double()
    ours, wanted, _ = pair(name, kind, planted=kind == "int8-outliers")
    for ids in (prompt(1, 100), prompt(1, 65), prompt(5, 13)):
        assert off(ours(ids).logits, wanted(ids).logits) < 1e-9
    with unrounded(ours):
        plain = ours(ids).logits
    assert off(plain, ours(ids).logits) > 1e-3
    for ids in (prompt(1, 64), prompt(3, 21)):
        found = ours(ids).logits
        assert off(found, wanted(ids).logits) < 1e-9
        with unrounded(ours):
            assert torch.equal(ours(ids).logits, found)
    ran_fast(ours)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["llama-biases", "gpt2"])
def test_a_long_padded_prompt_is_continued_as_by_the_formula(name, kind, in_double):
    ours, wanted, _ = pair(name, kind)
    in_double()
    ids, mask = padded((70, 41))
    found, theirs = (generate(model, ids, mask) for model in (ours, wanted))
    assert found.keys() == theirs.keys() and torch.equal(found["sequences"], theirs["sequences"])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_an_adapter_on_top_is_added_to_rounded_products(kind, in_double):
    in_double()
    ours, wanted, _ = pair("llama", kind)
    for model in (ours, wanted):
        model.family = "llama"
        lora("first")(model)
        model.to(torch.float64)
    ids = prompt(1, 80)
    assert off(ours(ids).logits, wanted(ids).logits) < 1e-9
    ran_fast(ours)


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


def test_the_report_says_which_linears_round():
    model = optimized("llama", weights="fp8", activations="fp8")
    report = accel.report(model)
    assert {row["scheme"] for row in report.weights} == {"fp8 by row, activations fp8 beyond 64 rows"}
    assert "activations fp8 beyond 64" in " ".join(str(report).split())
    assert Options(weights="fp8", activations="fp8").lossy == "weights='fp8', activations='fp8'"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int8", "activations": "int7"}, "activations='int7' is not one of None, 'int8', 'int8-outliers'"),
        ({"weights": "int4", "activations": "int8"}, "activations='int8' needs weights='int8', not 'int4'"),
        ({"weights": "int8-asym", "activations": "int8"}, "needs weights='int8', not 'int8-asym'"),
        ({"weights": "int8", "activations": "fp8"}, "activations='fp8' needs weights='fp8', not 'int8'"),
        ({"activations": "int8-outliers"}, "needs weights of the same kind, and the model holds none: give weights"),
    ],
    ids=str,
)
def test_what_cannot_be_is_an_error_and_changes_nothing(options, message, tiny):
    model = make("llama")
    before = tiny.snapshot(model)
    with pytest.raises(ValueError, match=message):
        accel.optimize(model, **options)
    tiny.assert_same_state(before, tiny.snapshot(model))


def test_linears_of_another_kind_are_left_alone_and_named():
    model = accel.quantize(make("llama"), "int4-g32")
    one = model.model.layers[1].mlp
    plain = nn.Linear(64, 96, bias=False)
    one.up_proj = QuantizedLinear(round_to_nearest(plain.weight, Scheme("int8")), None, torch.float32, Scheme("int8"))
    with pytest.raises(ValueError, match="needs a weight of int8 by row; it is int4 by 32 columns"):
        accel.optimize(model, activations="int8", strict=True)
    accel.optimize(model, activations="int8")
    rows = [(path, status) for path, rule, status, _ in accel.report(model).sites if rule == "activations"]
    assert ("model.layers.1.mlp.up_proj", "patched") in rows and len(rows) == 14
    with torch.no_grad():
        assert model(prompt(1, 70)).logits.isfinite().all()
    accel.restore(model)
    assert one.up_proj.activations is None


@torch.no_grad()
def test_rows_are_rounded_once_for_all_that_share_them():
    """Queries, keys and values; gate and up; the norm in front inside."""
    model = optimized("llama", weights="int8", activations="int8")
    counting = Counting()
    for module in held_by(model):
        module.products = counting
    model(prompt(1, 70))
    once = [((1, 70, 64), True), ((1, 70, 64), False), ((1, 70, 64), True), ((1, 70, 96), False)]
    assert [(*call, False) for call in 2 * once] == counting.calls
    for layer in layers(model).values():  # queries in a call of their own: keys and values share rows still
        layer.self_attn.q_proj.register_forward_hook(lambda module, args, output: 2 * output)
    counting.calls.clear()
    model(prompt(1, 70))
    assert [(*call, False) for call in 2 * [((1, 70, 64), False), *once]] == counting.calls


# -- the module by itself ----------------------------------------------------------------------------------------------


def linear(kind: str, dtype: torch.dtype = torch.float64) -> QuantizedLinear:
    plain = nn.Linear(48, 32, dtype=dtype)
    scheme = Scheme(kind.partition("-")[0], activations=kind)
    return QuantizedLinear(round_to_nearest(plain.weight, scheme), plain.bias, dtype, scheme)


@pytest.mark.share(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_linear_rounds_many_rows(kind):
    module = linear(kind)
    x = torch.randn(13, 5, 48, dtype=torch.float64)
    x[3, 2, 7] = 31.0
    held = module.quantized
    weight = held.numbers().double() * held.scales.double()
    wanted = by_token(x, kind) @ weight.t() + module.bias
    with torch.no_grad():
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


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@torch.no_grad()
def test_what_is_not_finite_stays_in_its_row(kind):
    module, x = linear(kind, torch.float32), torch.randn(70, 48)
    x[9, 3], x[33, 0] = torch.nan, torch.inf
    y = module(x)
    good = torch.ones(70, dtype=torch.bool)
    good[[9, 33]] = False
    assert y[good].isfinite().all() and not y[~good].isfinite().any()


DATA = [{"input_ids": prompt(2, 40, seed)} for seed in range(2)]
COLUMNS = {"method": "rtn", "activations": "int8-outliers-static"}


def without(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """x in float64, rounded by token but for these columns, by definition; up to 64 rows as they are."""
    if x.shape[:-1].numel() <= 64:
        return x
    rest = x.index_fill(-1, columns, 0)
    return by_token(rest, "int8") + (x - rest)


@torch.no_grad()
def test_columns_beyond_the_threshold_in_calibration_are_kept_and_no_others(in_double):
    stock = planted(make("llama-biases", torch.float64))
    model = accel.quantize(copy.deepcopy(stock), "int8", DATA, **COLUMNS)
    twin = oracle(stock, model, lambda x, module: without(x, module.input_columns))
    first = model.model.layers[0]
    for module in (first.self_attn.q_proj, first.self_attn.v_proj, first.mlp.gate_proj):
        assert 5 in module.input_columns.tolist() and module.input_columns.dtype == torch.int64
    assert first.self_attn.q_proj.rounding == first.self_attn.k_proj.rounding
    assert min(len(module.input_columns) for module in held_by(model)) == 0
    accel.optimize(model)
    counting = Counting()
    for module in held_by(model):
        module.products = counting
    in_double()
    for ids in (prompt(1, 100), prompt(5, 13), prompt(1, 64)):
        assert off(model(ids).logits, twin(ids).logits) < 1e-9
    assert len(counting.calls) == 2 * 8 and all(fixed for *_, fixed in counting.calls)


@torch.no_grad()
def test_columns_are_verified_told_of_and_not_saved(tmp_path):
    model, ids = accel.quantize(planted(make("llama-biases")), "int8", DATA, **COLUMNS), prompt(1, 80)
    other = accel.quantize(planted(make("llama-biases")), "int8", DATA, **COLUMNS)
    other.load_state_dict(model.state_dict())
    wanted = model(ids).logits
    assert torch.equal(other(ids).logits, wanted)
    loss = off(wanted, planted(make("llama-biases"))(ids).logits)
    dynamic = accel.quantize(planted(make("llama-biases")), "int8", DATA, method="rtn", activations="int8")
    assert loss < 0.5 * off(dynamic(ids).logits, planted(make("llama-biases"))(ids).logits)
    accel.optimize(model)
    quality = accel.verify(model, input_ids=ids)
    assert quality.passed and quality.lossy == "activations='int8-outliers-static'"
    (told,) = [reason for path, rule, _, reason in accel.report(model).sites if rule == "activations" and not path]
    assert told.startswith("14 linear layers keep fixed columns in 16 bits, 0 to ")
    with pytest.warns(UserWarning, match="fixed in the inputs of 14 linear layers are not saved"):
        model.save_pretrained(tmp_path)
    loaded = accel.load(tmp_path)
    assert {module.activations for module in held_by(loaded)} == {None}
    with pytest.raises(ValueError, match=r"holds what it needs; its columns of inputs are fixed by calibration: accel"):
        accel.optimize(loaded, activations="int8-outliers-static")


class Overlooking(RowProducts):
    """Columns are forgotten."""

    def rounded(self, x, activations, norm=None, fixed=None):
        return super().rounded(x, "int8", norm)


@torch.no_grad()
def test_columns_that_are_forgotten_do_not_pass(monkeypatch):
    model = accel.optimize(accel.quantize(planted(make("llama-biases")), "int8", DATA, **COLUMNS))
    monkeypatch.setattr("accel.verification.rounded_products.KERNELS", Overlooking())
    assert not accel.verify(model, input_ids=prompt(1, 80)).passed
