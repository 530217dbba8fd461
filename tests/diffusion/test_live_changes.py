"""What users do to a pipeline between two calls: stock and optimized go through it side by side."""

import copy

import numpy as np
import pytest
import torch

import accel
from accel.cuda_graphs.fingerprint import Fingerprint
from accel.cuda_graphs.rule import obstacle
from support.diffusion.changes import CHANGES
from support.everything import EVERYTHING

SAME = 1.01 / 255  # one step of the eight bits an image has


def same(live, ours, stock, slack=1):
    error = live.rms(ours, stock)
    assert (np.abs(ours - stock).max() if slack == 1 else error) <= slack * SAME


def fallbacks(pipe):
    return sum(calls for *_, calls in accel.report(pipe).fallbacks)


ON_A_GPU = ("model-offload", "layerwise-casting")  # where weights keep their addresses there alone


def graphs_would_last(pipe, live, call):
    """On a GPU, calls would be replayed: nothing forbids a graph, and a call leaves the models as it found them."""
    models = list(live.models(pipe).values())
    fingerprints = [Fingerprint(model) for model in models]
    live.draw(pipe, **call)
    assert all(fingerprint.reachable() and fingerprint.holds() for fingerprint in fingerprints)
    assert [obstacle(model) for model in models] == [None] * len(models)


def restored(ours, stock, live, tiny, call):
    """To the bit, and nothing left behind in any part of the pipeline."""
    accel.restore(ours)
    for name, part in live.parts(ours).items():
        assert tiny.differences(part, live.parts(stock)[name]) == [], name
    assert np.array_equal(live.draw(ours, **call), live.draw(stock, **call))


def ways(number, change):
    """Which pipeline, and whether the change stays, is taken back, or is there before optimize. Some in turn."""
    every = EVERYTHING or change.name == "two-loras"  # which go into both text encoders of an SDXL
    if change.reverse is not None:
        yield "pipe", "taken-back"
    if EVERYTHING or change.reverse is None:
        yield "pipe", "left-so"
    if every or number % 8 == 0:
        yield "pipe", "optimized-after"
    if every or number % 8 == 2:
        yield "sdxl_pipe", "taken-back" if EVERYTHING and change.reverse is not None else "left-so"


CASES = [
    pytest.param(change, *way, id=f"{change.name}-{'-'.join(way)}")
    for number, change in enumerate(CHANGES)
    if not change.cpu
    for way in ways(number, change)
]


@pytest.mark.share(18)
@pytest.mark.turns(4)
@pytest.mark.parametrize(("change", "pipeline", "end"), CASES)
def test_stock_and_ours_agree_after_every_change(request, change, pipeline, end, live, tiny, tmp_path):
    pipe = request.getfixturevalue(pipeline)
    twin = copy.deepcopy(pipe)
    call = change.arguments_before()
    if end != "optimized-after":
        plain = live.draw(twin, **call)
        accel.optimize(pipe)
        same(live, live.draw(pipe, **call), plain)
    ours, stock = pipe, twin
    for number, step in enumerate(change.steps):
        ours, stock = (step(p, tmp_path) or q for p, q in ((pipe, ours), (twin, stock)))
        call = change.arguments(stock)
        if end != "optimized-after":
            wanted = live.draw(stock, **call)
            same(live, live.draw(ours, **call), wanted, change.slack)
            if number == 0 and change.shows:
                assert np.abs(wanted - plain).max() > 10 * SAME
    if end == "optimized-after":
        accel.optimize(ours)
        same(live, live.draw(ours, **call), live.draw(stock, **call), change.slack)
    if end == "left-so" and change.graphs and change.name not in ON_A_GPU:
        graphs_would_last(ours, live, call)
    if end == "taken-back":
        for p in (pipe, twin):
            change.reverse(p)
        ours, stock, call = pipe, twin, change.arguments_before()
        before = fallbacks(ours)
        same(live, live.draw(ours, **call), live.draw(stock, **call))
        assert fallbacks(ours) == before  # fast again
        graphs_would_last(ours, live, call)
        live.draw(stock, **call)  # as often, for schedulers that count
    restored(ours, stock, live, tiny, call)


@pytest.mark.turns(2)
def test_a_vae_that_is_cast_up_and_down_again_at_every_call(sdxl_pipe, live, tiny):
    """What SDXL pipelines in half precision do with VAEs that overflow in it."""
    sdxl_pipe.to(torch.float16)
    twin = copy.deepcopy(sdxl_pipe)
    seen = []
    for p in (sdxl_pipe, twin):
        p.vae.decoder.conv_in.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    accel.optimize(sdxl_pipe)
    for size in (32, 64, 32):
        ours, stock = (live.draw(p, height=size, width=size) for p in (sdxl_pipe, twin))
        assert live.rms(ours, stock) < 5e-3
    assert set(seen) == {torch.float32} and sdxl_pipe.vae.dtype == torch.float16
    restored(sdxl_pipe, twin, live, tiny, {})


def test_a_forward_the_user_replaced_before_is_kept(pipe, live):
    """As caching add-ons do. Nothing of ours goes on top; the report says where."""
    twin = copy.deepcopy(pipe)
    plain = live.draw(twin)
    for p in (pipe, twin):
        block = p.unet.mid_block.resnets[0]
        block.forward = lambda *args, block=block, **kwargs: -type(block).forward(block, *args, **kwargs)
    accel.optimize(pipe)
    rows = [row for row in accel.report(pipe).sites if row[0] == "unet.mid_block.resnets.0" and row[2] == "skipped"]
    assert [reason for *_, reason in rows] == ["its forward was replaced (function)"]
    stock = live.draw(twin)
    same(live, live.draw(pipe), stock)
    assert np.abs(stock - plain).max() > 10 * SAME
    accel.restore(pipe)
    assert np.array_equal(live.draw(pipe), stock)


@pytest.mark.skipif(not EVERYTHING, reason="seconds of work; ACCEL_TEST_EVERYTHING=1 runs it")
@pytest.mark.parametrize("first", ["optimize", "compile"][: 1 + EVERYTHING])
def test_a_compiled_unet_in_the_place_of_the_unet(sdxl_pipe, live, tiny, first):
    twin = copy.deepcopy(sdxl_pipe)
    wanted = live.draw(twin)
    unet = sdxl_pipe.unet

    def compile_unet():
        sdxl_pipe.unet = torch.compile(unet, backend="eager", fullgraph=True)

    steps = [lambda: accel.optimize(sdxl_pipe), compile_unet]
    for step in steps if first == "optimize" else reversed(steps):
        step()
    same(live, live.draw(sdxl_pipe), wanted)
    assert any(path.startswith("unet") for path, _, status, _ in accel.report(sdxl_pipe).sites if status == "patched")
    accel.restore(sdxl_pipe)
    assert [line for line in tiny.differences(unet, twin.unet) if not line.startswith("._is_torch_compile")] == []
    sdxl_pipe.unet = unet
    assert np.array_equal(live.draw(sdxl_pipe), wanted)
    torch.compiler.reset()


@pytest.mark.turns(2)
def test_compiled_blocks_inside_an_optimized_unet(sdxl_pipe, live):
    wanted = live.draw(sdxl_pipe)
    accel.optimize(sdxl_pipe)
    sdxl_pipe.unet.compile_repeated_blocks(backend="eager", fullgraph=True)
    same(live, live.draw(sdxl_pipe), wanted)
    accel.restore(sdxl_pipe)
    same(live, live.draw(sdxl_pipe), wanted)
    torch.compiler.reset()


@pytest.mark.turns(4)
def test_two_pipelines_with_one_unet_optimized_and_restored_by_either(pipe, live):
    other = live.second_pipeline(pipe, None)
    stock = [live.draw(p) for p in (pipe, other)]
    for restoring in (pipe, other):
        accel.optimize(pipe)
        accel.optimize(other)
        for p, image in zip((pipe, other), stock, strict=True):
            same(live, live.draw(p), image)
        accel.restore(restoring)
        for p, image in zip((pipe, other), stock, strict=True):
            same(live, live.draw(p), image)
        assert not any(rule == "resnet block" for _, rule, *_ in accel.report(other).sites)
    for p, image in zip((pipe, other), stock, strict=True):
        assert np.array_equal(live.draw(accel.restore(p)), image)
