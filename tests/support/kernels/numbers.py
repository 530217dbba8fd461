"""Numbers that kernels are given, and how near what they give has to be."""

import numpy as np
import torch
from accel_kernels import Norm, Quantized, RowOp, RowProgram, fp8_linear, quantize_rows, route, rowwise
from accel_kernels.accuracy import in_float64
from accel_kernels.gemm.quantized.quantized_linear import FP8, INT4, INT8
from accel_kernels.rowwise.program import FULL
from accel_kernels.rowwise.row_numbers import row_numbers, row_peak, row_scale
from accel_kernels.rowwise.rowwise import TORCH
from accel_kernels.tolerances import FLOOR
from torch.utils._pytree import tree_map

from support.kernels.warpgroups import Array

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def assert_near(name: str, kind: str, device: torch.device) -> None:
    """The numbers and scales of an activation are those of float64, but for a few where rounding is undecided."""
    x = torch.randn(5, 3000, generator=torch.Generator().manual_seed(0)).to(device) * 4
    x[0, :9] = torch.tensor([-88.0, 88.0, -200.0, 0.0, -0.0, -12.0, 1e-20, -1e-5, 30.0], device=device)
    ops = (
        RowOp(name, (0,), 0.0, torch.bfloat16),  # which nobody sees, so it is not rounded
        RowOp("peak", (1,)),
        RowOp(f"scale_{kind}", (2,)),
        RowOp(f"numbers_{kind}", (1, 2)),
    )
    program = RowProgram(1, 3000, (FULL,), ops, (4, 3), (KINDS[kind], torch.float32))
    assert rowwise.supports(x, program=program, shape=(5,)) is None
    numbers, scales = rowwise.triton(x, program=program, shape=(5,))
    exact = TORCH[name](x.double())
    peak = row_peak(exact)
    wanted = row_numbers(exact, peak, KINDS[kind]).to(KINDS[kind])
    torch.testing.assert_close(scales.double(), row_scale(peak, KINDS[kind]), rtol=2e-6, atol=0)
    off = numbers.float() != wanted.float()
    assert off.float().mean() < 2e-3
    steps = (numbers.float() - wanted.float()).abs()
    assert float(steps.max()) <= (1 if kind == "int8" else 32)


NORMS = {
    "none": None,
    "rms": Norm(torch.randn(80), None, 1e-5),
    "gemma": Norm(torch.randn(80), None, 1e-6, offset=1.0),
    "layer": Norm(torch.randn(80), torch.randn(80), 1e-5, centered=True),
    "plain-layer": Norm(None, None, 1e-5, centered=True),
}


def weight_of(n, k, dtype=torch.bfloat16, to=torch.int8):
    rows = quantize_rows.reference(torch.randn(n, k) * k**-0.5, dtype=to)
    return Quantized.of(rows.data, rows.scales.to(dtype))


def cast(norm, dtype):
    """The norm with its weights in this dtype."""
    return norm and Norm(*(t.to(dtype) if isinstance(t, torch.Tensor) else t for t in norm))


def sqnr(found, exact) -> float:
    """Signal to quantization noise, dB."""
    exact = exact.double()
    return float(10 * torch.log10(exact.square().sum() / (found.double() - exact).square().sum()))


# Triton's interpreter truncates to bfloat16 where the GPU rounds: one more unit in the last place, and one for a gate.
TRUNCATION = {torch.bfloat16: 2**-8}


def assert_as_good_as_torch(op, args, kwargs, dtype):
    """The kernel's largest error against float64 is at most twice the reference's own in this dtype."""

    def many(output):
        return output if isinstance(output, tuple) else (output,)

    wide, more = tree_map(in_float64, (args, kwargs))
    exact, torchs = many(op.reference(*wide, **more)), many(op.reference(*args, **kwargs))
    ours = many(op.triton(*args, **kwargs))
    roundings = 1 + any(kwargs.get(name) is not None for name in ("gate", "up"))
    slack = FLOOR[dtype] + (0.0 if args[0].is_cuda else roundings * TRUNCATION.get(dtype, 0.0))
    for mine, theirs, truth in zip(ours, torchs, exact, strict=True):
        if truth is None:  # what the kernel makes besides; has a test of its own
            continue
        assert mine.dtype == theirs.dtype and mine.shape == truth.shape
        assert torch.isfinite(mine).all()
        peak = truth.abs().max().clamp_min(1e-3)
        error, allowed = (float((t.double() - truth).abs().max() / peak) for t in (mine, theirs))
        assert error <= 2 * allowed + slack, f"error {error:.2e}, torch's own {allowed:.2e}"


def assert_scaled_product(case, device: str) -> None:
    """Torch's product of float8 is as exact as the reference, but for roundings: after it, after a gate, at the end."""
    args, given = case.make(torch.device(device), torch.bfloat16)
    assert fp8_linear.supports(*args, **given) is None
    exact = fp8_linear.reference(args[0]._replace(scales=args[0].scales.double()), *args[1:], **given)
    found, wanted = fp8_linear.triton(*args, **given), fp8_linear.reference(*args, **given)
    assert (found.double() - exact).abs().max() <= 4 * (wanted.double() - exact).abs().max()


FORMATS = {"int8": INT8, "int4": INT4, "fp8": FP8}


def numbers_of(format, neighbors, middle):
    """`pairs` as its text has it: which number of a word is which of the results."""
    order = (0, 4, 1, 5, 2, 6, 3, 7) if format == "int4" else (0, 1, 2, 3) if neighbors else (0, 2, 1, 3)

    def pairs(words, scales, zeros, *flags):
        words = words.data.astype(np.int64)
        found = []
        for place in order:
            if format == "int4":
                number = (words >> 4 * place & 15) - 8.0
            else:
                one = torch.from_numpy((words >> 8 * place & 255).astype(np.uint8))
                number = one.view(FORMATS[format]).double().numpy()
            if isinstance(zeros, Array):
                number = number + middle + zeros.data
            elif flags[-1]:  # raw
                number = number + middle
            found.append(Array(number * scales.data if isinstance(scales, Array) else number))
        return found

    return pairs


def spread(values, repeats, given):
    return Array(np.repeat(values.data, repeats, axis=2)) if given else values


def route_case(name: str, device: torch.device, dtype: torch.dtype) -> tuple:
    args, _ = next(case for case in route.cases if case.name == name).make(device, dtype)
    return args


def poisoned(monkeypatch) -> None:
    """Fresh memory holds NaN, or a number that no kernel writes, so that an element no program wrote shows."""
    for name in ("empty", "empty_like"):

        def filled(*args, make=getattr(torch, name), **kwargs):  # noqa: B008 (torch's own, before it is replaced)
            tensor = make(*args, **kwargs)
            if tensor.dtype is torch.bool:
                return tensor.fill_(True)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)

        monkeypatch.setattr(torch, name, filled)


def assert_routes_as_torch(logits, routing, bias=None, dtype=None) -> None:
    """The same choices as the reference's; shares at most twice as far from float64 as its own, row by row."""
    assert route.supports(logits, routing, bias, dtype) is None
    index, shares = route.triton(logits, routing, bias, dtype)
    wanted, torchs = route.reference(logits, routing, bias, dtype)
    assert index.dtype == torch.int64 and torch.equal(index, wanted)
    exact_index, exact = route.reference(logits.double(), routing, None if bias is None else bias.double())
    assert torch.equal(exact_index, wanted)
    kind = dtype or logits.dtype
    assert shares.dtype == torchs.dtype == kind
    peak = exact.abs().amax(-1, keepdim=True)
    error, own = (float(((one.double() - exact).abs() / peak).max()) for one in (shares, torchs))
    slack = FLOOR[kind] + (0.0 if logits.is_cuda else TRUNCATION.get(kind, 0.0))
    assert error <= 2 * own + slack, f"error {error:.1e}, torch's own {own:.1e}"
