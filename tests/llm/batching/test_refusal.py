"""Which models are batched: those whose texts come out together as they do alone."""

import pytest
import torch

from accel.llm.batching.refusal import _large, refusal
from accel.llm.batching.step import StepSize
from accel.llm.generation.decoder import DecoderForward
from support.llm.batching.engines import engine_of, forward_of
from support.llm.families import FAMILIES, available, every

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


def test_it_is_told_why_it_could_not_be_tried(pair, monkeypatch):
    model, _ = pair("llama")
    monkeypatch.setattr(DecoderForward, "over", lambda *_: 1 / 0)
    assert "could not be tried: ZeroDivisionError" in refusal(forward_of(model))


def test_errors_of_the_gpu_are_raised(pair, monkeypatch):
    model, _ = pair("llama")

    def fail(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(DecoderForward, "over", fail)
    with pytest.raises(torch.OutOfMemoryError):
        refusal(forward_of(model))


def test_stock_on_a_cpu(pair):
    model, _ = pair("llama")
    forward_of(model).ledger.stock_on_cpu = True
    assert refusal(forward_of(model)) == "it runs stock on a CPU"


def test_a_large_step_is_one_that_no_graph_is_made_for(pair_of):
    """What is compiled ahead; its numbers are as those of a step that runs."""
    plan = _large()
    assert StepSize.filled(plan, 64) is None and len(plan.tokens) == plan.news.sum() > 1024
    model, _ = pair_of("llama")
    engine = engine_of(model, rows=2, context=64)
    assert engine.steps.logits(plan).shape == (1, model.config.vocab_size)
