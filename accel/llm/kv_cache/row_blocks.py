"""What a cache of one batch holds: every row owns a block for each run of BLOCK tokens (a column), and its states.

Row r's own block of a column is r * columns + column; the table says which block it reads. Beams share full blocks by
pointing at each other's; a block that is still written is its row's own. So reordering beams moves a few table entries
and one block a row, in place, without waiting for the GPU. A `BlockAllocator` cannot: the host does not know the order
of the beams.
"""

from collections.abc import Sequence
from typing import Any

import torch
from accel_kernels.attention.paged.kv import HALF, KV, LENGTH, PADDING_MASK

from accel.llm.kv_cache.layer_sets import LayerSet
from accel.llm.kv_cache.paged_kv_cache import PagedKVCache, states_by_layer, views_by_layer
from accel.llm.kv_cache.shape import BLOCK, LayerShape, PagedShape, States, StateShape, kv_layers


class RowBlocks(PagedKVCache):
    """A PagedKVCache of one set, in which every row has `columns` blocks; layers of equal shape share one allocation.

    states: of as many rows, to be kept where they are. Raises torch.OutOfMemoryError. shared: columns before this may
    be another row's blocks. masked: tokens that the padding mask may hide. half: of states, which is read next; the
    next forward writes the other.
    """

    spare, halves = False, 2  # rows own all blocks, and a slot of each half

    def __init__(
        self, shapes: Sequence[LayerShape], rows: int, columns: int, states: dict[StateShape, States] | None = None
    ):
        super().__init__(shapes, _one_set(shapes), rows * columns, rows, columns, rows, states)
        self.rows, self.columns = rows, columns
        self.shared = self.masked = self.half = 0
        self.padding_masks: dict[torch.device, torch.Tensor] = {}
        self.table = {device: one.tables[0] for device, one in self.tables.items()}
        for device, one in self.tables.items():
            torch.arange(rows * columns, device=device, out=one.flat[0, : rows * columns])

    def kv(self, layer: int) -> KV:
        return self._kv[layer]._replace(ordered=not self.shared)

    def of_step(self, layers: Sequence[int], tokens: int, **given: Any) -> dict[int, Any]:
        mask = self.padding_masks.get(self.shapes[layers[0]].device)
        return super().of_step(layers, tokens, padding_mask=mask, ordered=not self.shared, **given)

    def by_row(self, shape: PagedShape) -> list[torch.Tensor]:
        """Views of the allocations of a shape, (layers, 2, rows, columns, BLOCK, heads) and perhaps dim."""
        return [kept.unflatten(2, (self.rows, self.columns)) for kept in self.by_shape[shape]]

    def take(self, old: "RowBlocks", length: int, chosen: torch.Tensor | None = None) -> None:
        """Copies `length` tokens of all rows of `old`, or of the chosen ones, each into its own blocks here."""
        columns, self.half = -(-length // BLOCK), old.half
        for shape in self.by_shape:
            old.copy_rows(shape, [kept[:, :, :, :columns] for kept in self.by_row(shape)], chosen)
        for (into, _), (source, dim) in zip(self.of_rows(), old.of_rows(), strict=True):
            if into is not source:
                into.copy_(source if chosen is None else source.index_select(dim, chosen.to(source.device)))
        mask = old.padding_masks.get(self.shapes[0].device)
        if mask is not None:
            mask = mask[:, : old.masked]
            self.set_padding_mask(mask if chosen is None else mask[chosen.to(mask.device)])

    def of_rows(self) -> list[tuple[torch.Tensor, int]]:
        """States, windows and the first tokens of rows, and the dimension that is rows."""
        states = [(tensor, 1) for several in self.by_states.values() for tensor in several if tensor is not None]
        return states + [(one.firsts, 0) for one in self.tables.values() if one.firsts is not None]

    def copy_rows(self, shape: PagedShape, into: list[torch.Tensor], chosen: torch.Tensor | None = None) -> None:
        """The first columns of all rows, or of the chosen, into tensors as `by_row` gives."""
        columns = into[0].shape[3]
        if chosen is None and not self.shared:
            for target, source in zip(into, self.by_row(shape), strict=True):
                target.copy_(source[:, :, :, :columns])
            return
        ids = self.table[shape.device][:, :columns].long()
        if chosen is not None:
            ids = ids[chosen.to(shape.device)]
        # One after another: less is held twice at a time.
        for targets, sources in zip(into, self.by_shape[shape], strict=True):
            for target, source in zip(targets.flatten(0, 1), sources.flatten(0, 1), strict=True):
                target.copy_(source[ids])

    def unshare(self, column: int, length: int) -> None:
        """Copies, so that from this column on every row reads its own blocks."""
        for at in reversed(range(column, self.shared)):  # from the end, so that all is in order after each
            if at * BLOCK < length:
                ids = {device: table[:, at] for device, table in self.table.items()}
                # All gathered before any is written: rows read each other's.
                read = {s: [t.index_select(2, ids[s.device]) for t in kept] for s, kept in self.by_shape.items()}
                for shape, several in read.items():
                    for kept, blocks in zip(self.by_row(shape), several, strict=True):
                        kept[:, :, :, at].copy_(blocks)
            for device, table in self.table.items():
                table[:, at].copy_(torch.arange(at, self.table_size, self.columns, device=device))
            self.shared = at

    def reorder(self, index: torch.Tensor, length: int) -> None:
        """Row r takes over row index[r]: full blocks by its table, the unfinished block by a copy."""
        full, begun = divmod(length, BLOCK)
        self.unshare(full, length)
        pieces = [(mask[:, : self.masked], 0) for mask in self.padding_masks.values()]
        pieces += [(table[:, :full], 0) for table in self.table.values()]
        pieces += self.of_rows()
        if begun:
            pieces += [(kept[:, :, :, full, :begun], 2) for shape in self.by_shape for kept in self.by_row(shape)]
        # Gathered before any is written.
        moves = [(piece, piece.index_select(dim, index.to(piece.device))) for piece, dim in pieces]
        for piece, moved in moves:
            piece.copy_(moved)
        self.shared = full

    def set_padding_mask(self, mask: torch.Tensor | None) -> None:
        """mask: (rows, tokens), 0 or False for tokens that are hidden; later tokens are visible. None hides none."""
        tokens = 0 if mask is None else mask.shape[1]
        for device, one in self.tables.items():
            if mask is None:
                if self.padding_masks.pop(device, None) is not None:
                    one.metadata[PADDING_MASK].fill_(0)
                continue
            if device not in self.padding_masks:
                with torch.inference_mode(False):
                    whole = torch.ones(self.rows, self.columns * BLOCK, dtype=torch.bool, device=device)
                self.padding_masks[device] = whole
                one.metadata[PADDING_MASK].fill_(whole.data_ptr())
            self.padding_masks[device][:, :tokens].copy_(mask, non_blocking=True)
        self.unmask(tokens)
        self.masked = tokens

    def set_firsts(self, length: int, masked: bool = True) -> None:
        """Notes where each row begins, by the padding mask, before the call that follows `length` stored tokens.
        masked: else all rows begin there.

        A row that has begun keeps its beginning. Where tokens are hidden, states of rows that have not begun become
        zero: what a row has in front of its first token can then be read, as in transformers.
        """
        for device, one in self.tables.items():
            mask = self.padding_masks.get(device)
            if one.firsts is None:
                continue
            if mask is None or not masked:
                one.firsts.fill_(length)
                continue
            hidden = mask[:, : self.masked].cumsum(1).eq(0).sum(1).clamp(min=length)
            one.firsts.copy_(torch.where(one.firsts < length, one.firsts, hidden))
            for tensor in (t for shape, several in self.by_states.items() if shape.device == device for t in several):
                if tensor is not None:
                    tensor.masked_fill_(one.firsts.ge(length).view(-1, *[1] * (tensor.dim() - 2)), 0)

    def take_back(self, length: int) -> None:
        """Reads the states of `length` tokens again, which the last forward read."""
        self.half ^= 1
        for one in self.tables.values():
            if one.firsts is not None and self.padding_masks:
                one.firsts.clamp_(max=length)  # a row whose first token is behind them has not begun

    def read_state(self, layer: int, length: int) -> States:
        """Copies of what a layer keeps of `length` tokens, as transformers has it: the last inputs of the convolution
        (rows, channels, taps) in order of time, and the state. Zeros stand for what is before a row's first token.
        """
        (state, window), firsts = self._read(layer), self.tables[self.shapes[layer].device].firsts
        assert firsts is not None
        inputs = None
        if window is not None:
            places = torch.arange(length - window.shape[1], length, device=window.device)
            hidden = places < firsts[:, None]
            inputs = window[:, places % window.shape[1]].masked_fill(hidden[..., None], 0).mT.contiguous()
        if state is not None:
            state = state.masked_fill(firsts.ge(length).view(-1, *[1] * (state.dim() - 1)), 0)
        return inputs, state

    def write_state(self, layer: int, length: int, inputs: torch.Tensor | None, state: torch.Tensor | None) -> None:
        """The reverse of `read_state`; None for zeros."""
        into, window = self._read(layer)
        if window is not None and inputs is not None:
            places = torch.arange(length - window.shape[1], length, device=window.device)
            window[:, places % window.shape[1]] = inputs.mT
        elif window is not None:
            window.zero_()
        if into is not None and state is not None:
            into.copy_(state)
        elif into is not None:
            into.zero_()

    def _read(self, layer: int) -> States:
        """State and window of a layer that the next forward reads."""
        kept = self._states[layer]
        return (kept.other_state, kept.other_window) if self.half else (kept.state, kept.window)

    def unmask(self, length: int) -> None:
        """Makes tokens from here on visible."""
        if self.masked > length:
            for mask in self.padding_masks.values():
                mask[:, length : self.masked].fill_(True)
            self.masked = length

    def set_length(self, length: int) -> None:
        """Tells the kernels how many tokens are stored: a launch, no wait."""
        for one in self.tables.values():
            one.metadata[LENGTH].fill_(length)
            if one.firsts is not None:
                one.metadata[HALF].fill_(self.half)

    def packed(self, length: int) -> "RowBlocks":
        """A copy of `length` tokens, in which rows share no blocks; it can be pickled."""
        blocks = RowBlocks(self.shapes, self.rows, -(-length // BLOCK))
        blocks.take(self, length)
        return blocks

    def __getstate__(self) -> dict:
        if self.shared:
            raise TypeError("blocks that rows share do not pickle; packed ones do")
        mask = self.padding_masks.get(self.shapes[0].device)
        # As bytes: torch pickles no 8-bit floats.
        kept = {
            shape: tuple(t.view(torch.uint8) if t.dtype == shape.kv_dtype else t for t in several)
            for shape, several in self.by_shape.items()
        }
        state = {"shapes": self.shapes, "rows": self.rows, "columns": self.columns, "kept": kept}
        if self.by_states:
            firsts = next(one.firsts for one in self.tables.values() if one.firsts is not None)
            state |= {"states": self.by_states, "firsts": firsts, "half": self.half}
        return state | {"padding_mask": None if mask is None else mask[:, : self.masked].clone()}

    def __setstate__(self, state: dict) -> None:
        kept = {
            shape: tuple(t.view(shape.kv_dtype) if t.dtype == torch.uint8 else t for t in several)
            for shape, several in state["kept"].items()
        }
        # On the devices to which torch.load has moved the tensors.
        states = state.get("states", {})
        places = {shape: [t.device for t in several if t is not None] for shape, several in (kept | states).items()}
        shapes = tuple(shape._replace(device=(places[shape] or [shape.device])[0]) for shape in state["shapes"])
        RowBlocks.__init__(self, shapes, state["rows"], state["columns"])
        self.half = state.get("half", 0)
        before, now = (
            views_by_layer(s, _one_set(s), k) | states_by_layer(s, states_, self.halves)
            for s, k, states_ in ((state["shapes"], kept, states), (shapes, self.by_shape, self.by_states))
        )
        for layer, views in now.items():
            for view, source in zip(views, before[layer], strict=True):
                if view is not None and source is not None:
                    view.copy_(source)
        for one in self.tables.values():
            if one.firsts is not None:
                one.firsts.copy_(state["firsts"])
        self.set_padding_mask(state["padding_mask"])


def _one_set(shapes: Sequence[LayerShape]) -> tuple[LayerSet]:
    return (LayerSet(tuple(kv_layers(shapes)), None),)
