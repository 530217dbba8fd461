"""Block sizes of the attention kernels over a store, and in how many shares the keys are cut."""

from typing import NamedTuple

import torch

from accel_kernels.device import multiprocessors
from accel_kernels.sizes import power_of_two

MOST_SPLITS = 32
# Codes of 8 bits are turned into numbers while the next are on their way: more programs to a multiprocessor, if their
# shares are long enough.
FILL, CODES_FILL = 2, 4
CODES_REGISTERS = 128  # to a thread: what lets so many programs of 4 warps share one
KV8_BLOCKS = 8  # of keys to a share, from which on there are more shares than fill the GPU FILL times


class Tile(NamedTuple):
    """Rows of queries, keys and channels of a program, and its launch shape."""

    queries: int
    keys: int
    channels: int
    warps: int
    stages: int


def tile_of(queries: int, store_block: int, dim: int, dtype: torch.dtype) -> Tile:
    """As measured on an H200. A block of keys never crosses a block of the store."""
    channels = max(16, power_of_two(dim))
    wide = dtype == torch.float32
    keys = min(store_block, 32 if wide or channels > 128 else 64)
    if queries <= 16:
        return Tile(16, keys, channels, 4, 2 if wide else 3)
    if queries <= 32 or wide:
        return Tile(32, keys, channels, 4, 1 if wide else 2)
    return Tile(64 if channels > 128 else 128, keys, channels, 8 if channels > 64 else 4, 2)


def split_count(units: int, device: torch.device, fill: int = FILL) -> int:
    """Shares that fill the GPU `fill` times, where `units` programs do not."""
    return min(MOST_SPLITS, max(1, fill * multiprocessors(device) // units))


def combined_rows(rows: int) -> int:
    """Rows of queries whose shares are put together at once: as many as fit the registers."""
    return min(4, power_of_two(rows))


def scratch(units: int, splits: int, tile: Tile, device: torch.device, split_counters: torch.Tensor | None):
    """Room for the shares, (sums, maxima and totals), and zeros to count them by, which kernels leave as zeros."""
    if splits == 1:
        return None, None, None
    rows = units * tile.queries * MOST_SPLITS
    parts = torch.empty(rows * tile.channels, device=device, dtype=torch.float32)
    stats = torch.empty(rows * 2, device=device, dtype=torch.float32)
    if split_counters is None or split_counters.numel() < units:
        split_counters = torch.zeros(units, device=device, dtype=torch.int32)
    return parts, stats, split_counters
