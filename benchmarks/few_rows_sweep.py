"""Launch shapes of the products of a few rows, for the five products of a Llama-3.1-8B shape.

python benchmarks/few_rows_sweep.py OUT.json: each shape's result against fp32 (at most twice the error of torch's own),
and TB/s of weights by shape and rows, over weights that no cache holds, norm and residual included, in one CUDA graph.
A shape that is fast alone may be slow among other kernels: benchmarks/decode_chain.py tells.
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from accel_kernels import Norm, fused_linear
from accel_kernels.gemm.fused_linear import in_passes
from accel_kernels.gemm.fused_linear_triton import Shape
from accel_kernels.warmup import warmup
from decode_chain import DEVICE, DTYPE, HIDDEN, WORDS, milliseconds, rand, weights

from accel.bench.machine import commit, machine, now

ROWS = (2, 8, 16, 32)
LEAST_BYTES = 8e8  # of weights to a measurement

ONE = [
    Shape(64, 128, 4, 5), Shape(64, 128, 4, 3), Shape(64, 64, 4, 8), Shape(64, 256, 4, 2), Shape(32, 128, 4, 8),
    Shape(32, 256, 4, 4), Shape(32, 256, 8, 4), Shape(16, 256, 4, 6), Shape(16, 512, 4, 3),
]  # fmt: skip
GATED = [
    Shape(64, 128, 4, 4), Shape(64, 128, 4, 3), Shape(64, 64, 4, 5), Shape(128, 64, 8, 4), Shape(32, 128, 4, 4),
    Shape(32, 256, 4, 2), Shape(16, 256, 4, 3),
]  # fmt: skip
CANDIDATES = {"qkv": ONE, "out": ONE, "gate": GATED, "down": ONE, "head": ONE}


class Product:
    """One of the five, over distinct weights."""

    def __init__(self, name: str, layers: list[dict], heads: list[torch.Tensor], norm: Norm):
        self.name = name
        self.weights = heads if name == "head" else [layer[name] for layer in layers]
        self.n, self.k = self.weights[0].shape
        self.weights = self.weights[: max(2, round(LEAST_BYTES / (2 * self.n * self.k)))]
        self.ups = [layer["up"] for layer in layers] if name == "gate" else [None] * len(self.weights)
        self.norm = norm if name in ("qkv", "gate") else None
        self.activation = "silu" if name == "gate" else None
        self.bytes = 2 * self.n * self.k * len(self.weights) * (2 if name == "gate" else 1)

    def inputs(self, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x and the residual."""
        torch.manual_seed(rows)
        return rand(rows, self.k), rand(rows, self.n) if self.name in ("out", "down") else None

    def call(self, x, residual, i: int, shape: Shape) -> torch.Tensor:
        return fused_linear.triton(
            x, self.weights[i], norm=self.norm, up=self.ups[i], activation=self.activation, residual=residual,
            shape=shape,
        )  # fmt: skip

    def all(self, x, residual, shape: Shape) -> None:
        for i in range(len(self.weights)):
            self.call(x, residual, i, shape)

    def errors(self, x, residual):
        """The error of a result for the first weight, relative RMS, as a function; and torch's own."""
        h, up = x.float(), self.ups[0]
        if self.norm is not None:
            h = F.rms_norm(h, (self.k,), self.norm.weight.float(), self.norm.eps)
        right = h @ self.weights[0].float().t()
        if up is not None:
            right = F.silu(right) * (h @ up.float().t())
        if residual is not None:
            right += residual.float()

        def error(y):
            return ((y.float() - right).norm() / right.norm()).item()

        given = {"norm": self.norm, "up": up, "activation": self.activation, "residual": residual}
        return error, error(in_passes(x, self.weights[0], **given))


def speeds(product: Product, rows: int) -> dict[str, float | str]:
    """TB/s by shape, or why there is none."""
    x, residual = product.inputs(rows)
    error, own = product.errors(x, residual)
    found = {}
    for shape in CANDIDATES[product.name]:
        key = " ".join(map(str, shape))
        try:
            mine = error(product.call(x, residual, 0, shape))
        except Exception as reason:
            found[key] = str(reason)[:80]
            continue
        if not mine <= 2 * own:
            found[key] = f"error {mine:.2e}, torch {own:.2e}"
            continue
        took = milliseconds(lambda: product.all(x, residual, shape))  # noqa: B023 (run at once)
        found[key] = round(product.bytes / took / 1e9, 3)
    return found


def main(path: Path) -> None:
    layers, norm = weights(), Norm(rand(HIDDEN), None, 1e-5)
    heads = [rand(WORDS, HIDDEN, spread=HIDDEN**-0.5) for _ in range(2)]
    products = [Product(name, layers, heads, norm) for name in CANDIDATES]
    for rows in (16, 32):  # compiled at once, in threads; more than 2 rows and up to 16 share a kernel
        with warmup():
            for product in products:
                for shape in CANDIDATES[product.name]:
                    product.call(*product.inputs(rows), 0, shape)
    result = {"case": "few-rows-sweep", "date": now(), "commit": commit(), "machine": machine(DEVICE)}
    result |= {"dtype": str(DTYPE), "shape": " ".join(Shape._fields), "TB/s of weights": {}}
    for product in products:
        for rows in ROWS:
            found = result["TB/s of weights"][f"{product.name} {rows}"] = speeds(product, rows)
            print(product.name, rows, found, flush=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    with torch.no_grad():
        main(Path(sys.argv[1]))
