"""Block sizes of the attention kernels over a store, and in how many shares the keys are cut."""

from typing import NamedTuple

import torch

from accel_kernels.device import multiprocessors, on_tensor_cores
from accel_kernels.sizes import power_of_two

MOST_SPLITS, KV8_MOST_SPLITS = 32, 64
FEW_SPLITS = 8
# Codes of 8 bits are converted while the next ones are loaded: more programs to a multiprocessor, where their shares
# are long enough.
FILL, KV8_FILL = 2, 4
KV8_REGISTERS = 128  # to a thread: what lets so many programs of 4 warps share one
KV8_BLOCKS = 8  # of keys to a share, from which on there are more shares than fill the GPU FILL times


class Tile(NamedTuple):
    """Rows of queries, keys and channels of a program, and its launch shape."""

    queries: int
    keys: int
    channels: int
    warps: int
    stages: int


def tile_of(queries: int, store_block: int, q: torch.Tensor) -> Tile:
    """As measured on an H200. A block of keys never crosses a block of the store."""
    channels = max(16, power_of_two(q.shape[-1]))
    wide = not on_tensor_cores(q)
    if channels > (128 if wide else 256):
        few = queries <= 16 or wide
        warps = 4 if few and channels > 256 else 8
        return Tile(16 if few else 32, min(store_block, 16), channels, warps, 1 if wide else 2)
    keys = min(store_block, 32 if wide or channels > 128 else 64)
    if queries <= 16:
        return Tile(16, keys, channels, 4, 2 if wide else 3)
    if queries <= 32 or wide:
        return Tile(32, keys, channels, 4, 1 if wide else 2)
    return Tile(64 if channels > 128 else 128, keys, channels, 8 if channels > 64 else 4, 2)


def split_count(units: int, device: torch.device, fill: int = FILL, most: int = MOST_SPLITS) -> int:
    """Shares that fill the GPU `fill` times, where `units` programs do not."""
    return min(most, max(1, fill * multiprocessors(device) // units))


def combined_rows(rows: int, dim: int = 0) -> int:
    """Rows of queries whose shares are put together at once: as many as fit the registers."""
    return 1 if dim > 256 else min(4, power_of_two(rows))


class Scratch(NamedTuple):
    """Where the shares of the keys are put together, all None where there is one. sums: of weighted values; stats: a
    maximum and a sum of weights for each row; split_counters: as of `KV`.
    """

    sums: torch.Tensor | None = None
    stats: torch.Tensor | None = None
    split_counters: torch.Tensor | None = None


def scratch_of(
    units: int, splits: int, rows: int, channels: int, device: torch.device, split_counters: torch.Tensor | None
) -> Scratch:
    """For so many programs of a share, with so many rows of partial results in all, of so many channels."""
    if splits == 1:
        return Scratch()
    sums = torch.empty(rows * channels, device=device, dtype=torch.float32)
    stats = torch.empty(rows * 2, device=device, dtype=torch.float32)
    if split_counters is None or split_counters.numel() < units:
        split_counters = torch.zeros(units, device=device, dtype=torch.int32)
    return Scratch(sums, stats, split_counters)
