"""Captures of denoisers: bounded in memory, given back, alone on their stream, and left out where they fail."""

import copy
import gc
import threading
from contextlib import contextmanager

import pytest
import torch
from accel_kernels.capture import capture

import accel
from accel.cuda_graphs.runner import PATIENCE
from support.diffusion.gpu import close, graphs, on_gpu, warmed
from support.diffusion.outputs import run
from support.together import together


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
    monkeypatch.setattr("accel.cuda_graphs.host_copies.capture", reading)
    for _ in range(3):
        got = run(model, inputs)
    monkeypatch.undo()
    close(got, run(twin, inputs))
    assert "capture failed" in accel.report(model).graphs[0]["reason"]
    accel.optimize(model, graphs=True)
    run(model, inputs)
    close(run(model, inputs), run(twin, inputs))
    assert graphs(model)


def test_a_capture_that_cuda_refuses_to_end_leaves_nothing_behind():
    stream, graphs_of_pool = torch.cuda.current_stream(), []
    for _ in range(2):
        pool = torch.cuda.graph_pool_handle()
        graphs_of_pool.append(torch.cuda.CUDAGraph())
        with capture(graphs_of_pool[-1], pool):
            drawn = torch.rand(3, device="cuda")
        before = torch.cuda.memory_reserved()
        for shared in (pool, None):
            with pytest.raises(RuntimeError), capture(torch.cuda.CUDAGraph(), shared):
                large = torch.ones(2**26, device="cuda")
                float(large[0])
            del large
        assert torch.cuda.current_stream() == stream
        torch.cuda.manual_seed(7)
        wanted = torch.rand(3, device="cuda")
        torch.cuda.manual_seed(7)
        graphs_of_pool[-1].replay()
        assert torch.equal(drawn, wanted) and not torch.equal(torch.rand(3, device="cuda"), wanted)
    graphs_of_pool.clear()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


def test_threads_on_streams_of_their_own_agree(pair, tiny):
    model, twin = pair
    inputs = [on_gpu(tiny.inputs(model, seed=i)) for i in range(3)]
    wanted = [run(twin, i) for i in inputs]
    warmed(model, inputs[0])
    torch.cuda.synchronize()

    def work(index):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                close(run(model, inputs[index]), wanted[index])

    together(work, ((i,) for i in range(3)))


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
    start = threading.Barrier(2)

    def work(model, result):
        start.wait()
        for _ in range(PATIENCE + 2):  # while one measures its kernels, the other waits for its turn
            close(run(model, inputs), result)
        assert len(graphs(model)) == 1, accel.report(model).graphs

    jobs = zip((model for model, _ in pairs), wanted, strict=True)
    together(work, jobs)


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
