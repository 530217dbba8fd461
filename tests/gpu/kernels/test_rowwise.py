"""Kernels over rows, samples and routes, at the sizes of models."""

import pytest
import torch
import torch.nn.functional as F
from accel_kernels import Routing, RowOp, RowProgram, route, rowwise, sample
from accel_kernels.rowwise.operations import NEAR
from accel_kernels.rowwise.program import BINARY, FULL, ONE, TO_ONE, UNARY, WITH_NUMBER
from accel_kernels.rowwise.rowwise import TORCH

from support.kernels.numbers import KINDS, assert_near, assert_routes_as_torch, poisoned, route_case

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# torch has `number / x` as two operations; it sums in another order; its GELU is compiled otherwise.
OTHERWISE = ("rdiv_number", *TO_ONE[:2], "gelu", "gelu_tanh")


def run(program, shape, *inputs, outputs=None):
    assert rowwise.supports(*inputs, program=program, shape=shape, outputs=outputs) is None
    if outputs is None:
        found = rowwise.reference(*inputs, program=program, shape=shape)
        outputs = [torch.full_like(one, float("nan")) for one in found]
    return rowwise.triton(*inputs, program=program, shape=shape, outputs=outputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [128, 130, 3000])
def test_every_operation_is_torchs(dtype, width):
    x = (torch.randn(300, width, device="cuda") * 3).to(dtype).abs() + 0.01
    other, one = (torch.randn(300, count, device="cuda").to(dtype) for count in (width, 1))
    ops = [RowOp(name, (0,), 0.7, dtype) for name in (*UNARY, "amax", "sum", "mean", *WITH_NUMBER)]
    ops += [RowOp(name, (0, second), 0.0, dtype) for second in (1, 2) for name in BINARY]
    program = RowProgram(1, width, (FULL, FULL, ONE), tuple(ops), tuple(range(3, 3 + len(ops))), (dtype,) * len(ops))
    wrong = {}
    for op, mine in zip(ops, run(program, (300,), x, other, one), strict=True):
        number = (op.number,) if op.name in WITH_NUMBER else ()
        theirs = TORCH[op.name](*((x, other, one)[n] for n in op.args), *number)
        if op.name in OTHERWISE:
            step = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6 * (width if op.name == "sum" else 1)}
            torch.testing.assert_close(mine, theirs, **step)
        elif not torch.equal(mine, theirs):
            wrong[op.name] = float((mine.double() - theirs.double()).abs().max())
    assert not wrong


def test_a_residual_and_a_rotation_are_torchs_to_the_bit():
    x, y, gate = (torch.randn(2, 333, 1536, device="cuda").bfloat16() for _ in range(3))
    ops = (RowOp("mul", (2, 1), 0.0, torch.bfloat16), RowOp("add", (0, 3), 0.0, torch.bfloat16))
    program = RowProgram(2, 1536, (FULL,) * 3, ops, (4,), (torch.bfloat16,))
    assert torch.equal(run(program, (2, 333), x, y, gate)[0], x + gate * y)
    case = next(case for case in rowwise.cases if case.name == "half-tables-rotary")
    (q, cos, sin), more = case.make(torch.device("cuda"), torch.bfloat16)
    one, two = q.chunk(2, dim=-1)
    wanted = torch.cat([(one * cos - two * sin).bfloat16(), (two * cos + one * sin).bfloat16()], -1)
    assert torch.equal(rowwise(q, cos, sin, **more)[0], wanted)


def test_an_adaptive_norm_is_torchs_but_for_the_order_of_its_sums():
    case = next(case for case in rowwise.cases if case.name == "flux-adaptive")
    (x, scale, shift), more = case.make(torch.device("cuda"), torch.bfloat16)
    wanted = F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift
    assert float((rowwise(x, scale, shift, **more)[0] != wanted).float().mean()) < 0.01


def test_memory_beyond_two_to_the_31_elements():
    far = torch.empty(2**31 + 2**20, device="cuda", dtype=torch.bfloat16)
    x = far.as_strided((3, 64), (2**30 + 64, 1))
    x.copy_(torch.randn(3, 64))
    program = RowProgram(1, 64, (FULL,), (RowOp("neg", (0,), 0.0, torch.bfloat16),), (1,), (torch.bfloat16,))
    assert torch.equal(run(program, (3,), x)[0], -x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NEAR)
def test_what_is_rounded_alone_may_be_off_by_units_of_fp32(name, kind):
    assert_near(name, kind, torch.device("cuda"))


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
    assert torch.equal(mine.drawn, theirs.drawn) and not mine.split_counters.any()
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


NAN = float("nan")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", route.cases, ids=lambda case: case.name)
def test_the_compiled_kernel_chooses_what_the_reference_chooses(case, dtype, monkeypatch):
    args = route_case(case.name, CUDA, dtype)
    poisoned(monkeypatch)
    if args[2] is None:
        return assert_routes_as_torch(*args)
    # With a bias scores are compared, which differ in their last digit: one token in a hundred at most.
    (index, shares), (wanted, torchs) = route(*args), route.reference(*args)
    same = (index == wanted).all(1)
    assert int((~same).sum()) <= len(same) // 100
    torch.testing.assert_close(shares[same], torchs[same], rtol=1e-5 if shares.dtype == torch.float32 else 8e-3, atol=0)


@pytest.mark.parametrize("groups", [1, 4])
def test_equal_scores_and_nan(groups):
    logits = torch.zeros(4, 128, device="cuda")
    logits[1, 7::2] = 2.0
    logits[2, [5, 90]] = NAN
    logits[3] = NAN
    routing = Routing(8, "sigmoid", "sum", groups=groups, kept=min(2, groups))
    (index, shares), (wanted, torchs) = route(logits, routing), route.reference(logits, routing)
    assert torch.equal(index, wanted) and index[0].tolist() == list(range(8))
    torch.testing.assert_close(shares, torchs, equal_nan=True)


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3-256", "qwen3-next"])
def test_one_graph_for_all_logits(name):
    logits, routing, bias, dtype = route_case(name, CUDA, torch.bfloat16)
    route(logits, routing, bias, dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        index, shares = route(logits, routing, bias, dtype)
    for seed in range(3):
        logits.copy_(torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        wanted = route(logits, routing, bias, dtype)
        assert torch.equal(index, wanted[0]) and torch.equal(shares, wanted[1])
