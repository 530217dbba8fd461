"""What calls on a CPU run: stock, unless a token was timed to take less fused, or the user wants it fused anyway."""

import copy
import pickle
from contextlib import contextmanager

import pytest
import torch
from transformers import DynamicCache

import accel
from accel.cuda_graphs import pays
from accel.diffusion.blocks.resnet import ResnetForward
from accel.errors import Refused
from accel.llm.generation import pace as pacing
from accel.llm.generation.decoder import DecoderForward
from accel.options import choose
from accel.patching.fallback_log import FallbackLog
from accel.patching.fast_forward import FastForward
from accel.patching.owner import OWNER
from accel.planning.plan import PLAN
from accel.planning.whole_models import ON_CPU
from support.llm.edits.places import lora
from support.llm.families import make
from support.noted import noted

IDS = torch.arange(1, 9).view(1, 8)


def told(model):
    return [(status, reason) for _, rule, status, reason in accel.report(model).sites if rule == ON_CPU]


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """The options as they are asked for: elsewhere tests run fused on a CPU."""
    monkeypatch.setattr("accel.api.choose", choose)
    monkeypatch.setattr(pays, "GAIN", 0.97)


@pytest.fixture
def fused(monkeypatch):
    """What ran fused, of an image model and of a language model."""
    ran = noted(monkeypatch, ResnetForward, "fast", lambda self, *args, **kwargs: type(self))
    return noted(monkeypatch, DecoderForward, "run", lambda self, *args, **kwargs: type(self), ran)


@pytest.fixture
def timed(monkeypatch):
    """Says what a token takes, fused and stock."""
    return lambda *seconds: monkeypatch.setattr("accel.llm.stages.pace", lambda model, log: seconds)


@pytest.fixture(params=[False, True], ids=["no GPU here", "a GPU here"])
def gpu(request, monkeypatch):
    """Whether the model could be moved to a GPU, as far as the decision knows."""
    monkeypatch.setattr("accel.planning.whole_models.gpu_here", lambda: request.param)
    return request.param


def patched(model):
    return sum(isinstance(vars(module).get("forward"), FastForward) for module in model.modules())


def generate(model):
    with torch.no_grad():
        return model.generate(IDS, max_new_tokens=5, do_sample=False, return_dict_in_generate=True, pad_token_id=0)


def test_image_models_run_stock(tiny, fused, gpu):
    model = tiny.unet()
    twin, before, inputs = copy.deepcopy(model), tiny.snapshot(model), tiny.inputs(model)
    accel.optimize(model, cpu="auto")
    assert bool(patched(model)) is gpu
    assert "on this CPU it runs stock" in accel.report(model).summary()
    fused.clear()
    for one in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        with torch.no_grad():
            assert torch.equal(one(**inputs).sample, twin(**inputs).sample)
        assert not fused and accel.report(one).fallbacks == []
    assert [status for status, _ in told(model)] == ["skipped"] and "stock" in told(model)[0][1]
    accel.restore(model)
    tiny.assert_same_state(before, tiny.snapshot(model))


@pytest.mark.parametrize("option", [{"cpu": "fuse"}, {"strict": True}, {"step_cache": 2}], ids=str)
def test_they_run_fused_where_that_was_asked_for(tiny, fused, option):
    model = tiny.unet()
    accel.optimize(model, **({"cpu": "auto"} | option))
    fused.clear()
    with torch.no_grad():
        model(**tiny.inputs(model))
    assert fused and told(model) == []


def test_a_language_model_runs_stock_where_a_token_takes_longer_fused(fused, timed, gpu):
    model = make("llama")
    twin = copy.deepcopy(model)
    timed(2.0, 1.0)
    accel.optimize(model, cpu="auto")
    fused.clear()
    mine, stock = generate(model), generate(twin)
    assert torch.equal(mine.sequences, stock.sequences)
    assert type(mine.past_key_values.layers[0]) is type(stock.past_key_values.layers[0])  # nobody adopted it
    assert not fused and accel.report(model).fallbacks == [] and bool(patched(model)) is gpu
    after = "fused once it is on a GPU" if gpu else "fused where there is a GPU"
    assert told(model) == [("skipped", f"runs stock there: 2000.00 ms a token fused, 1000.00 stock; {after}")]
    pytest.importorskip("peft")
    lora("style", 0)(model)
    for one in (model, copy.deepcopy(model)):  # stock would give every prompt the adapters that are active
        with pytest.raises(Refused, match="adapter= and pictures are not for stock's own batching"):
            one.generate_batch([[3, 4]], max_new_tokens=2, adapter="style")
    assert not {"generate_batch", PLAN, OWNER} & vars(accel.restore(model)).keys()


@pytest.mark.parametrize("stock", [1.0, 0.91], ids=["gain", "noise"])
def test_it_runs_fused_where_a_token_takes_clearly_less(fused, timed, stock):
    model = make("llama")
    timed(0.9, stock)
    accel.optimize(model, cpu="auto")
    fused.clear()
    generate(model)
    assert bool(fused) is (stock == 1.0)
    assert [status for status, _ in told(model)] == ["patched" if fused else "skipped"]


@pytest.mark.parametrize("option", [{"weights": "int8"}, {"kv_cache": "int8"}, {"cpu": "fuse"}], ids=str)
def test_what_is_asked_for_by_name_is_not_timed(fused, timed, option):
    model = make("llama")
    timed(2.0, 1.0)
    accel.optimize(model, **({"cpu": "auto"} | option))
    fused.clear()
    generate(model)
    assert fused and told(model) == []


def test_a_model_that_cannot_be_timed_runs_stock(fused, monkeypatch):
    def broken(model, log):
        raise IndexError("list index out of range")

    monkeypatch.setattr("accel.llm.stages.pace", broken)
    model = make("llama")
    accel.optimize(model, cpu="auto")
    fused.clear()
    generate(model)
    assert not fused and "not timed: IndexError: list index out of range" in told(model)[0][1]


class Clock:
    """Stands for `time` where it is asked: a second passes at each question, and what calls add."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1.0
        return self.now


def test_both_kinds_are_timed_alike_and_leave_nothing(fused, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(pays, "time", clock)
    monkeypatch.setattr(pacing, "SECONDS", 1000.0)
    run = DecoderForward.run

    def slow(self, *args, **kwargs):
        clock.now += 2.0
        return run(self, *args, **kwargs)

    @contextmanager
    def unpaged(model):
        clock.now += 5.0  # no part of a call
        yield

    monkeypatch.setattr(pacing, "unpaged", unpaged)
    model = accel.optimize(make("llama"), cpu="fuse").train()
    monkeypatch.setattr(DecoderForward, "run", slow)
    fused.clear()
    log = vars(model)[PLAN].log
    assert pacing.pace(model, log) == (4.0, 2.0)
    assert len(fused) == 1 + pacing.WARM + pacing.MOST  # a prompt, and as many tokens as are timed at most
    assert model.training and not log.stock_on_cpu and log.rows() == []
    monkeypatch.setattr(pacing, "SECONDS", 0.5)
    fused.clear()
    assert pacing.pace(model, log) == (4.0, 2.0) and len(fused) == 1 + pacing.WARM + 2


def test_tensors_elsewhere_do_not_rest():
    here, elsewhere = torch.ones(1), torch.ones(1, device="meta")
    log = FallbackLog(stock_on_cpu=True)
    assert log.runs_stock_on_cpu((None, here), {}) and log.runs_stock_on_cpu((), {"scale": 1.0, "x": here})
    assert not log.runs_stock_on_cpu((elsewhere, here), {}) and not log.runs_stock_on_cpu((), {})
    assert not FallbackLog().runs_stock_on_cpu((here,), {})


def test_a_model_with_hooks_is_not_run_to_be_timed():
    model, calls = make("llama"), []
    model.model.layers[0].mlp.register_forward_hook(lambda *args: calls.append(1))
    accel.optimize(model, cpu="auto")
    assert calls == [] and all("not timed" in reason for _, reason in told(model))
    with torch.no_grad():
        model(IDS, past_key_values=DynamicCache())
    assert len(calls) == 1
