"""The kernel of row programs, in Triton's interpreter, against chains of torch's own operations."""

import pytest
import torch
import torch.nn.functional as F
from accel_kernels import RowOp, RowProgram, rowwise
from accel_kernels.rowwise.cases import normed_rotary
from accel_kernels.rowwise.program import BINARY, FULL, HALF, NORMS, ONE, TO_ONE, UNARY, WITH_NUMBER
from accel_kernels.rowwise.rowwise import TORCH

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One operation of CUDA's library and of numpy's may differ in the last digit of float32.
LAST_DIGIT = (
    "rsqrt", "exp", "log", "sin", "cos", "tanh", "sigmoid", "silu", "gelu", "gelu_tanh", "sum", "mean", "div_number",
    *NORMS,
)  # fmt: skip


def wide(name, *args):
    """A result in float32 of float32 numbers."""
    if name == "sqrt":  # torch's own is a last digit off on some CPUs
        return args[0].double().sqrt().float()
    return TORCH[name](*(arg.float() if isinstance(arg, torch.Tensor) else arg for arg in args))


def run(program, shape, *inputs, outputs=None):
    """The kernel's results, in memory without numbers."""
    assert rowwise.supports(*inputs, program=program, shape=shape, outputs=outputs) is None
    widths = {FULL: program.width, HALF: program.width // 2, ONE: 1}
    if outputs is None:
        found = rowwise.reference(*inputs, program=program, shape=shape)
        outputs = [torch.full_like(one, float("nan")) for one in found]
        assert all(one.shape[-1] in widths.values() for one in outputs)
    return rowwise.triton(*inputs, program=program, shape=shape, outputs=outputs)


def assert_equal(found, wanted, name="add"):
    """To the bit; of functions that are a last digit off in float32, at most one rounding of the result."""
    if name in LAST_DIGIT:
        torch.testing.assert_close(found, wanted, rtol=torch.finfo(found.dtype).eps, atol=2e-6)
    else:
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, beyond the ends of rows
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [72, 130])
def test_every_operation_is_torchs_rounded_once(dtype, width):
    x = (torch.randn(5, width) * 2).to(dtype).abs() + 0.1
    other, one = torch.randn(5, width).to(dtype), torch.randn(5, 1).to(dtype)
    number = 0.7
    ops = [RowOp(name, (0,), number, dtype) for name in (*UNARY, *TO_ONE, *NORMS, *WITH_NUMBER)]
    wanted = [wide(name, x).to(dtype) for name in (*UNARY, *TO_ONE)]
    wanted += [wide(name, x, number).to(dtype) for name in (*NORMS, *WITH_NUMBER)]
    for second, tensor in ((1, other), (2, one)):
        ops += [RowOp(name, (0, second), 0.0, dtype) for name in BINARY]
        wanted += [wide(name, x, tensor).to(dtype) for name in BINARY]
    results = tuple(range(3, 3 + len(ops)))
    program = RowProgram(1, width, (FULL, FULL, ONE), tuple(ops), results, (dtype,) * len(ops))
    for op, mine, theirs in zip(ops, run(program, (5,), x, other, one), wanted, strict=True):
        assert_equal(mine, theirs, op.name)


def adaptive(x, scale, shift):
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_the_reference_is_torchs_chain_to_the_bit(dtype):
    case = next(case for case in rowwise.cases if case.name == "residual")
    (x, y, gate, scale, shift), more = case.make(torch.device("cpu"), dtype)
    h = x + gate * y
    found = rowwise(x, y, gate, scale, shift, **more)
    assert torch.equal(found[0], h) and torch.equal(found[1], adaptive(h, scale, shift))
    case = next(case for case in rowwise.cases if case.name == "rotary-pairs")
    (q, weight, cos, sin), more = case.make(torch.device("cpu"), dtype)
    normed = F.rms_norm(q, q.shape[-1:], weight, 1e-6) if dtype == torch.float32 else None
    normed = F.rms_norm(q, q.shape[-1:], eps=1e-6) * weight if normed is None else normed
    real, imaginary = normed.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-imaginary, real], -1).flatten(-2)
    wanted = (normed.float() * cos + turned.float() * sin).to(dtype)
    (found,) = rowwise(q, weight, cos, sin, **more)
    assert torch.equal(found, wanted) and found.data_ptr() == more["outputs"][0].data_ptr()


@pytest.mark.parametrize("take", ["even", "first"])
@pytest.mark.parametrize("shape", [(2, 3, 24), (1, 7, 3), (3, 1, 1)], ids=str)
def test_a_part_of_a_larger_buffer_is_written_and_nothing_else(take, shape):
    """Heads that fill a tile and heads that do not."""
    batch, length, heads = shape
    program = normed_rotary(16, torch.bfloat16, take)
    q = torch.randn(batch, length, 3, heads, 16).bfloat16()[:, :, 1]
    given = q, torch.randn(16).bfloat16(), torch.randn(length, 1, 16), torch.randn(length, 1, 16)
    joint = torch.full((batch, length + 4, heads, 16), float("nan")).bfloat16()
    (found,) = run(program, shape, *given, outputs=(joint[:, 4:],))
    (wanted,) = rowwise.reference(*given, program=program, shape=shape)
    assert_equal(found, wanted, "rms_norm")
    assert joint[:, :4].isnan().all() and torch.equal(joint[:, 4:], found)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, beyond the ends of rows
@pytest.mark.parametrize("take", ["even", "first"])
@pytest.mark.parametrize("width", [300, 2600])
def test_a_long_row_is_held_in_several_tiles(take, width):
    program = normed_rotary(width, torch.float32, take)
    q, cos, sin = torch.randn(2, 2, 1, width).bfloat16(), torch.randn(2, 1, width), torch.randn(2, 1, width // 2)
    given = q, torch.randn(width), cos, sin  # the last one repeated
    (found,) = run(program, (2, 2, 1), *given)
    (wanted,) = rowwise.reference(*given, program=program, shape=(2, 2, 1))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=2e-6)
    again = rowwise.reference(*given[:3], sin.repeat(1, 1, 2), program=program, shape=(2, 2, 1))[0]
    assert torch.equal(wanted, again)


def sums(dims, width, *inputs):
    """x + y + z, rounded twice."""
    ops = (RowOp("add", (0, 1), 0.0, torch.bfloat16), RowOp("add", (3, 2), 0.0, torch.bfloat16))
    return RowProgram(dims, width, inputs or (FULL,) * 3, ops, (4,), (torch.bfloat16,))


def test_inputs_may_have_any_strides_and_be_broadcast():
    shape, width = (2, 3, 4, 5), 40
    x = torch.randn(5, 4, 40, 3, 2).permute(4, 3, 1, 0, 2).bfloat16()
    every_second, by_threes = torch.randn(3, 1, 5, 80).bfloat16()[..., ::2], torch.randn(40, 3)[:, 1]
    for given in ((x, every_second, by_threes), (x, torch.tensor(2.0), torch.randn(4, 1, 1)), (by_threes, x, x[:1])):
        wanted = ((given[0].float() + given[1].float()).bfloat16().float() + given[2].float()).bfloat16()
        (found,) = run(sums(4, width), shape, *given)
        assert torch.equal(found, wanted) and found.is_contiguous()


def test_long_rows_are_shared_by_programs():
    x, y = torch.randn(2, 20000).bfloat16(), torch.randn(20000)
    (found,) = run(sums(1, 20000, FULL, FULL, ONE), (2,), x, y, torch.tensor([[1.0], [2.0]]))
    wanted = ((x.float() + y).bfloat16().float() + torch.tensor([[1.0], [2.0]])).bfloat16()
    assert torch.equal(found, wanted)
    program = RowProgram(1, 20000, (FULL,), (RowOp("sum", (0,)),), (1,), (torch.float32,))
    assert "20000 lanes" in rowwise.supports(x, program=program, shape=(2,))


def test_an_input_may_be_a_result_and_one_row_serve_all():
    ops = (RowOp("exp", (1,)), RowOp("amax", (1,)))
    program = RowProgram(2, 6, (FULL, FULL), ops, (0, 2, 3, 1), (torch.float16, *(torch.float32,) * 3))
    x, row = torch.randn(3, 4, 6).half(), torch.randn(6)
    for found in (run(program, (3, 4), x, row), rowwise(x, row, program=program, shape=(3, 4))):
        wanted = (x, row.exp().expand(3, 4, 6), row.amax().expand(3, 4, 1), row.expand(3, 4, 6))
        for mine, theirs in zip(found, wanted, strict=True):
            assert_equal(mine, theirs, "exp")
            assert mine.is_contiguous() and mine.data_ptr() not in (x.data_ptr(), row.data_ptr())


def test_what_is_no_number_stays_none():
    names = ("relu", "clamp_min", "clamp_max", "amax", "neg", "mul_number")
    ops = tuple(RowOp(name, (0,), 0.5, torch.bfloat16) for name in names)
    program = RowProgram(1, 5, (FULL,), ops, tuple(range(1, 1 + len(ops))), (torch.bfloat16,) * len(ops))
    x = torch.tensor([[1.0, float("nan"), -2.0, float("inf"), -float("inf")]]).bfloat16()
    wanted = rowwise.reference(x, program=program, shape=(1,))
    for mine, theirs in zip(run(program, (1,), x), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def test_what_is_written_may_be_what_is_read_but_not_beside_it():
    x, y, z = (torch.randn(4, 8).bfloat16() for _ in range(3))
    wanted = rowwise.reference(x, y, z, program=sums(1, 8), shape=(4,))[0]
    mine = x.clone()
    assert torch.equal(run(sums(1, 8), (4,), mine, y, z, outputs=(mine,))[0], wanted)
    both = torch.cat([x, torch.zeros(1, 8).bfloat16()])
    assert "overlaps" in rowwise.supports(both[:4], y, z, program=sums(1, 8), shape=(4,), outputs=(both[1:],))
    assert torch.equal(rowwise(both[:4], y, z, program=sums(1, 8), shape=(4,), outputs=(both[1:],))[0], wanted)
    shared = torch.zeros(1, 8).bfloat16().expand(4, 8)
    assert "share memory" in rowwise.supports(x, y, z, program=sums(1, 8), shape=(4,), outputs=(shared,))


def test_calls_that_the_kernel_does_not_take_are_named():
    x = torch.randn(3, 8)
    both = (RowOp("even", (0,)), RowOp("first", (0,)))
    program = RowProgram(1, 8, (FULL,), both, (1,), (torch.float32,))
    assert "pairs" in rowwise.supports(x, program=program, shape=(3,))
    assert torch.equal(rowwise(x, program=program, shape=(3,))[0], x[:, ::2])
    assert "empty" in rowwise.supports(x[:0], program=program, shape=(0,))
    double = program._replace(ops=(RowOp("neg", (0,), 0.0, torch.float64),), dtypes=(torch.float64,))
    assert "float64" in rowwise.supports(x, program=double, shape=(3,))


@pytest.mark.parametrize(
    ("ops", "width", "words"),
    [
        ((RowOp("pow", (0,)),), 8, "operation 'pow'"),
        ((RowOp("add", (0,)),), 8, "of 1 registers"),
        ((RowOp("neg", (1,)),), 8, "not there yet"),
        ((RowOp("even", (0,)),), 7, "halves of 7"),
        ((RowOp("sum", (0,)), RowOp("sum", (1,))), 8, "over one lane"),
        ((RowOp("even", (0,)), RowOp("add", (0, 1))), 8, "full and half lanes"),
        ((RowOp("even", (0,)), RowOp("interleave", (0, 1))), 8, "full and half lanes, not half"),
    ],
)
def test_programs_without_a_meaning_say_why(ops, width, words):
    program = RowProgram(1, width, (FULL,), ops, (1,), (torch.float32,))
    with pytest.raises(ValueError, match=words):
        rowwise(torch.randn(3, width), program=program, shape=(3,))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"shape": (3, 1)}, "rows"),
        ({"shape": (2,)}, "input 0 of shape"),
        ({"outputs": ()}, "0 outputs"),
        ({"outputs": (torch.zeros(3, 7),)}, "output 0"),
        ({"outputs": (torch.zeros(3, 8).half(),)}, "output 0"),
    ],
)
def test_tensors_that_do_not_belong_to_the_program_say_why(given, words):
    program = RowProgram(1, 8, (FULL,), (RowOp("neg", (0,)),), (1,), (torch.float32,))
    with pytest.raises(ValueError, match=words):
        rowwise(torch.randn(3, 8), **({"program": program, "shape": (3,)} | given))
    with pytest.raises(ValueError, match="tensors"):
        rowwise(torch.randn(3, 8), torch.randn(3, 8), program=program, shape=(3,))
