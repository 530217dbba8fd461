"""Steps of transformers that are skipped, and what is changed meanwhile."""

import copy

import pytest
import torch

import accel
from accel.cuda_graphs.rule import GraphForward
from accel.diffusion.dit.executable import Executable
from support.compatibility.stack_oracle import STACKS, deep, loop
from support.diffusion.oracles import agree, reasons, run
from support.noted import noted

FLUX, SD3, WAN = "FluxTransformer2DModel", "SD3Transformer2DModel", "WanTransformer3DModel"


@pytest.mark.parametrize("pair", [FLUX, SD3], indirect=True)
def test_deep_blocks_run_in_whole_calls_alone_from_their_plans(pair, monkeypatch):
    model, _, calls = pair
    blocks = sum(len(getattr(model, name)) for name in STACKS[type(model).__name__])
    for call in calls:  # recorded
        run(model, call)
    seen, counts = noted(monkeypatch, Executable, "__call__", lambda *args: True), []
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


def controlled(call, model):
    rows = torch.randn(call["hidden_states"].shape[0], call["hidden_states"].shape[1], model.inner_dim)
    return call | {"controlnet_block_samples": [rows, 2 * rows]}


@pytest.mark.parametrize("pair", [FLUX], indirect=True)
def test_a_controlnets_residuals_between_blocks_make_calls_whole(pair):
    model, oracle, calls = pair
    agree(model, oracle, calls[:2])
    for call in calls[2:5]:
        oracle.restart()
        agree(model, oracle, [controlled(call, model)])
    told = " ".join(reasons(model))
    assert "what transformer_blocks.0 gives is changed before the next block takes it" in told
    oracle.restart()
    agree(model, oracle, calls)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_added_in_place_between_blocks_is_seen(monkeypatch, mode):
    from diffusers.models.transformers import transformer_wan

    model, given = deep(WAN)
    stock = copy.deepcopy(model)
    forward = transformer_wan.WanTransformerBlock.forward

    def adding(self, *args, **kwargs):
        rows = forward(self, *args, **kwargs)
        if kept:
            kept[-1].add_(0.1)
        kept.append(rows)
        return rows

    kept = []
    monkeypatch.setattr(transformer_wan.WanTransformerBlock, "forward", adding)
    accel.optimize(model, step_cache=3)
    for call in loop(model, given)[:4]:
        outputs = []
        for one in (model, stock):
            kept.clear()
            with mode():
                outputs.append(one(**call).sample)
        torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)
    assert reasons(model)


@pytest.mark.parametrize("pair", [SD3], indirect=True)
def test_layers_left_out_for_guidance(pair):
    """Such calls are whole, those with all layers in the same step are not."""
    model, oracle, calls = pair
    plain = accel.restore(copy.deepcopy(model))
    for call in calls[:4]:
        agree(model, oracle, [call])
        ours, wanted = (run(one, call, skip_layers=[2]) for one in (model, plain))
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-5)
    said = "transformer_blocks.3 is called where transformer_blocks.2 is expected"
    assert reasons(model) == [f"step cache: computed whole: {said}"]


@pytest.mark.parametrize("name", ["FluxControlNetModel", "SD3ControlNetModel"])
def test_a_controlnet_runs_whole(name):
    model = accel.optimize(deep(name)[0], step_cache=3)
    (row,) = (row for row in accel.report(model).sites if row[1] == "step cache")
    assert row[2] == "skipped" and "as a ControlNet does" in row[3]


@pytest.mark.parametrize("name", ["LatteTransformer3DModel", "WanVACETransformer3DModel"])
def test_transformers_of_another_order_are_computed_whole_and_told(name):
    model, given = deep(name, 2)
    stock = copy.deepcopy(model)
    accel.optimize(model, step_cache=3)
    for call in loop(model, given)[:3]:
        torch.testing.assert_close(run(model, call), run(stock, call), rtol=0, atol=1e-5)
    assert any("gives is changed before the next block takes it" in reason for reason in reasons(model))
