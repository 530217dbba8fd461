"""The step cache in CUDA graphs: what whole calls write there, the calls between have to find, and nobody else's."""

import copy

import pytest
import torch

import accel
from support.diffusion.drawing import shipped
from support.diffusion.gpu import graphs, on_gpu
from support.diffusion.oracles import Oracle, reasons
from support.diffusion.outputs import run

STEPS = (950, 800, 650, 500, 350, 200, 80, 20)


def close(got, wanted, share=4e-3):
    torch.testing.assert_close(got.float(), wanted.float(), rtol=0, atol=share * float(wanted.abs().max()))


def loop(tiny, model, timesteps=None, dtype=torch.float32, **shape):
    first = on_gpu(tiny.inputs(model, **shape), dtype)
    timesteps = torch.tensor(STEPS, device="cuda") if timesteps is None else timesteps
    return [first | {"timestep": t, "sample": first["sample"] + 0.1 * i} for i, t in enumerate(timesteps)]


def agree(model, oracle, calls, share=4e-3):
    for call in calls:
        close(run(model, call), run(oracle.model, call), share)


@pytest.fixture
def cached(tiny, exact):
    def make(family="sd15", interval=3, graphs=True):
        model = tiny.unet(family).cuda()
        oracle = Oracle(copy.deepcopy(model), interval)
        return accel.optimize(model, step_cache=interval, graphs=graphs), oracle

    return make


@pytest.mark.parametrize("graphs_on", [True, False])
@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_equals_the_oracle(cached, tiny, family, graphs_on):
    model, oracle = cached(family, graphs=graphs_on)
    for _ in range(3):
        oracle.restart()
        agree(model, oracle, loop(tiny, model))
    assert reasons(model) == []
    assert len(graphs(model)) == 2 * graphs_on  # whole calls, and those between


def test_prompts_apart_have_graphs_and_features_apart(cached, tiny):
    model, oracle = cached()
    oracles = [oracle, Oracle(tiny.unet().cuda(), 3)]
    timesteps = torch.tensor(STEPS, device="cuda")
    for number in range(3):
        loops = [loop(tiny, model, timesteps, batch=1, seed=seed + number) for seed in (1, 2)]
        for o in oracles:
            o.restart()
        for pair in zip(*loops, strict=True):
            for o, call in zip(oracles, pair, strict=True):
                agree(model, o, [call])
    assert len(graphs(model)) == 4 and reasons(model) == []


def test_sizes_in_turn_and_other_graphs_between(cached, tiny):
    model, oracle = cached()
    sizes = [{"height": 8, "width": 8}, {"height": 16, "width": 8}, {"height": 16, "width": 24, "batch": 4}]
    for _ in range(3):
        for size in sizes:
            oracle.restart()
            agree(model, oracle, loop(tiny, model, **size))
    assert len(graphs(model)) == 6


def test_graphs_of_other_sizes_do_not_write_over_features(cached, tiny):
    """Features kept in the graphs' pool would be lost to the larger graph that runs between the steps."""
    model, oracle = cached()
    small, large = loop(tiny, model, STEPS), loop(tiny, model, STEPS, height=32, width=32, batch=4)
    large_oracle = Oracle(tiny.unet().cuda(), 3)
    for _ in range(3):
        for o in (oracle, large_oracle):
            o.restart()
        for pair in zip(small, large, strict=True):
            agree(model, oracle, pair[:1])
            agree(model, large_oracle, pair[1:])


@pytest.mark.parametrize("dtype, share", [(torch.float16, 0.02), (torch.bfloat16, 0.1)], ids=str)
def test_half_precision(cached, tiny, dtype, share):
    model, oracle = cached("sdxl")
    model.to(dtype)
    for _ in range(3):
        oracle.restart()
        calls = loop(tiny, model, dtype=dtype)
        wide = on_gpu(calls[0], torch.float32)
        for call in calls:
            exact = wide | {"sample": call["sample"].float(), "timestep": call["timestep"]}
            close(run(model, call), run(oracle.model, exact), share)


def test_timesteps_from_the_host_and_single_tensors(cached, tiny):
    model, oracle = cached()
    for timesteps in (STEPS, [torch.tensor(t) for t in STEPS]):
        for _ in range(2):
            oracle.restart()
            agree(model, oracle, loop(tiny, model, timesteps))
    assert reasons(model) == []
    for call in loop(tiny, model, [torch.tensor(t, device="cuda") for t in STEPS]):
        oracle.restart()
        agree(model, oracle, [call])
    assert any("do not tell that a loop goes on" in reason for reason in reasons(model))


@pytest.mark.parametrize("change", ["weights", "lora", "hook"])
def test_a_changed_model(cached, tiny, change):
    model, oracle = cached()
    agree(model, oracle, loop(tiny, model))
    oracle.restart()
    agree(model, oracle, loop(tiny, model))
    for unet in (model, oracle.model):
        if change == "weights":
            unet.up_blocks[-1].resnets[-1].conv1.weight.data = -unet.up_blocks[-1].resnets[-1].conv1.weight.data
        elif change == "lora":
            peft = pytest.importorskip("peft")
            torch.manual_seed(3)
            unet.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
        else:
            unet.mid_block.resnets[0].register_forward_hook(lambda module, args, output: 2 * output)
    for _ in range(3):
        oracle.restart()
        agree(model, oracle, loop(tiny, model))


def test_loops_on_streams_of_their_own(cached, tiny):
    model, oracle = cached()
    for _ in range(2):
        for seed in (1, 2):
            calls = loop(tiny, model, seed=seed, height=32, width=32)
            oracle.restart()
            wanted = [run(oracle.model, call) for call in calls]
            torch.cuda.synchronize()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                got = [run(model, call) for call in calls]
            stream.synchronize()
            for ours, theirs in zip(got, wanted, strict=True):
                close(ours, theirs)


@pytest.mark.parametrize("offload", [False, True])
def test_a_pipeline_in_half_precision(offload):
    pipe = shipped(torch.float16)
    twin = copy.deepcopy(pipe)
    oracle = Oracle(twin.unet, 3)
    accel.optimize(pipe, step_cache=3)
    for p in (pipe, twin):
        p.enable_model_cpu_offload() if offload else p.to("cuda")

    def draw(p):
        generator = torch.Generator().manual_seed(0)
        return p("a handwritten seven", num_inference_steps=20, generator=generator, output_type="pt").images

    for _ in range(3):
        oracle.restart()
        ours, wanted = draw(pipe), draw(twin)
        assert float((ours - wanted).square().mean().sqrt()) < 1e-2
    assert reasons(pipe) == []
