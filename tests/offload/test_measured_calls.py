"""What calls need beside the weights of a budget, which calls tell it, and when weights are gone."""

import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from accel_kernels import Quantized, rms_norm

import accel
from accel.llm.logits import Logits
from accel.offload.blocks import sizes_of
from accel.offload.call_hooks import streamed_model as streamed
from accel.verification.call import SeededCall
from support.llm.families import make
from support.noted import noted
from support.objects.streaming import bert, flux, llama, same, stored, within

pytestmark = pytest.mark.usefixtures("streaming")


@torch.no_grad()
def test_models_are_measured_one_after_the_other():
    """A peak is the process's: who begins another one in between makes the first too small."""
    (first, call), (second, other) = flux(), flux()
    for model in (first, second):
        accel.optimize(model, memory=within(model, 0.5))
    between = threading.Thread(target=torch.no_grad()(other), args=(second,))
    hook = first.transformer_blocks[1].register_forward_pre_hook(lambda *given: between.start() or between.join(20))
    call(first)
    hook.remove()
    assert streamed(first).measured and not streamed(second).measured and not between.is_alive()
    other(second)
    assert streamed(second).measured


@torch.no_grad()
def test_a_call_in_which_kernels_were_checked_is_not_measured(monkeypatch):
    """References and copies take memory once: blocks would stream for good that have room."""
    monkeypatch.setitem(vars(rms_norm), "outcomes", SimpleNamespace(outcomes={}, rows=list))
    model, call = flux()
    accel.optimize(model, memory=within(model, 0.5))
    first = model.register_forward_pre_hook(lambda *_: rms_norm.outcomes.outcomes.update(kind="agrees"))
    call(model)
    first.remove()
    assert not streamed(model).measured
    call(model)
    assert streamed(model).measured


@torch.no_grad()
def test_a_restored_model_is_gone_with_its_last_name():
    """Rather than when cycles are collected: until then its weights would take memory of the next one's budget."""
    model, call = flux()
    accel.optimize(model, memory=within(model, 0.8), graphs=False)
    call(model)
    gc.collect()
    gc.disable()
    try:
        found = weakref.ref(accel.restore(model))
        del model
        assert found() is None
    finally:
        gc.enable()


@torch.no_grad()
def test_a_model_in_few_bits_is_read_once_while_it_is_examined(monkeypatch):
    """On the CPU, in some fifteen forwards."""
    model = accel.quantize(make("llama", num_hidden_layers=2), "int4-g32")
    linears, count, write = sum(hasattr(one, "quantized") for one in model.modules()), [], Quantized._dequantized
    monkeypatch.setattr(Quantized, "_dequantized", lambda self, dtype: count.append(dtype) or write(self, dtype))
    accel.optimize(model, memory=2 * sizes_of(model).total)
    assert linears == 14 and linears <= len(count) <= 2 * linears
    assert not accel.report(model).fallbacks and torch.equal(*(model(torch.tensor([[5, 1]])).logits for _ in range(2)))


@pytest.mark.parametrize(("make", "weights"), [(llama, "int8"), (bert, None)])
def test_stock_is_compared_within_the_budget(make, weights, monkeypatch):
    """A call's inputs are on the GPU, while the weights without accel are where they came from."""
    model, _ = make()
    state = stored(model)
    accel.optimize(model, memory=within(model, 0.5), weights=weights)
    ran: list = []  # where the weights come from at each call, ours and stock
    noted(monkeypatch, Logits, "run", lambda *given: streamed(model), into=ran)
    noted(monkeypatch, SeededCall, "__call__", lambda *given: streamed(model), into=ran)
    quality = accel.verify(model, input_ids=torch.arange(1, 9)[None])
    assert all(part.passed for part in (quality.parts or {"": quality}).values()), quality
    assert None not in ran and len(set(map(id, ran))) > 1
    accel.restore(model)
    same(model, state)
