"""Scripts of encoders, of speech, of text to text, and of text about images."""

from typing import Any

import torch

from accel.bench.encoders.pictures import build_pictures, picture_prompt
from accel.bench.encoders.speech import SPEECH
from accel.bench.encoders.texts import LARGE, QWEN
from accel.bench.encoders.vision import SO400M
from accel.bench.scripts.generation import TINY
from accel.bench.scripts.script import Built, Script, Size, script
from accel.bench.weights import random_transformer

SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)


def _made(size: Size, class_name: str, kind: str, real: dict, tiny: dict) -> Any:
    from transformers import AutoConfig

    return random_transformer(class_name, AutoConfig.for_model(kind, **size(real, tiny)), size.device, size.bf16)


def embedding(
    name: str, about: str, model: tuple[str, str, dict, dict], rows: int, tokens: int, vocabulary: int
) -> Script:
    """The mean over tokens, of rows of different lengths that are padded. model: see `_made`."""

    def build(size: Size) -> Built:
        made = _made(size, *model)
        ids = size.ids(size(rows, min(rows, 3)), size(tokens, 12), size(vocabulary, 200))
        lengths = torch.linspace(ids.shape[1], ids.shape[1] / 2, len(ids), device=size.device).long()
        mask = (torch.arange(ids.shape[1], device=size.device) < lengths[:, None]).long()

        def call() -> torch.Tensor:
            states = made(input_ids=ids, attention_mask=mask).last_hidden_state
            return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

        return made, call

    return Script(name, about, build)


def pictures(name: str, about: str, model: tuple[str, str, dict, dict], rows: int, pixels: int) -> Script:
    """What an encoder of images makes of some."""

    def build(size: Size) -> Built:
        made = _made(size, *model)
        images = size.randn(size(rows, min(rows, 3)), 3, size(pixels, 32), size(pixels, 32), dtype=size.bf16)
        return made, lambda: made(pixel_values=images).pooler_output

    return Script(name, about, build)


WORDS, SPECIAL = {"vocab_size": 200}, dict(pad_token_id=0, bos_token_id=1, cls_token_id=1, sep_token_id=2)
BERT = ("BertModel", "bert", LARGE, SMALL | WORDS)
BASE: dict = {}  # the defaults of its configuration
MODERN_BERT = ("ModernBertModel", "modernbert", BASE, SMALL | WORDS | SPECIAL | {"eos_token_id": 2})
QWEN3 = ("Qwen3Model", "qwen3", QWEN | {"use_cache": False}, TINY | {"head_dim": 8, "use_cache": False})
REAL = SO400M | dict(image_size=384, patch_size=14)
SIGLIP = ("SiglipVisionModel", "siglip_vision_model", REAL, SMALL | dict(image_size=32, patch_size=8))
ENCODERS = (
    embedding("bert-1", "BERT-large, the embedding of a text of 384 tokens", BERT, 1, 384, 30000),
    embedding("bert-64", "BERT-large, the embeddings of 64 texts of 192 to 384 tokens", BERT, 64, 384, 30000),
    embedding("modernbert-1", "ModernBERT-base, the embedding of a text of 512 tokens", MODERN_BERT, 1, 512, 50000),
    embedding("qwen3-embedding", "Qwen3-Embedding-0.6B, 32 texts of 256 to 512 tokens", QWEN3, 32, 512, 150000),
    pictures("siglip-1", "SigLIP so400m, one image of 384 px", SIGLIP, 1, 384),
    pictures("siglip-32", "SigLIP so400m, 32 images of 384 px", SIGLIP, 32, 384),
)


@script("clip-8", "CLIP ViT-L/14, 8 images and 8 texts")
def clip(size: Size) -> Built:
    vision = LARGE | dict(patch_size=14)
    text = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
    ends = dict(vocab_size=200, bos_token_id=198, eos_token_id=199, pad_token_id=199)
    tiny = dict(vision_config=SMALL | dict(image_size=32, patch_size=8), text_config=SMALL | ends, projection_dim=16)
    model = _made(size, "CLIPModel", "clip", dict(vision_config=vision, text_config=text, projection_dim=768), tiny)
    images = size.randn(size(8, 2), 3, size(224, 32), size(224, 32), dtype=size.bf16)
    ids = size.ids(size(8, 2), size(77, 8), size(49000, 190))
    return model, lambda: model(input_ids=ids, pixel_values=images).logits_per_image


def _written(model: Any, size: Size, new: int, **inputs: Any) -> Built:
    """Greedy text of an encoder with a decoder, whose end it cannot write."""
    config = model.generation_config
    config.eos_token_id, config.pad_token_id = model.config.get_text_config(decoder=True).vocab_size, 0
    config.forced_eos_token_id = None
    return model, lambda: model.generate(**inputs, max_new_tokens=size(new, 4), do_sample=False, num_beams=1)


def _whisper(size: Size, frames: int) -> tuple[Any, torch.Tensor]:
    real = SPEECH["large-v3"] | dict(max_target_positions=448, decoder_start_token_id=50258)
    tiny = dict(vocab_size=300, num_mel_bins=8, d_model=32, max_target_positions=40, max_source_positions=20)
    tiny |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0, decoder_start_token_id=3)
    for side in ("encoder", "decoder"):
        tiny |= {f"{side}_layers": 2, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 48}
    model = _made(size, "WhisperForConditionalGeneration", "whisper", real, tiny)
    config = model.generation_config
    config.decoder_start_token_id = size(50258, 3)
    config.no_timestamps_token_id = size(50364, 200)
    config.suppress_tokens = config.begin_suppress_tokens = None
    config.return_timestamps = False
    return model, size.randn(1, size(128, 8), size(frames, frames // 75), dtype=size.bf16)


@script("whisper-short", "Whisper-large-v3, 30 seconds of speech, 128 tokens")
def whisper_short(size: Size) -> Built:
    model, speech = _whisper(size, 3000)
    return _written(model, size, 128, input_features=speech)


@script("whisper-long", "Whisper-large-v3, 90 seconds of speech in one call with timestamps, 96 tokens to each 30")
def whisper_long(size: Size) -> Built:
    model, speech = _whisper(size, 9000)
    vocabulary, first = model.config.vocab_size, model.generation_config.no_timestamps_token_id + 1
    words = model.get_output_embeddings().weight.data
    words *= 8  # so that text is likelier than all timestamps together, and every window is as long
    words[first:vocabulary] = 0
    model, _ = _written(model, size, 96)
    given = dict(input_features=speech, attention_mask=torch.ones_like(speech[:, 0]).long(), return_timestamps=True)
    given |= dict(max_new_tokens=size(96, 4), do_sample=False, temperature=0.0, condition_on_prev_tokens=False)
    return model, lambda: model.generate(**given)


@script("flan-t5", "Flan-T5-large, 4 texts of 128 tokens, 64 out")
def t5(size: Size) -> Built:
    real: dict = dict(vocab_size=32128, d_model=1024, d_kv=64, d_ff=2816, num_layers=24, num_heads=16)
    real |= dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0)
    tiny = real | dict(vocab_size=200, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    model = _made(size, "T5ForConditionalGeneration", "t5", real, tiny)
    return _written(model, size, 64, input_ids=size.ids(size(4, 2), size(128, 8), size(32000, 200)))


@script("bart", "BART-large, 4 texts of 256 tokens, 64 out")
def bart(size: Size) -> Built:
    tiny = dict(vocab_size=200, d_model=32, max_position_embeddings=64)
    for side in ("encoder", "decoder"):
        tiny |= {f"{side}_layers": 2, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 48}
    model = _made(size, "BartForConditionalGeneration", "bart", {}, tiny)
    return _written(model, size, 64, input_ids=size.ids(size(4, 2), size(256, 8), size(50000, 200)))


@script("qwen2.5-vl", "Qwen2.5-VL-7B with an image of 512 px, 14 of 28 layers of text: 64 tokens in, 32 out")
def vision_language(size: Size) -> Built:
    name, side = size(("qwen2.5-vl-7b", 36), ("tiny-vl", 4))
    model = build_pictures(name, size.device, size.bf16, num_hidden_layers=size(14, 2))
    return _written(model, size, 32, **picture_prompt(model, [(side, side)], size(32, 4)))
