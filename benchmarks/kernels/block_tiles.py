"""Tiles of products by blocks, for a while."""

import json
import sys
import time
from functools import partial
from pathlib import Path

import torch
from accel_kernels import block_linear
from accel_kernels.gemm.blocks.fragments.block_gemv_mma_triton import BlockGemvTile
from accel_kernels.gemm.blocks.fragments.block_skinny_mma_triton import BlockSkinnyTile
from accel_kernels.gemm.blocks.fragments.block_wgmma_triton import BlockWgmmaTile

from benchmarks.kernels.shapes import SHAPES, Product
from benchmarks.kernels.timer import compile_ahead, rand, times_us

G, S, W = BlockGemvTile, BlockSkinnyTile, BlockWgmmaTile
ONE = {
    4096: [G(8, 4, 2), G(8, 8, 2), G(4, 4, 4)],
    14336: [G(8, 4, 2), G(8, 8, 2), G(4, 4, 4), G(16, 4, 1)],
}
WIDE = [G(8, 4, 2, False), G(8, 8, 2, False), G(16, 4, 1, False)]
MORE = {
    2: [S(16, 8, 4, 2), S(32, 4, 4, 2)],
    8: [S(16, 8, 4, 2), S(32, 4, 4, 2)],
    16: [S(32, 8, 4, 1), S(32, 4, 4, 2), S(16, 8, 4, 2), W(16, 4, 4, 2)],
    32: [W(32, 4, 4, 1), W(32, 4, 4, 2)],
    64: [W(64, 4, 4, 2)],
    128: [W(128, 4, 4, 1)],
    512: [W(128, 4, 4, 1)],
}


def main(out, limit, *specs):
    """specs: formats:rows."""
    begin, found, jobs = time.time(), [], []
    products = {}
    for spec in specs:
        formats, rows = spec.split(":")
        for format in formats.split(","):
            for m in map(int, rows.split(",")):
                for name, sizes in SHAPES["llama-8b"].products.items():
                    product = products.setdefault((format, name), None) or Product(sizes, format)
                    products[format, name] = product
                    torch.manual_seed(m)
                    x, given = rand(m, product.k), product.given(m)
                    jobs.append(
                        (
                            format,
                            name,
                            m,
                            product,
                            x,
                            given,
                            (ONE[product.k] + WIDE * sizes.gate) if m == 1 else MORE[m],
                        )
                    )
    calls = [
        partial(p.call, block_linear.triton, x, p.sets[0], given, tile=t)
        for _, _, _, p, x, given, tiles in jobs
        for t in tiles
    ]
    print(len(calls), "compiled in", compile_ahead(calls), "at", round(time.time() - begin), flush=True)
    sums = {}
    for format, name, m, p, x, given, tiles in jobs:
        if time.time() - begin > float(limit):
            print("no time for", format, name, m)
            continue
        exact, own = p.exact(x, given), p.call(block_linear.instead, x, p.sets[0], given)
        scale = float(exact.abs().max())
        theirs = float((own.float() - exact).abs().max()) / scale
        runs, off = {}, {}
        for tile in tiles:
            key = f"{type(tile).__name__[5:9]}{tuple(tile)}"
            try:
                y = p.call(block_linear.triton, x, p.sets[0], given, tile=tile)
                off[key] = float((y.float() - exact).abs().max()) / scale
                runs[key] = [partial(p.call, block_linear.triton, x, ws, given, tile=tile) for ws in p.sets]
            except Exception as error:
                print("failed", format, name, m, key, str(error)[:200], flush=True)
        times = times_us(runs, lambda name, error: print("failed", name, str(error)[:100]))
        for key, us in times.items():
            flag = "" if off[key] <= 2 * theirs else f"  WRONG {off[key]:.1e} {theirs:.1e}"
            found.append({"format": format, "product": name, "rows": m, "tile": key, "us": us, "error": off[key]})
            print(f"{format:11} {name:8} {m:3} {key:20} {us:8.2f} us {p.nbytes / us / 1e6:5.2f} TB/s{flag}", flush=True)
        if times:
            sums.setdefault((format, m), []).append(min(times.values()))
        Path(out).write_text(json.dumps(found))
    for key, best in sums.items():
        print(*key, "best of all tiles, ms:", round(32 * sum(best) / 1e3, 3), len(best), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
