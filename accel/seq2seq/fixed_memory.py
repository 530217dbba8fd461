"""Keys and values at fixed addresses, so that a CUDA graph of a step holds for every text.

The decoder's own grow by a token a step; those of what the encoder gave are written once, when a text is taken over.
Tokens of a row lie one behind another, with all heads of each, as blocks of a store do.
"""

import weakref
from typing import Any, NamedTuple

import torch
from accel_kernels import reorder_beams
from accel_kernels.attention.paged.kv import KV, LENGTH, PADDING_MASK, metadata_of
from accel_kernels.attention.paged.kv_quantization import TOPS

from accel.libraries.cache import pair_of
from accel.seq2seq.held_layers import FixedLayer, HeldLayer, Place

OWN, CROSS = 0, 1  # parts of a cache
Shape = tuple[int, ...]  # layers, 2, rows, heads, tokens, D
BLOCK = 64  # tokens, of a store; a row has whole blocks
SCALE = 4  # bytes of one, of a token and head in 8 bits
STORES = 128  # of as many shapes, before all are made anew
COUNTED = 64  # numbers for each row and head that `accel_kernels.paged_attention` counts by


class FixedStore(NamedTuple):
    """A part of the memory as that operation reads it, by layers. metadata: of all, tells how many tokens count but for
    a new one; mask: (rows, tokens) bool, which may be seen.
    """

    kvs: list[KV]
    metadata: torch.Tensor
    mask: torch.Tensor


class FixedMemory:
    """The memory of one model, by parts of a cache. given_up: how often some was, which graphs hold the addresses of;
    what is there now may lie at the same ones.
    """

    def __init__(self) -> None:
        self.flat: dict[int, torch.Tensor] = {}
        self.stores: dict[tuple[int, Shape, int], FixedStore] = {}
        self.given_up = 0

    def room(self, part: int, shape: Shape, like: torch.Tensor, codes: torch.dtype | None = None) -> torch.Tensor:
        """At the same place as before where it is large enough; what was there is lost.

        codes: the dtype of 8 bits in which numbers are kept, with scales behind them, which are zeros here.
        """
        dtype, size, held = codes or like.dtype, _blocks(shape).numel(), self.flat.get(part)
        size += 0 if codes is None else size // shape[-1] * SCALE
        if len(self.stores) > STORES:
            self.stores.clear()
            self.given_up += 1
        if held is None or held.numel() < size or (held.dtype, held.device) != (dtype, like.device):
            self.flat.pop(part, None)
            self.given_up += 1
            self.stores = {key: one for key, one in self.stores.items() if key[0] != part}
            with torch.inference_mode(False):  # else only calls in that mode could write to it
                self.flat[part] = torch.zeros(size, dtype=dtype, device=like.device)
        if (scales := self.scales(part, shape)) is not None:
            scales.zero_()
        return self._laid_out(part, shape).flatten(3, 4)[:, :, :, : shape[4]].transpose(3, 4)

    def _laid_out(self, part: int, shape: Shape) -> torch.Tensor:
        size = _blocks(shape)
        return self.flat[part][: size.numel()].view(size)

    def scales(self, part: int, shape: Shape) -> torch.Tensor | None:
        """Of a part in 8 bits, (layers, 2, rows, blocks, heads, tokens of each) float32."""
        flat, size = self.flat[part], _blocks(shape)
        if flat.dtype not in TOPS:
            return None
        *outer, tokens, heads, dim = size
        behind = flat[size.numel() : size.numel() // dim * (dim + SCALE)]
        return behind.view(torch.float32).view(*outer, heads, tokens)

    def rows(self, part: int, shape: Shape) -> torch.Tensor:
        """All of it, (parts, rows, tokens, width)."""
        return self._laid_out(part, shape).flatten(0, 1).flatten(2, 3).flatten(3, 4)

    def store(self, part: int, shape: Shape, beams: int) -> FixedStore:
        """Of the room of that shape, each row of which so many queries read; all of its tokens count so far."""
        found = self.stores.get((part, shape, beams))
        if found is None:
            with torch.inference_mode(False):
                memory, scales = self._laid_out(part, shape), self.scales(part, shape)
                found = self.stores[part, shape, beams] = _store(memory, scales, shape[4], beams)
        return found


def _blocks(shape: Shape) -> torch.Size:
    """(layers, 2, rows, blocks, tokens of each, heads, D)."""
    *outer, heads, tokens, dim = shape
    return torch.Size((*outer, -(-tokens // BLOCK), BLOCK, heads, dim))


def _store(memory: torch.Tensor, scales: torch.Tensor | None, tokens: int, beams: int) -> FixedStore:
    _, _, rows, columns, _, heads, _ = memory.shape
    device = memory.device
    table = torch.arange(rows * columns, dtype=torch.int32, device=device).view(rows, columns)
    table, rows = table.repeat_interleave(beams, 0), rows * beams
    layers = [(*own.flatten(1, 2),) for own in memory]
    if scales is not None:
        layers = [(*own, *more.flatten(1, 2).mT) for own, more in zip(layers, scales, strict=True)]
    metadata = metadata_of(columns, [(table, *own) for own in layers], device)
    mask = torch.ones(rows, columns * BLOCK, dtype=torch.bool, device=device)
    metadata[LENGTH], metadata[PADDING_MASK] = tokens - 1, mask.data_ptr()
    counters = torch.zeros(rows * heads * COUNTED, dtype=torch.int32, device=device)
    kvs = []
    for index, (keys, values, *more) in enumerate(layers):
        named: dict[str, Any] = dict(zip(("key_scales", "value_scales"), more, strict=False))
        named |= {"split_counters": counters, "ordered": beams == 1}
        kvs.append(KV(keys, values, table, mask, metadata, index, **named))
    return FixedStore(kvs, metadata, mask)


class Holding:
    """What one caller's cache holds, in the fixed memory.

    kept: by part, see `Shape`; lengths: how many tokens of it count. layers: those of the cache, which may be gone.
    beams: rows of the cache that are of one text, and read one row of what the encoder gave; none changes its text.
    codes: the dtype of 8 bits in which that is kept, or None for the cache's.
    """

    def __init__(
        self,
        memory: FixedMemory,
        layers: tuple[list[Any], list[Any]],
        rooms: tuple[int, int],
        beams: int = 1,
        codes: torch.dtype | None = None,
    ):
        self.codes, self.dtype = codes, layers[OWN][0].keys.dtype
        self.memory, self.kept, self.beams = memory, list[torch.Tensor](), beams
        self.lengths = [own[0].get_seq_length() for own in layers]
        for part, (these, length, room) in enumerate(zip(layers, self.lengths, rooms, strict=True)):
            like, step = these[0].keys, beams if part == CROSS else 1
            rows, heads, _, dim = like.shape
            shape = len(these), 2, rows // step, heads, room, dim
            self.kept.append(memory.room(part, shape, like, codes if part == CROSS else None))
            self.kept[part][..., length:, :].zero_()  # numbers there count nothing, unless they are infinite
            for index, layer in enumerate(these):
                self.write(part, index, layer.keys[::step], layer.values[::step])
        self.layers = [
            [weakref.ref(HeldLayer.put_into(layer, self, part, index)) for index, layer in enumerate(these)]
            for part, these in enumerate(layers)
        ]
        self.place = Place()
        own, cross = self.kept
        self.shown = pair_of([FixedLayer(one, self.place) for one in own], [FixedLayer(one, None) for one in cross])
        self.orders: list[tuple[Any, list[int]]] = [(None, []), (None, [])]
        self.groups: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return self.kept[OWN].shape[2]

    def room(self, part: int) -> int:
        return self.kept[part].shape[4]

    def store(self, part: int) -> FixedStore:
        """All of the part, by its layers."""
        return self.memory.store(part, tuple(self.kept[part].shape), self.beams if part == CROSS else 1)

    def holds(self, layers: tuple[list[Any], list[Any]]) -> bool:
        """Whether these are the layers of a cache that are in here."""
        mine = [[ref() for ref in own] for own in self.layers]
        return mine == [*layers] and all(isinstance(layer, HeldLayer) for own in layers for layer in own)

    def write(self, part: int, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Puts (rows, heads, tokens, D) each to where a layer begins."""
        if part == CROSS and self.codes is not None:
            self._rows_of(index).write(0, keys.transpose(1, 2), values.transpose(1, 2))
            return
        for into, one in zip(self.kept[part][index], (keys, values), strict=True):
            into[:, :, : one.shape[2]].copy_(one)

    def all_of(self, part: int, index: int) -> torch.Tensor:
        """Keys and values of a layer, (2, rows, heads, room, D), a view but of what is in 8 bits."""
        if part == OWN or self.codes is None:
            return self.kept[part][index]
        return torch.stack(self._rows_of(index).read(self.room(part), self.dtype)).transpose(2, 3)

    def _rows_of(self, index: int) -> KV:
        """What the encoder gave to a layer, as of no beams."""
        return self.memory.store(CROSS, tuple(self.kept[CROSS].shape), 1).kvs[index]

    def read(self, part: int, index: int) -> torch.Tensor:
        """Those that count, a row for each of the cache's, a view but of beams that share them, and of 8 bits."""
        self.settle(part)
        kept = self.all_of(part, index)[:, :, :, : self.lengths[part]]
        return kept if part == OWN or self.beams == 1 else kept.repeat_interleave(self.beams, 1)

    @property
    def alive(self) -> bool:
        """Whether a cache is still in here."""
        return any(isinstance(ref(), HeldLayer) for own in self.layers for ref in own)

    def release(self) -> None:
        """Gives the cache, where there still is one, keys and values of its own."""
        for layer in (ref() for own in self.layers for ref in own):
            if isinstance(layer, HeldLayer):
                layer.leave()

    def forget(self) -> None:
        """Gives the cache back with nothing in it."""
        self.lengths = [0, 0]
        self.release()

    def reorder(self, part: int, index: int, order: torch.Tensor) -> None:
        """Puts rows of a layer into another order: of all layers at once, when each has been asked."""
        before, asked = self.orders[part]
        if before is not order or index in asked:
            self.settle(part)
            asked = []
        asked.append(index)
        self.orders[part] = order, asked
        if len(asked) == len(self.kept[part]):
            self.settle(part)

    def reorder_beams(self, order: torch.Tensor, beams: int) -> None:
        """The same of all layers, where a row of each text, of `beams` rows, is one of the same text."""
        for part in (OWN, CROSS):
            self.settle(part)
        self.orders[CROSS] = order, [*range(len(self.kept[CROSS]))]
        self.settle(CROSS)
        length = torch.full((), self.lengths[OWN], device=order.device)
        reorder_beams(self.memory.rows(OWN, tuple(self.kept[OWN].shape)), order, length, beams=beams)

    def settle(self, part: int) -> None:
        """Does what `reorder` was asked for."""
        (order, asked), self.orders[part] = self.orders[part], (None, [])
        if not asked or (part == CROSS and (self.beams > 1 or self._alike(order))):
            return
        kept = self.kept[part]
        whole = part == OWN and len(asked) == len(kept)  # those of the encoder would need as much memory again
        for some in [kept] if whole else (kept[index : index + 1] for index in asked):
            _order_rows(_in_words(some[..., : self.lengths[part], :]), order)
        if part == CROSS and (scales := self._scales()) is not None:
            for index in asked:
                _order_rows(scales[index : index + 1], order)

    def _scales(self) -> torch.Tensor | None:
        return self.memory.scales(CROSS, tuple(self.kept[CROSS].shape))

    def _alike(self, order: torch.Tensor) -> bool:
        """Whether rows in this order are the same rows, as beams of one text are. Waits for the device."""
        if self.groups is None:
            scales = self._scales()
            both = (*self.kept[CROSS], *(() if scales is None else scales))
            same = [(one[:, 1:] == one[:, :-1]).flatten(2).all(2).all(0) for one in both]
            self.groups = torch.nn.functional.pad((~torch.stack(same).all(0)).cumsum(0), (1, 0))
        return torch.equal(self.groups[order.to(self.groups.device)], self.groups)


def _in_words(kept: torch.Tensor) -> torch.Tensor:
    """The same memory as numbers of 8 bytes where that goes: torch copies rows number by number."""
    return kept.view(torch.int64) if kept.shape[-1] * kept.element_size() % 8 == 0 else kept


def _order_rows(some: torch.Tensor, order: torch.Tensor) -> None:
    some.copy_(some.index_select(2, order.to(some.device)))
