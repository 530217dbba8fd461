"""Models that choose experts are tried with the routing fixed: near-ties are no error, wrong formulas are."""

import copy

import pytest
import torch

import accel
from accel.llm.generation import routing, self_test
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.routing import noting, repeating, routing_modules
from accel.llm.generation.trial import fused_layers, fused_logits, stock_logits
from accel.llm.recording.errors import NotUnderstood
from accel.llm.recording.recorder import resting
from accel.llm.runtime.experts import ExpertsForward
from accel.llm.runtime.softmax_attention import BoundSoftmaxAttention
from support.llm.families import make
from support.llm.runtime.near_ties import deep_gpt_oss


def forward_of(model) -> DecoderForward | None:
    return vars(model).get("forward")


def test_near_ties_of_routers_are_no_error():
    model = deep_gpt_oss()
    accel.optimize(model)
    forward = forward_of(model)
    assert type(forward) is DecoderForward, accel.report(model)
    assert len(forward.experts) == 12 and forward.convention.fills
    lengths = (10, 1)
    with resting(model):
        wanted, _ = stock_logits(forward, lengths)
        with fused_layers(forward):
            with noting(2, wanted.choices.notes) as ours:
                free = fused_logits(forward, lengths)
            with wanted.routed():
                fixed = fused_logits(forward, lengths)
    pairs = [zip(notes, wanted.choices.notes[module], strict=True) for module, notes in ours.notes.items()]
    astray = [not torch.equal(*(note[0].sort().values for note in pair)) for of_one in pairs for pair in of_one]
    assert any(astray)
    assert wanted.agrees(fixed) and wanted.off(fixed) < 0.5 * wanted.off(free)
    assert wanted.moves() < 0.5 * wanted.row_off(free)  # by rounding alone


def scaled(factor):
    def wrong(self, fast, *given):
        return factor * fast(self, *given)

    return wrong


def swapped(self, fast, x, index, shares):
    return fast(self, x, index ^ 1, shares)


def equal_shares(self, fast, x, index, shares):
    return fast(self, x, index, shares.mean(-1, keepdim=True).expand_as(shares))


@pytest.mark.parametrize(
    ("dtype", "wrong"),
    [
        (torch.bfloat16, scaled(1.5)),
        (torch.bfloat16, swapped),
        (torch.bfloat16, equal_shares),
        (torch.float32, scaled(1.01)),
        (torch.float32, equal_shares),
    ],
    ids=["bf16-scaled", "bf16-swapped", "bf16-shares", "fp32-scaled", "fp32-shares"],
)
def test_wrong_experts_are_refused(dtype, wrong, monkeypatch):
    fast = ExpertsForward.fast
    model = deep_gpt_oss(dtype, layers=4)
    analyzed = self_test.find_convention

    def trying(forward):  # what is recognized part by part is right: only the whole is wrong
        with monkeypatch.context() as patch:
            patch.setattr(ExpertsForward, "fast", lambda self, *given: wrong(self, fast, *given))
            return analyzed(forward)

    monkeypatch.setattr("accel.llm.family.find_convention", trying)
    accel.optimize(model)
    refused(model)


def refused(model) -> None:
    assert type(forward_of(model)) is not DecoderForward
    reason = next(reason for _, rule, _, reason in accel.report(model).sites if rule == "language model")
    assert "the whole model computes something else than its parts: logits are off" in reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_wrong_sinks_are_refused(dtype, monkeypatch):
    model, make_bound = deep_gpt_oss(dtype, layers=4), BoundSoftmaxAttention.__init__

    def wrong(self, *given):
        make_bound(self, *given)
        self.sinks = self.sinks + 3

    monkeypatch.setattr(BoundSoftmaxAttention, "__init__", wrong)
    accel.optimize(model)
    refused(model)


def test_prompts_are_not_filled_up_where_stock_code_computes_experts(monkeypatch):
    monkeypatch.setattr("accel.llm.family._inside", lambda layers, context: ([], []))
    model = accel.optimize(make("mixtral"))
    assert type(forward_of(model)) is DecoderForward and not forward_of(model).convention.fills


def test_choices_that_cannot_be_noted_are_judged_by_the_median(monkeypatch):
    monkeypatch.setattr(routing, "_chosen", lambda args, kwargs: None)
    forward = forward_of(accel.optimize(make("mixtral")))
    assert type(forward) is DecoderForward and not forward.convention.fills
    assert stock_logits(forward, (5, 1))[0].median
    assert not stock_logits(forward_of(accel.optimize(make("llama"))), (5, 1))[0].median


def test_choices_are_repeated_call_by_call():
    model = make("mixtral")
    forward = forward_of(accel.optimize(copy.deepcopy(model)))
    modules = routing_modules(forward)
    experts = forward.experts[0].module
    assert experts in modules and not any(layer.module in modules for layer in forward.layers)
    x, index, shares = torch.randn(4, 64), torch.tensor([[0, 1], [2, 3], [3, 1], [1, 0]]), torch.rand(4, 2)
    with noting(2, modules) as choices:
        wanted = experts(x, index, shares)
    assert list(choices.notes) == [experts]
    with repeating(choices):
        assert torch.equal(experts(x, index.flip(0), top_k_weights=shares.flip(0)), wanted)
        with pytest.raises(NotUnderstood, match="otherwise"):
            experts(x, index, shares)
    assert torch.equal(experts(x, index, shares), wanted) and not experts._forward_pre_hooks
    longer = torch.stack([x[:2], x[2:]]).repeat(1, 2, 1).view(8, 64)  # each row goes on
    with repeating(choices):
        found = experts(longer, index.repeat(2, 1) * 0, shares.repeat(2, 1)).view(2, 4, 64)
    torch.testing.assert_close(found[:, :2].reshape(4, 64), wanted)
    for tokens in (3, 9):
        with repeating(choices), pytest.raises(NotUnderstood, match="other tokens"):
            experts(torch.randn(tokens, 64), torch.zeros(tokens, 2, dtype=torch.int64), torch.rand(tokens, 2))
