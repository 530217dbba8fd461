"""A warmup at one size compiles the kernels of the others: no call of a new size waits for a compiler."""

from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("triton")

from accel_kernels import warmup as warmup
from accel_kernels.attention import flash_attention_triton as attention
from accel_kernels.attention.packed import packed_attention_triton as packed
from accel_kernels.elementwise import gated_triton as gated
from accel_kernels.elementwise import softmax_triton as softmax
from accel_kernels.gemm.quantized import dequantize_triton
from accel_kernels.gemm.quantized_weight import Quantized
from accel_kernels.image import image_sum_triton as image_sum
from accel_kernels.image import upsample_convolve_triton as convolve
from accel_kernels.image import upsample_triton as upsample
from accel_kernels.moe import experts_triton
from accel_kernels.moe.tiles import DEQUANTIZED, GEMV, TILES
from accel_kernels.moe.weights import ExpertWeights, Gating
from accel_kernels.norm import group_norm_triton as group_norm
from accel_kernels.norm import layer_norm_triton as layer_norm
from accel_kernels.norm.channel_stats_triton import GROWTH
from triton.runtime.jit import JITFunction

MODULES = (
    attention, dequantize_triton, experts_triton, gated, group_norm, image_sum, layer_norm, packed, softmax, upsample,
    convolve,
)  # fmt: skip
SIZES = [(2, 64, 64), (1, 96, 136), (16, 8, 8), (2, 5, 7), (3, 1, 1), (1, 256, 256), (1, 40, 72), (2, 512, 384)]


def specialized(parameter, value):
    """What of an argument Triton compiles a kernel of its own for."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if parameter.is_constexpr or value is None:
        return value
    if type(value) is not int:
        return type(value)
    wide = abs(value) >= 2**31
    return wide if parameter.do_not_specialize else (wide, value == 1, value % 16 == 0)


@pytest.fixture
def launched(monkeypatch):
    """Kernels that were launched so far, each as what it is compiled for."""
    seen = set()

    def launch(kernel, grid, *args, **meta):
        source = JITFunction(kernel.fn, **kernel.kwargs)
        assert not any(p.is_constexpr and p.do_not_specialize for p in source.params)  # it would compile at every call
        given = dict(zip(source.arg_names, args, strict=False)) | meta
        key = [(p.name, specialized(p, given.pop(p.name))) for p in source.params]
        seen.add((source.fn.__name__, tuple(key), tuple(sorted(given.items()))))

    for module in MODULES:
        monkeypatch.setattr(module, "launch", launch)
    return seen


@contextmanager
def warmed_up():
    token = warmup._WARMUP.set(warmup.Warmup())
    try:
        yield
    finally:
        warmup._WARMUP.reset(token)


def image(channels, n, h, w, dtype=torch.float16):
    return torch.empty((n, channels, h, w), device="meta", dtype=dtype, memory_format=torch.channels_last)


def norms(channels, n, h, w):
    weight = torch.empty(channels, device="meta", dtype=torch.float16)
    x, add = image(channels, n, h, w), torch.empty(n, channels, device="meta", dtype=torch.float16)
    group_norm.group_norm(x, 32, weight, weight, 1e-5, add=add, shift=weight, silu=True)
    group_norm.group_norm(x, 32, weight, weight, 1e-5, channel_stats=image_sum.image_sum(x, x, weight)[1])
    layer_norm.layer_norm(x.permute(0, 2, 3, 1).contiguous(), weight, weight, 1e-5)


def sums(channels, n, h, w):
    x = image(channels, n, h, w)
    for residual, channel_stats in ((x, True), (None, True), (x, False)):
        image_sum.image_sum(x, residual, channel_stats=channel_stats)
    image_sum.image_concat(x, x)


def upsampled(channels, n, h, w):
    x = image(channels, n, h, w)
    upsample.upsample(x)
    gated.geglu(torch.empty((n, h * w, 2 * channels), device="meta", dtype=torch.float16))
    weight = image(channels, channels, 3, 3)
    convolve.upsample_convolve(x, weight)


@pytest.mark.parametrize("work", [norms, sums, upsampled], ids=lambda work: work.__name__)
@pytest.mark.parametrize("first", [(2, 64, 64), (2, 8, 8), (1, 512, 512)], ids=str)
@pytest.mark.share(2)
def test_images(launched, work, first):
    for channels in (320, 96):
        with warmed_up():
            work(channels, *first)
    known = set(launched)
    assert known
    for size in [size for size in SIZES if size[1] * size[2] <= GROWTH * first[1] * first[2]]:
        for channels in (320, 96):
            work(channels, *size)
    assert launched == known


@pytest.mark.parametrize("first", [16, 4096, 20000])
def test_scores(launched, first):
    with warmed_up():
        softmax.softmax(torch.empty(8, first, device="meta"), 0.5, torch.float16)
    known = set(launched)
    for columns in (16, 1024, 4096, 9216, 16384, 65536):
        softmax.softmax(torch.empty(8, columns, device="meta"), 0.5, torch.float16)
    assert launched == known


def test_prompts(launched):
    """Cross-attention: any number of pixels, a prompt of up to 128 tokens."""

    def cross_attention(batch, queries, keys):
        q, kv = (torch.empty((batch, n, 8, 40), device="meta", dtype=torch.float16) for n in (queries, keys))
        attention.attention(q.transpose(1, 2), *(kv.transpose(1, 2),) * 2)

    cross_attention(2, 4096, 77)
    known = set(launched)
    for shape in ((1, 99, 77), (3, 5040, 8), (2, 64, 128)):
        cross_attention(*shape)
    assert launched == known


@pytest.mark.share(1)
@pytest.mark.parametrize(("dim", "columns"), [(64, 0), (80, 0), (256, 0), (64, 512)])
def test_sequences(launched, dim, columns):
    """Any number of them, tokens and lengths; columns: of tables of distances."""

    def encoder(tokens, sequences, longest):
        qkv = torch.empty((tokens, 3, 12, dim), device="meta", dtype=torch.float16)
        starts = torch.empty(sequences + 1, device="meta", dtype=torch.int32)
        table = torch.empty((12, tokens, columns), device="meta", dtype=torch.float16).transpose(0, 1)
        places = torch.empty(1023, device="meta", dtype=torch.int32)
        more = {"by_query": table, "by_key": table, "places": places} if columns else {}
        packed.packed_attention(*qkv.unbind(1), starts, 0.1, longest=longest, **more)

    with warmed_up():
        encoder(77, 3, 50)
    known = set(launched)
    for size in ((5, 1, 5), (4100, 200, 31), (700, 1, 700), (20000, 65, 512), (32 * 729, 32, 729)):
        encoder(*size)
    assert launched == known


@pytest.mark.parametrize(("first", "stored"), [(1, "rows"), (3000, "columns"), (3000, "int8"), (1, "int4")])
def test_tokens_of_experts(launched, first, stored):
    """Every tile that may be chosen, by size or by timing."""

    def stack(*shape):
        return torch.empty(16, *shape, device="meta", dtype=torch.bfloat16)

    def quantized(rows, columns, number, per=1, group=None):
        data = torch.empty(rows, columns // per, device="meta", dtype=number)
        return Quantized.of(data, torch.empty(rows, columns // (group or columns), device="meta", dtype=torch.bfloat16))

    if stored.startswith("int"):
        how = (torch.int8,) if stored == "int8" else (torch.int32, 8, 32)
        weights = ExpertWeights(quantized(16 * 384, 256, *how), quantized(16 * 256, 192, *how))
    elif stored == "columns":
        stacks = stack(256, 384).transpose(1, 2), stack(192, 256).transpose(1, 2)
        weights = ExpertWeights(*stacks, Gating(limit=7.0), True, stack(384), stack(256))
    else:
        weights = ExpertWeights(stack(384, 256), stack(256, 192))

    def multiplied(tokens, **how):
        x = torch.empty(tokens, 256, device="meta", dtype=torch.bfloat16)
        index = torch.empty(tokens, 4, device="meta", dtype=torch.int64)
        experts_triton.experts(x, index, x[:, :4].contiguous(), weights, **how)

    with warmed_up():
        multiplied(first)
    known = set(launched)
    for tokens in (1, 5, 17, 4099):
        multiplied(tokens)
        for tile in (*TILES, *(DEQUANTIZED if stored.startswith("int") else ()), GEMV):
            multiplied(tokens, tile=tile)
    assert launched == known
