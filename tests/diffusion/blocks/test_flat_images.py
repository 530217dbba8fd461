"""Images in other layouts, weights in other forms, and blocks of other makes."""

import copy
import logging
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import accel
from accel.diffusion import family
from accel.fusion.channels_last import ChannelsLast
from accel.patching.rule import Rule
from support.compatibility.tiny_diffusers_models import build


def far_from(exact, got):
    return float((got.detach().double() - exact.detach()).abs().max())


@pytest.fixture
def vae(tiny):
    """One channel a group in the first level: what is nearly constant is nearly nothing but its mean."""
    return tiny.vae(norm_num_groups=8)


AROUND = {
    "nothing": lambda vae: nullcontext(),
    # The block in the middle runs stock between fused ones.
    "a hook": lambda vae: vae.decoder.mid_block.resnets[0].norm1.register_forward_hook(lambda *args: None),
    "gradients": lambda vae: torch.enable_grad(),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("latents", ["zeros", "flat"])
def test_a_decoder_is_as_exact_as_stock(vae, around, latents):
    z = torch.zeros(1, 4, 16, 16)
    if latents == "flat":
        z = z + 3 + 1e-4 * torch.randn(z.shape, generator=torch.Generator().manual_seed(0))
    twin = copy.deepcopy(vae)
    accel.optimize(vae)
    with torch.no_grad(), AROUND[around](vae):
        exact = copy.deepcopy(twin).double().decode(z.double()).sample
        stock, ours = (model.decode(z).sample for model in (twin, vae))
        assert far_from(exact, ours) <= 2 * far_from(exact, stock) + 1e-6
    ran = {path for path, _, _ in accel.report(vae).fallbacks}
    assert bool(ran) is (around != "nothing")


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


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("optimized", [False, True])
def test_weights_made_under_inference_mode(tiny, made, optimized):
    """Called both ways; what they were, inference tensors or not, they are still, in the layout and after it."""
    with torch.inference_mode(made):
        models = tiny.unet(), tiny.vae()
    for model in models:
        inputs = (
            tiny.inputs(model) if hasattr(model.config, "cross_attention_dim") else {"sample": torch.ones(1, 3, 8, 8)}
        )

        def run(inside, model=model, inputs=inputs):
            with torch.inference_mode() if inside else torch.no_grad():
                return model(**inputs).sample

        def told(model=model):
            return [(id(p), p.stride(), p.is_inference()) for p in model.parameters()]

        before, wanted = told(), run(False)
        with torch.inference_mode(optimized):
            accel.optimize(model, layout="channels_last")
        assert [row[2] for row in told()] == [made] * len(before) and told() != before
        for inside in (True, False):
            torch.testing.assert_close(run(inside), wanted, rtol=1e-4, atol=1e-4)
        assert accel.report(model).fallbacks == []
        with torch.inference_mode(not optimized):
            accel.restore(model)
        assert told() == before and torch.equal(run(False), wanted)


def test_attentions_of_another_make_are_skipped_with_a_reason(monkeypatch):
    """Such as have neither group norm nor residual."""
    around = "diffusion transformer block"  # which these attentions are parts of
    monkeypatch.setattr(family, "RULES", tuple(rule for rule in family.RULES if rule.name != around))
    model = accel.optimize(build("MiniMaxMusic3Transformer1DModel"))
    reasons = {reason for _, rule, status, reason in accel.report(model).sites if rule == "attention"}
    assert reasons == {"an attention of another make, without group_norm"}


@torch.no_grad()
def test_another_activation_shows_in_16_bits():
    """GELU for SiLU in bf16 is less than rounding may be: so blocks are compared in float32 too."""
    from diffusers import DreamLiteTransformer2DModel, UNet2DModel

    torch.manual_seed(0)
    common = {"in_channels": 32, "out_channels": 32, "attention_head_dim": 8, "norm_num_groups": 4}
    others = {"num_attention_heads": 4, "cross_attention_dim": 16, "activation_fn": "swiglu"}
    unet = UNet2DModel(block_out_channels=(32,), down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",),
                       act_fn="gelu", **common)  # fmt: skip
    blocks = DreamLiteTransformer2DModel(**others, **common)
    x, text = torch.randn(1, 32, 6, 6).bfloat16(), torch.randn(1, 5, 16).bfloat16()
    for model, more, rule in ((unet, (3,), "resnet block"), (blocks, (text,), "transformer block")):
        model = model.eval().bfloat16()
        before, wanted = {id(tensor) for tensor in model.parameters()}, model(x, *more).sample
        accel.optimize(model, cpu="fuse", layout="keep")
        rows = [(status, reason) for _, name, status, reason in accel.report(model).sites if name == rule]
        assert rows and all(status == "skipped" and "computes something else" in reason for status, reason in rows)
        assert {id(tensor) for tensor in model.parameters()} == before and model.dtype is torch.bfloat16
        got = model(x, *more).sample
        assert float((got - wanted).float().norm() / wanted.float().norm()) < 0.01


class Faulty:
    """A rule that raises where it is shown a convolution."""

    def __init__(self, error: BaseException):
        self.error = error

    def __call__(self, site, context):
        if type(site.module) is nn.Conv2d:
            raise self.error


@pytest.mark.parametrize("step_cache", [None, 2])
def test_a_rule_that_raises_skips_the_site(tiny, monkeypatch, caplog, step_cache):
    model = tiny.unet()
    inputs = tiny.inputs(model)
    with torch.no_grad():
        wanted = model(**inputs).sample
    faulty = Rule("faulty", Faulty(KeyError("a part")))
    monkeypatch.setattr(family, "RULES", (faulty, *family.RULES))
    with caplog.at_level(logging.DEBUG, "accel"):
        accel.optimize(model, step_cache=step_cache)
    skipped = {row for row in accel.report(model).sites if row[1] == "faulty"}
    assert ("conv_in", "faulty", "skipped", "could not be examined: KeyError: 'a part'") in skipped
    assert any(record.exc_info and record.exc_info[0] is KeyError for record in caplog.records)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).sample, wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="faulty.*KeyError"):
        accel.optimize(model, strict=True)
    accel.restore(model)
    with torch.no_grad():
        assert torch.equal(model(**inputs).sample, wanted)


@pytest.mark.parametrize(
    "error", [MemoryError("none left"), torch.OutOfMemoryError("none left"), RuntimeError("CUDA error: none left")]
)
def test_a_rule_out_of_memory_is_told_at_once(tiny, monkeypatch, error):
    model = tiny.vae()
    before = tiny.snapshot(model)
    monkeypatch.setattr(family, "RULES", (*family.RULES, Rule("faulty", Faulty(error))))
    with pytest.raises(type(error), match="none left"):
        accel.optimize(model, graphs=False)
    tiny.assert_same_state(before, tiny.snapshot(model))
