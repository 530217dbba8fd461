"""Blocks that have some of what a rule looks for: skipped with a reason, and what raises spoils nothing else."""

import logging

import pytest
import torch
from torch import nn

import accel
from accel.diffusion import family
from accel.patching.rule import Rule


def compression_autoencoder():
    """Its attention has one linear layer as to_out, no group norm, and a processor of diffusers."""
    from diffusers import AutoencoderDC

    blocks, widths = ("ResBlock", "EfficientViTBlock"), (8, 8)
    return AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=blocks,
        decoder_block_types=blocks,
        encoder_block_out_channels=widths,
        decoder_block_out_channels=widths,
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
    ).eval()


def music_transformer():
    """Its attention has a list to_out, and neither group norm nor residual."""
    from diffusers import MiniMaxMusic3Transformer1DModel

    sizes = {"in_channels": 4, "condition_dim": 8, "num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8}
    return MiniMaxMusic3Transformer1DModel(**sizes, ff_inner_dim=16, rotary_dim=4, fourier_embedding_dim=8).eval()


@pytest.mark.parametrize("make", [compression_autoencoder, music_transformer])
def test_attentions_of_another_make_are_skipped_with_a_reason(make, monkeypatch):
    around = "diffusion transformer block"  # which these attentions are parts of
    monkeypatch.setattr(family, "RULES", tuple(rule for rule in family.RULES if rule.name != around))
    model = accel.optimize(make())
    reasons = {reason for _, rule, status, reason in accel.report(model).sites if rule == "attention"}
    assert reasons == {"an attention of another make, without group_norm"}


def test_an_autoencoder_with_such_attentions():
    model, x = compression_autoencoder(), torch.ones(1, 3, 16, 16)
    with torch.no_grad():
        wanted = model(x).sample
        torch.testing.assert_close(accel.optimize(model)(x).sample, wanted, rtol=1e-4, atol=1e-5)
        assert torch.equal(accel.restore(model)(x).sample, wanted)


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
