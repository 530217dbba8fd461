"""From logits to choices and shares: a program a token, its experts in the registers of as few warps as hold them.

The largest is found k times over. A number and its place make one integer of 64 bits, so that one maximum finds both,
the lower place first of equals.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.device import programmatic
from accel_kernels.float_order_triton import NEVER, in_order
from accel_kernels.sizes import power_of_two
from accel_kernels.warmup import launch, warming_up

HELD = 512  # experts to a warp


@triton.jit
def keep_groups(value, there, g_idx, j_idx, groups, kept, best, outside, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """`value`, (GROUPS, SIZE), and `outside` in groups that are not among the best."""
    order = tl.where(there, in_order(value, tl.broadcast_to(j_idx[None, :], (GROUPS, SIZE))), NEVER)
    total = tl.zeros((GROUPS,), tl.float32)
    for _ in range(best):
        hit = (order == tl.max(order, axis=1)[:, None]) & there
        total += tl.sum(tl.where(hit, value, 0.0), axis=1)
        order = tl.where(hit, NEVER, order)
    of_groups = tl.where(g_idx < groups, in_order(total, g_idx), NEVER)
    keep = tl.zeros((GROUPS,), tl.int32)
    for _ in range(kept):
        hit = of_groups == tl.max(of_groups, axis=0)
        keep = tl.where(hit, 1, keep)
        of_groups = tl.where(hit, NEVER, of_groups)
    return tl.where(keep[:, None] > 0, value, outside)


@triton.jit(do_not_specialize=("stride", "experts", "chosen", "groups", "kept", "best"))
def route_kernel(
    logits_ptr, bias_ptr, gains_ptr, index_ptr, shares_ptr, stride, experts, chosen, groups, kept, best, outside, eps,
    floor, scale, SCORE: tl.constexpr, SHARE: tl.constexpr, ROUNDED: tl.constexpr, BY_LOGITS: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GROUPS, SIZE: powers of two that hold the groups and the experts of one."""
    token = tl.program_id(0).to(tl.int64)
    size = experts // groups
    g_idx, j_idx = tl.arange(0, GROUPS), tl.arange(0, SIZE)
    there = (g_idx < groups)[:, None] & (j_idx < size)[None, :]
    expert = g_idx[:, None] * size + j_idx[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    logits = tl.load(logits_ptr + token * stride + expert, mask=there, other=-float("inf")).to(tl.float32)
    score = logits
    if SCORE == "softmax":
        top = tl.max(tl.max(logits, axis=1), axis=0)
        weight = tl.where(there, tl.exp(logits - top), 0.0)
        score = weight / tl.sum(tl.sum(weight, axis=1), axis=0)
    if SCORE == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-logits))
    if ROUNDED:
        score = score.to(logits_ptr.dtype.element_ty).to(tl.float32)
    value = logits
    if bias_ptr is not None:
        value = (logits if BY_LOGITS else score) + tl.load(bias_ptr + expert, mask=there, other=0.0).to(tl.float32)
    if GROUPS > 1:
        if bias_ptr is None:
            value = score
        value = keep_groups(value, there, g_idx, j_idx, groups, kept, best, outside, GROUPS, SIZE)

    order = tl.where(there, in_order(value, expert), NEVER)
    rank = tl.full((GROUPS, SIZE), -1, tl.int32)
    for i in range(chosen):
        hit = order == tl.max(tl.max(order, axis=1), axis=0)
        rank = tl.where(hit, i, rank)
        order = tl.where(hit, NEVER, order)
    taken = rank >= 0

    if SHARE == "softmax":
        top = tl.max(tl.max(tl.where(taken, logits, -float("inf")), axis=1), axis=0)
        share = tl.where(taken, tl.exp(logits - top), 0.0)
        share = share / tl.sum(tl.sum(share, axis=1), axis=0)
    else:
        share = score
    if SHARE == "sum":
        total = tl.sum(tl.sum(tl.where(taken, score, 0.0), axis=1), axis=0) + eps
        share = share / tl.where(total < floor, floor, total)
    share *= scale
    if gains_ptr is not None:
        share *= tl.load(gains_ptr + expert, mask=there, other=0.0).to(tl.float32)
    at = token * chosen + rank
    tl.store(index_ptr + at, expert.to(tl.int64), mask=taken)
    tl.store(shares_ptr + at, share.to(shares_ptr.dtype.element_ty), mask=taken)


def route(logits, routing, bias=None, dtype=None, *, gains=None):
    """Same arguments and result as the reference."""
    tokens, experts = logits.shape
    index = torch.empty((tokens, routing.chosen), device=logits.device, dtype=torch.int64)
    shares = torch.empty_like(index, dtype=dtype or logits.dtype)
    if warming_up():  # no kernel runs, and stock experts after it look up whatever is chosen
        index.copy_(torch.arange(routing.chosen, device=index.device).expand_as(index))
    groups = power_of_two(routing.groups)
    size = power_of_two(experts // routing.groups)
    # The kernel is not specialized on numbers: settings of one kind of router share one.
    numbers = map(float, (routing.outside, routing.eps, routing.floor, routing.scale))
    launch(
        route_kernel, (tokens,), logits, bias, gains, index, shares, logits.stride(0), experts, routing.chosen,
        routing.groups, routing.kept, routing.best, *numbers, routing.score, routing.share, routing.rounded,
        routing.by_logits, groups, size, num_warps=max(1, groups * size // HELD), **programmatic(logits.device),
    )  # fmt: skip
    return index, shares
