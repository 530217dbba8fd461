"""The place of the largest number of each row, as torch.argmax finds it, by more than one program a row."""

import torch

from accel_kernels.op import dtype_reason, make_op, random_cases


def reference(x):
    """x: (rows, N), N contiguous. Returns (rows,) int64: of equals the first; NaN is the largest."""
    return torch.argmax(x, dim=-1)


def supports(x) -> str | None:
    if x.dim() != 2 or x.numel() == 0:
        return f"numbers of shape {tuple(x.shape)}"
    if x.stride(1) != 1:
        return "rows not contiguous"
    return dtype_reason(x)


@random_cases
def _case(rand, rows, n, wide=1, levels=0, nan=()):
    """wide: times n, the numbers being a part of wider rows. levels: of which there are few, so that many are equal."""
    x = rand(rows, wide * n)[:, :n]
    if levels:
        x = (x * levels).round()
    for row, place in nan:
        x[row, place] = torch.nan
    return (x,), {}


CASES = (
    _case("one", 1, 1, small=True),
    _case("odd", 3, 777, wide=2, small=True),
    _case("equal", 2, 9001, levels=1, small=True),
    _case("nan", 2, 5000, nan=((0, 4999), (0, 4321), (1, 0)), small=True),
    _case("llama", 1, 128256),
    _case("gemma-16", 16, 262144, levels=2),
)

argmax = make_op("argmax", reference, supports, CASES)
