"""How fast the GPU reads a matrix by how many bytes of a row a warp asks for at once; nothing is computed.

python benchmarks/read_patterns.py OUT.json: kernels of few rows lay out what they read by what the tensor cores take,
64 bytes each of eight rows, and reach 3 TB/s where whole rows give 4. Shapes of Llama-3.1-8B in 8 and 4 bits.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
from accel_kernels.warmup import launch, warmup
from decode_chain import milliseconds
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from accel.bench.machine import commit, machine, now

SHAPES = {
    "gate, int8": (14336, 4096),
    "down, int8": (4096, 14336),
    "out, int8": (4096, 4096),
    "gate, int4": (14336, 2048),
}
LANES, WARPS, ROWS, DEPTHS = (4, 8, 16, 32), (1, 4, 8), (8, 16, 32), (2, 4)


@constexpr_function
def layout(warps, across, rows, words):
    """(rows, words): a thread has four neighbors, `across` lanes one row, warps lie behind one another in it."""
    lanes, registers, width, height = [], [[0, 1], [0, 2]], 4, 1
    for lane in range(5):
        if 2**lane < across:
            lanes.append([0, width])
            width *= 2
        else:
            lanes.append([height, 0])
            height *= 2
    shares = []
    while 2 ** len(shares) < warps:
        shares.append([0, width])
        width *= 2
    while height < rows:
        registers.append([height, 0])
        height *= 2
    return gl.DistributedLinearLayout(registers, lanes, shares, [], [rows, words])


@gluon.jit
def read_kernel(w_ptr, y_ptr, K: gl.constexpr, ROWS: gl.constexpr, WORDS: gl.constexpr, ACROSS: gl.constexpr,
                DEPTH: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """The sums of ROWS rows of K words each, DEPTH steps of WORDS on their way at a time."""
    L: gl.constexpr = layout(num_warps, ACROSS, ROWS, WORDS)
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    column = gl.expand_dims(gl.arange(0, WORDS, layout=gl.SliceLayout(0, L)), 0)
    at = w_ptr + gl.expand_dims(row.to(gl.int64) * K, 1) + column
    ring = ()
    for ahead in gl.static_range(DEPTH):
        ring = ring + (gl.load(at + ahead * WORDS, mask=column + ahead * WORDS < K, other=0),)
    read = gl.zeros([ROWS, WORDS], gl.int32, L)
    for start in range(0, K, WORDS * DEPTH):
        for part in gl.static_range(DEPTH):
            read ^= ring[0]
            far = start + (part + DEPTH) * WORDS
            ring = ring[1:] + (gl.load(at + far, mask=column + far < K, other=0),)
    gl.store(y_ptr + row, gl.sum(read, axis=1))


def main(path: Path) -> None:
    found = []
    for name, (n, row_bytes) in SHAPES.items():
        k = row_bytes // 4
        weights = [
            torch.ones(n, k, device="cuda", dtype=torch.int32) for _ in range(max(2, 500_000_000 // (n * k * 4)))
        ]
        y = torch.empty(n, device="cuda", dtype=torch.int32)
        kinds = [
            (across, warps, rows, depth)
            for across in LANES for warps in WARPS for rows in ROWS for depth in DEPTHS
            if rows * across >= 32 and 4 * across * warps <= k
        ]  # fmt: skip

        def read(kind, some, n=n, k=k, y=y):
            across, warps, rows, depth = kind
            flags = {"K": k, "ROWS": rows, "WORDS": 4 * across * warps, "ACROSS": across, "DEPTH": depth}
            for weight in some:
                launch(read_kernel, (n // rows,), weight, y, **flags, num_warps=warps)

        with warmup():
            for kind in kinds:
                read(kind, weights[:1])
        for kind in kinds:
            us = 1e3 * milliseconds(partial(read, kind, weights)) / len(weights)
            across, warps, rows, depth = kind
            found.append({"shape": name, "bytes of a row": 16 * across, "warps": warps, "rows": rows, "depth": depth,
                          "us": round(us, 2), "tb_per_s": round(n * k * 4 / us / 1e6, 2)})  # fmt: skip
        for across in LANES:
            best = min((one for one in found if one["shape"] == name and one["bytes of a row"] == 16 * across),
                       key=lambda one: one["us"])  # fmt: skip
            print(best, flush=True)
    result = {"case": "read-patterns", "date": now(), "commit": commit(), "machine": machine(torch.device("cuda"))}
    path.write_text(json.dumps(result | {"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
