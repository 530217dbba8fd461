"""Compiled attention over latents: any number of them with NaN behind, and one graph for many lengths."""

import pytest
import torch
from accel_kernels import KV, Norm, latent_attention
from accel_kernels.attention.paged.kv import LENGTH, metadata_of

from support.kernels.numbers import assert_as_good_as_torch

pytestmark = pytest.mark.usefixtures("exact")
ROWS, COLUMNS, RANK, ROPE, NOPE, VALUES = 3, 70, 512, 64, 128, 128
LENGTHS = (0, 1, 15, 16, 31, 32, 63, 64, 65, 127, 1000, 4097, 4400)


def made(dtype, length, heads, new=1):
    """A call with `length` tokens stored in each row, blocks in any order; behind them is NaN."""
    table = torch.randperm(ROWS * COLUMNS, device="cuda").view(ROWS, COLUMNS).int()
    latents = torch.randn(ROWS * COLUMNS, 64, 1, RANK + ROPE, device="cuda", dtype=dtype)
    where = metadata_of(COLUMNS, [(table, latents)], table.device)
    where[LENGTH] = length
    kv = KV(latents, latents[..., :RANK], table, None, where, 0, is_prefill=length == 0)
    latents[kv.slots(length, COLUMNS * 64)] = float("nan")
    q = torch.randn(ROWS, new, heads, NOPE + ROPE, device="cuda", dtype=dtype)
    compressed = torch.randn(ROWS, new, RANK + ROPE, device="cuda", dtype=dtype)
    up = torch.randn(heads, NOPE + VALUES, RANK, device="cuda", dtype=dtype) * RANK**-0.5
    angles = torch.rand(ROWS, new, ROPE // 2, device="cuda") * 6.28
    more = {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype), "interleaved": True}
    norm = Norm(torch.rand(RANK, device="cuda", dtype=dtype) + 0.5, None, 1e-6)
    return (q, compressed, kv, up, (NOPE + ROPE) ** -0.5), {"norm": norm, **more}


@pytest.mark.parametrize("heads", [3, 16, 20, 64, 128])
@pytest.mark.parametrize("new", [1, 4, 16])
@pytest.mark.parametrize("length", LENGTHS)
def test_any_number_of_tokens(length, new, heads):
    dtype = torch.bfloat16 if length % 2 else torch.float16
    args, more = made(dtype, length, heads, new)
    assert latent_attention.supports(*args, **more) is None
    assert_as_good_as_torch(latent_attention, args, more, dtype)


@pytest.mark.parametrize("heads", [16, 20, 128])
def test_one_graph_serves_all_lengths(heads):
    """The same numbers as without a graph, to the bit; counters are left as zeros."""
    (q, compressed, kv, up, scale), more = made(torch.bfloat16, 0, heads)
    counters = torch.zeros(ROWS * heads, device="cuda", dtype=torch.int32)
    kv = kv._replace(by_address=True, is_prefill=False, split_counters=counters)
    kv.keys.nan_to_num_()
    latent_attention.triton(q, compressed, kv, up, scale, **more)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = latent_attention.triton(q, compressed, kv, up, scale, **more)
    for length in LENGTHS:
        kv.metadata[LENGTH] = length
        for _ in range(3):
            graph.replay()
            assert torch.equal(out, latent_attention.triton(q, compressed, kv, up, scale, **more))
            assert not counters.any()
