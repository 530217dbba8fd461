"""Cases of products, which tests and benchmarks run: with weights of any kind, and what stands before and after."""

import torch

from accel_kernels.gemm.adapters.low_rank_term import COPIES, LowRankTerm
from accel_kernels.norm.norm import Norm
from accel_kernels.op import Random, random_cases


@random_cases
def product_case(
    rand, shape, n, *, weight=None, rows=None, norm=None, bias=False, gate=False, activation=None, residual=False,
    scale=1.0, modulation=False, wide=False, addend=False, share=False, low_rank=(), rank=16,
    together=False, shared=False,
    by_row=False,
):  # fmt: skip
    """x of this shape times a weight (n, shape[-1]).

    weight, rows: what the op takes in place of a weight in full and of x. norm: "rms", "gemma" or "layer". bias, gate,
    residual, modulation, addend, share: whether there is one, the modulation for each of shape[0] parts. wide: x and
    residual are float32, or "residual" or "weight" alone. low_rank: ends of parts with adapters; rank: of these.
    together: in one launch; shared: with one A; by_row: not for all.
    """
    k = shape[-1]
    sums = {"dtype": torch.float32} if wide else {}

    def matrix():
        full = rand(n, k, spread=k**-0.5, **(sums if wide == "weight" else {}))
        return full if weight is None else weight(full)

    x = rand(*shape, **(sums if wide is True else {}))
    given = {"activation": activation, "scale": scale}
    if norm is not None:
        given["norm"] = case_norm(norm, rand, k)
    if gate:
        given |= {"up": matrix(), "up_bias": rand(n) if bias else None}
    if residual:
        given["residual"] = rand(*shape[:-1], n, **sums)
    if modulation:
        given["modulation"] = rand(shape[0], n)
    if addend:
        given["addend"] = rand(*shape[:-1], n)
    if share:
        given["share"] = rand(*shape[:-1], 1)
    if low_rank:
        count = len(low_rank) + (gate and not shared)
        down, up = rand(count * rank, k, spread=k**-0.5), rand(n, rank, spread=rank**-0.5)
        gate_up = rand(n, rank, spread=rank**-0.5) if gate else None
        given["low_rank"] = LowRankTerm(down, up, low_rank, gate_up, shared)
        if by_row:
            kept = rand(shape[0], count * rank).gt(0).to(rand.dtype)
            given["low_rank"] = given["low_rank"]._replace(rows=kept)
        if together:
            step = torch.ones(1, dtype=torch.int32, device=x.device)
            tagged = torch.zeros(COPIES, count * rank, device=x.device, dtype=torch.int64)
            given["low_rank"] = given["low_rank"]._replace(step=step, tagged=tagged)
    shift = rand(n, **(sums if wide == "weight" else {})) if bias else None
    return (x if rows is None else rows(x), matrix(), shift), given


def case_norm(kind: str | None, rand: Random, channels: int) -> Norm | None:
    """kind: "rms", "gemma", "layer" or None."""
    if kind is None:
        return None
    if kind == "layer":
        return Norm(rand(channels), rand(channels), 1e-5, centered=True)
    return Norm(rand(channels), None, 1e-5) if kind == "rms" else Norm(rand(channels), None, 1e-6, offset=1.0)
