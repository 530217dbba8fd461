"""Attention of a decode step over keys and values in bf16 and in 8 bits, in one CUDA graph: time, and speed of memory.

python benchmarks/kv_cache.py OUT.json [--sweep] [--quick]: the heads of Llama-3.1-8B, several numbers of rows and of
stored tokens. "plain": the kernel for all stores, which the one for 8 bits replaces where it can. --sweep: also other
numbers of shares and registers of the kernel for 8 bits. --quick: one row and 32, 8192 tokens each, and one of 32768.
What a whole token gains depends on the weights that it reads besides: `accel bench llm`.
"""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from accel_kernels import KV, paged_attention
from accel_kernels.attention.paged import paged_attention_triton as paged_attention_kernels
from accel_kernels.attention.paged.kv import LENGTH, metadata_of
from accel_kernels.attention.paged.kv8 import kv8_decode_triton as kv8_decode
from accel_kernels.attention.paged.kv_quantization import rounded
from decode_chain import BLOCK, DEVICE, DIM, DTYPE, HEADS, KV_HEADS, milliseconds, rand

from accel.bench.machine import commit, machine, now

SHAPES = [(rows, stored) for rows in (1, 8, 32) for stored in (8192, 32768)]
QUICK = [(1, 8192), (1, 32768), (32, 8192)]
KINDS = {"bf16": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
MOST = 24 * 2**30  # bytes of all layers together; enough of them that nothing stays in a cache
LEAST = 2**30
CHOSEN = ("CODES_FILL", "MOST_SPLITS", "KV8_BLOCKS", "CODES_REGISTERS")
SWEEP = [
    (4, 64, 8, 128), (4, 32, 8, 128), (2, 32, 8, 128), (4, 64, 4, 128), (3, 64, 8, 168),
]  # fmt: skip


def size(rows: int, stored: int, codes: torch.dtype | None) -> int:
    """Bytes that the attention of one layer reads."""
    head = DIM * DTYPE.itemsize if codes is None else DIM * codes.itemsize + 4
    return rows * stored * 2 * KV_HEADS * head


def store(rows: int, stored: int, codes: torch.dtype | None, layers: int) -> list[KV]:
    columns = stored // BLOCK + 1
    table = torch.arange(rows * columns, device=DEVICE, dtype=torch.int32).view(rows, columns)
    kept = []
    for _ in range(layers):
        pair = [rand(rows * columns, BLOCK, KV_HEADS, DIM) for _ in range(2)]
        scales = [None, None]
        if codes is not None:
            turned = [rounded(t, codes) for t in pair]
            pair, scales = [c for c, _ in turned], [s.mT.contiguous().mT for _, s in turned]
        kept.append((*pair, *scales))
    layers = [(table, *(tensor for tensor in layer if tensor is not None)) for layer in kept]
    where = metadata_of(columns, layers, table.device)
    where[LENGTH] = stored
    split_counters = torch.zeros(rows * KV_HEADS, device=DEVICE, dtype=torch.int32)
    return [
        KV(k, v, table, None, where, layer, False, split_counters, key_scales=ks, value_scales=vs)
        for layer, (k, v, ks, vs) in enumerate(kept)
    ]


def stores(rows: int, stored: int, codes: torch.dtype | None) -> list[KV]:
    """Of enough layers."""
    each = size(rows, stored, None)
    return store(rows, stored, codes, max(1, min(MOST // each, -(-LEAST // each))))


def measured(rows: int, kvs: list[KV]) -> float:
    """Microseconds a layer."""
    qkv, angles = rand(rows, 1, HEADS + 2 * KV_HEADS, DIM), rand(rows, 1, DIM // 2)
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=2)

    def step() -> None:
        for kv in kvs:
            paged_attention(q, k, v, kv, DIM**-0.5, cos=angles, sin=angles)

    return round(1000 * milliseconds(step) / len(kvs), 2)


@contextmanager
def plain():
    """The kernel for all stores takes what the one for 8 bits would."""
    rule, paged_attention_kernels.decodes_codes = paged_attention_kernels.decodes_codes, lambda q, kv: False
    try:
        yield
    finally:
        paged_attention_kernels.decodes_codes = rule


def main(path: Path, sweep: bool, quick: bool) -> None:
    results = []
    for rows, stored in QUICK if quick else SHAPES:
        row = {"rows": rows, "stored": stored}
        for name, codes in KINDS.items():
            kvs = stores(rows, stored, codes)
            us = measured(rows, kvs)
            row |= {f"{name}_us": us, f"{name}_tb_s": round(size(rows, stored, codes) / us / 1e6, 2)}
            if codes is not None:
                with plain():
                    row[f"{name}_plain_us"] = measured(rows, kvs)
            del kvs
        row |= {"int8_times": round(row["bf16_us"] / row["int8_us"], 2)}
        if sweep:
            row["sweep"] = swept(rows, stored)
        results.append(row)
        print(row, flush=True)
    about = "attention of a decode step, heads of Llama-3.1-8B, one CUDA graph, microseconds a layer"
    result = {"case": "kv-cache", "about": about, "date": now(), "commit": commit(), "machine": machine(DEVICE)}
    path.write_text(json.dumps(result | {"rows": results}, indent=2) + "\n")


def swept(rows: int, stored: int) -> list[dict]:
    before, found, kvs = [getattr(kv8_decode, name) for name in CHOSEN], [], stores(rows, stored, torch.int8)
    for values in SWEEP:
        for name, value in zip(CHOSEN, values, strict=True):
            setattr(kv8_decode, name, value)
        found.append(dict(zip(CHOSEN, values, strict=True)) | {"int8_us": measured(rows, kvs)})
        print(found[-1], flush=True)
    for name, value in zip(CHOSEN, before, strict=True):
        setattr(kv8_decode, name, value)
    return found


if __name__ == "__main__":
    with torch.no_grad():
        main(Path(sys.argv[1]), "--sweep" in sys.argv, "--quick" in sys.argv)
