"""Products of many rows in 8 bits, for the five products of a Llama-3.1-8B shape, against bf16.

python benchmarks/int8_linear.py OUT.json [--toy]: microseconds, and tera-operations a second of the products
alone, by shape and rows: bf16 (cuBLAS and what follows it), torch._int_mm, the same with a pass for what follows,
int8_linear in several tiles, float8 through torch._scaled_mm; then quantize_rows, outlier columns, and the sum over the
layers of one prefill. A tile is timed only when its result is right. --toy: tiny shapes on a CPU, in Triton's
interpreter.
"""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch

TOY = "--toy" in sys.argv
if TOY:
    os.environ["TRITON_INTERPRET"] = "1"

from accel_kernels import Norm, Quantized, fp8_linear, hopper_gemm, int8_linear, quantize_rows  # noqa: E402
from accel_kernels.gemm.fused_linear import in_passes as full_in_passes  # noqa: E402
from accel_kernels.gemm.int8_linear import in_passes, integer_product  # noqa: E402
from accel_kernels.gemm.int8_linear_triton import Shape  # noqa: E402
from accel_kernels.warmup import warmup  # noqa: E402

from accel.bench.machine import commit, machine, now  # noqa: E402

DEVICE, DTYPE = torch.device("cpu" if TOY else "cuda"), torch.bfloat16
FP8 = torch.float8_e4m3fn
UNIT = 64 if TOY else 1  # what toy sizes are smaller by
LAYERS = 32
ROWS = (8, 33) if TOY else (128, 512, 2048, 8192)
SHAPES = {  # outputs, inputs, gate, residual, rows at most, products of a layer
    "qkv": (6144, 4096, False, False, 8192, LAYERS),
    "out": (4096, 4096, False, True, 8192, LAYERS),
    "gate-up": (14336, 4096, True, False, 8192, LAYERS),
    "down": (4096, 14336, False, True, 8192, LAYERS),
    "head": (128256, 4096, False, False, 512, 0),
}
PLAIN = [
    Shape(128, 256, 128, 8, 3), Shape(128, 256, 128, 8, 4), Shape(128, 256, 128, 8, 4, 16),
    Shape(128, 256, 64, 8, 6), Shape(256, 128, 128, 8, 4),
    Shape(128, 128, 128, 8, 4), Shape(128, 128, 128, 4, 3), Shape(64, 256, 128, 4, 4), Shape(64, 128, 128, 4, 4),
    Shape(64, 64, 128, 4, 4),
]  # fmt: skip
GATED = [
    Shape(128, 128, 128, 8, 3), Shape(128, 128, 128, 8, 4), Shape(128, 128, 128, 8, 4, 16),
    Shape(256, 64, 128, 8, 4), Shape(128, 64, 128, 4, 3), Shape(64, 64, 128, 4, 4),
]  # fmt: skip
if TOY:
    PLAIN, GATED = [Shape(32, 64, 64, 4, 2), Shape(16, 32, 32, 4, 2)], [Shape(32, 32, 64, 4, 2)]


def rand(*shape: int, spread: float = 1.0) -> torch.Tensor:
    return torch.empty(shape, device=DEVICE, dtype=DTYPE).normal_(0, spread)


def milliseconds(run, repeats: int) -> float:
    """Least of three replays of a graph of so many runs, a run of them: launching costs the host more than a kernel."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    times = []
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / repeats)
    return min(times)


def microseconds(run, sets=(None,)) -> float:
    """A run of each of these sets of weights, on average: together more than the L2 cache holds."""

    def all_of_them():
        for one in sets:
            run() if one is None else run(one)

    if not TOY:
        return round(1000 * milliseconds(all_of_them, max(1, 6 // len(sets))) / len(sets), 2)
    start = time.perf_counter()
    all_of_them()
    return round(1e6 * (time.perf_counter() - start) / len(sets), 2)


def by_row(weight: torch.Tensor, dtype: torch.dtype) -> Quantized:
    rows = quantize_rows(weight, dtype=dtype)
    return Quantized(rows.data, rows.scales)


class Product:
    """One of the five, in all formats."""

    def __init__(self, name: str):
        n, k, self.gate, self.residual, self.most_rows, self.times = SHAPES[name]
        self.name, self.n, self.k = name, n // UNIT, k // UNIT
        count = 2 if self.gate else 1
        self.sets = [
            [rand(self.n, self.k, spread=self.k**-0.5) for _ in range(count)] for _ in range(1 if name == "head" else 3)
        ]
        self.int8, self.fp8 = ([[by_row(w, dtype) for w in one] for one in self.sets] for dtype in (torch.int8, FP8))
        self.tiles = GATED if self.gate else PLAIN

    def caller(self, op, x, rows: int, **more):
        """The product of x and one set of weights, by this function."""
        residual = rand(rows, self.n) if self.residual else None

        def call(weights: list):
            gate = {"up": weights[1], "activation": "silu"} if self.gate else {}
            return op(x, weights[0], residual=residual, **gate, **more)

        return call

    def operations(self, rows: int) -> int:
        return 2 * rows * self.n * self.k * (2 if self.gate else 1)


def agree(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Both rounded once from the same float32, up to its last bits; the interpreter cuts bf16 off."""
    found, wanted = found.double(), wanted.double()
    step = wanted.abs() * 2**-7 + wanted.abs().max() * 1e-5
    return bool(((found - wanted).abs() <= step).all())


def measured(product: Product, rows: int) -> dict:
    torch.manual_seed(rows)
    x = rand(rows, product.k)
    q, q8 = quantize_rows(x), quantize_rows(x, dtype=FP8)
    passes = product.caller(in_passes, q, rows)
    us = {
        "bf16": microseconds(product.caller(full_in_passes, x, rows), product.sets),
        "_int_mm": microseconds(lambda one: [integer_product(q.data, w.data) for w in one], product.int8),
        "_int_mm and a pass": microseconds(passes, product.int8),
        "quantize_rows": microseconds(lambda: quantize_rows(x)),
    }
    torch.manual_seed(rows + 1)
    right, tiles = product.caller(in_passes, q, rows)(product.int8[0]), {}
    calls = {" ".join(map(str, shape)): partial(int8_linear.triton, shape=shape) for shape in product.tiles}
    if hopper_gemm.supports(q, product.int8[0][0]) is None:
        calls["hopper_gemm"] = hopper_gemm.triton
    for key, op in calls.items():
        torch.manual_seed(rows + 1)  # the same residual
        call = product.caller(op, q, rows)
        try:
            found = call(product.int8[0])
        except Exception as reason:
            tiles[key] = str(reason)[:80]
            continue
        if not agree(found, right):
            tiles[key] = f"wrong by {float((found.double() - right.double()).abs().max()):.2e}"
            continue
        tiles[key] = microseconds(call, product.int8)
    times = {key: value for key, value in tiles.items() if isinstance(value, float)}
    if times:
        us["int8_linear"] = min(times.values())
    us["int8_linear, tile by size"] = microseconds(product.caller(int8_linear.triton, q, rows), product.int8)
    if fp8_linear.supports(q8, product.fp8[0][0]) is None:
        for fast in (False, True):
            key = "fp8_linear, fast" if fast else "fp8_linear"
            us[key] = microseconds(product.caller(fp8_linear.triton, q8, rows, fast=fast), product.fp8)
    rates = {
        key: round(product.operations(rows) / value / 1e6, 1) for key, value in us.items() if key != "quantize_rows"
    }
    return {
        "us": us, "TOP/s": rates, "tiles_us": tiles, "tile": min(times, key=times.get, default=None),
    }  # fmt: skip


def rounding(rows: int) -> dict:
    """quantize_rows in all its ways, and what outlier columns cost a product. us."""
    k, n = 4096 // UNIT, 6144 // UNIT
    x, weight, norm = rand(rows, k), by_row(rand(n, k, spread=k**-0.5), torch.int8), Norm(rand(k), None, 1e-5)
    x[:, :6] *= 30
    columns = torch.arange(6, device=DEVICE)
    wide = rand(rows, 14336 // UNIT)
    found = {
        "4096": microseconds(lambda: quantize_rows(x)),
        "4096, norm": microseconds(lambda: quantize_rows(x, norm=norm)),
        "4096, norm, float8": microseconds(lambda: quantize_rows(x, norm=norm, dtype=FP8)),
        "4096, norm, 6 columns": microseconds(lambda: quantize_rows(x, norm=norm, outliers=columns)),
        "4096, threshold": microseconds(lambda: quantize_rows(x, outliers=12.0)),
        "14336": microseconds(lambda: quantize_rows(wide)),
    }
    for count in (0, 6, 20, 100):
        rows_of = quantize_rows(x, outliers=torch.arange(min(count, k), device=DEVICE)) if count else quantize_rows(x)
        found[f"product, {count} columns"] = microseconds(partial(int8_linear.triton, rows_of, weight))
    return found


def prefill(results: dict, rows: int) -> dict[str, float]:
    """Milliseconds of the products of all layers, what rounds their rows included."""
    total = {"bf16": 0.0, "int8_linear": 0.0, "fp8_linear": 0.0, "fp8_linear, fast": 0.0}
    for name, (*_, times) in SHAPES.items():
        us = results.get(f"{name} {rows}", {}).get("us", {})
        for key in list(total) if times else ():
            if key not in us:
                total.pop(key)
                continue
            total[key] += times * (us[key] + (0.0 if key == "bf16" else us["quantize_rows"])) / 1000
    return {key: round(value, 2) for key, value in total.items()}


def main(path: Path) -> None:
    start = time.perf_counter()
    products = [Product(name) for name in SHAPES]
    with warmup():  # compiled at once, in threads
        for product in products:
            x = quantize_rows(rand(ROWS[0], product.k))
            for shape in product.tiles:
                product.caller(int8_linear.triton, x, ROWS[0], shape=shape)(product.int8[0])
            for rows in ROWS:  # those chosen by size
                product.caller(int8_linear.triton, quantize_rows(rand(rows, product.k)), rows)(product.int8[0])
            product.caller(in_passes, x, ROWS[0])(product.int8[0])
    result = {"case": "int8-linear", "date": now(), "commit": commit(), "machine": machine(DEVICE)}
    result |= {
        "dtype": str(DTYPE),
        "tile": " ".join(Shape._fields),
        "compiled_s": round(time.perf_counter() - start, 1),
    }
    results = result["products"] = {}
    for product in products:
        for rows in (rows for rows in ROWS if rows <= product.most_rows):
            found = results[f"{product.name} {rows}"] = measured(product, rows)
            print(f"{product.name} {rows}", found["us"], found["tile"], found["tiles_us"], flush=True)
            path.write_text(json.dumps(result, indent=1) + "\n")
    result["rounding_us"] = {str(rows): rounding(rows) for rows in ROWS[-2:]}
    result["prefill_ms"] = {str(rows): prefill(results, rows) for rows in ROWS}
    result["took_s"] = round(time.perf_counter() - start, 1)
    print(result["rounding_us"], result["prefill_ms"], result["took_s"])
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    with torch.no_grad():
        main(Path(sys.argv[1]))
