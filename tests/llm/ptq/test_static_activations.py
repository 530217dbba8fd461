"""Inputs rounded by scales that calibration fixed: against stock code in float64 with inputs rounded by definition."""

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import accel
from accel.llm.ptq import run as running
from accel.llm.ptq.calibrate import quantize_layers
from accel.quantization.activations import kind_of
from accel.quantization.module import QuantizedLinear, dequantizing
from accel.quantization.rounding import round_to_nearest
from accel.quantization.scheme import Scheme
from support.llm.families import make, padded, prompt
from support.llm.outputs import generate, ran_fast
from support.llm.quantized import held_by
from support.llm.rounded_cache import Counting, off, oracle, planted

KINDS = ("int8-static", "fp8-static")
MOST = {"int8-static": 127.0, "fp8-static": 448.0}
DATA = [{"input_ids": prompt(2, 40, seed)} for seed in range(2)]


def quantized(name: str, kind: str, dtype=torch.float32, method: str = "rtn", **given):
    model = make(name, dtype)
    return accel.quantize(model, kind_of(kind), DATA, method=method, activations=kind, **given)


def by_scale(x: torch.Tensor, kind: str, scale: torch.Tensor) -> torch.Tensor:
    """x in float64 as it is after rounding, by definition; up to 64 rows as they are."""
    if x.shape[:-1].numel() <= 64:
        return x
    steps = (x / scale).clamp({"int8-static": -128.0, "fp8-static": -448.0}[kind], MOST[kind])
    return (steps.round() if kind == "int8-static" else steps.to(torch.float8_e4m3fn).double()) * scale


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama-biases", "gpt2", "gemma2", "phi3", "gpt-neox"])
@torch.no_grad()
@pytest.mark.share(4)
def test_prompts_are_rounded_as_the_formula_says_and_few_rows_are_not(name, kind, in_double):
    ours = quantized(name, kind, torch.float64)
    by_its_scale = lambda x, module: by_scale(x, kind, module.input_scale.double())  # noqa: E731
    wanted = oracle(make(name, torch.float64), ours, by_its_scale)
    in_double()
    accel.optimize(ours)
    for ids in (prompt(1, 100), prompt(5, 13), prompt(1, 64)):
        assert off(ours(ids).logits, wanted(ids).logits) < 1e-9
    ids, mask = padded((70, 41))
    assert torch.equal(*(generate(model, ids, mask)["sequences"] for model in (ours, wanted)))
    ran_fast(ours)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.no_grad()
def test_a_scale_is_the_largest_input_of_the_calibration(name, kind):
    """Of the rounded model, token for token, without what is padded."""
    model, (ids, mask) = make(name), padded((12, 7))
    data = [{"input_ids": ids, "attention_mask": mask}]
    accel.quantize(model, kind_of(kind), data, method="rtn", activations=kind)
    largest = {}
    for path, module in model.named_modules():
        if type(module) is QuantizedLinear:

            def note(_, args, path=path):
                largest[path] = args[0][mask.bool()].abs().max() / MOST[kind]

            module.register_forward_pre_hook(note)
    model(**data[0])
    found = {path: model.get_submodule(path).input_scale for path in largest}
    assert len(found) == len(held_by(model))
    for path, scale in largest.items():
        torch.testing.assert_close(found[path], scale.view(1), rtol=1e-5, atol=0)


@torch.no_grad()
def test_linears_of_one_input_have_one_scale_and_rows_are_rounded_once_for_them():
    model = accel.optimize(quantized("llama", "int8-static"))
    once = [((1, 70, 64), True), ((1, 70, 64), False), ((1, 70, 64), True), ((1, 70, 96), False)]
    counting = Counting()
    for module in held_by(model):
        module.products = counting
    wanted = model(prompt(1, 70)).logits
    assert counting.calls == [(*call, True) for call in 2 * once]
    one = model.model.layers[0].self_attn.k_proj  # no longer alike: each by its own
    state = one.state_dict()
    one.load_state_dict(state | {"input_scale": state["input_scale"] * 1.5})
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda module, args, output: output)
    counting.calls.clear()
    assert not torch.equal(model(prompt(1, 70)).logits, wanted)
    assert len(counting.calls) == 2 * len(once) + 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
@pytest.mark.share(2)
def test_saved_loaded_arrived_and_stock(kind, dtype, tmp_path):
    pytest.importorskip("compressed_tensors")
    make("llama-biases", dtype).save_pretrained(tmp_path / "stock")  # whose frequencies are in full precision
    stock, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "stock", dtype=dtype).eval(), DATA[0]["input_ids"]
    model, given = copy.deepcopy(stock), {"method": "rtn", "activations": kind}
    accel.quantize(model, kind_of(kind), DATA, out=tmp_path / "out", **given)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    said = group["input_activations"]
    assert (said["strategy"], said["dynamic"], said["num_bits"]) == ("tensor", False, 8)
    wanted = model(ids).logits
    loaded = accel.load(tmp_path / "out")
    assert {module.activations for module in held_by(loaded)} == {kind} and len(held_by(loaded)) == 14
    assert torch.equal(loaded(ids).logits, wanted)
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(accel.load(tmp_path / "again")(ids).logits, wanted)
    theirs, prequantized = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype).eval() for _ in range(2)
    )
    before = {key: value.clone() for key, value in prequantized.state_dict().items()}
    accel.optimize(prequantized, activations=kind)
    assert {module.activations for module in held_by(prequantized)} == {kind}
    accel.optimize(loaded)
    assert torch.equal(prequantized(ids).logits, loaded(ids).logits)
    accel.restore(prequantized)
    assert all(torch.equal(value, before[key]) for key, value in prequantized.state_dict().items())
    accel.optimize(prequantized)  # not asked for, and said
    assert {module.activations for module in held_by(prequantized)} == {None}
    assert "activations keep their dtype" in str(accel.report(prequantized).sites)
    scales = {path: module.input_scale for path, module in theirs.named_modules() if hasattr(module, "input_scale")}
    assert len(scales) == 14 and all(torch.equal(v, model.get_submodule(p).input_scale) for p, v in scales.items())
    if dtype == torch.float32:  # numbers next to a half fall to either side; in bf16 the sums before them do
        assert off(theirs(ids).logits, wanted) < 0.1 * off(wanted, stock(ids).logits)


@torch.no_grad()
def test_another_rounding_on_top_and_back():
    model, ids = quantized("llama", "int8-static"), prompt(1, 80)
    wanted = model(ids).logits
    accel.optimize(model, activations="int8")
    assert {module.activations for module in held_by(model)} == {"int8"}
    assert off(model(ids).logits, wanted) > 1e-4
    accel.restore(model)
    assert {module.activations for module in held_by(model)} == {"int8-static"}
    assert torch.equal(model(ids).logits, wanted)


def test_verify_judges_rows_and_the_report_tells_of_the_scales():
    model = quantized("llama", "int8-static")
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


@pytest.mark.parametrize("kind", ["int8", "fp8-static"])
@torch.no_grad()
def test_smoothquant_is_tried_with_the_inputs_it_will_have(kind):
    """Planted outliers: a scale a tensor has to be tried with a scale a tensor."""
    given = {"method": "smoothquant", "activations": "int8-static"}
    if kind == "fp8-static":
        with pytest.raises(ValueError, match="needs weights='int8', not 'fp8'"):
            accel.quantize(make("llama"), "fp8", DATA, **given)
        return
    stock, ids = planted(make("llama"), factor=60.0), DATA[0]["input_ids"]
    losses = []
    for method in ("rtn", "smoothquant"):
        model = accel.quantize(copy.deepcopy(stock), "int8", DATA, **given | {"method": method})
        losses.append(off(model(ids).logits, stock(ids).logits))
    assert losses[1] < 0.5 * losses[0]
    results = list(
        quantize_layers(copy.deepcopy(stock), Scheme("int8", activations="int8-static"), "smoothquant", DATA)
    )
    again = dict.fromkeys([results[0].path], results[0])
    twice = quantize_layers(copy.deepcopy(stock), Scheme("int8", activations="int8-static"), "smoothquant", DATA, again)
    assert all(torch.equal(scale, other.inputs[path]) for one, other in zip(results, twice, strict=True)
               for path, scale in one.inputs.items())  # fmt: skip


def test_an_interrupted_run_goes_on_and_another_is_refused(tmp_path, monkeypatch):
    real = running.quantize_layers

    def first(*given):
        yield next(iter(real(*given)))
        raise KeyboardInterrupt

    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        patches.setattr(running, "quantize_layers", first)
        quantized("llama", "int8-static", out=tmp_path)
    with pytest.raises(ValueError, match="another activations: int8-static, now None"):
        accel.quantize(make("llama"), "int8", DATA, method="rtn", out=tmp_path)
    found, whole = quantized("llama", "int8-static", out=tmp_path), quantized("llama", "int8-static")
    state = whole.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in found.state_dict().items())


def test_linears_that_no_token_reaches_round_nothing():
    model = make("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.zero_()
    accel.quantize(model, "int8", DATA, method="rtn", activations="int8-static")
    kinds = {path: module.activations for path, module in model.named_modules() if type(module) is QuantizedLinear}
    assert kinds.pop("model.layers.1.mlp.down_proj") is None and set(kinds.values()) == {"int8-static"}


@pytest.mark.parametrize("options", [{"weights": "int8"}, {}], ids=str)
def test_without_calibration_it_is_an_error_that_says_what_to_call(options, tiny):
    model = make("llama")
    before = tiny.snapshot(model)
    with pytest.raises(
        ValueError, match=r"accel.quantize\(model, 'int8', calibration=..., activations='int8-static'\)"
    ):
        accel.optimize(model, activations="int8-static", **options)
    with pytest.raises(ValueError, match="is fixed by calibration data: give calibration="):
        accel.quantize(model, "int8", activations="int8-static")
    with pytest.raises(ValueError, match="'fp8', 'int8-static', 'int8-outliers-static', 'fp8-static'"):
        accel.quantize(model, "int8", DATA, activations="int4-static")
    tiny.assert_same_state(before, tiny.snapshot(model))


@torch.no_grad()
def test_quantized_without_a_scale_it_is_an_error_too():
    model = accel.quantize(make("llama"), "int8")
    with pytest.raises(ValueError, match="no linear layer of the model holds what it needs"):
        accel.optimize(model, activations="int8-static")
    assert {module.activations for module in held_by(model)} == {None}


# -- the module by itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_linear_rounds_many_rows_and_its_scale_goes_with_it(kind):
    plain, scheme = torch.nn.Linear(48, 32, dtype=torch.float64), Scheme(kind_of(kind), activations=kind)

    def linear(scale: float) -> QuantizedLinear:
        held = round_to_nearest(plain.weight, scheme)
        return QuantizedLinear(held, plain.bias, torch.float64, scheme, input_scale=torch.tensor([scale]))

    module, x = linear(0.015), torch.randn(13, 5, 48, dtype=torch.float64)
    x[3, 2, 7] = 31.0
    weight = module.quantized.numbers().double() * module.quantized.scales.double()
    wanted = by_scale(x, kind, module.input_scale.double()) @ weight.t() + module.bias
    torch.testing.assert_close(module(x), wanted, rtol=1e-12, atol=1e-12)
    with dequantizing(module):
        torch.testing.assert_close(module(x), wanted, rtol=1e-12, atol=1e-12)
    other = linear(1.0)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x), module(x)) and other.rounding == module.rounding
    assert copy.deepcopy(module).to(torch.bfloat16).input_scale.dtype == torch.float32
    x[9, 3, 0] = torch.nan
    y = module(x)
    assert y[9, 3].isnan().all() and y.isnan().sum() == 32
