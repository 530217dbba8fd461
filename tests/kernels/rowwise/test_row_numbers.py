"""Row programs that round what they compute to 8 bits: bit for bit what `quantize_rows` makes of the same rows."""

import importlib

import pytest
import torch
from accel_kernels import RowOp, RowProgram, quantize_rows, rowwise
from accel_kernels.rowwise.cases import quantized_norm
from accel_kernels.rowwise.operations import NEAR
from accel_kernels.rowwise.program import FULL, NUMBERS, ONE, register_widths, rounded_alone

from support.kernels.numbers import assert_near

triton = pytest.importorskip("triton")
tl = triton.language
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
ODD = [(3, 5, 72), (2, 1, 130), (1, 2, 2600)]


def poisoned(program, shape):
    """Memory for results that shows where nothing was written."""
    widths = register_widths(program)
    sizes = [(*shape, program.width if widths[one] == FULL else 1) for one in program.results]
    whole = {kind: torch.full((1,), 0x81, dtype=torch.uint8).view(kind) for kind in KINDS.values()}
    return tuple(
        whole[dtype].expand(size).contiguous() if dtype in whole else torch.full(size, float("nan"), dtype=dtype)
        for size, dtype in zip(sizes, program.dtypes, strict=True)
    )


def bits(numbers):
    return numbers.view(torch.uint8)


def rows_of(shape, dtype):
    """Some whose largest value is negative, is twice there, is nothing, or is no number."""
    x = (torch.randn(shape) * 3).to(dtype)
    x[0, 0, 5], x[0, 0, 9] = -50, 50
    return x


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, beyond the ends of rows
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_rounded_in_the_pass_that_makes_them(shape, dtype, kind):
    x, scale, shift = rows_of(shape, dtype), *(torch.randn(shape[0], 1, shape[-1]).to(dtype) for _ in range(2))
    program = quantized_norm(shape[-1], dtype, kind)
    outputs = poisoned(program, shape[:-1])
    assert rowwise.supports(x, scale, shift, program=program, shape=shape[:-1], outputs=outputs) is None
    given = {"program": program, "shape": shape[:-1]}
    for run, separate in (
        (rowwise.triton(x, scale, shift, **given, outputs=outputs), quantize_rows.triton),
        (rowwise.reference(x, scale, shift, **given), quantize_rows.reference),
    ):
        y, numbers, scales, _ = run
        wanted = separate(y, dtype=KINDS[kind])
        assert numbers.dtype == KINDS[kind] and torch.equal(bits(numbers), bits(wanted.data))
        assert torch.equal(scales, wanted.scales)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_two_programs_round_the_columns_of_one_row(kind):
    """Each a part, by the peak of both, into one tensor: as of the parts put together."""
    parts, kept = (torch.randn(2, 3, 48).bfloat16(), torch.randn(2, 3, 200).bfloat16() * 2), KINDS[kind]
    parts[0][1, 2, 4], parts[1][0, 1, 7] = 30, float("inf")
    peak = RowProgram(2, 48, (FULL,), (RowOp("peak", (0,)),), (1,), (torch.float32,))
    ops = (
        RowOp("peak", (0,)),
        RowOp("maximum", (2, 1)),
        RowOp(f"numbers_{kind}", (0, 3)),
        RowOp(f"scale_{kind}", (3,)),
    )
    both = RowProgram(2, 200, (FULL, ONE), ops, (4, 5, 3), (kept, torch.float32, torch.float32))
    other = RowProgram(2, 48, (FULL, ONE), (RowOp(f"numbers_{kind}", (0, 1)),), (2,), (kept,))
    for run, separate in ((rowwise.triton, quantize_rows.triton), (rowwise.reference, quantize_rows.reference)):
        wanted = separate(torch.cat(parts, -1), dtype=kept)
        joint = torch.full((2, 3, 248), 0x81, dtype=torch.uint8).view(kept)
        (least,) = run(parts[0], program=peak, shape=(2, 3))
        _, scales, most = run(parts[1], least, program=both, shape=(2, 3), outputs=(joint[..., 48:], None, None))
        run(parts[0], most, program=other, shape=(2, 3), outputs=(joint[..., :48],))
        there = wanted.scales.isfinite()[..., 0]  # the numbers of a row without a scale mean nothing
        assert torch.equal(bits(joint)[there], bits(wanted.data)[there]) and 0 < there.sum() < there.numel()
        assert torch.equal(scales.nan_to_num(-1), wanted.scales.nan_to_num(-1)) and scales[0, 1].isnan()


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NEAR)
def test_what_is_rounded_alone_may_be_off_by_units_of_fp32(name, kind):
    assert_near(name, kind, torch.device("cpu"))


def test_which_registers_are_rounded_alone():
    ops = (
        RowOp("silu", (0,)),  # 2
        RowOp("mul", (2, 1)),  # 3
        RowOp("peak", (3,)),  # 4
        RowOp("scale_int8", (4,)),  # 5
        RowOp("numbers_int8", (3, 4)),  # 6
        RowOp("silu", (1,)),  # 7
    )
    kinds = (torch.int8, torch.float32, torch.bfloat16)

    def alone(*results):
        return rounded_alone(RowProgram(1, 64, (FULL, FULL), ops, results, kinds[: len(results)]))

    assert alone(6, 5) == {0, 2, 3}  # what is read from memory is as it is there
    assert alone(6, 5, 3) == set()  # stored, and so seen
    assert alone(6, 5, 7) == {0, 2, 3}
    assert rounded_alone(RowProgram(1, 64, (FULL, FULL), ops[:4], (4,), (torch.float32,))) == set()  # a peak alone


@interpreted
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_has_no_scale(value):
    x = torch.randn(1, 4, 77).bfloat16()
    x[0, 1, 70], x[0, 3] = value, 0
    program = RowProgram(2, 77, (FULL,), (RowOp("peak", (0,)), RowOp("scale_fp8", (1,))), (2,), (torch.float32,))
    for run in (rowwise.triton, rowwise.reference):
        (scales,) = run(x, program=program, shape=(1, 4))
        assert scales[0, 1].isnan() and scales[0, [0, 2, 3]].isfinite().all() and (scales[0, 3] > 0).all()


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_8_bits_are_a_result_and_nothing_else(name):
    ops = (RowOp("peak", (0,)), RowOp(name, (0, 1)))
    with pytest.raises(ValueError, match=f"a result of torch.bfloat16 from {name}"):
        register_widths(RowProgram(1, 64, (FULL,), ops, (2,), (torch.bfloat16,)))
    with pytest.raises(ValueError, match="a result of torch.int8 from an input"):
        register_widths(RowProgram(1, 64, (FULL,), ops, (0,), (torch.int8,)))
    with pytest.raises(ValueError, match="an operation on numbers of 8 bits"):
        register_widths(RowProgram(1, 64, (FULL,), (*ops, RowOp("neg", (2,))), (2,), (NUMBERS[name],)))
    with pytest.raises(ValueError, match=f"{name} by a peak of full lanes"):
        register_widths(RowProgram(1, 64, (FULL,), (RowOp(name, (0, 0)),), (1,), (NUMBERS[name],)))


nearest_float8 = importlib.import_module("accel_kernels.rowwise.row_numbers_triton").nearest_float8


@triton.jit
def nearest_kernel(x_ptr, y_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y_ptr + at, nearest_float8(tl.load(x_ptr + at)))


@interpreted
def test_float8_by_hand_is_torchs_of_every_code_and_what_lies_between_two():
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    some = torch.cat([codes, middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(1e9))])
    x = torch.cat([some, -some, torch.tensor([float("nan"), -0.0])])
    x = torch.nn.functional.pad(x, (0, 1024 - len(x)))
    y = torch.empty_like(x)
    nearest_kernel[(1,)](x, y, N=1024)
    wanted = x.to(torch.float8_e4m3fn)
    assert torch.equal(y.to(torch.float8_e4m3fn).view(torch.uint8), wanted.view(torch.uint8))
    torch.testing.assert_close(y, wanted.float(), rtol=0, atol=0, equal_nan=True)  # so no conversion is off
