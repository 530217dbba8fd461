"""Launches the products of experts: of few tokens each choice by itself, of more grouped by expert.

Figures are in docs/measurements/batches.md. Each choice by itself reads its expert's weights, even where two tokens
chose the same. Grouped, they are read once: memory bounds few tokens, so tiles are small and many loads are under way.
The L2 cache bounds many tokens: tiles are the first dimension of the grid, so that programs of one expert follow each
other and find its weights there.
"""

import torch

from accel_kernels.device import multiprocessors, programmatic, shared_memory, upcast
from accel_kernels.gemm.quantized.dequantize import dequantize
from accel_kernels.gemm.quantized.operands.unpacking_triton import unpack_mode
from accel_kernels.gemm.quantized_weight import MXFP4, PackedWeight, Quantized, scale_bits
from accel_kernels.moe.chooser import itemsize_of, likely_way
from accel_kernels.moe.gemv_triton import expert_down_kernel, expert_up_kernel
from accel_kernels.moe.grouped_triton import group_kernel, grouped_down_kernel, grouped_up_kernel, shared_sum_kernel
from accel_kernels.moe.hopper import wgmma_triton
from accel_kernels.moe.rows_triton import expert_rows_down_kernel, mixture_up_kernel
from accel_kernels.moe.tiles import DEQUANTIZED, GEMV, TILES, Tile
from accel_kernels.moe.weights import PLACES
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch, warming_up

ROWS, COLUMNS, WARPS = 4, 1024, 4  # of a weight stored by rows to a program and step of the GEMV
MX_ROWS, MX_GROUPS = 8, 32  # of one in MXFP4: two rows to a warp, a group to a lane
OUTPUTS, ALONG = 4, 2048  # of its second product: rows, and bytes of each, to a step
BLOCK = 8192  # weights of a transposed one, likewise
ACROSS = (16, 32)  # neighboring outputs of it: few to fill the GPU, or 64 bytes of each input's
SORTED = ((128, 1), (1024, 4), (4096, 16))  # pairs at a time, by so many warps
CHANNELS = 512  # that are added up by a program
LEAST = 16  # inputs of one product of tensor cores


def experts(x, index, shares, weights, *, tile=None):
    """Same arguments and result as the reference. tile: a name of TILES or DEQUANTIZED, GEMV, a Tile, or None."""
    if warming_up():  # what other numbers of tokens will take
        for name in TILES if weights.places is None else list(TILES)[:1]:
            _grouped(x, index, shares, weights, TILES[name])
        if isinstance(weights.down, Quantized) and weights.places is None:
            written = _dequantized(_first_expert(weights), x.dtype)
            for name in DEQUANTIZED.values():
                _grouped(x, index, shares, written, TILES[name])
        return [_one_by_one(x, index, shares, weights, across) for across in ACROSS][-1]
    if tile is None:
        tile = likely_way(*index.shape, weights.experts, itemsize_of(x.dtype, weights))
    if tile == GEMV:
        return _one_by_one(x, index, shares, weights)
    if tile in DEQUANTIZED:
        return _grouped(x, index, shares, _dequantized(weights, x.dtype), TILES[DEQUANTIZED[tile]])
    return _grouped(x, index, shares, weights, TILES[tile] if isinstance(tile, str) else tile)


def _dequantized(weights, dtype):
    """Experts in fewer bits as stacks in dtype."""
    shapes = (weights.wide, weights.hidden), (weights.hidden, weights.inner)
    stacks = [dequantize.triton(one, dtype).view(-1, *shape) for one, shape in zip(weights[:2], shapes, strict=True)]
    return weights._replace(gate_up=stacks[0], down=stacks[1], places=None)


def _first_expert(weights):
    """The stacks of one of them, as kernels are compiled for: the same for any number."""
    return weights._replace(gate_up=weights.gate_up.rows(0, weights.wide), down=weights.down.rows(0, weights.hidden))


def _one_by_one(x, index, shares, weights, columns=None):
    (tokens, chosen), inner, hidden, many = index.shape, weights.inner, weights.hidden, weights.experts
    pairs, pdl = tokens * chosen, programmatic(x.device)
    h = torch.empty((pairs, inner), device=x.device, dtype=x.dtype)
    up_by_rows, down_by_rows = weights.by_rows
    shape = _shape(weights.gate_up, up_by_rows, pairs, columns, 1 + weights.gating.gated)
    launch(
        expert_up_kernel, (cdiv(inner, shape["BLOCK_N"]), pairs), x, index, packed(weights.gate_up),
        weights.gate_up_bias, weights.places, h, chosen, many, inner,
        **_numbers(weights.gate_up), **_gating(weights), TRANSPOSED=not up_by_rows, **shape, **pdl,
    )  # fmt: skip
    if down_by_rows and not isinstance(weights.down, Quantized):
        return _summed_by_rows(torch.empty_like(x), h, index, shares, weights)
    given = torch.empty((pairs, hidden), device=x.device, dtype=torch.float32)
    shape = _shape(weights.down, down_by_rows, pairs, columns, 1)
    launch(
        expert_down_kernel, (cdiv(hidden, shape["BLOCK_N"]), pairs), h, index, packed(weights.down),
        weights.down_bias, _second(weights), given, many, hidden, **_numbers(weights.down), **shape, **pdl,
    )  # fmt: skip
    return _summed(given, x, index, shares, many)


def mixture(x, index, shares, weights, shared, residual, scale=1.0):
    """Same arguments and result as the reference."""
    chosen, inner, hidden = index.shape[1], weights.inner, weights.hidden
    many, pdl = shared.down.shape[1] // inner, programmatic(x.device)
    h = torch.empty((many + chosen, inner), device=x.device, dtype=x.dtype)
    launch(
        mixture_up_kernel, (cdiv(inner, ROWS), many + chosen), x, index, weights.gate_up, shared.gate, shared.up, h,
        weights.experts, inner, K=hidden, SHARED=many, **_gating(weights), BLOCK_N=ROWS,
        BLOCK_K=min(COLUMNS, power_of_two(hidden)), num_warps=WARPS, **pdl,
    )  # fmt: skip
    return _summed_by_rows(torch.empty_like(residual), h, index, shares, weights, shared, x, residual, scale)


def _summed_by_rows(y, h, index, shares, weights, shared=None, x=None, residual=None, scale=1.0):
    """The second product of experts stored by rows, into y, and what is added to it."""
    (tokens, chosen), inner, hidden = index.shape, weights.inner, weights.hidden
    block = min(ALONG // h.itemsize, power_of_two(inner))
    down, share = (None, None) if shared is None else (shared.down, shared.share)
    launch(
        expert_rows_down_kernel, (cdiv(hidden, OUTPUTS), tokens), h, index, shares, weights.down, weights.down_bias,
        _second(weights), down, share, x, residual, y, weights.experts, hidden, float(scale), K=inner, CHOSEN=chosen,
        SHARED=0 if down is None else down.shape[1] // inner, BLOCK_N=OUTPUTS, BLOCK_K=block,
        BLOCK_H=power_of_two(hidden), num_warps=WARPS, **programmatic(h.device),
    )  # fmt: skip
    return y


def _summed(given, x, index, shares, many: int):
    """Shares of what the choices gave, (pairs, H), added up for each token."""
    (tokens, chosen), hidden = index.shape, x.shape[1]
    y, block = torch.empty_like(x), min(CHANNELS, power_of_two(hidden))
    launch(
        shared_sum_kernel, (tokens, cdiv(hidden, block)), given, index, shares, y, chosen, many, hidden,
        CHOICES=power_of_two(chosen), BLOCK=block, num_warps=2, **programmatic(x.device),
    )  # fmt: skip
    return y


def _across(outputs: int, many: int, device: torch.device) -> int:
    """Which of ACROSS, for so many outputs of so many products."""
    few, wide = ACROSS
    return wide if cdiv(outputs, wide) * many >= 2 * multiprocessors(device) else few


def _grouped(x, index, shares, weights, tile: Tile):
    if x.dtype == torch.float32 and isinstance(weights.down, Quantized):  # larger sums, unpacked numbers: all spill
        tile = TILES["16"]
    chosen, inner, hidden = index.shape[1], weights.inner, weights.hidden
    pairs, many = index.numel(), weights.experts
    by_warpgroups = wgmma_triton.tile_for(x, weights, tile.rows)
    rows = by_warpgroups.rows if by_warpgroups else tile.rows
    numbers, pdl = pairs // rows + many, programmatic(x.device)
    order, starts, tiles = (torch.empty(n, device=x.device, dtype=torch.int32) for n in (pairs, many + 1, numbers))
    for block, warps, once in _sorted_by(pairs):
        launch(
            group_kernel, (many,), index, order, starts, tiles, pairs, many, rows, ONCE=once, BLOCK=block,
            num_warps=warps, **pdl,
        )  # fmt: skip
    given = torch.empty((pairs, hidden), device=x.device, dtype=x.dtype)
    groups = (order, starts, tiles)
    if by_warpgroups is not None:
        wgmma_triton.grouped(x, groups, weights, given, chosen, by_warpgroups, pdl)
        return _summed(given, x, index, shares, many)
    h = torch.empty((pairs, inner), device=x.device, dtype=x.dtype)
    grids = [(numbers, cdiv(inner, tile.inner)), (numbers, cdiv(hidden, tile.outputs))]
    stages = [_stages(tile, columns, x.device) for columns in (2 * tile.inner, tile.outputs)]
    depth, by_rows, tail = tile.depth * 2 // x.itemsize, weights.by_rows, tile.tail
    if isinstance(weights.down, Quantized):
        depth, tail = max(depth, LEAST * _numbers(weights.down)["UNIT"]), 0
        if _numbers(weights.down)["UNIT"] > 1:  # steps of other bytes than the tile's
            wide = (2 * tile.inner, tile.outputs)
            stages = [
                _stages_of_words(x, tile, columns, depth, most) for columns, most in zip(wide, stages, strict=True)
            ]
    common = {"ROWS": tile.rows, "TAIL": tail, "DEPTH": depth, "UPCAST": upcast(x.dtype), **pdl}
    common["UNPACK_MODE"] = unpack_mode(x.dtype)
    launch(
        grouped_up_kernel, grids[0], x, packed(weights.gate_up), weights.gate_up_bias, weights.places, *groups, h,
        chosen, inner, **_numbers(weights.gate_up), **_gating(weights), **common,
        TRANSPOSED=not by_rows[0], COLUMNS=tile.inner, num_warps=tile.warps, num_stages=stages[0],
    )  # fmt: skip
    launch(
        grouped_down_kernel, grids[1], h, packed(weights.down), weights.down_bias, _second(weights), *groups, given,
        hidden, **_numbers(weights.down), **common,
        TRANSPOSED=not by_rows[1], COLUMNS=tile.outputs, num_warps=tile.warps, num_stages=stages[1],
    )  # fmt: skip
    return _summed(given, x, index, shares, many)


def _sorted_by(pairs: int) -> list[tuple[int, int, bool]]:
    """Pairs at a time and warps of `group_kernel`, and whether that is all; in a warmup for any number of pairs."""
    every, last = [(*way, True) for way in SORTED], (*SORTED[-1], False)
    return [*every, last] if warming_up() else [next((way for way in every if pairs <= way[0]), last)]


def _second(weights) -> torch.Tensor | None:
    """The places of the second stack, each behind those of the first."""
    return None if weights.places is None else weights.places[:, PLACES // 2 :]


def _gating(weights) -> dict:
    return {"GATING": weights.gating, "INTERLEAVED": weights.interleaved}


def packed(stack: torch.Tensor | Quantized) -> PackedWeight:
    """A stack as kernels take it; numbers of 8 bits stay such."""
    return (
        PackedWeight(stack.data, scale_bits(stack), stack.zeros)
        if isinstance(stack, Quantized)
        else PackedWeight(stack)
    )


def _numbers(stack: torch.Tensor | Quantized) -> dict:
    """How the numbers of a stack lie in memory."""
    inputs = stack.shape[-1]
    if not isinstance(stack, Quantized):
        return {"K": inputs, "UNIT": 1, "GROUPS": 0}
    return {"K": inputs, "UNIT": inputs // stack.data.shape[1], "GROUPS": stack.scales.shape[1]}


def _shape(stack: torch.Tensor | Quantized, by_rows: bool, pairs: int, columns: int | None, products: int) -> dict:
    """Of a GEMV of pairs: a few rows and words of them to a step; of a transposed stack one of ACROSS, or `columns`, of
    so many products.
    """
    if not by_rows:
        across = columns or _across(stack.shape[1] // products, pairs, stack.device)
        return {"BLOCK_N": across, "BLOCK_K": BLOCK // (products * across), "UNPACK_MODE": None, "num_warps": WARPS}
    if isinstance(stack, Quantized) and stack.format is MXFP4:
        return {
            "BLOCK_N": MX_ROWS,
            "BLOCK_K": MX_GROUPS,
            "UNPACK_MODE": unpack_mode(stack.data.dtype),
            "num_warps": WARPS,
        }
    numbers = _numbers(stack)
    words = power_of_two(numbers["K"] // numbers["UNIT"])
    return {"BLOCK_N": ROWS, "BLOCK_K": min(COLUMNS, words), "UNPACK_MODE": None, "num_warps": WARPS}


def _stages_of_words(x: torch.Tensor, tile: Tile, columns: int, depth: int, most: int) -> int:
    """The same where weights are words of several numbers, which are written out side by side."""
    step, unstaged = depth * (tile.rows * x.itemsize + columns // 2), depth * columns * 2
    return min(most, 1 + max(0, shared_memory(x.device) - unstaged) // step)


def _stages(tile: Tile, columns: int, device: torch.device) -> int:
    """Steps whose operands are in shared memory at a time: as many as it holds."""
    step = 2 * tile.depth * (tile.rows + columns)
    return max(2, min(tile.stages, shared_memory(device) // step))
