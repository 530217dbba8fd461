"""Products of 65 to 512 rows, for the four of a layer of a Llama-3.1-8B shape: bf16, and weights in fewer bits by tile.

python benchmarks/many_rows.py OUT.json [--toy] [ROWS,ROWS...]: microseconds, norm, gate and residual included, over
weights that no cache holds, in CUDA graphs. bf16: by torch, and by the fastest of cuBLASLt's algorithms; gate and up
also as one product, for which their weights do not lie today. int8, int4 and fp8: written out for cuBLAS, by the tile
that is chosen, and by others; one is timed only where its error against fp32 is at most twice that of the weight
written out. `layers`: the sums over the 32 layers of a step, in milliseconds. All is written as soon as it is known.
--toy: tiny shapes on a CPU, in Triton's interpreter.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch

TOY = "--toy" in sys.argv
if TOY:
    os.environ["TRITON_INTERPRET"] = "1"

from accel_kernels import Norm, quantized_linear  # noqa: E402
from accel_kernels.elementwise.gated import gated  # noqa: E402
from accel_kernels.gemm.fused_linear import apply_norm  # noqa: E402
from accel_kernels.gemm.fused_linear import in_passes as full_in_passes  # noqa: E402
from accel_kernels.gemm.linear import LinearChooser, torch_linear  # noqa: E402
from accel_kernels.gemm.quantized.many_rows_triton import ManyRowsTile  # noqa: E402
from accel_kernels.gemm.quantized.quantized_linear import FP8, INT4, INT8, in_passes  # noqa: E402
from accel_kernels.gemm.quantized.tile_triton import WgmmaTile  # noqa: E402
from accel_kernels.gemm.quantized_weight import quantize_weight  # noqa: E402
from accel_kernels.warmup import warmup  # noqa: E402
from int8_linear import DEVICE, DTYPE, LAYERS, SHAPES, UNIT, microseconds, rand  # noqa: E402

from accel.bench.machine import commit, machine, now  # noqa: E402

ROWS = (70,) if TOY else (96, 128, 144, 192, 256, 384, 512)
KINDS = {"int8": (INT8, 0), "int4": (INT4, 32 if TOY else 128), "fp8": (FP8, 0)}
NAMES = [name for name in SHAPES if name != "head"]
LEAST_BYTES = 0 if TOY else 3e8  # of weights to a measurement
# Of others the compiler runs out of registers, and makes every product wait for the one before.
EIGHT_BITS = [
    WgmmaTile(256, 8, 3, 2, 1, 128), WgmmaTile(128, 8, 4, 3, 1, 128), WgmmaTile(128, 8, 6, 2, 1, 128),
    WgmmaTile(128, 8, 4, 2, 1, 256), WgmmaTile(64, 4, 4, 2, 2, 128), WgmmaTile(256, 8, 4, 3, 1, 64),
    WgmmaTile(128, 8, 6, 4, 1, 64), WgmmaTile(64, 4, 6, 3, 2, 64),
]  # fmt: skip
FOUR_BITS = [
    WgmmaTile(128, 8, 4, 2, 1, 128), WgmmaTile(256, 8, 3, 2, 1, 64), WgmmaTile(128, 8, 5, 3, 1, 64),
    WgmmaTile(64, 4, 4, 2, 2, 64),
]  # fmt: skip
ANYWHERE = [
    ManyRowsTile(128, 128, 64, 8, 4), ManyRowsTile(128, 64, 64, 8, 4), ManyRowsTile(128, 64, 64, 4, 4),
    ManyRowsTile(64, 128, 64, 4, 4), ManyRowsTile(128, 128, 128, 8, 3),
]  # fmt: skip
if TOY:
    EIGHT_BITS, FOUR_BITS, ANYWHERE = [], [], [ManyRowsTile(64, 32, 64, 4, 2)]


class Weights:
    """Of one product, distinct ones, in all formats: lists of a weight, or of it and its gate's."""

    def __init__(self, name: str):
        n, k, self.gate, self.residual, *_ = SHAPES[name]
        self.name, self.n, self.k = name, n // UNIT, k // UNIT
        self.norm = Norm(rand(self.k), None, 1e-5) if name in ("qkv", "gate-up") else None
        each = 2 if self.gate else 1
        size = self.n * self.k * each
        self.full = self._sets(each, max(2, -(-LEAST_BYTES // (2 * size))), lambda w: w)
        self.quantized = {
            kind: self._sets(
                each, max(2, -(-LEAST_BYTES // (size // (2 if kind == "int4" else 1)))),
                partial(quantize_weight, dtype=dtype, group=group),
            )
            for kind, (dtype, group) in KINDS.items()
            if not TOY or kind != "fp8"
        }  # fmt: skip

    def _sets(self, each: int, count: float, made) -> list[list]:
        """Few random matrices, copied: quantizing so many would take minutes."""
        first = [made(rand(self.n, self.k, spread=self.k**-0.5)) for _ in range(each)]

        def copied(one):
            return one.clone() if isinstance(one, torch.Tensor) else one.each(torch.clone)

        return [first, *([copied(one) for one in first] for _ in range(int(count) - 1))]

    def call(self, op, x, residual, weights: list, **more):
        gate = {"up": weights[1], "activation": "silu"} if self.gate else {}
        return op(x, weights[0], norm=self.norm, residual=residual, **gate, **more)


def tiles(kind: str) -> list:
    return [*(FOUR_BITS if kind == "int4" else EIGHT_BITS), *ANYWHERE]


def as_one(x, norm, linear, weight: torch.Tensor) -> torch.Tensor:
    """A gated product of both weights in one storage."""
    return gated(*linear(apply_norm(x, norm), weight).chunk(2, dim=-1), "silu")


def measured(product: Weights, rows: int) -> dict:
    torch.manual_seed(rows)
    x, residual = rand(rows, product.k), rand(rows, product.n) if product.residual else None
    chooser = LinearChooser()

    def us(op, sets, **more) -> float:
        return microseconds(partial(product.call, op, x, residual, **more), sets)

    found: dict = {"bf16": us(full_in_passes, product.full)}
    found["bf16 cublaslt"] = us(partial(full_in_passes, linear=chooser), product.full)
    if product.gate:
        stacked = [torch.cat(one) for one in product.full]
        found["bf16 gate and up as one"] = microseconds(partial(as_one, x, product.norm, torch_linear), stacked)
        found["bf16 gate and up as one cublaslt"] = microseconds(partial(as_one, x, product.norm, chooser), stacked)
        del stacked
    for kind, sets in product.quantized.items():
        wide = [one.dequantized(torch.float32) for one in sets[0]]
        norm = product.norm and product.norm._replace(weight=product.norm.weight.float())
        gate = {"up": wide[1], "activation": "silu"} if product.gate else {}
        added = None if residual is None else residual.float()
        right = full_in_passes(x.float(), wide[0], norm=norm, residual=added, **gate)

        def error(y, right=right):
            return ((y.double() - right.double()).norm() / right.double().norm()).item()

        own = error(product.call(in_passes, x, residual, sets[0]))
        found[kind] = {"written out": us(in_passes, sets)}
        for tile in (None, *tiles(kind)):
            key = "chosen" if tile is None else f"{type(tile).__name__} {' '.join(map(str, tile))}"
            try:
                mine = error(product.call(quantized_linear.triton, x, residual, sets[0], shape=tile))
            except Exception as reason:
                found[kind][key] = str(reason).splitlines()[0][:80]
                continue
            if not mine <= (4 if TOY else 2) * own:  # the interpreter cuts bf16 off
                found[kind][key] = f"error {mine:.2e}, written out {own:.2e}"
                continue
            found[kind][key] = us(quantized_linear.triton, sets, shape=tile)
    return found


def layers(results: dict, rows: int) -> dict:
    """Milliseconds of all layers' products: bf16 both ways, and of each kind written out, as chosen, and at best."""
    of = [results[f"{name} {rows}"] for name in NAMES]
    sums = {way: sum(one[way] for one in of) for way in ("bf16", "bf16 cublaslt")}
    for kind in (kind for kind in KINDS if kind in of[0]):
        for way in ("written out", "chosen"):
            times = [one[kind].get(way) for one in of]
            if all(isinstance(time, float) for time in times):
                sums[f"{kind} {way}"] = sum(times)
        sums[f"{kind} best"] = sum(min(t for t in one[kind].values() if isinstance(t, float)) for one in of)
    return {way: round(LAYERS * us / 1000, 3) for way, us in sums.items()}


def main(path: Path, numbers: tuple[int, ...]) -> None:
    products = [Weights(name) for name in NAMES]
    with warmup():  # compiled at once, in threads
        for product in products:
            for rows in {min(numbers), max(numbers)}:
                x, residual = rand(rows, product.k), rand(rows, product.n) if product.residual else None
                for kind, sets in product.quantized.items():
                    for tile in tiles(kind):
                        try:
                            product.call(quantized_linear.triton, x, residual, sets[0], shape=tile)
                        except ValueError:  # told where it is measured
                            continue
    result = {"case": "many-rows", "date": now(), "commit": commit(), "machine": machine(DEVICE), "dtype": str(DTYPE)}
    result |= {"us": {}, "layers": {}}
    for rows in numbers:
        for product in products:
            found = result["us"][f"{product.name} {rows}"] = measured(product, rows)
            print(product.name, rows, json.dumps(found), flush=True)
            path.write_text(json.dumps(result, indent=1) + "\n")
        result["layers"][str(rows)] = layers(result["us"], rows)
        print("layers", rows, result["layers"][str(rows)], flush=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    given = [word for word in sys.argv[1:] if not word.startswith("--")]
    with torch.no_grad():
        main(Path(given[0]), tuple(map(int, given[1].split(","))) if len(given) > 1 else ROWS)
