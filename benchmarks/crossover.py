"""From how many rows on products round them: both ways by shape, on this card, for weights in int8 and in fp8.

python benchmarks/crossover.py OUT.json [--toy]: microseconds of the product by the weight as it lies, rows in 16 bits
(`quantized_linear`), and of rounding rows and multiplying 8 bits by 8 bits (`quantize_rows`, then `int8_linear` or
`fp8_linear`), norm, gate and residual included in both; of Llama-3.1-8B's shape and of one that is 1024 wide. `from`:
the least number of rows, of those measured, from which rounding is faster all the way; None where it never is. All is
written as soon as it is known. --toy: tiny shapes on a CPU, in Triton's interpreter.
"""

import json
import sys
import time
from pathlib import Path

import torch
from int8_linear import DEVICE, DTYPE, SHAPES, TOY, Product, microseconds, rand

from accel.bench.machine import commit, machine, now

from accel_kernels import Norm, fp8_linear, int8_linear, quantize_rows, quantized_linear  # isort: skip
from accel_kernels.gemm.fused_linear import MOST_ROWS  # isort: skip
from accel_kernels.warmup import warmup  # isort: skip

ROWS = (3, 17) if TOY else (8, 16, 24, 32, 40, 48, 56, MOST_ROWS)
WIDE = [name for name in SHAPES if name != "head"]  # no activation option rounds the rows of a head
NARROW = {  # outputs, inputs, gate, residual, rows at most, products of a layer; 1024 wide
    "1024 qkv": (1536, 1024, False, False, MOST_ROWS, 32),
    "1024 out": (1024, 1024, False, True, MOST_ROWS, 32),
    "1024 gate-up": (4096, 1024, True, False, MOST_ROWS, 32),
    "1024 down": (1024, 4096, False, True, MOST_ROWS, 32),
}
NORMED = ("qkv", "gate-up")


class Ways:
    """Both ways to multiply so many rows by one product's weights of one kind."""

    def __init__(self, product: Product, kind: str, rows: int):
        self.sets, x = getattr(product, kind), rand(rows, product.k)
        norm = Norm(rand(product.k), None, 1e-5) if product.name.endswith(NORMED) else None
        number = self.sets[0][0].data.dtype
        kept = product.caller(quantized_linear, x, rows, norm=norm)
        times = int8_linear if kind == "int8" else fp8_linear

        def rounded(weights: list):
            return product.caller(times, quantize_rows(x, norm=norm, dtype=number), rows)(weights)

        self.ways = {"kept": kept, "rounded": rounded}

    def microseconds(self) -> dict[str, float]:
        return {name: microseconds(way, self.sets) for name, way in self.ways.items()}


def least(us: dict[str, dict[str, float]]) -> int | None:
    """us: by rows, in their order."""
    found = None
    for rows, times in reversed(us.items()):
        if times["rounded"] >= times["kept"]:
            break
        found = int(rows)
    return found


def main(path: Path) -> dict:
    start = time.perf_counter()
    SHAPES.update(NARROW)
    products = [Product(name) for name in (*WIDE, *NARROW)]
    kinds = ("int8", "fp8") if DEVICE.type == "cuda" else ("int8",)
    with warmup():  # compiled at once, in threads
        for product in products:
            for kind in kinds:
                for rows in ROWS:
                    made = Ways(product, kind, rows)
                    for way in made.ways.values():
                        way(made.sets[0])
    result = {"case": "crossover", "date": now(), "commit": commit(), "machine": machine(DEVICE), "dtype": str(DTYPE)}
    result["compiled_s"] = round(time.perf_counter() - start, 1)
    result["us"], result["from"] = {}, {}
    for product in products:
        for kind in kinds:
            name = f"{product.name} {kind}"
            us = {str(rows): Ways(product, kind, rows).microseconds() for rows in ROWS}
            result["us"][name], result["from"][name] = us, least(us)
            print(name, us, "from", least(us), flush=True)
            result["took_s"] = round(time.perf_counter() - start, 1)
            path.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    with torch.no_grad():
        main(Path(sys.argv[1]))
