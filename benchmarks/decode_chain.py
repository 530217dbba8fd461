"""The kernels of one token of a Llama-3.1-8B shape in one CUDA graph, without a model around them.

python benchmarks/decode_chain.py OUT.json: what the products, the attention and all of them together take, for several
numbers of rows. What generate() takes beyond that is the model's own small operations, generate()'s, and Python.
"""

import json
import sys
from pathlib import Path

import torch
from accel_kernels import KV, Norm, fused_linear, paged_attention
from accel_kernels.attention.paged.kv import LENGTH, metadata_of

from accel.bench.machine import commit, machine, now

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM, WORDS = 32, 4096, 14336, 32, 8, 128, 128256
BLOCK, STORED = 64, 512
ROWS = (1, 2, 4, 8, 16, 32, 64)
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16


def rand(*shape: int, spread: float = 1.0) -> torch.Tensor:
    return torch.empty(shape, device=DEVICE, dtype=DTYPE).normal_(0, spread)


def weights() -> list[dict[str, torch.Tensor]]:
    """Distinct for every layer: 15 GB with the head, so that nothing stays in a cache."""
    shapes = {
        "qkv": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
        "out": (HIDDEN, HIDDEN),
        "gate": (INNER, HIDDEN),
        "up": (INNER, HIDDEN),
        "down": (HIDDEN, INNER),
    }
    return [{name: rand(*shape, spread=shape[1] ** -0.5) for name, shape in shapes.items()} for _ in range(LAYERS)]


def store(rows: int) -> list[KV]:
    """One layer after the other, every row with STORED tokens."""
    columns = STORED // BLOCK + 1
    table = torch.arange(rows * columns, device=DEVICE, dtype=torch.int32).view(rows, columns)
    kept = [
        (rand(rows * columns, BLOCK, KV_HEADS, DIM), rand(rows * columns, BLOCK, KV_HEADS, DIM)) for _ in range(LAYERS)
    ]
    where = metadata_of(columns, [(table, *pair) for pair in kept], table.device)
    where[LENGTH] = STORED
    split_counters = torch.zeros(rows * KV_HEADS, device=DEVICE, dtype=torch.int32)
    return [KV(k, v, table, None, where, layer, False, split_counters) for layer, (k, v) in enumerate(kept)]


class Token:
    """One step of `rows` rows; `products` and `attention` say which kernels are in it."""

    def __init__(self, layers: list[dict], head: torch.Tensor, norm: Norm, rows: int):
        self.layers, self.head, self.norm, self.rows = layers, head, norm, rows
        self.kvs, self.x = store(rows), rand(rows, HIDDEN)
        self.qkv, self.angles = rand(rows, 1, HEADS + 2 * KV_HEADS, DIM), rand(rows, 1, DIM // 2)

    def step(self, products: bool = True, attention: bool = True) -> None:
        x, qkv, attended = self.x, self.qkv, self.x
        for layer, kv in zip(self.layers, self.kvs, strict=True):
            if products:
                qkv = fused_linear(x, layer["qkv"], norm=self.norm).view(self.rows, 1, -1, DIM)
            if attention:
                q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=2)
                attended = paged_attention(q, k, v, kv, DIM**-0.5, cos=self.angles, sin=self.angles).view(
                    self.rows, HIDDEN
                )
            if products:
                x = fused_linear(attended, layer["out"], residual=x)
                h = fused_linear(x, layer["gate"], norm=self.norm, up=layer["up"], activation="silu")
                x = fused_linear(h, layer["down"], residual=x)
        if products:
            fused_linear(x, self.head)


def milliseconds(run) -> float:
    """Least of several replays of its graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return round(min(times), 3)


def main(path: Path) -> None:
    layers, head, norm = weights(), rand(WORDS, HIDDEN, spread=HIDDEN**-0.5), Norm(rand(HIDDEN), None, 1e-5)
    rows = []
    for count in ROWS:
        token = Token(layers, head, norm, count)
        rows.append(
            {
                "rows": count,
                "products_ms": milliseconds(lambda: token.step(attention=False)),  # noqa: B023 (run at once)
                "attention_ms": milliseconds(lambda: token.step(products=False)),  # noqa: B023
                "all_ms": milliseconds(token.step),
            }
        )
        print(rows[-1], flush=True)
    about = f"kernels of a token, Llama-3.1-8B shape, {STORED} tokens stored, one CUDA graph"
    result = {"case": "decode-chain", "about": about, "date": now(), "commit": commit(), "machine": machine(DEVICE)}
    path.write_text(json.dumps(result | {"dtype": "bfloat16", "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    with torch.no_grad():
        main(Path(sys.argv[1]))
