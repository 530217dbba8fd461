"""UNets and VAEs of every family against an untouched copy: outputs, layout, undo."""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import accel
from accel.diffusion.blocks import transformer_2d
from support.diffusion.outputs import close, run


def patched(model, rule):
    return [path for path, name, status, _ in accel.report(model).sites if name == rule and status == "patched"]


@pytest.mark.parametrize("size", [(2, 8, 8, 7), (1, 4, 8, 1), (3, 12, 4, 77)], ids=str)
@pytest.mark.share(6)
@pytest.mark.turns(2)
def test_unet_equals_stock(family, size, tiny):
    model = tiny.unet(family)
    twin = copy.deepcopy(model)
    batch, height, width, length = size
    inputs = tiny.inputs(model, batch, height, width, length)
    before = tiny.snapshot(model)
    accel.optimize(model)
    close(run(model, inputs), run(twin, inputs))
    assert accel.report(model).fallbacks == []
    accel.restore(model)
    tiny.assert_same_state(before, tiny.snapshot(model))
    assert torch.equal(run(model, inputs), run(twin, inputs))


@pytest.mark.parametrize("family", ["sd15", "sd21", "sdxl", "scaled", "only-cross"])
def test_every_block_of_the_sd_families_is_replaced(family, tiny):
    model = tiny.unet(family)
    names = [name for name, _ in model.named_modules()]
    accel.optimize(model)

    def count(*endings):
        return sum(name.rpartition(".")[2].isdigit() and name.split(".")[-2] in endings for name in names)

    assert len(patched(model, "resnet block")) == count("resnets")
    assert len(patched(model, "transformer stack")) == count("attentions")
    assert len(patched(model, "transformer block")) == count("transformer_blocks")
    assert len(patched(model, "resampling")) == count("upsamplers", "downsamplers")
    assert len(patched(model, "upward block")) == count("up_blocks")
    assert len(patched(model, "attention")) == 2 * count("transformer_blocks")


def test_two_blocks_of_a_kind_run_where_launches_only_compile(tiny, monkeypatch):
    """Of four blocks in a stack: what the third and fourth launch, the second did."""
    model, ran = tiny.unet("sdxl", transformer_layers_per_block=(1, 4)), []
    twin, inputs = copy.deepcopy(model), tiny.inputs(model)
    accel.optimize(model)
    advance = transformer_2d.TransformerBlockForward.advance

    def counted(self, *args, **kwargs):
        ran.append(self.path)
        advance(self, *args, **kwargs)

    monkeypatch.setattr(transformer_2d.TransformerBlockForward, "advance", counted)
    monkeypatch.setattr(transformer_2d, "warming_up", lambda: True)
    run(model, inputs)
    dry = {path for path in ran if path.split(".")[-1] > "1"}
    monkeypatch.setattr(transformer_2d, "warming_up", lambda: False)
    ran.clear()
    close(run(model, inputs), run(twin, inputs))
    assert (
        not dry and sum(path.endswith((".2", ".3")) for path in ran) == 2 * sum(path.endswith(".2") for path in ran) > 0
    )


class LayoutCopies(TorchDispatchMode):
    """Counts copies of 3-D and 4-D activations: the clones that .contiguous() and .reshape() make."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        copies = (torch.ops.aten.clone, torch.ops.aten.contiguous, torch.ops.aten.copy_, torch.ops.aten._to_copy)
        if function.overloadpacket in copies and isinstance(args[0], torch.Tensor) and args[0].dim() >= 3:
            self.found.append((function, tuple(args[0].shape)))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["sd15", "sd21", "sdxl"])
def test_no_layout_copies_inside_the_unet(family, tiny, monkeypatch):
    """As on a GPU, where the kernel of the norm reads an image as it lies; on a CPU torch's makes a copy."""
    monkeypatch.setattr(sys.modules["accel_kernels.norm.group_norm"], "exact", F.group_norm)
    model = tiny.unet(family)
    inputs = tiny.inputs(model)
    with LayoutCopies() as stock:
        run(model, inputs)
    accel.optimize(model, layout="channels_last")
    run(model, inputs)
    with LayoutCopies() as ours:
        got = run(model, inputs)
    assert stock.found  # the count sees what stock does
    assert ours.found == []
    assert got.is_contiguous(memory_format=torch.channels_last)


def test_vae_equals_stock_both_ways(tiny):
    model = tiny.vae()
    twin = copy.deepcopy(model)
    before = tiny.snapshot(model)
    accel.optimize(model)
    image, latent = torch.randn(2, 3, 16, 24), torch.randn(1, 4, 5, 8)
    with torch.no_grad():
        close(model.encode(image).latent_dist.mean, twin.encode(image).latent_dist.mean)
        close(model.decode(latent).sample, twin.decode(latent).sample)
        close(model(image).sample, twin(image).sample)
    assert accel.report(model).fallbacks == [] and len(patched(model, "attention")) == 2
    assert {path.split(".")[-2] for path in patched(model, "resampling")} == {"downsamplers", "upsamplers"}
    accel.restore(model)
    tiny.assert_same_state(before, tiny.snapshot(model))


@pytest.mark.parametrize("given", ["odd sizes", "a mask"])
def test_other_calls(given, twins, tiny):
    model, twin, inputs = twins
    if given == "odd sizes":
        inputs = tiny.inputs(model, height=7, width=5)
    else:
        inputs["encoder_attention_mask"] = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1] * 7])
    close(run(model, inputs), run(twin, inputs))


def test_masks_given_to_a_stack_of_blocks_directly(twins):
    """The UNet hands over biases; other callers give keep-masks, which the stack turns into biases itself."""
    image, prompt = torch.randn(2, 32, 4, 3), torch.randn(2, 7, 12)
    mask = torch.tensor([[1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0]])
    call = {"encoder_hidden_states": prompt, "encoder_attention_mask": mask}
    with torch.no_grad():
        close(*(unet.mid_block.attentions[0](image, **call).sample for unet in twins[:2]))
    assert accel.report(twins[0]).fallbacks == []
