"""`accel.verify` of what has a budget of memory."""

import pytest
import torch

import accel
from accel.diffusion import tiling
from accel.offload.blocks import nbytes
from accel.offload.call_hooks import streamed_model as streamed
from support.objects.streaming import within

pytestmark = pytest.mark.usefixtures("streaming")


@pytest.mark.parametrize("alone", [True, False])
@torch.no_grad()
def test_verify_runs_stock_code_within_the_budget_too(alone, sdxl_pipe, live, monkeypatch):
    """On the CPU, where weights were before, it would not compute on a GPU's images, or draw from other noise."""
    monkeypatch.setattr(tiling, "PLANES", 0)
    model, seen = sdxl_pipe.unet, []
    obj, call = (model, {}) if alone else (sdxl_pipe, {"prompt": "1 2", "num_inference_steps": 1})
    accel.optimize(obj, memory=within(model, 0.6) if alone else int(0.6 * nbytes(model)), layout="keep")

    def note(called, given):
        if called is model:  # no twin of it
            fused = any("forward" in vars(one) for one in model.mid_block.modules())
            seen.append((streamed(model) is not None, fused))

    model.register_forward_pre_hook(note)
    assert accel.verify(obj, **call).passed and streamed(model)
    assert set(seen) == {(True, False), (True, True)}
    accel.restore(obj)
    assert streamed(model) is None and "_hf_hook" not in vars(model)
