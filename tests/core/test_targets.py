"""Whatever holds models: they are found inside, give what stock gives, and are as before after `restore`."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import accel
from accel.patching.fast_forward import FastForward
from accel.planning.targets import holders_in, models_in, parts_in
from support.patched import fast_forwards
from support.state import assert_same_state, snapshot
from support.targets import TARGETS


@pytest.fixture
def alone():
    """A group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def calls(monkeypatch):
    """How often forwards of ours were called."""
    found, call = [], FastForward.__call__

    def counted(self, *args, **kwargs):
        found.append(self.path)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(FastForward, "__call__", counted)
    return found


def state(obj) -> list[dict]:
    """Of all that may be changed: models and what is around them."""
    modules = {id(one): one for one in (*models_in(obj).values(), *holders_in(obj)) if isinstance(one, nn.Module)}
    others = [one for one in (*parts_in(obj).values(), *holders_in(obj)) if not isinstance(one, nn.Module)]
    return [*(snapshot(module) for module in modules.values()), *(dict(vars(one)) for one in others)]


def same_state(before: list[dict], after: list[dict]) -> None:
    for one, other in zip(before, after, strict=True):
        if any(isinstance(key, tuple) for key in one):
            assert_same_state(one, other)
        else:
            assert one.keys() == other.keys()  # pipelines count their calls, schedulers make timesteps
            kept = {name: value for name, value in one.items() if not isinstance(value, int | torch.Tensor)}
            assert not [name for name, value in kept.items() if other[name] is not value]


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.share(1)
@pytest.mark.filterwarnings("ignore")
def test_what_holds_models(name, alone, calls):
    (obj, call), (stock, _) = TARGETS[name](), TARGETS[name]()
    with torch.no_grad():
        wanted = call(stock)
        call(obj)  # some of it is made by the first call
        before = state(obj)
        assert accel.optimize(obj) is obj
        models = models_in(obj)
        assert models and all(map(fast_forwards, models.values())), list(models)
        calls.clear()
        for got, one in zip(call(obj), wanted, strict=True):
            torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-4)
        assert calls and accel.report(obj).fallbacks == []
        assert all(any(site[0].startswith(path) for site in accel.report(obj).sites) for path in models)
        accel.restore(obj)
        same_state(before, state(obj))
        assert all(torch.equal(got, one) for got, one in zip(call(obj), wanted, strict=True))
    assert "not optimized" in str(accel.report(obj))
