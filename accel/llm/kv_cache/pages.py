"""Memory for the keys and values of many requests: pages that any row may hold, found through tables.

A page holds BLOCK tokens of all layers of one set. Page p is the p-th block in each layer's keys and values; the j-th
layers of all sets lie at the same place, since only one set has the page. Which row has which pages is decided on the
host, see `accel.llm.kv_cache.block_pool`; the tables tell the kernels.
"""

import traceback
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from accel_kernels.attention.paged.kv import KV, metadata_of

from accel.errors import out_of_memory
from accel.llm.kv_cache.blocks import BLOCK, Shape
from accel.llm.kv_cache.layer_sets import LayerSet

ALIGNED = 64  # places of a table; so the table of every set begins at a multiple of 256 bytes


class PagePool:
    """`pages` pages, and the tables by which `rows` rows find theirs, in each set up to `columns`.

    shapes: one a layer; where they lie is `device`. Raises torch.OutOfMemoryError, and then holds nothing; ValueError
    where a layer is in no set or in several. Usable in and out of inference mode.

    Page 0 is nobody's and begins as zeros: what is written in vain goes there, and rows that hold nothing point there.
    What other pages hold at the beginning is undefined.

    tables: (sets, rows, columns) int32; the last two are contiguous. kept: the allocations, each (layers of a set, 2,
    pages, BLOCK, heads, dim), or without dim for scales. bytes: of all there is. page_bytes: of one page.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        sets: Sequence[LayerSet],
        pages: int,
        rows: int,
        columns: int,
        device: torch.device | str,
    ):
        device = torch.device(device)
        shapes = [shape._replace(device=device) for shape in shapes]
        if sorted(layer for one in sets for layer in one.layers) != list(range(len(shapes))):
            raise ValueError(f"{len(shapes)} layers, each to be in one set, but the sets are {sets}")
        self.page_bytes = page_bytes(shapes, sets)
        self.table_size = rows * columns
        try:
            kept, self.flat_tables = _allocated(
                _layers_of_a_page(shapes, sets), pages, len(sets), self.table_size, device
            )
        except RuntimeError as error:  # on a CPU torch raises nothing more special
            if not (out_of_memory(error) or "can't allocate memory" in str(error)):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold what was allocated
            wanted = self.page_bytes * pages / 2**30
            raise torch.OutOfMemoryError(
                f"no memory for keys and values of {pages} pages of {BLOCK} tokens: {wanted:.2f} GiB wanted"
            ) from error
        self.kept = [tensor for several in kept.values() for tensor in several]
        self.tables = self.flat_tables[:, : self.table_size].unflatten(1, (rows, columns))
        views, tables = _by_layer(shapes, sets, kept), _tables_by_layer(sets, self.tables)
        with torch.inference_mode(False):
            self.metadata = metadata_of(columns, [(t, *v) for t, v in zip(tables, views, strict=True)], device)
        self._kv = [
            _kv(layer, table, several, self.metadata)
            for layer, (table, several) in enumerate(zip(tables, views, strict=True))
        ]
        self.bytes = sum(tensor.nbytes for tensor in (*self.kept, self.flat_tables, self.metadata))

    def kv(self, layer: int) -> KV:
        """The store of one layer, for the attention operation. Its metadata says 0 tokens: rows differ in length."""
        return self._kv[layer]

    def upload(self, places: np.ndarray, values: np.ndarray) -> None:
        """Writes values into the tables, in stream order and without waiting for the GPU.

        places: (n,) integers, each once, as if (sets, rows, columns) were flat. values: (n,) integers.
        """
        if not len(places):
            return
        if places.min() < 0 or places.max() >= self.table_size * len(self.tables):
            raise ValueError(f"places {places.min()} to {places.max()} of tables of shape {tuple(self.tables.shape)}")
        behind = self.flat_tables.shape[1] - self.table_size  # each table is followed by so much that is not used
        packed = torch.from_numpy(np.stack([places + places // self.table_size * behind, values]).astype(np.int64))
        if self.flat_tables.is_cuda:
            packed = packed.pin_memory().to(self.flat_tables.device, non_blocking=True)
        self.flat_tables.view(-1).scatter_(0, packed[0], packed[1].int())

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages, (from, to) each, one pair after another: keys, values and scales of all layers of the set."""
        for source, target in pairs:
            for kept in self.kept:
                kept[:, :, target].copy_(kept[:, :, source])


def page_bytes(shapes: Sequence[Shape], sets: Sequence[LayerSet]) -> int:
    """Bytes of one page."""
    return BLOCK * sum(shape.size * layers for shape, layers in _layers_of_a_page(shapes, sets).items())


def pages_for(shapes: Sequence[Shape], sets: Sequence[LayerSet], bytes: int) -> int:
    """How many pages fit into so many bytes. Tables are not counted: sets * rows * columns * 4 bytes."""
    return max(bytes, 0) // page_bytes(shapes, sets)


def _layers_of_a_page(shapes: Sequence[Shape], sets: Sequence[LayerSet]) -> Counter[Shape]:
    """How many layers of each shape a page has room for: as many as any set has."""
    most: Counter[Shape] = Counter()
    for one in sets:
        most |= Counter(shapes[layer] for layer in one.layers)
    return most


def _allocated(
    layers: Counter[Shape], pages: int, sets: int, table_size: int, device: torch.device
) -> tuple[dict[Shape, tuple[torch.Tensor, ...]], torch.Tensor]:
    """By shape the keys and values, perhaps their scales; all tables, each padded. By itself, so that nothing holds on
    to a part of it where the rest does not fit."""
    with torch.inference_mode(False), torch.no_grad():
        kept = {shape: shape.empty(number, pages) for shape, number in layers.items()}
        for several in kept.values():
            for tensor in several:
                tensor[:, :, 0].zero_()
        padded = -(-table_size // ALIGNED) * ALIGNED
        return kept, torch.zeros(sets, padded, dtype=torch.int32, device=device)


def _by_layer(
    shapes: Sequence[Shape], sets: Sequence[LayerSet], kept: dict[Shape, tuple[torch.Tensor, ...]]
) -> list[tuple[torch.Tensor, ...]]:
    """Keys and values of every layer, and the scales of both if it has any."""
    views: dict[int, tuple[torch.Tensor, ...]] = {}
    for one in sets:
        taken: Counter[Shape] = Counter()
        for layer in one.layers:
            shape = shapes[layer]
            views[layer] = tuple(half for tensor in kept[shape] for half in tensor[taken[shape]])
            taken[shape] += 1
    return [views[layer] for layer in range(len(shapes))]


def _tables_by_layer(sets: Sequence[LayerSet], tables: torch.Tensor) -> list[torch.Tensor]:
    of_layer = {layer: table for one, table in zip(sets, tables, strict=True) for layer in one.layers}
    return [of_layer[layer] for layer in sorted(of_layer)]


def _kv(layer: int, table: torch.Tensor, views: tuple[torch.Tensor, ...], metadata: torch.Tensor) -> KV:
    keys, values, *scales = views
    kv = KV(keys, values, table, None, metadata, layer)
    return kv._replace(key_scales=scales[0], value_scales=scales[1]) if scales else kv
