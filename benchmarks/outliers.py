"""What it takes to keep columns of outliers in 16 bits while rows are rounded to int8.

python benchmarks/outliers.py OUT.json: 2048 rows. Microseconds of `quantize_rows` with three columns planted: without
outliers, with those above 6 found in the call, and with columns that are known; least of replays of a graph over twelve
distinct inputs. Then of the products of a Llama-3.1-8B shape, by how many columns were found: up to one in SHARE is
gathered, with more all columns stay in 16 bits; in several tiles, a tile timed only when its result is right.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from accel_kernels import Norm, Quantized, int8_linear, quantize_rows
from accel_kernels.gemm.fused_linear import in_passes
from accel_kernels.gemm.int8_linear_triton import Shape, chosen
from accel_kernels.gemm.quantize_rows import SHARE, KnownColumns
from accel_kernels.warmup import warmup
from decode_chain import milliseconds

from accel.bench.machine import commit, machine, now

DEVICE, DTYPE, ROWS, INPUTS = torch.device("cuda"), torch.bfloat16, 2048, 12
PLANTED = [3, 500, 777]
WAYS = {"none": None, "found, above 6": 6.0, "known": torch.tensor(PLANTED)}
PRODUCTS = {  # outputs, inputs, gate, residual
    "qkv": (6144, 4096, False, False),
    "out": (4096, 4096, False, True),
    "gate-up": (14336, 4096, True, False),
    "down": (4096, 14336, False, True),
}
PLAIN = [Shape(128, 128, 128, 8, 3), Shape(128, 128, 128, 8, 4), Shape(64, 128, 128, 4, 4), Shape(128, 128, 128, 4, 3)]
GATED = [Shape(128, 64, 128, 8, 3), Shape(128, 128, 128, 8, 3), Shape(64, 64, 128, 4, 4), Shape(128, 64, 128, 4, 3)]


def measured(columns: int, norm: Norm | None) -> dict:
    inputs = [torch.randn(ROWS, columns, device=DEVICE, dtype=DTYPE) for _ in range(INPUTS)]
    for x in inputs:
        x[:, PLANTED] *= 20
    ours, theirs = (op(inputs[0], norm=norm, outliers=6.0) for op in (quantize_rows.triton, quantize_rows.reference))
    count = int(theirs.count)
    if int(ours.count) != count or not torch.equal(ours.columns[:count], theirs.columns[:count]):
        raise AssertionError(f"{int(ours.count)} outliers found, {count} in the reference")
    found = {"rows": ROWS, "columns": columns, "norm": norm is not None, "outliers": count}
    for name, outliers in WAYS.items():
        given = KnownColumns.of(outliers.to(DEVICE), columns) if isinstance(outliers, torch.Tensor) else outliers
        ms = milliseconds(lambda: [quantize_rows.triton(x, norm=norm, outliers=given) for x in inputs])  # noqa: B023
        found[name] = round(1e3 * ms / INPUTS, 2)
    return found


class Product:
    def __init__(self, name: str):
        self.name = name
        self.n, self.k, self.gate, self.residual = PRODUCTS[name]
        self.shapes = GATED if self.gate else PLAIN
        weights = [torch.randn(self.n, self.k, device=DEVICE, dtype=DTYPE) / self.k**0.5 for _ in range(1 + self.gate)]
        self.exact, self.weights = weights, [self.rounded(one) for one in weights]
        self.more = {"residual": torch.randn(ROWS, self.n, device=DEVICE, dtype=DTYPE)} if self.residual else {}

    def rounded(self, weight: torch.Tensor) -> Quantized:
        rows = quantize_rows(weight)
        return Quantized(rows.data, rows.scales.to(DTYPE))

    def call(self, op, x, weights: list, **more) -> torch.Tensor:
        gate = {"up": weights[1], "activation": "silu"} if self.gate else {}
        return op(x, weights[0], **gate, **self.more, **more)

    def inputs(self) -> Iterator[torch.Tensor]:
        for count in (0, 3, 32, self.k // (4 * SHARE), self.k // SHARE, self.k // SHARE + 1):
            x = torch.randn(ROWS, self.k, device=DEVICE, dtype=DTYPE).clamp(-4, 4)
            x[0, torch.randperm(self.k, device=DEVICE)[:count]] = 20.0
            yield x

    def measured(self) -> dict:
        _, shape = chosen(ROWS, self.n, self.k, self.gate, self.residual, True, DEVICE)
        found = {"product": self.name, "chosen": list(shape), "us": {}}
        for x in self.inputs():
            rows = quantize_rows.triton(x, outliers=6.0)
            exact = self.call(int8_linear.reference, rows._replace(scales=rows.scales.double()), self.weights)
            own = self.call(int8_linear.reference, rows, self.weights).double()
            us = {"bf16": self.microseconds(in_passes, x, self.exact)}
            us["int8, no outliers"] = self.microseconds(int8_linear.triton, quantize_rows.triton(x), self.weights)
            us["rounding"] = round(1e3 * milliseconds(lambda: quantize_rows.triton(x, outliers=6.0)), 1)  # noqa: B023
            for shape in self.shapes:
                off = (self.call(int8_linear.triton, rows, self.weights, shape=shape).double() - exact).norm()
                name = " ".join(map(str, shape[:5]))
                if float(off) > 2 * float((own - exact).norm()):
                    us[name] = f"wrong by {float(off / exact.norm()):.1e}"
                else:
                    us[name] = self.microseconds(int8_linear.triton, rows, self.weights, shape=shape)
            found["us"][f"{int(rows.count)} outliers"] = us
        return found

    def microseconds(self, op, x, weights: list, **more) -> float:
        return round(1e3 * milliseconds(lambda: self.call(op, x, weights, **more)), 1)


def main(path: Path) -> None:
    norm = Norm(torch.ones(4096, device=DEVICE, dtype=DTYPE), None, 1e-5)
    rows = [measured(columns, one) for columns, one in ((4096, norm), (4096, None), (14336, None))]
    result = {"case": "outliers", "date": now(), "commit": commit(), "machine": machine(DEVICE), "us": rows}
    for row in rows:
        print(row)
    products = [Product(name) for name in PRODUCTS]
    with warmup():
        for product in products:
            x = next(product.inputs())
            few = quantize_rows.triton(x, outliers=6.0)
            product.call(int8_linear.triton, quantize_rows.triton(x), product.weights)
            for shape in product.shapes:
                product.call(int8_linear.triton, few, product.weights, shape=shape)
    result["products"] = []
    for product in products:
        result["products"].append(product.measured())
        print(result["products"][-1], flush=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    with torch.no_grad():
        main(Path(sys.argv[1]))
