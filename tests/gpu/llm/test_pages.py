"""Pages of keys and values on a GPU: nothing waits, and memory that is short is told and given back."""

import numpy as np
import pytest
import torch

from accel.llm.kv_cache.blocks import Shape
from accel.llm.kv_cache.layer_sets import layer_sets
from accel.llm.kv_cache.pages import PagePool, pages_for

WINDOWS = [128, None] * 4


def shapes(codes=None) -> list[Shape]:
    return [Shape(4, 64, torch.bfloat16, torch.device("cuda"), codes)] * len(WINDOWS)


@pytest.mark.parametrize("codes", [None, torch.int8, torch.float8_e4m3fn])
def test_tables_and_copies_arrive_in_order_and_without_waiting(codes):
    pool = PagePool(shapes(codes), layer_sets(shapes(codes), WINDOWS), 40, 5, 7, "cuda")
    rng, table = np.random.default_rng(0), np.zeros((2, 5, 7), np.int32)
    for kept in pool.kept:
        kept.copy_(torch.randint(-9, 9, kept.shape, device="cuda"))
    expected = [kept.clone() for kept in pool.kept]
    for kept in expected:
        kept[:, :, 5], kept[:, :, 6] = kept[:, :, 3].clone(), kept[:, :, 3].clone()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in (70, 1, 30, 13):
            places, values = rng.permutation(table.size)[:number], rng.integers(0, 40, number).astype(np.int32)
            table.reshape(-1)[places] = values
            pool.upload(places, values)
        pool.copy([(3, 5), (5, 6)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert np.array_equal(pool.places[torch.device("cuda")].tables.cpu().numpy(), table)
    for kept, wanted in zip(pool.kept, expected, strict=True):
        assert torch.equal(kept.float(), wanted.float())
    for layer in range(len(WINDOWS)):
        assert pool.kv(layer).table.data_ptr() % 256 == pool.kv(layer).keys.data_ptr() % 256 == 0


def test_no_memory_is_told_and_nothing_stays():
    sets = layer_sets(shapes(torch.int8), WINDOWS)
    held = torch.cuda.memory_allocated()
    pages = pages_for(shapes(torch.int8), sets, 2 * torch.cuda.mem_get_info()[1])
    with pytest.raises(torch.OutOfMemoryError, match=rf"{pages} pages of 64 tokens: .* GiB wanted"):
        PagePool(shapes(torch.int8), sets, pages, 5, 7, "cuda")
    assert torch.cuda.memory_allocated() == held
