"""The quality gate, the overflow guard and a user's folder on a GPU: through CUDA graphs, in half precision."""

import copy

import pytest
import torch

import accel
from accel.bench.diffusion import runner, subject
from accel.diffusion.blocks.resnet import ResnetForward
from support.diffusion.drawing import DIGITS, shipped

PROMPT = "a handwritten seven"


@pytest.fixture
def pipe():
    return shipped(torch.float32)


def graphs(obj):
    return {row["path"] for row in accel.report(obj).graphs if row["status"] == "graph"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_verify_passes_and_goes_through_graphs(pipe, dtype):
    accel.optimize(pipe.to("cuda", dtype), graphs=True)
    quality = accel.verify(pipe, PROMPT, num_inference_steps=8)
    assert quality.passed, str(quality)
    assert set(quality.parts) == {"unet", "vae.decoder", "text_encoder"}
    assert all(part.measure == "relative RMS from full precision" for part in quality.parts.values()), str(quality)
    assert graphs(pipe) == {"unet", "vae.decoder", "text_encoder"}  # of the models by themselves, captured since


def test_verify_names_what_is_wrong_in_a_graph(pipe, monkeypatch):
    accel.optimize(pipe.to("cuda", torch.float16), graphs=True)
    wrong = next(m for m in pipe.unet.modules() if type(vars(m).get("forward")) is ResnetForward).forward
    call = ResnetForward.__call__

    def spoiled(self, *args, **kwargs):
        result = call(self, *args, **kwargs)
        return 1.05 * result if self is wrong else result

    monkeypatch.setattr(ResnetForward, "__call__", spoiled)
    quality = accel.verify(pipe, PROMPT, num_inference_steps=4)
    assert not quality.passed and [name for name, part in quality.parts.items() if not part.passed] == ["unet"]


def test_generators_on_the_gpu_draw_the_same_and_stay_as_they_were(pipe):
    accel.optimize(pipe.to("cuda", torch.float16))
    generator = torch.Generator("cuda").manual_seed(3)
    before, state = generator.get_state(), torch.cuda.get_rng_state()
    assert accel.verify(pipe, PROMPT, num_inference_steps=4, generator=generator, eta=1.0).passed
    assert torch.equal(generator.get_state(), before) and torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_verify_under_offload(pipe, kind):
    pipe.to(torch.float16)
    getattr(pipe, kind)()
    quality = accel.verify(accel.optimize(pipe), PROMPT, num_inference_steps=4)
    assert quality.passed, str(quality)
    assert "judged by units of rounding" in quality.parts["unet"].note


@pytest.fixture
def loud_vae(tiny):
    """An autoencoder in float16 whose decoder overflows."""
    vae = tiny.vae()
    with torch.no_grad():
        vae.decoder.conv_in.weight *= 1.5e5
    return vae.half().to("cuda")


def decode(vae, latents):
    with torch.no_grad():
        return vae.decode(latents.to(vae.dtype)).sample


def test_a_decode_that_overflows_in_a_graph_is_done_again(loud_vae):
    latents = torch.randn(1, 4, 16, 12, device="cuda")
    exact = decode(copy.deepcopy(loud_vae).float(), latents)
    assert torch.isfinite(exact).all() and torch.isnan(decode(loud_vae, latents)).any()
    accel.optimize(loud_vae, graphs=True)
    for _ in range(4):  # eager, captured, replayed twice
        ours = decode(loud_vae, latents)
        assert ours.dtype == torch.float16
        torch.testing.assert_close(ours.float(), exact, rtol=0, atol=2e-3 * float(exact.abs().max()))
    assert graphs(loud_vae) == {"decoder"}
    assert accel.report(loud_vae).fallbacks == [("decoder", "overflowed in float16; decoded in float32", 4)]
    accel.restore(loud_vae)
    assert torch.isnan(decode(loud_vae, latents)).any()


def test_the_guard_leaves_graphs_and_memory_alone(tiny):
    vae = tiny.vae().half().to("cuda")
    latents = torch.randn(1, 4, 16, 12, device="cuda")
    stock = decode(vae, latents)
    accel.optimize(vae, graphs=True)
    for _ in range(3):
        ours = decode(vae, latents)
        torch.testing.assert_close(ours, stock, rtol=0, atol=5e-3 * float(stock.abs().max()))
    assert graphs(vae) == {"decoder"} and accel.report(vae).fallbacks == []


def test_a_decode_inside_a_capture_of_the_users_own(loud_vae):
    """The guard would have to wait for the GPU, which a capture forbids."""
    latents = torch.randn(1, 4, 16, 12, device="cuda", dtype=torch.float16)
    accel.optimize(loud_vae, graphs=False)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.no_grad():
        with torch.cuda.stream(stream):
            loud_vae.decode(latents)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            image = loud_vae.decode(latents).sample
    graph.replay()
    assert torch.isnan(image).any()


def bench(path, budget_s, **call):
    device, dtype = torch.device("cuda"), torch.float16
    return runner.run(
        "digits", lambda: subject.of_folder(path, device, dtype, **call), device, dtype, budget_s=budget_s
    )


def test_bench_of_a_folder():
    figures = bench(DIGITS, 0.5, prompt=PROMPT, steps=6, batch=2)
    assert figures["quality"]["passed"] and figures["restored_bit_equal"] is not False
    assert figures["accel"]["median_ms"] < figures["stock"]["median_ms"]
    assert {row["path"] for row in figures["graphs"] if row["status"] == "graph"} >= {"unet"}
    assert all(figures["peak_memory_mb"][name]["allocated"] > 0 for name in ("stock", "accel"))


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder"])
def test_bench_of_a_model_folder(part):
    assert bench(DIGITS / part, 0.2)["quality"]["passed"]
