"""What makes calls of a transformer with the step cache whole, what it is seen by, and what it bears."""

import copy
import pickle

import pytest
import torch

import accel
from support.compatibility.stack_oracle import agree, deep, loop, run
from support.diffusion.step_oracle import reasons

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


@pytest.mark.parametrize("how", ["training", "gradients", "autocast"])
@pytest.mark.parametrize("pair", [FLUX], indirect=True)
def test_other_modes_are_computed_whole(pair, how):
    model, oracle, calls = pair
    agree(model, oracle, calls[:2])
    oracle.restart()
    if how == "training":
        for one in (model, oracle.model):
            one.train()
            one.enable_gradient_checkpointing()
    with torch.set_grad_enabled(how != "autocast"), torch.autocast("cpu", torch.bfloat16, how == "autocast"):
        got, wanted = (one(**calls[2]).sample for one in (model, oracle.model))
    share = 5e-2 if how == "autocast" else 1e-5
    torch.testing.assert_close(got, wanted, rtol=0, atol=share * float(wanted.detach().abs().max()))
    assert got.requires_grad == (how != "autocast")
    assert any("computed whole" in reason for reason in reasons(model))
    for one in (model, oracle.model):
        one.eval()
    oracle.restart()
    agree(model, oracle, calls[3:])


@pytest.mark.parametrize("pair", [FLUX], indirect=True)
def test_a_hook_on_a_block_makes_calls_whole(pair):
    model, oracle, calls = pair
    agree(model, oracle, calls[:2])
    handle = model.single_transformer_blocks[1].register_forward_hook(lambda *args: None)
    for call in calls[2:4]:
        oracle.restart()
        agree(model, oracle, [call])
    handle.remove()
    assert any("forward hooks on single_transformer_blocks.1" in reason for reason in reasons(model))
    oracle.restart()
    agree(model, oracle, calls)


@pytest.mark.parametrize("pair", [SD3], indirect=True)
def test_an_error_in_a_call_is_followed_by_a_whole_one(pair):
    model, oracle, calls = pair
    agree(model, oracle, calls[:4])
    with pytest.raises(RuntimeError):
        run(model, calls[4], encoder_hidden_states=torch.randn(2, 7, 5))
    oracle.restart()
    agree(model, oracle, calls[4:])


@pytest.mark.parametrize("pair", [SD3], indirect=True)
def test_nothing_of_a_loop_that_overflowed_comes_through(pair):
    model, oracle, calls = pair
    broken = [call | {"hidden_states": call["hidden_states"] * float("nan")} for call in calls]
    for call in broken[:2]:
        run(model, call)
    agree(model, oracle, calls)
    assert reasons(model) == []


@pytest.mark.parametrize("pair", [FLUX], indirect=True)
def test_adapters_and_inference_mode(pair):
    peft = pytest.importorskip("peft")
    model, oracle, calls = pair
    agree(model, oracle, calls)
    for one in (model, oracle.model):
        torch.manual_seed(5)
        one.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "proj_mlp"], init_lora_weights=False))
    oracle.restart()
    for call in calls:
        with torch.inference_mode():
            got = model(**call).sample
        torch.testing.assert_close(got.clone(), run(oracle.model, call), rtol=0, atol=1e-4)
    assert reasons(model) == []


@pytest.mark.parametrize("pair", [SD3], indirect=True)
@pytest.mark.parametrize("dtype, share", [(torch.bfloat16, 0.05), (torch.float16, 0.01)], ids=str)
def test_half_precision(pair, dtype, share):
    model, oracle, calls = pair
    model.to(dtype)
    fixed = {name: one.to(dtype) for name, one in calls[0].items() if torch.is_floating_point(one)}
    for call in calls:
        narrow = call | fixed | {"hidden_states": call["hidden_states"].to(dtype), "timestep": call["timestep"]}
        wide = {name: one.float() if torch.is_floating_point(one) else one for name, one in narrow.items()}
        wanted = run(oracle.model, wide)
        torch.testing.assert_close(run(model, narrow).float(), wanted, rtol=0, atol=share * float(wanted.abs().max()))
    assert reasons(model) == []


@pytest.mark.parametrize("pair", [FLUX], indirect=True)
def test_restore_deepcopy_and_pickle(pair, tiny):
    model, oracle, calls = pair
    before = tiny.snapshot(accel.restore(model))
    accel.optimize(model, step_cache=3)
    agree(model, oracle, calls[:2])
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        oracle.restart()
        agree(twin, oracle, calls[:4])
        assert accel.report(twin).sites == accel.report(model).sites
        accel.restore(twin)
        assert not any("forward" in vars(module) for module in twin.modules())
    accel.restore(model)
    tiny.assert_same_state(before, tiny.snapshot(model))
    assert torch.equal(run(model, calls[1]), run(deep(FLUX)[0], calls[1]))


@pytest.mark.parametrize("pair", [WAN], indirect=True)
def test_quantized_weights_and_the_cache(pair):
    model, _, calls = pair
    accel.optimize(model, step_cache=3, weights="int8")
    cached = [run(model, call) for call in calls]
    assert reasons(model) == []
    accel.optimize(model, weights="int8", cpu="fuse")
    without = [run(model, call) for call in calls]
    equal = [torch.equal(a, b) for a, b in zip(cached, without, strict=True)]
    assert equal == [True, False, False, True, False, False, True]
