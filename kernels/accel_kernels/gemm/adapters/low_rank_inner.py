"""x A^T of adapters of low rank: a product of many rows with few outputs, for which libraries' tiles are too large."""

import torch.nn.functional as F

from accel_kernels.op import contiguous_reason, dtype_reason, make_op, random_cases

MOST_OUTPUTS = 128
LEAST_ROWS, MOST_ROWS, MOST_COLUMNS = 512, 16384, 2048  # where it pays


def reference(x, down):
    """x: (..., K); down: (R, K). Returns (..., R)."""
    return F.linear(x, down)


def supports(x, down) -> str | None:
    if x.numel() == 0 or down.numel() == 0:
        return "empty"
    if down.shape[0] > MOST_OUTPUTS or down.shape[0] % 16 or x.shape[-1] != down.shape[1] or x.shape[-1] % 8:
        return f"{x.shape[-1]} columns, and an A {tuple(down.shape)}"
    if x.dtype != down.dtype:
        return "x and A of different dtypes"
    return contiguous_reason(x=x, down=down) or dtype_reason(x, down)


def pays(x, down) -> bool:
    """Whether rows give each multiprocessor a program, and none has many columns to walk along. By counting."""
    rows = x.numel() // x.shape[-1]
    return LEAST_ROWS <= rows <= MOST_ROWS and x.shape[-1] <= MOST_COLUMNS and x.element_size() == 2


@random_cases
def _case(rand, *shape, rank):
    return (rand(*shape), rand(rank, shape[-1], spread=shape[-1] ** -0.5)), {}


CASES = (
    _case("one-block", 2, 7, 72, rank=16, small=True),
    _case("two-blocks", 21, 136, rank=80, small=True),
    _case("sdxl-32-16", 2, 1024, 1280, rank=16),
    _case("sdxl-32-qkv-16", 2, 1024, 1280, rank=48),
    _case("sdxl-64-64", 2, 4096, 640, rank=64),
    _case("sdxl-down-16", 2, 1024, 5120, rank=16),
    _case("flux-64", 1, 4608, 3072, rank=64),
)

low_rank_inner = make_op("low_rank_inner", reference, supports, CASES, pays=pays)
