"""Hooks and patches in any order, and transformations of torch over an optimized model."""

import copy

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers import hooks as diffusers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import accel
from accel.cuda_graphs.rule import IN_PARTS
from accel.patching.rule import ForwardPatch


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs).sample


@pytest.fixture
def pair(tiny):
    model = tiny.unet()
    inputs = tiny.inputs(model)
    return model, run(copy.deepcopy(model), inputs), inputs


def counting(kind, seen):
    """A hook of either library, which notes its calls, and how it comes and goes."""

    class Counting(kind):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(1)
            return args, kwargs

    return Counting()


def of_accelerate(module, seen):
    return lambda: add_hook_to_module(module, counting(ModelHook, seen)), lambda: remove_hook_from_module(module)


def of_diffusers(module, seen):
    """Offload in groups, caches and casting by layer are such hooks."""

    def add():
        registry = diffusers.HookRegistry.check_if_exists_or_initialize(module)
        registry.register_hook(counting(diffusers.ModelHook, seen), "counting")

    return add, lambda: module._diffusers_hook.remove_hook("counting")


@pytest.mark.parametrize("order", ["hook first", "patch first"])
@pytest.mark.parametrize("leaving", ["hook first", "patch first"])
@pytest.mark.parametrize(
    ("hook", "place"),
    [
        (of_accelerate, ""),
        *((of_diffusers, place) for place in ("", "mid_block.resnets.0", "mid_block.resnets.0.norm1")),
    ],
)
@pytest.mark.share(6)
@pytest.mark.turns(2)
def test_hooks_and_patches_come_and_go_in_any_order(tiny, pair, hook, place, order, leaving):
    model, wanted, inputs = pair
    seen = []
    add, remove = hook(model.get_submodule(place), seen)
    steps = [add, lambda: accel.optimize(model)]
    for step in steps if order == "hook first" else reversed(steps):
        step()
    torch.testing.assert_close(run(model, inputs), wanted)
    assert len(seen) == 1
    steps = [remove, lambda: accel.restore(model)]
    for step in steps if leaving == "hook first" else reversed(steps):
        step()
        torch.testing.assert_close(run(model, inputs), wanted)
    assert len(seen) == (1 if leaving == "hook first" else 2)
    assert torch.equal(run(model, inputs), wanted)
    vars(model.get_submodule(place)).pop("_diffusers_hook", None)
    assert tiny.differences(model, tiny.unet()) == []


def test_beneath_a_hook_that_came_later_the_stock_forward_is_put_back():
    module, taken = torch.nn.Linear(2, 2), torch.zeros_like
    patch = ForwardPatch(module, taken)
    patch.apply()
    add_hook_to_module(module, ModelHook())
    assert not module(torch.ones(1, 2)).any()
    patch.undo()
    assert vars(module)["_old_forward"].__func__ is torch.nn.Linear.forward and module(torch.ones(1, 2)).any()


@pytest.mark.parametrize("graphs", ["auto", False])
@pytest.mark.share(1)
def test_sequential_offload_runs_the_blocks_stock(pair, graphs):
    model, wanted, inputs = pair
    accel.optimize(model, graphs=graphs)
    cpu_offload(model, execution_device=torch.device("cpu"))
    torch.testing.assert_close(run(model, inputs), wanted)
    found = accel.report(model).fallbacks
    assert any("accelerate hook" in reason for _, reason, _ in found) is (graphs is False)
    assert graphs is False or found == [("", IN_PARTS, 1)]


def test_optimize_after_sequential_offload_says_why_it_skips(pair):
    model, wanted, inputs = pair
    cpu_offload(model, execution_device=torch.device("cpu"))
    accel.optimize(model)
    told = {rule: reason for _, rule, status, reason in accel.report(model).sites if status == "skipped"}
    assert {told["attention"], told["resnet block"]} == {"weights are not loaded (meta device)"}
    torch.testing.assert_close(run(model, inputs), wanted)
    accel.restore(model)
    torch.testing.assert_close(run(model, inputs), wanted)


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
@pytest.mark.share(6)
@pytest.mark.turns(2)
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


@pytest.mark.turns(2)
def test_an_optimized_model_can_be_exported(tiny):
    ours, stock, x, call = vae(tiny)
    with torch.no_grad():
        program = torch.export.export(ours, (x,), strict=False)
        torch.testing.assert_close(program.module()(x).sample, call(stock, x))
