"""Launches the products of experts: of few tokens each choice by itself, of more grouped by expert.

What bounds them, and what is therefore expected (no measurement), for Qwen3-30B-A3B on a card of 4.2 TB/s and 700
TFLOP/s: 48 layers of 1.2 GB of experts each.

- One token reads its 8 experts: 75 MB a layer, 18 us. Every token more reads its own; no weight is read for two.
- Grouped, an expert's weights are read once however many tokens chose it: 32 tokens hit 112 of 128 experts, 0.25 ms a
  layer, 12 ms in all; from 64 tokens on nearly all are hit, 0.29 ms a layer. Up to some 128 tokens memory bounds, and
  what counts is how many loads are under way: small tiles, several programs to a multiprocessor.
- 2,048 tokens: 16,384 pairs, 128 to an expert, 155 GFLOP a layer: 0.22 ms, still below the 0.29 ms of the weights. The
  programs of one expert that need the same weights follow each other (tiles are the first dimension of the grid), so
  that the second finds them in the L2 cache.
- Beside the products: 2 x T k (I + H) numbers between kernels, 3 launches.
"""

import torch
import triton

from accel_kernels.attention.paged.split_kv import upcast
from accel_kernels.launch import power_of_two
from accel_kernels.moe.experts import MOST_TOKENS
from accel_kernels.moe.gemv_triton import (
    expert_columns_down_kernel,
    expert_columns_up_kernel,
    expert_rows_down_kernel,
    expert_rows_up_kernel,
)
from accel_kernels.moe.grouped_triton import group_kernel, grouped_down_kernel, grouped_up_kernel, shared_sum_kernel
from accel_kernels.moe.tiles import GEMV, TILES, Tile, likely_tile
from accel_kernels.op import multiprocessors, shared_memory
from accel_kernels.warmup import launch, warming_up

ROWS, COLUMNS, WARPS = 4, 1024, 4  # of a weight stored by rows to a program and step of the GEMV
BLOCK = 8192  # weights of a transposed one, likewise
ACROSS = (16, 32)  # neighboring outputs of it: few to fill the GPU, or 64 bytes of each input's
PAIRS = 1024  # that are sorted at a time
CHANNELS = 1024  # that are added up by a program


def experts(x, index, shares, weights, *, tile=None):
    """Same arguments and result as the reference. tile: a name of TILES or GEMV, or a Tile; else chosen by size."""
    if warming_up():  # what other numbers of tokens will take
        for name in TILES:
            _grouped(x, index, shares, weights, TILES[name])
        return [_one_by_one(x, index, shares, weights, across) for across in ACROSS][-1]
    if tile is None:
        tile = GEMV if len(x) <= MOST_TOKENS else likely_tile(index.numel(), weights.experts)
    if tile == GEMV:
        return _one_by_one(x, index, shares, weights)
    return _grouped(x, index, shares, weights, TILES[tile] if isinstance(tile, str) else tile)


def _one_by_one(x, index, shares, weights, columns=None):
    (tokens, chosen), inner = index.shape, weights.inner
    h = torch.empty((tokens * chosen, inner), device=x.device, dtype=x.dtype)
    y = torch.empty_like(x)
    up = (x, index, weights.gate_up, weights.gate_up_bias, h, chosen, weights.experts, inner)
    down = (h, index, shares, weights.down, weights.down_bias, y, chosen, weights.experts, weights.hidden)
    gating = _gating(weights) | {"K": weights.hidden}
    if weights.gate_up.is_contiguous():
        launch(
            expert_rows_up_kernel, (triton.cdiv(inner, ROWS), tokens * chosen), *up, **gating,
            BLOCK_N=ROWS, BLOCK_K=min(COLUMNS, power_of_two(weights.hidden)), num_warps=WARPS,
        )  # fmt: skip
    else:
        across = columns or _across(inner, tokens * chosen, x.device)
        launch(
            expert_columns_up_kernel, (triton.cdiv(inner, across), tokens * chosen), *up, **gating,
            BLOCK_N=across, BLOCK_K=BLOCK // (2 * across), num_warps=WARPS,
        )  # fmt: skip
    if weights.down.is_contiguous():
        launch(
            expert_rows_down_kernel, (triton.cdiv(weights.hidden, ROWS), tokens), *down, K=inner,
            BLOCK_N=ROWS, BLOCK_K=min(COLUMNS, power_of_two(inner)), num_warps=WARPS,
        )  # fmt: skip
    else:
        across = columns or _across(weights.hidden, tokens, x.device)
        launch(
            expert_columns_down_kernel, (triton.cdiv(weights.hidden, across), tokens), *down, K=inner,
            BLOCK_N=across, BLOCK_K=BLOCK // across, num_warps=WARPS,
        )  # fmt: skip
    return y


def _across(outputs: int, many: int, device: torch.device) -> int:
    """Which of ACROSS, for so many outputs of so many products."""
    few, wide = ACROSS
    return wide if triton.cdiv(outputs, wide) * many >= 2 * multiprocessors(device) else few


def _grouped(x, index, shares, weights, tile: Tile):
    (tokens, chosen), inner, hidden = index.shape, weights.inner, weights.hidden
    pairs, many = index.numel(), weights.experts
    numbers = pairs // tile.rows + many
    order, starts, tiles = (torch.empty(n, device=x.device, dtype=torch.int32) for n in (pairs, many + 1, numbers))
    launch(
        group_kernel, (many,), index, order, starts, tiles, pairs, many, ROWS=tile.rows, BLOCK=PAIRS, num_warps=4,
    )  # fmt: skip
    h = torch.empty((pairs, inner), device=x.device, dtype=x.dtype)
    given = torch.empty((pairs, hidden), device=x.device, dtype=x.dtype)
    y = torch.empty_like(x)
    depth = tile.depth * 2 // x.itemsize
    more = {"ROWS": tile.rows, "DEPTH": depth, "UPCAST": upcast(x.dtype), "num_warps": tile.warps}
    launch(
        grouped_up_kernel, (numbers, triton.cdiv(inner, tile.inner)),
        x, weights.gate_up, weights.gate_up_bias, order, starts, tiles, h, chosen, inner,
        K=hidden, **_gating(weights), TRANSPOSED=not weights.gate_up.is_contiguous(), COLUMNS=tile.inner, **more,
        num_stages=_stages(tile, 2 * tile.inner, x.device),
    )  # fmt: skip
    launch(
        grouped_down_kernel, (numbers, triton.cdiv(hidden, tile.outputs)),
        h, weights.down, weights.down_bias, order, starts, tiles, given, hidden,
        K=inner, TRANSPOSED=not weights.down.is_contiguous(), COLUMNS=tile.outputs, **more,
        num_stages=_stages(tile, tile.outputs, x.device),
    )  # fmt: skip
    block = min(CHANNELS, power_of_two(hidden))
    launch(
        shared_sum_kernel, (tokens, triton.cdiv(hidden, block)), given, index, shares, y, chosen, many, hidden,
        BLOCK=block, num_warps=4,
    )  # fmt: skip
    return y


def _gating(weights) -> dict:
    gating = weights.gating
    return {
        "KIND": gating.activation, "ALPHA": gating.alpha, "LIMIT": gating.limit, "SHIFT": gating.shift,
        "INTERLEAVED": weights.interleaved,
    }  # fmt: skip


def _stages(tile: Tile, columns: int, device: torch.device) -> int:
    """Steps whose operands are in shared memory at a time: as many as it holds."""
    step = 2 * tile.depth * (tile.rows + columns)
    return max(2, min(tile.stages, shared_memory(device) // step))
