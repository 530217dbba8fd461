"""Beside Hugging Face's package `kernels`: its forwards are left alone and told about, ours can be loaded by it.

The package is not installed here; `valid` and `kernelize` stand in for it, written by its documentation.
"""

import copy
import inspect
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from accel_kernels.layers import LAYERS, Layer, kernel_mapping
from torch import nn
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

import accel
from support.llm.families import make, prompt

ALLOWED = {"can_torch_compile", "has_backward"}


def members(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind)}


def valid(layer: type, replaced: type) -> None:
    """A layer has no state, and its forward takes as many arguments, of the same kinds, as that which it replaces."""
    assert issubclass(layer, nn.Module) and layer.__init__ is nn.Module.__init__
    assert members(layer) - members(nn.Module) <= ALLOWED
    kinds = [[p.kind for p in inspect.signature(kind.forward).parameters.values()] for kind in (layer, replaced)]
    assert kinds[0] == kinds[1]


def kernelize(model: nn.Module, mapping: dict, device: str) -> nn.Module:
    """Binds the mapped layer to every module whose class has a name; its own forward again where there is none."""
    loaded = {}
    for module in model.modules():
        kind = type(module)
        if not hasattr(kind, "kernel_layer_name"):
            continue
        repository = mapping.get(kind.kernel_layer_name, {}).get(device)
        if repository is not None and repository not in loaded:
            loaded[repository] = repository.load()
            valid(loaded[repository], kind)
        module.forward = MethodType(loaded.get(repository, kind).forward, module)
    return model


class HubRMSNorm(nn.Module):
    """One of the hub's, which counts its calls."""

    calls = 0

    def forward(self, hidden_states):
        HubRMSNorm.calls += 1
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


class HubMLP(nn.Module):
    def forward(self, x):
        HubRMSNorm.calls += 1
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Repository:
    """Any object with `load`."""

    def __init__(self, layer: type):
        self.layer = layer

    def load(self) -> type:
        # The stand-in allows no attributes besides; the counter is the test's.
        return type(self.layer.__name__, (nn.Module,), {"forward": self.layer.forward})


@pytest.fixture(params=[("LlamaRMSNorm", HubRMSNorm, 5), ("LlamaMLP", HubMLP, 2)], ids=lambda case: case[0])
def hub(request, monkeypatch):
    """(a function that kernelizes, the hub's layer, how many modules of a Llama run it)."""
    name, layer, count = request.param
    monkeypatch.setattr(getattr(llama, name), "kernel_layer_name", name, raising=False)
    mapping = {name: {"cpu": Repository(layer)}}
    return lambda model: kernelize(model, mapping, "cpu"), layer, count


def calls(model) -> int:
    HubRMSNorm.calls = 0
    model(prompt(2), use_cache=True)
    return HubRMSNorm.calls


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def test_a_forward_of_the_package_runs_and_is_told(hub):
    put, layer, count = hub
    stock = put(make("llama"))
    model = accel.optimize(copy.deepcopy(stock))
    sites = [site for site in accel.report(model).sites if site[1] == "kernels"]
    reason = f"runs {__name__}.{layer.__name__}.forward, by the package kernels"
    assert len(sites) == count and {site[2:] for site in sites} == {("skipped", reason)}
    assert any(rule == "decoder layer" and status == "patched" for _, rule, status, _ in accel.report(model).sites)
    assert calls(model) == count
    tokens, wanted = (one.generate(prompt(2), max_new_tokens=5, do_sample=False) for one in (model, stock))
    assert torch.equal(tokens, wanted) and not accel.report(model).fallbacks
    assert calls(accel.restore(model)) == count


def test_one_put_on_an_optimized_model_runs_from_then_on(hub):
    put, _, count = hub
    model = accel.optimize(make("llama"))
    before = model(prompt(2), use_cache=True).logits
    assert calls(put(model)) == count
    torch.testing.assert_close(model(prompt(2), use_cache=True).logits, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["LlamaAttention", "LlamaDecoderLayer"])
def test_a_layer_that_cannot_be_fused_around_it_runs_stock(name, monkeypatch):
    kind = getattr(llama, name)
    monkeypatch.setattr(kind, "kernel_layer_name", name, raising=False)

    def forward(self, *args, **kwargs):
        HubRMSNorm.calls += 1
        return kind.forward(self, *args, **kwargs)

    stock = make("llama")
    model = copy.deepcopy(stock)
    for module in model.modules():
        if type(module) is kind:
            module.forward = forward.__get__(module)
    accel.optimize(model)
    told = [reason for *_, reason in accel.report(model).sites if "by the package kernels" in reason]
    assert len(told) >= 2 and calls(model) == 2
    torch.testing.assert_close(model(prompt(2)).logits, stock(prompt(2)).logits, rtol=0, atol=0)


def test_a_name_without_a_layer_leaves_a_module_to_accel(monkeypatch):
    """The package then binds the class's own forward."""
    monkeypatch.setattr(llama.LlamaRMSNorm, "kernel_layer_name", "RMSNorm", raising=False)
    model = accel.optimize(kernelize(make("llama"), {}, "cpu"))
    assert not [site for site in accel.report(model).sites if site[1] == "kernels"]


STOCK = {
    "RMSNorm": lambda: llama.LlamaRMSNorm(24, 1e-3),
    "RMSNormZeroCentered": lambda: qwen3_next.Qwen3NextRMSNorm(24, 1e-3),
    "RMSNormGated": lambda: qwen3_next.Qwen3NextRMSNormGated(24, 1e-3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STOCK)
def test_our_layers_are_loaded_and_compute_what_they_replace(name, dtype, monkeypatch):
    stock = STOCK[name]()
    stock.weight.data += 0.3 * torch.randn(24, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(type(stock), "kernel_layer_name", name, raising=False)
    given = torch.randn(2, 3, 2 * 24, generator=torch.Generator().manual_seed(1)).to(dtype).chunk(2, dim=-1)
    given = given if name == "RMSNormGated" else given[:1]
    for one in (stock, copy.deepcopy(stock).to(dtype)):  # weights of float32 promote what Llama's norm gives
        wanted = type(stock).forward(one, *given)
        bound = kernelize(copy.deepcopy(one), kernel_mapping(device="cpu"), "cpu")
        assert bound.forward.__func__ is LAYERS[name].forward
        torch.testing.assert_close(bound(*given), wanted, rtol=4 * torch.finfo(dtype).eps, atol=1e-5)


def test_the_activation_of_a_gated_mlp_is_loaded_too(monkeypatch):
    class SiluAndMul(nn.Module):
        kernel_layer_name = "SiluAndMul"

        def forward(self, x):
            a, b = x.chunk(2, dim=-1)
            return F.silu(a) * b

    x = torch.randn(2, 3, 16)
    bound = kernelize(SiluAndMul(), kernel_mapping("SiluAndMul", device="cpu"), "cpu")
    assert bound.forward.__func__ is LAYERS["SiluAndMul"].forward
    torch.testing.assert_close(bound(x), SiluAndMul()(x))


def test_a_mapping_holds_what_was_asked_for():
    assert kernel_mapping("RMSNorm") == {"RMSNorm": {"cuda": Layer("RMSNorm")}}
    assert set(kernel_mapping()) == set(LAYERS)
    assert len({Layer("RMSNorm"), Layer("RMSNorm"), Layer("SiluAndMul")}) == 2  # a key of the package's memory
    with pytest.raises(KeyError):
        Layer("LayerNorm").load()
