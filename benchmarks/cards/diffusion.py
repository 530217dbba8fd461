"""Diffusion on several cards of one host: SDXL with its guidance divided among ranks, Flux along its sequence.

    torchrun --nproc-per-node 2 -m benchmarks cards-diffusion [--cases flux --ring]

Real sizes, random weights, one process a card; on a CPU tiny ones. Every result is compared before it is timed: with
stock on one card, and between the ranks, to the bit. Of SDXL, 30 steps, whole calls and the loop alone; of Flux-dev at
1024 px one forward, by diffusers' `ContextParallelConfig(ulysses_degree=N)`. Each rank is timed until all of them are
done. Rank 0 writes what is known as soon as it is.
"""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import accel
from accel.bench.diffusion.cases import CASES
from accel.bench.diffusion.configs import whole_config
from accel.bench.diffusion.inputs import Draw, Sizes, flux_inputs
from accel.bench.machine import slug
from accel.bench.memory import release
from accel.bench.processes import ranks
from accel.bench.scripts.pipelines import PROMPT, TINY_FLUX, flux_transformer, sdxl
from accel.bench.scripts.script import Size
from accel.comparison import relative_rms
from accel.tolerances import LOGITS, bound
from accel.verification.metrics import compare
from benchmarks.cards.ranks import alike, together, together_s
from benchmarks.models.launches import profiled, summary
from benchmarks.study import RESULTS, TOY, Study, words

TIMEOUT = timedelta(seconds=90)  # for a rank that does not come
CALLS, FORWARDS, WARM = 4, 8, 4
STEPS = 4 if TOY else 30
LEAST_DB = 30.0  # of images by other kernels: what float16 leaves after 30 steps is about 60
OPTIONS: dict[str, Any] = {"cpu": "fuse"} if TOY else {}
AIMS = {"sdxl": "loop and call in at most 1/1.8 of one card's", "flux": "at most 72 ms on 2 cards, 42 ms on 4"}


def of_sdxl(device: torch.device, record: Study) -> None:
    """One card's accel and N cards', each after it has drawn the image that stock draws."""
    import diffusers

    pipe = sdxl(Size(device, TOY), force_upcast=True)
    pipe.scheduler = diffusers.EulerDiscreteScheduler.from_config(pipe.scheduler.config)

    def draw(output_type: str = "np") -> Any:
        generator = torch.Generator(device).manual_seed(0)
        return pipe(PROMPT, num_inference_steps=STEPS, generator=generator, output_type=output_type).images

    def timed(calls: int = CALLS) -> dict[str, float]:
        return {"call_s": together_s(draw, device, calls), "loop_s": together_s(lambda: draw("latent"), device, calls)}

    def first_calls() -> tuple[Any, dict]:
        """The image of the last, and seconds of calls in which kernels are compiled and chosen, graphs captured."""
        images: list[Any] = []
        first = [round(together(lambda: images.append(draw()), device), 3) for _ in range(WARM)]
        return images[-1], {"first_s": first}

    wanted = draw()
    record.keep_rows({"stock, 1 card": timed(2)})
    accel.optimize(pipe, **OPTIONS)
    image, first = first_calls()
    check_image(wanted, image, "accel on one card")
    alone = timed()
    record.keep_rows({"accel, 1 card": alone | first})
    accel.optimize(pipe, parallel="guidance", **OPTIONS)
    image, first = first_calls()
    quality = check_image(wanted, image, "accel on all cards")
    # Decoders choose their kernels on each rank by its own measurements; what is decoded is the same to the bit.
    assert alike(draw("latent")), "ranks came to different latents"
    split = timed()
    report = accel.report(pipe).to_dict()
    whole = [row for row in report["fallbacks"] if "computed whole" in row["reason"]]
    assert not whole, whole
    record.keep_rows({
        f"accel, guidance parallel, {dist.get_world_size()} cards": split | first | quality,
        "times one card": {name: round(alone[name] / split[name], 3) for name in split},
        "graphs": report["graphs"],
        "fallbacks": report["fallbacks"],
    })  # fmt: skip
    accel.restore(pipe)
    assert "forward" not in vars(pipe.unet)


def check_image(wanted: Any, got: Any, who: str) -> dict[str, float]:
    quality = compare(wanted[0], got[0])
    assert quality.finite and quality.psnr_db >= LEAST_DB, f"{who}: {quality}"
    return {"psnr_db": round(quality.psnr_db, 2), "max_error": quality.max_error}


def of_flux(device: torch.device, record: Study, ring: bool) -> None:
    """One forward: stock and accel on one card, then both along the sequence, in the same process."""
    from diffusers import ContextParallelConfig

    if TOY:
        torch.accelerator.device_count = lambda: 1  # by which diffusers divides; a CPU counts none
        model = flux_transformer(Size(device, TOY))
        given = flux_inputs(
            Draw(whole_config("FluxTransformer2DModel", TINY_FLUX), Sizes(1, 16, 16, 16), device, torch.float32)
        )[0]
    else:
        case = CASES["flux"]
        model, given = case.build(device, torch.bfloat16), case.inputs(device, torch.bfloat16)[0]
    given |= {"return_dict": False}  # diffusers gathers tensors and tuples alone

    def call() -> torch.Tensor:
        return model(**given)[0]

    def timed(who: str, warm: int = WARM) -> dict[str, Any]:
        first = [round(1000 * together(call, device), 2) for _ in range(warm)]
        got = call()
        off = relative_rms(got, wanted)
        assert off <= bound(LOGITS, got.dtype), f"{who}: off by {off:.1e}"
        if getattr(model, "_parallel_config", None) is not None:
            assert alike(got.float()), f"{who}: ranks differ"
        return {"ms": round(1000 * together_s(call, device, FORWARDS), 3), "first_ms": first, "off": off}

    wanted = call()
    record.keep_rows({"stock, 1 card": timed("stock on one card")})
    accel.optimize(model, **OPTIONS)
    record.keep_rows({"accel, 1 card": timed("accel on one card", 12)})
    accel.restore(model)
    release(device)
    cards = dist.get_world_size()
    if ring:
        model.set_attention_backend("_native_cudnn")
    config = ContextParallelConfig(**{"ring_degree" if ring else "ulysses_degree": cards})
    model.enable_parallelism(config=config)
    record.keep_rows({f"stock, {cards} cards": timed("stock along the sequence")})
    if not ring and device.type == "cuda":
        model.set_attention_backend("_native_cudnn")
        record.keep_rows({f"stock, cuDNN attention, {cards} cards": timed("stock along the sequence, cuDNN")})
        model.set_attention_backend("native")
    accel.optimize(model, **OPTIONS)
    ours = timed("accel along the sequence", 12)
    report = accel.report(model).to_dict()
    fallbacks = report["fallbacks"]
    blocks = [row for row in fallbacks if "blocks" in row["path"]]
    record.keep_rows({f"accel, {cards} cards": ours, "fallbacks": fallbacks, "graphs": report["graphs"]})
    record.keep_rows({"profile of a forward": summary(profiled(lambda _: call(), device), ours["ms"])})
    assert not blocks, f"blocks run stock: {blocks}"
    accel.restore(model)


def main(cases: str = "sdxl,flux", out: Path = RESULTS, ring: bool = False) -> None:
    """out: a folder. ring: `ring_degree=N`, with cuDNN's attention."""
    runs: dict[str, Callable[[torch.device, Study], None]] = {"sdxl": of_sdxl, "flux": partial(of_flux, ring=ring)}
    failed: list[dict] = []
    with ranks(timeout=TIMEOUT) as device:
        for name in words(cases):
            cards = dist.get_world_size()
            path = out / f"{slug(device)}-{cards}x-{name}{'-ring' * ring}{'-tiny' * TOY}.json"
            record = Study(f"{name}-many-cards", path, f"{name}, random weights, {cards} ranks of one host")
            record.about["aim"] = AIMS[name]
            with record.attempt(case=name):  # the next case may go all the same, where all ranks failed alike
                runs[name](device, record)
            failed += record.failed
            release(device)
    if failed:
        raise SystemExit(f"failed: {failed}")
