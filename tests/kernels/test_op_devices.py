"""Operations launch on the device of their tensors, whichever is the current one."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from accel_kernels.op import Op


@pytest.mark.parametrize(("here", "entered"), [(1, []), (0, [torch.device("cuda", 1)])])
def test_an_operation_runs_where_its_input_is(monkeypatch, here, entered):
    found = []

    @contextlib.contextmanager
    def device(place):
        found.append(place)
        yield

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: here)
    monkeypatch.setattr(torch.cuda, "device", device)
    op = Op("doubled", lambda x: 2 * x.value, "nowhere:nothing", lambda x: "not supported")
    assert op(SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1), value=3)) == 6
    assert found == entered
