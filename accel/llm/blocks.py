"""Memory for keys and values: blocks of every row and layer, found through a table.

Row r owns one block for each run of BLOCK tokens (a column): block r * columns + column. The table says which block a
row reads there. Beams share full blocks by pointing at each other's; a block that is still written is always its row's
own. So reordering beams moves a few numbers and one block a row, in place, without asking the GPU anything.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from accel_kernels.kv import KV, LENGTH, VALID

BLOCK = 64  # tokens


class Shape(NamedTuple):
    """What one layer keeps for a token: keys and values of (heads, dim) each."""

    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def size(self) -> int:
        """Bytes a token."""
        return 2 * self.heads * self.dim * self.dtype.itemsize


class Place:
    """What kernels on one device read besides the blocks; KV says what each tensor is. own: the table to begin with."""

    def __init__(self, device: torch.device, rows: int, columns: int):
        self.own = torch.arange(rows * columns, dtype=torch.int32, device=device).view(rows, columns)
        self.table, self.valid, self.where = self.own.clone(), None, None


class Blocks:
    """Room for `columns` blocks in every row of every layer; layers of equal shape share one allocation.

    Raises torch.OutOfMemoryError. Usable in and out of inference mode. kept: allocations by shape, each (layers, 2,
    rows * columns, BLOCK, heads, dim). views: each layer's keys and values, (rows * columns, BLOCK, heads, dim).
    shared: columns before this one may point at another row's block. masked: tokens of which `valid` may forbid some.
    """

    def __init__(self, shapes: Sequence[Shape], rows: int, columns: int):
        self.shapes, self.rows, self.columns = shapes, rows, columns
        self.shared = self.masked = 0
        with torch.inference_mode(False), torch.no_grad():
            self.kept = {
                shape: torch.empty(
                    layers, 2, rows * columns, BLOCK, shape.heads, shape.dim, dtype=shape.dtype, device=shape.device
                )
                for shape, layers in Counter(shapes).items()
            }
            layers = {shape: iter(kept) for shape, kept in self.kept.items()}
            self.views = [tuple(next(layers[shape])) for shape in shapes]
            self.places = {shape.device: Place(shape.device, rows, columns) for shape in self.kept}
            for device, place in self.places.items():
                addresses = [tensor.data_ptr() for pair in self.views for tensor in pair]
                place.where = torch.tensor([0, place.table.data_ptr(), 0, columns, *addresses], device=device)

    def kv(self, layer: int, fresh: bool) -> KV:
        place = self.places[self.shapes[layer].device]
        return KV(*self.views[layer], place.table, place.valid, place.where, layer, fresh, ordered=not self.shared)

    def tensors(self) -> list[torch.Tensor]:
        """All that kernels read and write."""
        places = self.places.values()
        kept = [tensor for place in places for tensor in (place.table, place.where, place.valid) if tensor is not None]
        return [*self.kept.values(), *kept]

    def tokens(self, layer: int) -> list[torch.Tensor]:
        """Keys and values of one layer as the rows own them: (rows, columns * BLOCK, heads, dim), views."""
        return [kept.unflatten(0, (self.rows, self.columns)).flatten(1, 2) for kept in self.views[layer]]

    def apart(self, shape: Shape) -> torch.Tensor:
        """A view of an allocation as (layers, 2, rows, columns, BLOCK, heads, dim)."""
        return self.kept[shape].unflatten(2, (self.rows, self.columns))

    def take(self, old: "Blocks", length: int, chosen: torch.Tensor | None = None) -> None:
        """Copies `length` tokens of all rows of `old`, or of the chosen ones, each into its own blocks here."""
        columns = -(-length // BLOCK)
        for shape in self.kept:
            old.copy(shape, self.apart(shape)[:, :, :, :columns], chosen)
        valid = old.places[self.shapes[0].device].valid
        if valid is not None:
            valid = valid[:, : old.masked]
            self.set_valid(valid if chosen is None else valid[chosen.to(valid.device)])

    def copy(self, shape: Shape, into: torch.Tensor, chosen: torch.Tensor | None = None) -> None:
        """The first columns of all rows, or of the chosen, into (layers, 2, rows, columns, BLOCK, heads, dim)."""
        columns = into.shape[3]
        if chosen is None and not self.shared:
            into.copy_(self.apart(shape)[:, :, :, :columns])
            return
        ids = self.places[shape.device].table[:, :columns].long()
        if chosen is not None:
            ids = ids[chosen.to(shape.device)]
        # One after another: less is held twice at a time.
        for target, source in zip(into.flatten(0, 1), self.kept[shape].flatten(0, 1), strict=True):
            target.copy_(source[ids])

    def own(self, column: int, length: int) -> None:
        """From this column on every row reads its own blocks, which hold what it read before."""
        for at in reversed(range(column, self.shared)):  # from the end, so that all is in order after each
            if at * BLOCK < length:
                tables = {shape: self.places[shape.device].table[:, at] for shape in self.kept}
                # All gathered before any is written: rows read each other's.
                read = {shape: kept.index_select(2, tables[shape]) for shape, kept in self.kept.items()}
                for shape, blocks in read.items():
                    self.apart(shape)[:, :, :, at].copy_(blocks)
            for place in self.places.values():
                place.table[:, at].copy_(place.own[:, at])
            self.shared = at

    def reorder(self, index: torch.Tensor, length: int) -> None:
        """Row r goes on with what row index[r] holds: its table says so, and of a block begun it gets a copy."""
        full, begun = divmod(length, BLOCK)
        self.own(full, length)
        moves = []  # gathered before any is written
        if begun:
            for shape in self.kept:
                piece = self.apart(shape)[:, :, :, full, :begun]
                moves.append((piece, piece.index_select(2, index.to(shape.device))))
        for device, place in self.places.items():
            kept = [place.table[:, :full]]
            if place.valid is not None:
                kept.append(place.valid[:, : self.masked])
            moves += [(piece, piece.index_select(0, index.to(device))) for piece in kept]
        for piece, moved in moves:
            piece.copy_(moved)
        self.shared = full

    def set_valid(self, mask: torch.Tensor | None) -> None:
        """mask: (rows, tokens), 0 or False for what no query may see; all tokens beyond may be seen. None: all may."""
        tokens = 0 if mask is None else mask.shape[1]
        for place in self.places.values():
            if mask is None:
                if place.valid is not None:
                    place.valid = None
                    place.where[VALID].fill_(0)
                continue
            if place.valid is None:
                with torch.inference_mode(False):
                    place.valid = torch.ones(
                        self.rows, self.columns * BLOCK, dtype=torch.bool, device=place.table.device
                    )
                place.where[VALID].fill_(place.valid.data_ptr())
            place.valid[:, :tokens].copy_(mask, non_blocking=True)
            if tokens < self.masked:
                place.valid[:, tokens : self.masked].fill_(True)
        self.masked = tokens

    def unmask(self, length: int) -> None:
        """Tokens from here on may be seen."""
        if self.masked > length:
            for place in self.places.values():
                place.valid[:, length : self.masked].fill_(True)
            self.masked = length

    def mark(self, length: int) -> None:
        """Tells the kernels the length: a launch, no wait."""
        for place in self.places.values():
            place.where[LENGTH].fill_(length)

    def packed(self, length: int) -> "Blocks":
        """A copy with room for `length` tokens and no more, every row reading its own blocks; what pickles."""
        blocks = Blocks(self.shapes, self.rows, -(-length // BLOCK))
        blocks.take(self, length)
        return blocks

    def __getstate__(self) -> dict:
        if self.shared:
            raise TypeError("blocks that rows share do not pickle; packed ones do")
        valid = self.places[self.shapes[0].device].valid
        state = {name: vars(self)[name] for name in ("shapes", "rows", "columns", "kept")}
        return state | {"valid": None if valid is None else valid[:, : self.masked].clone()}

    def __setstate__(self, state: dict) -> None:
        kept = state["kept"]
        layers = {shape: iter(tensor) for shape, tensor in kept.items()}
        shapes = tuple(
            shape._replace(device=kept[shape].device) for shape in state["shapes"]
        )  # torch.load moves tensors
        self.__init__(shapes, state["rows"], state["columns"])
        for shape, views in zip(state["shapes"], self.views, strict=True):
            for view, source in zip(views, next(layers[shape]), strict=True):
                view.copy_(source)
        self.set_valid(state["valid"])
