"""What a layer keeps for a token or for a row, and how many tokens a block holds."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

BLOCK = 64  # tokens
SCALE = torch.float32
STATE = torch.float32
ALIGNED = 64  # elements: what each layer keeps of states begins at a multiple of that


class Shape(NamedTuple):
    """What one layer keeps for a token: keys and values of (heads, dim) each.

    dtype: of what goes in and comes out. kv_dtype: the 8-bit dtype in which they are stored, with a float32 scale for
    each token and head, see `accel_kernels.attention.paged.kv_quantization`; None: they are stored as they are. values:
    channels of a value where these are fewer, and zeros are stored behind them; else 0.
    """

    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    kv_dtype: torch.dtype | None = None
    values: int = 0

    @property
    def size(self) -> int:
        """Bytes a token."""
        stored = self.dtype if self.kv_dtype is None else self.kv_dtype
        scale = 0 if self.kv_dtype is None else SCALE.itemsize
        return 2 * self.heads * (self.dim * stored.itemsize + scale)

    def bytes_for(self, tokens: int) -> int:
        """Of one row."""
        return self.size * tokens

    @property
    def exact(self) -> "Shape":
        """The same without rounding."""
        return self._replace(kv_dtype=None)

    @property
    def nothing(self) -> "Shape":
        """That of a layer which keeps nothing."""
        return self._replace(heads=0)

    @property
    def keeps(self) -> bool:
        """Whether it keeps anything; else what lies at its place in a cache is not the store's."""
        return self.heads > 0

    def empty(self, layers: int, blocks: int) -> tuple[torch.Tensor, ...]:
        """Room for keys and values, (layers, 2, blocks, BLOCK, heads, dim); and, where they are rounded, their scales,
        (layers, 2, blocks, BLOCK, heads), the tokens of a block and head next to each other in memory.
        """
        stored = self.kv_dtype or self.dtype
        kept = torch.empty(layers, 2, blocks, BLOCK, self.heads, self.dim, dtype=stored, device=self.device)
        if self.kv_dtype is None:
            return (kept,)
        return kept, torch.empty(layers, 2, blocks, self.heads, BLOCK, dtype=SCALE, device=self.device).mT

    def takes(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether these, (rows, heads, tokens, dim) each, are such keys and values."""
        found = [(t.shape[1], t.shape[3], t.dtype, t.device) for t in (keys, values)]
        return found == [(self.heads, dim, self.dtype, self.device) for dim in (self.dim, self.values or self.dim)]

    def views(self, kept: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Keys, values and any scales of one layer, of its parts of each tensor of `empty`."""
        return tuple(kept)

    def stored(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As a store takes them, (rows, tokens, heads, dim) each."""
        return keys, torch.nn.functional.pad(values, (0, self.dim - self.values)) if self.values else values

    def shown(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The reverse of `stored`, as views."""
        return keys, values[..., : self.values or self.dim]


class LatentShape(NamedTuple):
    """What one layer of latent attention keeps for a token: the latent, and the part of the key that its heads share.

    In a cache of transformers these are keys and values of one head, of `rank` and `rope` channels. A store has them
    side by side; what it takes for values are the first `rank` channels of that. heads: of queries. kv_dtype: as of
    `Shape`, of latents, with a scale for each token; then a store has the shared parts for values.
    """

    rank: int
    rope: int
    heads: int
    dtype: torch.dtype
    device: torch.device
    kv_dtype: torch.dtype | None = None

    @property
    def size(self) -> int:
        """Bytes a token."""
        latent = self.rank * self.dtype.itemsize if self.kv_dtype is None else self.rank + SCALE.itemsize
        return latent + self.rope * self.dtype.itemsize

    def bytes_for(self, tokens: int) -> int:
        """Of one row."""
        return self.size * tokens

    @property
    def exact(self) -> "LatentShape":
        return self._replace(kv_dtype=None)

    @property
    def nothing(self) -> "LatentShape":
        """That of a layer which keeps nothing."""
        return self._replace(rank=0, rope=0)

    @property
    def keeps(self) -> bool:
        return self.rank > 0

    def empty(self, layers: int, blocks: int) -> tuple[torch.Tensor, ...]:
        """Room for latents, (layers, 1, blocks, BLOCK, 1, rank + rope); or for codes, shared parts, and scales, which
        have no last dimension.
        """
        sizes = layers, 1, blocks, BLOCK, 1
        if self.kv_dtype is None:
            return (torch.empty(*sizes, self.rank + self.rope, dtype=self.dtype, device=self.device),)
        codes = torch.empty(*sizes, self.rank, dtype=self.kv_dtype, device=self.device)
        shared = torch.empty(*sizes, self.rope, dtype=self.dtype, device=self.device)
        return codes, shared, torch.empty(sizes, dtype=SCALE, device=self.device)

    def takes(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """As of `Shape`."""
        sizes = [(t.shape[1], t.shape[3], t.dtype, t.device) for t in (keys, values)]
        return sizes == [(1, size, self.dtype, self.device) for size in (self.rank, self.rope)]

    def views(self, kept: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """As of `Shape`."""
        return (kept[0], kept[0][..., : self.rank]) if self.kv_dtype is None else tuple(kept)

    def stored(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As of `Shape`."""
        return (torch.cat((keys, values), dim=-1), keys) if self.kv_dtype is None else (keys, values)

    def shown(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As of `Shape`."""
        return (values, keys[..., self.rank :]) if self.kv_dtype is None else (keys, values)


class StateShape(NamedTuple):
    """What one layer keeps for a row, however long it is: a state and the last inputs of a convolution, or one of them.

    state: sizes of the recurrent state as transformers keeps it, without rows; float32. window: (taps, channels) in
    `dtype`; the input of position p lies at p % taps. beside: not 0 where the layer keeps keys and values too; so many
    shapes before this is that of these, and so many layers the cache has.
    """

    state: tuple[int, ...] | None
    window: tuple[int, int] | None
    dtype: torch.dtype
    device: torch.device
    beside: int = 0

    @property
    def kv_dtype(self) -> None:
        """Nothing is rounded."""
        return None

    @property
    def size(self) -> int:
        """Bytes a token."""
        return 0

    def bytes_for(self, tokens: int) -> int:
        """Of one row, whatever its tokens."""
        return self.row_bytes

    @property
    def slot_bytes(self) -> int:
        """Of one state."""
        sizes = ((self.state, STATE), (self.window, self.dtype))
        return sum(prod(kept) * dtype.itemsize for kept, dtype in sizes if kept is not None)

    @property
    def row_bytes(self) -> int:
        """Of the state that a forward reads, and of that which it writes."""
        return 2 * self.slot_bytes

    @property
    def exact(self) -> "StateShape":
        return self

    @property
    def nothing(self) -> "StateShape":
        """That of a layer which keeps nothing."""
        return self._replace(state=None, window=None)

    @property
    def keeps(self) -> bool:
        return self.state is not None or self.window is not None

    def empty(self, layers: int, rows: int) -> "States":
        """Room for states, (layers, rows, ...) float32, and windows, (layers, rows, taps, channels)."""
        kept: list[torch.Tensor | None] = []
        for sizes, dtype in ((self.state, STATE), (self.window, self.dtype)):
            if sizes is None:
                kept.append(None)
                continue
            used = rows * prod(sizes)
            flat = torch.empty(layers, -(-used // ALIGNED) * ALIGNED, dtype=dtype, device=self.device)
            kept.append(flat[:, :used].unflatten(1, (rows, *sizes)))
        return kept[0], kept[1]


PagedShape = Shape | LatentShape
LayerShape = PagedShape | StateShape
States = tuple[torch.Tensor | None, torch.Tensor | None]  # state and window: of a layer, or of all of one shape


def cache_layers(shapes: Sequence[LayerShape]) -> int:
    """How many layers a cache has of which a store has these shapes."""
    return next((shape.beside for shape in shapes if isinstance(shape, StateShape) and shape.beside), len(shapes))


def kv_layers(shapes: Sequence[LayerShape]) -> list[int]:
    """The layers that keep something for each token."""
    return [layer for layer, shape in enumerate(shapes) if not isinstance(shape, StateShape)]
