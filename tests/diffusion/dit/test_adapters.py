"""Adapters come, change and go on an optimized transformer: it records its blocks anew, and is fast with them."""

import pytest
import torch

from support.compatibility.transformer_pair import FLUX, SD3, WAN

peft = pytest.importorskip("peft")

TARGETS = ["to_q", "to_k", "to_out.0", "proj_mlp"]


def adapter(**more):
    return peft.LoraConfig(**{"r": 2, "lora_alpha": 4, "target_modules": TARGETS, "init_lora_weights": False} | more)


def shows(one, other):
    assert float((one - other).abs().max()) > 1e-4


@pytest.mark.parametrize("pair", [FLUX, SD3, WAN], indirect=True)
def test_loras_are_fused_with_the_block_they_are_in(pair):
    plain = pair.agree()
    pair.change(lambda m: m.add_adapter(adapter(), adapter_name="style"))
    styled = pair.agree()
    shows(styled, plain)
    assert torch.equal(pair.agree(), styled) or pair.name == WAN
    pair.change(lambda m: m.add_adapter(adapter(r=3), adapter_name="detail"))
    pair.change(lambda m: m.set_adapters(["style", "detail"], [0.3, 0.8]))
    both = pair.agree()
    shows(both, styled)
    pair.change(lambda m: m.set_adapters(["style"], [0.9]))
    shows(pair.agree(), both)
    kwargs = "attention_kwargs" if pair.name == WAN else "joint_attention_kwargs"
    for scale in (0.5, 0.25):
        shows(pair.agree(**{kwargs: {"scale": scale}}), both)
    before = pair.agree()
    pair.change(lambda m: m.disable_adapters())
    shows(pair.agree(), before)
    pair.change(lambda m: m.enable_adapters())
    pair.change(lambda m: m.fuse_lora(lora_scale=0.7))
    shows(pair.agree(), before)
    pair.change(lambda m: m.unfuse_lora())
    pair.change(lambda m: m.delete_adapters("style"))
    shows(pair.agree(), before)
    pair.change(lambda m: m.unload_lora())
    torch.testing.assert_close(pair.agree(), plain, rtol=0, atol=1e-5)


def weights(model, seed):
    generator = torch.Generator().manual_seed(seed)
    state = peft.get_peft_model_state_dict(model, adapter_name="default")
    return {f"transformer.{name}": torch.randn(one.shape, generator=generator) / 4 for name, one in state.items()}


@pytest.mark.parametrize("pair", [FLUX], indirect=True)
@pytest.mark.parametrize("scaled", [False, True])
def test_a_lora_in_the_place_of_another(pair, scaled):
    """As loaded from a file, and swapped for one of another rank; scales are tensors then."""
    from diffusers import FluxTransformer2DModel

    config = FluxTransformer2DModel.from_config(pair.stock.config)
    states = []
    for seed in (1, 2):
        config.add_adapter(adapter(), adapter_name="default")
        states.append(weights(config, seed))
        config.delete_adapters("default")

    def load(model, state, **how):
        given = {name: one.clone() for name, one in state.items()}  # PEFT 0.18 leaves the weights of before in them
        model.load_lora_adapter(given, adapter_name="default", **how)

    if scaled:
        pair.change(lambda m: m.enable_lora_hotswap(target_rank=4))
    pair.change(lambda m: load(m, states[0]))
    before = pair.agree()
    pair.change(lambda m: load(m, states[1], hotswap=True))
    after = pair.agree()
    shows(after, before)
    if scaled:
        pair.change(lambda m: pair.block(m).attn.to_q.scaling["default"].mul_(3))
        shows(pair.agree(), after)


@pytest.mark.parametrize("pair", [FLUX, SD3], indirect=True)
def test_an_adapter_that_draws_random_numbers_runs_stock(pair):
    pair.agree()
    pair.change(lambda m: m.add_adapter(adapter(lora_dropout=0.5)))
    said = "training mode inside"
    block = pair.block(pair.ours)
    with torch.no_grad():
        pair.ours(**pair.inputs)
    assert any(said in reason for _, reason, _ in pair.report().fallbacks)
    pair.change(lambda m: m.eval())
    pair.agree()
    assert not block.training


@pytest.mark.parametrize("pair", [FLUX, SD3], indirect=True)
def test_dora_as_stock_has_it(pair):
    pair.agree()
    pair.change(lambda m: m.add_adapter(adapter(use_dora=True)))
    pair.change(lambda m: m.eval())
    pair.agree()


class Given(torch.nn.Module):
    """Image embeddings as the blocks take them."""

    def forward(self, embeddings):
        return embeddings


@pytest.mark.parametrize("pair", [FLUX], indirect=True)
def test_an_image_adapter_is_fused_and_its_scales_are_changed_in_place(pair):
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    plain = pair.agree()
    before = [pair.block(model).attn.processor for model in (pair.ours, pair.stock)]

    def adapt(model):
        pair.block(model).attn.set_processor(FluxIPAdapterAttnProcessor(32, 24, scale=0.7))
        model.encoder_hid_proj = Given()

    pair.change(adapt)
    embeddings = torch.randn(2, 5, 24)
    seen = [plain]
    for scale in (0.7, 0.2):
        for model in (pair.ours, pair.stock):
            pair.block(model).attn.processor.scale[0] = scale
        for _ in range(2):
            # the model takes the embeddings out of the dictionary that it is given
            kwargs = [{"ip_adapter_image_embeds": [embeddings]} for _ in range(2)]
            ran = pair.plans
            with torch.no_grad():
                ours, stock = (
                    model(**pair.inputs, joint_attention_kwargs=one).sample
                    for model, one in zip((pair.ours, pair.stock), kwargs, strict=True)
                )
            assert torch.equal(ours, stock) and pair.plans - ran == pair.blocks
        shows(ours, seen[-1])
        seen.append(ours)
    assert pair.report().fallbacks == []
    for model, processor in zip((pair.ours, pair.stock), before, strict=True):
        pair.block(model).attn.set_processor(processor)
    assert torch.equal(pair.agree(), plain)
