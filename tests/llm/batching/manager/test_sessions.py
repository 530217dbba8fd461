"""Start, stop and pause of a manager, and its end where nobody holds it any more."""

import asyncio
import gc
import pickle
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest
import torch

from support.everything import EVERYTHING
from support.llm.batching.managers import FakeEngine, Model, answer, collect, make_manager

# -- start, stop, pause ------------------------------------------------------------------------------------------------


def test_start_and_stop_twice(manager, logged):
    manager.stop()
    manager.stop(keep_for_next_session=True)
    assert logged == [
        "Manager not started.",
        "Manager not started. Hence the unstarted manager will not be kept for next session.",
    ]
    manager.start()
    thread = manager._thread.ending.thread
    assert thread.daemon  # which holds up no end of a process
    manager.start()
    assert manager._thread.ending.thread is thread and logged[2:] == ["Manager thread is already running."]
    name = manager.add_request([1])
    manager.stop()
    assert not manager.is_running() and collect(manager, 1)[name].error is None  # it was finished first
    assert manager.toy.closed == 1
    manager.stop()
    assert logged[3:] == ["Manager not started."]
    manager.destroy()
    manager.destroy()
    manager.start()
    name = manager.add_request([1])
    assert collect(manager, 1)[name].error is None


def test_no_request_is_taken_while_it_stops(manager, logged):
    manager.toy.hold.clear()
    manager.start()
    name = manager.add_request([1, 2])
    manager.stop(block=False)
    assert manager.is_running() and manager.add_request([3]) is None
    assert logged == ["The background thread is stopping.. Request with ids [3, ..., 3] will be dropped."]

    async def client():
        refused = asyncio.get_running_loop().create_future()
        manager.register_result_handler("late", refused.set_result)
        assert manager.add_request([3], request_id="late") is None
        return await asyncio.wait_for(refused, 10)  # as a server does

    assert asyncio.run(client()).error == "The background thread is stopping."
    manager.join(0.0, 0.05)
    assert logged[-1] == "Generation thread did not exit after join timeout (0.05)." and manager.is_running()
    manager.toy.hold.set()
    manager.join(0.0)
    assert collect(manager, 1)[name].error is None


def hard_stop(manager):
    manager.stop(hard_stop=True)


def interrupt(manager):
    """As at the end of `generate_batch`, which stops its manager."""
    with pytest.raises(KeyboardInterrupt):
        try:
            raise KeyboardInterrupt
        finally:
            manager.stop(block=True, timeout=5)
            manager.destroy()


def end_in_a_pause(manager):
    """As `accel.restore` does, whoever holds the pause."""
    with manager.pause():
        steps = manager.toy.steps
        manager.end("the model is another")
    assert manager.toy.steps == steps


@pytest.mark.share(1)
@pytest.mark.parametrize(
    ("way", "reason"),
    [
        (hard_stop, "ended before this request was finished"),
        (interrupt, "ended before this request was finished"),
        (end_in_a_pause, "the model is another"),
    ],
)
def test_ends_that_wait_for_nobody(manager, way, reason):
    manager.toy.pause = 0.005
    manager.start()
    names = [manager.add_request([n], max_new_tokens=10**9) for n in range(10)]
    begun = time.perf_counter()
    way(manager)
    assert time.perf_counter() - begun < 3 and not manager.is_running()
    found = collect(manager, 10)
    assert all(reason in found[name].error for name in names)


def test_what_had_failed_before_keeps_its_reason(manager):
    manager.toy.hold.clear()
    manager.start()
    manager.add_request([1, 2])
    assert manager.toy.reached.wait(10)
    name = manager.add_request([])  # in line until the step ends
    manager.stop(hard_stop=True, block=False)
    manager.toy.hold.set()
    assert "the prompt is empty" in collect(manager, 2)[name].error


def test_kept_for_the_next_session(manager):
    manager.warmup()
    assert manager.warmed_up and pickle.loads(pickle.dumps(manager)) is None  # a copy of the model has no manager
    for _ in range(3):
        manager.start()
        name = manager.add_request([1])
        manager.stop(keep_for_next_session=True)
        assert collect(manager, 1)[name].error is None
    assert (
        manager.toy.closed == 0 and manager.warmed_up and manager.model._cached_continuous_batching_manager is manager
    )
    manager.destroy()
    assert manager.toy.closed == 1 and not manager.warmed_up


def test_a_pause_is_between_steps_and_loses_nothing(manager):
    manager.start()
    name = manager.add_request([1, 2], max_new_tokens=300, streaming=True)
    assert manager.toy.reached.wait(10)
    for number in range(3):
        with manager.pause(), manager.pause():
            steps = manager.toy.steps
            time.sleep(0.02)
            assert manager.toy.steps == steps
            with pytest.raises(RuntimeError, match="from inside a pause"):
                manager.stop()
            manager.add_request([3], request_id=f"during {number}")
    assert list(manager.request_id_iter(name))[-1].generated_tokens == answer([1, 2], 300)


def test_several_threads_pause(manager):
    manager.start()
    manager.add_request([1, 2], max_new_tokens=10**9)
    inside, release = threading.Barrier(3), threading.Event()

    def hold():
        with manager.pause():
            inside.wait(10)
            release.wait(10)

    threads = [threading.Thread(target=hold) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.wait(10)
    steps = manager.toy.steps
    with manager.pause():
        release.set()
        for thread in threads:
            thread.join()
        assert manager.toy.steps == steps  # the last one out ends it
    while manager.toy.steps == steps:
        time.sleep(0.001)


def test_a_pause_needs_a_loop_that_goes_on(manager):
    with pytest.raises(RuntimeError, match="no generation loop is running"), manager.pause():
        pass
    manager.toy.faults, manager.toy.reached = {1: torch.AcceleratorError("CUDA error: lost")}, threading.Event()
    manager.toy.hold.clear()
    manager.start()
    manager.add_request([1])
    assert manager.toy.reached.wait(10)
    threading.Timer(0.05, manager.toy.hold.set).start()
    with pytest.raises(RuntimeError, match="stopped before it could pause"), manager.pause():
        pass


# -- nobody holds it any more ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["new", "running", "idle", "kept"])
def test_a_manager_that_nobody_holds_is_freed(state, few_objects):
    model, engine = Model(), FakeEngine()
    engine.pause = 0.001
    manager = make_manager(engine, model=model)
    if state != "new":
        manager.start()
    if state == "running":
        manager.add_request([1], max_new_tokens=10**9)
        assert engine.reached.wait(10)
    if state == "kept":
        manager.stop(keep_for_next_session=True)
    thread, gone = manager._thread.ending.thread, weakref.ref(manager)
    freed = weakref.ref(model)
    del manager, model
    gc.collect()
    assert gone() is None
    if thread is not None:
        thread.join(10)
        assert not thread.is_alive() and engine.closed == 1
    del thread
    gc.collect()
    assert freed() is None


@pytest.mark.skipif(not EVERYTHING, reason="seconds of imports; ACCEL_TEST_EVERYTHING=1 runs it")
def test_the_process_ends_without_a_stop():
    code = """
        import sys
        sys.path[:0] = ["tests"]
        from support.llm.batching.managers import make_manager
        manager = make_manager()
        manager.toy.pause = 0.01
        manager.start()
        manager.add_request([1], max_new_tokens=10**9)
        assert manager.toy.reached.wait(10)
        print("ends")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr
