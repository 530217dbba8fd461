"""Images of almost one color on a CPU: as exact as stock, whichever code computes the norm, and wherever it lies."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import accel
from accel.fusion.channels_last import ChannelsLast


def far_from(exact, got):
    return float((got.detach().double() - exact.detach()).abs().max())


@pytest.fixture
def vae(tiny):
    """One channel a group in the first level: what is nearly constant is nearly nothing but its mean."""
    return tiny.vae(norm_num_groups=8)


def nothing(vae):
    return nullcontext()


def hooked(vae):
    """The block in the middle runs stock between fused ones."""
    return vae.decoder.mid_block.resnets[0].norm1.register_forward_hook(lambda *args: None)


def with_gradients(vae):
    return torch.enable_grad()


@pytest.mark.parametrize("around", [nothing, hooked, with_gradients])
@pytest.mark.parametrize("latents", ["zeros", "flat"])
def test_a_decoder_is_as_exact_as_stock(vae, around, latents):
    z = torch.zeros(1, 4, 16, 16)
    if latents == "flat":
        z = z + 3 + 1e-4 * torch.randn(z.shape, generator=torch.Generator().manual_seed(0))
    twin = copy.deepcopy(vae)
    accel.optimize(vae)
    with torch.no_grad(), around(vae):
        exact = copy.deepcopy(twin).double().decode(z.double()).sample
        stock, ours = (model.decode(z).sample for model in (twin, vae))
        assert far_from(exact, ours) <= 2 * far_from(exact, stock) + 1e-6
    ran = {path for path, _, _ in accel.report(vae).fallbacks}
    assert bool(ran) is (around is not nothing)


def test_the_shipped_vae_passes_on_a_gray_picture(loaded):
    vae = copy.deepcopy(loaded.vae)
    accel.optimize(vae)
    with torch.no_grad():
        quality = accel.verify(vae, torch.full((1, 3, 64, 64), 0.5))
    assert quality.passed, str(quality)
    assert accel.report(vae).fallbacks == []


@pytest.mark.parametrize("layout", ["auto", "channels_last"])
def test_convolutions_lie_channels_last_on_a_cpu_only_by_name(vae, tiny, layout):
    before = tiny.snapshot(vae)
    accel.optimize(vae, layout=layout)
    weights = [m.weight for m in vae.modules() if type(m) is nn.Conv2d and m.kernel_size == (3, 3)]
    named = layout == "channels_last"
    assert all(weight.is_contiguous(memory_format=torch.channels_last) is named for weight in weights)
    with torch.no_grad():
        image = vae.decode(torch.randn(1, 4, 16, 16)).sample
    assert image.is_contiguous(memory_format=torch.channels_last) is named and image.is_contiguous() is not named
    accel.restore(vae)
    tiny.assert_same_state(before, tiny.snapshot(vae))


def test_a_layout_follows_the_model_to_a_gpu_and_back():
    """The device is told here; that weights lie on it is made believe."""
    conv = nn.Conv2d(3, 4, 3)
    before, values = conv.weight.stride(), conv.weight.detach().clone()
    layout = ChannelsLast(conv, [conv])
    layout.apply()
    layout.follow(torch.device("cpu"))
    assert conv.weight.stride() == before
    layout.lies_on_gpu = lambda weight: True
    layout.follow(torch.device("meta"))  # where offload keeps weights between calls
    assert conv.weight.stride() == before
    layout.follow(torch.device("cuda"))
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    layout.follow(torch.device("cuda"))
    layout.follow(torch.device("cpu"))
    assert conv.weight.stride() == before and torch.equal(conv.weight, values)
    layout.follow(torch.device("cuda"))
    layout.undo()
    assert conv.weight.stride() == before and torch.equal(conv.weight, values)
