"""Diffusion on several cards of one host: SDXL with its guidance divided among ranks, Flux along its sequence.

    torchrun --nproc-per-node 2 benchmarks/many_cards_diffusion.py [sdxl flux] [--compile] [--ring] [--tiny]

Real sizes, random weights, one process a card. Every result is compared before it is timed: with stock on one card, and
between the ranks, to the bit. Of SDXL, 30 steps, whole calls and the loop alone; of Flux-dev at 1024 px one forward, by
diffusers' `ContextParallelConfig(ulysses_degree=N)`. Each rank is timed until all of them are done. `--compile` times
torch.compile of Flux's blocks too, `--ring` takes `ring_degree=N` instead, with cuDNN's attention. `--tiny` goes the
same way with tiny models, on a CPU by gloo. Rank 0 writes what is known as soon as it is.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from call_pipelines import unet_pipeline
from transformer_profile import kernels, summary

import accel
from accel.bench.case import Case
from accel.bench.compiled import compile_blocks
from accel.bench.dit.published import PUBLISHED
from accel.bench.dit.weights import random_model
from accel.bench.machine import commit, machine, now, slug
from accel.bench.memory import release
from accel.bench.timing import seconds
from accel.errors import told
from accel.tolerances import LOGITS, bound
from accel.verification.metrics import compare

TIMEOUT = timedelta(seconds=90)  # for a rank that does not come
CALLS, FORWARDS, WARM = 4, 8, 4
STEPS = {False: 30, True: 4}  # of SDXL; tiny
LEAST_DB = 30.0  # of images by other kernels: what float16 leaves after 30 steps is about 60
AIMS = {"sdxl": "loop and call in at most 1/1.8 of one card's", "flux": "at most 72 ms on 2 cards, 42 ms on 4"}
TINY_FLUX = dict(
    in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=64, num_attention_heads=4,
    joint_attention_dim=32, pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=(16, 24, 24),
)  # fmt: skip


def together(function: Callable[[], object], device: torch.device) -> float:
    """Seconds until all ranks are done; they begin at once."""
    dist.all_reduce(torch.zeros(1))
    taken = torch.tensor([seconds(function, device)], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def median(function: Callable[[], object], device: torch.device, calls: int) -> float:
    return round(statistics.median(together(function, device) for _ in range(calls)), 5)


def alike(numbers: Any) -> bool:
    """Whether all ranks hold the same bits."""
    own = blake2b(torch.as_tensor(numbers).cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, own)
    return len(set(digests)) == 1


def sdxl(device: torch.device, tiny: bool, keep: Callable[[dict], None]) -> None:
    """One card's accel and N cards', each after it has drawn the image that stock draws."""
    import diffusers

    if tiny:
        folder = Path(__file__).parents[1] / "examples" / "models" / "tiny-sd-digits"
        pipe = diffusers.DiffusionPipeline.from_pretrained(folder).to(device)
        given: dict[str, Any] = {"prompt": "a handwritten seven"}
    else:
        pipe, given = unet_pipeline("sdxl", device, torch.float16)
    pipe.scheduler = diffusers.EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    pipe.set_progress_bar_config(disable=True)
    options: dict[str, Any] = {"cpu": "fuse"} if tiny else {}

    def draw(output_type: str = "np") -> Any:
        generator = torch.Generator(device).manual_seed(0)
        return pipe(**given, num_inference_steps=STEPS[tiny], generator=generator, output_type=output_type).images

    def timed(calls: int = CALLS) -> dict[str, float]:
        return {
            "call_s": median(draw, device, calls),
            "loop_s": median(lambda: draw("latent"), device, calls),
        }

    wanted = draw()
    keep({"stock, 1 card": timed(2)})
    one = first_calls(accel.optimize(pipe, **options), draw, device)
    check_image(wanted, one["image"], "accel on one card")
    alone = timed()
    keep({"accel, 1 card": alone | one["first"]})
    many = first_calls(accel.optimize(pipe, parallel="guidance", **options), draw, device)
    quality = check_image(wanted, many["image"], "accel on all cards")
    # Decoders choose their kernels on each rank by its own measurements; what is decoded is the same to the bit.
    assert alike(draw("latent")), "ranks came to different latents"
    split = timed()
    report = accel.report(pipe).to_dict()
    whole = [row for row in report["fallbacks"] if "computed whole" in row["reason"]]
    assert not whole, whole
    keep({
        f"accel, guidance parallel, {dist.get_world_size()} cards": split | many["first"] | quality,
        "times one card": {name: round(alone[name] / split[name], 3) for name in split},
        "graphs": report["graphs"],
        "fallbacks": report["fallbacks"],
    })  # fmt: skip
    accel.restore(pipe)
    assert "forward" not in vars(pipe.unet)


def first_calls(pipe: Any, draw: Callable, device: torch.device) -> dict:
    """Seconds of the calls in which kernels are compiled and chosen, and graphs captured; the image of the last."""
    images: list[Any] = []
    first = [round(together(lambda: images.append(draw()), device), 3) for _ in range(WARM)]
    return {"image": images[-1], "first": {"first_s": first}}


def check_image(wanted: Any, got: Any, who: str) -> dict[str, float]:
    quality = compare(wanted[0], got[0])
    assert quality.finite and quality.psnr_db >= LEAST_DB, f"{who}: {quality}"
    return {"psnr_db": round(quality.psnr_db, 2), "max_error": quality.max_error}


@torch.no_grad()
def flux(device: torch.device, tiny: bool, keep: Callable[[dict], None], compiler: bool, ring: bool) -> None:
    """One forward: stock and accel on one card, then both along the sequence, in the same process."""
    from diffusers import ContextParallelConfig

    published = next(one for one in PUBLISHED if one.name == "flux")
    if tiny:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        if device.type == "cpu":
            torch.accelerator.device_count = lambda: 1  # by which diffusers divides; a CPU counts none
        model, given = random_model("FluxTransformer2DModel", TINY_FLUX, device, dtype), tiny_inputs(device, dtype)
    else:
        case: Case = published.case()
        model, given = case.build(device, torch.bfloat16), case.inputs(device, torch.bfloat16)[0]
    given |= {"return_dict": False}  # diffusers gathers tensors and tuples alone
    options: dict[str, Any] = {"cpu": "fuse"} if tiny else {}

    def call() -> torch.Tensor:
        return model(**given)[0]

    def timed(wanted: torch.Tensor, who: str, warm: int = WARM) -> dict[str, float]:
        first = [round(1000 * together(call, device), 2) for _ in range(warm)]
        got = call()
        off = float((got.float() - wanted.float()).norm() / wanted.float().norm())
        assert off <= bound(LOGITS, got.dtype), f"{who}: off by {off:.1e}"
        if getattr(model, "_parallel_config", None) is not None:
            assert alike(got.float()), f"{who}: ranks differ"
        return {"ms": round(1000 * median(call, device, FORWARDS), 3), "first_ms": first, "off": off}  # type: ignore[dict-item]

    wanted = call()
    keep({"stock, 1 card": timed(wanted, "stock on one card")})
    accel.optimize(model, **options)
    keep({"accel, 1 card": timed(wanted, "accel on one card", 12)})
    accel.restore(model)
    release(device)
    cards = dist.get_world_size()
    if ring:
        model.set_attention_backend("_native_cudnn")
    config = ContextParallelConfig(**{"ring_degree" if ring else "ulysses_degree": cards})
    model.enable_parallelism(config=config)
    keep({f"stock, {cards} cards": timed(wanted, "stock along the sequence")})
    if not ring and device.type == "cuda":
        model.set_attention_backend("_native_cudnn")
        keep({f"stock, cuDNN attention, {cards} cards": timed(wanted, "stock along the sequence, cuDNN")})
        model.set_attention_backend("native")
    accel.optimize(model, **options)
    ours = timed(wanted, "accel along the sequence", 12)
    report = accel.report(model).to_dict()
    fallbacks = report["fallbacks"]
    blocks = [row for row in fallbacks if "blocks" in row["path"]]
    keep({f"accel, {cards} cards": ours, "fallbacks": fallbacks, "graphs": report["graphs"]})
    keep({"profile of a forward": summary(kernels(lambda _: call(), device), ours["ms"])})
    assert not blocks, f"blocks run stock: {blocks}"
    accel.restore(model)
    if compiler:
        compile_blocks(model)
        keep({f"torch.compile, {cards} cards": timed(wanted, "compiled along the sequence")})


def tiny_inputs(device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    return {
        "hidden_states": random(1, 64, 16), "encoder_hidden_states": random(1, 16, 32),
        "pooled_projections": random(1, 32), "timestep": torch.tensor([0.5], device=device, dtype=dtype),
        "img_ids": random(64, 3), "txt_ids": torch.zeros(16, 3, device=device, dtype=dtype),
        "guidance": torch.tensor([4.0], device=device, dtype=dtype),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=["sdxl", "flux"], help="sdxl, flux")
    parser.add_argument("--compile", action="store_true", help="time torch.compile of Flux's blocks too")
    parser.add_argument("--ring", action="store_true", help="Flux by ring attention")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on a CPU too")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=TIMEOUT)
    failed = []
    for name in options.cases:
        about = f"{name}, random weights, {dist.get_world_size()} ranks of one host{', tiny' * options.tiny}"
        result: dict[str, Any] = {"case": f"{name}-many-cards", "about": about, "aim": AIMS[name], "date": now()}
        result |= {"commit": commit(), "machine": machine(device)}
        path = (
            options.out
            / f"{slug(device)}-{dist.get_world_size()}x-{name}{'-ring' * options.ring}{'-tiny' * options.tiny}.json"
        )

        def keep(rows: dict, result: dict = result, path: Path = path) -> None:
            result |= rows
            if dist.get_rank() == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(result, indent=1) + "\n")
                print(path.stem, json.dumps(rows), flush=True)

        try:
            if name == "sdxl":
                sdxl(device, options.tiny, keep)
            else:
                flux(device, options.tiny, keep, options.compile, options.ring)
        except Exception as error:  # the next case may go all the same, where all ranks failed alike
            failed.append(name)
            keep({"failed": told(error)})
        release(device)
    dist.destroy_process_group()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
