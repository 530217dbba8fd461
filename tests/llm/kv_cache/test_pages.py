"""Pages of keys and values: where each layer finds its own, copies, tables, and how layers are put into sets."""

import gc
import weakref
from collections import Counter

import numpy as np
import pytest
import torch
from accel_kernels.attention.paged.kv import COLUMNS, EACH, KEYS, LAYERS, TABLE
from accel_kernels.attention.paged.kv_quantization import restored, rounded

from accel.llm.kv_cache.layer_sets import MOST_SETS, WASTE, LayerSet, layer_sets
from accel.llm.kv_cache.paged_kv_cache import PagedKVCache, block_bytes
from accel.llm.kv_cache.shape import BLOCK, Shape
from support.llm.kv_cache.row_lists import CPU, STORED

SETS = (LayerSet((0, 2), None), LayerSet((1,), 100), LayerSet((3,), None), LayerSet((4, 5), 100))
ROWS, PAGES, WIDTH = 3, 20, 5


def pool_of(stored="exact", sets=SETS, device=CPU) -> PagedKVCache:
    """Six layers: of the second shape 1 and 4, of the first the others."""
    shapes = [one._replace(device=torch.device(device)) for one in STORED[stored] * 2]
    return PagedKVCache(shapes, sets, PAGES, ROWS, WIDTH)


def tabled(pool, seed=0) -> np.ndarray:
    """Every row gets pages of its own in every set, and the device is told; the table."""
    table = np.zeros(pool.tables[CPU].tables.shape, np.int32)
    free = np.random.default_rng(seed).permutation(np.arange(1, PAGES))
    table[:, :, 0] = free[: table[:, :, 0].size].reshape(len(table), -1)
    pool.upload(np.arange(table.size), table.reshape(-1))
    return table


@pytest.mark.parametrize("stored", STORED)
def test_what_rows_write_through_their_tables_they_read_again(stored):
    torch.manual_seed(0)
    pool = pool_of(stored)
    table, written = tabled(pool), {}
    for layer, shape in enumerate(STORED[stored] * 2):
        kv = pool.kv(layer)
        place = next(i for i, one in enumerate(SETS) if layer in one.layers)
        assert torch.equal(kv.table, torch.from_numpy(table[place])) and kv.table.is_contiguous()
        assert kv.layer == layer and not kv.is_prefill and not kv.ordered and kv.padding_mask is None
        assert kv.keys.shape == kv.values.shape == (PAGES, BLOCK, shape.heads, shape.dim) and kv.block == BLOCK
        assert (kv.key_scales is not None) == (shape.kv_dtype is not None)
        assert kv.keys.dtype == (shape.kv_dtype or shape.dtype)
        new = torch.randn(2, ROWS, BLOCK, shape.heads, shape.dim, dtype=shape.dtype)
        kv.write(0, *new)
        written[layer] = new if shape.kv_dtype is None else restored(*rounded(new, shape.kv_dtype), shape.dtype)
    for layer, new in written.items():  # after all: none has written over another's
        kv = pool.kv(layer)
        assert torch.equal(torch.stack(kv.read(BLOCK, new.dtype)), new)
        tensors = [kv.keys, kv.values, kv.key_scales, kv.value_scales, kv.table]
        begin = LAYERS + EACH * layer
        assert kv.metadata[begin : begin + EACH].tolist() == [0 if t is None else t.data_ptr() for t in tensors]
        assert TABLE - KEYS == 4 and kv.metadata[COLUMNS] == WIDTH and kv.stored() == 0
        assert kv.table.data_ptr() % 16 == kv.keys.data_ptr() % 16 == 0
        if kv.key_scales is not None:  # as kernels find them
            assert kv.key_scales.stride() == kv.value_scales.stride() == (BLOCK * kv.keys.shape[2], 1, BLOCK)


def test_layers_of_several_sets_share_memory_and_have_tables_of_their_own():
    pool = pool_of()
    keys = [pool.kv(layer).keys.data_ptr() for layer in range(6)]
    assert keys[0] == keys[3] == keys[5] != keys[2] and keys[1] == keys[4]
    assert len({pool.kv(layer).table.data_ptr() for layer in range(6)}) == len(SETS)
    shapes = STORED["exact"]
    assert pool.block_bytes == BLOCK * (2 * shapes[0].size + shapes[1].size)
    assert pool.block_bytes * PAGES == sum(kept.nbytes for kept in pool.kept)
    assert pool.bytes >= pool.block_bytes * PAGES + pool.tables[CPU].tables.nbytes + pool.kv(0).metadata.nbytes


@pytest.mark.parametrize("stored", STORED)
def test_page_0_begins_as_zeros(stored, monkeypatch):
    make = torch.empty

    def dirty(*size, **kwargs):
        tensor = make(*size, **kwargs)
        tensor.view(torch.uint8).fill_(255)
        return tensor

    monkeypatch.setattr(torch, "empty", dirty)
    pool = pool_of(stored)
    assert not pool.tables[CPU].tables.any()
    for kept in pool.kept:
        assert not kept[:, :, 0].float().any() and (kept[:, :, 1:].contiguous().view(torch.uint8) == 255).all()


@pytest.mark.parametrize("stored", STORED)
def test_copies_are_of_all_layers_one_after_another(stored):
    torch.manual_seed(0)
    pool = pool_of(stored)
    for kept in pool.kept:
        kept.copy_(torch.randint(-9, 9, kept.shape))
    expected = [kept.clone() for kept in pool.kept]
    pairs = [(3, 4), (4, 7), (5, 4), (19, 1), (4, 3)]
    for source, target in pairs:
        for kept in expected:
            kept[:, :, target] = kept[:, :, source].clone()
    pool.copy(pairs)
    pool.copy([])
    for kept, wanted in zip(pool.kept, expected, strict=True):
        assert torch.equal(kept.float(), wanted.float())


def test_the_table_is_what_was_uploaded_last():
    pool, rng = pool_of(), np.random.default_rng(0)
    table, address = np.zeros(pool.tables[CPU].tables.shape, np.int32), pool.tables[CPU].tables.data_ptr()
    for number in (0, 1, 7, table.size):
        places, values = rng.permutation(table.size)[:number], rng.integers(0, PAGES, number).astype(np.int32)
        table.reshape(-1)[places] = values
        pool.upload(places, values)
        assert np.array_equal(pool.tables[CPU].tables.numpy(), table) and pool.tables[CPU].tables.data_ptr() == address
        assert all(
            torch.equal(pool.kv(layer).table, pool.tables[CPU].tables[s])
            for s, one in enumerate(SETS)
            for layer in one.layers
        )
    assert not pool.tables[CPU].flat[:, pool.table_size :].any()
    for wrong in (-1, table.size):
        with pytest.raises(ValueError, match=r"tables of shape \(4, 3, 5\)"):
            pool.upload(np.array([0, wrong]), np.array([1, 1]))
    assert np.array_equal(pool.tables[CPU].tables.numpy(), table)


@pytest.mark.parametrize("inside", [True, False])
def test_inference_mode_may_be_entered_or_left(inside):
    with torch.inference_mode(inside):
        pool = pool_of("some")
        tabled(pool, 1)
    for mode in (not inside, inside):
        with torch.inference_mode(mode):
            tabled(pool, 2)
            pool.copy([(1, 2), (2, 3)])
            kv = pool.kv(2)
            kv.write(0, *torch.ones(2, ROWS, 3, 2, 4))
            assert (kv.read(3, torch.float32)[0] == 1).all()
    assert not any(tensor.is_inference() for tensor in (*pool.kept, *pool.beside, pool.kv(0).keys))


@pytest.fixture
def memory(monkeypatch):
    """An allocator that gives so many tensors and has no room for the next; what it gave that is still alive."""
    alive, make = [], torch.empty

    def empty(*size, **kwargs):
        if len(alive) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        tensor = make(*size, **kwargs)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(torch, "empty", empty)
    return lambda: [one() for one in alive if one() is not None]


def test_no_memory_is_told_with_the_size_and_nothing_stays(memory):
    gc.disable()
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"20 blocks of 64 tokens: 0\.00 GiB wanted"):
            try:
                pool_of("int8")
            except torch.OutOfMemoryError:
                assert not memory()
                raise
    finally:
        gc.enable()


def test_no_memory_of_the_host_is_told_alike():
    shape = Shape(64, 1024, torch.float32, CPU)
    with pytest.raises(torch.OutOfMemoryError, match=r"33554432 blocks of 64 tokens: 1048576\.00 GiB wanted"):
        PagedKVCache([shape], [LayerSet((0,), None)], 2**25, 1, 1)


def test_another_error_stays_what_it_is():
    with pytest.raises(RuntimeError, match="negative dimension") as caught:
        PagedKVCache(STORED["exact"][:1], [LayerSet((0,), None)], -1, 1, 1)
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    for sets in ([LayerSet((0, 1), None)], [LayerSet((0, 1), None), LayerSet((1, 2), 5)]):
        with pytest.raises(ValueError, match="3 layers, each to be in one set"):
            PagedKVCache(STORED["exact"], sets, 4, 1, 1)


LLAMA = Shape(8, 128, torch.bfloat16, CPU)
INT8 = LLAMA._replace(kv_dtype=torch.int8)


def every(number: int, window: int, layers: int) -> list[int | None]:
    """Each number-th layer sees all."""
    return [None if (layer + 1) % number == 0 else window for layer in range(layers)]


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([None] * 32, [(32, None)]),  # Llama
        ([4096] * 32, [(32, 4096)]),  # Mistral
        (every(2, 4096, 26), [(13, 4096), (13, None)]),  # Gemma 2
        (every(2, 128, 24), [(12, 128), (12, None)]),  # gpt-oss
        (every(6, 1024, 62), [*[(11, 1024)] * 4, (8, 1024), (10, None)]),  # Gemma 3 27B
        (every(6, 512, 26), [*[(4, 512)] * 5, (2, 512), (4, None)]),  # Gemma 3 1B
        (every(6, 1024, 34), [*[(5, 1024)] * 5, (4, 1024), (5, None)]),  # Gemma 3 4B
        ([None] * 27 + [512], [(28, None)]),  # a window of one layer is not worth a set for each layer
        ([None], [(1, None)]),
        ([512, 4096, 4096, 512], [(2, 512), (2, 4096)]),
        (list(range(1, 30)), [(29, 29)]),
    ],
    ids=lambda value: str(len(value)),
)
@pytest.mark.parametrize("shape", [LLAMA, INT8], ids=["exact", "int8"])
def test_layers_that_see_equally_far_are_in_sets_of_equal_pages(shape, windows, expected):
    sets = layer_sets([shape] * len(windows), windows)
    assert [(len(one.layers), one.window) for one in sets] == expected
    whole([shape] * len(windows), windows, sets)
    waste = max(len(one.layers) for one in sets) * len(sets) / len(windows) - 1
    assert waste <= WASTE and len(sets) <= MOST_SETS


def whole(shapes, windows, sets):
    """Every layer is in one set that gives back nothing that the layer sees; pages are of the size said."""
    assert sorted(layer for one in sets for layer in one.layers) == list(range(len(windows)))
    for one in sets:
        assert list(one.layers) == sorted(one.layers)
        assert all(one.window is None or (windows[i] is not None and windows[i] <= one.window) for i in one.layers)
    pool = PagedKVCache([one._replace(device=torch.device("meta")) for one in shapes], sets, 2, 1, 1)
    assert pool.block_bytes == block_bytes(shapes, sets) == sum(kept.nbytes for kept in pool.kept) // 2


OTHER = Shape(4, 512, torch.bfloat16, CPU)


@pytest.mark.parametrize(
    ("shapes", "windows", "expected"),
    [
        ([LLAMA, *[INT8] * 30, LLAMA], [None] * 32, [(32, None, {LLAMA: 2, INT8: 30})]),
        (  # each window may have exact layers among the rounded
            [LLAMA, LLAMA, *[INT8] * 22],
            every(2, 128, 24),
            [(12, 128, {LLAMA: 1, INT8: 11}), (12, None, {LLAMA: 1, INT8: 11})],
        ),
        # Sets that cannot be alike are one, which gives nothing back but what none sees.
        ([LLAMA, OTHER] * 12, every(2, 64, 24), [(24, None, {LLAMA: 12, OTHER: 12})]),
        ([LLAMA, OTHER] * 12, [100, 7] * 12, [(24, 100, {LLAMA: 12, OTHER: 12})]),
    ],
    ids=["one window", "two windows", "unlike", "unlike windows"],
)
@pytest.mark.share(1)
def test_layers_of_several_shapes(shapes, windows, expected):
    sets = layer_sets(shapes, windows)
    assert [(len(one.layers), one.window, Counter(shapes[i] for i in one.layers)) for one in sets] == expected
    whole(shapes, windows, sets)


@pytest.mark.parametrize("window", [None, 1, 5, BLOCK, BLOCK + 1, BLOCK + 2, 3 * BLOCK])
def test_the_first_block_seen_is_that_of_the_first_token_seen(window):
    one = LayerSet((0,), window)
    for length in range(4 * BLOCK):
        seen = 0 if window is None else max(0, length - window + 1)
        assert one.first_seen(length) == seen // BLOCK
