"""CUDA graphs on a GPU: never stale, never aliased, bounded, and left alone where they do not pay or cannot be."""

import copy
import gc
import threading
from contextlib import contextmanager

import pytest
import torch
from accel_kernels.capture import capture

import accel
from accel.cuda_graphs.runner import PATIENCE


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs).sample


def on_gpu(inputs, dtype=torch.float16):
    def move(value):
        if isinstance(value, dict):
            return {name: move(item) for name, item in value.items()}
        return value.cuda().to(dtype) if value.is_floating_point() else value.cuda()

    return {name: move(value) for name, value in inputs.items()}


def close(got, wanted, share=4e-3):
    error = float((got.float() - wanted.float()).abs().max())
    assert error <= share * float(wanted.float().abs().max()), error


@pytest.fixture
def pair(tiny):
    """A half-precision model on the GPU and its untouched twin."""
    model = tiny.unet(sample_size=16).cuda().half()
    return model, copy.deepcopy(model)


def graphs(model):
    return [row for row in accel.report(model).graphs if row["status"] == "graph"]


def warmed(model, inputs):
    accel.optimize(model, graphs=True)
    for _ in range(2):
        run(model, inputs)
    assert len(graphs(model)) == 1, accel.report(model).graphs
    return model


@pytest.mark.parametrize("family", ["sd15", "sd21", "sdxl"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_error_against_fp32_is_at_most_twice_stock(tiny, family, dtype):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    reference = tiny.unet(family).cuda()
    inputs = on_gpu(tiny.inputs(reference, height=24, width=16), dtype)
    exact = run(copy.deepcopy(reference).double(), on_gpu(inputs, torch.float64))
    model = reference.to(dtype)
    stock = run(model, inputs)
    accel.optimize(model, graphs=True)
    for _ in range(3):  # eager, capture, replay
        ours = run(model, inputs)
        error, allowed = (float((t.double() - exact).abs().max()) for t in (ours, stock))
        assert error <= 2 * allowed + 1e-6
    assert graphs(model)
    accel.restore(model)
    assert torch.equal(run(model, inputs), stock)


def test_outputs_are_never_aliased(pair, tiny):
    model, twin = pair
    first, second = (on_gpu(tiny.inputs(model, seed=seed)) for seed in (1, 2))
    warmed(model, first)
    a = run(model, first)
    kept = a.clone()
    b = run(model, second)
    assert torch.equal(a, kept)
    close(b, run(twin, second))


def test_numbers_as_timesteps_share_one_graph(pair, tiny):
    model, twin = pair
    inputs = on_gpu(tiny.inputs(model))
    accel.optimize(model, graphs=True)
    for step in (999, 500, 20, 3.5, 7.25, 1.0):
        close(run(model, inputs | {"timestep": step}), run(twin, inputs | {"timestep": step}))
    assert len(graphs(model)) == 2  # integers and floats


def doubled(kind):
    class Doubled(kind):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    return Doubled


@pytest.mark.parametrize(
    "change", ["in place", "new data", "lora", "processor", "freeu", "dtype", "hook", "class", "part"]
)
def test_a_changed_model_never_replays_the_old_graph(pair, tiny, change):
    model, twin = pair
    inputs = on_gpu(tiny.inputs(model))
    warmed(model, inputs)
    before = run(model, inputs)
    for unet in (model, twin):
        block = unet.mid_block.attentions[0].transformer_blocks[0]
        if change == "in place":
            unet.mid_block.resnets[0].conv1.weight.data.mul_(-1)
        elif change == "new data":
            unet.mid_block.resnets[0].conv1.weight.data = -unet.mid_block.resnets[0].conv1.weight.data
        elif change == "lora":
            peft = pytest.importorskip("peft")
            torch.manual_seed(3)
            unet.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
        elif change == "processor":
            inner = block.attn1.processor
            block.attn1.set_processor(lambda *args, inner=inner, **kwargs: 2 * inner(*args, **kwargs))
        elif change == "freeu":
            unet.enable_freeu(0.9, 0.2, 1.3, 1.4)
        elif change == "dtype":
            unet.to(torch.bfloat16)
        elif change == "class":
            block.__class__ = doubled(type(block))
        elif change == "part":
            unet.mid_block.resnets[0].nonlinearity = torch.nn.GELU()
        else:
            unet.mid_block.register_forward_hook(lambda module, args, output: 2 * output)
    if change == "dtype":
        inputs = on_gpu(inputs, torch.bfloat16)
    wanted = run(twin, inputs)
    for _ in range(3):
        close(run(model, inputs), wanted, 4e-2 if change == "dtype" else 4e-3)
    assert not torch.equal(wanted.to(before.dtype), before)


def test_a_processor_that_keeps_state_is_never_captured(pair, tiny):
    model, _ = pair
    attention = model.mid_block.attentions[0].transformer_blocks[0].attn1
    seen = []

    def storing(attn, hidden_states, *args, inner=attention.processor, **kwargs):
        seen.append(1)
        return inner(attn, hidden_states, *args, **kwargs)

    attention.set_processor(storing)
    inputs = on_gpu(tiny.inputs(model))
    accel.optimize(model)
    for _ in range(4):
        run(model, inputs)
    assert len(seen) == 4 and not graphs(model)
    assert any("may keep state" in reason for _, reason, _ in accel.report(model).fallbacks)


def test_many_shapes_keep_memory_flat(pair, tiny):
    model, twin = pair
    accel.optimize(model, graphs=True)
    sizes = [on_gpu(tiny.inputs(model, height=8 + 4 * (i % 4), width=8 + 4 * (i // 4))) for i in range(8)]
    for inputs in sizes * (PATIENCE + 1):
        run(model, inputs)
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    for i in range(400):
        run(model, sizes[i % 8])
    assert torch.cuda.memory_reserved() <= reserved
    assert len(graphs(model)) == 8
    for inputs in sizes:
        close(run(model, inputs), run(twin, inputs))


def test_the_memory_bound_holds_and_too_large_a_graph_runs_eager(pair, tiny):
    model, twin = pair
    accel.optimize(model, graphs=True, graph_memory_gb=0.001)
    inputs = on_gpu(tiny.inputs(model, batch=4, height=64, width=64))
    for _ in range(3):
        close(run(model, inputs), run(twin, inputs))
    row = accel.report(model).graphs[0]
    assert row["status"] == "eager" and "graph_memory_gb" in row["reason"]


def test_over_the_bound_old_graphs_go_first(pair, tiny):
    model, twin = pair
    large, small = (on_gpu(tiny.inputs(model, batch=4, height=n, width=n)) for n in (64, 8))
    warmed(model, large)
    vars(model)["_accel_plan"].pool.limit_gb = 0.6 * graphs(model)[0]["memory_mb"] / 1024
    before = torch.cuda.memory_reserved()
    for _ in range(PATIENCE + 1):
        close(run(model, small), run(twin, small))
    assert [row["inputs"] for row in graphs(model)] == ["4x4x8x8, scalar, 4x7x12"]
    assert torch.cuda.memory_reserved() < before
    for _ in range(3):
        close(run(model, large), run(twin, large))


def test_a_capture_that_fails_falls_back_for_that_call(pair, tiny, monkeypatch):
    model, twin = pair
    inputs = on_gpu(tiny.inputs(model))

    @contextmanager
    def reading(*args):
        with capture(*args):
            float(torch.ones((), device="cuda"))  # reads the device: not allowed while capturing
            yield

    accel.optimize(model, graphs=True)
    monkeypatch.setattr("accel.cuda_graphs.runner.capture", reading)
    for _ in range(3):
        got = run(model, inputs)
    monkeypatch.undo()
    close(got, run(twin, inputs))
    assert "capture failed" in accel.report(model).graphs[0]["reason"]
    accel.optimize(model, graphs=True)
    run(model, inputs)
    close(run(model, inputs), run(twin, inputs))
    assert graphs(model)


def test_threads_on_streams_of_their_own_agree(pair, tiny):
    model, twin = pair
    inputs = [on_gpu(tiny.inputs(model, seed=i)) for i in range(3)]
    wanted = [run(twin, i) for i in inputs]
    warmed(model, inputs[0])
    torch.cuda.synchronize()
    errors = []

    def work(index):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    close(run(model, inputs[index]), wanted[index])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_work_on_any_stream_of_torch_stays_out_of_a_capture():
    """torch hands out 32 streams in turns, by default one of them for captures too."""
    x = torch.randn(1000, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(32)]
    graph, results, errors = torch.cuda.CUDAGraph(), [], []

    def work():
        try:
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append(x + 1)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    with capture(graph):
        doubled = x * 2
        thread.start()
        thread.join()
    torch.cuda.synchronize()
    assert errors == [] and len(results) == 32 and all(torch.equal(result, x + 1) for result in results)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(doubled, x * 2)


def test_two_models_captured_at_once(tiny):
    pairs = [(model, copy.deepcopy(model)) for model in (tiny.unet(sample_size=16).cuda().half() for _ in range(2))]
    inputs = on_gpu(tiny.inputs(pairs[0][0], height=16, width=16))
    wanted = [run(stock, inputs) for _, stock in pairs]
    for model, _ in pairs:
        accel.optimize(model, graphs=True)
    start, errors = threading.Barrier(2), []

    def work(model, result):
        try:
            start.wait()
            for _ in range(PATIENCE + 2):  # while one measures its kernels, the other waits for its turn
                close(run(model, inputs), result)
            assert len(graphs(model)) == 1, accel.report(model).graphs
        except BaseException as error:
            errors.append(error)

    jobs = zip((model for model, _ in pairs), wanted, strict=True)
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_restore_gives_the_memory_back(pair, tiny):
    model, _ = pair
    inputs = on_gpu(tiny.inputs(model, batch=8, height=32, width=32))
    seen = []
    for _ in range(3):  # the first time, cuBLAS takes its workspace and keeps it
        warmed(model, inputs)
        accel.restore(model)
        gc.collect()
        torch.cuda.empty_cache()
        seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert seen[1] == seen[2]


def test_garbage_collected_during_a_capture_does_not_break_it(pair, tiny):
    model, twin = pair
    inputs = on_gpu(tiny.inputs(model))
    doomed = warmed(copy.deepcopy(model), inputs)
    cycle = [doomed]
    cycle.append(cycle)
    del doomed, cycle  # only the collector frees it now, graph and all
    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        warmed(model, inputs)
    finally:
        gc.set_threshold(*threshold)
    close(run(model, inputs), run(twin, inputs))


def test_inference_mode_and_no_grad_share_graphs(pair, tiny):
    model, twin = pair
    inputs = on_gpu(tiny.inputs(model))
    accel.optimize(model, graphs=True)
    with torch.inference_mode():
        for _ in range(3):
            got = model(**inputs).sample
    close(got, run(twin, inputs))
    close(run(model, inputs), run(twin, inputs))
    assert len(graphs(model)) == 1


def test_moving_away_and_back(pair, tiny):
    model, twin = pair
    inputs = on_gpu(tiny.inputs(model))
    warmed(model, inputs)
    model.to("cpu")
    torch.cuda.empty_cache()
    model.to("cuda")
    for _ in range(3):
        close(run(model, inputs), run(twin, inputs))


def test_no_layout_copy_kernels_in_a_replay(tiny):
    model = tiny.unet("sdxl").cuda().half()
    inputs = on_gpu(tiny.inputs(model))
    warmed(model, inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(model, inputs)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert names and not [name for name in names if "nchwToNhwc" in name or "nhwcToNchw" in name]


def test_a_vae_in_half_precision(tiny):
    vae = tiny.vae().cuda().half()
    twin = copy.deepcopy(vae)
    accel.optimize(vae, graphs=True)
    latent = torch.randn(1, 4, 16, 12, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        for _ in range(3):
            close(vae.decode(latent).sample, twin.decode(latent).sample)
    assert [row["path"] for row in graphs(vae)] == ["decoder"]


def test_what_is_made_of_the_prompt_is_kept_for_a_loop_and_never_longer(pair, tiny):
    """The same tensor, refilled in place, freed and made anew, with other weights in a new loop, without versions."""
    model, twin = pair
    inputs = on_gpu(tiny.inputs(model))
    accel.optimize(model, graphs=True)
    loop = vars(model)["forward"].loop
    wide = sum("attn2.to_" in name for name, _ in model.named_parameters())

    def check(mode=torch.no_grad, **changed):
        inputs.update(changed)
        with mode():
            for _ in range(3):
                inputs["sample"] = torch.randn_like(inputs["sample"])
                close(model(**inputs).sample, twin(**inputs).sample)

    loop.begin()
    check()
    assert wide and [row for row in graphs(model) if "prompt kept" in row["inputs"]]
    inputs["encoder_hidden_states"].mul_(-1)
    check()
    for seed in range(3):  # likely in the memory of the one before
        shape = inputs.pop("encoder_hidden_states").shape
        torch.manual_seed(seed)
        check(encoder_hidden_states=torch.randn(shape, device="cuda", dtype=torch.float16))
    for unet in pair:
        for name, parameter in unet.named_parameters():
            if "attn2.to_v" in name:
                parameter.data.mul_(-2)  # seen by no version
    loop.begin()
    check()
    with torch.inference_mode():
        prompt = inputs["encoder_hidden_states"].clone()
    check(torch.inference_mode, encoder_hidden_states=prompt)
    with torch.inference_mode():
        prompt.mul_(-1)
    check(torch.inference_mode)
    accel.restore(model)
    assert torch.equal(run(model, inputs), run(twin, inputs))


def test_what_one_size_settled_serves_the_next(pair, tiny):
    """Calls of new sizes run while their kernels are chosen, and are captured soon; all are right."""
    model, twin = pair
    accel.optimize(model, graphs=True)
    for calls, (height, width) in ((2, (16, 16)), (PATIENCE + 1, (24, 16)), (PATIENCE + 1, (12, 20))):
        inputs = on_gpu(tiny.inputs(model, height=height, width=width))
        for _ in range(calls):
            close(run(model, inputs), run(twin, inputs))
    assert len(graphs(model)) == 3 and not accel.report(model).fallbacks
