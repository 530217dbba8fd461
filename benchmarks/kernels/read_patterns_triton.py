"""How fast a GPU reads a matrix by how many bytes of a row a warp asks for at once; nothing is computed.

Kernels of few rows lay out what they read by what the tensor cores take,
64 bytes each of eight rows, and reach 3 TB/s where whole rows give 4. Shapes of Llama-3.1-8B in 8 and 4 bits.
"""

from functools import partial
from itertools import product
from pathlib import Path

import torch
from accel_kernels.warmup import launch
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from benchmarks.kernels.timer import compile_ahead, time_us
from benchmarks.study import Study

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


def read(weight: torch.Tensor, y: torch.Tensor, across: int, warps: int, rows: int, depth: int) -> None:
    n, k = weight.shape
    flags = {"K": k, "ROWS": rows, "WORDS": 4 * across * warps, "ACROSS": across, "DEPTH": depth}
    launch(read_kernel, (n // rows,), weight, y, **flags, num_warps=warps)


def main(out: Path) -> None:
    """Needs a GPU."""
    record = Study("read-patterns", out, "a matrix read, microseconds", dtype=torch.int32, rows=[])
    for name, (n, row_bytes) in SHAPES.items():
        k = row_bytes // 4
        count = max(2, 500_000_000 // (n * k * 4))
        weights = [torch.ones(n, k, device="cuda", dtype=torch.int32) for _ in range(count)]
        y = torch.empty(n, device="cuda", dtype=torch.int32)
        kinds = [kind for kind in product(LANES, WARPS, ROWS, DEPTHS)
                 if kind[2] * kind[0] >= 32 and 4 * kind[0] * kind[1] <= k]  # fmt: skip
        compile_ahead([partial(read, weights[0], y, *kind) for kind in kinds])
        for kind in kinds:
            us = time_us(*(partial(read, weight, y, *kind) for weight in weights))
            across, warps, rows, depth = kind
            row = {"shape": name, "bytes of a row": 16 * across, "warps": warps, "rows": rows, "depth": depth}
            record.add("rows", row | {"us": us, "tb_s": round(n * k * 4 / us / 1e6, 2)})
