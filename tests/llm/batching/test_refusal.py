"""Which models are batched: those whose texts come out together as they do alone."""

import pytest
import torch
from transformers.generation.continuous_batching.utils import WorkloadHints

import accel
from accel.llm.batching.manager import BatchManager
from accel.llm.batching.step import StepSize
from accel.llm.batching.trial import _large, refusal
from accel.llm.generation import routing, trial
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.trial import Expected
from accel.llm.moe.experts import ExpertsForward
from accel.llm.moe.router import RouterForward
from accel.llm.runtime.layer import BoundLayer
from accel.patching.fallback_log import FallbackLog
from support.everything import EVERYTHING
from support.llm.batching.engines import engine_of, forward_of
from support.llm.families import FAMILIES, available, every
from support.llm.near_ties import deep_gpt_oss, model_of

FAST = [family.name for family in FAMILIES if family.expected == "fast"]


@pytest.mark.parametrize(("name",), every(5, FAST))
def test_models_that_are_fused_whole_are_batched(name, pair_of):
    model, _ = pair_of(name)
    assert refusal(forward_of(model)) is None


def by_company(fast):
    def forward(self, x, *more):
        logits, shares, index = fast(self, x, *more)
        return logits, shares, (index + len(x)) % 4

    return forward


def by_another(fast):
    return lambda self, x, index, shares: fast(self, x.roll(1, 0), index, shares)


def by_neighbors(logits_of):
    """As if all tokens of a call were of one text."""
    return lambda self, step, tokens, *rest: logits_of(self, step, tokens.roll(1, 1), *rest)


SOME = next(family.name for family in FAMILIES if family.expected == "some" and available(family.kind))
REFUSED = [
    (SOME, None, None, "", "some of its layers run stock"),
    ("llama", by_neighbors, DecoderForward, "logits_of", "together, texts come out as others"),
    ("mixtral", by_company, RouterForward, "fast", "together, routers choose other experts"),
    ("mixtral", by_another, ExpertsForward, "fast", "together, texts come out as others"),
    ("llama", lambda own: lambda *_: 1 / 0, DecoderForward, "logits_of", "could not be tried: ZeroDivisionError"),
    ("llama", lambda own: lambda *_: True, FallbackLog, "runs_stock_on_cpu", "it runs stock on a CPU"),
]


@torch.no_grad()
@pytest.mark.share(1)
@pytest.mark.parametrize(("name", "wrong", "kind", "method", "reason"), REFUSED)
def test_what_stock_batches(name, wrong, kind, method, reason, pair, monkeypatch):
    model, _ = pair(name)
    if wrong is not None:
        monkeypatch.setattr(kind, method, wrong(getattr(kind, method)))
    assert reason in refusal(forward_of(model))


def rounded_by_company(fast):
    """As products of another number of rows round: each number by half a step of bf16, up or down."""

    def forward(self, x, index, shares):
        noise = torch.randn(len(x), x.shape[1], generator=torch.Generator().manual_seed(len(x)))
        return (fast(self, x, index, shares).float() * (1 + 2**-8 * noise)).to(x.dtype)

    return forward


@pytest.mark.skipif(not EVERYTHING, reason="seconds of work; ACCEL_TEST_EVERYTHING=1 runs it")
@torch.no_grad()
def test_near_ties_of_routers_are_no_reason(monkeypatch):
    """Chosen freely, the texts of such a model come out as others by rounding alone."""
    forward = forward_of(accel.optimize(deep_gpt_oss(layers=24, spread=0.2)))
    monkeypatch.setattr(ExpertsForward, "fast", rounded_by_company(ExpertsForward.fast))
    assert refusal(forward) is None
    with monkeypatch.context() as patch:
        patch.setattr(routing, "_chosen", lambda args, kwargs: None)
        assert "come out as others" in refusal(forward)


def layers_rounded_by_company(layer):
    def forward(self, kernels, step, x, kwargs):
        y = layer(self, kernels, step, x, kwargs)
        seed = 100 * self.spec.attention.index + x.shape[:2].numel()
        noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed))
        return (y.float() * (1 + 2**-7 * noise)).to(y.dtype)

    return forward


def layers_that_look_around(layer):
    def forward(self, kernels, step, x, kwargs):
        return layer(self, kernels, step, x + 0.2 * x.mean((0, 1)), kwargs)

    return forward


@torch.no_grad()
@pytest.mark.turns(4)
def test_rounding_that_a_deep_model_amplifies_is_no_reason(monkeypatch):
    forward, layer, moved = forward_of(accel.optimize(model_of("llama", num_hidden_layers=14))), BoundLayer.__call__, []

    def moves(self):
        moved.append(Expected.moves(self))
        return moved[-1]

    monkeypatch.setattr(trial, "Expected", type("Watched", (Expected,), {"moves": moves}))
    monkeypatch.setattr(BoundLayer, "__call__", layers_rounded_by_company(layer))
    assert refusal(forward) is None and len(moved) == 1 and moved[0] < 0.1
    monkeypatch.setattr(BoundLayer, "__call__", layers_that_look_around(layer))
    assert refusal(forward) == "together, texts come out as others"


def test_errors_of_the_gpu_are_raised(pair, monkeypatch):
    model, _ = pair("llama")

    def fail(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(DecoderForward, "logits_of", fail)
    with pytest.raises(torch.OutOfMemoryError):
        refusal(forward_of(model))


def test_steps_that_are_compiled_ahead(pair_of):
    """Large ones are those that no graph is made for; numbers are as those of steps that run."""
    plans = _large()
    assert [len(plan.tokens) for plan in plans] == [plan.query_lengths.sum() for plan in plans]
    assert [StepSize.filled(plan, 64) is None and len(plan.tokens) > 1024 for plan in plans] == [True, True, False]
    model, _ = pair_of("llama")
    engine = engine_of(model, rows=2, context=64)
    found = [engine.steps.logits(plan).shape for plan in plans]
    assert found == [(len(plan.draw_rows), model.config.vocab_size) for plan in plans]


@pytest.mark.parametrize("name", ["llama-rope-dynamic", "phi3-longrope"])
def test_texts_that_change_the_frequencies_of_others_are_stocks(name, pair):
    model, _ = pair(name)
    for most, ours in ((8, True), (9, False)):
        made = model.init_continuous_batching(workload_hints=WorkloadHints(4, most, 2))
        assert isinstance(made, BatchManager) == ours
    reason = "generate_batch: texts of more than 12 tokens change the rotary frequencies"
    assert [why.startswith(reason) for _, why, _ in accel.report(model).fallbacks] == [True]
