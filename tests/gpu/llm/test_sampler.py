"""How requests draw, and the pages that they hold."""

import numpy as np
import pytest
import torch

from accel.llm.batching.sampler import Sampler
from accel.llm.batching.sampling import Sampling
from accel.llm.kv_cache.layer_sets import layer_sets
from accel.llm.kv_cache.paged_kv_cache import PagedKVCache, block_bytes
from accel.llm.kv_cache.shape import Shape
from support.kernels.waiting import waits_noted

VOCABULARY, ROWS = 32003, 15
SETTINGS = [
    Sampling(),
    Sampling(penalty=1.3),
    Sampling(1.0, seed=3),
    Sampling(0.7, 20, 0.9, 0.01, seed=-5),
    Sampling(1.3, 0, 0.8, penalty=0.7, seed=2**62),
]


def filled(device):
    sampler = Sampler(ROWS, VOCABULARY, device)
    for row in range(ROWS):
        sampler.set(row, SETTINGS[row % len(SETTINGS)]._replace(seed=row), range(row, 9 * row), drawn=row)
    return sampler


def test_nothing_waits_and_ids_are_those_of_the_cpu():
    logits = torch.randn(4, ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0)).mul(2)
    rows, on_gpu = np.arange(ROWS)[::-1].copy(), logits.cuda()
    rows[7] = -1
    at = torch.from_numpy(rows).cuda()
    sampler = filled("cuda")
    sampler.draw(on_gpu[0], at, rows)  # compiles
    sampler = filled("cuda")
    found = []
    with waits_noted("error"):
        for step in range(4):
            if step == 2:
                sampler.set(5, Sampling(1.0, penalty=1.1, seed=8), [1, 2, 3])
            found.append(sampler.draw(on_gpu[step], at, rows)[0])
    theirs = filled("cpu")
    differ = 0
    for step in range(4):
        if step == 2:
            theirs.set(5, Sampling(1.0, penalty=1.1, seed=8), [1, 2, 3])
        differ += int((found[step].cpu() != theirs.draw(logits[step], torch.from_numpy(rows), rows)[0]).sum())
    assert differ <= 2  # numbers so near the end of a share that the last digit decides


def test_a_graph_holds_the_draw():
    logits = torch.randn(8, VOCABULARY, device="cuda").bfloat16()
    rows = np.arange(8)
    at = torch.from_numpy(rows).cuda()
    eager, sampler = filled("cuda"), filled("cuda")
    filled("cuda").draw(logits, at, rows)
    sampler.flush()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, _ = sampler.draw(logits, at, rows)
    for step in range(4):
        if step == 2:
            for one in (sampler, eager):
                one.set(3, Sampling(0.5, 7, penalty=1.2, seed=99), [4, 5])
        sampler.flush()
        graph.replay()
        assert torch.equal(ids, eager.draw(logits, at, rows)[0])


WINDOWS = [128, None] * 4


def shapes(codes=None) -> list[Shape]:
    return [Shape(4, 64, torch.bfloat16, torch.device("cuda"), codes)] * len(WINDOWS)


@pytest.mark.parametrize("codes", [None, torch.int8, torch.float8_e4m3fn])
def test_tables_and_copies_arrive_in_order_and_without_waiting(codes):
    pool = PagedKVCache(shapes(codes), layer_sets(shapes(codes), WINDOWS), 40, 5, 7)
    rng, table = np.random.default_rng(0), np.zeros((2, 5, 7), np.int32)
    for kept in pool.kept:
        kept.copy_(torch.randint(-9, 9, kept.shape, device="cuda"))
    expected = [kept.clone() for kept in pool.kept]
    for kept in expected:
        kept[:, :, 5], kept[:, :, 6] = kept[:, :, 3].clone(), kept[:, :, 3].clone()
    with waits_noted("error"):
        for number in (70, 1, 30, 13):
            places, values = rng.permutation(table.size)[:number], rng.integers(0, 40, number).astype(np.int32)
            table.reshape(-1)[places] = values
            pool.upload(places, values)
        pool.copy([(3, 5), (5, 6)])
    assert np.array_equal(pool.tables[torch.device("cuda")].tables.cpu().numpy(), table)
    for kept, wanted in zip(pool.kept, expected, strict=True):
        assert torch.equal(kept.float(), wanted.float())
    for layer in range(len(WINDOWS)):
        assert pool.kv(layer).table.data_ptr() % 256 == pool.kv(layer).keys.data_ptr() % 256 == 0


def test_no_memory_is_told_and_nothing_stays():
    sets = layer_sets(shapes(torch.int8), WINDOWS)
    held = torch.cuda.memory_allocated()
    blocks = 2 * torch.cuda.mem_get_info()[1] // block_bytes(shapes(torch.int8), sets)
    with pytest.raises(torch.OutOfMemoryError, match=rf"{blocks} blocks of 64 tokens: .* GiB wanted"):
        PagedKVCache(shapes(torch.int8), sets, blocks, 5, 7)
    assert torch.cuda.memory_allocated() == held
