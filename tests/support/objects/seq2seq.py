"""Tiny encoder-decoder models, what their generate() is given, and comparisons with stock."""

import copy
from collections.abc import Callable

import torch
import transformers as t
from accel_kernels.attention.paged.kv_quantization import restored, rounded

import accel
from support.objects.encoders import random_pair

WIDTH, WORDS = 32, 64
BART = {"vocab_size": WORDS, "d_model": WIDTH, "pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 2}
for side in ("encoder", "decoder"):
    BART |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 48}
TEXT = BART | {"max_position_embeddings": 200, "forced_eos_token_id": None}
AUDIO = {"max_source_positions": 16, "max_target_positions": 64, "num_mel_bins": 8}
AUDIO |= {"suppress_tokens": None, "begin_suppress_tokens": None}
T5 = {"vocab_size": WORDS, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0}
MAKES = {
    "Bart": lambda: t.BartForConditionalGeneration(t.BartConfig(**TEXT)),
    "M2M100": lambda: t.M2M100ForConditionalGeneration(t.M2M100Config(**TEXT)),
    "T5": lambda: t.T5ForConditionalGeneration(t.T5Config(**T5)),
    "Whisper": lambda: t.WhisperForConditionalGeneration(t.WhisperConfig(**BART, **AUDIO)),
}

LIKE_BART = {  # classes, and names of their configurations
    "BlenderbotForConditionalGeneration": "BlenderbotConfig",
    "MBartForConditionalGeneration": "MBartConfig",
    "LEDForConditionalGeneration": "LEDConfig",
    "MarianMTModel": "MarianConfig",
    "MvpForConditionalGeneration": "MvpConfig",
    "PegasusForConditionalGeneration": "PegasusConfig",
    "PegasusXForConditionalGeneration": "PegasusXConfig",
    "PLBartForConditionalGeneration": "PLBartConfig",
}
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}  # as of Flan-T5, UL2 and ByT5
LOCAL = {"attention_window": 4, "num_hidden_layers": 2, "num_global_tokens": 2, "block_size": 4}  # of their encoders


def maker(kind: str, config: str, sizes: dict) -> Callable[[], torch.nn.Module]:
    return lambda: getattr(t, kind)(getattr(t, config)(**sizes))


OTHERS = {name: maker(name, config, TEXT | LOCAL) for name, config in LIKE_BART.items()}
OTHERS |= {"MT5": maker("MT5ForConditionalGeneration", "MT5Config", T5 | GATED)}
OTHERS |= {"UMT5": maker("UMT5ForConditionalGeneration", "UMT5Config", T5)}
OTHERS |= {"LongT5": maker("LongT5ForConditionalGeneration", "LongT5Config", T5 | {"local_radius": 4})}


def moonshine(padded: int | None = None) -> torch.nn.Module:
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 48, "decoder_start_token_id": 2}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_num_hidden_layers": 2, f"{side}_num_attention_heads": 4}
    return t.MoonshineForConditionalGeneration(t.MoonshineConfig(**sizes, pad_head_dim_to_multiple_of=padded))


def speech_to_text() -> torch.nn.Module:
    sizes = BART | {"num_conv_layers": 2, "conv_channels": 16, "input_feat_per_channel": 8, "max_target_positions": 64}
    return t.Speech2TextForConditionalGeneration(t.Speech2TextConfig(**sizes))


def seamless() -> torch.nn.Module:
    sizes = {name: size for name, size in TEXT.items() if name != "d_model"} | {"hidden_size": WIDTH}
    ears = {"layers": 1, "attention_heads": 4, "intermediate_size": 48}
    sizes |= {f"speech_encoder_{name}": size for name, size in ears.items()} | {"feature_projection_input_dim": 8}
    sizes |= {"adaptor_kernel_size": 3, "adaptor_stride": 2}
    return t.SeamlessM4TForSpeechToText(t.SeamlessM4TConfig(**sizes))


def gemmas() -> torch.nn.Module:
    """Whose caches have windows, of more tokens than there is room for."""
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 140}
    sizes |= {"layer_types": ["sliding_attention", "full_attention"]}
    both = {"encoder": {**sizes}, "decoder": sizes | {"cross_attention_hidden_size": WIDTH}}
    return t.T5GemmaForConditionalGeneration(t.T5GemmaConfig(**both, vocab_size=WORDS))


def made(family: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model with random weights, and a deep copy of it that stays stock."""
    return random_pair(MAKES[family], 0.3)


def source(family: str, length: int = 9, rows: int = 2, masked: bool = True, seed: int = 1) -> dict[str, torch.Tensor]:
    """What generate() is given; the rows behind the first are half as long, if masked."""
    generator = torch.Generator().manual_seed(seed)
    if family == "Whisper":
        return {"input_features": torch.randn(rows, 8, 32, generator=generator)}
    ids = torch.randint(3, WORDS, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1:, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask} if masked else {"input_ids": ids}


def options(tokens: int = 10, **more: object) -> dict[str, object]:
    """For so many tokens, which do not repeat themselves."""
    return {"max_new_tokens": tokens, "min_new_tokens": tokens, "no_repeat_ngram_size": 2} | more


FAMILIES = sorted(MAKES)
LAYERS, STEPS = 2, 10  # of ten tokens, and of a prompt of one


def generated(model, call, chosen):
    torch.manual_seed(3)
    found = model.generate(**copy.deepcopy(call), **chosen)
    return getattr(found, "sequences", found)


def assert_same(model, stock, call, chosen):
    assert torch.equal(generated(model, call, chosen), generated(stock, call, chosen))


class Rounded(t.DynamicCache):
    """Stock's cache, of numbers as they come out of 8 bits."""

    def update(self, keys, values, *args, **kwargs):
        keys, values = (restored(*rounded(one, torch.int8), one.dtype) for one in (keys, values))
        return super().update(keys, values, *args, **kwargs)


def fallbacks(model):
    return [reason for _, reason, _ in accel.report(model).fallbacks]


def optimized(family, **chosen):
    model, stock = made(family)
    return accel.optimize(model, **chosen), stock
