"""A model that is optimized and restored while other threads are in calls of it: each ends by the way it began."""

import threading

import pytest
import torch
from torch.overrides import TorchFunctionMode

import accel
from accel import in_flight
from accel.diffusion.blocks.resnet import ResnetForward
from accel.errors import InUse
from accel.fusion.channels_last import ChannelsLast
from accel.fusion.stacked_linears import Stacked
from accel.llm.generation import routing
from accel.llm.generation.layer_forward import LayerForward
from accel.llm.recording.resting import resting
from accel.patching import probe
from support.llm.families import make, padded
from support.patched import fast_forwards
from support.state import assert_same_state, snapshot
from support.together import meeting

ATTENTION = torch.nn.functional.scaled_dot_product_attention
RELEASE = 0.3  # seconds after which a call goes on that nobody waits for


class Call(threading.Thread):
    """A call on a thread of its own, which may be held within, and what it gives."""

    def __init__(self, call, hold_stock: int = 0, begun: bool = True):
        super().__init__(name="caller", daemon=True)
        self.call, self.hold_stock = call, hold_stock
        self.begin, self.held, self.go = threading.Event(), threading.Event(), threading.Event()
        self.found = None
        self.start()
        if begun:
            self.begin.set()
        if hold_stock:
            assert self.held.wait(20)

    @torch.no_grad()
    def run(self):
        self.begin.wait(20)
        with Holding(self):
            self.found = self.call()

    def hold(self):
        self.held.set()
        assert self.go.wait(20)

    def result(self) -> torch.Tensor:
        self.go.set()
        self.join(20)
        return self.found


class Holding(TorchFunctionMode):
    """Holds a thread's stock call at its n-th attention."""

    def __init__(self, call: Call):
        super().__init__()
        self.thread, self.left = call, call.hold_stock

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is ATTENTION:
            self.left -= 1
            if self.left == 0:
                self.thread.hold()
        return function(*args, **(kwargs or {}))


def hold_fast(monkeypatch, kind, number: int) -> None:
    """Calls on threads are held at their n-th forward of this class."""
    fast, counts = kind.fast, {}

    def holding(self, *args, **kwargs):
        thread = threading.current_thread()
        if isinstance(thread, Call):
            counts[thread] = counts.get(thread, 0) + 1
            if counts[thread] == number:
                thread.hold()
        return fast(self, *args, **kwargs)

    monkeypatch.setattr(kind, "fast", holding)


def language(mask: bool, name: str = "llama"):
    model = make(name)
    ids, rows = padded()
    given = {"attention_mask": rows} if mask else {}
    return model, lambda: model(ids, **given).logits[:, -1]


def image(tiny):
    model = tiny.unet()
    inputs = tiny.inputs(model)
    return model, lambda: model(**inputs).sample


@pytest.fixture(params=["mask", "no mask", "image"])
def subject(request, tiny):
    """A model and a call of it."""
    return image(tiny) if request.param == "image" else language(request.param == "mask")


def test_what_a_trial_hooks_into_a_model_is_for_its_own_calls(monkeypatch):
    """Experts are given other choices there."""
    model, call = language(mask=True, name="mixtral")
    with torch.no_grad():
        wanted = call()
    repeat, found = routing._repeat, []

    def meet(*args):
        if threading.current_thread() is threading.main_thread() and len(found) < 3:
            found.append(Call(call).result())
        return repeat(*args)

    monkeypatch.setattr(routing, "_repeat", meet)
    accel.optimize(model)
    assert len(found) == 3 and all(torch.equal(one, wanted) for one in found)


@pytest.mark.parametrize("mask", [True, False])
def test_while_a_model_is_looked_at_and_tried_calls_are_stock(mask):
    """One that began before, and goes on in the midst of it; and others that begin there."""
    model, call = language(mask)
    with torch.no_grad():
        wanted = call()
    before, found = Call(call, hold_stock=2), []
    meeting(model, lambda: found.append(before.result() if not found else Call(call).result()))
    accel.optimize(model)
    assert len(found) > 4 and len(fast_forwards(model)) > 3
    assert all(torch.equal(one, wanted) for one in found)


def test_what_is_changed_waits_for_the_call_in_it(subject, monkeypatch):
    """Weights move, and forwards go, once it has ended by the way it began."""
    model, call = subject
    with torch.no_grad():
        stock = call()
    moved = []
    for name in ("apply", "undo"):
        change = getattr(Stacked, name)
        monkeypatch.setattr(Stacked, name, lambda self, do=change: moved.append(running.go.is_set()) or do(self))
    running = Call(call, hold_stock=2)
    threading.Timer(RELEASE, running.go.set).start()
    accel.optimize(model)
    assert torch.equal(running.result(), stock) and moved and all(moved)
    with torch.no_grad():
        fused = call()
    moved.clear()
    hold_fast(monkeypatch, ResnetForward if "sample" in call.__code__.co_names else LayerForward, 2)
    running = Call(call)
    assert running.held.wait(20)
    threading.Timer(RELEASE, running.go.set).start()
    accel.restore(model)
    assert torch.equal(running.result(), fused) and moved and all(moved)
    assert torch.equal(Call(call).result(), stock)


def test_calls_that_come_while_a_model_is_changed_wait(subject, monkeypatch):
    model, call = subject
    accel.optimize(model)
    undo, running = Stacked.undo, Call(call, begun=False)

    def meet(self):
        running.begin.set()
        running.join(0.1)
        assert running.found is None and running.is_alive()
        undo(self)

    monkeypatch.setattr(Stacked, "undo", meet)
    accel.restore(model)
    with torch.no_grad():
        assert torch.equal(running.result(), call())
    assert not any(in_flight.GATE in vars(module) for module in model.modules())


def test_a_call_that_does_not_end_is_told(monkeypatch):
    """Nothing is changed then, and later all is as ever."""
    model, call = language(mask=True)
    with torch.no_grad():
        stock = call()
    monkeypatch.setattr(in_flight, "PATIENCE", 0.05)
    told = "a call of LlamaForCausalLM on thread 'caller' has not ended within 0.05 seconds"
    before, running = snapshot(model), Call(call, hold_stock=2)
    with pytest.raises(InUse, match=told):
        accel.optimize(model)
    assert_same_state(before, snapshot(model))
    assert torch.equal(running.result(), stock)
    accel.optimize(model)
    with monkeypatch.context() as patch:
        hold_fast(patch, LayerForward, 2)
        running = Call(call)
        assert running.held.wait(20)
        with pytest.raises(InUse, match=told):
            accel.restore(model)
    assert len(fast_forwards(model)) > 3
    running.result()
    accel.restore(model)
    assert_same_state(before, snapshot(model))


def test_a_block_that_is_probed_in_full_precision_is_nobody_elses(tiny, monkeypatch):
    model = tiny.unet().to(torch.bfloat16)
    inputs = {name: one.bfloat16() if one.is_floating_point() else one for name, one in tiny.inputs(model).items()}
    with torch.no_grad():
        stock = model(**inputs).sample
    compare, running = probe._compare, Call(lambda: model(**inputs).sample, begun=False)

    def meet(*args):
        if args[-1] is probe.BLOCK_WIDENED:
            running.begin.set()
            running.join(0.1)
        return compare(*args)

    monkeypatch.setattr(probe, "_compare", meet)
    accel.optimize(model)
    assert torch.equal(running.result(), stock)


def test_a_layout_follows_the_device_where_nobody_is_inside(monkeypatch):
    class Held(torch.nn.Module):
        def forward(self, x):
            threading.current_thread().hold()
            return x

    conv = torch.nn.Conv2d(3, 4, 3)
    model = torch.nn.Sequential(Held(), conv)
    layout, running = ChannelsLast(model, [conv]), Call(lambda: model(torch.ones(1, 3, 4, 4)))
    monkeypatch.setattr(ChannelsLast, "lies_on_gpu", staticmethod(lambda weight: True))
    assert running.held.wait(20)
    layout.follow(torch.device("cuda"))
    assert conv.weight.is_contiguous() and not layout.on_gpu
    running.result()
    layout.follow(torch.device("cuda"))
    assert conv.weight.is_contiguous(memory_format=torch.channels_last) and layout.on_gpu


def test_a_model_that_trains_does_so_in_every_call():
    class Told(torch.nn.Module):
        def forward(self):
            return torch.tensor(self.training)

    model, running = Told(), Call(lambda: model(), begun=False)
    with resting(model):
        running.begin.set()
        running.join(0.1)
        assert running.is_alive() and not model.training
    assert running.result()
