"""Memory for keys and values: blocks of every row and layer, found through a table.

Row r owns one block for each run of BLOCK tokens (a column): block r * columns + column. The table says which block a
row reads there. Beams share full blocks by pointing at each other's; a block that is still written is always its row's
own. So reordering beams moves a few numbers and one block a row, in place, without asking the GPU anything.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from accel_kernels.attention.paged.kv import KV, LENGTH, PADDING_MASK, metadata_of
from accel_kernels.attention.paged.kv_quantization import restored, rounded

BLOCK = 64  # tokens
SCALE = torch.float32


class Shape(NamedTuple):
    """What one layer keeps for a token: keys and values of (heads, dim) each.

    dtype: of what goes in and comes out. codes: the 8-bit dtype they are rounded to meanwhile, with a float32 scale a
    token and head, see `accel_kernels.attention.paged.kv_quantization`; None: they are kept as they are.
    """

    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    codes: torch.dtype | None = None

    @property
    def size(self) -> int:
        """Bytes a token."""
        head = self.dim * self.dtype.itemsize if self.codes is None else self.dim * self.codes.itemsize + SCALE.itemsize
        return 2 * self.heads * head

    @property
    def exact(self) -> "Shape":
        """The same without rounding."""
        return self._replace(codes=None)

    def empty(self, layers: int, blocks: int) -> tuple[torch.Tensor, ...]:
        """Room for keys and values, (layers, 2, blocks, BLOCK, heads, dim); and, where they are rounded, their scales,
        (layers, 2, blocks, BLOCK, heads), the tokens of a block and head next to each other in memory."""
        codes = self.codes or self.dtype
        kept = torch.empty(layers, 2, blocks, BLOCK, self.heads, self.dim, dtype=codes, device=self.device)
        if self.codes is None:
            return (kept,)
        return kept, torch.empty(layers, 2, blocks, self.heads, BLOCK, dtype=SCALE, device=self.device).mT


class Place:
    """What kernels on one device read besides the blocks; KV says what each tensor is. own: the table to begin with.

    layers: what each keeps.
    """

    def __init__(self, device: torch.device, rows: int, columns: int, layers: Iterable[Sequence[torch.Tensor]]):
        self.own = torch.arange(rows * columns, dtype=torch.int32, device=device).view(rows, columns)
        self.table = self.own.clone()
        self.padding_mask: torch.Tensor | None = None
        self.metadata = metadata_of(columns, [(self.table, *kept) for kept in layers], device)


class Blocks:
    """Room for `columns` blocks in every row of every layer; layers of equal shape share one allocation.

    Raises torch.OutOfMemoryError. Usable in and out of inference mode. kept: allocations by shape, each (layers, 2,
    rows * columns, BLOCK, heads, dim), or without dim for scales. views: each layer's keys and values, (rows * columns,
    BLOCK, heads, dim), and their scales if it has any.
    shared: columns before this one may point at another row's block. masked: tokens of which `padding_mask` may
    forbid some.
    """

    def __init__(self, shapes: Sequence[Shape], rows: int, columns: int):
        self.shapes, self.rows, self.columns = shapes, rows, columns
        self.shared = self.masked = 0
        with torch.inference_mode(False), torch.no_grad():
            self.kept = {shape: shape.empty(layers, rows * columns) for shape, layers in Counter(shapes).items()}
            self.views = _by_layer(shapes, self.kept)
            self.places = {s.device: Place(s.device, rows, columns, self.views) for s in self.kept}

    def kv(self, layer: int, is_prefill: bool) -> KV:
        place = self.places[self.shapes[layer].device]
        keys, values, *scales = self.views[layer]
        kv = KV(
            keys, values, place.table, place.padding_mask, place.metadata, layer, is_prefill, ordered=not self.shared
        )
        return kv._replace(key_scales=scales[0], value_scales=scales[1]) if scales else kv

    def tensors(self) -> list[torch.Tensor]:
        """All that kernels read and write."""
        places = self.places.values()
        kept = [
            tensor
            for place in places
            for tensor in (place.table, place.metadata, place.padding_mask)
            if tensor is not None
        ]
        return [*chain.from_iterable(self.kept.values()), *kept]

    def read(self, layer: int, length: int) -> list[torch.Tensor]:
        """Keys and values of one layer as the rows own them, (rows, length, heads, dim): views, or what was rounded."""
        kept = [t.unflatten(0, (self.rows, self.columns)).flatten(1, 2)[:, :length] for t in self.views[layer]]
        if len(kept) == 2:
            return kept
        return [restored(*pair, self.shapes[layer].dtype) for pair in zip(kept[:2], kept[2:], strict=True)]

    def write(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Puts (rows, new, heads, dim) each into one layer, as the tokens from `start` on of the rows' own blocks."""
        kept = [t.unflatten(0, (self.rows, self.columns)) for t in self.views[layer]]
        end = start + keys.shape[1]
        if len(kept) == 2:
            for into, new in zip(kept, (keys, values), strict=True):
                into.flatten(1, 2)[:, start:end].copy_(new)
            return
        tokens = torch.arange(start, end, device=keys.device)
        for into, scales, new in zip(kept[:2], kept[2:], (keys, values), strict=True):
            place = slice(None), tokens // BLOCK, tokens % BLOCK
            into[place], scales[place] = rounded(new, into.dtype)

    def apart(self, shape: Shape) -> list[torch.Tensor]:
        """Views of the allocations of a shape, (layers, 2, rows, columns, BLOCK, heads) and perhaps dim."""
        return [kept.unflatten(2, (self.rows, self.columns)) for kept in self.kept[shape]]

    def take(self, old: "Blocks", length: int, chosen: torch.Tensor | None = None) -> None:
        """Copies `length` tokens of all rows of `old`, or of the chosen ones, each into its own blocks here."""
        columns = -(-length // BLOCK)
        for shape in self.kept:
            old.copy(shape, [kept[:, :, :, :columns] for kept in self.apart(shape)], chosen)
        padding_mask = old.places[self.shapes[0].device].padding_mask
        if padding_mask is not None:
            padding_mask = padding_mask[:, : old.masked]
            self.set_padding_mask(padding_mask if chosen is None else padding_mask[chosen.to(padding_mask.device)])

    def copy(self, shape: Shape, into: list[torch.Tensor], chosen: torch.Tensor | None = None) -> None:
        """The first columns of all rows, or of the chosen, into tensors as `apart` gives."""
        columns = into[0].shape[3]
        if chosen is None and not self.shared:
            for target, source in zip(into, self.apart(shape), strict=True):
                target.copy_(source[:, :, :, :columns])
            return
        ids = self.places[shape.device].table[:, :columns].long()
        if chosen is not None:
            ids = ids[chosen.to(shape.device)]
        # One after another: less is held twice at a time.
        for targets, sources in zip(into, self.kept[shape], strict=True):
            for target, source in zip(targets.flatten(0, 1), sources.flatten(0, 1), strict=True):
                target.copy_(source[ids])

    def own(self, column: int, length: int) -> None:
        """From this column on every row reads its own blocks, which hold what it read before."""
        for at in reversed(range(column, self.shared)):  # from the end, so that all is in order after each
            if at * BLOCK < length:
                tables = {shape: self.places[shape.device].table[:, at] for shape in self.kept}
                # All gathered before any is written: rows read each other's.
                read = {s: [t.index_select(2, tables[s]) for t in kept] for s, kept in self.kept.items()}
                for shape, several in read.items():
                    for kept, blocks in zip(self.apart(shape), several, strict=True):
                        kept[:, :, :, at].copy_(blocks)
            for place in self.places.values():
                place.table[:, at].copy_(place.own[:, at])
            self.shared = at

    def reorder(self, index: torch.Tensor, length: int) -> None:
        """Row r goes on with what row index[r] holds: its table says so, and of a block begun it gets a copy."""
        full, pending = divmod(length, BLOCK)
        self.own(full, length)
        moves = []  # gathered before any is written
        if pending:
            for shape in self.kept:
                for kept in self.apart(shape):
                    piece = kept[:, :, :, full, :pending]
                    moves.append((piece, piece.index_select(2, index.to(shape.device))))
        for device, place in self.places.items():
            pieces = [place.table[:, :full]]
            if place.padding_mask is not None:
                pieces.append(place.padding_mask[:, : self.masked])
            moves += [(piece, piece.index_select(0, index.to(device))) for piece in pieces]
        for piece, moved in moves:
            piece.copy_(moved)
        self.shared = full

    def set_padding_mask(self, mask: torch.Tensor | None) -> None:
        """mask: (rows, tokens), 0 or False for what no query may see; all tokens beyond may be seen. None: all may."""
        tokens = 0 if mask is None else mask.shape[1]
        for place in self.places.values():
            if mask is None:
                if place.padding_mask is not None:
                    place.padding_mask = None
                    place.metadata[PADDING_MASK].fill_(0)
                continue
            if place.padding_mask is None:
                with torch.inference_mode(False):
                    place.padding_mask = torch.ones(
                        self.rows, self.columns * BLOCK, dtype=torch.bool, device=place.table.device
                    )
                place.metadata[PADDING_MASK].fill_(place.padding_mask.data_ptr())
            place.padding_mask[:, :tokens].copy_(mask, non_blocking=True)
            if tokens < self.masked:
                place.padding_mask[:, tokens : self.masked].fill_(True)
        self.masked = tokens

    def unmask(self, length: int) -> None:
        """Tokens from here on may be seen."""
        if self.masked > length:
            for place in self.places.values():
                if place.padding_mask is not None:
                    place.padding_mask[:, length : self.masked].fill_(True)
            self.masked = length

    def mark(self, length: int) -> None:
        """Tells the kernels the length: a launch, no wait."""
        for place in self.places.values():
            place.metadata[LENGTH].fill_(length)

    def packed(self, length: int) -> "Blocks":
        """A copy with room for `length` tokens and no more, every row reading its own blocks; what pickles."""
        blocks = Blocks(self.shapes, self.rows, -(-length // BLOCK))
        blocks.take(self, length)
        return blocks

    def __getstate__(self) -> dict:
        if self.shared:
            raise TypeError("blocks that rows share do not pickle; packed ones do")
        padding_mask = self.places[self.shapes[0].device].padding_mask
        state = {name: vars(self)[name] for name in ("shapes", "rows", "columns")}
        # As bytes: torch pickles no 8-bit floats.
        kept = {s: tuple(t.view(torch.uint8) if t.dtype == s.codes else t for t in k) for s, k in self.kept.items()}
        return state | {
            "kept": kept,
            "padding_mask": None if padding_mask is None else padding_mask[:, : self.masked].clone(),
        }

    def __setstate__(self, state: dict) -> None:
        kept = {
            s: tuple(t.view(s.codes) if t.dtype == torch.uint8 else t for t in several)
            for s, several in state["kept"].items()
        }
        old = _by_layer(state["shapes"], kept)
        shapes = tuple(
            shape._replace(device=kept[shape][0].device) for shape in state["shapes"]
        )  # torch.load moves tensors
        Blocks.__init__(self, shapes, state["rows"], state["columns"])
        for views, sources in zip(self.views, old, strict=True):
            for view, source in zip(views, sources, strict=True):
                view.copy_(source)
        self.set_padding_mask(state["padding_mask"])


def _by_layer(shapes: Sequence[Shape], kept: dict[Shape, tuple[torch.Tensor, ...]]) -> list[tuple[torch.Tensor, ...]]:
    """Keys and values of every layer, and the scales of both if it has any."""
    layers = {shape: zip(*several, strict=True) for shape, several in kept.items()}
    return [tuple(chain(*next(layers[shape]))) for shape in shapes]
