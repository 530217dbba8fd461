"""UNets and VAEs of every family against an untouched copy: outputs, layout, undo, and what users change meanwhile."""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import accel


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs).sample


def close(got, wanted, share=1e-5):
    torch.testing.assert_close(got, wanted, rtol=0, atol=share * float(wanted.abs().max()))


def patched(model, rule):
    return [path for path, name, status, _ in accel.report(model).sites if name == rule and status == "patched"]


FAMILIES = ["sd15", "sd21", "sdxl", "scale-shift", "only-cross", "inpainting", "scaled", "resample-in-resnet"]


@pytest.fixture(params=FAMILIES)
def family(request, tiny):
    assert set(FAMILIES) == set(tiny.families)
    return request.param


@pytest.mark.parametrize("size", [(2, 8, 8, 7), (1, 4, 8, 1), (3, 12, 4, 77)], ids=str)
@pytest.mark.share(2)
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


def test_odd_sizes_use_the_size_the_unet_asks_for(tiny):
    model = tiny.unet()
    twin = copy.deepcopy(model)
    accel.optimize(model)
    inputs = tiny.inputs(model, height=7, width=5)
    close(run(model, inputs), run(twin, inputs))


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
    assert len(patched(model, "attention")) == 2 * count("transformer_blocks")


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
    accel.restore(model)
    tiny.assert_same_state(before, tiny.snapshot(model))


def test_vae_tiling_and_slicing(tiny):
    model = tiny.vae()
    twin = copy.deepcopy(model)
    accel.optimize(model)
    latent = torch.randn(2, 4, 20, 12)
    for vae in (model, twin):
        vae.enable_tiling()
        vae.enable_slicing()
        vae.tile_latent_min_size = 8
    with torch.no_grad():
        close(model.decode(latent).sample, twin.decode(latent).sample)


def test_masks(tiny):
    model = tiny.unet()
    twin = copy.deepcopy(model)
    accel.optimize(model)
    inputs = tiny.inputs(model)
    inputs["encoder_attention_mask"] = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1] * 7])
    close(run(model, inputs), run(twin, inputs))


def test_unmerged_lora_is_not_lost(tiny):
    peft = pytest.importorskip("peft")
    model = tiny.unet()
    twin, inputs = copy.deepcopy(model), tiny.inputs(model)
    accel.optimize(model)
    plain = run(model, inputs)
    config = peft.LoraConfig(
        r=2, target_modules=["to_q", "to_out.0", "ff.net.0.proj", "conv1"], init_lora_weights=False
    )
    for unet in (model, twin):
        torch.manual_seed(5)
        unet.add_adapter(config)
    close(run(model, inputs), run(twin, inputs))
    assert float((run(model, inputs) - plain).abs().max()) > 1e-3
    reasons = {reason for _, reason, _ in accel.report(model).fallbacks}
    assert any("Linear where Linear is expected" in reason for reason in reasons)
    for unet in (model, twin):
        unet.disable_adapters()
    close(run(model, inputs), run(twin, inputs))
    for unet in (model, twin):
        unet.delete_adapters("default")
    close(run(model, inputs), run(twin, inputs))


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


def test_a_processor_set_afterwards_is_used(tiny):
    model = tiny.unet()
    twin, inputs = copy.deepcopy(model), tiny.inputs(model)
    accel.optimize(model)
    for unet in (model, twin):
        attention = unet.mid_block.attentions[0].transformer_blocks[0].attn1
        attention.set_processor(Doubling(attention.processor))
    close(run(model, inputs), run(twin, inputs))
    assert any("Doubling where AttnProcessor2_0" in reason for _, reason, _ in accel.report(model).fallbacks)


@pytest.mark.parametrize("change", ["sliced", "fused", "freeu", "chunked"])
def test_diffusers_own_switches(tiny, change):
    model = tiny.unet()
    twin, inputs = copy.deepcopy(model), tiny.inputs(model)
    accel.optimize(model)
    for unet in (model, twin):
        if change == "sliced":
            unet.set_attention_slice(1)
        elif change == "fused":
            unet.fuse_qkv_projections()
        elif change == "freeu":
            unet.enable_freeu(0.9, 0.2, 1.2, 1.4)
        else:
            unet.mid_block.attentions[0].transformer_blocks[0].set_chunk_feed_forward(2, 1)
    close(run(model, inputs), run(twin, inputs))


def test_forward_hooks_on_inner_modules_still_run(tiny):
    model = tiny.unet()
    inputs, seen = tiny.inputs(model), []
    accel.optimize(model)
    model.down_blocks[0].resnets[0].conv1.register_forward_hook(lambda *args: seen.append(1))
    run(model, inputs)
    assert seen == [1]
    assert any("forward hooks" in reason for _, reason, _ in accel.report(model).fallbacks)


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
def test_a_hook_on_any_one_module_fires(tiny, kind):
    model = tiny.unet() if kind == "unet" else tiny.vae()
    twin = copy.deepcopy(model)
    inputs = tiny.inputs(model) if kind == "unet" else {"sample": torch.randn(1, 3, 8, 8)}
    accel.optimize(model)
    for path, module in model.named_modules():
        counts = []
        for root, where in ((model, module), (twin, twin.get_submodule(path))):
            seen = []
            handle = where.register_forward_pre_hook(lambda *args, seen=seen: seen.append(1))
            run(root, inputs)
            handle.remove()
            counts.append(len(seen))
        assert counts[0] == counts[1], path


def test_circular_padding_set_by_the_user(tiny):
    """Seamless textures: people set padding_mode on every convolution."""
    model = tiny.unet()
    twin, inputs = copy.deepcopy(model), tiny.inputs(model)
    for unet in (model, twin):
        for module in unet.modules():
            if isinstance(module, torch.nn.Conv2d):
                module.padding_mode = "circular"
                module._reversed_padding_repeated_twice = [p for p in reversed(module.padding) for _ in range(2)]
        if unet is model:
            accel.optimize(model)
    close(run(model, inputs), run(twin, inputs))
    for unet in (model, twin):
        unet.conv_in.padding_mode = "zeros"
    close(run(model, inputs), run(twin, inputs))


def test_circular_padding_set_after_optimize(tiny):
    model = tiny.unet()
    twin, inputs = copy.deepcopy(model), tiny.inputs(model)
    accel.optimize(model)
    for unet in (model, twin):
        for module in unet.modules():
            if isinstance(module, torch.nn.Conv2d):
                module.padding_mode = "circular"
                module._reversed_padding_repeated_twice = [p for p in reversed(module.padding) for _ in range(2)]
    close(run(model, inputs), run(twin, inputs))


def test_a_processor_from_elsewhere_is_called_as_ever(tiny):
    """It may store what it sees, as prompt-to-prompt editors do; equal outputs do not show that."""
    model = tiny.unet()
    attention = model.mid_block.attentions[0].transformer_blocks[0].attn1
    seen = []

    def storing(attn, hidden_states, *args, inner=attention.processor, **kwargs):
        seen.append(hidden_states.shape)
        return inner(attn, hidden_states, *args, **kwargs)

    attention.set_processor(storing)
    accel.optimize(model)
    assert seen == []  # examining the blocks around it did not call it
    run(model, tiny.inputs(model))
    assert len(seen) == 1
    assert any("storing may keep state" in reason for *_, reason in accel.report(model).sites)


def test_masks_given_to_a_stack_of_blocks_directly(tiny):
    """The UNet hands over biases; other callers give keep-masks, which the stack turns into biases itself."""
    model = tiny.unet()
    twin = copy.deepcopy(model)
    accel.optimize(model)
    image, prompt = torch.randn(2, 32, 4, 3), torch.randn(2, 7, 12)
    mask = torch.tensor([[1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0]])
    call = {"encoder_hidden_states": prompt, "encoder_attention_mask": mask}
    with torch.no_grad():
        ours, wanted = (unet.mid_block.attentions[0](image, **call).sample for unet in (model, twin))
    close(ours, wanted)
    assert accel.report(model).fallbacks == []


def test_a_controlnet_steers_as_ever(tiny):
    from diffusers import ControlNetModel

    model = tiny.unet()
    twin, inputs = copy.deepcopy(model), tiny.inputs(model)
    torch.manual_seed(4)
    control = ControlNetModel.from_unet(model, conditioning_embedding_out_channels=(8, 8)).eval()
    for parameter in control.parameters():  # its zero convolutions would steer nothing
        parameter.data += 0.05 * torch.randn(parameter.shape)
    control_twin = copy.deepcopy(control)
    accel.optimize(model)
    accel.optimize(control)
    assert len(patched(control, "resnet block")) > 2
    hint = torch.rand(2, 3, 16, 16)
    outputs = []
    for unet, net in ((model, control), (twin, control_twin)):
        with torch.no_grad():
            down, mid = net(**inputs, controlnet_cond=hint, return_dict=False)
        steer = {"down_block_additional_residuals": down, "mid_block_additional_residual": mid}
        outputs.append(run(unet, inputs | steer))
    close(*outputs)
    assert float((outputs[1] - run(twin, inputs)).abs().max()) > 1e-3


def test_norms_take_their_input_by_name(tiny):
    model = tiny.unet()
    twin = copy.deepcopy(model)
    accel.optimize(model)
    image = torch.randn(1, 16, 4, 4)
    with torch.no_grad():
        close(model.conv_norm_out(input=image), twin.conv_norm_out(input=image))
    assert accel.report(model).fallbacks == []
