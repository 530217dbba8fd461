"""Keys and values at fixed addresses, so that a CUDA graph of a step holds for every text.

The decoder's own grow by a token a step; those of what the encoder gave are written once, when a text is taken over.
Tokens of a row lie one behind another, with all heads of each, as blocks of a store do.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from accel_kernels import reorder_beams
from accel_kernels.attention.paged.kv import KV, LENGTH, PADDING_MASK, metadata_of

from accel.libraries.cache import DynamicLayer, pair_of
from accel.seq2seq.held_layers import HeldLayer

OWN, CROSS = 0, 1  # parts of a cache
Shape = tuple[int, ...]  # layers, 2, rows, heads, tokens, D
BLOCK = 64  # tokens, of a store; a row has whole blocks
STORES = 128  # of as many shapes, before all are made anew
ASKED = "a step asks how many tokens came before it"
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

    def room(self, part: int, shape: Shape, like: torch.Tensor) -> torch.Tensor:
        """At the same place as before where it is large enough; what was there is lost."""
        size, held = _blocks(shape).numel(), self.flat.get(part)
        if len(self.stores) > STORES:
            self.stores.clear()
            self.given_up += 1
        if held is None or held.numel() < size or (held.dtype, held.device) != (like.dtype, like.device):
            self.flat.pop(part, None)
            self.given_up += 1
            self.stores = {key: one for key, one in self.stores.items() if key[0] != part}
            with torch.inference_mode(False):  # else only calls in that mode could write to it
                self.flat[part] = torch.zeros(size, dtype=like.dtype, device=like.device)
        return self._laid_out(part, shape).flatten(3, 4)[:, :, :, : shape[4]].transpose(3, 4)

    def _laid_out(self, part: int, shape: Shape) -> torch.Tensor:
        size = _blocks(shape)
        return self.flat[part][: size.numel()].view(size)

    def rows(self, part: int, shape: Shape) -> torch.Tensor:
        """All of it, (parts, rows, tokens, width)."""
        return self._laid_out(part, shape).flatten(0, 1).flatten(2, 3).flatten(3, 4)

    def store(self, part: int, shape: Shape, beams: int) -> FixedStore:
        """Of the room of that shape, each row of which so many queries read; all of its tokens count so far."""
        found = self.stores.get((part, shape, beams))
        if found is None:
            with torch.inference_mode(False):
                found = self.stores[part, shape, beams] = _store(self._laid_out(part, shape), shape[4], beams)
        return found


def _in_words(kept: torch.Tensor) -> torch.Tensor:
    """The same memory as numbers of 8 bytes where that goes: torch copies rows number by number."""
    return kept.view(torch.int64) if kept.shape[-1] * kept.element_size() % 8 == 0 else kept


def _blocks(shape: Shape) -> torch.Size:
    """(layers, 2, rows, blocks, tokens of each, heads, D)."""
    *outer, heads, tokens, dim = shape
    return torch.Size((*outer, -(-tokens // BLOCK), BLOCK, heads, dim))


def _store(memory: torch.Tensor, tokens: int, beams: int) -> FixedStore:
    _, _, rows, columns, _, heads, _ = memory.shape
    device = memory.device
    table = torch.arange(rows * columns, dtype=torch.int32, device=device).view(rows, columns)
    table, rows = table.repeat_interleave(beams, 0), rows * beams
    layers = [own.flatten(1, 2) for own in memory]
    metadata = metadata_of(columns, [(table, *own) for own in layers], device)
    mask = torch.ones(rows, columns * BLOCK, dtype=torch.bool, device=device)
    metadata[LENGTH], metadata[PADDING_MASK] = tokens - 1, mask.data_ptr()
    counters = torch.zeros(rows * heads * COUNTED, dtype=torch.int32, device=device)
    kvs = [
        KV(keys, values, table, mask, metadata, index, split_counters=counters, ordered=beams == 1)
        for index, (keys, values) in enumerate(layers)
    ]
    return FixedStore(kvs, metadata, mask)


class Length:
    """Tokens before a step, as the model counts them: a number on the device, `at`, (1,) int64, from `least` to `most`.

    What follows from these bounds is answered without it: whether a table of positions is long enough. Other questions
    raise ValueError.
    """

    def __init__(self, at: torch.Tensor, least: int, most: int):
        self.at, self.least, self.most = at, least, most

    def __add__(self, other: int) -> "Length":
        return Length(self.at + other, self.least + other, self.most + other)

    __radd__ = __add__

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Functions of torch are given the tensor; a range that begins and ends here has a size that is known."""
        if func is torch.arange and len(args) == 2 and all(isinstance(one, cls) for one in args):
            first, end = args
            return first.at + torch.arange(end.least - first.least, **(kwargs or {}))
        tensors = (one.at[0] if isinstance(one, cls) else one for one in args)
        return func(*tensors, **(kwargs or {}))

    def __gt__(self, other: Any) -> bool:
        if isinstance(other, int) and not self.least <= other < self.most:
            return self.least > other
        raise ValueError(ASKED)

    def __int__(self) -> int:
        raise ValueError(ASKED)

    __index__ = __int__

    def __lt__(self, other: Any) -> bool:
        return not self > other - 1

    def __ge__(self, other: Any) -> bool:
        return self > other - 1

    def __le__(self, other: Any) -> bool:
        return not self > other

    def __bool__(self) -> bool:
        return self > 0

    def __eq__(self, other: Any) -> bool:
        return self >= other and self <= other

    __hash__ = None  # type: ignore[assignment]


class Place:
    """length: of what there is before a step's token, which goes behind it."""

    length: Length


class FixedLayer(DynamicLayer):
    """What the model is shown of one layer in a step: all of its room."""

    def __init__(self, kept: torch.Tensor, place: Place | None):
        """place: None for what no step writes."""
        super().__init__()
        self.keys, self.values = kept
        self.place, self.is_initialized = place, True
        self.written: Any = None  # the length at which it was

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        if self.place is None:
            raise ValueError("a step writes to the keys and values of what the encoder gave")
        if self.written is self.place.length:  # by a copy of its layer
            raise ValueError("two layers write to one place of the cache")
        self.written = self.place.length
        self.keys.index_copy_(2, self.place.length.at, key_states)
        self.values.index_copy_(2, self.place.length.at, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> Any:
        return self.keys.shape[2] if self.place is None else self.place.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0


class Holding:
    """What one caller's cache holds, in the fixed memory.

    kept: by part, see `Shape`; lengths: how many tokens of it count. layers: those of the cache, which may be gone.
    beams: rows of the cache that are of one text, and read one row of what the encoder gave; none changes its text.
    """

    def __init__(
        self, memory: FixedMemory, layers: tuple[list[Any], list[Any]], rooms: tuple[int, int], beams: int = 1
    ):
        self.memory, self.kept, self.beams = memory, list[torch.Tensor](), beams
        self.lengths = [own[0].get_seq_length() for own in layers]
        for part, (these, length, room) in enumerate(zip(layers, self.lengths, rooms, strict=True)):
            like, step = these[0].keys, beams if part == CROSS else 1
            rows, heads, _, dim = like.shape
            kept = memory.room(part, (len(these), 2, rows // step, heads, room, dim), like)
            kept[..., length:, :].zero_()  # numbers there count nothing, unless they are infinite
            for into, layer in zip(kept, these, strict=True):
                for one, held in zip(into, (layer.keys, layer.values), strict=True):
                    one[:, :, :length].copy_(held[::step])
            self.kept.append(kept)
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

    def read(self, part: int, index: int) -> torch.Tensor:
        """Keys and values of a layer, (2, rows, heads, tokens, D), a view but for beams that share them."""
        self.settle(part)
        kept = self.kept[part][index][:, :, :, : self.lengths[part]]
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
            used = _in_words(some[..., : self.lengths[part], :])
            used.copy_(used.index_select(2, order.to(used.device)))

    def _alike(self, order: torch.Tensor) -> bool:
        """Whether rows in this order are the same rows, as beams of one text are. Waits for the device."""
        if self.groups is None:
            same = [(one[:, 1:] == one[:, :-1]).flatten(2).all(2).all(0) for one in self.kept[CROSS]]
            self.groups = torch.nn.functional.pad((~torch.stack(same).all(0)).cumsum(0), (1, 0))
        return torch.equal(self.groups[order.to(self.groups.device)], self.groups)
