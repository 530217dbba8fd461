"""Attention over stored keys and values in a CUDA graph, microseconds a layer: of a decode step, or of a prompt.

A decode step (kv-cache): heads of Llama-3.1-8B, by rows and stored tokens, in bf16 and in 8 bits; "plain" is the kernel
for all stores, which the one for 8 bits replaces where it can. What a whole token gains depends on the weights that it
reads besides: `accel bench llm`.
A prompt (prompt-attention): our kernel, torch's flash attention and cuDNN's, of prompts that are filled up by ten
tokens, rotation and storing included. `first_ms`: what the host takes to launch the first call of a length beyond the
second. A way is timed only when it is right.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from accel_kernels import KV, paged_attention
from accel_kernels.attention.paged import decode_triton
from accel_kernels.attention.paged import paged_attention_triton as kernels
from accel_kernels.attention.paged.kv import LENGTH, metadata_of
from accel_kernels.attention.paged.kv_quantization import rounded
from torch.nn.attention import SDPBackend, sdpa_kernel

from accel.bench.timing import Clock
from accel.comparison import relative_rms
from benchmarks.kernels.timer import rand, time_us
from benchmarks.study import DEVICE, HALF, TOY, Study

HEADS, KV_HEADS, DIM = (4, 2, 16) if TOY else (32, 8, 128)
BLOCK = 64
SHAPES = ((1, 8192), (1, 32768), (8, 8192), (8, 32768), (32, 8192), (32, 32768))  # rows and tokens that are stored
KINDS = {"bf16": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
MOST, LEAST = 24 * 2**30, 2**30  # bytes of all layers together; enough of them that nothing stays in a cache
UNUSED = 10  # tokens that fill up a prompt
PROMPT_HEADS = {"toy": (4, 2, 16)} if TOY else {"llama-8b": (32, 8, 128), "qwen-0.5b": (14, 2, 64)}
TOKENS = (64,) if TOY else (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
WAYS = {"ours": None, "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def store(
    rows: int, stored: int, codes: torch.dtype | None, layers: int, kv_heads: int = KV_HEADS, dim: int = DIM
) -> list[KV]:
    """One layer after the other, every row with so many tokens. codes: of 8 bits, or None."""
    columns = stored // BLOCK + 1
    table = torch.arange(rows * columns, device=DEVICE, dtype=torch.int32).view(rows, columns)
    kept = []
    for _ in range(layers):
        pair, scales = [rand(rows * columns, BLOCK, kv_heads, dim) for _ in range(2)], [None, None]
        if codes is not None:
            turned = [rounded(t, codes) for t in pair]
            pair, scales = [c for c, _ in turned], [s.mT.contiguous().mT for _, s in turned]
        kept.append((*pair, *scales))
    given = [(table, *(tensor for tensor in layer if tensor is not None)) for layer in kept]
    metadata = metadata_of(columns, given, table.device)
    metadata[LENGTH] = stored
    split_counters = torch.zeros(rows * kv_heads, device=DEVICE, dtype=torch.int32)
    return [
        KV(k, v, table, None, metadata, layer, False, split_counters, key_scales=ks, value_scales=vs)
        for layer, (k, v, ks, vs) in enumerate(kept)
    ]


def layer_bytes(rows: int, stored: int, codes: torch.dtype | None) -> int:
    """Bytes that the attention of one layer reads."""
    head = DIM * 2 if codes is None else DIM * codes.itemsize + 4
    return rows * stored * 2 * KV_HEADS * head


def stores(rows: int, stored: int, codes: torch.dtype | None) -> list[KV]:
    """Of enough layers."""
    each = layer_bytes(rows, stored, None)
    return store(rows, stored, codes, 1 if TOY else max(1, min(MOST // each, -(-LEAST // each))))


def step_us(rows: int, kvs: list[KV]) -> float:
    """Microseconds a layer."""
    qkv, angles = rand(rows, 1, HEADS + 2 * KV_HEADS, DIM), rand(rows, 1, DIM // 2)
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=2)
    return time_us(*(partial(paged_attention, q, k, v, kv, DIM**-0.5, cos=angles, sin=angles) for kv in kvs))


@contextmanager
def changed(module, **values: object) -> Iterator[None]:
    """Inside, a module of kernels has other constants."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def decode(out: Path, quick: bool = False) -> None:
    """Of a decode step. quick: fewer rows and tokens."""
    record = Study("kv-cache", out, "attention of a decode step, heads of Llama-3.1-8B, microseconds a layer", rows=[])
    shapes = ((2, 128),) if TOY else [one for one in SHAPES if not quick or 1 in one or one == (32, 8192)]
    for rows, stored in shapes:
        row: dict = {"rows": rows, "stored": stored}
        for name, codes in KINDS.items():
            kvs = stores(rows, stored, codes)
            us = step_us(rows, kvs)
            row |= {f"{name}_us": us, f"{name}_tb_s": round(layer_bytes(rows, stored, codes) / us / 1e6, 2)}
            if codes is not None:
                with changed(decode_triton, decodes_kv8=lambda q, cos, kv: False):
                    row[f"{name}_plain_us"] = step_us(rows, kvs)
            del kvs
        record.add("rows", row | {"int8_times": round(row["bf16_us"] / row["int8_us"], 2)})


class Prompt:
    """A prompt of so many tokens over a store of one layer, as a graph is captured from it."""

    def __init__(self, heads: int, kv_heads: int, dim: int, tokens: int):
        generator = torch.Generator(DEVICE).manual_seed(tokens)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=DEVICE).to(HALF)

        self.qkv = randn(1, tokens, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], dim=2)
        angle = 6.28 * torch.rand(1, tokens, dim // 2, generator=generator, device=DEVICE)
        self.angles, self.real, self.scale = (angle.cos(), angle.sin()), tokens - UNUSED, dim**-0.5
        blocks = -(-tokens // BLOCK)
        self.table = torch.arange(blocks, device=DEVICE, dtype=torch.int32)[None]
        self.keys, self.values = (randn(blocks, BLOCK, kv_heads, dim) for _ in range(2))
        self.metadata = metadata_of(blocks, [(self.table, self.keys, self.values)], self.table.device)
        self.last = torch.tensor([self.real - 1], device=DEVICE)

    def attended(self, op: Callable, dtype: torch.dtype, dense: Callable | None = None) -> torch.Tensor:
        """(1, real tokens, channels)."""
        kv = KV(self.keys.to(dtype), self.values.to(dtype), self.table, None, self.metadata, 0, is_prefill=True)
        q, k, v, cos, sin = (t.to(dtype) for t in (*self.qkv, *self.angles))
        given = {"cos": cos, "sin": sin, "dense": dense}
        return op(q, k, v, kv._replace(by_address=True, last=self.last), self.scale, **given)[:, : self.real]

    def timed(self, name: str) -> dict[str, float]:
        """By one way. Raises AssertionError where it is wrong."""

        def dense(q, k, v, scale, first, again=False):
            with sdpa_kernel([SDPBackend.MATH] if TOY else [WAYS[name]]):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

        # Summed up in float64 the reference would hold all scores twice: in float32 it is a thousand times nearer.
        truth, own = (self.attended(paged_attention.reference, dtype) for dtype in (torch.float32, HALF))
        with changed(kernels, SHORT=2**30 if name == "ours" else 0):
            run, launched = partial(self.attended, paged_attention.triton, HALF, dense), []
            for _ in range(2):
                clock = Clock()
                run()
                launched.append(clock.taken())
            error, allowed = relative_rms(run(), truth), 2 * relative_rms(own, truth) + 1e-6
            assert error <= allowed, f"{name}: off by {error:.1e}, more than {allowed:.1e}"
            return {"us": time_us(run), "first_ms": round(1000 * max(0.0, launched[0] - launched[1]), 1)}


def prompts(out: Path) -> None:
    """Of a prompt. Lengths come in order, in a process that has not used the way before."""
    record = Study("prompt-attention", out, "attention of a prompt, microseconds a layer", unused=UNUSED, rows=[])
    for (model, heads), name, tokens in product(PROMPT_HEADS.items(), WAYS, TOKENS):
        about = {"model": model, "way": name, "tokens": tokens}
        with record.attempt(**about):
            record.add("rows", about | Prompt(*heads, tokens).timed(name))
