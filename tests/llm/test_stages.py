"""The stages of a language model's plan: each looks and changes nothing, its patches alone do, and can be undone."""

import pytest
import torch
from torch import nn

import accel
from accel.llm.stages import language_plan
from accel.options import Options
from accel.planning.plan import create_context
from support.llm.families import layers, make
from support.llm.prequantized.models import prequantized
from support.llm.quantized import held_by


def odd(model):
    """The model with an activation that no MLP known here has."""
    next(iter(layers(model).values())).mlp.act_fn = nn.Hardtanh()
    return model


CASES = {
    "weights": (lambda: make("llama-biases"), {"weights": "int8", "activations": "int8"}),
    "weights of a model that is not understood": (lambda: odd(make("llama")), {"weights": "int8"}),
    "prequantized": (lambda: prequantized("gptq")[0], {}),
    "activations of quantized layers": (
        lambda: accel.quantize(make("llama-biases"), "int8"),
        {"activations": "int8", "kv_cache": "int8"},
    ),
}


@pytest.fixture(params=CASES, ids=list(CASES))
def case(request):
    """A model, and options for it."""
    build, options = CASES[request.param]
    return build(), Options(**options)


def plan_of(model, options):
    return language_plan(model, create_context(options).for_model())


def state(model, tiny) -> tuple[dict, dict]:
    return tiny.snapshot(model), {name: value.clone() for name, value in model.state_dict().items()}


def same_state(before, after, tiny) -> None:
    tiny.assert_same_state(before[0], after[0])
    assert before[1].keys() == after[1].keys()
    assert all(torch.equal(value, after[1][name]) for name, value in before[1].items())


def test_a_plan_that_is_not_applied_leaves_the_model_as_it_was(case, tiny):
    model, options = case
    before = state(model, tiny)
    plan = plan_of(model, options)
    same_state(before, state(model, tiny), tiny)
    plan.apply()
    assert held_by(model) and plan.rows and plan.patches
    plan.undo()
    same_state(before, state(model, tiny), tiny)


def test_every_stage_looks_only_and_its_patches_are_undone_alone(case, tiny):
    model, options = case
    first, pending = state(model, tiny), plan_of(model, options).pending
    before, done = first, []
    for stage in pending.stages:
        staged = stage(model, pending.context)
        same_state(before, state(model, tiny), tiny)
        for patch in staged.patches:
            patch.apply()
        for patch in reversed(staged.patches):
            patch.undo()
        same_state(before, state(model, tiny), tiny)
        for patch in staged.patches:
            patch.apply()
        before, done = state(model, tiny), [*done, *staged.patches]
    assert len(done) > 3
    for patch in reversed(done):
        patch.undo()
    same_state(first, state(model, tiny), tiny)
