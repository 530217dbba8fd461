"""What users do to a pipeline while graphs of it exist: never an old image, and graphs again at once."""

import copy
import gc
import inspect
import sys

import numpy as np
import psutil
import pytest
import torch

import accel
from accel.cuda_graphs.runner import PATIENCE
from support.diffusion.drawing import shipped
from support.together import together

ALIKE = 5e-3  # root mean square of what two half-precision runs of one image may differ by
STEPS = 6


@pytest.fixture(params=["sd", "sdxl"])
def pipe(request):
    if request.param == "sdxl":
        return request.getfixturevalue("sdxl_pipe").to("cuda", torch.float16)
    return shipped(torch.float16).to("cuda")


@pytest.fixture
def runs(pipe):
    """How often the UNet's Python has run since it was asked last; replays of a graph do not count.

    The interpreter counts: a wrapped forward would be code from elsewhere, of which no graph is made.
    """
    counted, unet = [], pipe.unet
    code = inspect.unwrap(type(unet).forward).__code__

    def counting(frame, event, arg):
        if event == "call" and frame.f_code is code and frame.f_locals["self"] is unet:
            counted.append(1)

    def since():
        count = len(counted)
        counted.clear()
        return count

    sys.setprofile(counting)
    yield since
    sys.setprofile(None)


def graphs(pipe):
    return {row["path"] for row in accel.report(pipe).graphs if row["status"] == "graph"}


def settle(pipe, runs, live, graphed, wanted, slack=1, **call):
    """The first call captures at the latest, the second replays; both draw what stock does.

    At most 5 runs: one that moves weights into our layout, one of the shape, one that measures, two of capturing.
    """
    runs()
    assert live.rms(live.draw(pipe, steps=STEPS, **call), wanted) < slack * ALIKE
    first = runs()
    assert live.rms(live.draw(pipe, steps=STEPS, **call), wanted) < slack * ALIKE
    assert not graphed or (first <= 5 and runs() == 0), (first, accel.report(pipe).graphs)


def test_after_a_change_a_call_costs_a_capture_at_most(pipe, change, runs, live, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "accel.cuda_graphs.runner.SETTLING", float("inf")
    )  # else how many calls measure depends on the machine
    twin = copy.deepcopy(pipe)
    call = change.arguments_before()
    plain = live.draw(twin, steps=STEPS, **call)
    accel.optimize(pipe, graphs=True)
    settle(pipe, runs, live, True, plain, **call)
    live.draw(pipe, steps=STEPS, **call)  # transformers 5.17 hooks its text encoders in their first call
    assert {"unet", "text_encoder"} <= graphs(pipe)
    ours, stock = pipe, twin
    for number, step in enumerate(change.steps):
        ours, stock = (step(p, tmp_path) or q for p, q in ((pipe, ours), (twin, stock)))
        call = change.arguments(stock)
        wanted = live.draw(stock, steps=STEPS, **call)
        if number == 0 and change.shows:
            assert live.rms(wanted, plain) > 1.5 * ALIKE
        settle(ours, runs, live, change.graphs, wanted, change.slack, **call)
    if change.reverse is not None:
        for p in (pipe, twin):
            change.reverse(p)
        ours, stock, call = pipe, twin, change.arguments_before()
        settle(ours, runs, live, True, live.draw(stock, steps=STEPS, **call), **call)
    accel.restore(ours)
    for name, model in live.models(ours).items():
        assert tiny.differences(model, live.models(stock)[name]) == [], name
    assert np.array_equal(live.draw(ours, **call), live.draw(stock, **call))


def test_every_kind_of_call_after_every_other(pipe, live, calls):
    twin = copy.deepcopy(pipe)
    stock = {name: live.draw(twin, **calls.arguments(call, twin)) for name, call in calls.CALLS.items()}
    accel.optimize(pipe, graphs=True)
    for name in (*calls.CALLS, *reversed(calls.CALLS), *calls.CALLS):
        ours = live.draw(pipe, **calls.arguments(calls.CALLS[name], pipe))
        assert live.rms(ours, stock[name]) < ALIKE * max(1, np.abs(stock[name]).max()), name
    assert "unet" in graphs(pipe)
    accel.restore(pipe)
    assert np.array_equal(live.draw(pipe), stock["as-ever"])


def test_a_change_between_two_steps_is_seen_by_the_next(pipe, between_steps, live, tmp_path):
    def adapter(p):
        live.lora("style")(p, tmp_path)

    twin = copy.deepcopy(pipe)
    plain = live.draw(twin, steps=4)
    accel.optimize(pipe, graphs=True)
    for _ in range(2):
        assert live.rms(live.draw(pipe, steps=4), plain) < ALIKE
    ours, stock = (live.draw(p, **between_steps(p, adapter)) for p in (pipe, twin))
    assert live.rms(ours, stock) < ALIKE < live.rms(stock, plain)
    for _ in range(2):
        assert live.rms(live.draw(pipe), live.draw(twin)) < ALIKE


def test_offload_first_then_optimize(pipe, live):
    """The patches go underneath the hooks that bring the weights, whichever was there first."""
    pipe.vae.register_to_config(force_upcast=False)  # moved to float32 under group offload, stock itself fails
    wanted = live.draw(pipe)
    pipe.enable_group_offload(torch.device("cuda"), offload_type="leaf_level", use_stream=True)
    accel.optimize(pipe)
    for _ in range(3):
        assert live.rms(live.draw(pipe), wanted) < ALIKE
    assert "unet" not in graphs(pipe)
    accel.restore(pipe)
    assert live.rms(live.draw(pipe), wanted) < ALIKE


def test_two_threads_on_pipelines_that_share_their_models(pipe, live, calls):
    pipe.vae.register_to_config(force_upcast=False)  # one thread would move the VAE under the other's feet

    def size(i, p):  # embeddings instead of prompts: the tokenizer is not for two threads
        return calls.embeddings(7, seed=i)(p) | {"height": 32 + 16 * i, "width": 64}

    pair = pipe, live.second_pipeline(pipe, None)
    wanted = [[live.draw(p, **size(i, p)) for i in range(3)] for p in pair]
    accel.optimize(pair[0], graphs=True)

    def work(p, images):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(4):
                for i, image in enumerate(images):
                    assert live.rms(live.draw(p, **size(i, p)), image) < ALIKE

    torch.cuda.synchronize()
    together(work, zip(pair, wanted, strict=True))


def held() -> tuple[int, int, int]:
    """Bytes on the GPU in use and reserved, and of this process on the host."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), psutil.Process().memory_info().rss


def test_a_thousand_calls_over_eight_sizes_keep_memory_flat(tiny):
    model = tiny.unet(sample_size=16).cuda().half()
    twin = copy.deepcopy(model)
    sizes = [tiny.inputs(model, height=8 + 4 * (i % 4), width=8 + 8 * (i // 4)) for i in range(8)]
    sizes = [{name: tensor.cuda() for name, tensor in inputs.items()} for inputs in sizes]
    for inputs in sizes:
        inputs |= {name: inputs[name].half() for name in ("sample", "encoder_hidden_states")}
    accel.optimize(model, graphs=True)
    with torch.no_grad():
        for i in range(8 * (PATIENCE + 2)):
            model(**sizes[i % 8])
        before = held()
        for i in range(1000):
            model(**sizes[i % 8])
        after = held()
        assert after[:2] == before[:2] and after[2] - before[2] < 16 * 2**20
        assert len([row for row in accel.report(model).graphs if row["status"] == "graph"]) == 8
        for inputs in sizes:
            ours, stock = (unet(**inputs).sample.float() for unet in (model, twin))
            assert float((ours - stock).abs().max()) < 4e-3 * float(stock.abs().max())
