"""Tiles of products by blocks, for a while."""

import json
import sys
import time
from functools import partial
from pathlib import Path

import torch
from accel_kernels import block_linear
from accel_kernels.gemm.blocks.block_gemv_mma_triton import BlockGemvTile
from accel_kernels.gemm.blocks.block_skinny_mma_triton import BlockSkinnyTile

from benchmarks.kernels.shapes import SHAPES, Product
from benchmarks.kernels.timer import compile_ahead, rand, times_us

ONE = {
    4096: [(8, 4, 2), (8, 8, 2), (4, 8, 4), (16, 4, 1), (16, 8, 1)],
    14336: [(16, 4, 1), (8, 4, 2), (8, 8, 1), (16, 8, 1), (4, 8, 2)],
}
FEW = {
    2: [(32, 8, 4, 2), (16, 8, 4, 2)],
    8: [(32, 8, 4, 2), (32, 8, 4, 1), (16, 8, 4, 2), (32, 16, 2, 1), (16, 16, 4, 1)],
    16: [(32, 8, 4, 1), (32, 8, 2, 2), (16, 8, 4, 2), (64, 8, 2, 1), (32, 4, 4, 2), (32, 16, 2, 1)],
}


def main(out, formats, rows, quick=0):
    begin, found = time.time(), []
    for format in formats.split(","):
        products = {name: Product(sizes, format) for name, sizes in SHAPES["llama-8b"].products.items()}
        jobs = []
        for name, product in products.items():
            for m in map(int, rows.split(",")):
                torch.manual_seed(m)
                x, given = rand(m, product.k), product.given(m)
                tiles = [BlockGemvTile(*t) for t in ONE[product.k]] if m == 1 else [BlockSkinnyTile(*t) for t in FEW[m]]
                for tile in tiles:
                    jobs.append((name, product, m, x, given, tile))
        took = compile_ahead(
            [partial(p.call, block_linear.triton, x, p.sets[0], given, tile=t) for _, p, _, x, given, t in jobs]
        )
        print(format, "compiled in", took, "at", round(time.time() - begin), flush=True)
        for name, product in products.items():
            for m in map(int, rows.split(",")):
                mine = [j for j in jobs if j[0] == name and j[2] == m]
                runs, wrong = {}, {}
                for _, p, _, x, given, tile in mine:
                    exact, own = p.exact(x, given), p.call(block_linear.instead, x, p.sets[0], given)
                    scale = float(exact.abs().max())
                    try:
                        y = p.call(block_linear.triton, x, p.sets[0], given, tile=tile)
                        off, theirs = (float((one.float() - exact).abs().max()) / scale for one in (y, own))
                        wrong[str(tuple(tile))] = (off, theirs)
                        runs[str(tuple(tile))] = [
                            partial(p.call, block_linear.triton, x, ws, given, tile=tile) for ws in p.sets
                        ]
                    except Exception as error:
                        print("failed", format, name, m, tile, str(error)[:200], flush=True)
                times = times_us(runs, lambda name, error: print("failed", name, str(error)[:100]))
                for tile, us in times.items():
                    off, theirs = wrong[tile]
                    flag = "" if off <= 2 * theirs else f"  WRONG {off:.1e} {theirs:.1e}"
                    found.append(
                        {
                            "format": format,
                            "product": name,
                            "rows": m,
                            "tile": tile,
                            "us": us,
                            "error": off,
                            "torch": theirs,
                        }
                    )
                    print(
                        f"{format:11} {name:8} {m:3} {tile:15} {us:8.2f} us {product.nbytes / us / 1e6:5.2f} TB/s{flag}",
                        flush=True,
                    )
        del products, jobs
        Path(out).write_text(json.dumps(found))
    sums = {}
    for row in found:
        key = (row["format"], row["rows"])
        best = sums.setdefault(key, {})
        best[row["product"]] = min(best.get(row["product"], 1e9), row["us"])
    for key, best in sums.items():
        print(*key, "best of all tiles, ms:", round(32 * sum(best.values()) / 1e3, 3), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
