"""The step cache of diffusion transformers against stock copies whose blocks' rows are exchanged by hooks."""

import copy

import pytest
import torch

import accel
from accel.cuda_graphs.rule import GraphForward
from accel.diffusion.dit.executable import Executable
from support.compatibility.stack_oracle import STACKS, StackOracle, deep
from support.diffusion.step_oracle import agree, reasons, run

FLUX, SD3, WAN = "FluxTransformer2DModel", "SD3Transformer2DModel", "WanTransformer3DModel"


def blocks_run(model, monkeypatch):
    """A list that gets an entry whenever a block runs from its plan."""
    seen, run_plan = [], Executable.__call__

    def counted(executable, *args):
        seen.append(executable)
        return run_plan(executable, *args)

    monkeypatch.setattr(Executable, "__call__", counted)
    return seen


@pytest.mark.parametrize("pair", [FLUX, SD3], indirect=True)
def test_deep_blocks_run_in_whole_calls_alone_from_their_plans(pair, monkeypatch):
    model, _, calls = pair
    blocks = sum(len(getattr(model, name)) for name in STACKS[type(model).__name__])
    for call in calls:  # recorded
        run(model, call)
    seen, counts = blocks_run(model, monkeypatch), []
    for call in calls:
        seen.clear()
        run(model, call)
        counts.append(len(seen))
    assert counts == [blocks, 1, 1, blocks, 1, 1, blocks]


def test_the_report_says_what_runs_when():
    model = accel.optimize(deep("ZImageTransformer2DModel")[0], step_cache=3)
    rows = {row[0]: row[3] for row in accel.report(model).sites if row[1] == "step cache"}
    assert rows.pop("").startswith("lossy: deep layers run in one call of 3")
    assert set(rows) == {f"layers.{i}" for i in range(4)}  # and not the refiners, one block each
    assert [note.partition(";")[0] for note in rows.values()] == ["runs in every call", *["runs in whole calls"] * 3]
    assert all("with diffusion transformer block" in note for note in rows.values())


@pytest.mark.parametrize("pair", [FLUX], indirect=True)
def test_replayed_whole_calls_show_nothing_and_are_trusted(pair, monkeypatch):
    """As from a graph: the blocks' Python runs in the first calls alone."""
    model, _, calls = pair
    wanted = [run(model, call) for call in calls]
    stock, seen = GraphForward.__call__, iter(wanted)
    monkeypatch.setattr(GraphForward, "__call__", lambda self, *args, **kwargs: (next(seen),))
    for call, output in zip(calls, wanted, strict=True):
        assert run(model, call) is output
    monkeypatch.setattr(GraphForward, "__call__", stock)
    assert reasons(model) == []


@pytest.mark.parametrize("pair", [WAN], indirect=True)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_prompt_and_negative_prompt_in_calls_of_their_own(pair, order):
    """As pipelines of Wan and Qwen-Image make them, in a context of their own."""
    model, oracle, calls = pair
    oracles = [oracle, StackOracle(copy.deepcopy(accel.restore(copy.deepcopy(model))), 3)]
    negative = torch.randn_like(calls[0]["encoder_hidden_states"])
    for _ in range(2):
        for one in oracles:
            one.restart()
        for call in calls:
            for stream in order:
                given = call | ({"encoder_hidden_states": negative} if stream else {})
                with model.cache_context(("cond", "uncond")[stream]):
                    agree(model, oracles[stream], [given])
    assert reasons(model) == [] and len(model.forward.state.features) == 2


@pytest.mark.parametrize("pair", [FLUX], indirect=True)
def test_views_made_anew_in_every_step_are_one_prompt(pair):
    model, oracle, calls = pair
    prompt = calls[0]["encoder_hidden_states"]
    agree(model, oracle, [call | {"encoder_hidden_states": prompt.view(prompt.shape)} for call in calls])
    assert reasons(model) == []
    oracle.restart()
    agree(model, oracle, calls[:2])
    oracle.restart()
    agree(model, oracle, [call | {"encoder_hidden_states": prompt.clone()} for call in calls[2:3]])
    assert any("other tensors than in the step before" in reason for reason in reasons(model))


@pytest.mark.parametrize("pair", [SD3], indirect=True)
def test_sizes_and_lengths_in_turn(pair):
    model, oracle, calls = pair
    wide = [call | {"hidden_states": torch.cat([call["hidden_states"]] * 2, dim=3)} for call in calls]
    short = calls[0]["encoder_hidden_states"][:, :5]
    for kind in (calls, wide, [call | {"encoder_hidden_states": short} for call in calls], calls):
        oracle.restart()
        agree(model, oracle, kind)
    assert reasons(model) == [] and len(model.forward.state.features) == 3


@pytest.mark.parametrize("pair", [FLUX], indirect=True)
def test_a_new_image_begins_whole(pair):
    model, oracle, calls = pair
    for count in (5, 2, 7):  # the timestep goes up
        oracle.restart()
        agree(model, oracle, calls[:count])
    assert reasons(model) == []
