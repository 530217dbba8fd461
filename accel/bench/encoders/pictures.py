"""Prompts with pictures: one to its first token, a token behind it, and sixteen of different sizes; stock and accel."""

from functools import partial
from typing import Any

import torch

import accel
from accel.bench.llm.models import SEED, beside, endless
from accel.bench.results import reported
from accel.bench.timing import compare_times, same_call

NEW, SEVERAL = 33, 16
CALLS = 5  # of each kind before it is timed: kernels are chosen, graphs captured
_TEXT = {"num_hidden_layers": 28, "head_dim": 128, "max_position_embeddings": 32768}
_ROPE = {"rope_type": "default", "rope_theta": 1e6}
# Published shapes, by name: kind, texts, towers, and the rows and columns of patches of a picture.
MODELS: dict[str, tuple[str, dict, dict, tuple[int, int]]] = {
    "qwen2.5-vl-7b": (
        "qwen2_5_vl",
        _TEXT | {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
                 "num_key_value_heads": 4, "rope_parameters": _ROPE | {"mrope_section": [16, 24, 24]}},
        {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584},
        (50, 90),
    ),
    "qwen3-vl-2b": (
        "qwen3_vl",
        _TEXT | {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16,
                 "num_key_value_heads": 8, "rope_parameters": _ROPE | {"mrope_section": [24, 20, 20]}},
        {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048,
         "deepstack_visual_indexes": [5, 11, 17]},
        (64, 64),
    ),
    "qwen3-vl-8b": (
        "qwen3_vl",
        _TEXT | {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "num_hidden_layers": 36,
                 "rope_parameters": _ROPE | {"mrope_section": [24, 20, 20]}},
        {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096,
         "deepstack_visual_indexes": [8, 16, 24]},
        (64, 64),
    ),
    "tiny-vl": (
        "qwen2_5_vl",
        {"num_hidden_layers": 2, "vocab_size": 200, "hidden_size": 64, "intermediate_size": 96,
         "num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": _ROPE | {"mrope_section": [4, 2, 2]}},
        {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
         "fullatt_block_indexes": [1]},
        (4, 6),
    ),
}  # fmt: skip


def build_pictures(name: str, device: torch.device, dtype: torch.dtype, **changes: Any) -> Any:
    """The model with random weights, made on the device. changes: of its texts. Raises KeyError for an unknown name."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    kind, text, vision, _ = MODELS[name]
    special = {"image_token_id": 100, "video_token_id": 101, "vision_start_token_id": 102, "vision_end_token_id": 103}
    config = AutoConfig.for_model(kind, text_config=text | changes, vision_config=vision, **special)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(SEED)
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype).eval()
    return endless(model.requires_grad_(False))


def picture_prompt(model: Any, sizes: list[tuple[int, int]], words: int = 16) -> dict[str, torch.Tensor]:
    """What a processor gives for pictures of so many rows and columns of patches, so many words before and behind."""
    config, vision = model.config, model.config.vision_config
    merged, numbers = vision.spatial_merge_size**2, vision.patch_size**2 * vision.temporal_patch_size * 3
    text = torch.randint(4, 90, (1, words), generator=torch.Generator().manual_seed(SEED))
    ends = torch.tensor([[config.vision_start_token_id]]), torch.tensor([[config.vision_end_token_id]])
    parts = [text]
    for height, width in sizes:
        pieces = torch.full((1, height * width // merged), config.image_token_id)
        parts += [ends[0], pieces, ends[1], text]
    ids, grid = torch.cat(parts, dim=1), torch.tensor([[1, *size] for size in sizes])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "image_grid_thw": grid}
    given |= {"mm_token_type_ids": (ids == config.image_token_id).int()}
    given |= {"pixel_values": torch.randn(int(grid.prod(1).sum()), numbers).to(model.dtype)}
    return {key: one.to(model.device) for key, one in given.items()}


def measure_pictures(name: str, device: torch.device, budget_s: float) -> dict:
    """Milliseconds of each kind of call, by both in turns, over the same weights. Raises KeyError for other names."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    stock, size = build_pictures(name, device, dtype), MODELS[name][3]
    models = {"stock": stock, "accel": accel.optimize(beside(stock))}
    several = [(size[0] - 2 * (n % 4 * size[0] // 10), size[1] - 2 * (n // 4 * size[1] // 10)) for n in range(SEVERAL)]
    calls = {
        "one picture, first token": (picture_prompt(stock, [size]), 1),
        f"one picture, {NEW} tokens": (picture_prompt(stock, [size]), NEW),
        f"{SEVERAL} pictures, first token": (picture_prompt(stock, several), 1),
    }
    found: dict[str, dict] = {}
    for kind, (given, new) in calls.items():
        how = {**given, "max_new_tokens": new, "do_sample": False}
        ways = {way: same_call(partial(model.generate, **how)) for way, model in models.items()}
        times = compare_times(ways, device, budget_s=budget_s, calls_before=CALLS)
        found[kind] = {way: one.to_dict() for way, one in times.items()}
    first, all_of_them = (found[kind] for kind in list(calls)[:2])
    step = {way: (all_of_them[way]["median_ms"] - first[way]["median_ms"]) / (NEW - 1) for way in models}
    found["a token behind it"] = {way: {"median_ms": round(ms, 3)} for way, ms in step.items()}
    return {"name": name, "pictures": found} | reported(models["accel"])
