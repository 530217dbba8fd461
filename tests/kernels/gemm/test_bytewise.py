"""Numbers of float8 on cards that lack it: by its bits, as torch has them."""

import pytest
import torch
from accel_kernels import Quantized, dequantize, quantized_linear
from accel_kernels.gemm.quantized_weight import quantize_weight

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


@pytest.mark.turns(2)
def test_kernels_that_read_them_compile(tmp_path):
    assert in_a_process(COMPILE, tmp_path).split() == ["1", "1"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
def test_every_number_is_torchs():
    data = torch.arange(256, dtype=torch.uint8).repeat(8, 1).T.contiguous().view(torch.float8_e4m3fn)
    held = Quantized.of(data, torch.rand(256, 1))
    found, wanted = dequantize.triton(held, torch.float32), data.float() * held.scales
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num().view(torch.uint8), wanted.nan_to_num().view(torch.uint8))


GROUPED = [(torch.float32, 32, 64), (torch.bfloat16, 32, 512), (torch.float32, 0, 512)]


@pytest.mark.parametrize("scales, group, most", GROUPED)
def test_how_many_rows_read_it_as_it_lies(scales, group, most):
    """Scales in float32 by group suit only the kernel of many rows, which is slower than writing the weight out."""
    weight = quantize_weight(torch.ones(8, 64), torch.int8, group, False)
    weight = weight._replace(scales=weight.scales.to(scales))
    assert weight.most_rows == most
    reason = quantized_linear.supports(torch.ones(most + 1, 64, dtype=torch.bfloat16), weight)
    assert reason is not None and f"more than {most}" in reason
