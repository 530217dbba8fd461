"""Products of few rows on tensor cores."""

import pytest
import torch

pytest.importorskip("triton")

from accel_kernels.gemm import epilogue_triton as epilogue
from accel_kernels.gemm.quantized import gemv_mma_triton as gemv_mma
from accel_kernels.gemm.quantized import write_triton as quantized_write
from accel_kernels.gemm.quantized.gemv_mma_triton import GemvTile
from accel_kernels.gemm.quantized.operands import mma_operands_triton as fragments
from accel_kernels.gemm.quantized.quantized_linear import INT4, INT8, quantized_linear
from accel_kernels.gemm.quantized_weight import quantize_weight

from support.everything import EVERYTHING
from support.kernels.compiler import in_a_process
from support.kernels.few_rows import check_product, machine_with
from support.kernels.numbers import spread
from support.kernels.warpgroups import launching


def device():
    modules, layouts = (fragments, epilogue, quantized_write, gemv_mma), ("words_layout", "x_layout", "squares_layout")
    machine, names = machine_with(modules, *layouts, _spread=spread, COLUMNS=128)
    return machine, names["gemv_mma_kernel"]


# columns, outputs, group, zeros, gate, norm, and warps, spans ahead, programs; with zeros, columns in another order
CASES = {
    "groups of 64, rms": (1024, 70, 64, False, False, "rms", (4, 4, 2)),
    "groups of 64, gate, zeros": (512, 50, 64, True, True, "gemma", (8, 4, 1)),
    "groups of 128, uneven": (1664, 83, 128, False, False, "none", (2, 5, 1)),
    "groups of 128, gate, a block a program": (2048, 41, 128, False, True, "rms", (2, 3, 4)),
    "groups of 32, zeros": (640, 20, 32, True, False, "layer", (4, 1, 1)),
    "a scale a row, spans for some warps alone": (640, 40, 0, False, False, "rms", (4, 4, 1)),
    "groups of 384, gate, zeros": (768, 24, 384, True, True, "none", (16, 4, 1)),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernel")
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_emulated(case, monkeypatch):
    k, n, group, zeros, gate, norm, tile = case
    generator = torch.Generator().manual_seed(0)

    def rand(*size):
        return torch.randn(*size, generator=generator).bfloat16()

    weight, up = (quantize_weight(rand(n, k) * k**-0.5 + (0.01 if zeros else 0), INT4, group, zeros) for _ in range(2))
    if zeros:
        order = torch.randperm(k, generator=generator).int()
        weight, up = weight._replace(order=order), up._replace(order=order)
    assert gemv_mma.refusal(rand(1, k), weight, up if gate else None) is None
    monkeypatch.setattr(gemv_mma, "launch", launching(device))
    check_product(rand, 1, weight, up if gate else None, norm, GemvTile(*tile))


def test_tiles():
    """A factor of x to a warp, programs for all multiprocessors; and what does not fit is left to another kernel."""
    for n, k, group, gate in ((6144, 4096, 64, False), (12288, 4096, 128, True), (4096, 14336, 128, False)):
        tile = gemv_mma.gemv_tile(n, k, group, gate, 132)
        assert tile.warps * tile.programs == 16
        assert gemv_mma.steps_of(k, tile.warps) * max(1, 128 // group) <= 8
    assert gemv_mma.gemv_tile(4096, 14336, 64, False, 132) is None


def test_refusals():
    x, weight = torch.randn(1, 256).bfloat16(), quantize_weight(torch.randn(64, 256).bfloat16(), INT4, 64)
    assert gemv_mma.refusal(x, weight, None) is None
    wide = weight._replace(scales=weight.scales.float())
    narrow = quantize_weight(torch.randn(64, 192).bfloat16(), INT4, 64)
    assert "scales of torch.float32" in gemv_mma.refusal(x, wide, None)
    assert "2 rows" in gemv_mma.refusal(x.expand(2, 256), weight, None)
    assert "192 columns" in gemv_mma.refusal(x[:, :192], narrow, None)
    assert "not of 4 bits" in gemv_mma.refusal(x, quantize_weight(torch.randn(64, 256), INT8), None)
    long = quantize_weight(torch.randn(64, 2304).bfloat16(), INT4, 64)
    with pytest.raises(ValueError, match="4 warps to 2304 columns: 5 spans of 2 scales each"):
        quantized_linear.triton(torch.randn(1, 2304).bfloat16(), long, shape=GemvTile(4, 4, 4))
    assert "multiple of 16 bytes" in gemv_mma.refusal(torch.randn(260).bfloat16()[1:257], weight, None)


CHECK = """
import re
import torch
from accel_kernels import Norm, quantized_linear
from accel_kernels.gemm.quantized.gemv_mma_triton import GemvTile
from accel_kernels.gemm.quantized.quantized_linear import INT4
from accel_kernels.gemm.quantized_weight import quantize_weight
from support.kernels.absent_gpu import absent_gpu

with absent_gpu(90) as launches:
    weight, up = (quantize_weight(torch.randn(4096, 1024).bfloat16(), INT4, 64) for _ in range(2))
    x = torch.randn(1, 1024).bfloat16()
    quantized_linear.triton(x, weight, up=up, activation="silu", shape=GemvTile(4, 4, 4))
(launch,) = launches
assert launch.name == "gemv_mma_kernel"
ptx = launch.compiled().asm["ptx"]
walk = ptx[ptx.index("mma.sync"):ptx.rindex("mma.sync")]
assert "m16n8k16" in walk and "shared" not in walk and "bar.sync" not in walk
with absent_gpu(90) as launches:  # nothing runs before them that puts x in order, or norms it
    weight, norm = weight._replace(order=torch.randperm(1024).int()), Norm(torch.randn(1024).bfloat16(), None, 1e-5)
    for rows in (1, 4):
        quantized_linear.triton(torch.randn(rows, 1024).bfloat16(), weight, norm=norm)
launched = [launch.name for launch in launches]
assert launched == ["gemv_mma_kernel", "permute_activations_kernel", "skinny_wgmma_kernel"], launched
# Words by 16 bytes; of the two spans of a warp in a block, and of as many ahead.
assert len(re.findall(r"ld.global[.a-zA-Z0-9:_]*evict_first[.a-zA-Z0-9:_]*.v4.b32", ptx)) == 2 * 2 * 3
print("registers")
"""


@pytest.mark.turns(2)
def test_between_the_products_nothing_passes_through_shared_memory(tmp_path):
    assert in_a_process(CHECK, tmp_path).strip() == "registers"


SKINNY_CHECK = """
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
def test_nor_between_skinny_products(tmp_path):
    assert in_a_process(SKINNY_CHECK, tmp_path).strip() == "registers"
