"""generate() of more families, known by what they hold."""

import pytest
import torch
import transformers as t

from support.objects.seq2seq import (
    MAKES,
    STEPS,
    T5,
    TEXT,
    WIDTH,
    WORDS,
    assert_same,
    fallbacks,
    optimized,
    options,
    source,
)

LIKE_BART = {  # classes, and names of their configurations
    "BlenderbotForConditionalGeneration": "BlenderbotConfig",
    "MBartForConditionalGeneration": "MBartConfig",
    "MarianMTModel": "MarianConfig",
    "PegasusForConditionalGeneration": "PegasusConfig",
    "PLBartForConditionalGeneration": "PLBartConfig",
}
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}  # as of Flan-T5, UL2 and ByT5
OTHERS = {name: (name, config, TEXT) for name, config in LIKE_BART.items()}
OTHERS |= {"MT5": ("MT5ForConditionalGeneration", "MT5Config", T5 | GATED)}
OTHERS |= {"UMT5": ("UMT5ForConditionalGeneration", "UMT5Config", T5)}


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_are_known_by_what_they_hold(name, steps, attended, monkeypatch):
    kind, config, given = OTHERS[name]
    monkeypatch.setitem(MAKES, name, lambda: getattr(t, kind)(getattr(t, config)(**given)))
    model, stock = optimized(name)
    ran = steps()
    assert_same(model, stock, source(name), options())
    assert len(ran) >= STEPS - 1 and True in attended and not fallbacks(model)


def test_moonshine_whose_encoder_gives_a_mask_too(steps, monkeypatch):
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 48, "decoder_start_token_id": 2}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_num_hidden_layers": 2, f"{side}_num_attention_heads": 4}
    kind = t.MoonshineForConditionalGeneration
    monkeypatch.setitem(MAKES, "Moonshine", lambda: kind(t.MoonshineConfig(**sizes)))
    model, stock = optimized("Moonshine")
    ran = steps()
    call = {"input_values": torch.randn(2, 4000, generator=torch.Generator().manual_seed(0))}
    assert_same(model, stock, call, options())
    assert ran == [2] * (STEPS - 1) and not fallbacks(model)
    mask = (torch.arange(4000) < torch.tensor([[4000], [2500]])).long()
    assert_same(model, stock, call | {"attention_mask": mask}, options())
    assert fallbacks(model) == ["a mask beside what the encoder gave", "attention_mask is given"]


def pictures_to_text(config):
    """As Donut and TrOCR, whose texts are written by a decoder inside of another model."""
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    encoder = t.ViTConfig(**sizes, image_size=16, patch_size=4)
    decoder = config(**TEXT, is_decoder=True, add_cross_attention=True, is_encoder_decoder=False)
    both = t.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    return t.VisionEncoderDecoderModel(both)


@pytest.mark.parametrize("config", [t.MBartConfig, t.TrOCRConfig])
def test_texts_of_pictures(config, steps, attended, monkeypatch):
    monkeypatch.setitem(MAKES, "pictures", lambda: pictures_to_text(config))
    model, stock = optimized("pictures")
    ran = steps()
    call = {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))}
    assert_same(model, stock, call, options() | {"decoder_start_token_id": 2, "pad_token_id": 0, "eos_token_id": 1})
    assert len(ran) >= STEPS - 1 and bool(attended) == (config is t.MBartConfig)  # TrOCR's attention is its own
