"""Attention of a prompt in a CUDA graph: our kernel over the store, torch's flash attention and cuDNN's, by length.

python benchmarks/prompt_attention.py OUT.json [--toy]: heads of Llama-3.1-8B and of Qwen2.5-0.5B, prompts that are
filled up by ten tokens; microseconds a layer, rotation and storing included. `first_ms`: what the host takes to launch
the first call of a length beyond the second, in the order of the lengths, in a process that has not used the way
before; kernels of ours are compiled then. Each way is timed only when it is right. --toy: tiny shapes on a CPU, in
Triton's interpreter, where torch has one way of its own.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

TOY = "--toy" in sys.argv
if TOY:
    os.environ["TRITON_INTERPRET"] = "1"

from accel_kernels import KV, paged_attention  # noqa: E402
from accel_kernels.attention.paged import paged_attention_triton as kernels  # noqa: E402
from accel_kernels.attention.paged.kv import metadata_of  # noqa: E402
from int8_linear import milliseconds  # noqa: E402

from accel.bench.machine import commit, machine, now  # noqa: E402

DEVICE, DTYPE = torch.device("cpu" if TOY else "cuda"), torch.float32 if TOY else torch.bfloat16
BLOCK, UNUSED = 64, 10
HEADS = {"toy": (4, 2, 16)} if TOY else {"llama-8b": (32, 8, 128), "qwen-0.5b": (14, 2, 64)}
TOKENS = (64,) if TOY else (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
LAYERS = 1 if TOY else 8  # of a graph
WAYS = {"ours": None, "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


class Prompt:
    """A prompt of so many tokens over a store of one layer, as a graph is captured from it."""

    def __init__(self, heads: int, kv_heads: int, dim: int, tokens: int):
        generator = torch.Generator(DEVICE).manual_seed(tokens)

        def rand(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=DEVICE).to(DTYPE)

        self.qkv = rand(1, tokens, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], dim=2)
        angle = 6.28 * torch.rand(1, tokens, dim // 2, generator=generator, device=DEVICE)
        self.angles, self.real, self.scale = (angle.cos(), angle.sin()), tokens - UNUSED, dim**-0.5
        blocks = -(-tokens // BLOCK)
        self.table = torch.arange(blocks, device=DEVICE, dtype=torch.int32)[None]
        self.keys, self.values = (rand(blocks, BLOCK, kv_heads, dim) for _ in range(2))
        self.metadata = metadata_of(blocks, [(self.table, self.keys, self.values)], self.table.device)
        self.last = torch.tensor([self.real - 1], device=DEVICE)

    def attended(self, op, dtype: torch.dtype, dense=None) -> torch.Tensor:
        """(1, real tokens, channels)."""
        kv = KV(self.keys.to(dtype), self.values.to(dtype), self.table, None, self.metadata, 0, is_prefill=True)
        q, k, v, cos, sin = (t.to(dtype) for t in (*self.qkv, *self.angles))
        given = {"cos": cos, "sin": sin, "dense": dense}
        return op(q, k, v, kv._replace(by_address=True, last=self.last), self.scale, **given)[:, : self.real]


@contextmanager
def way(name: str) -> Iterator:
    """Inside, attention in a graph goes this way; gives what torch's is asked by."""

    def dense(q, k, v, scale, first, again=False):
        with sdpa_kernel([SDPBackend.MATH] if TOY else [WAYS[name]]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

    before, kernels.SHORT = kernels.SHORT, 2**30 if name == "ours" else 0
    try:
        yield dense
    finally:
        kernels.SHORT = before


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).pow(2).mean().sqrt())


def seconds(run) -> float:
    """Of the host, until it has launched."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measured(heads: tuple[int, int, int], tokens: int, name: str) -> dict[str, float]:
    prompt = Prompt(*heads, tokens)
    # Summed up in float64 the reference would hold all scores twice: in float32 it is a thousand times nearer.
    truth, own = (prompt.attended(paged_attention.reference, dtype) for dtype in (torch.float32, DTYPE))
    with way(name) as dense:
        first, second = (seconds(lambda: prompt.attended(paged_attention.triton, DTYPE, dense)) for _ in range(2))
        error = off(prompt.attended(paged_attention.triton, DTYPE, dense), truth)
        if not error <= 2 * off(own, truth) + 1e-6:
            raise AssertionError(f"{name}: off by {error:.1e}, torch's own attention by {off(own, truth):.1e}")
        if TOY:
            return {"first_ms": round(1000 * (first - second), 2)}
        ms = milliseconds(lambda: [prompt.attended(paged_attention.triton, DTYPE, dense) for _ in range(LAYERS)], 20)
    return {"us": round(1000 * ms / LAYERS, 2), "first_ms": round(1000 * max(0.0, first - second), 1)}


def main(path: Path) -> None:
    result = {"case": "prompt-attention", "date": now(), "commit": commit(), "machine": machine(DEVICE)}
    result |= {"dtype": str(DTYPE), "heads": HEADS, "unused": UNUSED, "rows": {}}
    for model, heads in HEADS.items():
        by_way = {name: {str(tokens): measured(heads, tokens, name) for tokens in TOKENS} for name in WAYS}
        result["rows"][model] = by_way
        path.write_text(json.dumps(result, indent=1) + "\n")
        for tokens in TOKENS:
            print(model, tokens, {name: found[str(tokens)] for name, found in by_way.items()}, flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main(Path(sys.argv[1]))
