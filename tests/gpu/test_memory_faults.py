"""Faults under `memory=` on a GPU: a clear error or the same result, and the card and RAM are as before."""

import copy
import gc
import os
import threading

import psutil
import pytest
import torch

import accel
from accel.bench.memory import device_bytes, release
from accel.comparison import relative_rms
from accel.errors import Refused
from accel.offload.blocks import nbytes
from accel.offload.call_hooks import streamed_model
from accel.offload.memory import HostBuffer
from support.objects.streaming import flux_on_card, within

CARD, ROOM = torch.device("cuda", 0), 2**28
LEFT = 2**27  # bytes: kernels and workspaces that stay loaded
ALONE = pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="reads the GPU's memory, which others take")
pytestmark = ALONE


@pytest.fixture(autouse=True)
def counted():
    """The card and this process's memory are as they were, but for what stays loaded."""
    model, call = flux_on_card()
    with torch.no_grad():
        call(accel.optimize(model, graphs=False))  # kernels and libraries are loaded
    del model, call
    release(CARD)
    card, ram = device_bytes(CARD), psutil.Process().memory_info().rss
    yield
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # each thread has its own
    release(CARD)
    assert device_bytes(CARD) - card < LEFT
    assert psutil.Process().memory_info().rss - ram < 4 * LEFT


def truth(model, call):
    """Whether a result is as near to that in float32 as stock's: kernels race, and round otherwise."""
    theirs, exact = call(model), call(copy.deepcopy(model).float())
    allowed = 1.5 * relative_rms(theirs, exact)
    return lambda got: relative_rms(got, exact) <= allowed


@pytest.fixture
def streamed():
    """A model, a call of it, whether what that gives is right, its values."""
    model, call = flux_on_card()
    before = {name: one.cpu() for name, one in model.state_dict().items()}
    with torch.no_grad():
        right = truth(model, call)
        accel.optimize(model, memory=within(model, 0.8, ROOM), graphs=False)
    yield model, call, right, before
    accel.restore(model).to("meta")  # which pytest holds until later
    before.clear()


def same(model, before):
    assert all(torch.equal(one.cpu(), before[name]) for name, one in model.state_dict().items())


@torch.no_grad()
def test_it_is_moved_by_hand_between_calls(streamed):
    model, call, right, before = streamed
    for move in ("cuda", "cpu", "cuda"):
        assert right(call(model))
        model.to(move)
        assert {one.device.type for one in model.parameters()} == {move}
    assert right(call(model))
    held = streamed_model(model)
    assert held.streamed and held.on_card <= held.budget.card
    same(model, before)
    accel.restore(model)
    same(model, before)


@torch.no_grad()
def test_an_interrupted_call_ends(streamed):
    model, call, right, before = streamed

    def interrupt(*given):
        raise KeyboardInterrupt

    for place in (model.single_transformer_blocks[3], model.transformer_blocks[1].ff, model.proj_out):
        hook = place.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            call(model)
        hook.remove()
        same(model, before)
        got = []
        other = threading.Thread(target=lambda got=got: got.append(torch.no_grad()(call)(model)))
        other.start()
        other.join(60)
        assert len(got) == 1 and right(got[0])


def test_gradients_are_refused(streamed):
    model, call, _, before = streamed
    loss = call(model.train()).float().square().mean()
    with pytest.raises(Refused, match="not kept for gradients"):
        loss.backward()
    accel.restore(model)
    same(model, before)


@torch.no_grad()
def test_nothing_can_be_pinned(monkeypatch):
    def refused(self, *given):
        raise RuntimeError("CUDA error: out of memory")

    model, call = flux_on_card()
    right = truth(model, call)
    monkeypatch.setattr(HostBuffer, "pin", lambda self, most=None, empty=False: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", refused)
    accel.optimize(model, memory=within(model, 1.0, ROOM), graphs=False)
    for _ in range(3):
        assert right(call(model))
    assert "not pinned" in str(accel.report(model))


@torch.no_grad()
def test_two_models_share_a_card_and_each_keeps_its_budget(streamed):
    model, call, right, before = streamed
    other = copy.deepcopy(accel.restore(copy.deepcopy(model))).cuda()
    accel.optimize(other, memory=within(other, 1.0, ROOM), graphs=False)
    for _ in range(3):
        assert right(call(model)) and right(call(other))
    for one in (model, other):
        held = streamed_model(one)
        assert held.streamed and held.on_card + held.outside <= held.budget.card
        same(one, before)
    del other
    gc.collect()
    assert right(call(model))


@torch.no_grad()
def test_it_is_saved_and_a_lora_comes_later(streamed, tmp_path):
    from peft import LoraConfig

    model, call, _, before = streamed
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    same(again, before)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 1.05 * nbytes(model)
    again.cuda()
    for one in (model, again):
        torch.manual_seed(1)
        one.add_adapter(LoraConfig(r=8, target_modules=["to_q", "to_v"], init_lora_weights=False))
    accel.optimize(again, graphs=False)
    wanted = [call(again) for _ in range(16)][-1]
    for _ in range(3):
        assert float((call(model) - wanted).abs().max()) <= 0.02 * float(wanted.abs().max())
    for merge in ("fuse_lora", "unfuse_lora"):
        for one in (model, again):
            getattr(one, merge)()
        wanted = call(again)
        assert float((call(model) - wanted).abs().max()) <= 0.02 * float(wanted.abs().max())
    assert streamed_model(model).streamed
