"""The keys, values and states of one generation: their lengths, allocation, changes of rows, and copies."""

import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from accel.libraries.cache import LinearAttentionLayer
from accel.llm.kv_cache.pending_step import LatestForward, PendingStep
from accel.llm.kv_cache.row_blocks import RowBlocks
from accel.llm.kv_cache.shape import BLOCK, LayerShape, States, StateShape

AHEAD = 16384  # tokens a row that are allocated ahead at most, of those that a request may still come to


class RowSelection(NamedTuple):
    """A change of rows that a cache is asked for: "reorder" or "select" with indices, "repeat" with a number."""

    kind: str
    what: Any

    def same(self, other: "RowSelection") -> bool:
        plain = not isinstance(self.what, torch.Tensor) and not isinstance(other.what, torch.Tensor)
        return self.kind == other.kind and (self.what is other.what or (plain and self.what == other.what))

    def indices(self, rows: int, device: torch.device) -> torch.Tensor:
        """(new rows,) int64: which of the old rows each new one is."""
        if self.kind == "reorder":
            return self.what.to(device)
        if self.kind == "repeat":
            return torch.arange(rows, device=device).repeat_interleave(self.what)
        what = self.what.to(device) if isinstance(self.what, torch.Tensor) else self.what
        return torch.arange(rows, device=device)[what]


class Store:
    """The keys and values of all layers of a model, for one batch of rows. For one thread at a time.

    shapes: one a layer; kept: the layers that keep anything. expected_tokens: tokens that a row is expected to reach.
    Nothing is allocated before `reserve`. lengths: tokens a row, by layer; they differ only while stock layers write
    one after another. requested: by layer, changes of rows that wait until all layers were asked for them. cache_ref:
    gives the cache over it, if still there.
    """

    def __init__(self, shapes: Sequence[LayerShape], expected_tokens: int = 0):
        self.shapes, self.expected_tokens = tuple(shapes), expected_tokens
        self.kept = [layer for layer, shape in enumerate(self.shapes) if shape.keeps]
        self.lengths = dict.fromkeys(self.kept, 0)
        self.cache_ref: Callable[[], Any] = lambda: None
        self.clear()

    def clear(self) -> None:
        """Forgets all tokens and gives the memory back."""
        self.lengths = dict.fromkeys(self.lengths, 0)
        self.requested: dict[int, list[RowSelection]] = {}
        self._blocks: Any = None  # RowBlocks, from the first `reserve` on
        self.pending: PendingStep | None = None  # a step that another stream is at
        self.latest: LatestForward | None = None  # the last forward, None once anything else touched the store
        self.known_length = 0  # the length that the kernels are told
        self.previous: int | None = None  # that before the last forward, which can be taken back
        self.number: tuple = (None, 0, 0)  # a tensor that was read, its version then, and what it holds

    @property
    def blocks(self) -> RowBlocks:
        """The blocks, after `reserve`. Reading this waits for the step launched ahead, and stops further ones."""
        self.take()
        self.latest = None
        return self._blocks

    def take(self) -> PendingStep | None:
        """The step launched ahead, if there is one; this stream waits for it."""
        pending, self.pending = self.pending, None
        if pending is not None:
            torch.cuda.current_stream(self.shapes[0].device).wait_event(pending.done)
        return pending

    def tensors(self) -> list[torch.Tensor]:
        """All that kernels read and write, after `reserve`."""
        blocks = self.blocks
        return [*blocks.kept, *blocks.beside, *blocks.padding_masks.values()]

    @property
    def length(self) -> int:
        """Tokens stored in every row, as the host knows."""
        return max(self.lengths.values(), default=0)

    @property
    def rows(self) -> int:
        return self._blocks.rows if self._blocks else 0

    @property
    def capacity(self) -> int:
        """Tokens a row has room for."""
        return self._blocks.columns * BLOCK if self._blocks else 0

    @property
    def consistent(self) -> bool:
        """Whether all layers are in the store and equally long, and no change of rows is pending."""
        return len(self.lengths) == len(self.kept) and len(set(self.lengths.values())) == 1 and not self.requested

    @property
    def keeps_state(self) -> bool:
        """Whether a layer keeps a state: of that only the last forward can be taken away, or all tokens."""
        return any(isinstance(shape, StateShape) for shape in self.shapes)

    @property
    def readable(self) -> bool:
        """Keys and values lie as `read` shows them, with nothing to be done first."""
        return self.pending is None and not self.requested and (self._blocks is None or not self._blocks.shared)

    @property
    def padding_mask(self) -> torch.Tensor | None:
        """As in KV, on the device of the first layer; `metadata` too."""
        return self.blocks.padding_masks.get(self.shapes[0].device)

    @property
    def metadata(self) -> torch.Tensor:
        return self.metadata_on(self.shapes[0].device)

    def metadata_on(self, device: torch.device) -> torch.Tensor:
        """`KV.metadata` of the layers on a device."""
        self._set_length()
        return self.blocks.tables[device].metadata

    def kvs(self, layers: Sequence[int], tokens: int, **given: Any) -> dict[int, Any]:
        """By layer `KV` or `RowStates`, good until `reserve` makes room. given: other fields, such as is_prefill."""
        self._set_length()
        return self.blocks.of_step(layers, tokens, **given)

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each (rows, heads, tokens, dim): views, once rows share no blocks.

        Copies in the model's dtype where they are stored in 8 bits, or where a change of rows is pending.
        """
        if not self.readable:
            self.blocks.unshare(0, self.length)
        self.latest = None
        shape: Any = self.shapes[layer]
        kept = shape.shown(*self._blocks.kv(layer).read(self.lengths[layer], shape.dtype))
        keys, values = self._selected(layer, kept)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def read_state(self, layer: int) -> States:
        """What a layer of states keeps, as transformers has it: the last inputs of its convolution, (rows, channels,
        taps) in order of time, and its recurrent state, (rows, ...). Copies; zeros before a row's first token.
        """
        return self._selected(layer, self.blocks.read_state(layer, self.lengths[layer]))

    def _selected(self, layer: int, kept: Any) -> Any:
        """(rows, ...) each, after the changes of rows that the layer was asked for."""
        for rows in self.requested.get(layer, ()):
            kept = [t if t is None else t.index_select(0, rows.indices(t.shape[0], t.device)) for t in kept]
        return tuple(kept)

    def reserve(self, rows: int, tokens: int) -> None:
        """Before every call: allocates for `tokens` tokens a row, and unshares the blocks that are written next.

        Raises ValueError for another number of rows than is stored; torch.OutOfMemoryError, and then nothing changed.
        """
        if self.rows and rows != self.rows:
            if self.length:
                raise ValueError(f"a cache of {self.rows} rows, used with {rows}")
            self.clear()
        self.previous = None  # what it left is written over
        if tokens > self.capacity or self._blocks is None:
            self._grow(rows, max(tokens, 1))
        self.blocks.unshare(min(self.lengths.values()) // BLOCK, self.length)

    def _grow(self, rows: int, tokens: int) -> None:
        wish = max(tokens, self.capacity * 3 // 2)
        if self.expected_tokens >= tokens:  # and a block, as assisted decoding looks ahead of the tokens it may keep
            wish = min(self.expected_tokens + BLOCK, max(tokens + AHEAD, wish))
        while True:
            try:
                return self._lay_out(rows, wish)
            except torch.OutOfMemoryError as error:
                traceback.clear_frames(error.__traceback__)  # they hold what was allocated
                if wish == tokens:
                    row = sum(shape.bytes_for(-(-tokens // BLOCK) * BLOCK) for shape in self.shapes)
                    size = rows * row / 2**30
                    kept = f"; the {self.length} stored are kept" if self.length else ""
                    raise torch.OutOfMemoryError(
                        f"no memory for keys and values of {tokens} tokens in {rows} rows: {size:.2f} GiB wanted{kept}"
                    ) from error
            wish = tokens + (wish - tokens) // 4

    def _lay_out(self, rows: int, tokens: int, chosen: torch.Tensor | None = None) -> None:
        """Allocates anew; row r gets the tokens of row chosen[r], or of row r. All or nothing."""
        same = self._blocks is not None and chosen is None
        blocks = RowBlocks(self.shapes, rows, -(-tokens // BLOCK), self._blocks.by_states if same else None)
        if self.length:
            blocks.take(self.blocks, self.length, chosen)
        self._blocks, self.known_length = blocks, 0

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Appends (rows, heads, new, dim) to one layer, whatever the length of the others."""
        start = self.lengths[layer]
        end = start + keys.shape[2]
        self.reserve(keys.shape[0], end)
        shape: Any = self.shapes[layer]
        self.blocks.kv(layer).write(start, *shape.stored(keys.transpose(1, 2), values.transpose(1, 2)))
        self.lengths[layer] = end

    def write_state(
        self, layer: int, inputs: torch.Tensor | None, state: torch.Tensor | None, length: int | None = None
    ) -> None:
        """The reverse of `read_state`, of a layer that has seen `length` tokens, as many as others where None is given.

        None in the place of a tensor stands for zeros. After `reserve`.
        """
        self.previous, self.lengths[layer] = None, self.length if length is None else length
        self.blocks.write_state(layer, self.lengths[layer], inputs, state)

    def advance(self, new: int) -> None:
        """All layers have written `new` more tokens."""
        self.previous = self.length
        self._blocks.half ^= bool(new)
        self.lengths = {layer: length + new for layer, length in self.lengths.items()}
        self._set_length()

    def crop(self, length: int) -> None:
        """Keeps the first tokens. The next `reserve` unshares the blocks that are written again.

        Raises RuntimeError, with nothing changed, where a state would have to forget some of its tokens.
        """
        if 0 < length < self.length and self.keeps_state:
            if length != self.previous:
                LinearAttentionLayer().crop(length - self.length)
            self.blocks.take_back(length)
        self.previous = None
        for layer, held in self.lengths.items():
            self.shorten(layer, held - length)
        self._set_length()

    def shorten(self, layer: int, tokens: int) -> None:
        """Removes the last tokens of one layer, at most all."""
        self.lengths[layer] -= min(max(tokens, 0), self.lengths[layer])
        if self._blocks:
            self.blocks.unmask(self.length)

    def read_number(self, value: int | torch.Tensor) -> int:
        """The value as an int. A cache passes one tensor to each layer, which is read from the device once."""
        if type(value) is not torch.Tensor or value.is_inference():
            return int(value)
        known, version, number = self.number
        if known is not value or version != value._version:
            number = int(value)
            self.number = value, value._version, number
        return number

    def empty(self, layer: int) -> None:
        """Removes all tokens of one layer; frees the memory when no layer has any."""
        self.requested.pop(layer, None)
        self.lengths[layer] = 0
        if not self.length:
            self.clear()

    def drop(self, layer: int) -> None:
        """The store no longer holds this layer."""
        self.requested.pop(layer, None)
        del self.lengths[layer]

    def set_padding_mask(self, mask: torch.Tensor | None) -> None:
        """As of `RowBlocks`, without waiting for the GPU. After `reserve` and before the forward that it is for.

        Of that forward rows of states take their beginnings. They keep them: a later mask that hides other tokens than
        its new ones changes nothing in states, as in transformers, which reads no mask for a single token.
        """
        self.blocks.set_padding_mask(mask)
        several = mask is not None and mask.shape[1] > self.length + 1
        if several or not self.length:
            self.blocks.set_firsts(self.length, masked=several)

    def hides_behind_first(self, mask: torch.Tensor) -> bool:
        """Whether the next forward is to hide some of its tokens in a row whose states have begun. Waits for the GPU.

        transformers reads no mask for a single token, so that one of padding begins a row.
        """
        if not self.length or mask.shape[1] <= self.length + 1:
            return False
        hidden = mask[:, self.length :].eq(0).any(1)
        firsts = (one.firsts for one in self.blocks.tables.values() if one.firsts is not None)
        return any(bool((hidden.to(first.device) & first.lt(self.length)).any()) for first in firsts)

    def _set_length(self) -> None:
        length = self.length
        if self.known_length != length:
            self.blocks.set_length(length)
            self.known_length = length

    def request(self, layer: int, rows: RowSelection) -> None:
        """Asks one layer to change its rows, which is done once all layers were asked the same."""
        if self.length:
            self.requested.setdefault(layer, []).append(rows)
            self._apply_requested()

    def _apply_requested(self) -> None:
        while self.requested and len(self.requested) == len(self.lengths):
            first = next(iter(self.requested.values()))[0]
            if not all(first.same(rows[0]) for rows in self.requested.values()):
                return
            self.choose(first)
            self.requested = {layer: rows[1:] for layer, rows in self.requested.items() if rows[1:]}

    def choose(self, rows: RowSelection) -> None:
        """Changes the rows of all layers; in place, without waiting for the GPU, if their number stays."""
        if not self.length:
            return
        self.previous = None
        index = rows.indices(self.rows, self.shapes[0].device)
        if index.shape[0] == self.rows:
            self.blocks.reorder(index, self.length)
        else:
            self._lay_out(index.shape[0], self.capacity, index)

    def __getstate__(self) -> dict:
        state = {name: vars(self)[name] for name in ("shapes", "lengths", "requested")}
        state["wanted"] = self.expected_tokens
        return state | ({"blocks": self.blocks.packed(self.length)} if self.length else {})

    def __setstate__(self, state: dict) -> None:
        Store.__init__(self, state["shapes"], state["wanted"])
        self.lengths = dict(state["lengths"])
        if "blocks" in state:
            self._blocks, self.shapes = state["blocks"], state["blocks"].shapes
            self.requested = {layer: list(rows) for layer, rows in state["requested"].items()}

    def __deepcopy__(self, memo: dict) -> "Store":
        copy = memo[id(self)] = object.__new__(type(self))
        copy.__setstate__(self.__getstate__())
        return copy
