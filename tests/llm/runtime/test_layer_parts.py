"""The parts of a layer, and the kernels measured for its products."""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from accel_kernels import fused_linear, quantized_linear
from accel_kernels.gemm.linear import torch_linear
from accel_kernels.trials import Trials

import accel
from accel.llm.parts.linear import MOST_MEASURED_ROWS, product_for
from accel.llm.runtime import mlp
from accel.patching.fast_forward import Kernels
from support.llm.families import BY_NAME, FAMILIES, layers, make, padded, prompt
from support.llm.outputs import generate, same
from support.module_changes import CHANGES, answers, dropping

IDS, MASK = padded((4, 3))


def called(model) -> dict[str, torch.Tensor]:
    return {"logits": model(input_ids=IDS, attention_mask=MASK, use_cache=True).logits[:, -1]}


WAYS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "": lambda x: x * torch.sigmoid(1.7 * x),
    "bent": lambda x: F.silu(x.clamp(-60, 60)),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.share(1)
@pytest.mark.turns(2)
def test_an_activation_that_is_no_module(name, monkeypatch):
    """Found by its numbers, or its MLP is called as a whole."""
    stock = make("lfm2")
    modeling = sys.modules[type(stock.model.layers[0]).__module__]
    monkeypatch.setattr(modeling, "F", SimpleNamespace(**vars(F) | {"silu": WAYS[name]}))
    ours = accel.optimize(copy.deepcopy(stock))
    forward = vars(ours).get("forward")
    if name == "bent":  # as silu where it was looked at, and not where numbers are large
        assert forward is None
    else:
        assert {layer.spec.mlp.activation for layer in forward.layers} == {name}
    same(generate(ours, IDS, MASK), generate(stock, IDS, MASK))


TABLE = [(family, change) for family in FAMILIES if family.expected != "stock" for change in CHANGES]


@pytest.mark.parametrize(("family", "change"), TABLE, ids=str)
@pytest.mark.share(80)
@pytest.mark.turns(4)
def test_a_changed_module_inside_a_layer_is_noticed(family, change):
    go_through(family, change)


def test_a_mask_that_was_read_once_is_noticed():
    go_through(BY_NAME["gpt-neo-holes"], "contents")


def go_through(family, change):
    stock = dropping(make(family))
    ours = accel.optimize(copy.deepcopy(stock))

    def fallbacks() -> int:
        return sum(calls for path, _, calls in accel.report(ours).fallbacks if not path)

    plain = called(stock)
    same(called(ours), plain)
    sites = accel.report(ours).sites
    fast = [path for path, rule, status, _ in sites if (rule, status) == ("decoder layer", "patched")]
    if not fast:
        assert family.expected == "either"
        return
    told = fallbacks()
    assert not told or family.expected == "either"
    path = next(path for path in layers(ours) if path in fast)
    modules = ((ours.get_submodule(one), stock.get_submodule(one)) for one in names_in(ours, path))
    for found, wanted in answers(modules, change, lambda: called(ours), lambda: called(stock)):
        same(found, wanted)
    told = fallbacks()
    same(called(ours), plain)
    assert fallbacks() == told, "it is fast again"


def names_in(model, path):
    return [f"{path}.{name}".rstrip(".") for name, _ in model.get_submodule(path).named_modules()]


class Counted:
    """Multiplies as torch does, and keeps what it was given besides x."""

    def __init__(self):
        self.seen = []

    def __call__(self, x, weight, bias=None, residual=None):
        self.seen.append((tuple(weight.shape), bias is not None, residual is not None))
        return torch_linear(x, weight, bias, residual)


@pytest.fixture
def counted(monkeypatch):
    """The product that optimized models are given."""
    product = Counted()
    monkeypatch.setattr("accel.planning.plan.LinearChooser", lambda cache: product)
    return product


def layers_of(family: str, counted, rows: int, noting: bool = True):
    """(logits of a step of so many rows, stock's, and what was multiplied by the chosen product in it)."""
    stock = make(family)
    model, found = accel.optimize(copy.deepcopy(stock), graphs=True, cpu="fuse"), []
    for one in (model, stock):
        with torch.no_grad():
            cache = one(prompt(rows, 5)).past_key_values
            counted.seen.clear()
            with Trials().noting() if noting else torch.no_grad():
                found.append(one(prompt(rows, 1, 3), past_key_values=cache).logits)
            if one is model:
                seen = list(counted.seen)
    return *found, seen


def test_a_layer_of_many_rows(counted):
    """Four products in passes: queries, keys and values as one; out and down with the residual in them."""
    ours, stock, seen = layers_of("llama", counted, 70)
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)
    config = make("llama").config
    layers = config.num_hidden_layers
    kinds = [residual for _, _, residual in seen]
    assert len(seen) == 5 * layers and sum(kinds) == 2 * layers and kinds[:5] == [False, True, False, False, True]


def test_biases_and_residuals_are_one_product(counted):
    ours, stock, seen = layers_of("gpt2", counted, 70)
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)
    assert (True, True) in {(bias, residual) for _, bias, residual in seen}


@pytest.mark.parametrize("rows, noting", [(64, True), (70, False)])
def test_few_rows_and_calls_that_would_wait_are_not_measured(counted, rows, noting):
    ours, stock, seen = layers_of("llama", counted, rows, noting)
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)
    assert seen == []


@pytest.mark.parametrize("rows, inside", [(70, True), (520, False)])
@pytest.mark.turns(2)
def test_the_norm_before_a_quantized_weight_is_its_own_up_to_512_rows(rows, inside):
    """Beyond, it is done once for all products of an input."""
    seen = []

    def counted(x, weight, bias=None, *, norm=None, **after):
        seen.append((x.numel() // x.shape[-1], norm is not None))
        return quantized_linear.reference(x, weight, bias, norm=norm, **after)

    stock = make("llama")
    with accel.register_op("quantized_linear", counted):
        model = accel.optimize(copy.deepcopy(stock), weights="int8", cpu="fuse")
    seen.clear()
    with torch.no_grad():
        ours, wanted = (one(prompt(rows, 1)).logits for one in (model, stock))
    assert (ours - wanted).abs().max() < 0.05 * wanted.abs().max()
    norms = [norm for many, norm in seen if many == rows]
    layers = stock.config.num_hidden_layers
    assert norms == [inside, False, inside, False] * layers  # queries, keys and values; out; gate and up; down


def test_not_where_a_user_has_put_another_operation(counted):
    x = torch.randn(70, 8)
    with Trials().noting():
        assert product_for(Kernels(None, counted), x).keywords == {"linear": counted}
        mine = Kernels(None, counted, fused_linear=lambda *args, **more: None)
        assert product_for(mine, x) is mine.fused_linear
        assert product_for(Kernels(None, counted), x.expand(MOST_MEASURED_ROWS + 1, 70, 8)) is fused_linear


def test_uneven_rows_of_an_mlp_are_padded(monkeypatch):
    """Rows of 12 numbers do not begin at multiples of 16 bytes. Of few tokens they are read as they lie."""
    stock = make("llama", intermediate_size=12, mlp_bias=True).bfloat16()
    ours, seen = accel.optimize(copy.deepcopy(stock)), []
    monkeypatch.setattr(mlp, "PADDED_ROWS", 8)
    padding = mlp.BoundMlp._padded
    monkeypatch.setattr(mlp.BoundMlp, "_padded", lambda *given: seen.append(given[0].spec) or padding(*given))
    exact = copy.deepcopy(stock).float()
    for tokens, times in (4, 0), (9, len(stock.model.layers)):
        seen.clear()
        ids = torch.arange(tokens)[None]
        wanted, other, got = (one(input_ids=ids).logits.float() for one in (exact, stock, ours))
        assert len(seen) == times
        assert (got - wanted).norm() <= 1.1 * (other - wanted).norm()


@pytest.mark.parametrize("name", ["k_proj", "v_proj"])
def test_keys_and_values_of_equal_weights_are_told_apart(name):
    """A hook on one of them, and other weights, are seen."""
    stock = make("llama")
    for layer in stock.model.layers:
        layer.self_attn.v_proj.weight.data.copy_(layer.self_attn.k_proj.weight)
    ours = accel.optimize(copy.deepcopy(stock))
    for model in (ours, stock):
        linear = getattr(model.model.layers[0].self_attn, name)
        linear.weight.data.mul_(3.0)
        linear.register_forward_hook(lambda module, args, output: output * 2)
    same(called(ours), called(stock))
