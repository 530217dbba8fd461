"""The product with numbers in the tensor cores' registers: no interpreter runs it, so here it is compiled and read."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

CHECK = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from accel_kernels.gemm.quantized import skinny_mma_triton as quantized_mma
from accel_kernels.gemm.quantized.skinny_mma_triton import Tile

for arch, format, rows, gate, norm, tile in (
    (80, "int8", 8, False, False, Tile(16, 8, 2)), (80, "int4", 8, True, True, Tile(32, 4, 1)),
    (80, "int4", 64, False, False, Tile(32, 8, 1)), (90, "int8", 8, False, False, Tile(16, 8, 2)),
    (90, "fp8", 16, False, False, Tile(32, 8, 1)),
):
    kernel, types, constants, warps = quantized_mma.compile_case(format, rows, gate, norm, tile)
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    target, options = GPUTarget("cuda", arch, 32), {"num_warps": warps}
    compiled = triton.compile(GluonASTSource(kernel, signature, constants, aligned), target, options)
    ptx = compiled.asm["ptx"]
    walk = ptx[ptx.index("mma.sync"):ptx.rindex("mma.sync")]
    assert "m16n8k16" in walk and "shared" not in walk and "bar.sync" not in walk, format
    words = "v4" if rows <= 16 or format != "int4" else "v2"
    assert re.search(rf"ld.global[.a-z0-9:]*.{words}.b32", ptx), format
print("registers")
"""


def test_between_the_products_nothing_passes_through_shared_memory(tmp_path):
    environment = dict(os.environ, TRITON_CACHE_DIR=str(tmp_path), PYTHONPATH="kernels", TRITON_DEFAULT_FP_FUSION="1",
                       TRITON_DISABLE_LINE_INFO="1")  # fmt: skip
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "registers", done.stderr[-2000:]
