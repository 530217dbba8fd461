"""Kinds of attention are tried in turn, and each brings what binds it and what it keeps."""

from dataclasses import dataclass, fields

import pytest
import torch

import accel
from accel.llm import stages
from accel.llm.analysis.attention_kind import AttentionKind, understand_attention
from accel.llm.analysis.softmax_attention import SoftmaxSpec
from accel.llm.recording.errors import NotUnderstood
from accel.llm.runtime import attention_kinds
from support.llm.families import make, prompt


def kind(name: str, answer) -> AttentionKind:
    def understand(layer, record):
        if isinstance(answer, Exception):
            raise answer
        return answer

    return AttentionKind(name, SoftmaxSpec, understand, None, None)


NO, UNKNOWN, WRONG = kind("no", None), kind("unknown", NotUnderstood("a gate")), kind("wrong", NotUnderstood("later"))
YES, ALSO = kind("yes", "found"), kind("also", "not asked")


@pytest.mark.parametrize("kinds", [(YES,), (NO, YES), (UNKNOWN, NO, YES, ALSO)])
def test_the_first_that_knows_it_answers(kinds):
    assert understand_attention(None, None, kinds) == "found"


@pytest.mark.parametrize(
    ("kinds", "reason"), [((NO, UNKNOWN, WRONG), "a gate"), ((NO,), "of no kind that is known"), ((), "of no kind")]
)
def test_the_first_reason_is_told(kinds, reason):
    with pytest.raises(NotUnderstood, match=reason):
        understand_attention(None, None, kinds)


@dataclass(frozen=True)
class FirstLayerSpec(SoftmaxSpec):
    """The attention of the first layer, as a kind of its own."""


@pytest.fixture
def bound(monkeypatch):
    """A kind that is asked before ours, and what it bound and laid out."""
    (ours,) = attention_kinds.KINDS
    made = []

    def understand(layer, record):
        found = ours.understand(layer, record)
        given = {field.name: getattr(found.spec, field.name) for field in fields(SoftmaxSpec)}
        return found._replace(spec=FirstLayerSpec(**given)) if found.spec.index == 0 else None

    def bind(kernels, layer, spec, stack):
        made.append(("bound", spec.index))
        return ours.bind(kernels, layer, spec, stack)

    def cache_layout(spec, *rest):
        made.append(("laid out", spec.index))
        return ours.cache_layout(spec, *rest)

    kinds = (AttentionKind("first", FirstLayerSpec, understand, bind, cache_layout), ours)
    monkeypatch.setattr(stages, "KINDS", kinds)
    monkeypatch.setattr(attention_kinds, "KINDS", kinds)
    return made


def test_kinds_stand_side_by_side_in_one_model(bound):
    stock = make("llama")
    model = accel.optimize(make("llama"))
    with torch.no_grad():
        tokens, wanted = (one.generate(prompt(2), max_new_tokens=5, do_sample=False) for one in (model, stock))
    kinds = [type(vars(layer)["forward"].spec.attention) for layer in model.model.layers]
    assert kinds == [FirstLayerSpec, SoftmaxSpec]
    assert set(bound) == {("bound", 0), ("laid out", 0)}
    assert torch.equal(tokens, wanted) and not accel.report(model).fallbacks
