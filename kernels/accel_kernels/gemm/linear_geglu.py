"""A linear layer and the GEGLU after it in one kernel: the wide middle of the feed-forward is never written.

y = (x Wv^T + bv) * gelu(x Wg^T + bg), exact GELU; Shazeer, "GLU Variants Improve Transformer", 2020. `hopper_gemm` is
the kernel, where it fills the GPU; elsewhere the library's product and one pass for GEGLU.
"""

from functools import partial

import torch.nn.functional as F

from accel_kernels.elementwise.gated import geglu, reference_geglu
from accel_kernels.gemm.adapters.low_rank_term import LowRankTerm, with_low_rank
from accel_kernels.gemm.hopper.hopper_gemm import fills_gpu, hopper_gemm
from accel_kernels.op import Op, contiguous_reason, random_cases


def reference(x, weight, bias=None, low_rank=None):
    """x: (..., K); weight: (2 D, K); bias: (2 D,) or None; low_rank: a `LowRankTerm` or None. Returns (..., D)."""
    return reference_geglu(with_low_rank(partial(F.linear, x), x, low_rank, None)(weight, bias))


def instead(x, weight, bias=None, low_rank=None):
    """The same by torch's product, and one pass."""
    y = F.linear(x, weight, bias)
    return geglu(y if low_rank is None else low_rank.add_to(y, x))


def kernel(x, weight, bias=None, low_rank=None):
    """The same in one pass."""
    args, more = _halves(weight, bias, low_rank)
    return hopper_gemm.triton(x, *args, **more)


def _halves(weight, bias, low_rank):
    """Arguments of `hopper_gemm` after x."""
    inner = weight.shape[0] // 2
    (value, gate), (shift, gate_shift) = weight.split(inner), (None, None) if bias is None else bias.split(inner)
    more = {"up": value, "up_bias": shift, "activation": "gelu"}
    if low_rank is not None:
        value_up, gate_up = low_rank.up.split(inner)
        more["low_rank"] = low_rank._replace(up=gate_up, gate_up=value_up, ends=(inner,), shared=True)
    return (gate, gate_shift), more


def supports(x, weight, bias=None, low_rank=None) -> str | None:
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or weight.shape[0] % 2:
        return f"input {tuple(x.shape)} and weight {tuple(weight.shape)}"
    if (reason := contiguous_reason(x=x, weight=weight)) is not None:
        return reason
    args, more = _halves(weight, bias, low_rank)
    return hopper_gemm.supports(x, *args, **more)


def pays(x, weight, bias=None, low_rank=None) -> bool:
    """Whether tiles fill the GPU well enough for the one kernel to win over cuBLAS's choice of tiles."""
    return fills_gpu(x.numel() // x.shape[-1], weight.shape[0] // 2, x.device)


@random_cases
def _case(rand, *shape, inner, bias=True, rank=0):
    spread = shape[-1] ** -0.5
    weight, given = rand(2 * inner, shape[-1], spread=spread), {}
    if rank:
        down, up = rand(rank, shape[-1], spread=spread), rand(2 * inner, rank, spread=rank**-0.5)
        given["low_rank"] = LowRankTerm(down, up, (2 * inner,))
    return (rand(*shape), weight, rand(2 * inner) if bias else None), given


CASES = (
    _case("tiny", 2, 5, 64, inner=32, small=True),
    _case("odd", 3, 47, 72, inner=136, small=True),
    _case("no-bias", 1, 130, 40, inner=24, bias=False, small=True),
    _case("low-rank", 2, 37, 72, inner=136, rank=32, small=True),
    _case("sdxl-32-low-rank", 2, 1024, 1280, inner=5120, rank=16),
    _case("sd15-64", 2, 4096, 320, inner=1280),
    _case("sd15-32", 2, 1024, 640, inner=2560),
    _case("sdxl-64", 2, 4096, 640, inner=2560),
    _case("sdxl-32", 2, 1024, 1280, inner=5120),
)

linear_geglu = Op(
    "linear_geglu", reference, "accel_kernels.gemm.linear_geglu:kernel", supports, CASES, pays=pays, instead=instead
)
