"""What users put on a model before and after it is optimized: adapters, processors, hooks, diffusers' own switches."""

import copy

import pytest
import torch

import accel
from support.diffusion.outputs import close, run
from support.everything import EVERYTHING, always


class Doubling(torch.nn.Module):
    """An attention processor with weights, as an IP-Adapter's is."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.weight = inner, torch.nn.Parameter(torch.tensor(2.0))

    def __call__(self, attn, hidden_states, *args, **kwargs):
        return self.weight * self.inner(attn, hidden_states, *args, **kwargs)


def test_a_processor_with_weights_stays_in_place(tiny):
    model = tiny.unet()
    attention = model.mid_block.attentions[0].transformer_blocks[0].attn2
    attention.set_processor(Doubling(attention.processor))
    twin, inputs = copy.deepcopy(model), tiny.inputs(model)
    accel.optimize(model)
    assert isinstance(attention.processor, Doubling) and "forward" not in vars(attention)
    row = next(
        row for row in accel.report(model).sites if row[0] == "mid_block.attentions.0.transformer_blocks.0.attn2"
    )
    assert row[2] == "skipped" and "Doubling has weights of its own" in row[3]
    close(run(model, inputs), run(twin, inputs))


# What a user sets after optimize, and what the report then says, where it does.
SWITCHES = {
    "a processor": (lambda unet: attention_of(unet).set_processor(Doubling(attention_of(unet).processor)), "Doubling"),
    "sliced": (lambda unet: unet.set_attention_slice(1), ""),
    "fused": (lambda unet: unet.fuse_qkv_projections(), ""),
    "freeu": (lambda unet: unet.enable_freeu(0.9, 0.2, 1.2, 1.4), ""),
    "feed-forward": (lambda unet: block_of(unet).ff.net.append(torch.nn.Tanh()), ""),
    "chunked": (lambda unet: block_of(unet).set_chunk_feed_forward(2, 1), ""),
}


def block_of(unet):
    return unet.mid_block.attentions[0].transformer_blocks[0]


def attention_of(unet):
    return block_of(unet).attn1


@pytest.mark.share(1)
@pytest.mark.parametrize("change", SWITCHES)
def test_what_is_set_afterwards_is_used(change, twins):
    (model, twin, inputs), (switch, told) = twins, SWITCHES[change]
    for unet in (model, twin):
        switch(unet)
    close(run(model, inputs), run(twin, inputs))
    assert not told or any(f"{told} where AttnProcessor2_0" in one for _, one, _ in accel.report(model).fallbacks)


def test_optimize_fires_no_hooks_and_calls_fire_all(tiny):
    model = tiny.unet()
    twin, inputs = copy.deepcopy(model), tiny.inputs(model)
    ours, stock = [], []
    for unet, seen in ((model, ours), (twin, stock)):
        for name, module in unet.named_modules():
            module.register_forward_hook(lambda *args, name=name, seen=seen: seen.append(name))
    accel.optimize(model)
    assert ours == []
    close(run(model, inputs), run(twin, inputs))
    assert ours == stock and len(stock) > 100


@pytest.mark.parametrize("kind", ["unet", "vae"])
@pytest.mark.share(2)
@pytest.mark.turns(2)
def test_a_hook_on_any_one_module_fires(tiny, kind):
    model = tiny.unet() if kind == "unet" else tiny.vae()
    twin = copy.deepcopy(model)
    inputs = tiny.inputs(model) if kind == "unet" else {"sample": torch.randn(1, 3, 8, 8)}
    wanted = []
    for path, module in twin.named_modules():
        module.register_forward_pre_hook(lambda *args, path=path: wanted.append(path))
    run(twin, inputs)  # stock fires all of them in one call
    accel.optimize(model)
    for path, module in list(model.named_modules())[:: 1 if EVERYTHING else 3]:
        seen = []
        handle = module.register_forward_pre_hook(lambda *args, seen=seen: seen.append(1))
        run(model, inputs)
        handle.remove()
        assert len(seen) == wanted.count(path), path


@pytest.mark.parametrize("after", always([False, True], True))
def test_circular_padding_set_by_the_user(tiny, after):
    """Seamless textures: people set padding_mode on every convolution, before optimize or after it."""
    model = tiny.unet()
    twin, inputs = copy.deepcopy(model), tiny.inputs(model)
    if after:
        accel.optimize(model)
    for unet in (model, twin):
        for module in unet.modules():
            if isinstance(module, torch.nn.Conv2d):
                module.padding_mode = "circular"
                module._reversed_padding_repeated_twice = [p for p in reversed(module.padding) for _ in range(2)]
    if not after:
        accel.optimize(model)
    close(run(model, inputs), run(twin, inputs))
    for unet in (model, twin):
        unet.conv_in.padding_mode = "zeros"
    close(run(model, inputs), run(twin, inputs))


def test_a_processor_from_elsewhere_is_called_as_ever(tiny):
    """It may store what it sees, as prompt-to-prompt editors do; equal outputs do not show that."""
    model = tiny.unet()
    attention, seen = attention_of(model), []

    def storing(attn, hidden_states, *args, inner=attention.processor, **kwargs):
        seen.append(hidden_states.shape)
        return inner(attn, hidden_states, *args, **kwargs)

    attention.set_processor(storing)
    accel.optimize(model)
    assert seen == []  # examining the blocks around it did not call it
    run(model, tiny.inputs(model))
    assert len(seen) == 1
    assert any("storing may keep state" in reason for *_, reason in accel.report(model).sites)
