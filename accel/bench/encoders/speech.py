"""Whisper's generate(), by stock and by accel: one clip, a batch of clips, long recordings with timestamps."""

from functools import partial
from typing import Any

import torch

import accel
from accel.bench.llm.models import beside
from accel.bench.results import reported
from accel.bench.timing import compare_times, same_call
from accel.bench.weights import random_transformer

SECONDS = 30  # of a window
RECORDINGS = 16  # at a time; on a CPU, where this is a check alone, 2
END, START, ENGLISH, TRANSLATE, TRANSCRIBE, PREVIOUS, UNTIMED = 50257, 50258, 50259, 50359, 50360, 50362, 50364
_LARGE = {"d_model": 1280, "num_mel_bins": 128, "vocab_size": 51866}
for _side in ("encoder", "decoder"):
    _LARGE |= {f"{_side}_layers": 32, f"{_side}_attention_heads": 20, f"{_side}_ffn_dim": 5120}
_TINY = {"d_model": 64, "num_mel_bins": 8, "vocab_size": 51866, "encoder_layers": 2, "decoder_layers": 2}
_TINY |= {"max_source_positions": 50, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
_TINY |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
SPEECH: dict[str, dict[str, int]] = {"large-v3": _LARGE, "turbo": _LARGE | {"decoder_layers": 4}, "tiny": _TINY}
TOKENS = {"one clip": 128, "a batch": 64, "long form": 64}  # of a window


def build_whisper(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """With random weights, whose texts are words alone: no window ends early. Raises KeyError for an unknown name."""
    import transformers

    ends = {"eos_token_id": END, "pad_token_id": END, "bos_token_id": END, "decoder_start_token_id": START}
    config = transformers.WhisperConfig(**SPEECH[name], **ends)
    model = random_transformer("WhisperForConditionalGeneration", config, device, dtype)
    config = model.generation_config
    config.suppress_tokens, config.begin_suppress_tokens = list(range(END, SPEECH[name]["vocab_size"])), None
    config.lang_to_id, config.task_to_id = {"<|en|>": ENGLISH}, {"translate": TRANSLATE, "transcribe": TRANSCRIBE}
    config.is_multilingual, config.no_timestamps_token_id, config.prev_sot_token_id = True, UNTIMED, PREVIOUS
    config.max_initial_timestamp_index, config.return_timestamps = 50, False
    return model


def measure_speech(name: str, device: torch.device, clips: int, windows: int, budget_s: float) -> dict:
    """Milliseconds of a call, and times real time, by each way in turns. same: the share of equal tokens."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    stock = build_whisper(name, device, dtype)
    fast: Any = accel.optimize(beside(stock))
    frames, bins = 2 * stock.config.max_source_positions, stock.config.num_mel_bins
    fewer = 1 if device.type == "cuda" else 8
    calls = {"one clip": (1, 1), "a batch": (clips, 1), "long form": (RECORDINGS // fewer, windows)}
    rows = []
    for call, (batch, length) in calls.items():
        features = torch.randn(batch, bins, frames * length, device=device, dtype=dtype)
        options: dict[str, Any] = {"language": "en", "task": "transcribe", "max_new_tokens": TOKENS[call] // fewer}
        if length > 1:
            mask = torch.ones(batch, frames * length, dtype=torch.long, device=device)
            options |= {"return_timestamps": True, "attention_mask": mask}
        texts = [model.generate(features, **options) for model in (fast, stock, fast)]  # the first one captures graphs
        same = float((texts[0] == texts[1]).float().mean()) if texts[0].shape == texts[1].shape else 0.0
        models = {"stock": stock, "accel": fast}
        ways = {way: same_call(partial(one.generate, features, **options)) for way, one in models.items()}
        times = compare_times(ways, device, budget_s=budget_s)
        sound = 1e3 * SECONDS * batch * length
        found = {way: one.to_dict() | {"real_time": round(sound / one.median_ms)} for way, one in times.items()}
        rows.append({"call": call, "rows": batch, "windows": length, "ways": found, "same": round(same, 6)})
    return {"name": name, "calls": rows} | reported(fast)
