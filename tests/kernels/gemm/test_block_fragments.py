"""Few rows times weights in blocks on tensor cores."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from accel_kernels.gemm import epilogue_triton as epilogue
from accel_kernels.gemm.blocks.affine import affine_case
from accel_kernels.gemm.blocks.fragments import block_gemv_mma_triton as gemv
from accel_kernels.gemm.blocks.fragments import block_scales_triton as scales
from accel_kernels.gemm.blocks.fragments import block_skinny_mma_triton as skinny
from accel_kernels.gemm.blocks.fragments import units_triton as units
from accel_kernels.gemm.quantized import write_triton as quantized_write
from accel_kernels.gemm.quantized.gemv_mma_triton import GemvTile
from accel_kernels.gemm.quantized.operands import mma_operands_triton as fragments

from support.kernels.few_rows import check_product, machine_with
from support.kernels.warpgroups import Array, launching


def device(kernel):
    machine, names = machine_with(
        (fragments, epilogue, quantized_write, units, scales, gemv, skinny),
        *("words_layout", "x_layout", "scales_layout", "squares_layout"),
        _of_unit=lambda values, unit, rows, layout: Array(values.data[:, :, unit, None].repeat(rows, 2)),
        UNIT=64, SPAN=256, SET=512, SIGNS=0x88888888,
    )  # fmt: skip
    return machine, names[kernel]


# rows, columns, outputs, group, gate, norm, and warps, units ahead, programs, rows of a block
CASES = {
    "a row, rms": (1, 1280, 37, 128, False, "rms", (4, 4, 2)),
    "a row, gate, groups of 64": (1, 768, 21, 64, True, "gemma", (8, 2, 1)),
    "a row, gate, groups of 32": (1, 768, 21, 32, True, "rms", (2, 2, 1)),
    "rows, groups of 96": (2, 768, 20, 96, False, "none", (2, 4, 1)),
    "a row, one group": (1, 512, 40, 512, False, "none", (1, 4, 1)),
    "rows": (3, 768, 37, 256, False, "none", (2, 4, 2)),
    "more rows": (37, 512, 70, 128, False, "none", (1, 2, 3)),
    "more rows, gate": (17, 256, 20, 64, True, "none", (1, 4, 9, 32)),
    "rows, gate": (11, 512, 45, 128, True, "rms", (4, 4, 1, 32)),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_emulated(case, monkeypatch):
    rows, k, n, group, gate, norm, tile = case
    generator = torch.Generator().manual_seed(0)

    def rand(*size):
        return torch.randn(*size, generator=generator).bfloat16()

    weight, up = (affine_case(rand(n, k) * k**-0.5, group) for _ in range(2))
    kernel, module = ("block_gemv_mma_kernel", gemv.launch_row.__globals__) if rows == 1 else (
        "block_skinny_mma_kernel", vars(skinny))  # fmt: skip
    monkeypatch.setitem(module, "launch", launching(partial(device, kernel)))
    check_product(rand, rows, weight, up if gate else None, norm, GemvTile(*tile))
