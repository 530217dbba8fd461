"""The store of keys and values inside kernels, which find it by address, see `paged.kv`."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from accel_kernels.attention.paged.kv import COLUMNS, EACH, LAYERS, LENGTH, PADDING_MASK, TABLE

# Places in `metadata`, as kernels may read them.
AT_LENGTH, AT_PADDING_MASK, AT_COLUMNS = (tl.constexpr(i) for i in (LENGTH, PADDING_MASK, COLUMNS))
AT_LAYERS, OF_EACH, TABLE_OF = (tl.constexpr(i) for i in (LAYERS, EACH, TABLE))


class Store(NamedTuple):
    """Of one row and key head. read_v: v as `load_block` reads them."""

    length: Any
    table: Any
    k: Any
    v: Any
    read_v: Any
    k_scales: Any
    v_scales: Any


@triton.jit
def stored_at(metadata_ptr, place, ELEMENT: tl.constexpr):
    """The pointer that stands in `metadata`; allocations are aligned far beyond the 16 bytes of a wide load."""
    return tl.multiple_of(tl.load(metadata_ptr + place).to(tl.pointer_type(ELEMENT)), 16)


@triton.jit
def table_row(metadata_ptr, layer, row):
    """A row of the block table of a layer."""
    columns = tl.load(metadata_ptr + AT_COLUMNS)
    return stored_at(metadata_ptr, AT_LAYERS + OF_EACH * layer + TABLE_OF, tl.int32) + row * columns


@triton.jit
def row_of(metadata_ptr, layer, b, ragged):
    """Tokens stored of row b, or of sequence b of a `Ragged`, and its row of the block table."""
    if ragged is None:
        length = tl.load(metadata_ptr + AT_LENGTH).to(tl.int32)
        row = b
    else:
        length = tl.load(ragged.lengths + b)
        row = tl.load(ragged.rows + b).to(tl.int64)
    return length, table_row(metadata_ptr, layer, row)


@triton.jit
def seen_of_chunk(at, chunk, stored, padding_mask_ptr):
    """How many keys queries at `at` see of their chunk, their own included; the first begins behind the padding."""
    first = 0
    if padding_mask_ptr is not None:
        idx = tl.arange(0, 128)
        hidden = 128
        while (hidden == 128) & (first < stored):
            mask = tl.load(padding_mask_ptr + first + idx, mask=first + idx < stored, other=1)
            hidden = tl.min(tl.where(mask != 0, idx, 128), axis=0)
            first += hidden
    return (at - first) % chunk + 1


@triton.jit
def share_of(stored, window, split, splits, few_splits, SPLIT: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr):
    """For one new token: blocks stored, where this share of them starts and stops, and how many shares there are.

    A share has LEAST blocks or more, if not None, where each of `few_splits` shares would.
    """
    first = 0
    if window is not None:
        first = tl.maximum(0, stored + 1 - window) // BLOCK
    blocks = tl.cdiv(stored, BLOCK)
    share = tl.maximum(blocks - first, 1)
    if SPLIT:
        few = tl.cdiv(share, few_splits)
        share = tl.cdiv(share, splits)
        if LEAST is not None:
            share = tl.maximum(share, tl.minimum(few, LEAST))
    active = tl.maximum(1, tl.cdiv(blocks - first, share))
    start = first + split * share
    return blocks, start, tl.minimum(start + share, blocks), active


@triton.jit
def store_of(
    metadata_ptr, ragged, layer, b, g, DIM: tl.constexpr, STORE_BLOCK: tl.constexpr, ELEMENT: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """The `Store` of row or sequence b and key head g. ELEMENT: of keys and values; PACKED: see `load_block`."""
    length, table = row_of(metadata_ptr, layer, b, ragged)
    k = stored_at(metadata_ptr, AT_LAYERS + OF_EACH * layer, ELEMENT) + g * DIM
    v = stored_at(metadata_ptr, AT_LAYERS + OF_EACH * layer + 1, ELEMENT) + g * DIM
    read_v = v
    if PACKED is not None:
        read_v = stored_at(metadata_ptr, AT_LAYERS + OF_EACH * layer + 1, tl.int16) + g * (DIM // 2)
    k_scales = stored_at(metadata_ptr, AT_LAYERS + OF_EACH * layer + 2, tl.float32) + g * STORE_BLOCK
    v_scales = stored_at(metadata_ptr, AT_LAYERS + OF_EACH * layer + 3, tl.float32) + g * STORE_BLOCK
    return Store(length, table, k, v, read_v, k_scales, v_scales)


@triton.jit
def padding_mask_of(metadata_ptr, b, STORE_BLOCK: tl.constexpr):
    """The padding mask of row b. By itself: Triton 3.6 returns no None, as there is where the store has none."""
    columns = tl.load(metadata_ptr + AT_COLUMNS)
    return tl.load(metadata_ptr + AT_PADDING_MASK).to(tl.pointer_type(tl.int8)) + b * columns * STORE_BLOCK
