"""Where one layer's keys and values lie: blocks of a store, found through a table and, on the GPU, by address.

A CUDA graph outlives the cache it was captured with. So kernels read only `metadata`, a small tensor that is copied
into the graph's inputs at every replay: the tokens stored, and the addresses of table, mask and blocks.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from accel_kernels.attention.paged.kv_quantization import restored, rounded
from accel_kernels.attention.paged.ragged import Ragged

# Places in `metadata`; what layer i has begins at LAYERS + EACH i: its keys, its values, the scales of both, its table.
# A layer of linear attention has its state and window there, twice: see `RowStates`.
LENGTH, PADDING_MASK, COLUMNS, FIRSTS, HALF, LAYERS = range(6)
KEYS, VALUES, KEY_SCALES, VALUE_SCALES, TABLE, EACH = range(6)
STATE, WINDOW = KEYS, VALUES


def metadata_of(
    columns: int,
    layers: Iterable[Sequence[torch.Tensor | None]],
    device: torch.device,
    firsts: torch.Tensor | None = None,
) -> torch.Tensor:
    """`metadata` of a store that holds nothing yet.

    layers: of each its table, keys, values, perhaps scales; of one of linear attention None, its state and its window,
    and both of the other half.
    Of what is None the address is 0. firsts: (rows,) int64, the tokens of padding before each row's first one.
    """

    def address(tensor: torch.Tensor | None) -> int:
        return 0 if tensor is None else tensor.data_ptr()

    places = [0, 0, columns, address(firsts), 0]
    for table, *kept in layers:
        places += [*map(address, kept), *[0] * (TABLE - len(kept)), address(table)]
    pinned = torch.cuda.is_available() and torch.device(device).type == "cuda"  # so that no copy waits for the GPU
    return torch.tensor(places, device="cpu", pin_memory=pinned).to(device, non_blocking=True)


class KV(NamedTuple):
    """The store of one layer, as the attention operations take it.

    keys, values: (blocks, block, kv heads, head dimension); a block is a run of tokens of one row. In the dtype of the
        model, or codes in 8 bits with the scales below, see `accel_kernels.attention.paged.kv_quantization`.
    table: (rows, columns) int32; token t of row r lies in block table[r, t // block] at place t % block.
    padding_mask: (rows, columns * block) bool, which tokens may be attended to, or None for all.
    metadata: int64 [tokens stored in every row, address of the padding mask or 0, columns, address of `firsts` or 0,
        which half of states is read], then EACH addresses of every layer: keys, values, the scales of both or 0, and
        the table. Only this says how many tokens are stored, but for `ragged`.
    layer: which layer.
    is_prefill: the host knows that nothing was stored before this call, and that row r's blocks lie in order.
    split_counters: int32 zeros, (rows * kv heads * 64,) or more, that the kernels of one step may count by and leave as
        zeros; without it every call makes its own.
    ordered: the host knows that row r's blocks lie in order from r * columns on.
    by_address: the blocks are found through `metadata` alone, as the work may go on in a graph over another store.
    last: int64 (1,), the index of the last new token that counts. Those behind it pad the prompt: their queries, keys
        and values are taken for zeros, since a hidden infinity would become NaN. None where all count.
    key_scales, value_scales: (blocks, block, kv heads) float32, with the tokens of a block and head next to each other
        in memory, so that one load reads them. None where keys and values are stored in the dtype of the model; latents
        have key_scales alone.
    ragged: the sequences of a call in which they have different lengths, see `Ragged`; None where all rows have one.
    """

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    padding_mask: torch.Tensor | None
    metadata: torch.Tensor
    layer: int
    is_prefill: bool = False
    split_counters: torch.Tensor | None = None
    ordered: bool = False
    by_address: bool = False
    last: torch.Tensor | None = None
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    ragged: Ragged | None = None

    @property
    def block(self) -> int:
        return self.keys.shape[1]

    def stored(self) -> int:
        """How many tokens every row holds; waits for the GPU."""
        return int(self.metadata[LENGTH])

    def sequences(self) -> Iterator[tuple[slice, "KV"]]:
        """The new tokens of each sequence of `ragged`, and the store as of this one alone; waits for the GPU."""
        if self.ragged is not None:
            for start, end, length, row in self.ragged.sequences():
                metadata = self.metadata.clone()
                metadata[LENGTH] = length
                table = self.table[row : row + 1]
                yield slice(start, end), self._replace(ragged=None, ordered=False, metadata=metadata, table=table)

    def slots(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(block, place in it) of tokens start to end of every row, each (rows, end - start)."""
        tokens = torch.arange(start, end, device=self.table.device)
        return self.table[:, tokens // self.block].long(), (tokens % self.block).expand(self.table.shape[0], -1)

    def write(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores (rows, new, kv heads, D) each as the tokens from `start` on."""
        (rows, columns), end = self.table.shape, start + keys.shape[1]
        if self.ordered and self.key_scales is None:  # no table is needed
            for kept, new in ((self.keys, keys), (self.values, values)):
                kept[: rows * columns].view(rows, columns * self.block, *kept.shape[2:])[:, start:end] = new
            return
        place = self.slots(start, end)
        for kept, scales, new in ((self.keys, self.key_scales, keys), (self.values, self.value_scales, values)):
            if scales is not None:
                new, found = rounded(new, kept.dtype)
                scales[place] = found.to(scales.dtype)
            kept[place] = new.to(kept.dtype)

    def read(self, end: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of tokens 0 to end, (rows, end, kv heads, D): views where every row's blocks lie in order.

        dtype: in which rounded ones are restored; others are given as they are stored.
        """
        # Without another method of its own: a compiler that traces it follows none.
        rows, columns = self.table.shape
        kept: list[Any] = [t for t in (self.keys, self.values, self.key_scales, self.value_scales) if t is not None]
        if self.ordered:
            kept = [t[: rows * columns] for t in kept]
        else:
            blocks = self.table.flatten().long()
            kept = [t[blocks] for t in kept]
        keys, values, *scales = (t.unflatten(0, (rows, columns)).flatten(1, 2)[:, :end] for t in kept)
        keys = restored(keys, scales[0], dtype) if scales else keys
        return keys, restored(values, scales[1], dtype) if len(scales) > 1 else values
