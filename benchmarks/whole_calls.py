"""Whole pipeline calls, prompt in and PIL image out: stock, accel, torch.compile, at real sizes with random weights.

    python benchmarks/whole_calls.py sd15 sdxl [--compile] [--out FOLDER]

One process a run; images compared first, then medians of wall-clock seconds, peak memory, and seconds of the first
calls, in which accel compiles kernels and captures graphs. `cache` times the lossy step cache on SD1.5.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch

import accel
from accel.bench import configs
from accel.bench.machine import commit, machine, now, slug
from accel.bench.memory import peak_mb, release
from accel.bench.timing import seconds
from accel.verification.metrics import compare

TOKENIZER = Path(__file__).parents[1] / "examples" / "models" / "tiny-sd-digits" / "tokenizer"
PROMPT, CALLS = "a handwritten seven", 5
SCHEDULERS = {
    "sd15": ("PNDMScheduler", "DDIMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler"),
    "sdxl": ("EulerDiscreteScheduler",),
    "cache": ("DDIMScheduler",),
}
STEPS = {"sd15": 50, "sdxl": 30, "cache": 50}
INTERVALS = (2, 3, 5)


def text_config(**sizes):
    from transformers import CLIPTextConfig

    return CLIPTextConfig(**{"num_hidden_layers": 12, "num_attention_heads": 12} | sizes)


@torch.no_grad()
def build(name: str, device: torch.device, dtype: torch.dtype):
    import diffusers
    from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

    torch.manual_seed(0)
    tokenizer = CLIPTokenizer.from_pretrained(TOKENIZER)
    scheduler = diffusers.PNDMScheduler(  # as the published pipelines have it
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", skip_prk_steps=True, steps_offset=1
    )
    with torch.device(device):
        text = CLIPTextModel(text_config(hidden_size=768, intermediate_size=3072))
        if name == "sdxl":
            large = text_config(
                hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20,
                projection_dim=1280, hidden_act="gelu",
            )  # fmt: skip
            pipe = diffusers.StableDiffusionXLPipeline(
                diffusers.AutoencoderKL(**configs.SD_VAE | {"sample_size": 1024, "force_upcast": True}),
                text,
                CLIPTextModelWithProjection(large),
                tokenizer,
                tokenizer,
                diffusers.UNet2DConditionModel(**configs.SDXL_UNET),
                scheduler,
            )
        else:
            vae, unet = diffusers.AutoencoderKL(**configs.SD_VAE), diffusers.UNet2DConditionModel(**configs.SD15_UNET)
            pipe = diffusers.StableDiffusionPipeline(
                vae, text, tokenizer, unet, scheduler, None, None, requires_safety_checker=False
            )
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    pipe.to(device, dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def timed(pipe, steps: int, device: torch.device, calls: int = CALLS) -> dict:
    """First calls, then the median of later ones; the image of the last."""
    images = []

    def call():
        generator = torch.Generator(device).manual_seed(0)
        images[:] = pipe(PROMPT, num_inference_steps=steps, generator=generator).images

    first = [round(seconds(call, device), 3) for _ in range(3)]
    later = [seconds(call, device) for _ in range(calls)]
    memory = peak_mb(device, call, call)
    return {"s": round(statistics.median(later), 4), "first_s": first, "peak_memory_mb": memory, "image": images[0]}


def lossless(name: str, device: torch.device, dtype: torch.dtype, compiled: bool) -> dict:
    import diffusers

    pipe, result = build(name, device, dtype), {"schedulers": {}}
    config, steps = pipe.scheduler.config, STEPS[name]
    kinds = [getattr(diffusers, kind) for kind in SCHEDULERS[name]]
    stock = {}
    for kind in kinds:
        pipe.scheduler = kind.from_config(config, clip_sample=False)
        stock[kind] = timed(pipe, steps, device, 3)
    other = {}
    if compiled:
        pipe.scheduler = kinds[0].from_config(config)
        for module in (pipe.unet, pipe.vae.decoder):
            module.forward = torch.compile(module.forward, mode="reduce-overhead" if module is pipe.unet else None)
        other[kinds[0]] = timed(pipe, steps, device, 3)
        del pipe.unet.forward, pipe.vae.decoder.forward
        torch.compiler.reset()
    release(device)
    result["optimize_s"] = round(seconds(lambda: accel.optimize(pipe), device), 3)
    for kind in kinds:
        pipe.scheduler = kind.from_config(config, clip_sample=False)
        ours = timed(pipe, steps, device)
        quality = compare(stock[kind].pop("image"), ours.pop("image"))
        row = {"stock": stock[kind], "accel": ours, "psnr_db": quality.psnr_db, "max_error": quality.max_error}
        if kind in other:
            row["compile"] = {key: value for key, value in other[kind].items() if key != "image"}
        result["schedulers"][kind.__name__] = row
        print(name, kind.__name__, json.dumps(row), flush=True)
    report = accel.report(pipe).to_dict()
    return result | {"graphs": report["graphs"], "fallbacks": report["fallbacks"]}


def cached(name: str, device: torch.device, dtype: torch.dtype) -> dict:
    """Seconds of a call with the step cache. What it loses only a trained model shows: docs/measurements/images.md."""
    pipe, rows = build(name, device, dtype), {}
    rows["stock"] = timed(pipe, STEPS[name], device, 3)
    for interval in (None, *INTERVALS):
        accel.optimize(pipe, step_cache=interval)
        rows[f"accel, interval {interval}" if interval else "accel"] = timed(pipe, STEPS[name], device)
    for key, row in rows.items():
        del row["image"]
        print(name, key, json.dumps(row), flush=True)
    return {"step_cache": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+", choices=list(SCHEDULERS))
    parser.add_argument("--compile", action="store_true", help="time torch.compile too, minutes a case")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args()
    device, dtype = torch.device("cuda"), torch.float16
    for name in given.cases:
        run = cached if name == "cache" else lossless
        about = f"{name}: {STEPS[name]} steps, one image with guidance, PIL out; random weights, {dtype}"
        result = {"case": f"{name}-call", "about": about, "date": now(), "commit": commit(), "machine": machine(device)}
        result |= run(name, device, dtype, *((given.compile,) if run is lossless else ()))
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / f"{slug(device)}-{name}-call.json").write_text(json.dumps(result, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
