"""How an image is cut for the stats of its channels, by everyone who makes or merges them."""

from typing import NamedTuple

import torch

from accel_kernels.device import multiprocessors
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import warming_up

SINGLE_LIMIT = 16384  # padded elements of a group up to which one program normalizes it whole, without moments
LARGE_ROWS = 65536  # from here on, memory and not latency decides: wider rows, loads ahead (measured on an H200)
GROWTH = 16  # times the pixels of an image, for which a warmup over it compiles too


class Chunks(NamedTuple):
    """Channels of a block, rows of a block within a chunk, rows of a chunk, and the number of chunks."""

    block_c: int
    block_r: int
    rows: int
    number: int

    @classmethod
    def of(cls, batch: int, channels: int, rows: int, device: torch.device, block: int, tile: int, programs: int):
        """Blocks of up to `block` channels, `tile` elements at once, about `programs` programs a multiprocessor."""
        block_c = block_channels(channels, block)
        block_r = max(1, tile // block_c)  # whatever the number of rows: one kernel for images of all sizes
        tiles = cdiv(rows, block_r)
        wanted = programs * multiprocessors(device) // (cdiv(channels, block_c) * batch)
        chunk_rows = cdiv(tiles, max(1, min(wanted, tiles))) * block_r
        return cls(block_c, block_r, chunk_rows, cdiv(rows, chunk_rows))


def large(rows: int) -> tuple[bool, ...]:
    """Whether an image has LARGE_ROWS; in a warmup, whether images that may come after it have them or not."""
    if warming_up():
        return (False, True) if rows * GROWTH >= LARGE_ROWS else (False,)
    return (rows >= LARGE_ROWS,)


def block_channels(channels: int, most: int) -> int:
    """The widest block up to `most` that divides the channels, or a padded one where none of 64 and more does."""
    return next(
        (width for width in (256, 128, 64) if width <= most and channels % width == 0), min(64, power_of_two(channels))
    )
