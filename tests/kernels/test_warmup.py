"""Kernels become launchable one at a time: up to 3.6 Triton may give a thread the launcher that another one loads."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import triton
from accel_kernels import warmup as module
from accel_kernels.warmup import launch, warmup


class Loader:
    """What must never happen in two threads at once."""

    def __init__(self):
        self.busy, self.crowded, self.loads = threading.Lock(), False, 0

    def __call__(self):
        free = self.busy.acquire(blocking=False)
        self.crowded |= not free
        self.loads += 1
        time.sleep(0.002)
        if free:
            self.busy.release()


class Kernel:
    """A compiled kernel that loads its launcher when asked to, or at its launch."""

    def __init__(self, load):
        self.src = self.metadata = None
        self._init_handles = load

    def __getitem__(self, grid):
        return lambda *args: self._init_handles()

    def warmup(self, *args, grid):
        return self


@pytest.fixture
def built(monkeypatch):
    """The kernels whose launchers were compiled, in whatever order."""
    if not hasattr(triton, "AsyncCompileMode"):
        pytest.skip("this Triton compiles nothing in the background")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    made = []
    active = SimpleNamespace(launcher_cls=lambda src, metadata: made.append(src))
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    return made


def test_launchers_are_loaded_by_one_thread_at_a_time(built):
    load = Loader()

    def forward(first):
        if first % 2:
            launch(Kernel(load), (1,))
            return
        with warmup():
            for _ in range(4):
                launch(Kernel(load), (1,))

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(forward, range(6)))
    assert not load.crowded and load.loads == 3 * 4 + 3 and len(built) == 3 * 4


def test_each_kernel_is_made_ready_once(built):
    load = Loader()
    kernel = Kernel(load)
    with warmup():
        assert module.warming_up()
        for _ in range(3):
            launch(kernel, (1,))
        assert load.loads == 0
    assert load.loads == 1 and len(built) == 1 and not module.warming_up()


def test_what_triton_does_first_is_done_in_the_background(monkeypatch):
    done = threading.Event()
    monkeypatch.setattr(triton.runtime.cache, "triton_key", done.set)
    module.prepare()
    assert done.wait(10)
    monkeypatch.delattr(triton.runtime.cache, "triton_key")
    module.prepare()


def test_kernels_are_compiled_and_loaded_on_one_device(built, monkeypatch):
    """What another one launches too is one kernel to Triton, which in the context of both it cannot be."""
    now, loaded, compiled = [1], [], []

    @contextlib.contextmanager
    def device(number):
        before, now[0] = now[0], number
        yield
        now[0] = before

    class Noting(Kernel):
        def warmup(self, *args, grid):
            compiled.append(now[0])
            return self

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    kernels = [Noting(lambda: loaded.append(now[0])) for _ in range(3)]
    with warmup():
        for number, kernel in enumerate(kernels):
            with torch.cuda.device(number % 2):
                launch(kernel, (1,))
    assert compiled == loaded == [1, 1, 1] and now == [1]
