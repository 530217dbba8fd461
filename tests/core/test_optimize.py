"""optimize and restore on one model: what changes, what does not, and that all of it can be undone."""

import pytest
import torch

import accel
from accel.patching.patch import ForwardPatch
from support.diffusion.outputs import close, run
from support.patched import fast_forwards


def test_restore_leaves_no_trace(pair, tiny):
    model, _, inputs = pair
    before, wanted = tiny.snapshot(model), run(model, inputs)
    assert accel.optimize(model) is model
    assert len(fast_forwards(model)) > 10
    run(model, inputs)
    assert accel.restore(model) is model
    tiny.assert_same_state(before, tiny.snapshot(model))
    assert torch.equal(run(model, inputs), wanted)


def test_restoring_twice_or_a_stock_model_does_nothing(pair, tiny):
    model, _, _ = pair
    before = tiny.snapshot(model)
    accel.restore(model)
    accel.restore(accel.restore(accel.optimize(model)))
    tiny.assert_same_state(before, tiny.snapshot(model))


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
    with accel.optimized(model, graphs=False) as same:
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

    apply, calls = ForwardPatch.apply, []

    def fails_once(self):
        calls.append(self)
        if len(calls) == 9:
            raise MemoryError("no room")
        apply(self)

    monkeypatch.setattr(ForwardPatch, "apply", fails_once)
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
