"""Whole pipelines with transformers: images and videos as stock draws them, from blocks that ran fast.

`make test` runs every fourth pipeline, `make test-all` all of them.
"""

import copy

import numpy as np
import pytest
import torch

import accel
from accel.diffusion.dit.executable import Executable
from support.compatibility.transformer_pipelines import PIPELINES

FAR = 3e-5  # of the largest number: sums in another order, over steps and layers, and a decoder


def drawn(pipeline, given):
    output = pipeline(**given, generator=torch.Generator().manual_seed(5), output_type="np")
    return np.asarray(output.frames if hasattr(output, "frames") else output.images)


@pytest.mark.share(4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_draws_what_stock_draws(name, monkeypatch):
    runs, run = [], Executable.__call__
    monkeypatch.setattr(Executable, "__call__", lambda self, *given: runs.append(1) or run(self, *given))
    pipeline, calls = PIPELINES[name]()
    stock = copy.deepcopy(pipeline)
    wanted = [drawn(stock, given) for given in calls]
    assert all(np.isfinite(one).all() and one.std() > 0.01 for one in wanted)
    accel.optimize(pipeline, cpu="fuse")
    for given, one in zip(calls * 2, wanted * 2, strict=True):  # other sizes in turn
        runs.clear()
        np.testing.assert_allclose(drawn(pipeline, given), one, rtol=0, atol=FAR * np.abs(one).max())
        assert len(runs) >= 2
    assert accel.report(pipeline).fallbacks == []
    accel.restore(pipeline)
    assert all(np.array_equal(drawn(pipeline, given), one) for given, one in zip(calls, wanted, strict=True))
