"""Memory for keys and values: blocks of BLOCK tokens, found through tables; and for states, in slots.

A block holds tokens of all layers of one set. Block b is the b-th in each layer's keys and values. The j-th layers of
all sets share memory, since only one set has the block. `block_allocator` decides on the host which row has which
blocks; the tables tell the kernels. Where layers are on several devices, each has a part of every block, and equal
tables.
"""

import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from accel_kernels.attention.paged.kv import KV, metadata_of
from accel_kernels.recurrent.recurrence import RowStates

from accel.errors import out_of_memory
from accel.llm.kv_cache.layer_sets import LayerSet
from accel.llm.kv_cache.shape import BLOCK, LayerShape, PagedShape, States, StateShape, kv_layers

ALIGNED = 64  # places of a table; so the table of every set begins at a multiple of 256 bytes


class DeviceTables(NamedTuple):
    """What kernels on one device read besides the blocks. flat: all tables, (sets, places), each padded.

    tables: (sets, rows, columns) int32; the last two are contiguous. metadata: as in KV. firsts: as in RowStates, where
    layers on the device keep states.
    """

    flat: torch.Tensor
    tables: torch.Tensor
    metadata: torch.Tensor
    firsts: torch.Tensor | None


class PagedKVCache:
    """`blocks` blocks, and tables by which `rows` rows find theirs, up to `columns` in each set.

    shapes: one a layer, with its device; layers with keys and values are in one set each, the others in none. slots: of
    states, each has one of every layer. states: as `by_states`, where they are there already. Usable in and out of
    inference mode. Raises torch.OutOfMemoryError, and then holds nothing; ValueError where a layer with keys is in no
    set or in several.

    If `spare`, block 0 belongs to no row and begins as zeros: padding is written there, and empty table entries point
    there. Other blocks and all states begin undefined. halves: how many slots there are of each number.

    tables: by device. by_shape: the allocations, each (layers of a set, 2, blocks, BLOCK, heads, dim), or without dim
    for scales; kept: all of them. by_states: states and windows by shape, each (layers * halves, slots, ...).
    block_bytes: of one block.
    """

    spare, halves = True, 1

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        sets: Sequence[LayerSet],
        blocks: int,
        rows: int,
        columns: int,
        slots: int = 0,
        states: dict[StateShape, States] | None = None,
    ):
        if sorted(layer for one in sets for layer in one.layers) != (paged := kv_layers(shapes)):
            raise ValueError(f"{len(paged)} layers, each to be in one set, but the sets are {sets}")
        layers = _layers_of_a_block(shapes, sets)
        self.shapes, self.block_bytes, self.table_size = tuple(shapes), _bytes_of(layers), rows * columns
        with torch.inference_mode(False), torch.no_grad():  # entered once: each generate() makes such a cache
            flat = self._allocate(layers, blocks, len(sets), slots, states)
            self._locate(sets, flat, rows, columns)

    def _allocate(
        self, layers: Counter[PagedShape], blocks: int, sets: int, slots: int, states: dict[StateShape, States] | None
    ) -> dict[torch.device, torch.Tensor]:
        """All memory; returns the tables by device."""
        devices = dict.fromkeys(shape.device for shape in self.shapes)
        shapes = () if states else self.halves * self.shapes
        wanted = Counter(one for one in shapes if isinstance(one, StateShape))
        try:
            self.by_shape, flat, made = _allocated(layers, blocks, sets, self.table_size, devices, wanted, slots)
        except RuntimeError as error:  # on a CPU torch raises nothing more special
            if not (out_of_memory(error) or "can't allocate memory" in str(error)):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold what was allocated
            of_states = slots * sum(shape.slot_bytes * number for shape, number in wanted.items())
            named = f"{blocks} blocks of {BLOCK} tokens" + (f" and states of {slots} rows" if of_states else "")
            size = (self.block_bytes * blocks + of_states) / 2**30
            raise torch.OutOfMemoryError(f"no memory for keys and values of {named}: {size:.2f} GiB wanted") from error
        self.by_states = states or made
        self.by_device = {
            device: [tensor for shape, several in self.by_shape.items() if shape.device == device for tensor in several]
            for device in devices
        }
        self.kept = [tensor for several in self.by_device.values() for tensor in several]
        if self.spare:
            for tensor in self.kept:
                tensor[:, :, 0].zero_()
        return flat

    def _locate(
        self, sets: Sequence[LayerSet], flat: dict[torch.device, torch.Tensor], rows: int, columns: int
    ) -> None:
        """The tables, and what the attention operation is given of each layer."""
        views, self.tables, self._kv = views_by_layer(self.shapes, sets, self.by_shape), {}, {}
        states = states_by_layer(self.shapes, self.by_states, self.halves)
        self._states: dict[int, RowStates] = {}
        set_of = {layer: place for place, one in enumerate(sets) for layer in one.layers}
        for device, one in flat.items():
            tables = one[:, : rows * columns].unflatten(1, (rows, columns))
            of_set = tables.unbind()
            kept = {layer: (of_set[set_of[layer]], *several) for layer, several in views.items()}
            here = [layer for layer, shape in enumerate(self.shapes) if shape.device == device]
            firsts = torch.zeros(rows, dtype=torch.int64, device=device) if states.keys() & set(here) else None
            layers = [kept[layer] if layer in kept else (None, *states[layer]) for layer in range(len(self.shapes))]
            metadata = metadata_of(columns, layers, device, firsts)
            self.tables[device] = DeviceTables(one, tables, metadata, firsts)
            for layer in here:
                if layer in states:
                    state, window, *others = states[layer]
                    kept_states = RowStates(state, window, metadata, layer, firsts=firsts)
                    self._states[layer] = kept_states._replace(other_state=others[0], other_window=others[1])
                    continue
                table, keys, values, *scales = kept[layer]
                named = dict(zip(("key_scales", "value_scales"), scales, strict=False))
                self._kv[layer] = KV(keys, values, table, None, metadata, layer, **named)

    @property
    def bytes(self) -> int:
        """Of everything."""
        return sum(tensor.nbytes for tensor in (*self.kept, *self.beside))

    @property
    def beside(self) -> list[torch.Tensor]:
        """All tensors but keys and values: states, tables and what they say."""
        tables = (tensor for one in self.tables.values() for tensor in (one.flat, one.metadata, one.firsts))
        states = (tensor for several in self.by_states.values() for tensor in several)
        return [tensor for tensor in (*states, *tables) if tensor is not None]

    def kv(self, layer: int) -> KV:
        """The store of one layer, for the attention operation. Its metadata says 0 tokens: rows differ in length."""
        return self._kv[layer]

    def of_step(self, layers: Sequence[int], tokens: int, **given: Any) -> dict[int, Any]:
        """By layer the `KV` or `RowStates` for a step of so many tokens on one device. given: their other fields."""
        shapes = [self.shapes[layer] for layer in layers]
        heads = [shape.heads for shape in shapes if not isinstance(shape, StateShape)]
        if heads:
            counters = max(heads) * tokens
            given["split_counters"] = torch.zeros(counters, device=self.shapes[layers[0]].device, dtype=torch.int32)
        of_states = {name: value for name, value in given.items() if name in RowStates._fields}
        of_states["padded"] = given.get("padding_mask") is not None
        kinds = ((layer, self._states.get(layer)) for layer in layers)
        return {
            layer: self._kv[layer]._replace(**given) if states is None else states._replace(**of_states)
            for layer, states in kinds
        }

    def upload(self, places: np.ndarray, values: np.ndarray, device: torch.device | None = None) -> None:
        """Writes values into the tables of a device, None for all, in stream order and without waiting for the GPU.

        places: (n,) integers, each once, as if (sets, rows, columns) were flat. values: (n,) integers.
        """
        if not len(places):
            return
        wanted = self.tables if device is None else {device: self.tables[device]}
        for at, (flat, tables, *_) in wanted.items():
            if places.min() < 0 or places.max() >= self.table_size * len(tables):
                raise ValueError(f"places {places.min()} to {places.max()} of tables of shape {tuple(tables.shape)}")
            behind = flat.shape[1] - self.table_size  # each table is followed by so much that is not used
            packed = torch.from_numpy(np.stack([places + places // self.table_size * behind, values]).astype(np.int64))
            if flat.is_cuda:
                packed = packed.pin_memory().to(at, non_blocking=True)
            flat.view(-1).scatter_(0, packed[0], packed[1].int())

    def copy(self, pairs: Sequence[tuple[int, int]], device: torch.device | None = None) -> None:
        """Copies blocks, (from, to) each, one pair after another, with all layers of the set. device: None for all."""
        for source, target in pairs:
            for kept in self.kept if device is None else self.by_device[device]:
                kept[:, :, target].copy_(kept[:, :, source])


def block_bytes(shapes: Sequence[LayerShape], sets: Sequence[LayerSet], device: torch.device | None = None) -> int:
    """Bytes of one block, or of its part on a device."""
    return _bytes_of(_layers_of_a_block(shapes, sets), device)


def _bytes_of(layers: Counter[PagedShape], device: torch.device | None = None) -> int:
    return BLOCK * sum(shape.size * number for shape, number in layers.items() if device in (None, shape.device))


def _layers_of_a_block(shapes: Sequence[LayerShape], sets: Sequence[LayerSet]) -> Counter[PagedShape]:
    """How many layers of each shape a block has room for: as many as any set has."""
    most: Counter[Any] = Counter()
    for one in sets:
        most |= Counter(shapes[layer] for layer in one.layers)
    return most


def _allocated(
    layers: Counter[PagedShape],
    blocks: int,
    sets: int,
    table_size: int,
    devices: Iterable[torch.device],
    states: Counter[StateShape],
    slots: int,
) -> tuple[dict[PagedShape, tuple[torch.Tensor, ...]], dict[torch.device, torch.Tensor], dict[StateShape, States]]:
    """By shape keys, values and any scales; by device all tables, padded; by shape states. A function of its own, so
    that an allocation that fails leaves no part behind.
    """
    kept = {shape: shape.empty(number, blocks) for shape, number in layers.items()}
    padded = -(-table_size // ALIGNED) * ALIGNED
    tables = {device: torch.zeros(sets, padded, dtype=torch.int32, device=device) for device in devices}
    return kept, tables, {shape: shape.empty(number, slots) for shape, number in states.items()}


def _by_layer(tensor: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """The parts of each layer, as its keys and its values. Not flattened: that gives dimensions of size 1 other
    strides, which a graph would keep for larger stores.
    """
    layers, parts, *sizes = tensor.shape
    units = tensor.as_strided((layers * parts, *sizes), tensor.stride()[1:]).unbind()
    return [units[parts * layer : parts * (layer + 1)] for layer in range(layers)]


def views_by_layer(
    shapes: Sequence[LayerShape], sets: Sequence[LayerSet], kept: dict[PagedShape, tuple[torch.Tensor, ...]]
) -> dict[int, tuple[torch.Tensor, ...]]:
    """Keys and values of every layer that is in a set, and the scales of both if it has any."""
    parts = {shape: [_by_layer(tensor) for tensor in several] for shape, several in kept.items()}
    views: dict[int, tuple[torch.Tensor, ...]] = {}
    for one in sets:
        taken: Counter[Any] = Counter()
        for layer in one.layers:
            shape: Any = shapes[layer]
            views[layer] = shape.views([part for layers in parts[shape] for part in layers[taken[shape]]])
            taken[shape] += 1
    return views


def states_by_layer(
    shapes: Sequence[LayerShape], kept: dict[StateShape, States], halves: int
) -> dict[int, tuple[torch.Tensor | None, ...]]:
    """State and window of every layer that keeps any, and those of the other half, contiguous (slots, ...)."""
    taken: Counter[StateShape] = Counter()
    views: dict[int, tuple[torch.Tensor | None, ...]] = {}
    for layer, shape in enumerate(shapes):
        if isinstance(shape, StateShape):
            places = taken[shape], taken[shape] + halves - 1
            views[layer] = tuple(None if one is None else one[at] for at in places for one in kept[shape])
            taken[shape] += halves
    return views
