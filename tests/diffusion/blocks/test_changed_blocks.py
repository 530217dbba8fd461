"""Blocks and modules that are changed: seen, run stock, and told."""

import copy
import pickle
from contextlib import ExitStack, contextmanager

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.activations import GEGLU
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from torch import nn

import accel
from accel.cuda_graphs.rule import graph_obstacle
from benchmarks.models.tiny_denoisers import DITS, given, transformer
from support.diffusion.outputs import run
from support.diffusion.tiny_models import UNETS, make_unet, make_vae, unet_inputs
from support.everything import EVERYTHING, always
from support.llm.outputs import flat, same
from support.module_changes import CHANGES, answers, dropping
from support.patched import fast_forwards
from support.video.tiny_videos import VIDEOS, latents, make_video


def find(model, kind):
    return next(module for module in model.modules() if type(module) is kind)


class Merging(BasicTransformerBlock):
    """As ToMe does it: of many tokens, pairs are taken together; few stay as they are."""

    def forward(self, hidden_states, *args, **kwargs):
        if hidden_states.shape[1] < 16:
            return super().forward(hidden_states, *args, **kwargs)
        merged = (hidden_states[:, ::2] + hidden_states[:, 1::2]) / 2
        return super().forward(merged, *args, **kwargs).repeat_interleave(2, 1)


class Negating(nn.GroupNorm):
    def forward(self, input):
        return -super().forward(input)


class Halved(nn.Parameter):
    """What is no parameter of torch's own: of a format of a library, or a tensor in torch.func.functional_call."""


def tiles(conv):
    """The usual way to seamless images, with a factor of its own so that it shows whatever the padding."""

    def forward(input, weight, bias):
        return 0.5 * F.conv2d(F.pad(input, (1, 1, 1, 1), mode="circular"), weight, bias, conv.stride)

    return forward


def double(function):
    return lambda *args, **kwargs: 2 * function(*args, **kwargs)


def sharper(attention):
    return lambda q, k, v, **more: attention(5 * q, k, v, **more)


# By name: (what is changed in the model, the attribute, its new value as a function of the owner).
BLOCK_CHANGES = {
    "the class of a block": (lambda m: find(m, BasicTransformerBlock), "__class__", lambda b: Merging),
    "the class of a norm": (lambda m: find(m, ResnetBlock2D).norm2, "__class__", lambda n: Negating),
    "an activation": (lambda m: find(m, ResnetBlock2D), "nonlinearity", lambda b: nn.GELU()),
    "where an activation is": (lambda m: find(m, ResnetBlock2D), "skip_time_act", lambda b: True),
    "a dropout that works": (lambda m: find(m, ResnetBlock2D), "dropout", lambda b: nn.Dropout(1.0).train()),
    "a norm that was not there": (lambda m: find(m, Attention), "norm_q", lambda a: nn.LayerNorm(16)),
    "a processor's method": (lambda m: find(m, Attention), "processor", lambda a: double(a.processor)),
    "the gate of a feed-forward": (lambda m: find(m, GEGLU), "gelu", lambda g: F.tanh),
    "a layer after the projection": (lambda m: find(m, Attention).to_out, "1", lambda o: nn.Tanh()),
    "a convolution": (lambda m: find(m, ResnetBlock2D).conv1, "_conv_forward", tiles),
    "a folded convolution": (lambda m: m.up_blocks[0].upsamplers[0].conv, "_conv_forward", tiles),
    "a strided convolution": (lambda m: find(m, Downsample2D).conv, "_conv_forward", tiles),
    "a shortcut": (
        lambda m: m.up_blocks[0].resnets[0].conv_shortcut,
        "_conv_forward",
        lambda c: lambda *a: 0.5 * a[0][:, :32],
    ),
    "the first convolution": (lambda m: m.conv_in, "_conv_forward", tiles),
    "a weight of a class of its own": (lambda m: m.conv_in, "weight", lambda c: Halved(0.5 * c.weight)),
    "an embedding of positions": (lambda m: find(m, BasicTransformerBlock), "pos_embed", lambda b: nn.Tanh()),
    "a class's forward": (lambda m: BasicTransformerBlock, "forward", lambda c: lambda self, x, **k: 2 * x),
    "a leaf's forward, on its class": (lambda m: nn.GroupNorm, "forward", lambda c: double(c.forward)),
    "convolutions, on their class": (lambda m: nn.Conv2d, "_conv_forward", lambda c: double(c._conv_forward)),
    "a gate, on its class": (lambda m: GEGLU, "gelu", lambda c: lambda self, x: torch.tanh(x)),
    "a function of torch": (
        lambda m: F,
        "scaled_dot_product_attention",
        lambda f: sharper(F.scaled_dot_product_attention),
    ),
    "a processor, on its class": (lambda m: AttnProcessor2_0, "__call__", lambda c: double(c.__call__)),
}


@contextmanager
def changed(owner, name, value):
    """owner.name = value; afterwards the former value is put back, or none where the owner had none of its own."""
    kept = {**getattr(owner, "_modules", {}), **getattr(owner, "_parameters", {})}
    own = name == "__class__" or name in vars(owner) or name in kept
    before = getattr(owner, name) if own else None
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before) if own else delattr(owner, name)


def fallbacks(model):
    return sum(calls for *_, calls in accel.report(model).fallbacks)


@pytest.fixture(scope="module")
def pair(tiny):
    """(optimized, stock, inputs); after all changes the first is restored to the bit."""
    model = tiny.unet(block_out_channels=(32, 32))
    twin, inputs = copy.deepcopy(model), tiny.inputs(model)
    yield accel.optimize(model), twin, inputs
    accel.restore(model)
    assert torch.equal(run(model, inputs), run(twin, inputs))


@pytest.mark.parametrize("name", always(BLOCK_CHANGES, "the first convolution", "a weight of a class of its own"))
def test_a_change_runs_stock_and_its_taking_back_is_fast_again(pair, name):
    ours, stock, inputs = pair
    owner, attribute, value = BLOCK_CHANGES[name]
    plain, before = run(stock, inputs), fallbacks(ours)
    torch.testing.assert_close(run(ours, inputs), plain, rtol=1e-4, atol=1e-4)
    assert fallbacks(ours) == before
    owners = {id(one): one for one in map(owner, (ours, stock))}.values()  # a class is the same in both
    with ExitStack() as changes:
        for one in owners:
            changes.enter_context(changed(one, attribute, value(one)))
        wanted = run(stock, inputs)
        assert float((wanted - plain).abs().max()) > 1e-3
        torch.testing.assert_close(run(ours, inputs), wanted, rtol=1e-4, atol=1e-4)
        assert fallbacks(ours) > before and not any("raised" in why for _, why, _ in accel.report(ours).fallbacks)
    torch.testing.assert_close(run(ours, inputs), plain, rtol=1e-4, atol=1e-4)
    after = fallbacks(ours)
    torch.testing.assert_close(run(ours, inputs), plain, rtol=1e-4, atol=1e-4)
    assert fallbacks(ours) == after


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_knows_what_was_matched(pair, how):
    """It is fast; what was changed before it was made, or is changed in it, runs stock."""
    ours, stock, inputs = pair
    plain, copied = run(stock, inputs), COPIES[how](ours)
    torch.testing.assert_close(run(copied, inputs), plain, rtol=1e-4, atol=1e-4)
    assert fallbacks(copied) == 0
    find(copied, ResnetBlock2D).nonlinearity = nn.GELU()
    with changed(find(stock, ResnetBlock2D), "nonlinearity", nn.GELU()):
        wanted = run(stock, inputs)
        with changed(find(ours, ResnetBlock2D), "nonlinearity", nn.GELU()):
            later = COPIES[how](ours)
    for model in (copied, later):
        torch.testing.assert_close(run(model, inputs), wanted, rtol=1e-4, atol=1e-4)
        assert fallbacks(model) > 0
    with changed(GEGLU, "gelu", lambda self, gate: torch.tanh(gate)):
        later = COPIES[how](ours)
    torch.testing.assert_close(run(later, inputs), plain, rtol=1e-4, atol=1e-4)
    assert fallbacks(later) > 0  # it cannot tell what had been there before


class Counting(Merging):
    """Not the library's own, and it keeps count."""

    calls = 0

    def forward(self, *args, **kwargs):
        Counting.calls += 1
        return super().forward(*args, **kwargs)


def test_a_block_of_another_make_stays_stock_and_is_not_tried(tiny):
    """A probe is too small to see what such a block does with larger inputs, and it would be noticed."""
    model = tiny.unet()
    inputs = tiny.inputs(model)
    plain = run(model, inputs)
    for block in [m for m in model.modules() if type(m) is BasicTransformerBlock]:
        block.__class__ = Counting
    twin = copy.deepcopy(model)
    Counting.calls = 0
    accel.optimize(model)
    assert Counting.calls == 0
    reasons = {reason for path, _, status, reason in accel.report(model).sites if status == "skipped"}
    assert any("Counting.forward is not the library's own" in reason for reason in reasons)
    wanted = run(twin, inputs)
    assert float((wanted - plain).abs().max()) > 1e-3
    torch.testing.assert_close(run(model, inputs), wanted, rtol=1e-4, atol=1e-4)
    assert "Counting.forward is not the library's own, and may keep state" in graph_obstacle(model)  # no graph on a GPU
    assert graph_obstacle(tiny.unet()) is None and graph_obstacle(tiny.vae()) is None
    assert fallbacks(model) == 0 and any(row[1:3] == ("attention", "patched") for row in accel.report(model).sites)
    accel.restore(model)
    assert torch.equal(run(model, inputs), wanted)


@pytest.mark.parametrize(("owner", "name"), [(AttnProcessor2_0, "__call__"), (F, "scaled_dot_product_attention")])
def test_what_was_replaced_before_is_used(tiny, owner, name):
    model = tiny.unet()
    inputs = tiny.inputs(model)
    with changed(owner, name, double(getattr(owner, name))):
        wanted = run(model, inputs)
        accel.optimize(model)
        torch.testing.assert_close(run(model, inputs), wanted, rtol=1e-4, atol=1e-4)
    accel.restore(model)


def unet(name):
    return make_unet(name), lambda model: model(**unet_inputs(model))


def vae(name):
    image = torch.randn(1, 3, 16, 16)
    return make_vae(), lambda model: model(image)


def dit(name):
    return transformer(name), lambda model: model(**given(name))


def video(name):
    return make_video(name), lambda model: model.decode(latents(model))


MAKERS = {unet: UNETS, vae: ("vae",), dit: DITS, video: VIDEOS}
MODELS = {name: maker for maker, names in MAKERS.items() for name in names}


def one_of_each(model):
    """Paths of modules inside fused blocks, but those of a block like another."""
    found, paths = {}, {module: path for path, module in model.named_modules()}
    for module in fast_forwards(model):
        if module is not model:
            for path, part in module.named_modules():
                make = tuple((name, type(child)) for name, child in part._modules.items())
                found.setdefault((type(module), path, type(part), make), paths[part])
    return sorted(set(found.values()))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.share(180)
@pytest.mark.turns(4)
@torch.no_grad()
def test_a_changed_module_inside_a_block_is_noticed(name, change):
    stock, call = MODELS[name](name)
    ours = accel.optimize(copy.deepcopy(dropping(stock)))

    def called(model):
        torch.manual_seed(7)
        return flat(call(model))

    def fallbacks():
        return sum(calls for *_, calls in accel.report(ours).fallbacks)

    plain = called(stock)
    for _ in range(2):  # a block is recorded at its first call
        same(called(ours), plain)
    before, paths = fallbacks(), one_of_each(ours)
    assert paths
    paths = paths if EVERYTHING else paths[::9]
    modules = ((ours.get_submodule(path), stock.get_submodule(path)) for path in paths)
    for found, wanted in answers(modules, change, lambda: called(ours), lambda: called(stock)):
        if all(bool(one.isfinite().all()) for one in wanted.values()):
            same(found, wanted, share=1e-4)
    told = fallbacks()
    assert told > before or change == "contents"
    same(called(ours), plain)
    assert fallbacks() == told, "it is fast again"
