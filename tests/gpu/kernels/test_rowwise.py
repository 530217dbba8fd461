"""Row programs on the GPU, to the bit what torch's own chain gives there where single operations are."""

import pytest
import torch
import torch.nn.functional as F
from accel_kernels import RowOp, RowProgram, rowwise
from accel_kernels.rowwise.operations import NEAR
from accel_kernels.rowwise.program import BINARY, FULL, ONE, TO_ONE, UNARY, WITH_NUMBER
from accel_kernels.rowwise.rowwise import TORCH

from support.kernels.near_numbers import KINDS, assert_near

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
