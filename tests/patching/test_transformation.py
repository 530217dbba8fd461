"""Forwards that torch differentiates, maps or traces: to the bit what stock gives, never through kernels of ours."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import accel


def vae(tiny):
    """(optimized, stock, x, a call of one of them with x). Its attention is plain, which torch can push tangents by."""
    from diffusers.models.attention_processor import AttnProcessor

    stock = tiny.vae()
    stock.set_attn_processor(AttnProcessor())
    return accel.optimize(copy.deepcopy(stock)), stock, torch.randn(1, 3, 8, 8), lambda model, x: model(x).sample


def llama(_):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
    torch.manual_seed(0)
    stock = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes, attn_implementation="eager")).eval()
    x = torch.randn(2, 5, 32)
    ours = accel.optimize(copy.deepcopy(stock))
    return ours, stock, x, lambda model, x: model(inputs_embeds=x, use_cache=True).logits


def mapped(call, x):
    return torch.func.vmap(lambda one: call(one[None])[0], randomness="same")(x)


def pushed(call, x):
    return torch.func.jvp(call, (x,), (x.cos(),))[1]


def differentiated(call, x):
    return torch.func.grad(lambda x: call(x).square().sum())(x)


def dual(call, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(call(forward_ad.make_dual(x, x.cos()))).tangent


def faked(call, x):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        shape = tuple(call(mode.from_tensor(x)).shape)
    return torch.tensor(shape)


def written_down(call, x):
    return make_fx(call)(x)(x)


def traced(call, x):
    return torch.jit.trace(call, (x,), check_trace=False)(x)


CASES = [(llama, pushed), (llama, mapped), (llama, differentiated), (vae, dual), (llama, faked)]
CASES += [(vae, faked), (vae, written_down), (vae, traced)]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("make", "how"), CASES)
@pytest.mark.share(2)
def test_what_torch_does_with_a_forward_it_does_with_stocks(make, how, tiny):
    ours, stock, x, call = make(tiny)

    def done(model):
        return how(lambda x: call(model, x), x)

    with torch.no_grad():
        for model in (ours, stock):
            model.requires_grad_(False)
        got, wanted = done(ours), done(stock)
        assert torch.equal(got, wanted) and bool(wanted.any())
        assert accel.report(ours).fallbacks
        before = len(accel.report(ours).fallbacks)
        call(ours, x)
        assert len(accel.report(ours).fallbacks) == before


def test_an_optimized_model_can_be_exported(tiny):
    ours, stock, x, call = vae(tiny)
    with torch.no_grad():
        program = torch.export.export(ours, (x,), strict=False)
        torch.testing.assert_close(program.module()(x).sample, call(stock, x))
