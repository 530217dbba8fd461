"""accel.optimize, and what an optimized model is to its user."""

import copy
import inspect
import io
import pickle

import pytest
import torch

import accel
from accel.patching.rule import ForwardPatch
from support.diffusion.outputs import close, run
from support.noted import fails_at
from support.patched import fast_forwards


def test_restore_leaves_no_trace(pair, tiny):
    model, _, inputs = pair
    before, wanted = tiny.snapshot(model), run(model, inputs)
    assert accel.optimize(accel.restore(model)) is model
    assert len(fast_forwards(model)) > 10
    run(model, inputs)
    for _ in range(2):  # of a stock model it does nothing
        assert accel.restore(model) is model
        tiny.assert_same_state(before, tiny.snapshot(model))
    assert torch.equal(run(model, inputs), wanted)


def test_a_second_optimize_plans_anew(pair, tiny):
    model, twin, inputs = pair
    before = tiny.snapshot(model)
    accel.optimize(model)
    accel.optimize(model, layout="keep")
    report = accel.report(model)
    assert ("", "channels-last weights", "skipped", 'layout="keep"') in report.sites
    assert model.conv_in.weight.is_contiguous()
    close(run(model, inputs), run(twin, inputs))
    accel.restore(model)
    tiny.assert_same_state(before, tiny.snapshot(model))


def test_optimized_restores_after_the_block_and_after_an_error(pair, tiny):
    model, _, _ = pair
    before = tiny.snapshot(model)
    with accel.optimized(obj=model, graphs=False) as same:
        assert same is model and fast_forwards(model)
    tiny.assert_same_state(before, tiny.snapshot(model))
    with pytest.raises(KeyError), accel.optimized(model):
        raise KeyError
    tiny.assert_same_state(before, tiny.snapshot(model))


def test_an_error_while_applying_leaves_the_object_as_it_was(pair, tiny, monkeypatch):
    model, _, _ = pair
    stock = tiny.snapshot(model)
    accel.optimize(model)
    before = tiny.snapshot(model)
    calls = fails_at(monkeypatch, 9, ForwardPatch, "apply", MemoryError, "no room")
    with pytest.raises(MemoryError, match="no room"):
        accel.optimize(model, graphs=False)
    assert len(calls) > 20  # the plan there was before is back in place
    tiny.assert_same_state(before, tiny.snapshot(model))
    accel.restore(model)
    tiny.assert_same_state(stock, tiny.snapshot(model))


def test_strict_raises_for_a_skipped_site_and_changes_nothing(tiny):
    model = tiny.unet("scale-shift")
    before = tiny.snapshot(model)
    with pytest.raises(accel.errors.SkippedSite, match="strict=True: .*resnet.*scales as well as shifts"):
        accel.optimize(model, strict=True)
    tiny.assert_same_state(before, tiny.snapshot(model))


def test_restore_refuses_when_someone_patched_on_top_and_names_them(pair):
    model, _, _inputs = pair
    accel.optimize(model)
    module = fast_forwards(model)[3]
    ours = module.forward
    module.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    plan = vars(model)["_accel_plan"]
    with pytest.raises(accel.errors.PatchConflict, match="was replaced after accel.optimize by <function"):
        accel.restore(model)
    assert vars(model)["_accel_plan"] is plan and len(fast_forwards(model)) > 10
    module.forward = ours
    accel.restore(model)
    assert not fast_forwards(model)


def test_verify_compares_with_stock_and_leaves_it_optimized(pair, monkeypatch):
    model, _, _ = pair
    with pytest.raises(ValueError, match="not optimized"):
        accel.verify(model)
    accel.optimize(model)
    sites = len(fast_forwards(model))
    block = type(fast_forwards(model)[5].forward)
    fast = block.fast
    monkeypatch.setattr(
        block, "fast", lambda self, *a, **k: (1 + 1e-6) * fast(self, *a, **k)
    )  # else a CPU may be exact
    quality = accel.verify(model)
    assert 0 < quality.max_error < 1e-4 and quality.finite and quality.psnr_db > 80
    assert "PSNR" in str(quality)
    assert len(fast_forwards(model)) == sites


def test_report_tells_every_site_and_prints(pair):
    model, _, _inputs = pair
    assert accel.report(model).sites == []
    accel.optimize(model)
    report = accel.report(model)
    assert {status for _, _, status, _ in report.sites} == {"patched"}
    assert any(path.endswith("resnets.0") and rule == "resnet block" for path, rule, _, _ in report.sites)
    data = report.to_dict()
    assert data["sites"][0].keys() == {"path", "rule", "status", "reason"}
    text = str(report)
    assert "resnet block" in text and "waits for CUDA" in text and report.summary() in text.replace("\n", " ")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_uses_its_own_weights_and_restores_by_itself(pair, copied):
    model, twin, inputs = pair
    accel.optimize(model)
    other = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    close(run(other, inputs), run(twin, inputs))
    assert accel.report(other).sites == accel.report(model).sites
    assert len(fast_forwards(other)) == len(fast_forwards(model))
    accel.restore(other)
    assert not fast_forwards(other) and fast_forwards(model)
    assert torch.equal(run(other, inputs), run(twin, inputs))


# Of the largest value.
SHARE = {torch.bfloat16: 4e-2, torch.float16: 5e-3}


def test_state_dict_and_save_pretrained_are_the_stock_ones(pair, tmp_path):
    model, twin, inputs = pair
    accel.optimize(model)
    ours, stock = model.state_dict(), twin.state_dict()
    assert list(ours) == list(stock)
    assert all(torch.equal(ours[name], stock[name]) for name in stock)
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    assert buffer.tell() < 1.2 * sum(t.nbytes for t in stock.values()) + 400 * len(stock)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(run(loaded, inputs), run(twin, inputs))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_another_dtype(pair, when, dtype):
    model, twin, inputs = pair
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    if when == "before":
        accel.optimize(model.to(dtype))
    else:
        accel.optimize(model)
        model.to(dtype)
    twin.to(dtype)
    close(run(model, inputs), run(twin, inputs), SHARE[dtype])
    assert accel.report(model).fallbacks == []
    accel.restore(model)
    assert torch.equal(run(model, inputs), run(twin, inputs))


def test_gradients_and_training_run_stock_and_are_counted(pair):
    model, twin, inputs = pair
    accel.optimize(model)
    for m in (model, twin):
        m(**inputs).sample.square().mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5, msg=name)
    assert any("gradients are on" in reason for _, reason, _ in accel.report(model).fallbacks)
    model.train()
    with torch.no_grad():
        model(**inputs)
    assert any(reason == "training mode" for _, reason, _ in accel.report(model).fallbacks)


def test_autocast_runs_stock(pair):
    model, twin, inputs = pair
    accel.optimize(model)
    with torch.autocast("cpu", torch.bfloat16):
        close(run(model, inputs), run(twin, inputs), SHARE[torch.bfloat16])
    assert any(reason == "autocast is on" for _, reason, _ in accel.report(model).fallbacks)


def test_inference_mode_leaves_ordinary_weights(pair):
    model, twin, inputs = pair
    accel.optimize(model)
    model.to(torch.float64).to(torch.float32)  # the stacked projections are stacked anew in the next call
    with torch.inference_mode():
        got = model(**inputs).sample
    close(got.clone(), run(twin, inputs))
    assert not any(parameter.is_inference() for parameter in model.parameters())
    accel.restore(model)
    model(**inputs).sample.mean().backward()


def test_projections_share_one_storage_without_a_second_copy(pair):
    model, _, _ = pair
    attention = next(m for n, m in model.named_modules() if n.endswith("attn1"))
    total = sum(p.untyped_storage().nbytes() for p in {p.data_ptr(): p for p in model.parameters()}.values())
    accel.optimize(model)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == total
    assert attention.to_k.weight.data_ptr() == attention.to_q.weight.data_ptr() + attention.to_q.weight.nbytes


def test_signatures_stay_those_of_the_stock_forwards(pair):
    model, twin, _ = pair
    accel.optimize(model)
    for ours, theirs in zip(model.modules(), twin.modules(), strict=True):
        assert str(inspect.signature(ours.forward)) == str(inspect.signature(theirs.forward))
