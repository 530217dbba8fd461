"""The rounding of stored keys and values as a kernel of its own, and numbers that are hard to round."""

import torch
import triton
import triton.language as tl
from accel_kernels.attention.paged.kv_quantization import TOPS
from accel_kernels.attention.paged.kv_quantization_triton import TRITON_DTYPES
from accel_kernels.attention.paged.kv_quantization_triton import rounded as in_registers


@triton.jit
def codes_kernel(x_ptr, codes_ptr, scale_ptr, DIM: tl.constexpr, ROWS: tl.constexpr, CODE: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = rows[:, None] * DIM + tl.arange(0, DIM)[None, :]
    codes, scale = in_registers(tl.load(x_ptr + place).to(tl.float32), CODE)
    tl.store(codes_ptr + place, codes)
    tl.store(scale_ptr + rows, scale)


def run(x, codes, scales, rows: int) -> None:
    """Codes (N, D) and scales (N) of x (N, D); N a multiple of `rows`, both powers of two."""
    codes_kernel[(len(x) // rows,)](x, codes, scales, DIM=x.shape[1], ROWS=rows, CODE=TRITON_DTYPES[codes.dtype])


def ties(code: torch.dtype, dtype: torch.dtype, rows: int = 256, dim: int = 64) -> torch.Tensor:
    """(rows, dim) of which most numbers lie in the middle of two codes: in even rows exactly, in odd ones but for the
    rounding of a scale that is no power of two; the first of each row is its largest.
    """
    g = torch.Generator().manual_seed(0)
    if code == torch.int8:
        middle = torch.randint(-127, 127, (rows, dim), generator=g) + 0.5
    else:
        every = torch.arange(127, dtype=torch.uint8).view(code).float()  # ascending, up to 448
        middle = (every[:-1] + every[1:])[torch.randint(len(every) - 1, (rows, dim), generator=g)] / 2
        middle *= torch.randint(0, 2, middle.shape, generator=g) * 2 - 1
    middle[:, 0] = TOPS[code]
    scale = 2.0 ** torch.randint(-6, 4, (rows, 1), generator=g)
    scale[1::2] *= 1 + torch.rand(rows // 2, 1, generator=g)
    return (middle * scale).to(dtype)
