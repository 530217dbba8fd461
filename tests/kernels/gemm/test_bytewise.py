"""Weights of whole bytes: float8 by its bits, as torch has it."""

import pytest
import torch
from accel_kernels.gemm.blocks.block_weight import BlockWeight
from accel_kernels.gemm.blocks.bytewise import FP8, Bytewise

from support.kernels.compiler import in_a_process

pytest.importorskip("triton")

COMPILE = """
import torch
from accel_kernels import block_linear, dequantize_blocks
from support.kernels.absent_gpu import GPU, absent_gpu

for arch in (80, 90):
    with absent_gpu(arch) as found:
        for case in dequantize_blocks.cases:
            if case.name in ("fp8", "fp8-powers", "int8", "bf16"):
                args, more = case.make(GPU, torch.bfloat16)
                dequantize_blocks.triton(*args, **more)
        case = next(case for case in block_linear.cases if case.name == "fp8-rms")
        args, more = case.make(GPU, torch.bfloat16)
        block_linear.triton(*args, **more)
    assert all(launch.compiled().asm["cubin"] for launch in found)
    print(len(found))
"""


def test_kernels_that_read_them_compile(tmp_path):
    assert in_a_process(COMPILE, tmp_path).split() == ["5", "5"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
@pytest.mark.parametrize("scales", ["float32", "powers of two"])
def test_every_number_is_torchs(scales):
    from accel_kernels import dequantize_blocks

    data = torch.arange(256, dtype=torch.uint8).repeat(32, 1).T.contiguous().reshape(256, 32)
    beside = torch.rand(256, 1) if scales == "float32" else torch.arange(256, dtype=torch.uint8).reshape(256, 1)
    held = BlockWeight(data, 32, FP8, side=Bytewise.of(beside, None, (256, 32), (1, 32)))
    factor = beside if scales == "float32" else beside.view(torch.float8_e8m0fnu).float()
    wanted = data.view(torch.float8_e4m3fn).float() * factor
    for found in (held.dequantized(torch.float32), dequantize_blocks.triton(held, torch.float32)):
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.nan_to_num().view(torch.uint8), wanted.nan_to_num().view(torch.uint8))
