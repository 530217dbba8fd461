"""Vision transformers over batches of images: stock, torch.compile and accel, in images a second."""

import copy
from functools import partial
from typing import Any

import torch

import accel
from accel.bench.encoders.texts import LARGE, Encoder, build_encoder
from accel.bench.llm.models import beside
from accel.bench.results import reported
from accel.bench.timing import compare_times, same_call
from accel.comparison import relative_rms

SO400M = {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16, "intermediate_size": 4304}
_TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32}
VISION = {
    "siglip-so400m": Encoder("SiglipVisionModel", "SiglipVisionConfig", SO400M | {"image_size": 384, "patch_size": 14}),
    "clip-l": Encoder("CLIPVisionModel", "CLIPVisionConfig", LARGE | {"image_size": 224, "patch_size": 14}),
    "dinov3-l": Encoder("DINOv3ViTModel", "DINOv3ViTConfig", LARGE | {"image_size": 224, "num_register_tokens": 4}),
    "vit-base": Encoder("ViTModel", "ViTConfig", {}),
    "tiny-vit": Encoder("ViTModel", "ViTConfig", _TINY | {"patch_size": 16}),
}
CALLS = 5  # of a shape before it is timed


def measure_vision(name: str, device: torch.device, batches: list[int], compiled: bool, budget_s: float) -> dict:
    """Milliseconds a batch, by each way in turns, over one set of weights. errors: in bf16, from float32's."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    stock = build_encoder(VISION[name], device, dtype)
    fast: Any = accel.optimize(beside(stock))
    models: dict[str, Any] = {"stock": stock, "accel": fast}
    if compiled:
        models["compile"] = copy.deepcopy(stock)
        models["compile"].forward = torch.compile(models["compile"].forward)
    side, rows = stock.config.image_size, []
    with torch.inference_mode():
        for batch in batches:
            pixels = torch.randn(batch, 3, side, side, device=device, dtype=dtype)

            def run(model: Any, pixels: torch.Tensor = pixels) -> torch.Tensor:
                return model(pixel_values=pixels).last_hidden_state

            errors = {}
            if batch == min(batches):
                exact = run(copy.deepcopy(stock).float(), pixels.float())
                errors = {way: round(relative_rms(run(model).float(), exact), 6) for way, model in models.items()}
            ways = {way: same_call(partial(run, model)) for way, model in models.items()}
            times = compare_times(ways, device, budget_s=budget_s, calls_before=CALLS)
            found = {way: t.to_dict() | {"images_s": round(1e3 * batch / t.median_ms, 1)} for way, t in times.items()}
            rows.append({"batch": batch, "ways": found, "errors": errors})
    return {"name": name, "batches": rows} | reported(fast)
