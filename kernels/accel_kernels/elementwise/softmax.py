"""Softmax of fp32 scores into 16 bit: what lies between the two products of an attention."""

import torch

from accel_kernels.op import dtype_reason, make_op, random_cases


def reference(x, scale, dtype):
    """x: (R, C), scores in fp32. Returns softmax(x * scale) over each row in `dtype`; of fp64, the oracle, in fp64."""
    return torch.softmax(x * scale, dim=-1).to(dtype if x.dtype == torch.float32 else x.dtype)


def supports(x, scale, dtype) -> str | None:
    if x.dim() != 2 or x.numel() == 0:
        return f"scores of shape {tuple(x.shape)}"
    if not x.is_contiguous():
        return "not contiguous"
    return dtype_reason(x, torch.empty(0, dtype=dtype, device=x.device))


@random_cases
def _case(rand, rows, columns):
    return (rand(rows, columns, spread=8.0, dtype=torch.float32), 0.5, rand.dtype), {}


CASES = (
    _case("tiny", 3, 16, small=True),
    _case("odd", 5, 77, small=True),
    _case("one", 1, 1, small=True),
    _case("blocks", 2, 20011, small=True),
    _case("vae-512", 4096, 4096),
    _case("vae-1024", 2048, 16384),
)

softmax = make_op("softmax", reference, supports, CASES)
