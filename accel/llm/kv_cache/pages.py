"""Memory for the keys and values of many requests: pages that any row may hold, found through tables.

A page holds BLOCK tokens of all layers of one set. Page p is the p-th block in each layer's keys and values; the j-th
layers of all sets lie at the same place, since only one set has the page. Which row has which pages is decided on the
host, see `accel.llm.kv_cache.block_pool`; the tables tell the kernels. Layers may be on several devices: a page then
has a part on each, and each has tables of its own, which say the same.
"""

import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from accel_kernels.attention.paged.kv import KV, metadata_of, split_counters_for
from accel_kernels.attention.paged.ragged import Ragged

from accel.errors import out_of_memory
from accel.llm.kv_cache.blocks import BLOCK, Shape
from accel.llm.kv_cache.layer_sets import LayerSet

ALIGNED = 64  # places of a table; so the table of every set begins at a multiple of 256 bytes


class DeviceTables(NamedTuple):
    """What kernels on one device read besides the pages. flat: all tables, (sets, places), each padded.

    tables: (sets, rows, columns) int32; the last two are contiguous. metadata: as in KV.
    """

    flat: torch.Tensor
    tables: torch.Tensor
    metadata: torch.Tensor


class PagePool:
    """`pages` pages, and the tables by which `rows` rows find theirs, in each set up to `columns`.

    shapes: one a layer. device: where all lie; None: each where its shape says. Raises torch.OutOfMemoryError, and then
    holds nothing; ValueError where a layer is in no set or in several. Usable in and out of inference mode.

    Page 0 is nobody's and begins as zeros: what is written in vain goes there, and rows that hold nothing point there.
    What other pages hold at the beginning is undefined.

    places: by device. kept: the allocations, each (layers of a set, 2, pages, BLOCK, heads, dim), or without dim for
    scales. bytes: of all there is. page_bytes: of one page.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        sets: Sequence[LayerSet],
        pages: int,
        rows: int,
        columns: int,
        device: torch.device | str | None = None,
    ):
        if device is not None:
            shapes = [shape._replace(device=torch.device(device)) for shape in shapes]
        if sorted(layer for one in sets for layer in one.layers) != list(range(len(shapes))):
            raise ValueError(f"{len(shapes)} layers, each to be in one set, but the sets are {sets}")
        self.page_bytes = page_bytes(shapes, sets)
        self.table_size = rows * columns
        devices = dict.fromkeys(shape.device for shape in shapes)
        try:
            kept, flat = _allocated(_layers_of_a_page(shapes, sets), pages, len(sets), self.table_size, devices)
        except RuntimeError as error:  # on a CPU torch raises nothing more special
            if not (out_of_memory(error) or "can't allocate memory" in str(error)):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold what was allocated
            wanted = self.page_bytes * pages / 2**30
            raise torch.OutOfMemoryError(
                f"no memory for keys and values of {pages} pages of {BLOCK} tokens: {wanted:.2f} GiB wanted"
            ) from error
        self.by_device = {
            device: [tensor for shape, several in kept.items() if shape.device == device for tensor in several]
            for device in devices
        }
        self.kept = [tensor for several in self.by_device.values() for tensor in several]
        views = _by_layer(shapes, sets, kept)
        self.places = {device: _place(sets, flat[device], rows, columns, views, device) for device in devices}
        tables = {device: _tables_by_layer(sets, place.tables) for device, place in self.places.items()}
        self._kv = []
        for layer, (shape, several) in enumerate(zip(shapes, views, strict=True)):
            table, metadata = tables[shape.device][layer], self.places[shape.device].metadata
            self._kv.append(_kv(layer, table, several, metadata))
        beside = (tensor for place in self.places.values() for tensor in (place.flat, place.metadata))
        self.bytes = sum(tensor.nbytes for tensor in (*self.kept, *beside))

    def kv(self, layer: int) -> KV:
        """The store of one layer, for the attention operation. Its metadata says 0 tokens: rows differ in length."""
        return self._kv[layer]

    def of_step(self, layers: Sequence[int], tokens: int, metadata: torch.Tensor, ragged: Ragged) -> dict[int, KV]:
        """The stores of layers on one device, for a step of so many tokens. metadata: read in place of the device's."""
        found = [self._kv[layer] for layer in layers]
        counters = split_counters_for(found, tokens)
        found = [
            kv._replace(metadata=metadata, split_counters=counters, by_address=True, ragged=ragged) for kv in found
        ]
        return dict(zip(layers, found, strict=True))

    def upload(self, places: np.ndarray, values: np.ndarray, device: torch.device | None = None) -> None:
        """Writes values into the tables of a device, None for all, in stream order and without waiting for the GPU.

        places: (n,) integers, each once, as if (sets, rows, columns) were flat. values: (n,) integers.
        """
        if not len(places):
            return
        wanted = self.places if device is None else {device: self.places[device]}
        for at, (flat, tables, _) in wanted.items():
            if places.min() < 0 or places.max() >= self.table_size * len(tables):
                raise ValueError(f"places {places.min()} to {places.max()} of tables of shape {tuple(tables.shape)}")
            behind = flat.shape[1] - self.table_size  # each table is followed by so much that is not used
            packed = torch.from_numpy(np.stack([places + places // self.table_size * behind, values]).astype(np.int64))
            if flat.is_cuda:
                packed = packed.pin_memory().to(at, non_blocking=True)
            flat.view(-1).scatter_(0, packed[0], packed[1].int())

    def copy(self, pairs: Sequence[tuple[int, int]], device: torch.device | None = None) -> None:
        """Copies pages, (from, to) each, one pair after another: keys, values and scales of all layers of the set, on a
        device or, where that is None, on all.
        """
        for source, target in pairs:
            for kept in self.kept if device is None else self.by_device[device]:
                kept[:, :, target].copy_(kept[:, :, source])


def page_bytes(shapes: Sequence[Shape], sets: Sequence[LayerSet], device: torch.device | None = None) -> int:
    """Bytes of one page, or of its part on a device."""
    layers = _layers_of_a_page(shapes, sets).items()
    return BLOCK * sum(shape.size * number for shape, number in layers if device in (None, shape.device))


def pages_for(shapes: Sequence[Shape], sets: Sequence[LayerSet], bytes: int, device: torch.device | None = None) -> int:
    """How many pages fit into so many bytes, or the parts of how many on a device. Tables are not counted: sets * rows
    * columns * 4 bytes.
    """
    return max(bytes, 0) // page_bytes(shapes, sets, device)


def _layers_of_a_page(shapes: Sequence[Shape], sets: Sequence[LayerSet]) -> Counter[Shape]:
    """How many layers of each shape a page has room for: as many as any set has."""
    most: Counter[Shape] = Counter()
    for one in sets:
        most |= Counter(shapes[layer] for layer in one.layers)
    return most


def _allocated(
    layers: Counter[Shape], pages: int, sets: int, table_size: int, devices: Iterable[torch.device]
) -> tuple[dict[Shape, tuple[torch.Tensor, ...]], dict[torch.device, torch.Tensor]]:
    """By shape the keys and values, perhaps their scales; by device all tables, each padded. By itself, so that nothing
    holds on to a part of it where the rest does not fit."""
    with torch.inference_mode(False), torch.no_grad():
        kept = {shape: shape.empty(number, pages) for shape, number in layers.items()}
        for several in kept.values():
            for tensor in several:
                tensor[:, :, 0].zero_()
        padded = -(-table_size // ALIGNED) * ALIGNED
        return kept, {device: torch.zeros(sets, padded, dtype=torch.int32, device=device) for device in devices}


def _place(
    sets: Sequence[LayerSet],
    flat: torch.Tensor,
    rows: int,
    columns: int,
    views: Sequence[tuple[torch.Tensor, ...]],
    device: torch.device,
) -> DeviceTables:
    tables = flat[:, : rows * columns].unflatten(1, (rows, columns))
    layers = zip(_tables_by_layer(sets, tables), views, strict=True)
    with torch.inference_mode(False):
        return DeviceTables(
            flat, tables, metadata_of(columns, [(table, *several) for table, several in layers], device)
        )


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
