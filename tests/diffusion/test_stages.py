"""The stages of a denoiser's plan and of a pipeline's: each looks and changes nothing, its patches alone do."""

import pytest
import torch

import accel
from accel.diffusion.family import RULES, graph_paths
from accel.diffusion.pipeline import pipeline_plan
from accel.diffusion.stages import denoiser_plan
from accel.offload.hooks import SWITCH
from accel.options import Options
from accel.patching.owner import OWNER
from accel.planning.plan import Plan, create_context
from support.llm.quantized import held_by

OPTIONS = (
    {},
    {"weights": "int8", "activations": "int8"},
    {"weights": "fp8", "step_cache": 2},
    {"layout": "channels_last"},
)


def plan_of(model, given):
    context = create_context(Options(**given)).for_model()
    context.graph_paths = graph_paths(model)
    return denoiser_plan(model, context) if "weights" in given else Plan(model, RULES, context)


@pytest.mark.parametrize("given", OPTIONS, ids=", ".join)
def test_every_stage_looks_only_and_undoing_all_is_exact(given, tiny):
    model = tiny.unet(cross_attention_dim=16)
    first = before = tiny.snapshot(model)
    names = {name: value.clone() for name, value in model.state_dict().items()}
    plan, done = plan_of(model, given), []
    for stage in plan.pending.stages:
        staged = stage(model, plan.pending.context)
        tiny.assert_same_state(before, tiny.snapshot(model))
        for patch in staged.patches:
            patch.apply()
        before, done = tiny.snapshot(model), [*done, *staged.patches]
    assert bool(held_by(model)) is ("weights" in given) and len(done) > 10
    for patch in reversed(done):
        patch.undo()
    tiny.assert_same_state(first, tiny.snapshot(model))
    assert names.keys() == model.state_dict().keys()
    assert all(torch.equal(value, names[name]) for name, value in model.state_dict().items())


def test_a_pipelines_plan_changes_it_when_it_is_applied(pipe):
    before = dict(vars(pipe))
    plan = pipeline_plan(pipe, create_context(Options()))
    assert vars(pipe) == before
    plan.apply()
    assert vars(pipe).keys() - before.keys() == {"progress_bar", SWITCH, OWNER}
    plan.undo()
    assert vars(pipe) == before
    assert accel.report(pipe).sites == []
