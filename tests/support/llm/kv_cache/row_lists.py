"""The plainest thing that a store of keys and values could be: a list of tensors, one a row."""

import torch
from accel_kernels.attention.paged.kv_quantization import restored, rounded

from accel.llm.kv_cache.shape import BLOCK, Shape
from accel.llm.kv_cache.store import Store

CPU, OTHER = torch.device("cpu"), torch.device("cpu", 0)  # two devices, as far as torch is concerned
SHAPES = (Shape(2, 4, torch.float32, CPU), Shape(1, 6, torch.float64, OTHER), Shape(2, 4, torch.float32, CPU))
STORED = {
    "exact": SHAPES,
    "int8": tuple(shape._replace(kv_dtype=torch.int8) for shape in SHAPES),
    "fp8": tuple(shape._replace(kv_dtype=torch.float8_e4m3fn, dtype=torch.bfloat16) for shape in SHAPES),
    "some": (SHAPES[0]._replace(kv_dtype=torch.int8), SHAPES[1], SHAPES[2]),
}


class Lists:
    """rows[r][layer]: keys and values of row r, each (tokens, heads, dim). seen[r]: bools of its first tokens."""

    def __init__(self, rows: int, shapes=SHAPES):
        empty = [[torch.empty(2, 0, s.heads, s.dim, dtype=s.dtype) for s in shapes] for _ in range(rows)]
        self.rows, self.seen = empty, [torch.ones(0, dtype=torch.bool) for _ in range(rows)]
        self.shapes = shapes

    @property
    def length(self) -> int:
        return self.rows[0][0].shape[1]

    def append(self, new: list[torch.Tensor]) -> None:
        """new: one a layer, (2, rows, tokens, heads, dim), rounded as the layer says."""
        pairs = zip(new, self.shapes, strict=True)
        new = [t if s.kv_dtype is None else restored(*rounded(t, s.kv_dtype), s.dtype) for t, s in pairs]
        for r, row in enumerate(self.rows):
            self.rows[r] = [torch.cat([held, more[:, r]], 1) for held, more in zip(row, new, strict=True)]

    def choose(self, index: list[int]) -> None:
        self.rows, self.seen = [list(self.rows[r]) for r in index], [self.seen[r] for r in index]

    def crop(self, length: int) -> None:
        self.rows = [[held[:, :length] for held in row] for row in self.rows]
        self.seen = [seen[:length] for seen in self.seen]

    def stacked(self, layer: int) -> torch.Tensor:
        """(2, rows, tokens, heads, dim)."""
        return torch.stack([row[layer] for row in self.rows], 1)

    def padding_mask(self, tokens: int) -> torch.Tensor:
        return torch.stack([torch.cat([seen, torch.ones(tokens - len(seen)).bool()]) for seen in self.seen])


def fresh(rows: int, tokens: int, shapes=SHAPES) -> list[torch.Tensor]:
    return [torch.randn(2, rows, tokens, s.heads, s.dim, dtype=s.dtype) for s in shapes]


def append(store: Store, new: list[torch.Tensor]) -> None:
    """As the fused layers do: through the table, all layers, then on."""
    rows, tokens = new[0].shape[1:3]
    start = store.length
    store.reserve(rows, start + tokens)
    for layer, (keys, values) in enumerate(new):
        kv = store.kvs([layer], tokens)[layer]
        assert kv.layer == layer
        kv.write(start, keys, values)
    store.advance(tokens)


def append_as_stock(store: Store, new: list[torch.Tensor]) -> None:
    """Layer by layer, from the last."""
    for layer in reversed(range(len(new))):
        store.write(layer, *new[layer].transpose(2, 3))


def check(store: Store, lists: Lists) -> None:
    length, rows = lists.length, len(lists.rows)
    assert store.length == length and store.consistent
    if not store.blocks:
        assert not length
        return
    store.reserve(store.rows, length + 1)
    own = torch.arange(store.rows * store.blocks.columns).view(store.rows, -1)
    kvs = [store.kvs([layer], 1)[layer] for layer in range(len(store.shapes))]
    assert torch.equal(kvs[0].table[:, length // BLOCK :].long(), own[:, length // BLOCK :])
    mask = 0 if store.padding_mask is None else store.padding_mask.data_ptr()
    head = [length, mask, store.blocks.columns, 0, 0]
    kept = [t for kv in kvs for t in (kv.keys, kv.values, kv.key_scales, kv.value_scales, kvs[0].table)]
    assert store.metadata.tolist() == head + [0 if t is None else t.data_ptr() for t in kept]
    alike = store.shapes[0] == store.shapes[2]
    assert (kvs[0].keys._base is kvs[2].values._base) == alike and kvs[1].keys._base is not kvs[0].keys._base
    if not length:
        return
    assert store.rows == rows
    for layer, kv in enumerate(kvs):
        assert kv.stored() == length
        stored = torch.stack(kv.read(length, store.shapes[layer].dtype))
        assert torch.equal(stored, lists.stacked(layer))
        if kv.key_scales is not None:  # as kernels find them
            assert kv.key_scales.stride() == kv.value_scales.stride() == (BLOCK * kv.keys.shape[2], 1, BLOCK)
    if store.padding_mask is None:
        assert lists.padding_mask(store.capacity).all()
    else:
        assert torch.equal(store.padding_mask, lists.padding_mask(store.capacity))


def filled(rows: int = 4, tokens: int = 2 * BLOCK + 7, expected_tokens: int = 0) -> tuple[Store, Lists]:
    store, lists, new = Store(SHAPES, expected_tokens), Lists(rows), fresh(rows, tokens)
    append(store, new)
    lists.append(new)
    return store, lists
