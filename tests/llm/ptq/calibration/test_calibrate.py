"""Models quantized layer by layer: what each layer is given, what comes back, and what is refused."""

import copy
import math

import pytest
import torch

import accel
from accel.comparison import relative_rms
from accel.llm.ptq.calibrate import LayerResult, apply, quantize_layers
from accel.llm.ptq.calibration import layer_work
from accel.llm.ptq.calibration.layer_inputs import LayerInputs, first
from accel.llm.ptq.calibration.linears import linears
from accel.llm.recording.recorder import decoder_layers
from accel.options import METHODS
from accel.quantization.rounding import round_to_nearest
from accel.quantization.scheme import Scheme
from support.llm.families import FAMILIES, layers, make, padded, prompt
from support.noted import noted

INT4, INT8 = Scheme.parse("int4-g32"), Scheme.parse("int8")
ALL = [(method, INT8 if method == "smoothquant" else INT4) for method in METHODS]


def texts(count: int = 2, rows: int = 4, length: int = 24) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": prompt(rows, length, seed)} for seed in range(count)]


def run(model, method: str, scheme: Scheme, batches=None, **known) -> list:
    return list(quantize_layers(model, scheme, method, texts() if batches is None else batches, **known))


def same(first, second) -> bool:
    one, other = first.parts(), second.parts()
    return one.keys() == other.keys() and all(torch.equal(part, other[name]) for name, part in one.items())


@pytest.mark.parametrize("name", [str(family) for family in FAMILIES])
@pytest.mark.share(8)
def test_every_layer_is_given_what_the_model_gives_it(name):
    model = make(name)
    try:
        path, stack = decoder_layers(model)
    except Exception as reason:
        pytest.skip(str(reason))
    ids, mask = padded()
    seen = []
    for layer in stack:
        layer.register_forward_pre_hook(lambda module, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    model(input_ids=ids, attention_mask=mask, use_cache=False)
    for layer in stack:
        layer._forward_pre_hooks.clear()
        layer._forward_pre_hooks_with_kwargs.clear()
    inputs = LayerInputs(model, path, stack, [{"input_ids": ids, "attention_mask": mask}])
    for layer, (args, kwargs) in zip(stack, seen, strict=True):
        (call,) = inputs.now()
        assert len(call.args) == len(args) and call.kwargs.keys() == kwargs.keys()
        for ours, theirs in zip((*call.args, *call.kwargs.values()), (*args, *kwargs.values()), strict=True):
            assert not isinstance(ours, torch.Tensor) or torch.equal(ours, theirs)
        copies = call.hidden.shape[:-3].numel()  # of gemma3n four
        assert call.rows(call.hidden).shape == (14 * copies, call.hidden.shape[-1])
        inputs.next([first(layer(*call.args, **call.kwargs))])


def test_where_the_model_does_something_between_its_layers_they_are_given_that():
    model = make("llama")
    path, stack = decoder_layers(model)
    stock = type(stack[0]).forward
    between = type(
        "Between", (type(stack[1]),), {"__call__": lambda self, x, **kw: super(between, self).__call__(2 * x, **kw)}
    )
    stack[1].__class__ = between
    inputs = LayerInputs(model, path, stack, texts(1))
    (call,) = inputs.now()
    out = first(stock(stack[0], *call.args, **call.kwargs))
    inputs.next([out])
    assert torch.equal(inputs.now()[0].hidden, 2 * out)
    stack[0].mlp.down_proj.weight.data.zero_()  # and what the layers before have become
    inputs.at, inputs.hidden = 1, None
    assert not torch.equal(inputs.now()[0].hidden, 2 * out)


@pytest.mark.parametrize(("method", "scheme"), ALL, ids=METHODS)
@pytest.mark.parametrize("name", ["llama-biases", "gpt2", "phi", "mixtral", "qwen2-moe", "codegen", "jamba"])
@pytest.mark.share(9)
@pytest.mark.turns(2)
def test_the_model_is_left_as_the_results_say_and_nothing_else_is_changed(name, method, scheme):
    stock = make(name)
    model = copy.deepcopy(stock)
    results = run(model, method, scheme)
    assert [result.path for result in results] == list(layers(model))
    assert all(isinstance(result, LayerResult) and not result.inputs for result in results)
    assert [path for result in results for path in result.weights] == list(linears(stock, scheme)[0])
    told = {path for result in results for path in result.changed} | {
        f"{path}.weight" for result in results for path in result.weights
    }
    differ = {path for path, p in model.named_parameters() if not torch.equal(p, stock.get_parameter(path))}
    assert differ == told
    assert all(path.startswith(f"{result.path}.") for result in results for path in result.changed)
    assert all(5 < result.sqnr_db < 60 for result in results)
    anew = copy.deepcopy(stock)
    for result in results:
        apply(anew, result)
    assert all(torch.equal(p, model.get_parameter(path)) for path, p in anew.named_parameters())
    if "moe" in name or name == "mixtral":
        assert not any("experts." in path and "shared" not in path for path in told)


@pytest.mark.parametrize(("method", "scheme"), ALL, ids=METHODS)
def test_results_that_are_known_are_applied_and_the_others_come_out_as_before(method, scheme):
    stock = make("llama-biases", num_hidden_layers=3)
    whole, half = copy.deepcopy(stock), copy.deepcopy(stock)
    results = run(whole, method, scheme)
    assert all(isinstance(result.sqnr_db, float) for result in results)
    known = {result.path: LayerResult(*result) for result in results[:2]}
    again = run(half, method, scheme, known=known)
    assert again[0] is known[again[0].path] and again[1] is known[again[1].path]
    for one, other in zip(results, again, strict=True):
        assert one.weights.keys() == other.weights.keys() and one.changed.keys() == other.changed.keys()
        assert all(same(one.weights[path], other.weights[path]) for path in one.weights)
    assert all(torch.equal(p, whole.get_parameter(path)) for path, p in half.named_parameters())


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.share(2)
def test_better_than_to_nearest(method):
    """The first layer, which gets the same inputs whatever was done."""
    for name in ("llama", "gpt2", "gemma2", "phi", "mixtral"):
        ours, nearest = (next(quantize_layers(make(name), INT4, m, texts(8))).sqnr_db for m in (method, "rtn"))
        print(f"{name}: {method} {ours:.1f} dB, to nearest {nearest:.1f} dB")
        assert ours > nearest + (1.0 if method == "gptq" else 0.05)


@pytest.mark.parametrize(("method", "scheme"), ALL, ids=METHODS)
def test_one_token_is_enough_to_run(method, scheme):
    model = make("llama")
    run(model, method, scheme, [{"input_ids": torch.tensor([[5]])}])
    assert bool(model(input_ids=prompt()).logits.isfinite().all())


@pytest.mark.parametrize(("method", "scheme"), ALL, ids=METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.share(5)
def test_in_half_precision(method, scheme, dtype):
    (exact, *_), (result, *_) = (run(make("llama-biases", dtype=one), method, scheme) for one in (torch.float32, dtype))
    assert abs(result.sqnr_db - exact.sqnr_db) < (1.0 if scheme == INT4 else 3.0)
    assert all(quantized.scales.dtype == dtype for quantized in result.weights.values())
    assert all(tensor.dtype == dtype for tensor in result.changed.values())


@pytest.mark.parametrize(("method", "scheme"), ALL, ids=METHODS)
def test_padding_is_left_out(method, scheme):
    """What stands in padded places, as far as the others do not see it, changes nothing."""
    ids, mask = padded((24, 15))
    other = torch.where(mask.bool(), ids, 77)
    one, two = (run(make("llama"), method, scheme, [{"input_ids": i, "attention_mask": mask}]) for i in (ids, other))
    assert not torch.equal(ids, other)
    for a, b in zip(one, two, strict=True):
        assert all(
            relative_rms(b.weights[path].dequantized(torch.float32), q.dequantized(torch.float32)) < 1e-3
            for path, q in a.weights.items()
        )


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_linears_that_get_no_token_are_rounded_to_nearest_with_a_note(method):
    model = make("llama")
    model.model.layers[1].mlp.forward = None
    model.model.layers[1].mlp = Bypassed(model.model.layers[1].mlp)
    stock = copy.deepcopy(model)
    _, result = run(model, method, INT4)
    for name in ("gate_proj", "up_proj", "down_proj"):
        path = f"model.layers.1.mlp.stock.{name}"
        assert same(result.weights[path], round_to_nearest(stock.get_submodule(path).weight, INT4))
        assert any(path in note and "no token" in note for note in result.notes)


class Bypassed(torch.nn.Module):
    def __init__(self, stock):
        super().__init__()
        del stock.forward
        self.stock = stock

    def forward(self, x):
        return x


@pytest.mark.parametrize("method", ["awq", "smoothquant"])
@pytest.mark.turns(2)
def test_ways_are_compared_by_the_first_calls_alone(method, monkeypatch):
    """And all calls decide what the next layer is given."""
    counts = noted(monkeypatch, layer_work, "outputs", lambda layer, calls, *more: len(calls))
    monkeypatch.setattr(layer_work, "JUDGED", 100)
    model = make("llama")
    results = run(model, method, dict(ALL)[method], texts(3, rows=2))  # 48 tokens a call
    assert counts.count(3) == len(results) and counts.count(2) > 5 * len(results) and set(counts) == {2, 3}
    assert all(result.sqnr_db > 10 for result in results)
    monkeypatch.setattr(layer_work, "JUDGED", 1)
    counts.clear()
    run(make("llama"), method, dict(ALL)[method], texts(3, rows=2))
    assert set(counts) == {1, 3}


@pytest.mark.turns(2)
def test_groups_that_cannot_be_scaled_are_noted():
    (result, *_), (gpt2, *_), (mixtral, *_) = (run(make(n), "awq", INT4) for n in ("olmo2", "gpt2", "mixtral"))
    assert any("attention: no scale is folded: no norm stands before it" in note for note in result.notes)
    assert any("MLP's output: no scale is folded: gelu" in note for note in gpt2.notes)
    assert any("MLP: no scale is folded: mlp is called as a whole" in note for note in mixtral.notes)
    (smooth, *_), (other, *_) = (run(make(name), "smoothquant", INT8) for name in ("gpt2", "diffllama"))
    assert smooth.notes == () and "no scale is folded" in other.notes[0]


@pytest.mark.parametrize("method", METHODS)
def test_what_is_no_number_is_told_with_the_layer(method):
    scheme = dict(ALL)[method]
    model = make("llama")
    model.model.embed_tokens.weight.data[int(prompt(4, 24)[2, 3])] = math.nan
    with pytest.raises(ValueError, match=r"model\.layers\.0: NaN or Inf among its inputs, for batch 0"):
        run(model, method, scheme)
    model = make("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = math.inf
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj: NaN or Inf among the weights"):
        run(model, method, scheme)
    model = make("llama")
    model.model.layers[1].input_layernorm.weight.data[7] = math.inf
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn\.q_proj: NaN or Inf among its inputs"):
        run(model, "gptq", INT4)


def test_what_does_not_fit_is_refused_before_anything_is_changed():
    model = make("llama")
    before = copy.deepcopy(model.state_dict())

    def refused(message, method="gptq"):
        with pytest.raises(ValueError, match=message):
            quantize_layers(model, INT4, method, texts(1))

    refused("'smoothquant' is for weights='int8', not for int4", "smoothquant")
    model.model.layers[0].register_forward_hook(lambda *_: None)
    refused(r"forward hooks on model\.layers\.0")
    model.model.layers[0]._forward_hooks.clear()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    accel.optimize(model)
    refused("the forward of a .* was replaced")


def test_a_weight_of_two_modules_is_left_alone():
    model = make("llama")
    stack = model.model.layers
    stack[0].mlp.up_proj.weight = stack[1].mlp.up_proj.weight
    results = run(model, "gptq", INT4)
    assert not any("up_proj" in path for result in results for path in result.weights)
    assert sum(len(result.weights) for result in results) == 12


def test_modes_of_the_model_and_of_torch_come_back():
    model = make("llama").train()
    with torch.enable_grad():
        generator = quantize_layers(model, INT4, "awq", texts(1))
        next(generator)
        assert torch.is_grad_enabled() and model.training and not torch.is_inference_mode_enabled()
        assert all(p.requires_grad and p.grad is None for p in model.parameters())
        generator.close()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
