"""What makes calls of a transformer with the step cache whole, what it is seen by, and what it bears."""

import copy

import pytest
import torch

import accel
from support.compatibility.stack_oracle import deep, loop
from support.diffusion.step_oracle import agree, reasons, run

FLUX, SD3, WAN = "FluxTransformer2DModel", "SD3Transformer2DModel", "WanTransformer3DModel"


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
