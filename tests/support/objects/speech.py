"""A tiny Whisper that hears, what it is called with, and comparisons of all that calls give."""

import copy

import torch
import transformers as t

LETTERS = 64  # tokens of text; behind them those of control, and 26 times
END, START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE, PREVIOUS, SILENT, UNTIMED = range(LETTERS, LETTERS + 9)
ROWS, FRAMES = 3, 50
SIZES = {"vocab_size": UNTIMED + 27, "d_model": 64, "num_mel_bins": 8, "max_source_positions": FRAMES // 2}
SIZES |= {"max_target_positions": 32, "median_filter_width": 3, "suppress_tokens": None, "begin_suppress_tokens": None}
SIZES |= {"pad_token_id": END, "bos_token_id": END, "eos_token_id": END, "decoder_start_token_id": START}
for side in ("encoder", "decoder"):
    SIZES |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 96}
SPOKEN = {
    "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN},
    "task_to_id": {"translate": TRANSLATE, "transcribe": TRANSCRIBE},
    "is_multilingual": True,
    "no_timestamps_token_id": UNTIMED,
    "prev_sot_token_id": PREVIOUS,
    "max_initial_timestamp_index": 10,
    "alignment_heads": [[0, 1], [1, 0], [1, 3]],
    "suppress_tokens": [*range(START, SILENT)],
    "begin_suppress_tokens": [5, END],
    "return_timestamps": False,
    "max_length": None,
    "max_new_tokens": 14,
}


def whisper():
    """With random weights, by which texts differ and end."""
    torch.manual_seed(0)
    model = t.WhisperForConditionalGeneration(t.WhisperConfig(**SIZES)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm.weight" in name else 0.0, 0.3)
            if "encoder_attn" in name:
                parameter.mul_(2)
        model.model.decoder.embed_positions.weight.normal_(0, 0.6)
        model.proj_out.weight[END] *= 1.6
    vars(model.generation_config).update(SPOKEN)
    return model


def sound(rows=ROWS, frames=FRAMES):
    return torch.randn(rows, 8, frames, generator=torch.Generator().manual_seed(1))


def heard(frames):
    """A mask of frames; each row is shorter than the one before."""
    return (torch.arange(frames) < frames - 10 * torch.arange(ROWS)[:, None]).long()


def assert_equal(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        size = float(theirs.nan_to_num(0.0, 0.0, 0.0).abs().max()) if theirs.numel() else 0.0
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=3e-5 * (1 + size), equal_nan=True)  # tokens to the bit
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for name in theirs:
            assert_equal(ours[name], theirs[name])
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_equal(one, other)
    elif isinstance(theirs, t.EncoderDecoderCache):
        for one, other in zip(ours.self_attention_cache.layers, theirs.self_attention_cache.layers, strict=True):
            assert_equal(one.keys, other.keys)
    else:
        assert ours == theirs


def called(model, call):
    call = copy.deepcopy(call)
    model.config._attn_implementation = "sdpa"  # Whisper leaves another one behind
    torch.manual_seed(3)
    return model.generate(sound(call.pop("rows", ROWS), call.pop("frames", FRAMES)), **call), torch.rand(1)
