"""The product with numbers in the tensor cores' registers: no interpreter runs it, so here it is compiled and read."""

import pytest

pytest.importorskip("triton")

from support.everything import EVERYTHING
from support.kernels.compiler import in_a_process

CHECK = """
import re
import torch
from accel_kernels import Norm, quantized_linear
from accel_kernels.gemm.quantized.quantized_linear import FP8, INT4, INT8
from accel_kernels.gemm.quantized.skinny_mma_triton import Tile
from accel_kernels.gemm.quantized_weight import quantize_weight
from support.kernels.absent_gpu import absent_gpu

for arch, format, rows, gate, tile in (
    (80, INT8, 8, False, Tile(16, 8, 2)), (80, INT4, 8, True, Tile(32, 4, 1)),
    (80, INT4, 64, False, Tile(32, 8, 1)), (90, INT8, 8, False, Tile(16, 8, 2)),
    (90, FP8, 16, False, Tile(32, 8, 1)),
):
    with absent_gpu(arch) as launches:
        weight, up = (
            quantize_weight(torch.randn(4096, 4096).bfloat16(), format, 128 if format == INT4 else 0, gate)
            for _ in range(2)
        )
        gated = {"up": up, "activation": "silu", "norm": Norm(torch.randn(4096).bfloat16(), None, 1e-5)}
        x = torch.randn(rows, 4096).bfloat16()
        quantized_linear.triton(x, weight, shape=tile, **gated if gate else {"residual": x})
    (launch,) = launches
    assert launch.name == "skinny_mma_kernel"
    compiled = launch.compiled()
    ptx = compiled.asm["ptx"]
    walk = ptx[ptx.index("mma.sync"):ptx.rindex("mma.sync")]
    assert "m16n8k16" in walk and "shared" not in walk and "bar.sync" not in walk, format
    words = "v4" if rows <= 16 or format != INT4 else "v2"
    assert re.search(rf"ld.global[.a-z0-9:]*.{words}.b32", ptx), format
print("registers")
"""


@pytest.mark.skipif(not EVERYTHING, reason="gemv_mma unpacks alike; its test runs always")
def test_between_the_products_nothing_passes_through_shared_memory(tmp_path):
    assert in_a_process(CHECK, tmp_path).strip() == "registers"
