"""Numbers of float8 on cards that lack it: by its bits, as torch has them."""

import pytest
import torch
from accel_kernels import Quantized, dequantize

from support.kernels.compiler import in_a_process

pytest.importorskip("triton")

COMPILE = """
import torch
from accel_kernels import dequantize
from support.kernels.absent_gpu import GPU, absent_gpu

case = next(case for case in dequantize.cases if case.name == "fp8")
for arch in (80, 90):
    with absent_gpu(arch) as found:
        args, more = case.make(GPU, torch.bfloat16)
        assert dequantize.supports(*args, **more) is None
        dequantize.triton(*args, **more)
    assert all(launch.compiled().asm["cubin"] for launch in found)
    print(len(found))
"""


def test_kernels_that_read_them_compile(tmp_path):
    assert in_a_process(COMPILE, tmp_path).split() == ["1", "1"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
def test_every_number_is_torchs():
    data = torch.arange(256, dtype=torch.uint8).repeat(8, 1).T.contiguous().view(torch.float8_e4m3fn)
    held = Quantized.of(data, torch.rand(256, 1))
    found, wanted = dequantize.triton(held, torch.float32), data.float() * held.scales
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num().view(torch.uint8), wanted.nan_to_num().view(torch.uint8))
