"""Which models are batched: those whose texts come out together as they do alone."""

import pytest
import torch

import accel
from accel.llm.batching.step import StepSize
from accel.llm.batching.trial import _large, refusal
from accel.llm.generation import routing, trial
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.trial import Expected
from accel.llm.moe.experts import ExpertsForward
from accel.llm.moe.router import RouterForward
from accel.llm.runtime.layer import BoundLayer
from support.everything import EVERYTHING
from support.llm.batching.engines import engine_of, forward_of
from support.llm.families import FAMILIES, available, every
from support.llm.near_ties import deep_gpt_oss, model_of

FAST = [family.name for family in FAMILIES if family.expected == "fast"]


@pytest.mark.parametrize(("name",), every(5, FAST))
def test_models_that_are_fused_whole_are_batched(name, pair_of):
    model, _ = pair_of(name)
    assert refusal(forward_of(model)) is None


def test_layers_that_run_stock(pair_of):
    name = next(family.name for family in FAMILIES if family.expected == "some" and available(family.kind))
    assert "some of its layers run stock" in refusal(forward_of(pair_of(name)[0]))


def test_a_model_that_looks_at_its_neighbours(pair, monkeypatch):
    """As if all tokens of a call were of one text."""
    model, _ = pair("llama")
    forward = forward_of(model)
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_hook(lambda module, args, out: out + out.roll(1, dims=1) * (out.shape[1] > 1))
    assert "come out as others" in refusal(forward)


def rounded_by_company(fast):
    """As products of another number of rows round: each number by half a step of bf16, up or down."""

    def forward(self, x, index, shares):
        noise = torch.randn(len(x), x.shape[1], generator=torch.Generator().manual_seed(len(x)))
        return (fast(self, x, index, shares).float() * (1 + 2**-8 * noise)).to(x.dtype)

    return forward


def deep_model():
    return accel.optimize(deep_gpt_oss(layers=24, spread=0.2))


@pytest.mark.skipif(not EVERYTHING, reason="seconds of work; ACCEL_TEST_EVERYTHING=1 runs it")
@torch.no_grad()
def test_near_ties_of_routers_are_no_reason(monkeypatch):
    """Chosen freely, the texts of such a model come out as others by rounding alone."""
    forward = forward_of(deep_model())
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


def by_company(fast):
    def forward(self, x, *more):
        logits, shares, index = fast(self, x, *more)
        return logits, shares, (index + len(x)) % 4

    return forward


def by_another(fast):
    return lambda self, x, index, shares: fast(self, x.roll(1, 0), index, shares)


@pytest.mark.parametrize(
    ("kind", "wrong", "reason"),
    [(RouterForward, by_company, "choose other experts"), (ExpertsForward, by_another, "come out as others")],
)
@torch.no_grad()
def test_experts_and_routers_that_look_at_their_neighbours(kind, wrong, reason, pair, monkeypatch):
    forward = forward_of(pair("mixtral")[0])
    monkeypatch.setattr(kind, "fast", wrong(kind.fast))
    assert reason in refusal(forward)


def test_it_is_told_why_it_could_not_be_tried(pair, monkeypatch):
    model, _ = pair("llama")
    monkeypatch.setattr(DecoderForward, "logits_of", lambda *_: 1 / 0)
    assert "could not be tried: ZeroDivisionError" in refusal(forward_of(model))


def test_errors_of_the_gpu_are_raised(pair, monkeypatch):
    model, _ = pair("llama")

    def fail(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(DecoderForward, "logits_of", fail)
    with pytest.raises(torch.OutOfMemoryError):
        refusal(forward_of(model))


def test_stock_on_a_cpu(pair):
    model, _ = pair("llama")
    forward_of(model).log.stock_on_cpu = True
    assert refusal(forward_of(model)) == "it runs stock on a CPU"


def test_steps_that_are_compiled_ahead(pair_of):
    """Large ones are those that no graph is made for; numbers are as those of steps that run."""
    plans = _large()
    assert [len(plan.tokens) for plan in plans] == [plan.news.sum() for plan in plans]
    assert [StepSize.filled(plan, 64) is None and len(plan.tokens) > 1024 for plan in plans] == [True, True, False]
    model, _ = pair_of("llama")
    engine = engine_of(model, rows=2, context=64)
    found = [engine.steps.logits(plan).shape for plan in plans]
    assert found == [(len(plan.drawn), model.config.vocab_size) for plan in plans]
