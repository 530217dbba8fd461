"""The decode kernel over codes of 8 bits: every length, with NaN around what is stored."""

import math

import pytest
import torch
import torch.nn.functional as F
from accel_kernels import KV
from accel_kernels.attention.paged.decode_triton import decode, decodes_kv8
from accel_kernels.attention.paged.kv import LENGTH, PADDING_MASK, metadata_of
from accel_kernels.attention.paged.kv_quantization import rounded
from accel_kernels.device import Feature, has

from accel.llm.attention.rotary import SmallStore
from accel.llm.runtime.kv_quantization import KV_DTYPES

ROWS, COLUMNS, KV_HEADS = 3, 129, 8
KINDS = ("int8", "fp8")
pytestmark = pytest.mark.usefixtures("exact")
LENGTHS = (0, 1, 15, 16, 63, 64, 65, 127, 1000, 4097, 8190)


def made(kind, dtype, length, group=4, dim=128):
    """A call with `length` tokens stored in each row, blocks in any order; behind them is NaN, or the largest code."""
    if kind == "fp8" and not has(torch.device("cuda"), Feature.FLOAT8):
        pytest.skip("no 8-bit floats here")
    table = torch.randperm(ROWS * COLUMNS, device="cuda").view(ROWS, COLUMNS).int()
    pairs = []
    for _ in range(2):
        codes, scales = rounded(
            torch.randn(ROWS * COLUMNS, 64, KV_HEADS, dim, device="cuda", dtype=dtype), KV_DTYPES[kind]
        )
        pairs.append((codes, scales.mT.contiguous().mT))
    kept = (pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1])
    where = metadata_of(COLUMNS, [(table, *kept)], table.device)
    where[LENGTH] = length
    kv = KV(pairs[0][0], pairs[1][0], table, None, where, 0, key_scales=pairs[0][1], value_scales=pairs[1][1])
    blocks, places = kv.slots(length, COLUMNS * 64)
    for codes, scales in pairs:
        codes.view(torch.int8)[blocks, places] = 127  # NaN in float8_e4m3fn
        scales[blocks, places] = math.nan
    heads = group * KV_HEADS
    both = torch.randn(ROWS, 1, heads + 2 * KV_HEADS, dim, device="cuda", dtype=dtype)
    angles = torch.rand(ROWS, 1, dim // 2, device="cuda") * 6.28
    q, k, v = both.split([heads, KV_HEADS, KV_HEADS], dim=2)
    assert decodes_kv8(q, None, kv)
    return q, k, v, kv, dim**-0.5, {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}


def errors(got, q, kv, scale, kwargs, length, seen=None):
    """The largest error of `got`, and that of torch's attention in q's dtype, over what is stored now."""
    turned = SmallStore(q)
    turned(q, q, q, 1.0, **kwargs)
    heads = turned.keys
    found = []
    for dtype in (torch.float64, q.dtype):
        keys, values = (t.to(dtype).transpose(1, 2) for t in kv.read(length + 1, torch.float32))
        out = F.scaled_dot_product_attention(
            heads.to(dtype).transpose(1, 2), keys, values, attn_mask=seen, scale=scale, enable_gqa=True
        )
        found.append(out.transpose(1, 2).flatten(2).double())
    exact, theirs = found
    peak = exact.abs().max()
    return float((got.double() - exact).abs().max() / peak), float((theirs - exact).abs().max() / peak)


@pytest.fixture
def poisoned(monkeypatch):
    def empty(*args, make=torch.empty, **kwargs):
        tensor = make(*args, **kwargs)
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", empty)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_is_as_exact_as_torch(length, kind, dtype, poisoned):
    q, k, v, kv, scale, kwargs = made(kind, dtype, length)
    got = decode(q, k, v, kv, scale, **kwargs)
    ours, theirs = errors(got, q, kv, scale, kwargs, length)
    assert ours <= 2 * theirs


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8])
def test_every_group_of_heads(group, dim, poisoned):
    q, k, v, kv, scale, kwargs = made("int8", torch.bfloat16, 777, group, dim)
    got = decode(q, k, v, kv, scale, **kwargs)
    ours, theirs = errors(got, q, kv, scale, kwargs, 777)
    assert ours <= 2 * theirs


@pytest.mark.parametrize("kind", KINDS)
def test_both_kernels_store_the_same(kind):
    """Up to a product and sum that one kernel rounds once and the other twice, which may move a code by one."""
    stores = []
    for kv8 in (False, True):
        torch.manual_seed(0)
        q, k, v, kv, scale, kwargs = made(kind, torch.bfloat16, 1000)
        decode(q, k, v, kv, scale, kv8=kv8, **kwargs)
        stores.append(((kv.keys, kv.values), (kv.key_scales, kv.value_scales)))
    (codes, scales), (others, other_scales) = stores
    for one, other in zip(codes, others, strict=True):
        assert int((one.view(torch.int8).short() - other.view(torch.int8).short()).abs().sum()) <= 3
    for one, other in zip(scales, other_scales, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [1e-20, 1e-6, 1e6])
def test_values_of_any_size_count(size):
    """What a weight with the scale of its value in it could lose or overflow: half the values much smaller."""
    q, k, v, kv, scale, kwargs = made("int8", torch.bfloat16, 3000)
    kv.value_scales[:, ::2] *= size
    got = decode(q, k, v, kv, scale, **kwargs)
    ours, theirs = errors(got, q, kv, scale, kwargs, 3000)
    assert ours <= 2 * theirs


def test_heads_of_zeros_and_padding_are_nothing():
    q, k, v, kv, scale, kwargs = made("int8", torch.bfloat16, 700)
    kv.value_scales[:, 5:40] = 0.0  # of some blocks behind the text, too
    kv.values[:, 5:40] = 0
    room = kv.table.shape[1] * kv.block
    valid = torch.arange(room, device="cuda") >= 130 * torch.arange(ROWS, device="cuda").view(-1, 1)
    valid[:, 700] = True  # the new token
    kv.metadata[PADDING_MASK] = valid.data_ptr()
    kv = kv._replace(padding_mask=valid)
    got = decode(q, k, v, kv, scale, **kwargs)
    ours, theirs = errors(got, q, kv, scale, kwargs, 700, seen=valid[:, None, None, :701])
    assert ours <= 2 * theirs


def test_a_value_that_is_not_finite_shows():
    q, k, v, kv, scale, kwargs = made("int8", torch.bfloat16, 500)
    kv.value_scales[kv.table[0, 1].long(), 3, 0] = math.nan
    got = decode(q, k, v, kv, scale, **kwargs).unflatten(-1, (32, 128))
    assert got[0, 0, :4].isnan().all() and got[0, 0, 4:].isfinite().all() and got[1:].isfinite().all()


def test_a_graph_replays_it_over_growing_texts():
    q, k, v, kv, scale, kwargs = made("int8", torch.bfloat16, 100)
    decode(q, k, v, kv, scale, **kwargs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = decode(q, k, v, kv, scale, **kwargs)
    for length in range(100, 700, 1):
        kv.metadata[LENGTH] = length
        graph.replay()
        if length % 97 == 0:
            ours, theirs = errors(got, q, kv, scale, kwargs, length)
            assert ours <= 2 * theirs
