"""The compiled kernel of `sample` against its reference on the same GPU."""

import pytest
import torch
from accel_kernels import sample

CUDA = torch.device("cuda")


def many(output):
    return output if isinstance(output, tuple) else (output,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", sample.cases, ids=lambda case: case.name)
def test_the_compiled_kernel_draws_what_the_reference_draws(case, dtype):
    """But where a number is so near the end of a share that the last digit decides: one row in a hundred at most."""
    (logits, mine, rows), more = case.make(CUDA, dtype)
    (_, theirs, _), _ = case.make(CUDA, dtype)
    assert sample.supports(logits, mine, rows, **more) is None
    found, wanted = many(sample(logits, mine, rows, **more)), many(sample.reference(logits, theirs, rows, **more))
    same = found[0] == wanted[0]
    assert int((~same).sum()) <= len(same) // 100
    assert torch.equal(found[0] < 0, wanted[0] < 0)
    assert torch.equal(mine.drawn, theirs.drawn) and not mine.tickets.any()
    for ours, reference in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(ours[same], reference[same], rtol=1e-5, atol=1e-5, equal_nan=True)
    if mine.seen is not None and same.all():
        assert torch.equal(mine.seen, theirs.seen)


@pytest.mark.parametrize("filters", [False, True])
def test_company_changes_nothing(filters):
    """Rows are cut into as many programs as there is room for; 1 and 300 of them give the same."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 128256, generator=g).mul(2).cuda().bfloat16()
    (_, table, _), _ = next(case for case in sample.cases if case.name == "llama-filters").make(CUDA, torch.float32)
    fresh = table._replace(drawn=table.drawn.clone())
    rows = torch.arange(300, device="cuda")
    ids, logprobs = sample(logits, table, rows, filters=filters, logprobs=True)
    for i in (0, 7, 123, 299):
        alone = sample(logits[i : i + 1], fresh, rows[i : i + 1], filters=filters, logprobs=True)
        assert torch.equal(alone[0], ids[i : i + 1]) and torch.equal(alone[1], logprobs[i : i + 1])


@pytest.mark.parametrize("filters", [False, True])
def test_a_graph_draws_anew_at_each_replay(filters):
    name = "llama-filters" if filters else "llama-plain"
    (logits, table, rows), more = next(case for case in sample.cases if case.name == name).make(CUDA, torch.bfloat16)
    eager = table._replace(drawn=table.drawn.clone())
    sample(logits, table._replace(drawn=table.drawn.clone()), rows, **more)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = sample(logits, table, rows, **more)
    for _ in range(3):
        wanted = sample(logits, eager, rows, **more)
        graph.replay()
        assert torch.equal(ids, wanted) and torch.equal(table.drawn, eager.drawn)
