"""What ranks are told to do with diffusion models, and what they tell of it. Run by `support.ranks.RankPool`."""

import copy
import pickle
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import accel
from accel.errors import Refused
from support.diffusion import tiny_models
from support.diffusion.drawing import shipped

PROMPT, STEPS = "a handwritten seven", 4


class Rows:
    """Around the forward beneath, what a rank computes: how many rows each call has."""

    def __init__(self, inner: Any):
        self.inner, self.rows = inner, []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.rows.append(len(args[0] if args else kwargs.get("sample", kwargs.get("hidden_states"))))
        return self.inner(*args, **kwargs)


def counted(model: Any) -> list[int]:
    """Filled with the rows of each call that this rank computes."""
    forward = vars(model)["forward"]
    forward.inner = Rows(forward.inner)
    return forward.inner.rows


def ready() -> None:
    """Imports what others need, which takes a busy machine as long as all of them."""
    from diffusers import AutoencoderKL, StableDiffusion3Pipeline, StableDiffusionPipeline  # noqa: F401


def drawn(pipe: Any, seed: int = 0, **given: Any) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    given = {"num_inference_steps": STEPS, "guidance_scale": 4.0} | given
    return pipe(PROMPT, generator=generator, output_type="np", **given).images


def refusal(function: Any, *args: Any, **kwargs: Any) -> str:
    """What it is refused with."""
    try:
        function(*args, **kwargs)
    except Refused as error:
        return str(error)
    return ""


def fallbacks(obj: Any) -> list[tuple[str, int]]:
    return [(reason, calls) for _, reason, calls in accel.report(obj).fallbacks]


def draw(name: str, model: str) -> dict[str, Any]:
    """Images of a shipped pipeline, by stock in this process alone and by the ranks; and what is refused."""
    pipe = shipped(name=name)
    found = {
        "stock": drawn(pipe),
        "alone": drawn(pipe, guidance_scale=1.0),
        "three": drawn(pipe, num_images_per_prompt=3),
    }
    state = {key: value.clone() for key, value in getattr(pipe, model).state_dict().items()}
    assert accel.optimize(pipe, cpu="fuse", parallel="guidance") is pipe
    found["site"] = next(
        row for row in accel.report(pipe).sites if row[1] == "guidance parallel" and row[2] == "patched"
    )
    rows = counted(getattr(pipe, model))
    found["ours"], found["rows"], found["told"] = drawn(pipe), list(rows), fallbacks(pipe)
    rows.clear()
    found["three ours"], found["three rows"] = drawn(pipe, num_images_per_prompt=3), list(rows)
    found["three told"] = fallbacks(pipe)
    rows.clear()
    found["alone ours"], found["alone rows"] = drawn(pipe, guidance_scale=1.0), list(rows)
    found["alone told"] = fallbacks(pipe)
    rows.clear()
    found["refused"] = refusal(drawn, pipe, dist.get_rank())
    found["refused rows"] = list(rows)
    found["again"] = drawn(pipe)
    accel.restore(pipe)
    found["restored"] = "forward" not in vars(getattr(pipe, model)) and np.array_equal(drawn(pipe), found["stock"])
    found["weights"] = all(torch.equal(value, state[key]) for key, value in getattr(pipe, model).state_dict().items())
    return found


def cached() -> dict[str, Any]:
    """With the step cache: by one process, and by the ranks."""
    pipe = shipped()
    found = {"stock": drawn(pipe)}
    found["one process"] = drawn(accel.optimize(pipe, cpu="fuse", step_cache=2))
    accel.optimize(pipe, cpu="fuse", step_cache=2, parallel="guidance")
    rows = counted(pipe.unet)
    return found | {"ours": drawn(pipe), "rows": rows, "told": fallbacks(pipe)}


@torch.no_grad()
def adapted() -> dict[str, Any]:
    """A LoRA that is loaded after optimize, on all ranks."""
    from peft import LoraConfig

    stock = tiny_models.make_unet()
    given = tiny_models.unet_inputs(stock)
    ours = accel.optimize(copy.deepcopy(stock), cpu="fuse", parallel="guidance")
    before, rows = stock(**given)[0], counted(ours)
    ours(**given)
    for model in (stock, ours):
        torch.manual_seed(0)
        model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    wanted = stock(**given)[0]
    off, by = (float((one - wanted).abs().max()) for one in (ours(**given)[0], before))
    return {"off": off, "by the adapter": by, "rows": rows}


def verified() -> tuple[bool, list[int], float]:
    """Whether it passes, rows of each call that is optimized, and the largest error."""
    unet = accel.optimize(tiny_models.make_unet(), cpu="fuse", parallel="guidance")
    rows = counted(unet)
    quality = accel.verify(unet)
    return quality.passed, rows, quality.max_error


def noise_between_steps() -> dict[str, Any]:
    """Equal latents, and schedulers that draw noise: by one generator, or by each rank's own."""
    from diffusers import EulerAncestralDiscreteScheduler

    pipe = shipped()
    pipe.scheduler = EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config)
    wanted = drawn(pipe)
    accel.optimize(pipe.unet, cpu="fuse", parallel="guidance")  # without a pipeline: every call is looked at
    found = {"wanted": wanted, "ours": drawn(pipe)}
    accel.optimize(pipe, cpu="fuse", parallel="guidance")
    rows = counted(pipe.unet)
    latents = torch.randn(1, pipe.unet.config.in_channels, 8, 8, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(dist.get_rank())
    call = {"latents": latents, "generator": generator, "num_inference_steps": STEPS, "height": 64, "width": 64}
    return found | {"refused": refusal(pipe, PROMPT, **call), "rows": list(rows)}


@torch.no_grad()
def unets() -> dict[str, Any]:
    """Errors of a UNet's calls of many kinds, with how many rows this rank has computed, and what it told."""
    found = {}
    for name, batch, more in (
        ("sd15", 2, {}),
        ("sdxl", 2, {}),
        ("sd15", 4, {"cross_attention_kwargs": {"scale": 0.5}}),
        ("sd15", 2, {"timestep": 11, "return_dict": False}),
        ("sd15", 2, {"timestep": torch.tensor([3, 12])}),
        ("sd15", 2, {"encoder_attention_mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3])}),
        ("sd15", 2, {"residuals": True}),
    ):
        stock = tiny_models.make_unet(name)
        given = tiny_models.unet_inputs(stock, batch) | more
        if given.pop("residuals", False):
            given |= residuals(stock, given)
        ours = accel.optimize(copy.deepcopy(stock), cpu="fuse", parallel="guidance")
        rows = counted(ours)
        wanted = stock(**given)[0]
        off = max(float((ours(**given)[0] - wanted).abs().max()) for _ in range(2))
        found[f"{name} {batch} {sorted(more)}"] = off, rows, fallbacks(ours)
    return found


def residuals(unet: Any, given: dict) -> dict[str, Any]:
    """As a ControlNet gives them, one of them for all rows."""
    shapes = []

    def note(module: Any, args: tuple, output: Any) -> None:
        shapes.extend(tuple(one.shape) for one in output[1])

    handles = [block.register_forward_hook(note) for block in unet.down_blocks]
    handles.append(unet.conv_in.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape))))
    handles.append(
        unet.mid_block.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    )
    unet(**given)
    for handle in handles:
        handle.remove()
    made = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes)]
    made[1] = made[1][:1]
    return {"down_block_additional_residuals": tuple(made[:-1]), "mid_block_additional_residual": made[-1]}


@torch.no_grad()
def what_stays_whole() -> dict[str, Any]:
    """Models and calls whose rows cannot be divided: errors, rows and reasons."""
    found = {}
    for name in ("rows that depend on each other", "a tensor of another length", "hooks inside", "gradients", "odd"):
        stock = tiny_models.make_unet()
        given = tiny_models.unet_inputs(stock, 3 if name == "odd" else 2)
        if name.startswith("rows"):
            stock.conv_norm_out = torch.nn.BatchNorm2d(
                stock.conv_norm_out.num_channels, track_running_stats=False
            ).eval()
        if name.startswith("a tensor"):
            given["cross_attention_kwargs"] = {"unused": torch.ones(3)}
        ours = accel.optimize(copy.deepcopy(stock), cpu="fuse", parallel="guidance")
        seen = []
        if name.startswith("hooks"):
            ours.mid_block.register_forward_hook(lambda module, args, output, seen=seen: seen.append(len(output)))
        rows = counted(ours)
        with torch.set_grad_enabled(name == "gradients"):
            off = max(float((ours(**given)[0] - stock(**given)[0]).detach().abs().max()) for _ in range(2))
        found[name] = off, rows, fallbacks(ours), seen
    return found


@torch.no_grad()
def what_is_refused() -> dict[str, str]:
    """By each rank, where they do not do the same."""
    rank, found = dist.get_rank(), {}
    model = tiny_models.make_unet()
    found["options"] = refusal(accel.optimize, copy.deepcopy(model), cpu="fuse", parallel=("guidance", "tiles")[rank])
    other = tiny_models.make_unet(block_out_channels=(16, 32) if rank else (8, 16), norm_num_groups=4)
    found["model"] = refusal(accel.optimize, other, cpu="fuse", parallel="guidance")
    found["untouched"] = str("forward" in vars(other))
    ours = accel.optimize(copy.deepcopy(model), cpu="fuse", parallel="guidance")
    given = tiny_models.unet_inputs(model)
    found["shapes"] = refusal(ours, **tiny_models.unet_inputs(model, 2 + 2 * rank))
    found["timestep"] = refusal(ours, **given | {"timestep": torch.tensor(17 + rank)})
    found["prompt"] = refusal(
        ours, **given | {"encoder_hidden_states": tiny_models.unet_inputs(model, seed=rank)["encoder_hidden_states"]}
    )
    changed = copy.deepcopy(model)
    changed.conv_in.weight *= 1 + rank
    found["weights"] = refusal(accel.optimize(changed, cpu="fuse", parallel="guidance"), **given)
    return found


@torch.no_grad()
def copies() -> dict[str, Any]:
    """Deep copies and pickles of an optimized model divide their rows too, and models that run stock on a CPU."""
    stock = tiny_models.make_unet()
    given = tiny_models.unet_inputs(stock)
    ours = accel.optimize(copy.deepcopy(stock), cpu="fuse", parallel="guidance")
    wanted, found = stock(**given)[0], {}
    resting = accel.optimize(copy.deepcopy(stock), cpu="auto", parallel="guidance")
    makes = {"copy": copy.deepcopy(ours), "pickle": pickle.loads(pickle.dumps(ours)), "stock": resting}
    for name, made in makes.items():
        rows = counted(made)
        found[name] = float((made(**given)[0] - wanted).abs().max()), rows
    return found


@torch.no_grad()
def tiles() -> dict[str, Any]:
    """Autoencoders with tiling on: errors, tiles that this rank has decoded of how many, and what it told."""
    found = {}
    for name, size, changes in (
        ("odd", (1, 4, 21, 19), {}),
        ("batch", (2, 4, 16, 24), {}),
        ("row", (1, 4, 8, 30), {}),
        ("small", (1, 4, 8, 8), {}),
        ("overlap", (1, 4, 17, 17), {"tile_overlap_factor": 0.5}),
    ):
        stock = tiny_models.make_vae()
        stock.enable_tiling()
        vars(stock).update(changes)
        ours = accel.optimize(copy.deepcopy(stock), cpu="fuse", parallel="tiles")
        alone = accel.optimize(copy.deepcopy(stock), cpu="fuse", parallel="tiles")
        vars(alone).pop("tiled_decode")  # what one process decodes with the same fused blocks
        counts = {"ours": [], "all": []}
        for model, seen in ((ours, counts["ours"]), (alone, counts["all"])):
            guard = vars(model.decoder)["forward"]
            guard.inner = Rows(guard.inner)
            seen.append(guard.inner.rows)
        latents = torch.randn(size, generator=torch.Generator().manual_seed(0))
        wanted, one, got = stock.decode(latents).sample, alone.decode(latents).sample, ours.decode(latents).sample
        off = float((got - wanted).abs().max() / wanted.abs().max())
        found[name] = off, torch.equal(got, one), len(counts["ours"][0]), len(counts["all"][0]), fallbacks(ours)
        if name == "odd":
            found["refused"] = refusal(
                ours.decode, torch.randn(size, generator=torch.Generator().manual_seed(dist.get_rank()))
            )
            ours = accel.restore(ours)
            found["restored"] = "tiled_decode" not in vars(ours) and torch.equal(ours.decode(latents).sample, wanted)
    return found
