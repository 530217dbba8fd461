"""Pipelines of transformers on a GPU and on several, and of videos."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import accel
from accel.diffusion.blocks.video_resnet import VideoResnetForward
from support.diffusion.drawing import draw
from support.precision import off
from support.video.tiny_videos import VIDEOS, latents, make_video

FOLDER = Path(__file__).parents[3] / "examples" / "models" / "tiny-dit-digits"


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=str)
def pipe(request):
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(FOLDER, torch_dtype=request.param)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to("cuda")


def rms(difference):
    return np.sqrt((difference.astype(np.float64) ** 2).mean())


def read(digits, images):
    return digits.read_digits([Image.fromarray((image * 255).round().astype(np.uint8)) for image in images])


def test_digits_can_be_read_and_go_through_graphs(pipe):
    from support.diffusion import digits

    exact = draw(copy.deepcopy(pipe).to(torch.float32), digits.PROMPTS, steps=20)
    stock = draw(pipe, digits.PROMPTS, steps=20)
    assert sum(np.equal(read(digits, stock), range(10))) >= 9
    accel.optimize(pipe, graphs=True)
    for _ in range(2):
        ours = draw(pipe, digits.PROMPTS, steps=20)
        assert sum(np.equal(read(digits, ours), range(10))) >= 9
        assert ours.shape == stock.shape and rms(ours - exact) <= 2 * rms(stock - exact)
    models = {row["path"] for row in accel.report(pipe).graphs if row["status"] == "graph"}
    assert models >= {"transformer", "text_encoder", "text_encoder_2", "text_encoder_3"}
    accel.restore(pipe)
    assert np.array_equal(draw(pipe, digits.PROMPTS, steps=20), stock)


def test_verify_passes(pipe):
    quality = accel.verify(accel.optimize(pipe, graphs=True), "a handwritten seven", num_inference_steps=8)
    assert quality.passed, str(quality)
    encoders = {"text_encoder", "text_encoder_2", "text_encoder_3"}
    assert set(quality.parts) == {"transformer", "vae.decoder", *encoders}


ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "many_cards_diffusion.py"

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def measured(folder: Path, *arguments: str) -> list[dict]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    done = subprocess.run(
        [*command, "--tiny", "--out", str(folder), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


def test_guidance_runs_on_two_cards_by_graphs(tmp_path):
    (found,) = measured(tmp_path, "sdxl")
    assert found["times one card"]["loop_s"] > 0 and "failed" not in found
    halves = [row for row in found["graphs"] if row["path"] == "unet" and row["inputs"].startswith("1x")]
    assert any(row["status"] == "graph" for row in halves), found["graphs"]


@pytest.mark.parametrize("way", [(), ("--ring",)], ids=["ulysses", "ring"])
def test_the_whole_forward_is_one_graph_with_its_collectives(tmp_path, way):
    (found,) = measured(tmp_path, "flux", *way)
    assert found["accel, 2 cards"]["ms"] > 0 and "failed" not in found
    assert not found["fallbacks"]
    assert [row["status"] for row in found["graphs"]] == ["graph"], found["graphs"]
    launched = {kernel["name"] for kernel in found["profile of a forward"]["kernels"]}
    through_rooms = "exchange_kernel" in launched and not any("SendRecv" in name for name in launched)
    assert through_rooms == (way == ()), launched


def test_heads_are_exchanged_through_rooms_as_by_nccl(tmp_path):
    script, out = SCRIPT.with_name("exchanges_over_cards.py"), tmp_path / "found.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run([*command, str(out)], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads(out.read_text())  # it has compared every number
    assert len(found["rows"]) == 3 and found["one after another"] == {"of": 200, "wrong": 0}


@pytest.fixture(params=VIDEOS)
def family(request):
    return request.param


def decode(model, z):
    return model.decode(z.to(model.dtype)).sample


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_error_is_at_most_twice_stocks(family, dtype, exact):
    stock = make_video(family).cuda().to(dtype)
    model, truth = copy.deepcopy(stock), copy.deepcopy(stock).double()
    accel.optimize(model)
    assert any(isinstance(vars(m).get("forward"), VideoResnetForward) for m in model.modules())
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv3d) and m.kernel_size != m.stride]
    assert all(m.weight.is_contiguous(memory_format=torch.channels_last_3d) for m in convolutions)
    for frames, height, width in ((3, 4, 5), (1, 8, 6), (5, 3, 3)):
        z = latents(model, frames, height, width).cuda().to(dtype)
        wanted = decode(truth, z)
        ours, theirs = off(decode(model, z), wanted), off(decode(stock, z), wanted)
        assert ours <= 2 * theirs + 1e-6
        video = torch.randn(1, 3, 9, 32, 32, device="cuda", dtype=dtype)
        encoded = [one.encode(video.to(one.dtype)).latent_dist.mean for one in (model, stock, truth)]
        assert off(encoded[0], encoded[2]) <= 2 * off(encoded[1], encoded[2]) + 1e-6
    assert not accel.report(model).fallbacks
