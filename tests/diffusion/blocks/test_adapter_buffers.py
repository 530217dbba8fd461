"""Adapters of denoisers in buffers, as CUDA graphs read them: a switch writes other numbers into the same memory."""

import copy

import pytest
import torch

import accel
from accel.cuda_graphs import adapter_buffers
from accel.cuda_graphs.adapter_buffers import AdapterBuffers
from accel.quantization import adapters
from benchmarks.models.buffered_calls import buffered
from benchmarks.models.tiny_denoisers import given, transformer
from support.diffusion.outputs import close, run

peft = pytest.importorskip("peft")

AT = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in"]


def put(name, rank=4, **more):
    def change(model):
        config = {"r": rank, "lora_alpha": 2 * rank, "target_modules": AT, "init_lora_weights": False} | more
        model.add_adapter(peft.LoraConfig(**config), adapter_name=name)

    return change


def in_place(model):
    for name, parameter in model.named_parameters():
        if "lora_A.style" in name:
            parameter.data.mul_(1.1)


def scaled(scale):
    return {"cross_attention_kwargs": {"scale": scale}}


# What is done to the model, how it is called, and whether a graph of before still holds.
CHANGES = {
    "another adapter": (put("detail", 8), {}, True),
    "both": (lambda m: m.set_adapters(["style", "detail"], [0.3, -0.7]), {}, True),
    "both, and a scale in the call": (lambda m: None, scaled(0.7), True),
    "no scale in the call": (lambda m: None, {}, True),
    "nothing, by the scale": (lambda m: None, scaled(0.0), True),
    "off": (lambda m: m.disable_adapters(), {}, True),
    "on": (lambda m: m.enable_adapters(), {}, True),
    "in place, as nobody counts": (in_place, {}, True),
    "one, larger": (lambda m: m.set_adapters(["style"], [1.3]), {}, True),
    "a rank beyond the buffers": (put("wide", 24, target_modules=["to_q", "to_v"]), {}, False),
    "a DoRA": (put("dora", use_dora=True), {}, False),
    "the first again": (lambda m: m.set_adapters(["style"], [1.0]), {}, True),
    "merged": (lambda m: m.fuse_lora(), {}, True),
    "taken out": (lambda m: m.unfuse_lora(), {}, True),
    "deleted": (lambda m: m.delete_adapters(["detail", "wide", "dora"]), {}, True),
    "off for good": (lambda m: m.unload_lora(), {}, True),
}


def test_adapters_are_known_whatever_dtype_is_the_default(tiny):
    unet = tiny.unet("sd15")
    put("style")(unet)
    unet.eval()
    adapters._adds.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        layers = [one for one in unet.modules() if type(one._modules.get("base_layer")) is torch.nn.Linear]
        assert layers and all(map(adapters.adapts_plain, layers))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
@pytest.mark.share(2)
@pytest.mark.turns(2)
def test_a_switch_fills_the_same_buffers(family, tiny):
    stock = tiny.unet(family)
    ours, inputs, buffers = copy.deepcopy(stock), tiny.inputs(stock), AdapterBuffers()

    def agree(change, call):
        for model in (ours, stock):
            torch.manual_seed(7)
            change(model)
            model.requires_grad_(False).eval()
        close(buffered(buffers, lambda: run(ours, inputs | call)), run(stock, inputs | call))
        assert not buffers.direct

    agree(put("style"), {})
    accel.optimize(ours)
    agree(lambda m: None, {})
    assert buffers.complete() and not buffers.form
    sizes = sorted({len(key) for key in buffers.groups})
    assert sizes[0] == 1 and 3 in sizes and sizes[-1] > 3  # queries, keys and values; all of the prompt
    places = [group.down.data_ptr() for group in buffers.groups.values()]
    for name, (change, call, holds) in CHANGES.items():
        form = buffers.form
        agree(change, call)
        assert (buffers.form == form) is holds, name
        if form == buffers.form == 0:
            assert places == [group.down.data_ptr() for group in buffers.groups.values()]
    assert not accel.report(ours).fallbacks
    buffers.keep(ours.modules())
    assert not (buffers.groups or buffers.copies or buffers.kept)


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_recorded_blocks_take_the_adapters_of_the_moment(name):
    stock = transformer(name).requires_grad_(False)
    ours, inputs, buffers = accel.optimize(copy.deepcopy(stock), cpu="fuse"), given(name), AdapterBuffers()

    def call(model):
        with torch.no_grad():
            return model(**inputs)[0]

    for change in (put("style"), put("detail", 3), lambda m: m.set_adapters(["style", "detail"], [0.5, 2.0])):
        for model in (ours, stock):
            torch.manual_seed(7)
            change(model)
        call(ours)  # recorded
        close(buffered(buffers, lambda: call(ours)), call(stock))
        assert buffers.groups and buffers.complete() and not buffers.form
    assert not accel.report(ours).fallbacks


@pytest.mark.turns(2)
def test_no_graph_is_made_where_scales_differ_within_a_call(tiny, monkeypatch):
    stock = tiny.unet("sdxl")
    put("style")(stock)
    stock.requires_grad_(False).eval()
    ours, inputs, buffers = accel.optimize(copy.deepcopy(stock)), tiny.inputs(stock), AdapterBuffers()
    close(buffered(buffers, lambda: run(ours, inputs)), run(stock, inputs))
    with buffers.used():
        buffers.follow()
        for model in (ours, stock):
            next(one for one in model.modules() if "lora_A" in one._modules).scaling["style"] *= 3.0
        close(run(ours, inputs), run(stock, inputs))
        monkeypatch.setattr(adapter_buffers, "_capturing", lambda: True)
        run(ours, inputs)
    monkeypatch.undo()
    assert buffers.direct and buffers.form == 1
    with buffers.used():
        assert adapters.BUFFERS.get() is None
        close(run(ours, inputs), run(stock, inputs))
