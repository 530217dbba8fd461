"""Weights that diffusers stores in 8 bits: fused blocks read them, the stored bytes stay where they are."""

import copy

import pytest
import torch
from accelerate import cpu_offload

import accel
from accel.casting import casts_of, in_place
from accel.cuda_graphs.adapter_buffers import AdapterBuffers
from accel.cuda_graphs.rule import GraphForward, graph_obstacle
from benchmarks.models.adapters_soak import case_of, copied
from benchmarks.models.buffered_calls import buffered
from support.diffusion.outputs import close, run
from support.objects.streaming import flux

peft = pytest.importorskip("peft")
FP8 = torch.float8_e4m3fn


def cast(model, compute=torch.float32):
    model.enable_layerwise_casting(storage_dtype=FP8, compute_dtype=compute)


def places(model):
    return {name: (one.data_ptr(), one.dtype) for name, one in model.named_parameters()}


def stored(model):
    return {name: one.view(torch.uint8) if one.itemsize == 1 else one for name, one in model.state_dict().items()}


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kind", ["sd15", "sdxl", "scale-shift", "vae"])
@pytest.mark.share(1)
@pytest.mark.turns(2)
def test_blocks_run_fused_over_stored_weights(tiny, kind, before):
    model = tiny.vae() if kind == "vae" else tiny.unet(kind)
    inputs = {"sample": torch.randn(1, 3, 8, 8)} if kind == "vae" else tiny.inputs(model)
    twin = copy.deepcopy(model)
    for switch in (cast, lambda m: accel.optimize(m, cpu="fuse"))[:: 1 if before else -1]:
        switch(model)
    cast(twin)
    wanted = run(twin, inputs)
    for _ in range(2):
        close(run(model, inputs), wanted)
    ours, theirs = stored(model), stored(twin)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert accel.report(model).fallbacks == [], accel.report(model).fallbacks
    assert not any("replaced forward" in site[3] for site in accel.report(model).sites)
    forward = next(m for m in (vars(part).get("forward") for part in model.modules()) if type(m) is GraphForward)
    here = places(model)
    assert graph_obstacle(forward.module) is None
    with in_place(casts_of(model.modules())):
        close(run(model, inputs), wanted)
    assert places(model) == here
    accel.restore(model)
    close(run(model, inputs), wanted)


@pytest.mark.parametrize("cast_too", [False, True])
@pytest.mark.parametrize("name", ["flux", "flux Q8_0", "flux nf4", "sdxl"])
def test_adapters_and_weights_in_blocks_run_fused_beside_stored_ones(name, cast_too):
    """cast_too: the adapters are stored in 8 bits as well, as diffusers does where it is told what to skip."""
    stock, call = case_of(name)
    targets = ["to_q", "to_out.0", "proj_mlp", "net.0.proj"]
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    peft.inject_adapter_in_model(config, stock).requires_grad_(False).eval()
    ours = accel.optimize(copied(stock), cpu="fuse")
    for model in (stock, ours):
        model.enable_layerwise_casting(FP8, torch.float32, **{"skip_modules_pattern": ("norm",)} if cast_too else {})
    buffers = AdapterBuffers()
    with torch.no_grad():
        wanted = call(stock)
        for _ in range(2):
            torch.testing.assert_close(call(ours), wanted)
        with in_place(casts_of(ours.modules())):
            torch.testing.assert_close(buffered(buffers, lambda: call(ours)), wanted)
    assert accel.report(ours).fallbacks == [] and bool(buffers.groups) is not cast_too


@torch.no_grad()
def test_casts_over_an_offload_are_not_taken_off_with_it(streaming):
    """accelerate would put the forward back that it found, and weights in 8 bits would be multiplied as they are."""
    model, call = flux()
    cpu_offload(model, torch.device("cpu"))
    model.enable_layerwise_casting(storage_dtype=FP8, compute_dtype=torch.float32)
    wanted = call(model)
    with pytest.raises(ValueError, match="memory=: hooks of diffusers, such as casts, lie over its offload"):
        accel.optimize(model, memory=10**9)
    assert torch.equal(call(model), wanted)
