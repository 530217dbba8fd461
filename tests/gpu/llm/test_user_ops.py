"""A user's op on a GPU: it is captured into the graphs of models optimized with it, and not into those of others."""

import pytest
import torch
from accel_kernels import rms_norm

import accel
from support.llm.families import make, prompt

pytestmark = pytest.mark.usefixtures("exact")


def test_a_graph_runs_the_op_that_its_model_was_optimized_with():
    counter = torch.zeros((), device="cuda", dtype=torch.int64)

    def counts(x, *args, **more):
        if not x.is_cuda:
            return NotImplemented
        counter.add_(1)  # by a replay too
        return rms_norm.reference(x, *args, **more)

    model = make("llama").cuda()
    ids = prompt().cuda()

    def calls(tokens: int) -> int:
        counter.zero_()
        model.generate(ids, max_new_tokens=tokens, do_sample=False)
        return int(counter)

    wanted = model.generate(ids, max_new_tokens=20, do_sample=False)
    with accel.register_op("rms_norm", counts):
        accel.optimize(model, graphs=True)
    calls(20)
    assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), wanted)
    assert any(row["status"] == "graph" for row in accel.report(model).graphs)
    norms = 2 * model.config.num_hidden_layers + 1
    assert calls(30) - calls(20) >= 10 * norms
    accel.optimize(model, graphs=True)
    calls(20)
    assert calls(20) == 0


def test_a_function_that_is_wrong_on_the_gpu_alone_is_refused():
    def wrong(x, *args, **more):
        y = rms_norm.reference(x, *args, **more)
        return y if not x.is_cuda else tuple(t * 1.1 for t in y) if isinstance(y, tuple) else y * 1.1

    with pytest.raises(ValueError, match="on cuda: error"):
        accel.register_op("rms_norm", wrong)
