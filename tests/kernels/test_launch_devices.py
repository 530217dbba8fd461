"""Kernels launch on the device of their tensors, whichever is the current one."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from accel_kernels.warmup import launch


class There(torch.Tensor):
    """A tensor that says it lies on the second of two GPUs."""

    device = torch.device("cuda", 1)


@pytest.fixture
def entered(monkeypatch):
    """Devices that were made the current one, of two, of which the first is."""
    found, now = [], [0]

    @contextlib.contextmanager
    def device(place):
        found.append(place)
        before, now[0] = now[0], place.index
        yield
        now[0] = before

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    return found


class Kernel:
    def __init__(self):
        self.launched_on = []

    def __getitem__(self, grid):
        return lambda *args: self.launched_on.append(torch.cuda.current_device())


def test_a_kernel_is_launched_where_its_tensors_are(entered):
    kernel, x = Kernel(), torch.zeros(2).as_subclass(There)
    descriptor = SimpleNamespace(base=x)
    for args in ((x,), (None, 3, x, torch.zeros(1)), (descriptor, 1)):
        launch(kernel, (1,), *args)
    assert kernel.launched_on == [1, 1, 1] and entered == [There.device] * 3
    with torch.cuda.device(There.device):
        launch(kernel, (1,), x)
    assert kernel.launched_on[3:] == [1] and len(entered) == 4
    launch(kernel, (1,), 1, torch.zeros(1))  # the interpreter's
    assert kernel.launched_on[4:] == [0] and torch.cuda.current_device() == 0
